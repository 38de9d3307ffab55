"""How sharp the judge is: every fault of the stand-in that guard can see, at random moments, on a fake clock.

    python -m benchmarks.guard_sharp [--onsets 200] [--seed 1] [--cores 2] [--only NAME]

Found means: within the condition's own window and three looks, under its own name. Exit 1 when a fault is found in less than
99 % of its onsets, or when any other condition that could lead to an action held meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time

from lab.guard.faults import CASES, Case, Outcome, play

LEAST = 0.99


def _play(name: str, seed: int) -> Outcome:
    return play(next(case for case in CASES if case.name == name), seed)


def row(case: Case, found: list[Outcome]) -> str:
    """One line of the table."""
    times = sorted(one.found_s for one in found if one.found_s is not None)
    in_time, others = sum(one.is_in_time for one in found), sum(bool(one.others) for one in found)
    half, most = (times[len(times) // 2], times[-1]) if times else (float("nan"), float("nan"))
    window_s = max(one.window_s for one in found)
    own = "/".join(case.own)
    return f"{case.name:<20} {own:<12} {in_time:>4} of {len(found):<4} {half:>7.0f} {most:>7.0f} {window_s:>7.0f}   {others}"


def main() -> int:
    """Run them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--onsets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(
        f"{'fault':<20} {'condition':<12} {'in time':<12} {'median s':>7} {'most s':>7} {'window':>7}   other actions",
        flush=True,
    )
    is_well = True
    with multiprocessing.get_context("spawn").Pool(options.cores) as pool:
        for case in CASES:
            if options.only and not case.name.startswith(options.only):
                continue
            began = time.monotonic()
            seeds = range(options.seed * 10_007, options.seed * 10_007 + options.onsets)
            found = pool.map(functools.partial(_play, case.name), seeds, chunksize=max(1, min(10, options.onsets // 8)))
            print(row(case, found), flush=True)
            missed = [one for one in found if not one.is_in_time or one.others]
            for one in missed[:5]:
                print(f"    {one}", file=sys.stderr)
            print(f"    {case.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            is_well &= sum(one.is_in_time for one in found) >= LEAST * len(found) and not any(one.others for one in found)
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())

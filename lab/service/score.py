"""What the service runs on a GPU showed, and what simulate says of them: python -m lab.service.score [--write]

Reads lab/results/service-h200, replays its loads with step times fitted to other loads, and prints the tables of the second
part of docs/evidence.md; `--write` puts them there. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import simulate_h200
from lab.gpu.models import config_of
from lab.gpu.provoke_failures import HERE
from lab.marked import placed
from lab.service.predict import Errors, errors, fitted
from lab.service.runs import Load, by_setting, loads_in, measured
from plimsoll.simulate.fit import fit
from plimsoll.simulate.settings import StepTime

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "service-h200"
PAGE = ROOT / "docs" / "evidence.md"
MODEL = "llama-3.1-8b"
SIZES = (16, 32, 64, 128)
AT_ONCE = 56  # requests of the block sizes' load: all run together
ALLOWED = 0.07  # or twice what two runs of the same differ by
GIB = 1 << 30
PAIRS = (
    ("overload-none-1", "overload-shed-1"),
    ("overload-none-2", "overload-shed-2"),
    ("overload-shed-1", "overload-none-1"),
    ("overload-shed-2", "overload-none-2"),
    ("unlimited-1", "seats-24-1"),
    ("unlimited-2", "seats-24-2"),
    ("seats-24-1", "unlimited-1"),
    ("seats-24-2", "unlimited-2"),
)
"""Fitted to the first, the second foretold: settings change, the card and the hour do not."""
STARTS = (
    ("burst", "article", "cold"),
    ("burst", "tuned", "cold"),
    ("burst-again", "article", "warm"),
    ("burst-again", "tuned", "warm"),
)
"""A folder, a stage and what its first start found; a second start in the same stage found the cache warm."""
Row = Sequence[str]


class Seen(NamedTuple):
    """A load by the engine's own stamps."""

    duration_s: float
    ttft_s: float
    tpot_ms: float


class Spread(NamedTuple):
    """How far two runs of the same are apart, as shares of their mean."""

    duration: float
    ttft: float
    tpot: float


@cache
def all_loads() -> dict[str, Load]:
    """Every load that the tables speak of, by its name."""
    return {load.name: load for part in ("seats", "blocks-shed", "segments") for load in loads_in(RESULTS / part)}


@cache
def seen(name: str) -> Seen:
    """What the engine stamped."""
    run = measured(all_loads()[name])
    assert run.first_token_ns is not None
    ttft = (run.first_token_ns - run.trace.arrival_ns) / 1e9
    further = (run.finish_ns - run.first_token_ns) / (run.trace.output - 1)
    return Seen(float(run.finish_ns.max()) / 1e9, float(ttft.mean()), float(further.mean()) / 1e6)


def spread(setting: str) -> Spread:
    """Of the two runs of a setting."""
    both = [seen(load.name) for load in by_setting(list(all_loads().values()))[setting]]
    return Spread(*(abs(one - other) / ((one + other) / 2) for one, other in zip(both[0], both[1], strict=True)))


@cache
def _step_times(name: str) -> StepTime:
    with tempfile.TemporaryDirectory() as place:
        return fitted(all_loads()[name], _model_in(Path(place))).step_time


@cache
def foretold(fit_on: str, name: str) -> Errors:
    """One load replayed with the step times of another."""
    with tempfile.TemporaryDirectory() as place:
        return errors(all_loads()[name], _step_times(fit_on), _model_in(Path(place)))


def _model_in(folder: Path) -> Path:
    models = json.loads((HERE / "service_runs.json").read_text(encoding="utf-8"))["models"]
    (folder / "config.json").write_text(json.dumps(config_of(models, MODEL)), encoding="utf-8")
    return folder


def _table(head: str, rows: Iterable[Row]) -> list[str]:
    names = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(names)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _of_run(name: str, *keys: str) -> list[Any]:
    found: Any = all_loads()[name].found
    return [found[key] for key in keys]


# The parts


def kernel() -> list[str]:
    """Milliseconds of one attention kernel, by block size and by where the blocks lie."""
    rows = json.loads((RESULTS / "blocks-kernel.json").read_text(encoding="utf-8"))
    table = []
    for row in rows:
        times = {layout: row["layouts"][layout]["median_ms"] for layout in ("contiguous", "interleaved", "shuffled")}
        apart = max(times.values()) / min(times.values()) - 1
        shape = f"{row['requests']} x {row['tokens_each']:,}"
        table.append([shape, str(row["block_size"]), *(f"{one:.3f}" for one in times.values()), f"{apart:.1%}"])
    return _table("requests x tokens | block | contiguous, ms | interleaved | shuffled | furthest apart", table)


def blocks() -> list[str]:
    """The whole server at each block size: the first round computes the prompts, the two others find them in the cache."""
    table = []
    for size in SIZES:
        rounds = [seen(f"block-{size}-{number}") for number in (1, 2, 3)]
        each_s = 1e3 * AT_ONCE / statistics.mean(one.tpot_ms for one in rounds[1:])
        table.append([str(size), *(f"{one.tpot_ms:.2f}" for one in rounds), f"{each_s:,.0f}"])
    return _table("block | ms a token, round 1 | round 2 | round 3 | tokens a second in rounds 2 and 3", table)


def shed() -> list[str]:
    """Thirty requests a second for twenty seconds, to a server that finishes eighteen."""
    table = []
    for name in ("overload-none-1", "overload-none-2", "overload-shed-1", "overload-shed-2"):
        good, each_s, done, told, ttft, preempted, failed = _of_run(
            name, "good", "good_per_s", "requests_per_s", "told_to_wait", "ttft_ms", "num_preemptions_total", "failed"
        )
        table.append(
            [name, f"{good} of 600", f"{each_s:.2f}", f"{done:.2f}", f"{ttft['p50'] / 1e3:.1f}", f"{ttft['p99'] / 1e3:.1f}",
             f"{told:,}", f"{preempted:.0f}", str(failed)]
        )  # fmt: skip
    head = "run | as promised | a second | finished a second | TTFT, half, s | 99 % | told to wait | preempted | failed"
    return _table(head, table)


def seats() -> list[str]:
    """The same 150 requests at once, with and without a limit."""
    table = []
    for name in ("unlimited-1", "unlimited-2", "seats-24-1", "seats-24-2"):
        done, preempted, most = _of_run(name, "requests_per_s", "num_preemptions_total", "most_running")
        run = seen(name)
        table.append(
            [
                name,
                f"{run.duration_s:.1f}",
                f"{done:.2f}",
                f"{run.ttft_s:.1f}",
                f"{run.tpot_ms:.1f}",
                f"{preempted:.0f}",
                f"{most:.0f}",
            ]
        )
    return _table("run | seconds | requests a second | mean TTFT, s | mean TPOT, ms | preempted | most at once", table)


def segments() -> list[str]:
    """Torch's memory with and without expandable_segments under one load."""
    table = []
    for setting in ("segments-off", "segments-on"):
        stage = json.loads((RESULTS / "segments" / f"{setting}.json").read_text(encoding="utf-8"))
        rows = stage["series"][0]["rows"]
        high = max(row["reserved"] for row in rows) / GIB
        idle = max(row["reserved"] - row["allocated"] for row in rows) / GIB
        done = _of_run(f"{setting}-1", "requests_per_s")[0]
        grown = (rows[-1]["reserved"] - rows[0]["reserved"]) / GIB
        table.append(
            [
                setting,
                f"{high:.2f}",
                f"{grown:+.2f}",
                f"{idle:.2f}",
                f"{rows[-1]['alloc_retries']}",
                f"{rows[-1]['ooms']}",
                f"{done:.2f}",
            ]
        )
    head = "run | reserved at most, GiB | grown | unused at most | retries | failed allocations | requests a second"
    return _table(head, table)


def starts() -> list[str]:
    """How long a server is away when it is started again, against a compaction."""
    table = []
    for part, stage, first in STARTS:
        steps = json.loads((RESULTS / part / f"{stage}.json").read_text(encoding="utf-8"))["steps"]
        waits = [row["said"]["ready_after_s"] for row in steps if row["step"][0] == "start"]
        table += [[stage, "warm" if number else first, f"{wait:.0f}"] for number, wait in enumerate(waits)]
    kept = json.loads((RESULTS / "segments" / "segments-on.json").read_text(encoding="utf-8"))["steps"]
    said = next(row["said"] for row in kept if row["step"][0] == "say")["workers"][0]
    rows = [[f"start of `{name}`", cache_is, f"{wait} s, with no answer to anybody"] for name, cache_is, wait in table]
    given = f"{said['returned'] / GIB:.2f} GiB given back"
    return _table(
        "what | compile cache | takes", [*rows, ["compaction", given, f"{1e3 * said['duration_s']:.0f} ms of one step"]]
    )


def predictions() -> list[str]:
    """Simulate against the runs, each fitted to another."""
    rows = [foretold_row(fit_on, name) for fit_on, name in PAIRS]
    return _table("fitted to | foretold | duration | mean TTFT | mean TPOT | preemptions", rows)


def foretold_row(fit_on: str, name: str) -> list[str]:
    """How far off one load was, and how far it may be."""
    found, allowed = foretold(fit_on, name), [max(ALLOWED, 2 * one) for one in noise(fit_on, name)]
    cells = [_judged(error, limit) for error, limit in zip(found[:3], allowed, strict=True)]
    return [fit_on, name, *cells, f"{found.preemptions} for {found.preemptions_measured}"]


def another_day() -> list[str]:
    """The same with step times of four runs of the day before, with other flags and traffic, on another card of the kind."""
    table = []
    for fit_on in simulate_h200.BLOCKS:
        run = simulate_h200.load(fit_on)
        times = fit(run, simulate_h200.settings_of(fit_on), start=simulate_h200.data_sheet()).step_time
        with tempfile.TemporaryDirectory() as place:
            found = errors(all_loads()["overload-none-1"], times, _model_in(Path(place)))
        cells = [_judged(error, ALLOWED) for error in found[:3]]
        table.append([fit_on, *cells, f"{found.preemptions} for {found.preemptions_measured}"])
    return _table("fitted to | duration | mean TTFT | mean TPOT | preemptions", table)


def noise(fit_on: str, name: str) -> Spread:
    """The larger spread of the two settings."""
    both = (spread(all_loads()[fit_on].setting), spread(all_loads()[name].setting))
    return Spread(*(max(pair) for pair in zip(*both, strict=True)))


def _judged(error: float, allowed: float) -> str:
    text = f"{error:+.1%} (of {allowed:.0%})"
    return text if abs(error) <= allowed else f"**{text}**"


PARTS: tuple[tuple[str, Callable[[], list[str]]], ...] = (
    ("kernel", kernel),
    ("blocks", blocks),
    ("shed", shed),
    ("seats", seats),
    ("segments", segments),
    ("starts", starts),
    ("predictions", predictions),
    ("another day", another_day),
)


def main(arguments: list[str]) -> int:
    """Print every table; with --write, put each between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    for name, part in PARTS:
        made = "\n".join(part())
        print(f"{name}\n\n{made}\n")
        if "--write" in arguments:
            text = placed(text, f"<!-- {name} -->", f"<!-- end of {name} -->", f"\n\n{made}\n\n", PAGE)
    if "--write" in arguments:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

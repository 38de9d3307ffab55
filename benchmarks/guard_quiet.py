"""How quiet the judge is: weeks of healthy traffic on a fake clock, a look every 5, 15 or 30 seconds.

    python -m benchmarks.guard_quiet [--days 70] [--seed 1] [--cores 2] [--keep FILE]

Prints engine-days, looks, findings that could lead to an action (there must be none: exit 1 otherwise), how often the others
were said, and what the article's two rules would have said of the same engines. With --keep a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.guard.looks import EVERY_S
from lab.guard.weeks import KINDS, engine_for, week
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.guard.judge.tracker import Assessment, Tracker, no, yes
from plimsoll.unknown import Status

DAYS_EACH = 7
EVERY = (1, 3, 6)  # times five seconds, in turn
ARTICLE = ("article-cache", "article-queue")


def holds(rule: str, look: Look) -> Assessment:
    """Whether one of the article's rules is true: the cache is over 95 % full, or more than twice as many wait as run."""
    usage, running, waiting = (look.figures.get(name, 0.0) for name in ("kv_cache_usage", "running", "waiting"))
    is_true = usage > 0.95 if rule == "article-cache" else waiting > 2 * running
    return yes("RuleHolds", rule) if is_true else no("RuleDoesNotHold", rule)


class Task(NamedTuple):
    """One engine for some days."""

    number: int
    seed: int
    days: int


class Outcome(NamedTuple):
    """What was said of it."""

    task: Task
    kind: str
    looks: int
    said: Counter[str]
    acted: tuple[str, ...]
    judged_s: float
    took_s: float


def tasks(days: int, seed: int) -> Iterator[Task]:
    """As many weeks as make up the days; the last may be shorter."""
    for number in range(-(-days // DAYS_EACH)):
        yield Task(number, seed * 100_003 + number, min(DAYS_EACH, days - number * DAYS_EACH))


def judge_week(task: Task) -> Outcome:
    """One engine: every kind of traffic in turn, on every engine in turn."""
    kind = KINDS[task.number % len(KINDS)]
    engine = engine_for(kind, task.number)
    every = EVERY[task.number % len(EVERY)]
    judge = Judge(f"engine-{task.number}", Policy(every_s=every * EVERY_S))
    article = [Tracker(name, 300.0, 60.0, every * EVERY_S) for name in ARTICLE]
    said: Counter[str] = Counter()
    holding: set[str] = set()
    acted = []
    looks, judged_s, began_s = 0, 0.0, time.perf_counter()
    gc.collect()
    gc.freeze()
    for look in week(kind, engine, task.seed, task.days, every):
        before_s = time.perf_counter()
        changes = judge.see(look)
        judged_s += time.perf_counter() - before_s
        changes += tuple(tracker.see(holds(tracker.kind, look), look.at_s) for tracker in article)
        looks += 1
        for change in changes:
            name = change.kind
            if change.is_true:
                said[name] += name not in holding  # one that could not be told for a look is not said anew
                holding.add(name)
                if name in GRADES:
                    acted.append(f"{kind.name}, seed {task.seed}, {look.at_s / 3600:.2f} h: {change}")
            elif change.status is Status.FALSE:
                holding.discard(name)
    return Outcome(task, kind.name, looks, said, tuple(acted), judged_s, time.perf_counter() - began_s)


def kept(path: Path | None) -> list[Outcome]:
    """What an earlier run has done."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [Outcome(Task(*row[0]), row[1], row[2], Counter(row[3]), tuple(row[4]), *row[5:]) for row in rows]


def run(days: int, seed: int, cores: int, path: Path | None = None) -> list[Outcome]:
    """All of them, with a line of progress."""
    found, began = kept(path), time.monotonic()
    is_done = {one.task for one in found}
    all_tasks = [task for task in tasks(days, seed) if task not in is_done]
    before = sum(one.task.days for one in found)
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        for outcome in pool.imap_unordered(judge_week, all_tasks):
            found.append(outcome)
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(outcome) + "\n")
            done = sum(one.task.days for one in found)
            left_s = (time.monotonic() - began) / (done - before) * (days - done)
            word = f"{done} of {days} engine-days, {sum(len(one.acted) for one in found)} actions, {left_s / 60:.0f} min left"
            print(word, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return found


def report(found: list[Outcome], wall_s: float) -> str:
    """The figures."""
    days, looks = sum(one.task.days for one in found), sum(one.looks for one in found)
    said: Counter[str] = sum((one.said for one in found), Counter())
    own = [kind for kind in said if not kind.startswith("article")]
    judged_us, took_us = (
        sum(times) / looks * 1e6 for times in zip(*((one.judged_s, one.took_s) for one in found), strict=True)
    )
    lines = [
        f"{days} engine-days, {looks:,} looks, {wall_s / 60:.1f} min",
        f"{judged_us:.0f} us a look for the judge, {took_us:.0f} us with the engine and the look",
        f"findings that could lead to an action: {sum(len(one.acted) for one in found)}",
        f"advice: {sum(said[kind] for kind in own if kind not in GRADES) / days:.2f} an engine-day",
    ]
    lines += [f"    {kind:<14} {said[kind]:>6}  {said[kind] / days:.3f} an engine-day" for kind in sorted(own)]
    lines += ["what the article's rules would have said"]
    lines += [f"    {kind:<14} {said[kind]:>6}  {said[kind] / days:.3f} an engine-day" for kind in sorted(set(said) - set(own))]
    lines += [f"{'by traffic':<18} days  advice"]
    for name in dict.fromkeys(one.kind for one in found):
        mine = [one for one in found if one.kind == name]
        kinds: Counter[str] = sum((one.said for one in mine), Counter())
        words = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()) if not kind.startswith("article"))
        lines.append(f"{name:<18} {sum(one.task.days for one in mine):>4}  {words or 'none'}")
    return "\n".join([*lines, *(text for one in found for text in one.acted)])


def main() -> int:
    """Run them and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--days", type=int, default=70)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--keep", type=Path, metavar="FILE")
    options = parser.parse_args()
    began = time.monotonic()
    found = run(options.days, options.seed, options.cores, options.keep)
    print(report(found, time.monotonic() - began))
    return 1 if any(one.acted for one in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())

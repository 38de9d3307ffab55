"""Records the shapes that the tests of the alert rules are fed with: a stand-in, looked at every 15 s as Prometheus would.

    python -m lab.record_shapes

writes `src/plimsoll/assets/data/shapes.json`: for each shape what happened, and each figure in promtool's notation. Seeded: the
same every time. Figures have our own names; what a release calls them is put in when the tests are written.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.guard.faults import Load
from lab.guard.looks import Sight, Watched
from lab.guard.weeks import CHAT, DOCUMENTS, ENGINES, ESSAYS, FITTING, FORMS, LARGE, Engine, Mix, carries, launch, lengths
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.standin import StandIn
from plimsoll.standin.faults import FOREVER, Fault

TARGET = Path(__file__).parents[1] / "src" / "plimsoll" / "assets" / "data" / "shapes.json"
EVERY_S = 5.0
KEPT = 3
"""Every third look is kept, 15 s apart; of shapes that last for hours one in five minutes."""
MIB = float(1 << 20)
L4 = ENGINES[0]
FULL = 42  # 32 fill the cache; some of the others end before the next look
WORKER = {
    "allocated": "allocated", "reserved": "reserved", "releasable": "releasable", "unreleasable": "unreleasable",
    "retries": "retries", "device_free": "device_free", "device_total": "device_total", "by_others": "by_others",
    "worker_resident": "host_resident",
}  # fmt: skip

Turn = Callable[["Run", float], None]


class Run:
    """One engine and its load; what it does is decided at every turn."""

    def __init__(self, seed: int, mix: Mix, engine: Engine = L4) -> None:
        self.engine = StandIn(launch(engine).config)
        self.carries = carries(engine, mix)
        self.load = Load(mix, 0.0, seed)
        self.watched = Watched(self.engine, Sight(has_canary=False, has_cards=False), random.Random(seed))

    def looks(self, seconds: float, turn: Turn) -> list[Look]:
        """One each 5 s."""

        def feed(engine: StandIn, from_s: float, to_s: float) -> None:
            turn(self, from_s)
            if engine.is_up:
                self.load(engine, from_s, to_s)

        return list(self.watched.looks(seconds, feed, EVERY_S))

    def send(self, count: int, mix: Mix, seed: int) -> None:
        """So many at once."""
        prompts, outputs = lengths(mix, np.random.default_rng(seed), count)
        self.engine.send([self.engine.now_s] * count, prompts.tolist(), outputs.tolist())


class Shape(NamedTuple):
    """One to record."""

    name: str
    about: str
    seconds: float
    turn: Turn
    mix: Mix = CHAT
    engine: Engine = L4
    seed: int = 7


def _night(run: Run, now_s: float) -> None:
    """An evening that ends, three hours of nothing, and everybody at once in the morning."""
    run.load.rate = 0.4 * run.carries if now_s < 900 else 0.0 if now_s < 11_700 else 0.6 * run.carries


def _burst(run: Run, now_s: float) -> None:
    """A calm server that is asked for sixty answers within a moment, twice."""
    run.load.rate = 0.3 * run.carries
    if now_s in (600.0, 1200.0):
        run.send(60, CHAT, int(now_s))


def _restarts(at: tuple[float, ...], takes_s: float, share: float = 0.3) -> Turn:
    def turn(run: Run, now_s: float) -> None:
        run.load.rate = share * run.carries
        if now_s in at and run.engine.is_up:
            run.engine.restart(takes_s)

    return turn


def _storm(run: Run, now_s: float) -> None:
    """Long answers, more of them at once than the pool can hold."""
    run.load.rate, run.load.is_spread = 0.3 * run.carries, False  # the storm's own come in between
    if now_s == 600.0:
        run.engine.add_fault("preemption-storm@600s")


def _overload(run: Run, now_s: float) -> None:
    """Three times as much as it can do, from the tenth minute on."""
    run.load.rate = (3.0 if now_s >= 600 else 0.5) * run.carries


def _wedge(run: Run, now_s: float) -> None:
    """In the tenth minute no step ends any more, with work there."""
    run.load.rate = 0.5 * run.carries
    if now_s == 595.0:
        run.send(4, ESSAYS, 1)
        run.engine.add_fault("wedge@600s")


def _full(run: Run, now_s: float) -> None:
    """As many as keep the cache full, and always a few at the door: a busy, healthy server."""
    del now_s
    if (wanted := FULL - run.engine.figures.running - run.engine.figures.waiting) > 0:
        run.send(wanted, FORMS, run.engine.figures.steps)


def _death(run: Run, now_s: float) -> None:
    """The engine dies in the tenth minute and nobody starts it again."""
    run.load.rate = 0.3 * run.carries
    if now_s == 600.0:
        run.engine.add_fault("oom@600s")


def _growth(run: Run, now_s: float) -> None:
    """What the worker holds grows by some 100 MiB an hour, from the first hour on."""
    run.load.rate = 0.1 * run.carries
    if now_s == 3600.0:
        run.engine.add_fault(Fault("growth", now_s, FOREVER, 0.03 * MIB))


def _staircase(run: Run, now_s: float) -> None:
    """Longer and longer prompts for two hours, then the same: torch's memory grows to a plateau and stays."""
    run.load.rate = 0.1 * run.carries
    run.load.mix = CHAT._replace(prompt=600.0 + 600.0 * min(4, now_s // 1800))


def _host_growth(run: Run, now_s: float) -> None:
    """The worker's host memory grows by some 900 MiB an hour, from the first hour on."""
    run.load.rate = 0.1 * run.carries
    if now_s == 3600.0:
        run.engine.add_fault(Fault("host-growth", now_s, FOREVER, 0.25 * MIB))


def _neighbour(run: Run, now_s: float) -> None:
    """Another process takes all but 200 MiB of the card, and torch holds much that it does not use."""
    run.load.rate = 0.4 * run.carries
    if now_s == 1200.0:
        run.engine.add_fault(Fault("neighbour", now_s, FOREVER, run.engine.engine.memory.free - 200 * MIB))


SHAPES = (
    Shape("night", "15 min of evening traffic, three hours without a request, everybody back at once", 12_300, _night),
    Shape("burst", "30 % load; 60 requests at once in the 10th and the 20th minute", 1_800, _burst, engine=LARGE),
    Shape("reset", "30 % load; two restarts within a scrape: counters begin anew", 1_800, _restarts((600.0, 1200.0), 4.0)),
    Shape("restart", "30 % load; one restart that takes 150 s", 1_800, _restarts((600.0,), 150.0)),
    Shape("loop", "30 % load; four restarts of 45 s, 5 min apart", 2_400, _restarts((600.0, 900.0, 1200.0, 1500.0), 45.0)),
    Shape("storm", "30 % load; from the 10th minute on long answers that throw one another out", 1_800, _storm, ESSAYS),
    Shape("overload", "half of what it can do, from the 10th minute on three times that much", 1_800, _overload),
    Shape("wedge", "half of what it can do; no step from the 10th minute on, with work there", 1_500, _wedge),
    Shape("full", "a cache that is always full, with a few at the door", 1_800, _full, FORMS, FITTING),
    Shape("death", "30 % load; out of memory in the 10th minute, and nobody starts it again", 2_700, _death),
    Shape("growth", "light load, a leak of 108 MiB an hour from the first hour on", 28_800, _growth),
    Shape("staircase", "prompts grow for two hours, then stay: memory settles on a plateau", 28_800, _staircase),
    Shape("host-growth", "light load, a leak of 900 MiB an hour of host memory", 28_800, _host_growth),
    Shape("neighbour", "long prompts; another process comes in the 20th minute", 2_400, _neighbour, DOCUMENTS),
)  # fmt: skip
KEPT_OF = {"growth": 60, "staircase": 60, "host-growth": 60}


def recorded(shape: Shape) -> dict[str, object]:
    """Every figure of it."""
    looks = Run(shape.seed, shape.mix, shape.engine).looks(shape.seconds, shape.turn)
    keep = KEPT_OF.get(shape.name, KEPT)
    return {"about": shape.about, "every_s": EVERY_S * keep, "series": series_of(looks[keep - 1 :: keep])}


def series_of(looks: Iterable[Look]) -> dict[str, str]:
    """Every figure of these looks in promtool's notation."""
    series: dict[str, list[float | None]] = {}
    for place, look in enumerate(looks):
        for name, value in figures(look).items():
            series.setdefault(name, [None] * place).append(value)
        for values in series.values():
            values.extend([None] * (place + 1 - len(values)))
    return {name: written(values) for name, values in sorted(series.items())}


def figures(look: Look) -> dict[str, float | None]:
    """What Prometheus would have of it; `up` is its own."""
    if look.reach is not Reach.ANSWERS:
        return {"up": 0.0}
    found: dict[str, float | None] = {"up": 1.0, "wedged": 0.0, "ready": 1.0}
    if look.started_unix_s is not None:
        found["start_time"] = float(round(look.started_unix_s))
    for name, value in look.figures.items():
        if name not in ("asleep", "cpu_seconds"):  # guard judges by the second; no alert does
            found[name] = round(float(value), 4)
    # What a stand-in on a clock of its own has no server for: every request that ended was answered.
    found |= {"http_2xx": float(look.figures["success"]), "http_5xx": 0.0, "not_ready": 0.0}
    found["awake"] = 1.0 - look.figures["asleep"]
    for ours, theirs in WORKER.items() if look.workers else ():
        value = getattr(look.workers[0], theirs)
        # Bytes in whole MiB: a figure to the byte tells nobody more, and is longer to write.
        found[ours] = value if value is None or ours == "retries" else round(value / MIB) * MIB
    return found


# Series in promtool's own notation: `0+2x3` is 0 2 4 6, `5x2` is 5 5 5, `_x3` is nothing three times.


def written(values: Sequence[float | None]) -> str:
    """A series, with what goes on evenly in short. Differences are of whole numbers alone: others do not add up exactly."""
    return " ".join(_runs([None if value is None else float(value) for value in values]))


def _runs(values: Sequence[float | None]) -> Iterator[str]:
    place = 0
    while place < len(values):
        first = values[place]
        step, more = _evenly(values, place)
        place += more + 1
        if first is None:
            yield f"_x{more + 1}" if more else "_"
        elif more == 0:
            yield number(first)
        elif step == 0:
            yield f"{number(first)}x{more}"
        else:
            yield f"{number(first)}{'+' if step > 0 else '-'}{number(abs(step))}x{more}"


def _evenly(values: Sequence[float | None], place: int) -> tuple[float, int]:
    """By how much it goes on from here, and how many times."""
    first, more = values[place], 0
    after = values[place + 1] if place + 1 < len(values) else math.nan
    if first is None or after is None:
        while first is None and place + more + 1 < len(values) and values[place + more + 1] is None:
            more += 1
        return 0.0, more
    step = after - first
    if math.isnan(step) or (step != 0 and not (first.is_integer() and step.is_integer())):
        return 0.0, 0
    while place + more + 1 < len(values) and values[place + more + 1] == first + (more + 1) * step:
        more += 1
    return (step, more) if more > 1 or step == 0 else (0.0, 0)


def number(value: float) -> str:
    """A number as promtool reads it."""
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() else repr(value)


def main() -> None:
    """Write all of them."""
    lines = [f"{json.dumps(shape.name)}: {json.dumps(recorded(shape), indent=1)}" for shape in SHAPES]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

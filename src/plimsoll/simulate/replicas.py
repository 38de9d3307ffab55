"""Several engines behind a router: chooses each request's engine, then replays each engine to the step, then sums up.

A router decides at the moment of arrival from what it can know then. So all engines run together up to that moment
(`OpenRun`), the router chooses, and the next request comes. Once every request has its engine, each engine replays its own
part of the trace, exactly as if it were alone. The same trace, engines and router always give the same choices.

Data-parallel engines of a mixture of experts are not alone: in every step they exchange tokens, so that all of them wait for
the slowest, and one without work runs along (`Lockstep`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from plimsoll.simulate import layout as at
from plimsoll.simulate.open_run import FIRST_ROWS, OpenRun
from plimsoll.simulate.options import ROUTERS
from plimsoll.simulate.replay import (
    FOREVER,
    NEVER,
    PATIENCE_STEPS,
    OnProgress,
    Replay,
    Totals,
    never_finished,
    never_scheduled,
    replay,
    speed_up,
    told,
)
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import Integers, Trace, pick

ROUND_ROBIN, LEAST_LOAD, PREFIX, GATEWAY = ROUTERS
# The inference gateway's endpoint picker adds up scores between 0 and 1 and takes the highest sum. Weights and the number of
# blocks it remembers of each server are those of its default configuration (llm-d and the Gateway API inference extension).
QUEUE_WEIGHT, CACHE_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0
REMEMBERED_BLOCKS = 31_250
PROGRESS_EVERY = 500


class RoutedEngines(NamedTuple):
    """How many engines share the traffic, and how: each has a scheduler and a cache of its own."""

    number: int = 1
    router: str = LEAST_LOAD
    together: int = 1  # So many wait for each other in every step, as data-parallel ones of a mixture of experts do


ONE_ENGINE = RoutedEngines()


class RoutedEngine:
    """One engine as a router sees it."""

    def __init__(self, settings: EngineLimits, step_time: StepTime, prefix_block: int, first_rows: int = FIRST_ROWS) -> None:
        self.run = OpenRun(settings, step_time, prefix_block=prefix_block, first_rows=first_rows)
        self._given = 0
        self._seen: OrderedDict[int, None] = OrderedDict()  # chains of prefix ids that it was sent, the oldest first

    @property
    def in_flight(self) -> int:
        """Requests that it got and has not finished, the count of vLLM's own balancer of data-parallel ranks."""
        return self._given - sum(map(self.run.count, (at.FINISHED_COUNT, at.REJECTED_COUNT, at.REFUSED_COUNT)))

    def go_on(self, to_ns: int) -> None:
        """Runs every step that ends by then."""
        for _ in self.run.until(to_ns):
            pass

    def take(self, trace: Trace, request: int, arrival_ns: int) -> None:
        """Takes one request."""
        ids = trace.ids_of(request)
        prompt = max(1, int(trace.prompt[request]))
        tokens = min(prompt, len(ids) * trace.prefix_block)
        more = {"priority": int(trace.priority[request]), "adapter": int(trace.adapter[request])}
        self.run.submit(prompt, int(trace.output[request]), arrival_ns, ids=ids, ids_tokens=tokens, **more)
        self._given += 1
        for chain in chains_of(ids):
            self._seen[chain] = None
            self._seen.move_to_end(chain)
        while len(self._seen) > REMEMBERED_BLOCKS:
            self._seen.popitem(last=False)

    def seen(self, ids: Integers) -> int:
        """The number of a prompt's blocks, from its beginning on, that it was sent before."""
        return sum(1 for _ in takewhile(self._seen.__contains__, chains_of(ids)))

    def score(self, ids: Integers, fewest: int, most: int) -> float:
        """The sum of the gateway's scores: the queue among those of all engines, the free cache, and the prompt's blocks, from
        its beginning on, that it was sent before."""
        queue = 1.0 if most == fewest else (most - self.run.waiting) / (most - fewest)
        share = self.seen(ids) / len(ids) if len(ids) else 0.0
        return QUEUE_WEIGHT * queue + CACHE_WEIGHT * (1.0 - self.run.kv_usage) + PREFIX_WEIGHT * share


def chains_of(ids: Integers) -> Iterator[int]:
    """One number for each beginning of a prompt: equal where all ids up to there are."""
    return islice(accumulate(ids.tolist(), lambda chain, one: hash((chain, one)), initial=0), 1, None)


class Lockstep:
    """Engines that wait for each other: every step lasts as long as the slowest engine's.

    The next step is decided when the last one is over, with async scheduling too.
    """

    def __init__(self, engines: Sequence[RoutedEngine]) -> None:
        self._engines, self._patience = engines, PATIENCE_STEPS + 10 * engines[0].run.settings.max_model_len
        self._now = self._in_flight = self._rounds = 0  # the end of the step under way, or the last thing that happened

    def go_on(self, to_ns: int) -> None:
        """Runs every step that begins before then."""
        while self._now < to_ns:
            for engine in self._engines:
                engine.go_on(self._now)
            before, self._in_flight = self._in_flight, sum(engine.in_flight for engine in self._engines)
            self._rounds = self._rounds + 1 if self._in_flight == before else 0
            runs = [engine.run for engine in self._engines]
            under_way = [(run, end) for run in runs if (end := run.next_end_ns) is not None]
            if not under_way:
                return
            if self._rounds > self._patience:
                raise never_finished(sum(run.running for run in runs), sum(run.waiting for run in runs))
            self._now = max(end for _, end in under_way)
            for run, end in under_way:
                run.delay(self._now - end)

    def begin_ns(self, arrival_ns: int) -> int:
        """When a request that arrives now is looked at: after the step under way."""
        self._now = max(self._now, arrival_ns)
        return self._now


def route(
    trace: Trace,
    settings: EngineLimits,
    step_time: StepTime,
    routed: RoutedEngines,
    *,
    speedup: float = 1.0,
    on_progress: OnProgress | None = None,
) -> tuple[Integers, Sequence[RoutedEngine]]:
    """The engine of each request, from 0 on, and the engines: those that wait for each other as they are in the end."""
    number, router, together = routed
    if together == 1 and (number == 1 or router == ROUND_ROBIN):
        return np.arange(trace.size, dtype=np.int64) % number, ()
    limits, rows = (settings, FIRST_ROWS) if together == 1 else (settings.turned(async_scheduling=False), max(1, trace.size))
    engines = [RoutedEngine(limits, step_time, trace.prefix_block, rows) for _ in range(number)]
    groups = [Lockstep(engines[first : first + together]) for first in range(0, number, together)]
    chosen = np.zeros(trace.size, dtype=np.int64)
    for request, arrival in enumerate((speed_up(trace, speedup) + step_time.front_ns).tolist()):
        for part in engines if together == 1 else groups:
            part.go_on(arrival)
        chosen[request] = place = _choice(engines, router, trace, request)
        begin = arrival if together == 1 else groups[place // together].begin_ns(arrival)
        engines[place].take(trace, request, begin)
        if on_progress is not None and request % PROGRESS_EVERY == 0:
            on_progress(request, trace.size)
    for group in groups if together > 1 else ():
        group.go_on(FOREVER)
    return chosen, engines


def _choice(engines: Sequence[RoutedEngine], router: str, trace: Trace, request: int) -> int:
    """The engine that gets this request; the first of several equally good ones."""
    if router == ROUND_ROBIN:
        return request % len(engines)
    if router == LEAST_LOAD:
        return int(np.argmin([engine.in_flight for engine in engines]))
    waiting, ids = [engine.run.waiting for engine in engines], trace.ids_of(request)
    if router == PREFIX:
        return max(range(len(engines)), key=lambda place: (engines[place].seen(ids), -engines[place].in_flight))
    return int(np.argmax([engine.score(ids, min(waiting), max(waiting)) for engine in engines]))


def replay_routed(
    trace: Trace,
    settings: EngineLimits,
    step_time: StepTime,
    routed: RoutedEngines,
    *,
    speedup: float = 1.0,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[Integers, list[Replay]]:
    """The engine of each request, and each engine's replay."""
    begin = clock() if clock else 0.0
    chosen, engines = route(trace, settings, step_time, routed, speedup=speedup, on_progress=on_progress)
    if routed.together == 1:
        return chosen, replay_each(trace, settings, step_time, chosen, routed.number, speedup=speedup, clock=clock)
    if left := sum(engine.run.waiting for engine in engines):
        raise never_scheduled(left, settings)
    took, came = clock() - begin if clock else 0.0, speed_up(trace, speedup)
    rows = [np.flatnonzero(chosen == engine) for engine in range(routed.number)]
    return chosen, [
        told(pick(trace, mine), settings, step_time, *engine.run.ended(), came[mine], took / routed.number)
        for mine, engine in zip(rows, engines, strict=True)
    ]


def replay_each(
    trace: Trace,
    settings: EngineLimits,
    step_time: StepTime,
    engine_of: Integers,
    replicas: int,
    *,
    speedup: float = 1.0,
    clock: Callable[[], float] | None = None,
) -> list[Replay]:
    """Each engine's own replay; an engine that got no request has an empty one."""
    parts = [pick(trace, np.flatnonzero(engine_of == engine)) for engine in range(replicas)]
    return [replay(part, settings, step_time, speedup, clock=clock) for part in parts]


def merge_replays(trace: Trace, replays: Sequence[Replay], engine_of: Integers) -> Replay:
    """All engines as one run: requests in the trace's order, sums added, peaks the highest of any engine."""
    first = replays[0]
    rows = [np.flatnonzero(engine_of == engine) for engine in range(len(replays))]

    def gathered(name: str) -> Integers:
        found = np.full(trace.size, NEVER, dtype=getattr(first, name).dtype)
        for place, one in zip(rows, replays, strict=True):
            found[place] = getattr(one, name)
        return found

    peaks = ("end_ns", "peak_blocks", "peak_running", "peak_waiting")
    totals = {name: (max if name in peaks else sum)(getattr(one.totals, name) for one in replays) for name in Totals._fields}
    names = "arrival_ns first_sched_ns first_token_ns finish_ns produced preemptions cached_tokens is_rejected"
    arrays: dict[str, Any] = {name: gathered(name) for name in names.split()}
    return Replay(
        trace=trace,
        settings=first.settings,
        step_time=first.step_time,
        totals=Totals(**totals),
        **arrays,
        usage_ns=np.sum([one.usage_ns for one in replays], axis=0),
        wall_seconds=sum(one.wall_seconds for one in replays),
    )

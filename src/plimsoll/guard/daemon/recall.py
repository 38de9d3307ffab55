"""Asks Prometheus, once for each engine, what it remembers of it: growth is judged across guard's own restart.

Asked with the first look that was answered: only then it is known which process is there and since when. An engine that has
answered nobody yet has no past that would matter.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from plimsoll.doctor.read.prometheus import Span, ask_range
from plimsoll.doctor.rules.trend_growth import Series
from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.guard.adapters.discovery import Target
from plimsoll.guard.config import Prometheus
from plimsoll.guard.daemon.loop import Points
from plimsoll.guard.judge.look import Look
from plimsoll.net.http_get import address
from plimsoll.vllm.metrics import figure

# What a Prometheus server remembers of the memory of one engine, from its last start on: what guard was not there to see.

DAY_S = 86_400.0
STEP_S = 120.0
TIMEOUT_S = 10.0
_STARTED = "process_start_time_seconds"
_PROCESS = "process_resident_memory_bytes"
_ALLOCATED, _UNRELEASABLE = "plimsoll_torch_allocated_bytes", "plimsoll_torch_unreleasable_bytes"
_WORKER_HOST = "plimsoll_worker_resident_bytes"
_RUNNING, _TOKENS = figure("running").names, figure("generation_tokens").names
_NAMES = (_STARTED, _PROCESS, _ALLOCATED, _UNRELEASABLE, _WORKER_HOST, *_RUNNING, *_TOKENS)
_WHOSE = ("engine", "worker", "rank", "model_name")  # labels by which one engine's page tells its own parts apart
_SAME_START_S = 1.0

RecalledPoints = tuple[tuple[float, Mapping[str, float]], ...]


class Recalled(NamedTuple):
    """What is remembered, oldest first, times on the wall's clock; "held", "host_resident" and "running" where known."""

    points: RecalledPoints
    tokens: float | None = None  # ever made, when it was last asked: fewer now is another process


def recall(
    url: str,
    match: Mapping[str, str],
    started_unix_s: float | None,
    *,
    since_s: float = DAY_S,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.time,
) -> Recalled:
    """The last day of one engine, since its last start. Raises what a server that is not there or odd raises."""
    end_s = clock() // STEP_S * STEP_S  # the same moments whenever it is asked
    names = tuple(dict.fromkeys(_NAMES))
    found = ask_range(url, names, Span(end_s - since_s, end_s, STEP_S), match, timeout_s=timeout_s)
    return recalled(found, started_unix_s)


def recalled(found: Iterable[Series], started_unix_s: float | None) -> Recalled:
    """The same from series. Where nothing tells when the process began, nothing is remembered: it may be another one's."""
    by_name: dict[str, dict[float, dict[tuple[str, ...], float]]] = {}
    for one in found:
        whose = tuple(one.labels.get(label, "") for label in _WHOSE)
        rows = by_name.setdefault(one.name, {})
        for at, value in zip(one.times, one.values, strict=True):
            if not (math.isfinite(value) and value >= 0):
                continue
            if whose in rows.setdefault(at, {}):
                raise BadInput("several series are one engine's by these labels; say whose with labels")
            rows[at][whose] = value
    tokens = {at: sum(row.values()) for name in _TOKENS for at, row in by_name.get(name, {}).items()}
    moments = _since_start(by_name.get(_STARTED, {}), tokens, started_unix_s)
    columns = {
        "held": _held(by_name, moments),
        "host_resident": _sums(by_name.get(_WORKER_HOST) or by_name.get(_PROCESS, {}), moments),
        "running": {at: sum(row.values()) for name in _RUNNING for at, row in by_name.get(name, {}).items()},
    }
    points = [(at, {name: column[at] for name, column in columns.items() if at in column}) for at in moments]
    last = max(tokens.keys() & set(moments), default=None)
    return Recalled(tuple(point for point in points if point[1]), None if last is None else tokens[last])


def _since_start(
    starts: Mapping[float, Mapping[tuple[str, ...], float]], tokens: Mapping[float, float], started_unix_s: float | None
) -> list[float]:
    """The moments of which it is known that this process ran."""
    if started_unix_s is not None:
        is_it = {at: all(abs(one - started_unix_s) <= _SAME_START_S for one in row.values()) for at, row in starts.items()}
        others = [at for at, is_same in is_it.items() if not is_same]
        return [at for at in sorted(is_it) if is_it[at] and at > max(others, default=-math.inf) and at >= started_unix_s]
    moments = sorted(tokens)  # its page does not say when it began, as with several API servers: a total that falls does
    fell = [later for sooner, later in itertools.pairwise(moments) if tokens[later] < tokens[sooner]]
    return [at for at in moments if at >= max(fell, default=-math.inf)]


def _held(
    by_name: Mapping[str, Mapping[float, Mapping[tuple[str, ...], float]]], moments: Sequence[float]
) -> dict[float, float]:
    allocated, rest = _sums(by_name.get(_ALLOCATED, {}), moments), _sums(by_name.get(_UNRELEASABLE, {}), moments)
    return {at: allocated[at] + rest[at] for at in allocated.keys() & rest.keys()}


def _sums(rows: Mapping[float, Mapping[tuple[str, ...], float]], moments: Sequence[float]) -> dict[float, float]:
    """Only where all of those are there that are there at the end: a sum over some is no figure of the engine."""
    known = [at for at in moments if at in rows]
    whole = rows[known[-1]].keys() if known else ()
    return {at: sum(rows[at].values()) for at in known if rows[at].keys() == whole}


AT_ONCE = 4
WAIT_S = 30.0  # for its turn and for the answer: an engine's first judgement waits for it
REST_S = 60.0
NEW_S = 600.0  # an engine that began so lately need not be known yet
# What Prometheus's last figure may differ from what the engine says now. More, and it is another figure of the same name.
APART, APART_BYTES = 0.25, float(512 << 20)


class Recaller:
    """One Prometheus server."""

    def __init__(self, config: Prometheus, ask: Callable[..., Recalled] = recall) -> None:
        self._config, self._ask = config, ask
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="prometheus")
        self.said = f"prometheus {address(config.url).shown}"
        self._failed: dict[str, str] = {}  # by engine: why there is nothing from before
        self._rests_until_s, self._why = -math.inf, ""

    @property
    def trouble(self) -> str:
        """Why some have no past; empty when all have."""
        if not self._failed:
            return ""
        name, why = next(iter(self._failed.items()))
        more = f", and of {len(self._failed) - 1} more" if len(self._failed) > 1 else ""
        return f"{why}; growth of {name}{more} is judged from guard's own looks alone"

    async def fill(self, target: Target, look: Look) -> Points:
        """What is surely this engine's. It is asked for in a thread, and that has its deadline."""
        now = seen_in(look)
        if not now:
            return []  # nothing that could grow is known of it
        ask = functools.partial(self._asked, self._config.match(target), look.started_unix_s)
        try:
            async with asyncio.timeout(WAIT_S):
                found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except PlimsollError as error:
            self._failed[target.name] = str(error)
            return []
        except TimeoutError:
            self._failed[target.name] = f"it did not answer within {WAIT_S:g} s"
            return []
        points, why = fitting(found, look, now)
        if why:
            self._failed[target.name] = why
        return points

    def keep(self, names: Container[str]) -> None:
        """Forget the others: they are no longer watched."""
        self._failed = {name: why for name, why in self._failed.items() if name in names}

    def close(self) -> None:
        """Ask no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _asked(self, match: Mapping[str, str], started_unix_s: float | None) -> Recalled:
        """In a thread. A server that has just failed is not asked for each of hundreds of engines."""
        if time.monotonic() < self._rests_until_s:
            raise WorldFailed(self._why)
        try:
            return self._ask(self._config.url, match, started_unix_s)
        except WorldFailed as error:
            self._rests_until_s, self._why = time.monotonic() + REST_S, str(error)
            raise


def seen_in(look: Look) -> dict[str, float]:
    """The figures of memory that can grow, as this look shows them: of all workers, else of the process alone."""
    found: dict[str, list[float | None]] = {
        "held": [
            None if one.allocated is None or one.unreleasable is None else one.allocated + one.unreleasable
            for one in look.workers
        ],
        "host_resident": [one.host_resident for one in look.workers] or [look.figures.get("host_resident")],
    }
    known = {name: [one for one in row if one is not None] for name, row in found.items()}
    return {name: sum(row) for name, row in known.items() if row and len(row) == len(found[name])}


def fitting(found: Recalled, look: Look, now: Mapping[str, float]) -> tuple[Points, str]:
    """What fits what is seen now, on guard's own clock; and why not all of it does, where that is odd."""
    if not found.points:
        is_new = look.started_unix_s is not None and look.unix_s - look.started_unix_s < NEW_S
        return [], "" if is_new else "it knows nothing of an engine by these labels since its last start"
    made = look.figures.get("generation_tokens")
    if found.tokens is not None and made is not None and made < found.tokens:
        return [], ""  # another process than the one it saw: it has no past
    last = {name: value for _, row in found.points for name, value in row.items()}
    names = {name for name, value in now.items() if name in last and abs(value - last[name]) <= max(APART * value, APART_BYTES)}
    # Of an engine on this machine guard adds up the memory of all its processes; its page knows one of them.
    expected = set() if look.workers else {"host_resident"}
    odd = sorted(now.keys() & last.keys() - names - expected)
    why = f"its {' and '.join(odd)} is another figure than the engine's own" if odd else ""
    if not names:
        return [], why
    shift_s = look.at_s - look.unix_s
    points = [
        (at + shift_s, {name: value for name, value in row.items() if name in names or name == "running"})
        for at, row in found.points
    ]
    return [(at, row) for at, row in points if row and at < look.at_s], why

"""What a Prometheus server remembers of the memory of one engine, from its last start on: what guard was not there to see."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from plimsoll.domain.series import Series
from plimsoll.engine.metrics import figure
from plimsoll.errors import BadInput
from plimsoll.sources.prometheus import Span, ask_range

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

Points = tuple[tuple[float, Mapping[str, float]], ...]


class Recalled(NamedTuple):
    """What is remembered, oldest first, times on the wall's clock; "held", "host_resident" and "running" where known."""

    points: Points
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

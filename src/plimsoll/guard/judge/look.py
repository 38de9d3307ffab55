"""One look at one engine, as values, and the figures in it; figures that could not be read are absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from plimsoll.doctor.rules.contained import Survival


class Reach(StrEnum):
    """Outcome of a request for the page. Only the first two are knowledge about the engine."""

    ANSWERS = "answers"
    REFUSED = "refused"  # connection refused: the one failure that says something about the engine
    SILENT = "silent"  # no answer in time, or the way there is broken
    NONSENSE = "nonsense"  # an answer that is no page of metrics, is cut off or too large, or redirects


class WorkerMemory(NamedTuple):
    """The memory of one worker as its probe wrote it; None where unknown."""

    rank: str
    age_s: float
    allocated: float | None = None
    reserved: float | None = None
    releasable: float | None = None
    unreleasable: float | None = None
    retries: float | None = None
    ooms: float | None = None
    device_total: float | None = None
    device_free: float | None = None
    by_others: float | None = None
    host_resident: float | None = None
    host_limit: float | None = None
    # Its own figures from its start: the load line, and the parts that stay.
    requested: float | None = None
    weights: float | None = None
    kv_cache: float | None = None
    activation_peak: float | None = None
    graphs: float | None = None


class GateState(NamedTuple):
    """The report of plimsoll's gate on the engine behind it."""

    ready: bool
    reason: str
    in_flight: int
    engine_requests: int
    expected_wait_s: float | None = None
    last_step_age_s: float | None = None
    is_wedged: bool = False
    asleep: str = ""
    drain: str = "serving"
    epoch: int = 0  # the highest that it has seen
    ours: int = 0  # its requests that may be guard's own canary requests
    started: float | None = None  # when the process of this gate began; None from a gate that does not state it
    survival: Survival | None = None  # None where the plimsoll in the engine does not report it


class CoreFigures(NamedTuple):
    """One of several engine cores behind one page (data parallelism); None where the page does not show it."""

    name: str
    steps: float | None = None  # ever made
    running: float | None = None
    waiting: float | None = None


class CardState(NamedTuple):
    """The driver's report on one card that the engine runs on."""

    name: str
    xids: tuple[int, ...] = ()  # since the last look
    uncorrectable: int | None = None  # uncorrected ECC errors since guard began to look
    total: float | None = None
    free: float | None = None
    by_engine: float | None = None  # held by the engine's own processes
    use: float | None = None  # the share of the last moment in which a kernel ran on it


class BalancerHealth(NamedTuple):
    """A balancer's own checks and traffic of one engine; None where it does not report them."""

    is_down: bool | None  # by its own health check, outside any drain by guard
    silent_s: float | None = None  # since the last byte of an answer
    unseen: int = 0  # requests with the engine, whose bytes it counts only when they end: then silence is unknown


class Canary(NamedTuple):
    """The last canary request of one token."""

    at_s: float
    is_answered: bool | None  # None: it could not be sent, which says nothing
    seconds: float | None = None
    is_garbage: bool = False
    why: str = ""  # why it could not be sent, in words
    status: int | None = None  # of an answer that was no completion


class Look(NamedTuple):
    """One look. `at_s` is the guard's own steady clock, `unix_s` the wall's."""

    at_s: float
    unix_s: float
    reach: Reach
    why: str = ""  # in words, where it is not ANSWERS
    health: int | None = None  # the status of /health; None if it did not answer
    figures: Mapping[str, float] = {}
    """By our names; see vllm/metrics.py. Counters are totals since the engine's start; ratios run from 0 to 1."""
    started_unix_s: float | None = None
    vllm: str | None = None
    config: Mapping[str, str] = {}
    """What the engine says of its own settings: the labels of vllm:cache_config_info."""
    gate: GateState | None = None
    workers: tuple[WorkerMemory, ...] = ()
    cards: tuple[CardState, ...] = ()
    canary: Canary | None = None
    is_paused: bool | None = None
    is_rest_unknown: bool = False
    """Whether it is paused was asked, and the answer was lost on the way: it may rest."""
    ranks: tuple[CoreFigures, ...] = ()  # only where the page shows several
    container_restarts: int | None = None  # as its cluster counts them
    ended: str = ""  # its supervisor says, with evidence of a crash, that its process has ended and nobody starts it
    model: str | None = None  # the first name it is served by
    gone: str = ""  # its supervisor says that it does not run, without a reason
    failure: str = ""  # the kind of the failure that ended it, such as "illegal memory access"
    requests: str = ""  # the shapes of the requests that had begun by then, separated by "; "
    has_served: bool = False  # the journal knows that it answered before guard began
    balancer: BalancerHealth | None = None
    local_start: float | None = None  # start of the process that listens at its port on guard's own machine
    is_port_open: bool | None = None  # whether its port is open; None on another machine, and where it answers


COUNTERS = (
    "steps", "preemptions", "prompt_tokens", "generation_tokens", "success", "prefix_queries", "prefix_hits",
    "ttft_sum", "ttft_count", "inter_token_sum", "inter_token_count",  # of the latency histograms
)  # fmt: skip
GAUGES = ("running", "waiting", "kv_cache_usage")
WORKERS = ("held", "releasable", "device_free", "room", "retries", "ooms", "host_resident")
OWN = ("expected_wait", "engine_requests", "in_flight", "contained", *WORKERS)
TOTALS = (*COUNTERS, "contained")  # what only rises while one process lives
FINE = (*COUNTERS, *GAUGES, *OWN)
_MOST = 1e18
MEASURED = ("kv_cache_max_concurrency", "kv_cache_size_tokens", "num_gpu_blocks")  # of vllm:cache_config_info
MEASURED_RATIO = 0.01  # two starts of one command: 0.03 % apart on a CPU and on an H200 (docs/learn.md)


def read_figures(look: Look, is_whole: bool) -> dict[str, float]:  # noqa: FBT001
    """Returns every figure with a plausible value. `is_whole`: all workers report, so that they can be added up."""
    figures = look.figures
    found = {name: figures[name] for name in (*COUNTERS, *GAUGES) if name in figures}
    gate = look.gate
    if gate is not None:
        found["engine_requests"], found["in_flight"] = gate.engine_requests, gate.in_flight
        if gate.expected_wait_s is not None:
            found["expected_wait"] = gate.expected_wait_s
        if gate.survival is not None and gate.survival.contained is not None:
            found["contained"] = gate.survival.contained
    if is_whole:
        _add_workers(look.workers, found)
    elif look.cards and not look.workers:
        free = [card.free for card in look.cards]
        if None not in free:
            found["device_free"] = min(value for value in free if value is not None)
    if "host_resident" in figures and not look.workers:
        found["host_resident"] = figures["host_resident"]
    return {name: value for name, value in found.items() if 0.0 <= value < _MOST}


def _add_workers(workers: tuple[WorkerMemory, ...], found: dict[str, float]) -> None:
    """Adds the sums over all workers, and the least free memory; a sum with a missing part is NaN."""
    sums = dict.fromkeys(("held", "releasable", "retries", "ooms", "host_resident"), 0.0)
    free = room = math.inf
    for one in workers:
        held = None if one.allocated is None or one.unreleasable is None else one.allocated + one.unreleasable
        for name, value in (
            ("held", held), ("releasable", one.releasable), ("retries", one.retries), ("ooms", one.ooms),
            ("host_resident", one.host_resident),
        ):  # fmt: skip
            sums[name] = math.nan if value is None else sums[name] + value
        free = math.nan if one.device_free is None or free != free else min(free, one.device_free)
        # Card by card: memory that one worker could release is of no use to another.
        left = math.nan if one.device_free is None or one.releasable is None else one.device_free + one.releasable
        room = math.nan if left != left or room != room else min(room, left)
    found.update({name: value for name, value in (*sums.items(), ("device_free", free), ("room", room)) if value == value})


def count_requests(look: Look, before: float | None) -> float | None:
    """Returns the requests that are with the engine: the gate's own count, else the page's; None if neither has one.

    If one of them may be guard's own canary request, the count before stays, as long as no step was made meanwhile.
    """
    gate = look.gate
    if gate is None:
        running, waiting = look.figures.get("running"), look.figures.get("waiting")
        return None if running is None or waiting is None else running + waiting
    others = gate.engine_requests - gate.ours
    if gate.ours and others <= 0 < gate.engine_requests:
        return before
    return float(max(0, others))


def is_resting(look: Look) -> bool:
    """True if it reports that it is paused or asleep."""
    is_asleep = look.gate is not None and bool(look.gate.asleep)
    return is_asleep or bool(look.is_paused) or look.figures.get("asleep", 0.0) > 0


def _differs(name: str, before: Look, now: Look) -> bool:
    """True if a setting has changed; values that vLLM measures at each start may differ slightly."""
    one, other = before.config[name], now.config[name]
    if one == other or name not in MEASURED:
        return one != other
    try:
        sizes = float(one), float(other)
    except ValueError:
        return True
    return not abs(sizes[0] - sizes[1]) <= MEASURED_RATIO * max(sizes)


def describe_changes(before: Look, now: Look) -> str:
    parts = []
    if before.vllm and now.vllm and before.vllm != now.vllm:
        parts.append(f"vLLM {before.vllm} became {now.vllm}")
    names = sorted(name for name in before.config.keys() & now.config.keys() if _differs(name, before, now))
    parts += [f"{name} {before.config[name]} became {now.config[name]}" for name in names[:6]]
    return "; ".join(parts)

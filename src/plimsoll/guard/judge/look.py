"""What one look at one engine showed. Who looks is in `sources`, who judges in `guard`; what could not be had stays absent."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from plimsoll.doctor.rules.contained import Survival


class Reach(StrEnum):
    """What became of the question. Only the first two are knowledge about the engine."""

    ANSWERS = "answers"
    REFUSED = "refused"  # nobody listens there: the one failure that says something
    SILENT = "silent"  # no answer in time, or the way there is broken
    NONSENSE = "nonsense"  # an answer that is no page of metrics, is cut off or too large, or wants us elsewhere


class Worker(NamedTuple):
    """The memory of one worker as its probe wrote it; None for what it does not know."""

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
    # What it reckoned with at its start: the load line, and the parts that stay.
    requested: float | None = None
    weights: float | None = None
    kv_cache: float | None = None
    activation_peak: float | None = None
    graphs: float | None = None


class Gate(NamedTuple):
    """What plimsoll's gate says of the engine behind it."""

    ready: bool
    reason: str
    in_flight: int
    engine_requests: int
    expected_wait_s: float | None = None
    last_step_age_s: float | None = None
    is_wedged: bool = False
    asleep: str = ""
    drain: str = "serving"
    ours: int = 0  # of its requests, how many may be test requests of our own
    survival: Survival | None = None  # None where the plimsoll inside does not know of it


class Rank(NamedTuple):
    """One of several engine cores behind one page (data parallelism); None for what the page does not show of it."""

    name: str
    steps: float | None = None  # ever made
    running: float | None = None
    waiting: float | None = None


class Card(NamedTuple):
    """What the driver says of one card that the engine runs on."""

    name: str
    xids: tuple[int, ...] = ()  # since the last look
    uncorrectable: int | None = None  # ECC errors that were not mended, since guard looks
    total: float | None = None
    free: float | None = None
    by_engine: float | None = None  # what the engine's own processes hold


class Canary(NamedTuple):
    """The last test request of one token."""

    at_s: float
    is_answered: bool | None  # None: it could not be asked, which says nothing
    seconds: float | None = None
    is_garbage: bool = False
    why: str = ""  # where it could not be asked: why, in words
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
    gate: Gate | None = None
    workers: tuple[Worker, ...] = ()
    cards: tuple[Card, ...] = ()
    canary: Canary | None = None
    is_paused: bool | None = None
    is_rest_unknown: bool = False
    """Whether it is paused was asked, and the answer was lost on the way: it may rest."""
    ranks: tuple[Rank, ...] = ()  # only where the page shows several
    container_restarts: int | None = None  # as its cluster counts them
    ended: str = ""  # somebody who knows says that its process has ended and that nobody starts it; in words
    model: str | None = None  # the first name it is served by

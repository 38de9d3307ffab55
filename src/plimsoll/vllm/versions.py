"""vLLM's releases: their changes (`Behaviour`), what plimsoll read of them (`Coverage`), and the release for a version.

Everything that depends on a release is decided here: other modules call `Behaviour.X.is_in(release)` and compare no versions
themselves. For a new release, read its wheel (`python -m lab.catalogue`), then check the two tables.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from os.path import dirname, join
from typing import Any, NamedTuple

from plimsoll.errors import BadInput

_FORM = (
    r"v?(?P<release>\d{1,6}(?:\.\d{1,6}){0,3})(?P<pre>\.?(?:rc|a|b)\d+|-rc\d+)?(?P<post>\.post\d+)?(?P<dev>\.?dev\d*)?"
    r"(?:[+-](?P<local>[A-Za-z0-9.\-_]+))?"  # image tags have a dash where wheels have a plus
)


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A version, compared by its release numbers alone: `0.9.0.1` is after `0.9.0`; build tags and post-releases are equal."""

    release: tuple[int, ...]
    text: str = field(compare=False)
    pre: str = field(compare=False)
    local: str = field(compare=False)
    is_dev: bool = field(compare=False)
    is_post: bool = field(compare=False)

    @classmethod
    def read(cls, text: str) -> Version:
        match = re.fullmatch(_FORM, text.strip())
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        numbers = tuple(int(number) for number in match["release"].split("."))
        release, plain = numbers + (0,) * (3 - len(numbers)), text.strip().removeprefix("v")
        return cls(
            release, plain, match["pre"] or "", match["local"] or "", match["dev"] is not None, match["post"] is not None
        )


@functools.lru_cache(maxsize=512)
def _numbers(version: str) -> tuple[int, ...]:
    return Version.read(version).release


def is_before(release: str, other: str) -> bool:
    return _numbers(release) < _numbers(other)


def is_same_release(version: str, other: str) -> bool:
    """True if two versions are builds of one release."""
    return _numbers(version) == _numbers(other)


def covers(first: str, last: str | None, release: str) -> bool:
    """True if a release lies between two others, both included; None: there is no last one yet."""
    return _numbers(first) <= _numbers(release) and (last is None or _numbers(release) <= _numbers(last))


def allows(requirement: str, release: str) -> bool:
    """True if a requirement such as `>=0.6,<0.7`, `~=0.11.1` or `==0.6.*` takes this release; ValueError if it is none."""

    def takes(clause: str) -> bool:
        match = re.fullmatch(r"(~=|[<>=!]=|[<>])v?([^*]+?)(\.\*)?", clause)
        if match is None:
            raise ValueError(f"not a requirement: {clause!r}")
        operator, text, star = match.groups()
        asked, here = _numbers(text), _numbers(release)
        stem = asked[: text.count(".") + (0 if operator == "~=" else 1)]
        is_like = here[: len(stem)] == stem if star or operator == "~=" else here == asked
        found = {"==": is_like, "!=": not is_like, "~=": is_like and here >= asked, ">=": here >= asked, "<=": here <= asked}
        return found.get(operator, here > asked if operator == ">" else here < asked)

    return all(takes(clause) for clause in re.sub(r"\s", "", requirement).strip(",").split(","))


def is_within(stretch: Mapping[str, Any], release: str) -> bool:
    """True if a stretch of a table, from one release to another, includes this release."""
    return covers(stretch["from"], stretch["to"], release)


def shared_span(spans: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Returns the first and the last release that lie in all of these spans; None where no release does."""
    firsts, lasts = zip(*spans, strict=True)
    first, last = max(firsts, key=_numbers), min(lasts, key=_numbers)
    return None if is_before(last, first) else (first, last)


def whole_span(spans: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Returns the earliest first and the latest last release of these spans."""
    firsts, lasts = zip(*spans, strict=True)
    return min(firsts, key=_numbers), max(lasts, key=_numbers)


def plain_version(text: str) -> str | None:
    """Returns a version as vLLM writes it; None if the text is none."""
    try:
        return Version.read(text).text
    except ValueError:
        return None


_PLIMSOLL = dirname(dirname(__file__))  # not pathlib: it would be the slowest import of `plimsoll flags`


class Span(NamedTuple):
    """A stretch of releases over which a row is the same; both ends were seen in a wheel."""

    first: str
    last: str
    facts: Mapping[str, Any]

    def covers(self, release: str) -> bool:
        """True if the release lies in the stretch."""
        return covers(self.first, self.last, release)

    def begins_after(self, release: str) -> bool:
        """True if the release is older than the stretch."""
        return is_before(release, self.first)


@functools.cache
def table(name: str, package: str = "vllm") -> Mapping[str, Any]:
    """Reads a JSON file of a package's `data/`."""
    with open(join(_PLIMSOLL, package, "data", f"{name}.json"), "rb") as file:
        loaded: Mapping[str, Any] = json.load(file)
    return loaded


def yaml_table(name: str) -> Any:
    """Reads a YAML file of `data/`, which people write: every scalar is text."""
    import yaml  # `plimsoll flags` and most plans do not need it

    with open(join(_PLIMSOLL, "vllm", "data", f"{name}.yaml"), "rb") as file:
        return yaml.load(file, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # noqa: S506  it makes nothing but texts


def wheels() -> Mapping[str, str]:
    """Returns the file name of the wheel that each release was read from, oldest first."""
    found: Mapping[str, str] = table("releases")["wheels"]
    return found


def rows(name: str) -> Mapping[str, list[dict[str, Any]]]:
    """Returns a whole table, as it is in its file."""
    found: Mapping[str, list[dict[str, Any]]] = table(name)["rows"]
    return found


def spans_of(table: str, key: str) -> tuple[Span, ...]:
    """Returns the stretches of one row, oldest first; empty if no release has it."""
    stretches = rows(table).get(key, ())
    return tuple(Span(row["from"], row["to"], {k: v for k, v in row.items() if k not in ("from", "to")}) for row in stretches)


class Behaviour(Enum):
    """A change in what vLLM does; its row in `data/behaviours.json` has the first release, the change, and what shows it."""

    @staticmethod
    def _generate_next_value_(name: str, *_: object) -> str:
        return name

    SERVE_COMMAND = auto()
    NEIGHBOURS_COUNTED = auto()
    LATENT_CACHE = auto()
    V1_ENGINE = auto()
    WORKER_EXTENSIONS = auto()
    MODEL_FLAG = auto()
    FEWER_SEQUENCES = auto()
    BATCH_BY_MEMORY = auto()
    A100_BATCH = auto()
    DOTTED_KEYS = auto()
    PREFIX_TOKENS = auto()
    NEIGHBOURS_APART = auto()
    HYBRID_KV_MANAGER = auto()
    FIXED_CACHE_SIZE = auto()
    GPU_METRICS_HIDDEN = auto()
    V0_GONE = auto()
    NCCL_BEFORE_SNAPSHOT = auto()
    GRAPH_SIZE_LIMIT = auto()
    GPU_METRICS_GONE = auto()
    GROUPS_WITHIN_A_QUARTER = auto()
    DOTTED_O = auto()
    STATE_DTYPE = auto()
    ERROR_REASON = auto()
    MOE_WORKSPACE = auto()
    ASYNC_SCHEDULING = auto()
    CONTEXT_AUTO_FIT = auto()
    TPOT_METRIC_GONE = auto()
    UNREAD_TOWERS = auto()
    REPETITION_REASON = auto()
    TRITON_TOP_K = auto()
    GROUPS_WITHIN_A_HALF = auto()
    BLOCK_BY_BACKEND = auto()
    GRAPH_ESTIMATE_ASKED = auto()
    SHUTDOWN_TIMEOUT = auto()
    AWQ_MACHETE = auto()
    WHOLE_PROMPT_FITS = auto()
    GRAPH_ESTIMATE = auto()
    CUDA_13_BUILDS = auto()
    UTILIZATION_092 = auto()
    STATE_FOR_EVERY_SEQUENCE = auto()
    WHOLE_SEGMENTS = auto()
    SEGMENTS_REFUSED = auto()
    TOKENS_BY_CONCURRENCY = auto()
    MM_ITEM_IN_ONE_BATCH = auto()
    V2_RUNNER_QWEN3 = auto()
    V2_RUNNER_LLAMA = auto()
    COMPUTED_STEP_TOKENS = auto()
    SHUTDOWN_STEPS = auto()
    V2_RUNNER_QUANTISED = auto()
    V2_RUNNER_DENSE = auto()
    ALL_BATCHES_IN_FLIGHT = auto()
    HYBRID_PREFIX_CACHING = auto()
    MEMORY_SUMMARY = auto()
    EXACT_OFFLOAD = auto()
    CONSUMED_MEMORY = auto()
    SHUTDOWN_PROCESSES = auto()
    LARGEST_BATCH = auto()
    LEAN_PROFILE = auto()
    CACHE_IN_ONE_LINE = auto()
    V2_RUNNER_SAYS_MEMORY = auto()
    NULL_BLOCK = auto()
    V2_RUNNER_ALL = auto()
    API_SERVER_DEPRECATED = auto()
    LOGGER_NAMES_PROCESS = auto()
    UNSPLIT_PROFILE = auto()
    STATE_CHECKPOINTS = auto()

    def __init__(self, name: str) -> None:
        row = table("behaviours")["rows"][name]
        self.since: str = row["since"]
        self.change: str = row["change"]
        self.evidence: str = row["evidence"]
        self.is_announced: bool = row.get("is_announced", False)
        self.last: str | None = row.get("last")
        self.memory: str | None = row.get("memory")

    def is_in(self, version: str) -> bool:
        """True if this version has the change; ValueError for a text that is no version."""
        return covers(self.since, self.last, version)


def announced_between(old: str, new: str) -> tuple[Behaviour, ...]:
    """Returns the changes that an upgrade brings without a flag changing, oldest first; none for a downgrade."""
    return tuple(b for b in Behaviour if b.is_announced and b.is_in(new) and not b.is_in(old))


class Coverage(Enum):
    """A part of plimsoll, and the first and last release that it was read in, built from or run with."""

    SCHEDULER = ("0.32.0", "0.32.0", "the scheduler that `simulate` and the stand-in replay", "v1/core/sched/scheduler.py")
    KV_RULES = ("0.8.0", "0.32.0", "how `plan` sizes the KV cache", "v1/core/kv_cache_utils.py, v1/kv_cache_interface.py")
    STEP_MEMORY = ("0.25.1", "0.32.0", "what a step allocates, for `plan --certify`", "v1/worker/, v1/sample/; docs/certify.md")
    CACHE_LABELS = ("0.11.0", "0.32.0", "the stand-in's page and the labels of vllm:cache_config_info", "config/cache.py")
    CONFIG_CHECKS = ("0.32.0", "0.32.0", "limits, idle flags and names that vLLM checks after parsing", "config/")
    INSIDE_ON_CPU = ("0.32.0", "0.32.0", "plimsoll.inside, run with the CPU build", "docs/inside.md")
    INSIDE_ON_GPU = ("0.25.1", "0.25.1", "plimsoll.inside, run on an H200", "tests/captures/vllm-0.25.1-h200-inside")

    def __init__(self, first: str, last: str, subject: str, evidence: str) -> None:
        self.first, self.last, self.subject, self.evidence = first, last, subject, evidence

    def has(self, release: str) -> bool:
        return covers(self.first, self.last, release)

    def begins_after(self, release: str) -> bool:
        """True if the release is older than all of them."""
        return is_before(release, self.first)


# Tags of builds of the same source: CUDA, ROCm, CPU and so on. Any other tag may be a fork.
_BUILD_TAG = r"(cu|cpu|rocm|xpu|tpu|neuron|hpu|gaudi|precompiled|x86_64|aarch64|ubuntu)[\d.a-z_\-]*"
_MOVING_NAMES = ("nightly", "main", "latest", "dev", "head")


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM version, and the known release whose facts apply to it."""

    asked: str
    release: str  # a release that was read; its rows are the facts
    is_exact: bool  # the version is that release: a flag that its parser lacks does not exist there
    note: str | None = None
    because: str = ""  # why this version is meant; empty if the user named it

    def __str__(self) -> str:
        return self.release


def releases() -> list[str]:
    """Returns every release that was read, oldest first."""
    return list(wheels())


def newest() -> str:
    return releases()[-1]


def engine_named(text: str | None, said_by: str = "--vllm") -> Engine:
    """Returns the release whose facts apply, with a note if the version was not read. `said_by`: the source, for errors."""
    last = newest()
    if text is None:
        return Engine(last, last, is_exact=True, because="the newest known")
    asked = text.strip()
    moving = Engine(
        asked, last, is_exact=False, note=f"{asked} is no release we could read; the newest known, {last}, stands for it"
    )
    if asked.lower() in _MOVING_NAMES:
        return moving
    try:
        version = Version.read(asked)
    except ValueError:
        raise BadInput(f"{said_by} {asked!r} is not a version such as {last} or nightly") from None
    known = [Version.read(r) for r in releases()]
    is_build = version.local == "" or re.fullmatch(_BUILD_TAG, version.local.lower()) is not None
    if version.is_dev or (not is_build and re.match(r"g[0-9a-f]{4,}", version.local)):
        return moving
    near = max((k for k in known if k <= version), default=known[0])
    release, note = near.text, None
    is_exact = near == version and is_build and not version.pre and not version.is_post
    if version > known[-1]:
        note = f"{asked} is newer than the newest known, {last}"
    elif version < known[0]:
        note = f"{asked} is older than the oldest known, {release}"
    elif near != version:
        note = f"{asked} was not read; {release}, the release before it, stands for it"
    elif version.pre:
        note = f"{asked} is a pre-release; {release} stands for it"
    elif version.is_post:
        note = f"{asked} was not read; {release} stands for it, and post-releases seldom change a flag"
    elif not is_build:
        note = f"{asked} may be a fork; {release} stands for it, and what it lacks may exist there"
    elif version.local:
        note = f"{asked} is a build of {release}"
    return Engine(asked, release, is_exact=is_exact, note=note)

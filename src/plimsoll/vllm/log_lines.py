"""The memory figures in the lines that vLLM logs when it starts (`vllm/data/log_figures.yaml`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple, cast

from plimsoll.units import GIB
from plimsoll.vllm.versions import plain_version, yaml_table

# vLLM prints GiB with two decimals: the real figure may be half a hundredth to either side.
PRINTED_TOLERANCE = GIB // 200


class Measured(NamedTuple):
    """The memory figures of one real start, per GPU and of the decisive rank: only numbers, sizes in bytes.

    None where the log has no figure. No path, name or argument of the user's is kept.
    """

    release: str | None = None
    total_bytes: int | None = None  # of the card, as vLLM sees it
    free_bytes: int | None = None  # at vLLM's snapshot
    utilization: float | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None  # printed up to 0.26
    consumed_bytes: int | None = None  # weights and non-torch together, printed from 0.27
    activation_bytes: int | None = None  # without the graphs, also where vLLM prints them in one figure
    graphs_estimated_bytes: int | None = None
    graphs_actual_bytes: int | None = None
    graphs_subtracted: bool | None = None  # whether the estimate was subtracted from the cache
    kv_bytes: int | None = None  # "Available KV cache memory"; negative when nothing was left
    kv_tokens: int | None = None
    blocks: int | None = None
    max_concurrency: float | None = None
    ranks: int | None = None  # workers that reported their memory
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None

    @property
    def has_memory(self) -> bool:
        return any(figure is not None for figure in (self.weights_bytes, self.kv_bytes, self.blocks))


_NUMBER = r"-?[\d.]+"
_COUNT = r"[\d,]+"
WEIGHTS_LOADED = rf"Model loading took (?P<gib>{_NUMBER}) Gi?B(?: memory)? and (?P<seconds>{_NUMBER}) seconds"
KV_AVAILABLE = rf"Available KV cache memory: (?P<gib>{_NUMBER}) GiB"
KV_SIZE = (
    rf"(?P<device>GPU|CPU|XPU|\w+)(?: \+ host)? KV cache size: (?P<tokens>{_COUNT}) tokens"
    rf"(?:, Maximum concurrency for (?P<context>{_COUNT}) tokens per request: (?P<concurrency>{_NUMBER})x)?"
)
GRAPH_ESTIMATE = rf"Estimated CUDA graph memory: (?P<gib>{_NUMBER}) GiB total"
PERIODIC_STATS = (
    rf"Avg prompt throughput: (?P<prompt_per_s>{_NUMBER}) tokens/s, Avg generation throughput: "
    rf"(?P<generation_per_s>{_NUMBER}) tokens/s, Running: (?P<running>\d+) reqs.*?(?:Waiting|Pending): "
    rf"(?P<waiting>\d+) reqs.*?KV cache usage: (?P<kv_percent>{_NUMBER})%"
)

# Reads the memory figures in the lines of a start: only figures, of the decisive rank.
#
# A log may be coloured, with several workers' lines mixed and several starts: the last start that got as far as its cache
# counts. Arguments, paths and names in the log are skipped.

_FIGURE = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_WHO = re.compile(r"\(([A-Za-z_][\w.\- ]{0,60}?) ?\bpid=(\d{1,10}(?:, ip=[0-9a-fA-F.:]{1,45})?)\)")
_BANNER = re.compile(r"[█▀▄] {1,4}version (?P<version>\S{1,60})|API server version (?P<older>\S{1,60})")


# Conversions of fields that are no sizes.
_KINDS = {
    **dict.fromkeys("utilization max_concurrency".split(), "ratio"),
    "graphs_subtracted": "is",
    **dict.fromkeys(
        "kv_tokens blocks max_num_batched_tokens max_num_seqs tensor_parallel pipeline_parallel max_model_len".split(), "count"
    ),
    "release": "version",
    "enforce_eager": "true",
}


class _Rule(NamedTuple):
    """A line: a text that identifies it quickly, and the pattern of each figure in it."""

    needle: bytes
    figures: Mapping[str, str]
    is_of_rank: bool  # if not, of the whole engine


@cache
def _rules() -> tuple[_Rule, ...]:
    own = {"WEIGHTS_LOADED": WEIGHTS_LOADED, "KV_AVAILABLE": KV_AVAILABLE, "GRAPH_ESTIMATE": GRAPH_ESTIMATE}
    return tuple(
        _Rule(
            needle.encode(),
            {field: own.get(pattern, pattern.replace("FIGURE", _FIGURE)) for field, pattern in figures.items()},
            is_of_rank=group == "rank",
        )
        for group, lines in yaml_table("log_figures").items()
        for needle, figures in lines.items()
    )


@cache
def needles() -> tuple[bytes, ...]:
    """Returns the texts one of which every line with a figure contains."""
    return (b" version ", *(rule.needle for rule in _rules()))


_TERMS = ("weights_bytes", "consumed_bytes", "activation_bytes", "non_torch_bytes", "kv_bytes")

_Facts = dict[str, object]


class _Start:
    """One start as far as it has been read: the figures of the engine and of each worker."""

    def __init__(self) -> None:
        self.engine: _Facts = {}
        self.workers: dict[str, _Facts] = {}
        self.named: set[str] = set()  # processes that have named their engine

    @property
    def got_far(self) -> bool:
        return any(field in facts for facts in self.workers.values() for field in _TERMS)

    @property
    def got_a_cache(self) -> bool:
        return bool(self.engine.keys() & {"kv_tokens", "blocks"}) or any("kv_bytes" in f for f in self.workers.values())


def measured_of(lines: Iterable[bytes]) -> Measured:
    """Returns the figures of the last start that got a cache, else of the last one."""
    start, best = _Start(), _Start()
    for raw in lines:
        line = _COLOURS.sub("", raw.decode("utf-8", "replace"))
        speakers = _WHO.findall(line)
        name, worker = speakers[-1] if speakers else ("", "")  # a progress bar may come before it on the same line
        banner, is_named = _BANNER.search(line), "LLM engine (v" in line
        # The same process introduces itself again: a new start begins.
        if start.got_far and (banner is not None or (is_named and name in start.named)):
            best = start if start.got_a_cache or not best.got_a_cache else best
            start = _Start()
        if banner is not None:
            _take(start.engine, "release", banner["version"] or banner["older"], "version")
        if is_named:
            start.named.add(name)
        for rule in _rules():
            if rule.needle in raw:
                facts = start.workers.setdefault(worker, {}) if rule.is_of_rank else start.engine
                for field, pattern in rule.figures.items():
                    match = re.search(pattern, line)
                    if match is not None:
                        _take(facts, field, match[1], _KINDS.get(field, "gib"))
    return _measured(start if start.got_a_cache or not best.got_a_cache else best)


def _take(facts: _Facts, field: str, text: str, kind: str) -> None:
    """Keeps a plausible figure; memory that shrank while graphs were captured is a neighbour's doing."""
    if kind == "version":
        if (version := plain_version(text)) is not None:
            facts[field] = version
    elif kind in ("is", "true"):
        facts[field] = text in ("is", "True")
    elif kind == "count":
        number = int(text.replace(",", "") or 0)
        # The smallest cache of several data-parallel engines.
        facts[field] = min(number, cast("int", facts.get(field, number))) if field == "kv_tokens" else number
    elif re.fullmatch(_FIGURE, text) is None:
        return  # 1.2.3, or thousands of digits
    elif kind == "ratio":
        facts[field] = float(text)
    else:
        size = round(float(text) * GIB)
        if size >= 0 or field == "kv_bytes":
            facts[field] = size


def _measured(start: _Start) -> Measured:
    """Returns the figures of the rank with the least cache; others fill in what it did not print, unless stages differ."""
    speakers = [facts for facts in start.workers.values() if facts.keys() & set(_TERMS)]
    if not speakers:
        return Measured(**start.engine)  # type: ignore[arg-type]

    def least_cache(facts: _Facts) -> tuple[float, int]:
        sizes = (facts.get(field) for field in _TERMS if field != "kv_bytes")
        return cast("float", facts.get("kv_bytes", float("inf"))), -sum(size for size in sizes if isinstance(size, int))

    ruling = min(speakers, key=least_cache)
    merged = dict(ruling)
    if start.engine.get("pipeline_parallel", 1) == 1:
        for facts in start.workers.values():
            for field, value in facts.items():
                merged.setdefault(field, value)
    consumed, activation, estimate = (
        merged.get(field) for field in ("consumed_bytes", "activation_bytes", "graphs_estimated_bytes")
    )
    if consumed is not None and activation is not None and estimate and merged.get("graphs_subtracted") is not False:
        merged["activation_bytes"] = max(0, cast("int", activation) - cast("int", estimate))
    return Measured(**{**start.engine, **merged, "ranks": len(speakers)})  # type: ignore[arg-type]

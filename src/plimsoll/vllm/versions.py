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
from enum import Enum
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
    """A change in what vLLM does: its first release, what changed, and the file of vLLM (or the page of ours) that shows it.

    `is_announced`: `plimsoll flags --from` reports it on an upgrade. `last`: the last release with it, if it ended.
    """

    # fmt: off
    SERVE_COMMAND = ("0.5.2", "`vllm serve` exists", "scripts.py")
    LATENT_CACHE = ("0.7.1", "DeepSeek's attention caches latents (MLA), not full heads", "attention/backends/triton_mla.py")
    V1_ENGINE = ("0.8.0", ("the second engine (V1) runs by default: prefix caching and chunked prefill on, preemption by "
        "recomputation only, no swapping"), "engine/arg_utils.py", True)
    WORKER_EXTENSIONS = ("0.8.0", "workers take an extension class (--worker-extension-cls)", "engine/arg_utils.py")
    MODEL_FLAG = ("0.8.3", "`vllm serve` takes --model, and asks for the model as its first word", "entrypoints/cli/serve.py")
    FEWER_SEQUENCES = ("0.8.4", "cards other than H100 and H200 batch 256 sequences by default, not 1024",
        "engine/arg_utils.py")
    BATCH_BY_MEMORY = ("0.8.5", "cards of 70 GiB or more have the larger default batch, whatever their name",
        "engine/arg_utils.py")
    A100_BATCH = ("0.9.0", "an A100 has the smaller default batch, whatever its memory", "engine/arg_utils.py")
    DOTTED_KEYS = ("0.9.0", "the parser joins `--config.key value` into JSON", "utils.py: FlexibleArgumentParser")
    PREFIX_TOKENS = ("0.9.0", "the prefix cache's counters count tokens, not blocks", "v1/metrics/loggers.py: HELP")
    NEIGHBOURS_APART = ("0.9.1", ("memory of other processes no longer counts against the budget; the start is refused when "
        "less than the requested share is free"), "v1/worker/gpu_worker.py", True)
    HYBRID_KV_MANAGER = ("0.9.1", ("layers of different types have cache groups of their own; before, a window took as much "
        "as full attention"), "v1/core/kv_cache_utils.py")
    FIXED_CACHE_SIZE = ("0.10.2", "--kv-cache-memory-bytes gives the cache a size and skips the profile", "engine/arg_utils.py")
    GPU_METRICS_HIDDEN = ("0.11.0", ("metrics named vllm:gpu_* are hidden unless --show-hidden-metrics-for-version=0.10 is "
        "given"), "v1/metrics/loggers.py", True)
    V0_GONE = ("0.11.0", "the first engine (V0) is gone; NCCL's buffers no longer count against the budget",
        "v1/worker/gpu_worker.py", True)
    NCCL_BEFORE_SNAPSHOT = ("0.11.0", "NCCL starts before vLLM's snapshot, outside the budget",
        "v1/worker/gpu_worker.py: init_device")
    GRAPH_SIZE_LIMIT = ("0.11.1", "--max-cudagraph-capture-size limits the captured sizes", "engine/arg_utils.py")
    GPU_METRICS_GONE = ("0.12.0", ("metrics named vllm:gpu_* are gone: dashboards and alerts on them see nothing; "
        "vllm:time_per_output_token_seconds is hidden"), "v1/metrics/loggers.py", True)
    GROUPS_WITHIN_A_QUARTER = ("0.12.0", "cache groups are padded to one length within 1.25 times the shortest",
        "v1/core/kv_cache_utils.py")
    DOTTED_O = ("0.12.0", "`-O.key` is short for -cc.key", "utils/argparse_utils.py", False, "0.12.0")
    STATE_DTYPE = ("0.13.0", "a model's config decides the element type of its state", "model_executor/models/config.py")
    ERROR_REASON = ("0.13.0", "requests can finish with the reason error", "v1/engine/__init__.py: FinishReason")
    MOE_WORKSPACE = ("0.13.0", "the experts' workspace outlives a pass", "v1/worker/workspace.py; docs/overhead.md")
    ASYNC_SCHEDULING = ("0.14.0", "the scheduler runs ahead by default", "config/vllm.py")
    CONTEXT_AUTO_FIT = ("0.14.0", "--max-model-len auto takes the longest context that fits", "v1/core/kv_cache_utils.py")
    TPOT_METRIC_GONE = ("0.15.0", "vllm:time_per_output_token_seconds is gone, and so is VLLM_ATTENTION_BACKEND",
        "v1/metrics/loggers.py, envs.py", True)
    UNREAD_TOWERS = ("0.17.0", "encoders whose inputs are all limited to 0 are not loaded (--language-model-only)",
        "config/multimodal.py")
    REPETITION_REASON = ("0.17.0", "requests can finish with the reason repetition", "v1/engine/__init__.py: FinishReason")
    TRITON_TOP_K = ("0.17.0", "top-k runs in a Triton kernel: 14 bytes a logit at the sampler's peak, not 38",
        "v1/sample/ops/topk_topp_triton.py; docs/overhead.md")
    GROUPS_WITHIN_A_HALF = ("0.18.0", "cache groups are padded to one length within 1.5 times the shortest",
        "v1/core/kv_cache_utils.py")
    BLOCK_BY_BACKEND = ("0.18.0", ("the block size is the smallest that every attention backend takes; before, MLA had 64 or "
        "128"), "platforms/interface.py")
    GRAPH_ESTIMATE_ASKED = ("0.18.0", "memory for CUDA graphs is estimated where VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1",
        "v1/worker/gpu_worker.py; docs/overhead.md")
    SHUTDOWN_TIMEOUT = ("0.18.0", "--shutdown-timeout exists: 0 (the default) aborts requests in flight on SIGTERM",
        "engine/arg_utils.py", True)
    AWQ_MACHETE = ("0.19.0", "AWQ weights go to the Machete kernel on Hopper, with wide zero points",
        "model_executor/kernels/linear/mixed_precision/machete.py")
    WHOLE_PROMPT_FITS = ("0.19.0", "a prompt is admitted only when all of it fits the KV cache (--scheduler-reserve-full-isl)",
        "config/scheduler.py", True)
    GRAPH_ESTIMATE = ("0.20.0", "memory for CUDA graphs is estimated and taken from the KV cache by default",
        "v1/worker/gpu_worker.py", True)
    UTILIZATION_092 = ("0.20.0", "--gpu-memory-utilization is 0.92 by default, not 0.9", "config/cache.py")
    STATE_FOR_EVERY_SEQUENCE = ("0.20.0", "full CUDA graphs are refused where there are fewer states than sequences",
        "config/compilation.py: resolve_cudagraph_mode_and_sizes")
    WHOLE_SEGMENTS = ("0.21.0", "weights are loaded under max_split_size_mb:20", "v1/worker/gpu_worker.py: load_model")
    SEGMENTS_REFUSED = ("0.21.0", "expandable segments beside a KV connector are refused", "config/vllm.py")
    TOKENS_BY_CONCURRENCY = ("0.21.0", '"KV cache size" is concurrency x context; before, blocks // groups x block size',
        "v1/core/kv_cache_utils.py")
    MM_ITEM_IN_ONE_BATCH = ("0.22.0", "the default batch holds one picture, recording or video of a model that reads it whole",
        "engine/arg_utils.py: _get_min_mm_batched_tokens")
    V2_RUNNER_QWEN3 = ("0.22.0", "the second model runner is the default for some architectures", "config/vllm.py", True)
    V2_RUNNER_LLAMA = ("0.23.0", "the second model runner is the default for unquantised Llama and Mistral, too",
        "config/vllm.py")
    COMPUTED_STEP_TOKENS = ("0.23.0", "a step's tokens are those that it computed, without cached ones", "v1/metrics/stats.py")
    SHUTDOWN_STEPS = ("0.23.0", "the steps of a shutdown are logged", "entrypoints/launcher.py")
    V2_RUNNER_QUANTISED = ("0.24.0", "the second model runner is the default for quantised Qwen 3, Llama and Mistral, too",
        "config/vllm.py")
    V2_RUNNER_DENSE = ("0.25.0", "the second model runner is the default for dense models",
        "config/vllm.py; two starts of Qwen 2.5 on 0.24.0 log the first one")
    ALL_BATCHES_IN_FLIGHT = ("0.26.0", "windows hold the tokens of every concurrent step, not of one",
        "v1/kv_cache_interface.py")
    HYBRID_PREFIX_CACHING = ("0.26.0", "prefix caching is on by default for hybrid (Mamba) models too", "config/model.py", True)
    MEMORY_SUMMARY = ("0.26.0", "the summary of memory is logged at INFO, not DEBUG", "v1/worker/gpu_worker.py")
    CONSUMED_MEMORY = ("0.27.0", "whatever the device lost counts: weights and memory outside torch are one figure",
        "v1/worker/gpu_worker.py")
    SHUTDOWN_PROCESSES = ("0.27.0", "the log of a shutdown names the processes", "v1/utils.py")
    LARGEST_BATCH = ("0.28.0", "cards of 160 GiB or more batch 16384 tokens by default", "engine/arg_utils.py")
    LEAN_PROFILE = ("0.28.0", "the second runner's profile no longer copies its logits to 32 bits",
        "v1/worker/gpu/sample/sampler.py: needs_logits_processing")
    CACHE_IN_ONE_LINE = ("0.28.0", "tokens and concurrency of the cache are logged in one line", "v1/core/kv_cache_utils.py")
    V2_RUNNER_SAYS_MEMORY = ("0.28.0", 'the second runner logs "GiB memory" after loading, as the first does',
        "v1/worker/gpu/model_runner.py")
    NULL_BLOCK = ("0.29.0", "the start-up check leaves out the block that vLLM keeps for itself", "v1/core/kv_cache_utils.py")
    V2_RUNNER_ALL = ("0.29.0", "the second model runner is the default for every architecture it supports",
        "config/vllm.py", True)
    API_SERVER_DEPRECATED = ("0.29.0", "python -m vllm.entrypoints.openai.api_server warns that it is deprecated",
        "entrypoints/openai/api_server.py", True)
    LOGGER_NAMES_PROCESS = ("0.31.0", "only lines of the logger carry the process's name, not all that is printed",
        "utils/system_utils.py: decorate_logs")
    UNSPLIT_PROFILE = ("0.31.0", "large blocks are not split while vLLM profiles: what a pass frees does not stay consumed",
        "v1/worker/gpu_worker.py: _scoped_allocator_max_split")
    STATE_CHECKPOINTS = ("0.32.0", "Mamba 2 under prefix caching keeps one more state", "v1/kv_cache_interface.py")
    # fmt: on

    def __init__(
        self, since: str, change: str, evidence: str, is_announced: bool = False, last: str | None = None  # noqa: FBT001, FBT002
    ) -> None:  # fmt: skip
        self.since, self.change, self.evidence, self.is_announced, self.last = since, change, evidence, is_announced, last

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

"""Decides where containment is armed, and says why not elsewhere.

It checks two things. Does this engine have the names and parameters that the adapter knows? And was this combination of a
release, a runner and the engine's features proven in a run? An unproven one stays unarmed, unless the operator sets
PLIMSOLL_SURVIVE=unproven.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, fields
from typing import Any

from plimsoll.inside.settings import data_table

FIRST, SECOND = "first", "second"


@dataclass(frozen=True)
class Adapter:
    """The differences between releases: a request's counters that a dropped step leaves behind."""

    zero_before: tuple[str, ...]  # set to 0 before the requests are preempted
    zero_after: tuple[str, ...]  # set to 0 afterwards
    false_after: tuple[str, ...]


FEATURES = (
    "text", "asynchronous scheduling", "several processes", "CUDA graphs", "pictures", "adapters", "n-gram drafts",
    "other drafts", "pooling", "encoder-decoder models", "Mamba layers", "sleep mode",
)  # fmt: skip


def release_of(version: str) -> tuple[int, int] | None:
    """Returns the first two numbers of a release; None for a development build or a fork."""
    plain = version.partition("+")[0]
    numbers = plain.split(".")
    if len(numbers) not in (2, 3) or not all(part.isdecimal() for part in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def _releases_of(row: Any) -> list[tuple[int, int]]:
    return [release for text in row["releases"] if (release := release_of(text)) is not None]


_TABLE = data_table("survive")
ADAPTERS = {
    release: Adapter(*(tuple(row[field.name]) for field in fields(Adapter)))
    for row in _TABLE["adapters"]
    for release in _releases_of(row)
}
# The combinations that were proven to survive: docs/survive.md has the runs. A text model with greedy or sampled answers,
# chunked prefill, prefix caching, log-probabilities and structured output is "text".
# Each set is one combination that ran; its subsets are armed, another mixture is not.
PROVEN = {
    (release, str(row["runner"])): tuple(map(frozenset, row["with"]))
    for row in _TABLE["proven"]
    for release in _releases_of(row)
}
_EXECUTORS = ("UniProcExecutor", "MultiprocExecutor")
_SCHEDULERS = ("vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler")


def proven_lines(version: str) -> list[str]:
    """Returns lines that say where containment is armed with this release, by runner; or one line that says why nowhere."""
    release = release_of(version)
    if release is None or release not in ADAPTERS:
        return [f"not armed: vLLM {version} is not known to it: it knows {_releases(ADAPTERS)}"]
    lines = []
    for runner in (FIRST, SECOND):
        shown = PROVEN.get((release, runner))
        if shown is None:
            lines.append(f"{runner} runner: not armed, never tried (PLIMSOLL_SURVIVE=unproven arms it all the same)")
            continue
        lines += [f"{runner} runner: armed with {_listed(combination)}" for combination in shown]
        untried = [feature for feature in FEATURES if not any(feature in combination for combination in shown)]
        lines.append(f"{runner} runner: not armed with {', '.join(untried)}, nor with another mixture: never tried")
    return [
        *lines,
        "never armed with several ranks, data parallel engines, a KV or encoder connector, or without chunked prefill",
    ]


def _listed(combination: frozenset[str]) -> str:
    return ", ".join(feature for feature in FEATURES if feature in combination)


def runner_of(config: Any) -> str:
    """Returns which of vLLM's two model runners this engine uses: FIRST or SECOND."""
    return SECOND if getattr(config, "use_v2_model_runner", False) else FIRST


def refusal(core: Any, version: str, *, unproven: bool) -> str | None:
    """Returns why containment cannot be armed in this engine core; None if it can."""
    release = release_of(version)
    if release is None or release not in ADAPTERS:
        return f"vLLM {version} is not known to it: it knows {_releases(ADAPTERS)}"
    if (missing := missing_names(core, ADAPTERS[release])) is not None:
        return f"this vLLM {version} is not built as it was when it was tried: {missing}"
    if (never := _never(core)) is not None:
        return never
    if unproven:
        return None
    runner = runner_of(core.vllm_config)
    shown = PROVEN.get((release, runner))
    if shown is None:
        return f"vLLM {version} with the {runner} runner was never tried (PLIMSOLL_SURVIVE=unproven arms it all the same)"
    asked = features_of(core)
    if any(combination.issuperset(asked) for combination in shown):
        return None
    return (
        f"{', '.join(asked)} together, with vLLM {version} and the {runner} runner, was never tried "
        "(PLIMSOLL_SURVIVE=unproven arms it all the same)"
    )


def missing_names(core: Any, adapter: Adapter) -> str | None:
    """Returns a sentence on the first name that the adapter needs and this engine lacks; None when all are there."""
    scheduler = core.scheduler
    for owner, names in ((core, _TABLE["core"]), (scheduler, _TABLE["scheduler"])):
        if lacking := [name for name in names if not hasattr(owner, name)]:
            return f"{type(owner).__name__} has no {lacking[0]}"
    if "reset_running_requests" not in inspect.signature(scheduler.reset_prefix_cache).parameters:
        return "reset_prefix_cache cannot preempt running requests"
    if list(inspect.signature(scheduler.finish_requests).parameters)[:2] != ["request_ids", "finished_status"]:
        return "finish_requests takes other parameters"
    request = inspect.getmodule(inspect.unwrap(type(core).add_request))
    init = getattr(getattr(request, "Request", None), "__init__", None)
    kept = set(getattr(getattr(init, "__code__", None), "co_names", ()))
    for name in (*adapter.zero_before, *adapter.zero_after, *adapter.false_after):
        if name not in kept:
            return f"a request has no {name}"
    code = getattr(inspect.unwrap(getattr(core.step_fn, "__func__", core.step_fn)), "__code__", None)
    if code is None or "scheduler_output" not in code.co_varnames:
        return "a step keeps its plan under another name"
    return None


def _never(core: Any) -> str | None:
    """Returns why no adapter could contain this engine's failures; None if one could."""
    config, scheduler = core.vllm_config, core.scheduler
    parallel = config.parallel_config
    if parallel.world_size > 1:
        return (
            f"this engine has {parallel.world_size} ranks: when one of them runs out of memory the others wait for it in a "
            "collective; use the door (PLIMSOLL_ADMIT=certified)"
        )
    if parallel.data_parallel_size > 1:
        return "data parallel engines step together; use the door (PLIMSOLL_ADMIT=certified)"
    platform = importlib.import_module("vllm.platforms").current_platform
    if not (platform.is_cuda() or platform.is_cpu()):
        return "only NVIDIA's devices are known to it, and CPUs"
    if type(scheduler).__module__ not in _SCHEDULERS:
        return f"never tried with the scheduler {type(scheduler).__name__}"
    is_multimodal = getattr(config.model_config, "is_multimodal_model", False)
    if is_multimodal and getattr(config.scheduler_config, "disable_chunked_mm_input", False):
        return "this model's pictures must not be cut, and smaller steps would cut them"
    if scheduler.connector is not None or scheduler.ec_connector is not None:
        return "a KV or encoder connector holds blocks that a preemption cannot take back"
    if not config.scheduler_config.enable_chunked_prefill:
        return "without chunked prefill a step cannot be made smaller than its longest prompt"
    if not any(kind.__name__ in _EXECUTORS for kind in type(core.model_executor).__mro__):
        return f"the executor {type(core.model_executor).__name__} is not known to it"
    if getattr(core, "enable_fault_tolerance", False):
        return "vLLM's own fault tolerance is on"
    return None


def features_of(core: Any) -> list[str]:
    """Returns the features that this engine uses, in the order of FEATURES."""
    config = core.vllm_config
    model, drafts = config.model_config, config.speculative_config
    is_queued = core.batch_queue is not None
    is_ngram = getattr(drafts, "method", "") == "ngram"
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    has_graphs = str(getattr(mode, "name", mode)) not in ("NONE", "None")
    asked = {
        "text": True,
        "asynchronous scheduling": is_queued,
        # There the first runner hides a failed forward pass behind an empty answer.
        "several processes": is_queued and type(core.model_executor).__name__ != "UniProcExecutor",
        "CUDA graphs": has_graphs and not getattr(model, "enforce_eager", False),
        "pictures": getattr(model, "is_multimodal_model", False),
        "adapters": getattr(config, "lora_config", None) is not None,
        "n-gram drafts": drafts is not None and is_ngram,
        "other drafts": drafts is not None and not is_ngram,
        "pooling": getattr(model, "runner_type", "generate") == "pooling",
        "encoder-decoder models": getattr(model, "is_encoder_decoder", False),
        "Mamba layers": _has_state(core),
        "sleep mode": getattr(model, "enable_sleep_mode", False),
    }
    return [feature for feature in FEATURES if asked[feature]]


def _has_state(core: Any) -> bool:
    """True if any layer keeps a recurrent state instead of a cache of keys and values."""
    groups = getattr(getattr(core.scheduler, "kv_cache_config", None), "kv_cache_groups", ())
    return any(kind.__name__ == "MambaSpec" for group in groups for kind in type(getattr(group, "kv_cache_spec", None)).__mro__)


def state_block(core: Any) -> int:
    """Returns a Mamba block's tokens where prompts are cut at such blocks (a smaller step makes no progress there), else 0."""
    if not _has_state(core) or not getattr(core.scheduler, "need_mamba_block_aligned_split", True):
        return 0
    cache = core.vllm_config.cache_config
    return int(getattr(cache, "mamba_block_size", None) or getattr(cache, "block_size", None) or 0)


def _releases(adapters: dict[tuple[int, int], Adapter]) -> str:
    first, last = min(adapters), max(adapters)
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"

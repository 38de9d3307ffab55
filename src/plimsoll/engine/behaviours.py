"""What changed between releases without a flag in the command changing: read in the wheels and checked on live engines."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.engine.flags import is_before


class Behaviour(NamedTuple):
    """Something vLLM does from one release on."""

    since: str
    what: str
    evidence: str  # the file of that release in which it can be read


BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour("0.8.0", "the second engine (V1) runs by default: prefix caching and chunked prefill on, preemption by "
              "recomputation only, no swapping", "engine/arg_utils.py"),
    Behaviour("0.9.1", "memory of other processes no longer counts against the budget; the start is refused when less than "
              "the requested share is free", "v1/worker/gpu_worker.py"),
    Behaviour("0.11.0", "metrics named vllm:gpu_* are hidden unless --show-hidden-metrics-for-version=0.10 is given",
              "v1/metrics/loggers.py"),
    Behaviour("0.11.0", "the first engine (V0) is gone; NCCL's buffers no longer count against the budget",
              "v1/worker/gpu_worker.py"),
    Behaviour("0.12.0", "metrics named vllm:gpu_* are gone: dashboards and alerts on them see nothing; "
              "vllm:time_per_output_token_seconds is hidden", "v1/metrics/loggers.py"),
    Behaviour("0.15.0", "vllm:time_per_output_token_seconds is gone, and so is VLLM_ATTENTION_BACKEND",
              "v1/metrics/loggers.py, envs.py"),
    Behaviour("0.18.0", "--shutdown-timeout exists: 0 (the default) aborts requests in flight on SIGTERM",
              "engine/arg_utils.py"),
    Behaviour("0.19.0", "a prompt is admitted only when all of it fits the KV cache (--scheduler-reserve-full-isl)",
              "config/scheduler.py"),
    Behaviour("0.20.0", "memory for CUDA graphs is estimated and taken from the KV cache by default",
              "v1/worker/gpu_worker.py"),
    Behaviour("0.22.0", "the second model runner is the default for some architectures", "config/vllm.py"),
    Behaviour("0.26.0", "prefix caching is on by default for hybrid (Mamba) models too", "config/model.py"),
    Behaviour("0.29.0", "the second model runner is the default for every architecture it supports", "config/vllm.py"),
    Behaviour("0.29.0", "python -m vllm.entrypoints.openai.api_server warns that it is deprecated",
              "entrypoints/openai/api_server.py"),
)  # fmt: skip


def changes_between(old: str, new: str) -> tuple[Behaviour, ...]:
    """What begins to hold on the way from one release to a later one, oldest first; empty for a downgrade."""
    return tuple(b for b in BEHAVIOURS if is_before(old, b.since) and not is_before(new, b.since))

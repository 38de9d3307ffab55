"""Why a start fails, by the plan's figures, in vLLM's order and in its words; and what its log says then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from plimsoll.findings import Code
from plimsoll.plan.kv import WhyRefused
from plimsoll.plan.ledger import Ledger
from plimsoll.standin.launch_log import (
    API_SERVER,
    ENGINE_CORE,
    Frame,
    StartLog,
    StartLogLine,
    error,
    gib,
    loading_lines,
    measured_lines,
    opening_lines,
    traceback,
    worker_failed,
)
from plimsoll.standin.memory import MemorySizes, oom_text
from plimsoll.units import GIB

_CORE = "vllm/v1/engine/core.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_BEGIN = (Frame(_CORE, 1482, "run_engine_core"), Frame(_CORE, 1194, "__init__"))
_EXECUTOR = (
    Frame(_CORE, 151, "__init__"),
    Frame("vllm/v1/executor/abstract.py", 109, "__init__"),
    Frame("vllm/v1/executor/uniproc_executor.py", 68, "_init_executor"),
)
_CACHES = (Frame(_CORE, 157, "__init__"), Frame(_CORE, 326, "_initialize_kv_caches"))
_CLIENT = (
    Frame("vllm/entrypoints/cli/serve.py", 156, "cmd"),
    Frame("vllm/entrypoints/launchers/api_server/entry.py", 177, "run_server"),
    Frame("vllm/v1/engine/async_llm.py", 184, "__init__"),
    Frame("vllm/v1/engine/utils.py", 1431, "wait_for_engine_startup"),
)
_CONFIG = (
    Frame("vllm/entrypoints/cli/serve.py", 156, "cmd"),
    Frame("vllm/engine/arg_utils.py", 2240, "create_engine_config"),
    Frame("vllm/engine/arg_utils.py", 1955, "create_model_config"),
)
_HELP = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_CORE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_WORKER_FAILED = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
)


class StartFailure(NamedTuple):
    """A start that ends with exit code 1."""

    code: Code  # what `doctor` makes of the log
    message: str  # the exception
    frames: tuple[Frame, ...]
    steps: int  # how far it came: 0 the API server, 1 the engine's process, 2 the weights, 3 the measured memory
    is_workers: bool = True  # else the engine core's own


def failure_of(log: StartLog, sizes: MemorySizes, environment: Mapping[str, str]) -> StartFailure | None:
    """The first of vLLM's checks that the plan's central figures do not pass; None if it starts."""
    ledger = log.ledger
    if ledger.settings.max_model_len > log.shape.max_context and environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        message = (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            f"  Value error, User-specified max_model_len ({ledger.settings.max_model_len}) is greater than the derived "
            f"max_model_len (max_position_embeddings={log.shape.max_context} or model_max_length=None in model's config.json). "
            "To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1."
        )
        return StartFailure(Code.OTHER_BAD_CONFIG, message, _CONFIG, 0, is_workers=False)
    if log.free_bytes < ledger.requested.value:
        return too_little_free(log, log.free_bytes)
    if ledger.weights.value > log.free_bytes:
        return _out_of_memory(log, sizes, "weights")
    if ledger.weights.value + ledger.non_torch.value + ledger.activation.value > log.free_bytes:
        return _out_of_memory(log, sizes, "profile")
    refused = _cache_refused(ledger)
    # A cache of a size that somebody set is taken whether there is room or not; and graphs come after it.
    room = log.free_bytes - sizes.weights - sizes.non_torch
    if refused is None and sizes.kv_cache > room:
        return _out_of_memory(log, sizes, "kv-allocation")
    if refused is None and sizes.graphs and sizes.kv_cache + sizes.graphs > room:
        return _out_of_memory(log, sizes, "graph-capture")
    return refused


def want_of_memory(log: StartLog) -> StartFailure:
    """A failure for a server that would start: somebody else holds what it asks for."""
    return too_little_free(log, min(log.free_bytes, max(0, log.ledger.requested.value - GIB)))


def too_little_free(log: StartLog, free: int) -> StartFailure:
    ledger = log.ledger
    message = (
        f"ValueError: Free memory on device cuda:0 ({gib(free)}/{gib(ledger.card.total_bytes)} GiB) on startup is less than "
        f"desired GPU memory utilization ({ledger.settings.utilization}, {gib(ledger.requested.value)} GiB). Decrease GPU "
        "memory utilization or reduce GPU memory used by other processes."
    )
    frames = (
        *_EXECUTOR,
        Frame("vllm/v1/worker/worker_base.py", 331, "init_device"),
        Frame(_WORKER, 535, "init_device"),
        Frame("vllm/v1/worker/utils.py", 762, "request_memory"),
    )
    return StartFailure(Code.STARTUP_FREE_MEMORY_CHECK, message, frames, 1)


def _cache_refused(ledger: Ledger) -> StartFailure | None:
    refusal = ledger.kv_plan.refusal
    is_nothing = ledger.kv.value <= 0 or (refusal is not None and refusal.why is WhyRefused.NO_MEMORY)
    if refusal is None and not is_nothing:
        return None
    frames = (
        *_CACHES,
        Frame("vllm/v1/core/kv_cache_utils.py", 2642, "get_kv_cache_configs"),
        Frame("vllm/v1/core/kv_cache_utils.py", 1010, "_check_enough_kv_cache_memory"),
    )
    if is_nothing:
        message = (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
            f"the engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). {_HELP}"
        )
        return StartFailure(Code.STARTUP_NO_CACHE_BLOCKS, message, frames, 3, is_workers=False)
    assert refusal is not None
    if refusal.why is WhyRefused.NOTHING_FITS:
        message = (
            "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
            "increasing `gpu_memory_utilization`."
        )
        return StartFailure(Code.STARTUP_NO_CACHE_BLOCKS, message, frames, 3, is_workers=False)
    fits = refusal.estimated_max_len
    estimate = f"Based on the available memory, the estimated maximum model length is {fits}. " if fits > 0 else ""
    message = (
        f"ValueError: To serve at least one request with the model's max seq len ({ledger.kv_plan.max_model_len}), "
        f"({gib(refusal.needed_bytes)} GiB KV cache is needed, which is larger than the available KV cache memory "
        f"({gib(refusal.available_bytes)} GiB). {estimate}Try increasing `gpu_memory_utilization` (which also controls CPU "
        f"memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. {_HELP}"
    )
    return StartFailure(Code.STARTUP_CONTEXT_TOO_LONG, message, frames, 3, is_workers=False)


_ALLOCATION = Frame("vllm/v1/executor/abstract.py", 124, "initialize_from_config")
# Where an allocation fails at start: what `doctor` makes of it, how far the start came, and the calls.
_STEPS: Mapping[str, tuple[Code, int, tuple[Frame, ...]]] = {
    "weights": (Code.STARTUP_WEIGHTS_DO_NOT_FIT, 2, (
        *_EXECUTOR,
        Frame(_WORKER, 590, "load_model"),
        Frame(_RUNNER, 405, "load_model"),
        Frame("vllm/model_executor/model_loader/base_loader.py", 55, "load_model"),
        Frame("vllm/model_executor/model_loader/utils.py", 63, "initialize_model"),
        Frame("vllm/model_executor/layers/linear.py", 201, "create_weights"),
    )),
    "profile": (Code.STARTUP_PROFILE_RUN, 2, (
        *_CACHES,
        Frame("vllm/v1/executor/abstract.py", 140, "determine_available_memory"),
        Frame(_WORKER, 690, "determine_available_memory"),
        Frame(_RUNNER, 760, "profile_run"),
        Frame(_RUNNER, 700, "_dummy_run"),
    )),
    "kv-allocation": (Code.STARTUP_KV_ALLOCATION, 3, (
        *_CACHES,
        _ALLOCATION,
        Frame(_WORKER, 880, "initialize_from_config"),
        Frame(_RUNNER, 560, "initialize_kv_cache"),
        Frame("vllm/v1/worker/gpu/attn_utils.py", 180, "_allocate_kv_cache"),
    )),
    "graph-capture": (Code.STARTUP_GRAPH_CAPTURE, 3, (
        *_CACHES,
        _ALLOCATION,
        Frame(_WORKER, 962, "compile_or_warm_up_model"),
        Frame(_RUNNER, 1100, "capture_model"),
        Frame("vllm/v1/worker/gpu/cudagraph_utils.py", 576, "capture"),
    )),
}  # fmt: skip


def _out_of_memory(log: StartLog, sizes: MemorySizes, step: str) -> StartFailure:
    """torch's words for the piece that found no room, when those before it had filled the device."""
    code, steps, frames = _STEPS[step]
    layers = max(1, len(log.shape.layers))
    before, whole, pieces = {
        "weights": (0, sizes.weights, 4 * layers),
        "profile": (sizes.weights, sizes.activation_peak, 4),
        "kv-allocation": (sizes.weights, sizes.kv_cache, layers),
        "graph-capture": (sizes.weights + sizes.kv_cache, sizes.graphs, 8),
    }[step]
    outside = sizes.non_torch if step != "weights" else 0
    room = max(0, log.free_bytes - before - outside)
    piece = max(1, whole // pieces)
    free = room % piece
    live = before + room - free
    text = oom_text(
        total=sizes.total, graphs=0, tried=piece, free=free, own=sizes.context + outside + live, live=live, left=0,
        neighbours=sizes.neighbours,
    )  # fmt: skip
    return StartFailure(code, f"torch.OutOfMemoryError: {text}", frames, steps)


def failed_lines(log: StartLog, failure: StartFailure) -> Iterator[StartLogLine]:
    opening = tuple(opening_lines(log))
    if failure.steps == 0:
        # The API server itself gives up, before there is an engine.
        yield from (line for line in opening if line.process == API_SERVER and "max model len" not in line.text)
        yield StartLogLine(API_SERVER, "", "", traceback(failure.frames, failure.message), 0.1, is_error=True)
        return
    yield from opening
    passed = opening[-1].share
    for step, lines in ((2, loading_lines(log)), (3, measured_lines(log))):
        for line in lines if failure.steps >= step else ():
            yield line
            passed = line.share
    frames, message = failure.frames, failure.message
    if failure.is_workers and len(log.workers) > 1:
        message_text = traceback(frames, message)
        if failure.frames[: len(_EXECUTOR)] == _EXECUTOR:
            for worker in log.workers:
                yield error(worker, "multiproc_executor.py:990", f"WorkerProc failed to start.\n{message_text}", passed)
            frames, message = _EXECUTOR, _WORKER_FAILED
        else:
            for worker in log.workers:
                yield error(worker, "multiproc_executor.py:1063", f"WorkerProc hit an exception.\n{message_text}", passed)
            frames, message = _CACHES, worker_failed(message.partition(": ")[2])
    message_text = traceback((*_BEGIN, *frames), message)
    yield error(ENGINE_CORE, "core.py:1510", f"EngineCore failed to start.\n{message_text}", passed)
    yield StartLogLine(ENGINE_CORE, "", "", message_text, passed, is_error=True)
    yield StartLogLine(API_SERVER, "", "", traceback(_CLIENT, _CORE_FAILED), passed, is_error=True)

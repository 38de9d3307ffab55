"""What a server prints while it serves, when it is stopped, and when its engine dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.engine.flags import is_before
from plimsoll.standin.launch_log import StartLog
from plimsoll.standin.log_format import (
    API_SERVER,
    ENGINE_CORE,
    Frame,
    Line,
    error,
    info,
    traceback,
    uvicorn,
    warning,
    worker_failed,
)

_STEP = (
    Frame("vllm/v1/engine/core.py", 1495, "run_engine_core"),
    Frame("vllm/v1/engine/core.py", 1560, "run_busy_loop"),
    Frame("vllm/v1/engine/core.py", 1600, "_process_engine_step"),
    Frame("vllm/v1/engine/core.py", 760, "step_with_batch_queue"),
)
_EXECUTE = (
    Frame("vllm/v1/worker/worker_base.py", 370, "execute_model"),
    Frame("vllm/v1/worker/gpu_worker.py", 1328, "execute_model"),
    Frame("vllm/v1/worker/gpu/model_runner.py", 1500, "execute_model"),
    Frame("vllm/model_executor/layers/linear.py", 558, "forward"),
)
_SAMPLE = (
    Frame("vllm/v1/worker/gpu_worker.py", 1340, "sample_tokens"),
    Frame("vllm/v1/worker/gpu/model_runner.py", 1560, "sample_tokens"),
    Frame("vllm/v1/worker/gpu/model_runner.py", 980, "sample"),
    Frame("vllm/v1/worker/gpu/sample/sampler.py", 120, "sample"),
)
_OUTPUT = (
    Frame("vllm/v1/engine/async_llm.py", 849, "output_handler"),
    Frame("vllm/v1/engine/core_client.py", 1235, "get_output_async"),
)
_DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
)
_CLOSING = ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete.")
# The release that stopped engines in steps that say so.
STEPS_SAID_SINCE = "0.23.0"
PROCESSES_NAMED_SINCE = "0.27.0"


class Stats(NamedTuple):
    """What the line that comes every ten seconds shows; rates are of the time since the last one."""

    prompt_per_s: float
    generation_per_s: float
    running: int
    waiting: int
    deferred: int = 0
    kv_usage: float = 0.0
    prefix_hit_rate: float | None = None  # None: nothing was looked up yet


def stats_line(stats: Stats) -> Line:
    """One line of throughput. vLLM prints none while it has been idle for two of them."""
    parts = [
        f"Avg prompt throughput: {stats.prompt_per_s:.1f} tokens/s",
        f"Avg generation throughput: {stats.generation_per_s:.1f} tokens/s",
        f"Running: {stats.running} reqs",
        f"Waiting: {stats.waiting + stats.deferred} reqs",
    ]
    if stats.deferred:
        parts.append(f"Deferred: {stats.deferred} reqs")
    parts.append(f"GPU KV cache usage: {100 * stats.kv_usage:.1f}%")
    if stats.prefix_hit_rate is not None:
        parts.append(f"Prefix cache hit rate: {100 * stats.prefix_hit_rate:.1f}%")
    return info(API_SERVER, "loggers.py:335", f"Engine 000: {', '.join(parts)}")


def answer_line(client: str, method: str, path: str, status: str) -> Line:
    """uvicorn's line for one answer; `client` is address and port, `status` as in "200 OK". It goes to stdout."""
    return uvicorn(f'{client} - "{method} {path} HTTP/1.1" {status}')._replace(is_error=False)


def death_lines(log: StartLog, failure: str, stats: Stats, *, is_logits: bool = False) -> tuple[Line, ...]:
    """The engine's end by an exception in a step: `failure` is torch's message, `is_logits` says where it was raised."""
    return tuple(_death(log, failure, stats, _SAMPLE if is_logits else _EXECUTE))


def _death(log: StartLog, failure: str, stats: Stats, frames: tuple[Frame, ...]) -> Iterator[Line]:
    raised = f"torch.OutOfMemoryError: {failure}"
    inner: tuple[Frame, ...] = (Frame("vllm/v1/executor/uniproc_executor.py", 120, "execute_model"), *frames)
    if len(log.workers) > 1:
        busy = (Frame("vllm/v1/executor/multiproc_executor.py", 1055, "worker_busy_loop"), *frames)
        for worker in log.workers:
            text = f"WorkerProc hit an exception.\n{traceback(busy, raised)}"
            yield error(worker, "multiproc_executor.py:1063", text)
        inner = (Frame("vllm/v1/executor/multiproc_executor.py", 420, "get_response"),)
        raised = worker_failed(failure)
    dumped = f"Dumping input data for V1 LLM engine (v{log.release}) with config: {log.config_text}"
    yield error(ENGINE_CORE, "dump_input.py:72", dumped)
    numbers = (
        f"num_running_reqs={stats.running}, num_waiting_reqs={stats.waiting}, num_skipped_waiting_reqs={stats.deferred}, "
        f"step_counter=0, current_wave=0, kv_cache_usage={stats.kv_usage}"
    )
    yield error(ENGINE_CORE, "dump_input.py:81", f"Dumping scheduler stats: SchedulerStats({numbers})")
    told = f"EngineCore encountered a fatal error.\n{traceback((*_STEP, *inner), raised)}"
    yield error(ENGINE_CORE, "core.py:1512", told)
    yield error(API_SERVER, "async_llm.py:906", f"AsyncLLM output_handler failed.\n{traceback(_OUTPUT, _DEAD)}")


def after_death_lines(log: StartLog, pid: int, core_pid: int) -> tuple[Line, ...]:
    """The API server closes its port and is gone, with exit code 0."""
    return (
        *(uvicorn(text) for text in _CLOSING),
        uvicorn(f"Finished server process [{pid}]"),
        *_client_stops(log, "0s", core_pid),
        *_client_stopped(log),
    )


def stop_lines(log: StartLog, timeout_s: int, in_flight: int, core_pid: int) -> tuple[Line, ...]:
    """Somebody asked it to stop; with a timeout requests in flight may end first."""
    mode = "drain" if timeout_s else "abort"
    if is_before(log.release, STEPS_SAID_SINCE):
        return ()
    lines = [
        info(API_SERVER, "launcher.py:254", "[shutdown] API server: shutdown triggered"),
        info(API_SERVER, "launcher.py:270", f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout_s}s"),
        *_client_stops(log, f"{timeout_s}s", core_pid if not timeout_s else None),
        info(ENGINE_CORE, "core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM"),
        info(ENGINE_CORE, "core.py:1635", f"[shutdown] EngineCore: start mode={mode} timeout={timeout_s}s"),
    ]
    if in_flight and timeout_s:
        text = f"[shutdown] EngineCore: draining in-flight requests count={in_flight} timeout={timeout_s}s"
        lines.append(info(ENGINE_CORE, "core.py:1655", text))
    elif in_flight:
        text = f"[shutdown] EngineCore: aborting in-flight requests count={in_flight}"
        lines.append(info(ENGINE_CORE, "core.py:1644", text))
    return tuple(lines)


def stopped_lines(log: StartLog) -> tuple[Line, ...]:
    """Nothing is in flight any more: the rest of a stop that was asked for."""
    closing = [
        uvicorn(text) for text in ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete.")
    ]
    if is_before(log.release, STEPS_SAID_SINCE):
        return tuple(closing)
    done = "[shutdown] EngineCore: request processing complete; starting resource teardown"
    return (
        info(ENGINE_CORE, "core.py:1666", done),
        info(ENGINE_CORE, "core.py:1499", "[shutdown] EngineCore: exiting busy loop"),
        *_client_stopped(log),
        info(API_SERVER, "launcher.py:279", "[shutdown] API server: engine client stopped"),
        info(API_SERVER, "launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown"),
        info(API_SERVER, "launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server"),
        *closing,
    )


def _client_stops(log: StartLog, timeout: str, core_pid: int | None) -> Iterator[Line]:
    if is_before(log.release, STEPS_SAID_SINCE):
        return
    yield info(API_SERVER, "core_client.py:770", f"[shutdown] MPClient: start timeout={timeout}")
    yield info(API_SERVER, "core_client.py:772", "[shutdown] MPClient: stopping engine manager")
    are_named = not is_before(log.release, PROCESSES_NAMED_SINCE)
    if are_named:
        yield info(API_SERVER, "utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
    if core_pid is not None:
        text = "[shutdown] Process manager: force killing remaining processes count=1"
        yield warning(API_SERVER, "utils.py:648", text)
        if are_named:
            text = f"[shutdown] Process manager: force killing remaining process EngineCore pid {core_pid}"
            yield warning(API_SERVER, "utils.py:653", text)


def _client_stopped(log: StartLog) -> Iterator[Line]:
    if is_before(log.release, STEPS_SAID_SINCE):
        return
    yield info(API_SERVER, "core_client.py:774", "[shutdown] MPClient: engine manager stopped")
    yield info(API_SERVER, "core_client.py:775", "[shutdown] MPClient: cleaning up background resources")
    yield info(API_SERVER, "core_client.py:777", "[shutdown] MPClient: complete")

"""What a start prints, with the plan's figures in vLLM's words.

The shares of a start's time are those of an 8B model on an H200: processes come up, weights are loaded, the model is compiled
and measured, graphs are captured, the port opens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import Ledger
from plimsoll.units import GIB
from plimsoll.vllm.versions import Behaviour

# How vLLM writes a line of its log: who speaks, how grave it is, when, where in its source, and what.

API_SERVER = "APIServer"
ENGINE_CORE = "EngineCore"


class StartLogLine(NamedTuple):
    """One message, before it is known when and by which process it will be printed."""

    process: str
    level: str  # "": printed past the logger, as tracebacks and uvicorn's lines are
    place: str
    text: str
    share: float = 0.0  # of the start's time that has passed by then
    is_error: bool = False  # goes to stderr


class Frame(NamedTuple):
    """One call of a traceback."""

    file: str
    line: int
    function: str


def info(process: str, place: str, text: str, share: float = 0.0) -> StartLogLine:
    return StartLogLine(process, "INFO", place, text, share)


def warning(process: str, place: str, text: str, share: float = 0.0) -> StartLogLine:
    return StartLogLine(process, "WARNING", place, text, share)


def error(process: str, place: str, text: str, share: float = 0.0) -> StartLogLine:
    return StartLogLine(process, "ERROR", place, text, share)


def uvicorn(text: str, share: float = 0.0) -> StartLogLine:
    """A line of the web server's own logger, which writes to stderr."""
    return StartLogLine(API_SERVER, "", "", f"INFO:     {text}", share, is_error=True)


def traceback(frames: Sequence[Frame], failure: str) -> str:
    calls = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames]
    return "\n".join(("Traceback (most recent call last):", *calls, failure))


def worker_failed(message: str) -> str:
    """The message of the engine core when a worker in another process fails."""
    return f"RuntimeError: Worker failed with error '{message}', please check the stack trace above for the root cause"


def written(line: StartLogLine, stamp: str, pid: int, release: str) -> str:
    """The line as it stands in the log, without its end; `stamp` is like 11-15 12:00:00. A text of several lines stays so."""
    who = f"({line.process} pid={pid}) "
    if line.level:
        who += f"{line.level} {stamp} [{line.place}] "
    elif Behaviour.LOGGER_NAMES_PROCESS.is_in(release):
        who = ""
    return "\n".join(who + part for part in line.text.split("\n"))


def gib(size: int) -> str:
    """A size as vLLM prints it: rounded to two digits, without the last zero."""
    return str(round(size / GIB, 2))


_BEGUN, _CORE, _DEVICE, _LOADED, _MEASURED, _CAPTURED = 0.0, 0.28, 0.30, 0.35, 0.70, 0.78
DEV_WARNING = "SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!"
# The routes that the stand-in serves, too.
ROUTES = (
    ("/health", "GET"), ("/metrics", "GET"), ("/version", "GET"), ("/ping", "GET"), ("/ping", "POST"), ("/tokenize", "POST"),
    ("/detokenize", "POST"), ("/v1/models", "GET"), ("/v1/chat/completions", "POST"), ("/v1/completions", "POST"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartLog:
    """All that the log of one server is made of."""

    ledger: Ledger
    shape: ModelShape
    model: str
    arguments: str  # "non-default args", as vLLM prints them
    address: str = "http://127.0.0.1:8000"
    is_dev_mode: bool = False
    seconds: float = 0.0  # that the start takes
    stats_interval_s: float = 10.0  # between two lines of throughput; 0: there are none
    shows_requests: bool = True  # one line for each answer

    @property
    def release(self) -> str:
        return self.ledger.settings.release

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers: a single one lives in the engine's own process."""
        settings = self.ledger.settings
        if settings.tensor_parallel * settings.pipeline_parallel == 1:
            return (ENGINE_CORE,)
        if settings.pipeline_parallel == 1:
            return tuple(f"Worker_TP{rank}" for rank in range(settings.tensor_parallel))
        ranks = [(stage, rank) for stage in range(settings.pipeline_parallel) for rank in range(settings.tensor_parallel)]
        return tuple(f"Worker_PP{stage}_TP{rank}" for stage, rank in ranks)

    @property
    def free_bytes(self) -> int:
        card = self.ledger.card
        return max(0, card.total_bytes - card.used_bytes - self.ledger.context.value)

    @property
    def config_text(self) -> str:
        settings, length = self.ledger.settings, self.ledger.kv_plan.max_model_len
        return (
            f"model={self.model!r}, speculative_config={settings.speculative!r}, tokenizer={self.model!r}, "
            f"dtype=torch.{settings.model_dtype}, max_seq_len={length}, "
            f"tensor_parallel_size={settings.tensor_parallel}, pipeline_parallel_size={settings.pipeline_parallel}, "
            f"data_parallel_size={settings.data_parallel}, quantization={settings.quantization}, "
            f"enforce_eager={settings.enforce_eager}, kv_cache_dtype={settings.kv_cache_dtype}, device_config=cuda, "
            f"enable_prefix_caching={settings.prefix_caching}, enable_chunked_prefill={settings.chunked_prefill}"
        )


def start_lines(log: StartLog, pid: int) -> tuple[StartLogLine, ...]:
    """Every line up to the last one, "Application startup complete."; `pid` is the API server's."""
    measured = (*loading_lines(log), *measured_lines(log), *_size_lines(log), *_graph_lines(log), *_summary(log))
    return (*opening_lines(log), *measured, *_ready_lines(log, pid))


def opening_lines(log: StartLog) -> Iterator[StartLogLine]:
    """Lines until the engine's process is there."""
    settings = log.ledger.settings
    # Since 0.15 vLLM draws its name here, the version beside it. The drawing is its own: one line, as before, says as much.
    yield info(API_SERVER, "api_server.py:1839", f"vLLM API server version {log.release}")
    yield info(API_SERVER, "api_utils.py:286", f"non-default args: {log.arguments}")
    architecture = log.shape.architectures[0] if log.shape.architectures else log.shape.model_type
    yield info(API_SERVER, "model.py:733", f"Resolved architecture: {architecture}")
    length = settings.context
    yield info(API_SERVER, "model.py:2152", f"Using max model len {length}")
    if settings.chunked_prefill:
        tokens = settings.max_num_batched_tokens
        yield info(API_SERVER, "scheduler.py:307", f"Chunked prefill is enabled with max_num_batched_tokens={tokens}.")
    if settings.async_scheduling:
        yield info(API_SERVER, "vllm.py:1042", "Asynchronous scheduling is enabled.")
    if settings.enforce_eager:
        yield warning(API_SERVER, "vllm.py:1703", "Enforce eager set, disabling torch.compile and CUDAGraphs.")
    text = f"Initializing a V1 LLM engine (v{log.release}) with config: {log.config_text}"
    yield info(ENGINE_CORE, "core.py:133", text, _CORE)


def loading_lines(log: StartLog) -> Iterator[StartLogLine]:
    """Lines from the device's start until the model is about to be loaded."""
    for rank, worker in enumerate(log.workers):
        assigned = f"rank {rank} in world size {len(log.workers)} is assigned as DP rank 0"
        yield info(worker, "parallel_state.py:2350", assigned, _DEVICE)
    if log.ledger.settings.v2_runner:
        yield info(log.workers[0], "gpu_worker.py:518", "Using V2 Model Runner", _DEVICE)
    yield info(log.workers[0], "model_runner.py:400", f"Starting to load model {log.model}...", _DEVICE)


def measured_lines(log: StartLog) -> Iterator[StartLogLine]:
    """Lines until it is known what is left for the cache."""
    ledger, settings, seconds = log.ledger, log.ledger.settings, log.seconds
    weights = gib(ledger.weights.value)
    took = (_LOADED - _DEVICE) * seconds
    memory = "memory " if not settings.v2_runner or Behaviour.V2_RUNNER_SAYS_MEMORY.is_in(log.release) else ""
    text = f"Model loading took {weights} GiB {memory}and {took:.6f} seconds"
    yield info(log.workers[0], "model_runner.py:425", text, _LOADED)
    if not settings.enforce_eager:
        yield info(log.workers[0], "monitor.py:53", f"torch.compile took {0.3 * seconds:.2f} s in total", _MEASURED)
    if settings.kv_cache_memory_bytes is not None:
        text = (
            f"Initial free memory {gib(log.free_bytes)} GiB, reserved {gib(settings.kv_cache_memory_bytes)} GiB memory for KV "
            "Cache as specified by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the "
            "gpu_memory_utilization config."
        )
        yield info(log.workers[0], "gpu_worker.py:669", text, _MEASURED)
        return
    if ledger.graphs.value:
        text = f"Estimated CUDA graph memory: {ledger.graphs.value / GIB:.2f} GiB total"
        yield info(log.workers[0], "gpu_model_runner.py:6474", text, _MEASURED)
    text = f"Available KV cache memory: {gib(_available(ledger))} GiB"
    yield info(log.workers[0], "gpu_worker.py:759", text, _MEASURED)
    if ledger.graphs.value:
        now, delta = settings.utilization, ledger.graphs.value / ledger.card.total_bytes
        text = (
            "CUDA graph memory profiling is enabled (default since v0.21.0). The current "
            f"--gpu-memory-utilization={now:.4f} is equivalent to --gpu-memory-utilization={now - delta:.4f} without CUDA "
            "graph memory profiling. To maintain the same effective KV cache size as before, increase "
            f"--gpu-memory-utilization to {min(now + delta, 1.0):.4f}. To disable, set "
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0."
        )
        yield info(log.workers[0], "gpu_worker.py:774", text, _MEASURED)


def _available(ledger: Ledger) -> int:
    """What is left of the budget, also where a number of blocks was set by hand."""
    spent = (ledger.weights, ledger.non_torch, ledger.activation, ledger.graphs)
    return ledger.requested.value - sum(term.value for term in spent)


def _size_lines(log: StartLog) -> Iterator[StartLogLine]:
    ledger, settings, kv = log.ledger, log.ledger.settings, log.ledger.kv_plan
    if settings.num_gpu_blocks_override is not None and kv.bytes_per_block:
        given = settings.kv_cache_memory_bytes
        computed = max(0, _available(ledger) if given is None else given) // kv.bytes_per_block
        text = f"Overriding num_gpu_blocks={computed} with num_gpu_blocks_override={settings.num_gpu_blocks_override}"
        yield info(ENGINE_CORE, "kv_cache_utils.py:2619", text, _MEASURED)
    if settings.auto_fit:
        is_whole = kv.max_model_len >= log.shape.max_context
        fits = f"full model context length {kv.max_model_len} fits in available KV cache memory"
        reduced = f"reduced from {log.shape.max_context} to {kv.max_model_len} to fit in available KV cache memory"
        text = f"Auto-fit max_model_len: {fits if is_whole else reduced} ({gib(ledger.kv.value)} GiB GPU)"
        yield info(ENGINE_CORE, "kv_cache_utils.py:2477", text, _MEASURED)
    size = f"GPU KV cache size: {kv.tokens:,} tokens"
    concurrency = kv.max_concurrency or kv.num_blocks / max(1, kv.blocks_per_request) * bool(kv.groups)
    most = f"Maximum concurrency for {kv.max_model_len:,} tokens per request: {concurrency:.2f}x"
    if not Behaviour.CACHE_IN_ONE_LINE.is_in(log.release):
        yield info(ENGINE_CORE, "kv_cache_utils.py:2146", size, _MEASURED)
        yield info(ENGINE_CORE, "kv_cache_utils.py:2147", most, _MEASURED)
    else:
        yield info(ENGINE_CORE, "kv_cache_utils.py:2327", f"{size}, {most}", _MEASURED)


def _graph_lines(log: StartLog) -> Iterator[StartLogLine]:
    ledger = log.ledger
    if ledger.settings.enforce_eager:
        return
    actual, estimated = ledger.graphs_actual.value, ledger.graphs.value
    took = (_CAPTURED - _MEASURED) * log.seconds
    text = f"Graph capturing finished in {took:.0f} secs, took {actual / GIB:.2f} GiB"
    yield info(log.workers[0], "model_runner.py:1127", text, _CAPTURED)
    if estimated:
        apart = abs(actual - estimated)
        text = (
            f"CUDA graph pool memory: {gib(actual)} GiB (actual), {gib(estimated)} GiB (estimated), difference: "
            f"{gib(apart)} GiB ({100 * apart / max(actual, 1):.1f}%)."
        )
        yield info(log.workers[0], "gpu_worker.py:971", text, _CAPTURED)


def _summary(log: StartLog) -> Iterator[StartLogLine]:
    ledger, settings = log.ledger, log.ledger.settings
    if not Behaviour.MEMORY_SUMMARY.is_in(log.release) or settings.kv_cache_memory_bytes is not None:
        return
    activation = gib(ledger.activation.value + ledger.graphs.value)
    if not Behaviour.CONSUMED_MEMORY.is_in(log.release):
        used = f"{gib(ledger.weights.value)} GiB for weight, {activation} GiB for peak activation, "
        used += f"{gib(ledger.non_torch.value)} GiB for non-torch memory"
    else:
        used = f"{gib(ledger.weights.value + ledger.non_torch.value)} GiB for consumed memory (weights + non-torch), "
        used += f"{activation} GiB for peak activation"
    text = (
        f"Free memory on device ({gib(log.free_bytes)}/{gib(ledger.card.total_bytes)} GiB) on startup. Desired GPU memory "
        f"utilization is ({settings.utilization}, {gib(ledger.requested.value)} GiB). Actual usage is {used}, and "
        f"{gib(ledger.graphs_actual.value)} GiB for CUDAGraph memory. Current kv cache memory in use is "
        f"{gib(_available(ledger))} GiB."
    )
    yield info(log.workers[0], "gpu_worker.py:1034", text, _CAPTURED)


def _ready_lines(log: StartLog, pid: int) -> Iterator[StartLogLine]:
    took = (1 - _LOADED) * log.seconds
    yield info(ENGINE_CORE, "core.py:402", f"init engine (profile, create kv cache, warmup model) took {took:.2f} s", 1.0)
    yield info(API_SERVER, "entry.py:136", "Supported tasks: ['generate']", 1.0)
    if log.is_dev_mode:
        yield warning(API_SERVER, "__init__.py:45", DEV_WARNING, 1.0)
    yield info(API_SERVER, "entry.py:140", f"Starting vLLM server on {log.address}", 1.0)
    yield info(API_SERVER, "launcher.py:186", "Available routes are:", 1.0)
    for path, method in ROUTES:
        yield info(API_SERVER, "launcher.py:195", f"Route: {path}, Methods: {method}", 1.0)
    yield uvicorn(f"Started server process [{pid}]", 1.0)
    yield uvicorn("Waiting for application startup.", 1.0)
    yield uvicorn("Application startup complete.", 1.0)


# What a server prints while it serves, when it is stopped, and when its engine dies.

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


class Stats(NamedTuple):
    """Figures of the line that comes every ten seconds; rates are of the time since the last line."""

    prompt_per_s: float
    generation_per_s: float
    running: int
    waiting: int
    deferred: int = 0
    kv_usage: float = 0.0
    prefix_hit_rate: float | None = None  # None: nothing was looked up yet


def stats_line(stats: Stats) -> StartLogLine:
    """One line of throughput. vLLM prints none while it has been idle for two of them."""
    figures = [
        f"Avg prompt throughput: {stats.prompt_per_s:.1f} tokens/s",
        f"Avg generation throughput: {stats.generation_per_s:.1f} tokens/s",
        f"Running: {stats.running} reqs",
        f"Waiting: {stats.waiting + stats.deferred} reqs",
    ]
    if stats.deferred:
        figures.append(f"Deferred: {stats.deferred} reqs")
    figures.append(f"GPU KV cache usage: {100 * stats.kv_usage:.1f}%")
    if stats.prefix_hit_rate is not None:
        figures.append(f"Prefix cache hit rate: {100 * stats.prefix_hit_rate:.1f}%")
    return info(API_SERVER, "loggers.py:335", f"Engine 000: {', '.join(figures)}")


def death_lines(log: StartLog, failure: str, stats: Stats, *, is_logits: bool = False) -> Iterator[StartLogLine]:
    """The engine's end by an exception in a step: `failure` is torch's message, `is_logits` tells where it was raised."""
    frames = _SAMPLE if is_logits else _EXECUTE
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
    message = f"EngineCore encountered a fatal error.\n{traceback((*_STEP, *inner), raised)}"
    yield error(ENGINE_CORE, "core.py:1512", message)
    yield error(API_SERVER, "async_llm.py:906", f"AsyncLLM output_handler failed.\n{traceback(_OUTPUT, _DEAD)}")


def after_death_lines(log: StartLog, pid: int) -> tuple[StartLogLine, ...]:
    """The API server closes its port and is gone, with exit code 0."""
    return (
        *(uvicorn(text) for text in _CLOSING),
        uvicorn(f"Finished server process [{pid}]"),
        *_client_stops(log, "0s", pid),
        *_client_stopped(log),
    )


def stop_lines(log: StartLog, timeout_s: int, in_flight: int, pid: int) -> tuple[StartLogLine, ...]:
    """Somebody asked it to stop; with a timeout requests in flight may end first."""
    mode = "drain" if timeout_s else "abort"
    if not Behaviour.SHUTDOWN_STEPS.is_in(log.release):
        return ()
    lines = [
        info(API_SERVER, "launcher.py:254", "[shutdown] API server: shutdown triggered"),
        info(API_SERVER, "launcher.py:270", f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout_s}s"),
        *_client_stops(log, f"{timeout_s}s", pid if not timeout_s else None),
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


def stopped_lines(log: StartLog) -> tuple[StartLogLine, ...]:
    """Nothing is in flight any more: the rest of a stop that was asked for."""
    closing = [uvicorn(text) for text in _CLOSING]
    if not Behaviour.SHUTDOWN_STEPS.is_in(log.release):
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


def _client_stops(log: StartLog, timeout: str, pid: int | None) -> Iterator[StartLogLine]:
    if not Behaviour.SHUTDOWN_STEPS.is_in(log.release):
        return
    yield info(API_SERVER, "core_client.py:770", f"[shutdown] MPClient: start timeout={timeout}")
    yield info(API_SERVER, "core_client.py:772", "[shutdown] MPClient: stopping engine manager")
    are_named = Behaviour.SHUTDOWN_PROCESSES.is_in(log.release)
    if are_named:
        yield info(API_SERVER, "utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
    if pid is not None:
        text = "[shutdown] Process manager: force killing remaining processes count=1"
        yield warning(API_SERVER, "utils.py:648", text)
        if are_named:
            text = f"[shutdown] Process manager: force killing remaining process EngineCore pid {pid}"
            yield warning(API_SERVER, "utils.py:653", text)


def _client_stopped(log: StartLog) -> Iterator[StartLogLine]:
    if not Behaviour.SHUTDOWN_STEPS.is_in(log.release):
        return
    yield info(API_SERVER, "core_client.py:774", "[shutdown] MPClient: engine manager stopped")
    yield info(API_SERVER, "core_client.py:775", "[shutdown] MPClient: cleaning up background resources")
    yield info(API_SERVER, "core_client.py:777", "[shutdown] MPClient: complete")

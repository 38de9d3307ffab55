"""What a start prints, with the plan's figures in vLLM's words.

The shares of a start's time are those of an 8B model on an H200: processes come up, weights are loaded, the model is compiled
and measured, graphs are captured, the port opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from plimsoll.domain.model import ModelShape
from plimsoll.domain.units import GIB
from plimsoll.engine.flags import is_before
from plimsoll.plan.ledger import Ledger, model_dtype
from plimsoll.plan.settings import AUTO_FIT
from plimsoll.standin.log_format import API_SERVER, ENGINE_CORE, Line, gib, info, uvicorn, warning

ONE_LINE_CACHE_SINCE = "0.28.0"  # tokens and concurrency in one line
SUMMARY_SHOWN_SINCE = "0.26.0"  # before, the summary of memory was there at DEBUG only
CONSUMED_SINCE = "0.27.0"  # weights and what is outside torch became one figure
SECOND_RUNNER_SAYS_MEMORY = "0.28.0"

_BEGUN, _CORE, _DEVICE, _LOADED, _MEASURED, _CAPTURED = 0.0, 0.28, 0.30, 0.35, 0.70, 0.78
DEV_WARNING = "SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!"
ROUTES = (
    ("/health", "GET"), ("/metrics", "GET"), ("/version", "GET"), ("/ping", "GET"), ("/ping", "POST"), ("/tokenize", "POST"),
    ("/detokenize", "POST"), ("/v1/models", "GET"), ("/v1/chat/completions", "POST"), ("/v1/completions", "POST"),
)  # fmt: skip
"""Those that the stand-in serves, too."""


class StartLog(NamedTuple):
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
        """Whose words are used."""
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
        """What vLLM's snapshot finds free."""
        card = self.ledger.card
        return max(0, card.total_bytes - card.used_bytes - self.ledger.context.value)

    @property
    def config_text(self) -> str:
        """The engine's configuration, by the keys that matter."""
        settings, length = self.ledger.settings, self.ledger.kv_plan.max_model_len
        return (
            f"model={self.model!r}, speculative_config={settings.speculative!r}, tokenizer={self.model!r}, "
            f"dtype=torch.{model_dtype(self.shape, settings)}, max_seq_len={length}, "
            f"tensor_parallel_size={settings.tensor_parallel}, pipeline_parallel_size={settings.pipeline_parallel}, "
            f"data_parallel_size={settings.data_parallel}, quantization={settings.quantization}, "
            f"enforce_eager={settings.enforce_eager}, kv_cache_dtype={settings.kv_cache_dtype}, device_config=cuda, "
            f"enable_prefix_caching={settings.prefix_caching}, enable_chunked_prefill={settings.chunked_prefill}"
        )


def start_lines(log: StartLog, pid: int) -> tuple[Line, ...]:
    """Every line up to the last one, "Application startup complete."; `pid` is the API server's."""
    measured = (*loading_lines(log), *measured_lines(log), *_size_lines(log), *_graph_lines(log), *_summary(log))
    return (*opening_lines(log), *measured, *_ready_lines(log, pid))


def opening_lines(log: StartLog) -> tuple[Line, ...]:
    """Until the engine's process is there."""
    return tuple(_opening(log))


def _opening(log: StartLog) -> Iterator[Line]:
    settings = log.ledger.settings
    # Since 0.15 vLLM draws its name here, the version beside it. The drawing is its own: one line, as before, says as much.
    yield info(API_SERVER, "api_server.py:1839", f"vLLM API server version {log.release}")
    yield info(API_SERVER, "api_utils.py:286", f"non-default args: {log.arguments}")
    architecture = log.shape.architectures[0] if log.shape.architectures else log.shape.model_type
    yield info(API_SERVER, "model.py:733", f"Resolved architecture: {architecture}")
    yield info(API_SERVER, "model.py:2152", f"Using max model len {_asked_length(log)}")
    if settings.chunked_prefill:
        tokens = settings.max_num_batched_tokens
        yield info(API_SERVER, "scheduler.py:307", f"Chunked prefill is enabled with max_num_batched_tokens={tokens}.")
    if settings.async_scheduling:
        yield info(API_SERVER, "vllm.py:1042", "Asynchronous scheduling is enabled.")
    if settings.enforce_eager:
        yield warning(API_SERVER, "vllm.py:1703", "Enforce eager set, disabling torch.compile and CUDAGraphs.")
    text = f"Initializing a V1 LLM engine (v{log.release}) with config: {log.config_text}"
    yield info(ENGINE_CORE, "core.py:133", text, _CORE)


def _asked_length(log: StartLog) -> int:
    asked = log.ledger.settings.max_model_len
    return log.shape.max_context if asked == AUTO_FIT else asked


def loading_lines(log: StartLog) -> tuple[Line, ...]:
    """The device is there and the model is about to be loaded."""
    found = []
    world = len(log.workers)
    for rank, worker in enumerate(log.workers):
        assigned = f"rank {rank} in world size {world} is assigned as DP rank 0"
        found.append(info(worker, "parallel_state.py:2350", assigned, _DEVICE))
    if log.ledger.settings.v2_runner:
        found.append(info(log.workers[0], "gpu_worker.py:518", "Using V2 Model Runner", _DEVICE))
    found.append(info(log.workers[0], "model_runner.py:400", f"Starting to load model {log.model}...", _DEVICE))
    return tuple(found)


def measured_lines(log: StartLog) -> tuple[Line, ...]:
    """Weights are loaded, and it is known what is left for the cache."""
    return tuple(_measured(log))


def _measured(log: StartLog) -> Iterator[Line]:
    ledger, settings, seconds = log.ledger, log.ledger.settings, log.seconds
    weights = gib(ledger.weights.value)
    took = (_LOADED - _DEVICE) * seconds
    memory = "memory " if not (settings.v2_runner and is_before(log.release, SECOND_RUNNER_SAYS_MEMORY)) else ""
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


def _size_lines(log: StartLog) -> Iterator[Line]:
    ledger, settings, kv = log.ledger, log.ledger.settings, log.ledger.kv_plan
    if settings.num_gpu_blocks_override is not None and kv.bytes_per_block:
        given = settings.kv_cache_memory_bytes
        computed = max(0, _available(ledger) if given is None else given) // kv.bytes_per_block
        text = f"Overriding num_gpu_blocks={computed} with num_gpu_blocks_override={settings.num_gpu_blocks_override}"
        yield info(ENGINE_CORE, "kv_cache_utils.py:2619", text, _MEASURED)
    if settings.max_model_len == AUTO_FIT:
        is_whole = kv.max_model_len >= log.shape.max_context
        fits = f"full model context length {kv.max_model_len} fits in available KV cache memory"
        reduced = f"reduced from {log.shape.max_context} to {kv.max_model_len} to fit in available KV cache memory"
        text = f"Auto-fit max_model_len: {fits if is_whole else reduced} ({gib(ledger.kv.value)} GiB GPU)"
        yield info(ENGINE_CORE, "kv_cache_utils.py:2477", text, _MEASURED)
    size = f"GPU KV cache size: {kv.tokens:,} tokens"
    most = f"Maximum concurrency for {kv.max_model_len:,} tokens per request: {kv.max_concurrency or 0:.2f}x"
    if is_before(log.release, ONE_LINE_CACHE_SINCE):
        yield info(ENGINE_CORE, "kv_cache_utils.py:2146", size, _MEASURED)
        yield info(ENGINE_CORE, "kv_cache_utils.py:2147", most, _MEASURED)
    else:
        yield info(ENGINE_CORE, "kv_cache_utils.py:2327", f"{size}, {most}", _MEASURED)


def _graph_lines(log: StartLog) -> Iterator[Line]:
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


def _summary(log: StartLog) -> Iterator[Line]:
    """The whole ledger in one line, where a release shows it."""
    ledger, settings = log.ledger, log.ledger.settings
    if is_before(log.release, SUMMARY_SHOWN_SINCE) or settings.kv_cache_memory_bytes is not None:
        return
    activation = gib(ledger.activation.value + ledger.graphs.value)
    if is_before(log.release, CONSUMED_SINCE):
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


def _ready_lines(log: StartLog, pid: int) -> Iterator[Line]:
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


def non_default_arguments(pairs: Iterable[tuple[str, object]]) -> str:
    """As vLLM prints them: a dictionary by the names of the parser's fields."""
    return "{" + ", ".join(f"{name!r}: {value!r}" for name, value in pairs) + "}"

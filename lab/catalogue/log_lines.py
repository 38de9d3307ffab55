"""The lines of a vLLM log that carry a number or name a failure; docs/catalogue.md lists them.

`fragment` is a piece of the message as it stands in vLLM's source: `data/log_lines.json` of plimsoll.vllm records in which
releases it was found, so that `seen_in` is evidence and not memory. Lines of torch, NCCL and the kernel have none.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.vllm.log_lines import GRAPH_ESTIMATE, KV_AVAILABLE, KV_SIZE, PERIODIC_STATS, WEIGHTS_LOADED
from plimsoll.vllm.versions import Span, spans_of

_NUMBER = r"-?[\d.]+"
_COUNT = r"[\d,]+"


class LogLine(NamedTuple):
    """One message: how to recognise it, what it says, who says it."""

    name: str
    pattern: str  # a regular expression to search within one line, with named groups for its figures
    says: str
    fragment: str | None = None
    speaker: str = "vllm"

    def seen_in(self) -> tuple[Span, ...]:
        """The releases whose source holds this message."""
        return spans_of("log_lines", self.name)


LOG_LINES: tuple[LogLine, ...] = (
    # Who is speaking, and how it was started.
    LogLine("engine-version", r"LLM engine \(v(?P<version>[^)\s]+)\)", "the version that runs", "LLM engine (v"),
    LogLine("api-server-version", r"API server version (?P<version>\S+)", "the version that runs", "API server version"),
    LogLine("non-default-args", r"non-default args: (?P<args>\{.*)",
            "the flags that differ from their defaults; may hold secrets", "non-default args"),
    LogLine("unknown-environment", r"Unknown vLLM environment variable detected: (?P<name>\w+)",
            "a VLLM_ variable that this version does not know", "Unknown vLLM environment variable"),
    LogLine("v2-runner", r"Using V2 Model Runner", "the second model runner is in use", "Using V2 Model Runner"),
    LogLine("max-model-len", r"Using max model len (?P<tokens>\d+)", "the context length in force", "Using max model len"),
    LogLine("chunked-prefill", r"Chunked prefill is enabled with max_num_batched_tokens=(?P<tokens>\d+)",
            "the token budget of one step", "Chunked prefill is enabled with"),
    # Memory at start, term by term.
    LogLine("weights-loaded", WEIGHTS_LOADED,
            "what the weights take on this GPU (GB up to 0.8.3 means GiB too)", "Model loading took"),
    LogLine("kv-available", KV_AVAILABLE,
            "what is left for the KV cache; negative when nothing is", "Available KV cache memory"),
    LogLine("kv-size",
            KV_SIZE,
            "tokens the cache holds; for hybrid models the meaning changed with 0.24", "KV cache size: "),
    LogLine("max-concurrency",
            rf"Maximum concurrency for (?P<context>{_COUNT}) tokens per request: (?P<concurrency>{_NUMBER})x",
            "how many requests of full length fit at once", "Maximum concurrency for"),
    LogLine("blocks-v0", r"# (?:GPU|\w+) blocks: (?P<gpu_blocks>\d+), # CPU blocks: (?P<cpu_blocks>\d+)",
            "the block counts of the first engine (V0)", "blocks: %d, # CPU"),
    LogLine("memory-summary",
           rf"Free memory on device(?: \S+)? \((?P<free_gib>{_NUMBER})/(?P<total_gib>{_NUMBER}) GiB\) on startup\. Desired GPU "
            rf"memory utilization is \((?P<utilization>{_NUMBER}), (?P<requested_gib>{_NUMBER}) GiB\)\. Actual usage is "
            rf"(?P<used_gib>{_NUMBER}) GiB for (?P<used_is>weight|consumed memory)[^,]*, "
            rf"(?P<activation_gib>{_NUMBER}) GiB for peak activation", "the whole start-up ledger in one line",
            "Desired GPU memory utilization is"),
    LogLine("profile-detail", rf"Memory profiling takes (?P<seconds>{_NUMBER}) seconds", "the start of the profiling summary",
            "Memory profiling takes"),
    LogLine("graph-estimate", GRAPH_ESTIMATE,
            "what is set aside for CUDA graphs (subtracted from the KV cache by default from 0.20)",
            "Estimated CUDA graph memory"),
    LogLine("graph-actual",
            rf"CUDA graph pool memory: (?P<gib>{_NUMBER}) GiB \(actual\), (?P<estimated_gib>{_NUMBER}) GiB \(estimated\)",
            "what the graphs took, beside the estimate", "CUDA graph pool memory"),
    LogLine("graphs-captured", rf"Graph capturing finished in (?P<seconds>\d+) secs(?:, took (?P<gib>{_NUMBER}) GiB)?",
            "CUDA graph capture is over", "Graph capturing finished in"),
    LogLine("auto-fit",
            r"Auto-fit max_model_len: (?:reduced from (?P<asked>\d+) to (?P<fits>\d+)|full model context length (?P<full>\d+))",
            "vLLM chose the context length to fit the cache", "Auto-fit max_model_len"),
    LogLine("hybrid-block-size", r"Setting attention block size to (?P<tokens>\d+) tokens",
            "a hybrid model raised the block size", "Setting attention block size to"),
    LogLine("mamba-padding", rf"Padding mamba page size by (?P<percent>{_NUMBER})%",
            "memory lost to page padding in a hybrid model", "Padding mamba page size by"),
    LogLine("padding-layers", rf"Add (?P<layers>\d+) padding layers, may waste at most (?P<percent>{_NUMBER})%",
            "memory lost to uneven layer groups", "padding layers, may waste at most"),
    LogLine("blocks-override", r"Overriding num_gpu_blocks=(?P<computed>\d+) with num_gpu_blocks_override=(?P<given>\d+)",
            "the block count was set by hand", "Overriding num_gpu_blocks="),
    LogLine("hybrid-manager-off", r"Hybrid KV cache manager is disabled",
            "sliding-window layers are kept as full ones: cache wasted", "Hybrid KV cache manager is disabled"),
    LogLine("encoder-budget", r"Encoder cache will be initialized with a budget of (?P<tokens>[\d,]+) tokens",
            "multimodal encoder memory is in play", "Encoder cache will be"),
    LogLine("engine-ready", rf"init engine \(profile, create kv cache, warmup model\) took (?P<seconds>{_NUMBER}) s",
            "start-up got past memory", "init engine (profile"),
    # While serving.
    LogLine("periodic-stats",
            PERIODIC_STATS,
            "one line every ten seconds while there is work; says nothing of preemption in V1", "Avg prompt throughput"),
    LogLine("preempted-v0", r"is preempted by .* mode because there is not enough KV cache space",
            "a preemption of the first engine (V0); V1 prints none", "is preempted by"),
    LogLine("sleep-freed",
            rf"Sleep mode freed (?P<freed_gib>{_NUMBER}) GiB memory, (?P<still_gib>{_NUMBER}) GiB memory is still in use",
            "the engine was put to sleep", "Sleep mode freed"),
    LogLine("prefix-reset-failed", r"Failed to reset prefix cache because some blocks \((?P<blocks>\d+)\) are not freed yet",
            "a reset was asked for while requests held blocks", "Failed to reset prefix cache"),
    LogLine("shutdown-asked", r"\[shutdown\] API server: shutdown triggered", "somebody stopped the server on purpose",
            "API server: shutdown"),
    LogLine("draining", r"\[shutdown\] EngineCore: draining in-flight requests count=(?P<count>\d+) timeout=(?P<seconds>\d+)s",
            "a graceful stop is under way", "EngineCore: draining"),
    # Failures at start.
    LogLine("free-memory-check",
            rf"Free memory on device \S+ ?\((?P<free_gib>{_NUMBER})/(?P<total_gib>{_NUMBER}) GiB\) on startup is less than "
            rf"desired GPU memory utilization \((?P<utilization>{_NUMBER}), (?P<requested_gib>{_NUMBER}) GiB\)",
            "somebody else holds the memory that was asked for", "on startup is less than desired GPU memory utilization"),
    LogLine("held-weights", r"Externally held weights on device .* exceed the desired GPU memory utilization",
            "a preload daemon holds more than the budget", "Externally held weights"),
    LogLine("weights-too-large", r"Failed to load model - not enough GPU memory",
            "the weights do not fit; its advice to lower the utilisation does not help", "Failed to load model - not enough"),
    LogLine("profile-assertion", r"Error in memory profiling\. Initial free memory",
            "memory was freed by another process while vLLM measured", "Error in memory profiling"),
    LogLine("no-cache-blocks", r"No available memory for the cache blocks",
            "weights and activations leave nothing for the KV cache", "No available memory for the cache blocks"),
    LogLine("context-too-long",
            r"To serve at least one request with the model.s max seq len \((?P<context>\d+)\),? \(?(?P<needed_gib>[\d.]+) GiB "
            r"KV cache is needed, which is larger than the available KV cache memory \((?P<available_gib>[\d.]+) GiB\)"
            r"(?:.*?estimated maximum model length is (?P<fits>\d+))?", "one request of full length does not fit the cache",
            "To serve at least one request"),
    LogLine("context-too-long-v0",
            r"max seq len \((?P<context>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
            r"\((?P<tokens>\d+)\)", "the same in older versions", "tokens that can be stored in KV cache"),
    LogLine("auto-fit-failed", r"Cannot auto-fit max_model_len", "not one token fits", "Cannot auto-fit max_model_len"),
    LogLine("sampler-warmup",
            r"out of memory occurred when warming up (?:sampler|pooler) with (?P<requests>\d+) dummy requests",
            "the sampler's first large batch did not fit", "warming up sampler with"),
    LogLine("workspace-locked", r"Workspace is locked but allocation from",
            "a shape that was not warmed up; not an out-of-memory error", "Workspace is locked but"),
    # The engine dies.
    LogLine("worker-exception", r"WorkerProc hit an exception", "a worker failed", "WorkerProc hit an exception"),
    LogLine("worker-died", r"Worker proc (?P<worker>\S+) died unexpectedly(?: \(exit code: (?P<exit_code>-?\d+)\))?",
            "a worker is gone; -9 is the host's out-of-memory killer or the kubelet", "died unexpectedly"),
    LogLine("engine-fatal", r"EngineCore encountered a fatal error", "the engine is dead", "EngineCore encountered a fatal"),
    LogLine("engine-failed-to-start", r"EngineCore failed to start", "start-up failed; the cause is above",
            "EngineCore failed to start"),
    LogLine("initialization-failed", r"Engine core initialization failed", "the last line of a failed start; never the cause",
            "Engine core initialization failed"),
    LogLine("output-handler-failed", r"AsyncLLM output_handler failed", "the API server saw the engine die",
            "AsyncLLM output_handler failed"),
    LogLine("dump-scheduler", r"Dumping scheduler stats: (?P<stats>SchedulerStats\(.*)", "what was scheduled when it died",
            "Dumping scheduler stats"),
    LogLine("dump-input", r"Dumping input data for V1 LLM engine", "the configuration when it died", "Dumping input data"),
    # Others.
    LogLine("torch-oom",
            r"out of memory\. Tried to allocate (?P<tried>[\d.]+) (?P<tried_unit>KiB|MiB|GiB)\. GPU (?P<gpu>\d+) has a total "
            r"capacity of (?P<total>[\d.]+) (?P<total_unit>MiB|GiB) of which (?P<free>[\d.]+) (?P<free_unit>bytes|KiB|MiB|GiB) "
            r"is free", "torch could not allocate", speaker="torch"),
    LogLine("torch-process", r"Process (?P<pid>\d+) has (?P<amount>[\d.]+) (?P<unit>MiB|GiB) memory in use",
            "another process on the same GPU", speaker="torch"),
    LogLine("torch-reserved",
            r"(?P<allocated>[\d.]+) (?P<allocated_unit>MiB|GiB) is allocated by PyTorch(?:, with (?P<private>[\d.]+) "
            r"(?P<private_unit>MiB|GiB) allocated in private pools[^,]*)?, and (?P<reserved>[\d.]+) "
            r"(?P<reserved_unit>bytes|KiB|MiB|GiB) is reserved by PyTorch but unallocated",
            "how much torch holds without using it", speaker="torch"),
    LogLine("nccl-oom", r"NCCL WARN Cuda failure.*out of memory|ncclUnhandledCudaError", "collectives found no memory",
            speaker="nccl"),
    LogLine("kernel-oom-kill", r"Out of memory: Killed process (?P<pid>\d+) \((?P<command>[^)]*)\)",
            "the host ran out of memory", speaker="kernel"),
    LogLine("kernel-cgroup-oom", r"oom-kill:constraint=CONSTRAINT_MEMCG", "the container's memory limit was hit",
            speaker="kernel"),
    LogLine("nvidia-xid", r"NVRM: Xid \([^)]*\): (?P<xid>\d+)", "the GPU driver reports a fault", speaker="kernel"),
)  # fmt: skip


def log_line(name: str) -> LogLine:
    """The line of this name."""
    return next(line for line in LOG_LINES if line.name == name)

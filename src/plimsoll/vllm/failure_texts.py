"""The words by which a failure is known, and what each of them means: vLLM's own, torch's, NCCL's, the kernel's and others'.

`needle` is looked for first (it is cheap), `pattern` decides where the needle alone does not. `fragment` is a piece of vLLM's
source, recorded per release in `data/failure_texts.json`: a text of vLLM's without releases would be memory, not evidence.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from plimsoll.findings import Code
from plimsoll.vllm.versions import Span, spans_of


class Role(StrEnum):
    """The part of a text in the story of a failure."""

    CAUSE = "cause"  # names what went wrong
    OUT_OF_MEMORY = "out-of-memory"  # an allocation failed: which step, the traceback tells
    STOP = "stop"  # somebody ended it on purpose
    DEATH = "death"  # the end, never the reason
    NOISE = "noise"  # harmless, whatever it says


class Text(NamedTuple):
    """One text and its meaning."""

    name: str
    needle: str
    role: Role
    code: Code | None = None
    pattern: str | None = None
    speaker: str = "vllm"
    fragment: str | None = None  # of vLLM's source; by default the needle where vLLM speaks
    any_level: bool = False  # counts also in lines that call themselves INFO or WARNING
    says: str = ""  # for people, where the code's own title would say too little

    def of_source(self) -> str:
        """Returns the text to look for in vLLM's source."""
        return self.needle if self.fragment is None else self.fragment

    def seen_in(self) -> tuple[Span, ...]:
        """The releases whose source holds this text."""
        return spans_of("failure_texts", self.name)


# The functions of vLLM that tell from a traceback which step failed, over all releases (`data/frames.json` records where each
# was found), in the order in which they decide: a step further down may be called by one further up, never the other way
# round, except where the comment says so. Names, not line numbers: these functions have kept their names for years.
STEP_FRAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("wake-up", ("wake_up", "create_and_map")),
    # Trial captures while memory is being measured are captures still: the cure is the same.
    ("graph-capture", ("profile_cudagraph_memory", "capture_model", "_capture_cudagraphs", "capture_graphs")),
    ("profile", ("profile_run", "determine_available_memory", "determine_num_available_blocks",
                 "profile_num_available_blocks")),
    ("sampler-warmup", ("_dummy_sampler_run", "_dummy_pooler_run", "warmup_kernels")),
    # What else runs before serving and after the cache was taken.
    ("warm-up", ("compile_or_warm_up_model", "_warm_up_model", "kernel_warmup", "warm_up_model")),
    ("kv-allocation", ("initialize_kv_cache", "_allocate_kv_cache_tensors", "allocate_kv_cache", "_allocate_kv_cache",
                       "allocate_gpu_cache", "init_cache_engine", "_init_cache_engine", "initialize_kv_cache_tensors",
                       "initialize_from_config", "initialize_cache")),
    # Loading happens at start; adapters are loaded while serving.
    ("lora", ("activate_adapter", "add_adapter", "add_lora", "set_active_loras", "set_active_adapters", "_apply_adapters",
              "activate_lora", "load_lora_adapter", "_load_adapter", "maybe_setup_dummy_loras")),
    ("weights", ("load_model", "initialize_model", "_initialize_model", "create_weights", "load_weights",
                 "process_weights_after_loading", "get_model")),
    ("device", ("init_device", "init_worker_distributed_environment", "request_memory")),
    ("multimodal", ("_execute_mm_encoder", "execute_mm_encoder", "get_multimodal_embeddings", "embed_multimodal",
                    "_process_image_input", "_process_video_input", "_process_audio_input", "_process_multimodal_inputs")),
    ("logits", ("compute_logits", "_get_logits", "_get_prompt_logprobs_dict", "compute_logprobs", "get_logprobs",
                "_get_logprobs", "gather_logprobs", "apply_penalties", "rejection_sample", "_apply_top_k_top_p",
                "apply_top_k_top_p", "_sample", "sample", "sample_tokens", "_prune_hidden_states", "random_sample",
                "_apply_min_p", "_apply_penalties", "compute_prompt_logprobs", "log_softmax")),
    ("forward", ("execute_model", "_execute_model", "engine_step", "step_async", "run_busy_loop",
                 "execute_method", "worker_busy_loop", "step", "_process_engine_step", "run_engine_loop")),
)  # fmt: skip

# Inside a forward pass, files that say what ran.
LOGITS_FILES = ("/sampler.py", "logits_processor.py", "/v1/sample/", "sampling_metadata.py", "rejection_sampler.py",
                "topk_topp_sampler.py", "/sample/ops/")  # fmt: skip
MULTIMODAL_FILES = ("vision.py", "vit_attn_wrappers.py", "_vl.py", "siglip.py", "clip.py", "_vit.py", "pixtral_vision",
                    "vision_encoder", "audio_encoder")  # fmt: skip
COLLECTIVE_FILES = ("pynccl", "custom_all_reduce", "communication_op.py", "distributed_c10d.py", "cuda_communicator",
                    "device_communicators")  # fmt: skip
GRAPH_FILES = ("torch/cuda/graphs.py", "worker/gpu/cudagraph_utils.py")
# A model being built: its layers' constructors run at no other time.
MODEL_FILES = ("/model_executor/models/", "/model_executor/layers/")


def seen_in(function: str) -> tuple[Span, ...]:
    """The releases whose source defines this function."""
    return spans_of("frames", function)


# The words of being asked to stop, of the end (which is never the reason), and of what is harmless.

_STOP, _DEATH, _NOISE = Role.STOP, Role.DEATH, Role.NOISE

LIFE: tuple[Text, ...] = (
    # Asked to stop.
    Text("shutdown-triggered", "API server: shutdown triggered", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, any_level=True),
    Text("keyboard-interrupt", "KeyboardInterrupt", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "python", any_level=True),
    Text("sigterm", "SIGTERM", _STOP, Code.OTHER_STOPPED_BY_OPERATOR,
         r"(?i)(?:received|got|caught|handling|by|sent|signal).{0,30}SIGTERM|SIGTERM.{0,20}(?:received|caught)", "python",
         any_level=True),
    Text("sigint", "SIGINT", _STOP, Code.OTHER_STOPPED_BY_OPERATOR,
         r"(?i)(?:received|got|caught).{0,30}SIGINT|SIGINT.{0,20}(?:received|caught)", "python", any_level=True),
    Text("signal-15", "ignal 15", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "python", any_level=True),
    Text("signal-received", "Signal Received: 15", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "python", any_level=True),
    Text("uvicorn-stopped", "Application shutdown complete", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "uvicorn",
         any_level=True),
    Text("http-server-stops", "Shutting down FastAPI HTTP server", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, any_level=True),
    Text("graceful-stop", "Gracefully stopping http server", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, any_level=True),
    Text("ctrl-c", "^C", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, r"^\^C", "terminal", any_level=True),
    Text("script-stops", "topping", _STOP, Code.OTHER_STOPPED_BY_OPERATOR,
         r"(?i)^\W{0,12}stopping (?:the )?(?:old |existing |running |current |previous )?"
         r"(?:vllm|server|container|engine|service)",
         "script", any_level=True),
    Text("systemd-stops", "Stopping vLLM", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "systemd", any_level=True),
    # The end.
    Text("initialization-failed", "Engine core initialization failed", _DEATH),
    Text("engine-failed-to-start", "EngineCore failed to start", _DEATH, any_level=True),
    Text("worker-failed-to-start", "WorkerProc failed to start", _DEATH, any_level=True),
    Text("worker-init-failed", "WorkerProc initialization failed", _DEATH),
    Text("engine-fatal", "EngineCore encountered a fatal error", _DEATH),
    Text("engine-hit", "EngineCore hit an exception", _DEATH),
    Text("worker-exception", "WorkerProc hit an exception", _DEATH),
    Text("engine-dead", "EngineDeadError", _DEATH),
    Text("mq-engine-dead", "MQLLMEngine is already dead", _DEATH),
    Text("background-loop", "Background loop has errored already", _DEATH),
    Text("background-loop-not-running", "Background loop is not running", _DEATH),
    Text("engine-process-failed", "Engine process failed to start", _DEATH),
    Text("engine-loop-dead", "Engine loop is not running", _DEATH),
    Text("fatal-signal", "Got fatal signal from worker processes", _DEATH),
    Text("worker-died", "died unexpectedly", _DEATH),
    Text("worker-died-v0", "died, exit code:", _DEATH, fragment=" died, exit code: "),
    Text("worker-failed", "Worker failed with error", _DEATH),
    Text("output-handler", "output_handler failed", _DEATH),
    Text("engine-died", "Engine process (pid", _DEATH, None, r"\) died"),
    Text("task-unexpected", "Task finished unexpectedly", _DEATH),
    Text("terminate-called", "terminate called", _DEATH, speaker="libc"),
    Text("core-dumped", "(core dumped)", _DEATH, speaker="shell"),
    Text("shell-killed", "Killed", _DEATH, None, r"^(?:.{0,160}: line \d{1,6}:\s{1,8}\d{0,10} ?)?\s{0,8}Killed\b", "shell"),
    Text("sigkill", "SIGKILL", _DEATH, None,
         r"(?i)Signals\.SIGKILL|(?:received|killed by|died .{0,40}|terminated by) (?:signal )?SIGKILL", "python"),
    # Harmless, whatever it says.
    Text("destroy-event", "CUDA warning: ", _NOISE, speaker="torch"),
    Text("destroy-group", "destroy_process_group() was not called", _NOISE, speaker="torch"),
    Text("resource-tracker", "resource_tracker: There appear to be", _NOISE, speaker="python"),
)  # fmt: skip


# The words of failures for want of memory: the GPU's, the host's, the shared memory between processes.

_CAUSE, _OOM = Role.CAUSE, Role.OUT_OF_MEMORY

MEMORY: tuple[Text, ...] = (
    # vLLM names the step itself.
    Text("free-memory-check", "on startup is less than desired GPU memory utilization", _CAUSE,
         Code.STARTUP_FREE_MEMORY_CHECK),
    Text("held-weights", "Externally held weights on device", _CAUSE, Code.STARTUP_FREE_MEMORY_CHECK,
         r"exceed the desired GPU memory utilization"),
    Text("profile-assertion", "Error in memory profiling.", _CAUSE, Code.STARTUP_PROFILE_NEIGHBOUR),
    Text("no-cache-blocks", "No available memory for the cache blocks", _CAUSE, Code.STARTUP_NO_CACHE_BLOCKS),
    Text("kv-negative", "Available KV cache memory: -", _CAUSE, Code.STARTUP_NO_CACHE_BLOCKS, r"memory: -\d", any_level=True,
         fragment="Available KV cache memory"),
    Text("no-gpu-blocks", "# GPU blocks: 0,", _CAUSE, Code.STARTUP_NO_CACHE_BLOCKS, any_level=True, fragment="GPU blocks: "),
    Text("mamba-blocks", "exceeds available Mamba cache blocks", _CAUSE, Code.STARTUP_NO_CACHE_BLOCKS),
    Text("auto-fit-failed", "Cannot auto-fit max_model_len", _CAUSE, Code.STARTUP_NO_CACHE_BLOCKS),
    Text("context-too-long", "larger than the available KV cache memory", _CAUSE, Code.STARTUP_CONTEXT_TOO_LONG),
    Text("context-too-long-v0", "tokens that can be stored in KV cache", _CAUSE, Code.STARTUP_CONTEXT_TOO_LONG),
    Text("sampler-warmup", "out of memory occurred when warming up", _CAUSE, Code.STARTUP_SAMPLER_WARMUP),
    Text("weights-too-large", "Failed to load model - not enough GPU memory", _CAUSE, Code.STARTUP_WEIGHTS_DO_NOT_FIT),
    Text("weights-parameter", "Failed to create unquantized linear weights", _CAUSE, Code.STARTUP_WEIGHTS_DO_NOT_FIT,
         r"out of memory"),
    Text("cpu-memory-check", "is less than desired CPU memory utilization", _CAUSE, Code.HOST_OUT_OF_MEMORY),
    Text("cpu-cache-check", "on kv cache allocation is less than requested", _CAUSE, Code.HOST_OUT_OF_MEMORY),
    Text("swap-exhausted", "lack of CPU swap space", _CAUSE, Code.KV_PREEMPTION_STORM),
    Text("swap-too-large", "Too large swap space", _CAUSE, Code.HOST_OUT_OF_MEMORY, r"ValueError|Error"),
    # An allocation failed.
    Text("cumem-oom", "out of memory at ", _OOM, None, r"(?i)cuda error: out of memory at .{0,200}cumem", "vllm",
         fragment="cumem_allocator"),
    Text("torch-oom", "out of memory. Tried to allocate", _OOM, speaker="torch"),
    Text("torch-oom-class", "OutOfMemoryError", _OOM, None, r"(?:torch\.|cuda\.|^)(?:\w+\.)?OutOfMemoryError(?:: |:?$)",
         "torch"),
    Text("torch-oom-cut", "CUDA out of", _OOM, None, r"(?:Error|Exception): CUDA out of(?: mem\w{0,4})?$", "torch"),
    Text("cuda-error-oom", "CUDA error: out of memory", _OOM, speaker="torch"),
    Text("cuda-error-oom-caps", "CUDA Error: out of memory", _OOM, speaker="cuda"),
    Text("cuda-runtime-oom", "cudaErrorMemoryAllocation", _OOM, None, r"^(?!Search for)", "cuda"),
    Text("cuda-driver-oom", "CUDA_ERROR_OUT_OF_MEMORY", _OOM, speaker="cuda"),
    Text("cuda-driver-words", "CUDA driver error: out of memory", _OOM, speaker="torch"),
    Text("hip-error-oom", "HIP error: out of memory", _OOM, speaker="torch"),
    Text("hip-oom", "hipErrorOutOfMemory", _OOM, speaker="rocm"),
    Text("xpu-oom", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", _OOM, speaker="xpu"),
    Text("xpu-resources", "UR_RESULT_ERROR_OUT_OF_RESOURCES", _OOM, speaker="xpu"),
    Text("xla-oom", "RESOURCE_EXHAUSTED", _OOM, None, r"(?i)memory|hbm", "xla"),
    Text("cublas-alloc", "CUBLAS_STATUS_ALLOC_FAILED", _OOM, speaker="cuda"),
    Text("cudnn-alloc", "CUDNN_STATUS_ALLOC_FAILED", _OOM, speaker="cuda"),
    Text("cublas-uninit", "CUBLAS_STATUS_NOT_INITIALIZED", _OOM, speaker="cuda"),
    Text("nvml-assert", "NVML_SUCCESS == r INTERNAL ASSERT FAILED", _OOM, speaker="torch",
         says="torch failed an inner check while it prepared its out-of-memory message"),
    Text("triton-oom", "Triton Error [CUDA]: out of memory", _OOM, speaker="triton"),
    Text("flashinfer-oom", "Failed to allocate memory for", _OOM, None, r"(?i)flashinfer|workspace|batch_prefill",
         "flashinfer"),
    Text("nccl-oom", "out of memory", _OOM, None, r"(?i)(?:cuda failure (?:2|'out of memory')|nccl).{0,200}out of memory",
         "nccl", any_level=True),
    # The host.
    Text("ray-oom", "killed due to the node running low on memory", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "ray",
         any_level=True),
    Text("ray-pressure", "killed due to memory pressure (OOM)", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "ray", any_level=True),
    Text("ray-threshold", "exceeds the memory usage threshold", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "ray", any_level=True),
    Text("kernel-oom", "Out of memory: Kill", _CAUSE, Code.HOST_OUT_OF_MEMORY,
         r"Out of memory: Kill(?:ed)? process .{0,40}(?i:vllm|python|pt_main|ray)", "kernel", any_level=True),
    Text("slurm-oom", "oom_kill event", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "slurm", any_level=True),
    Text("slurm-out-of-memory", "Out Of Memory", _CAUSE, Code.HOST_OUT_OF_MEMORY,
         r"(?:srun|slurmstepd|step).{0,80}Out Of Memory", "slurm", any_level=True),
    Text("compiler-killed", "died due to signal 9", _CAUSE, Code.HOST_OUT_OF_MEMORY,
         r"cicc|nvcc|ptxas|cudafe|cc1plus|c\+\+", "nvcc", any_level=True),
    Text("ray-oom-class", "ray.exceptions.OutOfMemoryError", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "ray"),
    Text("python-memory-error", "MemoryError", _CAUSE, Code.HOST_OUT_OF_MEMORY,
         r"^(?:numpy\.\S{0,60}|builtins\.)?_?(?:Array)?MemoryError\b", "python"),
    Text("bad-alloc", "std::bad_alloc", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "libc"),
    Text("cannot-allocate", "Cannot allocate memory", _CAUSE, Code.HOST_OUT_OF_MEMORY, None, "libc"),
    Text("cpu-allocator", "DefaultCPUAllocator: ", _CAUSE, Code.HOST_OUT_OF_MEMORY, r"(?:can't allocate|not enough) memory",
         "torch"),
    Text("host-alloc", "cudaHostAlloc", _CAUSE, Code.HOST_OUT_OF_MEMORY, r"(?i)out of memory|fail", "cuda"),
    Text("shm-segment", "/dev/shm", _CAUSE, Code.HOST_OUT_OF_MEMORY,  # noqa: S108 (looked for in a log, never written to)
         r"(?i)error while (?:creating|attaching)|no space left|failed to open|unable to allocate|insufficient|posix_fallocate",
         "nccl", any_level=True),
    Text("shm-open", "ncclShmOpen", _CAUSE, Code.HOST_OUT_OF_MEMORY, r"(?i)fail|error|warn", "nccl", any_level=True),
    Text("shm-bus", "Bus error", _CAUSE, Code.HOST_OUT_OF_MEMORY, r"(?i)shared memory|shm|nonexistent physical address",
         "kernel", any_level=True),
    Text("shm-python", "No space left on device: '/", _CAUSE, Code.HOST_OUT_OF_MEMORY,
         r"No space left on device: '/(?:psm_|sem|torch_|nccl|mp-)", "python"),
)  # fmt: skip


# The words of failures that are not about memory, so that nobody tunes memory for them.

_WHY = Role.CAUSE

OTHER: tuple[Text, ...] = (
    # The command line and the configuration.
    Text("unrecognized-arguments", "error: unrecognized arguments:", _WHY, Code.STARTUP_BAD_FLAG, None, "argparse"),
    Text("bad-argument", "error: argument ", _WHY, Code.STARTUP_BAD_FLAG, r"error: argument \S", "argparse"),
    Text("missing-argument", "error: the following arguments are required", _WHY, Code.STARTUP_BAD_FLAG, None, "argparse"),
    Text("ambiguous-argument", "error: ambiguous option", _WHY, Code.STARTUP_BAD_FLAG, None, "argparse"),
    Text("unexpected-keyword", "got an unexpected keyword argument", _WHY, Code.STARTUP_BAD_FLAG,
         r"(?:EngineArgs|LLM|__init__).{0,60}got an unexpected keyword argument", "python"),
    Text("longer-than-derived", "is greater than the derived max_model_len", _WHY, Code.OTHER_BAD_CONFIG,
         r"User-specified max_model_len", fragment="than the derived max_model_len"),
    Text("not-divisible", "is not divisible by", _WHY, Code.OTHER_BAD_CONFIG, None),
    Text("must-be-divisible", "must be divisible by", _WHY, Code.OTHER_BAD_CONFIG, None),
    Text("rank-out-of-bounds", "out of bounds", _WHY, Code.OTHER_BAD_CONFIG, r"(?i)rank .{0,60}out of bounds",
         fragment="local_rank} is out of bounds"),
    Text("too-few-gpus", "number of available GPUs", _WHY, Code.OTHER_BAD_CONFIG,
         r"(?i)(?:larger|greater|more|exceed\w*|less) .{0,60}number of available GPUs", fragment="number of available GPUs"),
    Text("ray-too-few-gpus", "total number of available", _WHY, Code.OTHER_BAD_CONFIG,
         r"(?i)required .{0,40}exceeds the total number of available", fragment="exceeds the total number of available"),
    Text("invalid-ordinal", "invalid device ordinal", _WHY, Code.OTHER_BAD_CONFIG, None, "cuda"),
    Text("batch-below-length", "is smaller than max_model_len", _WHY, Code.OTHER_BAD_CONFIG, r"max_num_batched_tokens",
         fragment="is smaller than max_model_len"),
    Text("quantization-mismatch", "does not match the quantization method", _WHY, Code.OTHER_BAD_CONFIG),
    Text("quantization-dtype", "is not supported for quantization method", _WHY, Code.OTHER_BAD_CONFIG),
    Text("unknown-quantization", "Unknown quantization method", _WHY, Code.OTHER_BAD_CONFIG),
    Text("expandable-with-pool", "incompatible with PYTORCH_CUDA_ALLOC_CONF", _WHY, Code.STARTUP_BAD_FLAG),
    Text("expandable-with-sleep", "Expandable segments are not compatible with memory pool", _WHY, Code.STARTUP_BAD_FLAG),
    Text("validation-error", "validation error", _WHY, Code.OTHER_BAD_CONFIG,
         r"\d{1,4} validation errors? for \w*(?:Config|Args)\b", "pydantic"),
    # The model.
    Text("gated", "gated repo", _WHY, Code.OTHER_GATED_MODEL, None, "huggingface"),
    Text("gated-class", "GatedRepoError", _WHY, Code.OTHER_GATED_MODEL, None, "huggingface"),
    Text("restricted", "Access to model ", _WHY, Code.OTHER_GATED_MODEL, r"is restricted", "huggingface"),
    Text("http-401", "401 Client Error", _WHY, Code.OTHER_GATED_MODEL, None, "huggingface"),
    Text("http-403", "403 Client Error", _WHY, Code.OTHER_GATED_MODEL, None, "huggingface"),
    Text("http-403-words", "403 Forbidden", _WHY, Code.OTHER_GATED_MODEL, r"(?i)hf|hub|hugging|token|client error|model",
         "huggingface"),
    Text("token-invalid", "Invalid user token", _WHY, Code.OTHER_GATED_MODEL, None, "huggingface"),
    Text("repository-missing", "RepositoryNotFoundError", _WHY, Code.OTHER_BAD_MODEL, None, "huggingface"),
    Text("http-404", "404 Client Error", _WHY, Code.OTHER_BAD_MODEL, None, "huggingface"),
    Text("repo-id", "Repo id must", _WHY, Code.OTHER_BAD_MODEL, None, "huggingface"),
    Text("not-a-model", "is not a valid model identifier", _WHY, Code.OTHER_BAD_MODEL, None, "huggingface"),
    Text("no-such-repo", "Invalid repository ID or local directory specified", _WHY, Code.OTHER_BAD_MODEL),
    Text("architecture-unknown", "does not recognize this architecture", _WHY, Code.OTHER_BAD_MODEL, None, "transformers"),
    Text("architecture-unsupported", "are not supported for now", _WHY, Code.OTHER_BAD_MODEL, r"[Mm]odel architectures?"),
    Text("architecture-inspection", "failed to be inspected", _WHY, Code.OTHER_BAD_MODEL),
    Text("no-weights", "Cannot find any model weights with", _WHY, Code.OTHER_BAD_MODEL),
    Text("no-config", "does not appear to have a file named", _WHY, Code.OTHER_BAD_MODEL, None, "transformers"),
    Text("config-missing", "Can't load the configuration of", _WHY, Code.OTHER_BAD_MODEL, None, "transformers"),
    Text("config-format", "No supported config format found", _WHY, Code.OTHER_BAD_MODEL),
    Text("config-undetected", "Could not detect config format for no config file found", _WHY, Code.OTHER_BAD_MODEL),
    Text("config-json", "It looks like the config file at", _WHY, Code.OTHER_BAD_MODEL, r"is not a valid JSON",
         "transformers"),
    Text("tokenizer-missing", "Can't load tokenizer for", _WHY, Code.OTHER_BAD_MODEL, None, "transformers"),
    Text("tokenizer-class", "Tokenizer class", _WHY, Code.OTHER_BAD_MODEL, r"does not exist or is not currently imported",
         "transformers"),
    Text("tokenizer-build", "Couldn't instantiate the backend tokenizer", _WHY, Code.OTHER_BAD_MODEL, None, "transformers"),
    Text("tokenizer-attribute", "has no attribute", _WHY, Code.OTHER_BAD_MODEL,
         r"(?i)\w*tokeniz\w* (?:object )?has no attribute|'\w{0,60}Tokeniz\w{0,60}' object has no", "transformers"),
    Text("safetensors", "SafetensorError", _WHY, Code.OTHER_BAD_MODEL, None, "safetensors"),
    Text("safetensors-header", "Error while deserializing header", _WHY, Code.OTHER_BAD_MODEL, None, "safetensors"),
    Text("remote-code", "trust_remote_code=True", _WHY, Code.OTHER_BAD_MODEL, r"(?i)please pass|requires|option",
         "transformers"),
    Text("weights-unused", "weights were not initialized from checkpoint", _WHY, Code.OTHER_BAD_MODEL),
    Text("no-such-parameter", "There is no module or parameter named", _WHY, Code.OTHER_BAD_MODEL),
    Text("connection", "Max retries exceeded with url", _WHY, Code.OTHER_DOWNLOAD, None, "urllib3"),
    Text("hub-unreachable", "couldn't connect to 'https://", _WHY, Code.OTHER_DOWNLOAD, None, "transformers"),
    Text("hub-connect", "We couldn't connect to", _WHY, Code.OTHER_DOWNLOAD, None, "transformers"),
    Text("not-in-cache", "LocalEntryNotFoundError", _WHY, Code.OTHER_DOWNLOAD, None, "huggingface"),
    Text("offline-mode", "OfflineModeIsEnabled", _WHY, Code.OTHER_DOWNLOAD, None, "huggingface"),
    Text("outgoing-off", "outgoing traffic has been disabled", _WHY, Code.OTHER_DOWNLOAD, None, "huggingface"),
    Text("name-resolution", "Temporary failure in name resolution", _WHY, Code.OTHER_DOWNLOAD, None, "libc"),
    Text("rate-limited", "429 Client Error", _WHY, Code.OTHER_DOWNLOAD, None, "huggingface"),
    Text("server-error", "Server Error: ", _WHY, Code.OTHER_DOWNLOAD, r"\b50\d Server Error: ", "huggingface"),
    Text("download-timeout", "ReadTimeoutError", _WHY, Code.OTHER_DOWNLOAD, None, "urllib3"),
    # The GPU and its software.
    Text("no-kernel-image", "no kernel image is available for execution", _WHY, Code.OTHER_UNSUPPORTED_GPU, None, "cuda"),
    Text("kernel-image-invalid", "kernel image is invalid", _WHY, Code.OTHER_UNSUPPORTED_GPU, None, "cuda"),
    Text("shared-memory-limit", "out of resource: shared memory", _WHY, Code.OTHER_UNSUPPORTED_GPU, None, "triton"),
    Text("triton-resources", "OutOfResources", _WHY, Code.OTHER_UNSUPPORTED_GPU, r"triton|out of resource", "triton"),
    Text("capability", "compute capability", _WHY, Code.OTHER_UNSUPPORTED_GPU,
         r"(?i)(?:only supported|requires?|at least|not supported|minimum).{0,200}compute capability"
         r"|compute capability.{0,200}(?:not supported|at least|required|or higher)",
         fragment="compute capability"),
    Text("quantization-capability", "is not supported for the current GPU", _WHY, Code.OTHER_UNSUPPORTED_GPU),
    Text("no-kernel-implements", "Failed to find a kernel that can implement", _WHY, Code.OTHER_UNSUPPORTED_GPU),
    Text("no-scheme", "No compressed-tensors compatible scheme", _WHY, Code.OTHER_UNSUPPORTED_GPU),
    Text("cutlass-internal", "Error Internal", _WHY, Code.OTHER_UNSUPPORTED_GPU,
         r"(?:RuntimeError|cutlass).{0,80}Error Internal", "cutlass"),
    Text("cutlass-gemm", "cutlass", _WHY, Code.OTHER_UNSUPPORTED_GPU,
         r"(?i)cutlass\w{0,60}[^a-z].{0,80}(?:not supported|internal error|cannot implement|failed)", "cutlass"),
    Text("no-backend", "No valid attention backend found", _WHY, Code.OTHER_UNSUPPORTED_GPU),
    Text("architecture-flag", "Unsupported gpu architecture", _WHY, Code.OTHER_UNSUPPORTED_GPU, None, "nvcc"),
    Text("ptx-toolchain", "PTX was compiled with an unsupported toolchain", _WHY, Code.OTHER_INSTALLATION, None, "cuda"),
    Text("driver-old", "driver on your system is too old", _WHY, Code.OTHER_INSTALLATION, None, "torch"),
    Text("driver-insufficient", "CUDA driver version is insufficient", _WHY, Code.OTHER_INSTALLATION, None, "cuda"),
    Text("forward-compatibility", "forward compatibility was attempted", _WHY, Code.OTHER_INSTALLATION, None, "cuda"),
    Text("driver-combination", "unsupported display driver / cuda driver combination", _WHY, Code.OTHER_INSTALLATION,
         None, "cuda"),
    Text("no-driver", "Found no NVIDIA driver", _WHY, Code.OTHER_INSTALLATION, None, "torch"),
    Text("no-gpus", "No CUDA GPUs are available", _WHY, Code.OTHER_INSTALLATION, None, "torch"),
    Text("device-type", "Failed to infer device type", _WHY, Code.OTHER_INSTALLATION),
    Text("container-cli", "nvidia-container-cli", _WHY, Code.OTHER_INSTALLATION, r"(?i)error|unsatisfied|failed",
         "docker", any_level=True),
    Text("nvml-mismatch", "Driver/library version mismatch", _WHY, Code.OTHER_INSTALLATION, None, "nvml"),
    Text("nvml-missing", "NVML Shared Library Not Found", _WHY, Code.OTHER_INSTALLATION, r"Error", "nvml"),
    Text("undefined-symbol", "undefined symbol", _WHY, Code.OTHER_INSTALLATION, None, "libc"),
    Text("shared-object", "cannot open shared object file", _WHY, Code.OTHER_INSTALLATION, None, "libc"),
    Text("glibc", "version `GLIBC", _WHY, Code.OTHER_INSTALLATION, None, "libc"),
    Text("no-module", "ModuleNotFoundError", _WHY, Code.OTHER_INSTALLATION, None, "python"),
    Text("import-error", "ImportError", _WHY, Code.OTHER_INSTALLATION, r"^ImportError: ", "python"),
    Text("not-compiled-cuda", "Torch not compiled with CUDA enabled", _WHY, Code.OTHER_INSTALLATION, None, "torch"),
    Text("illegal-access", "an illegal memory access was encountered", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("illegal-address", "CUDA_ERROR_ILLEGAL_ADDRESS", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("launch-failure", "unspecified launch failure", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("launch-failed", "CUDA_ERROR_LAUNCH_FAILED", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("device-assert", "device-side assert triggered", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("misaligned", "misaligned address", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("illegal-instruction", "an illegal instruction was encountered", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "cuda"),
    Text("rocm-fault", "Memory access fault by GPU node", _WHY, Code.OTHER_ILLEGAL_ACCESS, None, "rocm"),
    Text("gpu-lost", "GPU is lost", _WHY, Code.OTHER_HARDWARE, None, "nvml", any_level=True),
    Text("off-the-bus", "fallen off the bus", _WHY, Code.OTHER_HARDWARE, None, "kernel", any_level=True),
    Text("ecc", "uncorrectable ECC error", _WHY, Code.OTHER_HARDWARE, None, "cuda"),
    Text("nvlink-error", "uncorrectable NVLink error", _WHY, Code.OTHER_HARDWARE, None, "cuda"),
    # Compilers.
    Text("inductor", "InductorError", _WHY, Code.OTHER_COMPILER, None, "torch"),
    Text("inductor-exc", "torch._inductor.exc.", _WHY, Code.OTHER_COMPILER, None, "torch"),
    Text("dynamo", "torch._dynamo.exc.", _WHY, Code.OTHER_COMPILER, None, "torch"),
    Text("backend-compiler", "BackendCompilerFailed", _WHY, Code.OTHER_COMPILER, None, "torch"),
    Text("triton-compile", "triton.compiler.errors.", _WHY, Code.OTHER_COMPILER, None, "triton"),
    Text("ptxas", "PTXASError", _WHY, Code.OTHER_COMPILER, None, "triton"),
    Text("ptxas-fatal", "ptxas fatal", _WHY, Code.OTHER_COMPILER, None, "nvcc"),
    Text("ninja", "ninja: build stopped", _WHY, Code.OTHER_COMPILER, None, "ninja"),
    Text("ninja-failed", "Ninja build failed", _WHY, Code.OTHER_COMPILER, None, "ninja"),
    Text("nvcc-fatal", "nvcc fatal", _WHY, Code.OTHER_COMPILER, None, "nvcc"),
    Text("no-nvcc", "Could not find nvcc", _WHY, Code.OTHER_COMPILER, None, "torch"),
    Text("extension", "Error building extension", _WHY, Code.OTHER_COMPILER, None, "torch"),
    Text("no-c-compiler", "Failed to find C compiler", _WHY, Code.OTHER_COMPILER, None, "triton"),
    Text("python-headers", "Python.h: No such file", _WHY, Code.OTHER_COMPILER, None, "gcc"),
    Text("gcc-failed", "returned non-zero exit status", _WHY, Code.OTHER_COMPILER,
         r"(?:gcc|g\+\+|clang|cc1|nvcc|ninja|ptxas)", "python"),
    Text("triton-assertion", "Assertion `", _WHY, Code.OTHER_COMPILER, r"(?i)triton|mlir|llvm|Allocation\.cpp", "triton"),
    Text("llvm", "LLVM ERROR", _WHY, Code.OTHER_COMPILER, None, "llvm"),
    # Between GPUs and hosts.
    Text("nccl-watchdog", "Watchdog caught collective operation timeout", _WHY, Code.OTHER_COLLECTIVES, None, "torch"),
    Text("nccl-error", "NCCL error", _WHY, Code.OTHER_COLLECTIVES, r"NCCL error(?: in|:)", "nccl"),
    Text("nccl-backend", "DistBackendError", _WHY, Code.OTHER_COLLECTIVES, None, "torch"),
    Text("nccl-unhandled", "ncclUnhandledCudaError", _WHY, Code.OTHER_COLLECTIVES, None, "nccl"),
    Text("nccl-system", "ncclSystemError", _WHY, Code.OTHER_COLLECTIVES, None, "nccl"),
    Text("nccl-internal", "ncclInternalError", _WHY, Code.OTHER_COLLECTIVES, None, "nccl"),
    Text("nccl-usage", "ncclInvalidUsage", _WHY, Code.OTHER_COLLECTIVES, None, "nccl"),
    Text("duplicate-gpu", "Duplicate GPU detected", _WHY, Code.OTHER_COLLECTIVES, None, "nccl"),
    Text("oneccl", "oneCCL", _WHY, Code.OTHER_COLLECTIVES, r"(?i)error|fail|exception", "oneccl"),
    Text("nixl", "NIXL_ERR", _WHY, Code.OTHER_COLLECTIVES, None, "nixl"),
    Text("custom-all-reduce", "custom_all_reduce.cuh", _WHY, Code.OTHER_COLLECTIVES, r"(?i)error|fail", "vllm",
         fragment="custom_all_reduce"),
    Text("hccl", "HCCL function error", _WHY, Code.OTHER_COLLECTIVES, None, "hccl"),
    Text("gloo", "Gloo connectFullMesh failed", _WHY, Code.OTHER_COLLECTIVES, None, "gloo"),
    Text("gloo-peer", "Connection closed by peer [", _WHY, Code.OTHER_COLLECTIVES, None, "gloo"),
    Text("dist-store", "DistStoreError", _WHY, Code.OTHER_COLLECTIVES, None, "torch"),
    Text("dist-network", "DistNetworkError", _WHY, Code.OTHER_COLLECTIVES, None, "torch"),
    Text("port-in-use", "address already in use", _WHY, Code.OTHER_PORT_IN_USE, None, "libc"),
    Text("port-in-use-words", "Address already in use", _WHY, Code.OTHER_PORT_IN_USE, None, "libc"),
    Text("port-in-use-name", "EADDRINUSE", _WHY, Code.OTHER_PORT_IN_USE, None, "libc"),
    # Disks, time, signals.
    Text("disk-full", "No space left on device", _WHY, Code.OTHER_DISK,
         r"^(?!.*(?:/dev/shm|'/(?:psm_|sem|torch_|nccl|mp-)|shm))", "libc"),
    Text("quota", "Disk quota exceeded", _WHY, Code.OTHER_DISK, None, "libc"),
    Text("read-only", "Read-only file system", _WHY, Code.OTHER_DISK, None, "libc"),
    Text("permission", "Permission denied", _WHY, Code.OTHER_DISK, r"PermissionError|OSError|\[Errno 13\]", "libc"),
    Text("too-many-files", "Too many open files", _WHY, Code.OTHER_BAD_CONFIG, r"^(?!Found ulimit).{0,40}Error", "libc"),
    Text("rpc-timeout", "RPC call to ", _WHY, Code.OTHER_TIMEOUT, r"timed out"),
    Text("iteration-timeout", "Engine iteration timed out", _WHY, Code.OTHER_TIMEOUT),
    Text("ready-timeout", "Did not receive", _WHY, Code.OTHER_TIMEOUT,
         r"(?i)(?:response|ready|hello).{0,80}(?:front-end|engine|within|core)", fragment="Did not receive"),
    Text("engine-wait-timeout", "Timed out waiting for", _WHY, Code.OTHER_TIMEOUT,
         r"(?i)engine|worker|core|startup|server|client", fragment="Timed out waiting for engine"),
    Text("cuda-error-other", "CUDA error: ", _WHY, Code.OTHER_ENGINE_ERROR,
         r"CUDA error: (?!out of memory|an illegal|unspecified launch|device-side|misaligned|no kernel|device kernel"
         r"|invalid device ord)",
         "torch"),
    Text("flashinfer-overflow", "Buffer overflow when allocating memory", _WHY, Code.OTHER_ENGINE_ERROR, None,
         "flashinfer"),
    Text("flashinfer-workspace", "Out of workspace memory in", _WHY, Code.OTHER_ENGINE_ERROR, None, "flashinfer"),
    Text("broadcast-wait", "No available shared memory broadcast block found", _WHY, Code.ENGINE_WEDGED, any_level=True,
         fragment="broadcast block found"),
    Text("broadcast-wait-old", "No available block found in", _WHY, Code.ENGINE_WEDGED, any_level=True),
    Text("dequeue-timeout", "TimeoutError", _WHY, Code.OTHER_TIMEOUT, r"^(?:asyncio\.|builtins\.)?TimeoutError(?::|$)",
         "python"),
    Text("workspace-locked", "Workspace is locked but", _WHY, Code.OTHER_ENGINE_ERROR),
    Text("segfault-caught", "Segfault encountered", _WHY, Code.OTHER_ENGINE_ERROR, None, "torch", any_level=True),
    Text("segfault", "Segmentation fault", _WHY, Code.OTHER_ENGINE_ERROR, None, "kernel", any_level=True),
    Text("fatal-python", "Fatal Python error", _WHY, Code.OTHER_ENGINE_ERROR, None, "python", any_level=True),
)  # fmt: skip


__all__ = ["CONSEQUENCES", "CONSEQUENCE_WORDS", "LIFE", "MEMORY", "OTHER", "TEXTS", "Role", "Text"]

TEXTS = (*MEMORY, *OTHER, *LIFE)

# Exceptions that only pass on that something else failed.
CONSEQUENCES = frozenset({
    "EngineDeadError", "AsyncEngineDeadError", "MQEngineDeadError", "BrokenPipeError", "ConnectionResetError", "EOFError",
    "CancelledError", "ChildFailedError", "SystemExit", "GeneratorExit", "StopAsyncIteration", "ZMQError", "ActorDiedError",
    "RayActorError", "WorkerCrashedError", "ConnectionRefusedError", "ProcessRaisedException", "ProcessExitedException",
    "ExceptionGroup", "BaseExceptionGroup", "IncompleteReadError", "ClientDisconnect", "WebSocketDisconnect",
})  # fmt: skip
CONSEQUENCE_WORDS = (
    "Engine core initialization failed", "WorkerProc initialization failed", "Worker failed with error",
    "Engine process failed to start", "Background loop", "Engine loop is not running", "EngineCore encountered an issue",
    "died unexpectedly", "Task finished unexpectedly", "cannot schedule new futures", "Executor failed", "cancelled",
    "Engine process (pid", "Event loop is closed", "please check the stack trace above", "Server exited unexpectedly",
    "Server failed to start", "Engine core process failed",
)  # fmt: skip

"""The words by which a failure is known (`data/failures.yaml`): vLLM's own, torch's, NCCL's, the kernel's and others'."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import yaml

from plimsoll.findings import Code
from plimsoll.vllm.versions import Span, spans_of


class Role(StrEnum):
    """The part of a text in the story of a failure."""

    CAUSE = "cause"  # names what went wrong
    OUT_OF_MEMORY = "out-of-memory"  # an allocation failed: which step, the traceback tells
    STOP = "stop"  # somebody ended it on purpose
    DEATH = "death"  # the end, never the reason
    NOISE = "noise"  # harmless, whatever it says


# Who reports an end, as an error that sticks to the card is one; all others may go on after a complaint, except with these.
_ENDERS = frozenset("kernel nvml shell slurm argparse ray rocm nvcc script systemd terminal hccl".split())
_ENDS = frozenset(
    "kv-negative no-gpu-blocks broadcast-wait broadcast-wait-old sampler-warmup weights-too-large nccl-watchdog "
    "client-socket heap-corrupted heap-corrupted-words segfault-caught fatal-python bad-alloc".split()
)


class FailureText(NamedTuple):
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
    may_go_on: bool = False  # whoever writes it may go on afterwards, unless it is part of an exception

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


# What failed where nobody knows the words of an exception: the innermost of its calls that stands in one of these files, and
# the kinds of exception for which that decides (all, where none are named).
_REFUSALS = ("ValueError", "AssertionError", "NotImplementedError", "TypeError", "KeyError", "AttributeError")
PLACES: tuple[tuple[tuple[str, ...], tuple[str, ...], Code], ...] = (
    (("/_inductor/compile_fx", "/_inductor/codecache", "/_inductor/async_compile", "/_inductor/cpp_builder",
      "/_inductor/graph.py", "/_inductor/lowering", "/_inductor/scheduler", "/_inductor/codegen/", "/_inductor/fx_passes/",
      "/_dynamo/convert_frame", "/_dynamo/output_graph", "/_dynamo/symbolic_convert", "/triton/compiler/",
      "/triton/backends/", "/triton/runtime/build", "/triton/common/build",
      "/flashinfer/jit/", "/utils/cpp_extension", "/tilelang/jit", "/vllm/compilation/"), (), Code.OTHER_COMPILER),
    (("/torch/distributed/", "/vllm/distributed/device_communicators/", "/vllm/distributed/parallel_state", "/deep_ep/",
      "nixl_connector", "/nixl/", "mooncake"), ("RuntimeError", "TimeoutError", "OSError", "ConnectionError"),
     Code.OTHER_COLLECTIVES),
    (("/transformers/", "/huggingface_hub/", "/tokenizers/", "/mistral_common/", "/safetensors/", "/modelscope/",
      "/vllm/transformers_utils/", "/vllm/model_executor/model_loader/"), (), Code.OTHER_BAD_MODEL),
    (("/vllm/config", "/vllm/engine/arg_utils", "/vllm/platforms/", "/ray_utils.py", "/ray_distributed_executor",
      "/ray_executor", "/vllm/lora/", "/vllm/entrypoints/cli/"), _REFUSALS, Code.OTHER_BAD_CONFIG),
)  # fmt: skip
# Records that most logs show, also cut ones: their file and line tell the release (`data/log_places.json`).
PLACED = (
    "EngineCore failed to start", "EngineCore encountered a fatal error", "EngineCore hit an exception",
    "AsyncLLM output_handler failed", "WorkerProc hit an exception", "WorkerProc failed to start", "Starting to load model",
    "Loading weights took", "Model loading took", "Available KV cache memory", "Graph capturing finished",
    "init engine (profile", "Automatically detected platform", "is assigned as DP rank", "Avg prompt throughput",
)  # fmt: skip
# Trainers that hold an engine of vLLM's in their own process: their memory is not the engine's.
TRAINER_FILES = ("/trl/", "/verl/", "/transformers/trainer", "/accelerate/", "/deepspeed/", "/megatron/", "/openrlhf/",
                 "/nemo_rl/", "/swift/", "/unsloth", "/peft/")  # fmt: skip


def seen_in(function: str) -> tuple[Span, ...]:
    """The releases whose source defines this function."""
    return spans_of("frames", function)


def _read() -> dict[str, tuple[FailureText, ...]]:
    with (Path(__file__).parent / "data" / "failures.yaml").open("rb") as file:
        groups = yaml.load(file, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # noqa: S506  it makes nothing but texts
    return {name: tuple(_text(**row) for row in rows) for name, rows in groups.items()}


def _text(name: str, role: str, code: str = "", any_level: str = "", **more: str) -> FailureText:
    speaker = more.get("speaker", "vllm")
    is_end = speaker in _ENDERS or name in _ENDS or (speaker == "cuda" and code.startswith("other."))
    may_go_on = role == Role.CAUSE and not is_end
    return FailureText(
        name, role=Role(role), code=Code(code) if code else None, any_level=bool(any_level), may_go_on=may_go_on, **more
    )


_GROUPS = _read()
MEMORY, OTHER, LIFE = _GROUPS["memory"], _GROUPS["other"], _GROUPS["life"]
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
    "Server failed to start", "Engine core process failed", "failed to recv, got 0 bytes", "Connection reset by peer",
    "Connection closed by peer",
)  # fmt: skip

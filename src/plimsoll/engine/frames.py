"""The functions of vLLM that tell from a traceback which step failed, over all releases.

Names, not line numbers: files move and lines shift, while these functions have kept their names for years. A test looks each
of them up in the sources of the releases (`data/frames.json` records where it was found).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.engine.tables import Span


# In the order in which they decide: a step further down may be called by one further up, never the other way round, except
# where the comment says so.
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
    from plimsoll.engine.tables import spans_of  # a table of JSON: not read to judge a log

    return spans_of("frames", function)

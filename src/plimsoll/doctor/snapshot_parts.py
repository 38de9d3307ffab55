"""Whose memory a block is, in the words of somebody who runs vLLM: by the code that asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from plimsoll.domain.memory_snapshot import Frame


class Category(StrEnum):
    """What a piece of GPU memory is for."""

    WEIGHTS = "weights"
    KV = "KV cache"
    WEIGHTS_OR_KV = "weights or KV cache"
    GRAPHS = "CUDA graphs"
    WORKSPACE = "workspace"
    LOGITS = "sampler and logits"
    ACTIVATIONS = "activations"
    MULTIMODAL = "multimodal encoder"
    LORA = "LoRA"
    COLLECTIVES = "collectives"
    UNKNOWN = "unknown"


FIXED = frozenset((Category.WEIGHTS, Category.KV, Category.WEIGHTS_OR_KV, Category.GRAPHS))  # made at the start, then stays


class _Rule(NamedTuple):
    """A stack with such a function, or with code of such a file of vLLM, asked for this kind of memory."""

    category: Category
    names: frozenset[str]
    files: tuple[str, ...] = ()  # beginnings of paths below vllm/


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# In this order, because stacks nest: the second runner makes its sampler inside `load_model`, a workspace is made while the
# KV cache is, an adapter while weights are loaded. The names were looked up in the sources of 0.8.0 to 0.32.0 and in
# snapshots of a real server; a name that only some releases have costs nothing.
_RULES = (
    _Rule(
        Category.LOGITS,
        _names("compute_logits _get_prompt_logprobs_dict compute_prompt_logprobs _dummy_sampler_run"),
        (
            "v1/sample/",
            "v1/worker/gpu/sample/",
            "v1/worker/gpu/metrics/logits.py",
            "v1/worker/gpu/spec_decode/rejection_sampler",
            "model_executor/layers/sampler.py",
            "model_executor/layers/logits_processor.py",
        ),
    ),
    # Beside scratch memory the worker's own tables: block tables, request states, masks for structured output.
    _Rule(
        Category.WORKSPACE,
        _names(
            "_ensure_workspace_size get_simultaneous _get_workspace_buffer _get_workspace initialize_metadata_builders"
            " init_attn_backend initialize_attn_backend may_reinitialize_input_batch _init_kv_zero_meta"
            " init_model_state"
        ),
        (
            "v1/worker/workspace.py",
            "v1/worker/block_table.py",
            "v1/worker/gpu_input_batch.py",
            "v1/worker/gpu/block_table.py",
            "v1/worker/gpu/input_batch.py",
            "v1/worker/gpu/states.py",
            "v1/worker/gpu/structured_outputs.py",
        ),
    ),
    _Rule(
        Category.LORA,
        _names("create_lora_weights create_lora_manager load_lora_model maybe_setup_dummy_loras add_lora"),
        ("lora/model_manager.py", "lora/worker_manager.py", "lora/models.py", "lora/lora_model.py", "lora/lora_weights.py"),
    ),
    _Rule(
        Category.KV,
        _names(
            "initialize_kv_cache initialize_kv_cache_tensors _allocate_kv_cache _allocate_kv_cache_tensors allocate_kv_cache"
            " _reshape_kv_cache _reshape_kv_cache_tensors init_kv_cache _init_cache_engine"
        ),
        ("worker/cache_engine.py",),
    ),
    _Rule(
        Category.WEIGHTS,
        _names(
            "load_model load_weights create_weights process_weights_after_loading initialize_model _initialize_model"
            " reload_weights"
        ),
        ("model_executor/model_loader/",),
    ),
    _Rule(
        Category.MULTIMODAL,
        _names("_execute_mm_encoder execute_mm_encoder get_multimodal_embeddings embed_multimodal _gather_mm_embeddings"),
        ("multimodal/", "v1/worker/gpu/mm/"),
    ),
    _Rule(Category.COLLECTIVES, _names("init_worker_distributed_environment"), ("distributed/device_communicators/",)),
    _Rule(
        Category.GRAPHS,
        _names("capture_model _capture_cudagraphs capture_graph capture_graphs _capture_ubatches _capture_budget_graph"),
        ("compilation/cuda_graph.py", "v1/worker/gpu/cudagraph_utils.py", "v1/worker/encoder_cudagraph.py"),
    ),
    _Rule(
        Category.ACTIVATIONS,
        _names("execute_model _dummy_run profile_run _model_forward"),
        ("model_executor/models/", "model_executor/layers/"),
    ),
    # The worker's own buffers: input ids, positions.
    _Rule(Category.WORKSPACE, _names("_make_buffer init_device")),
)


def below_vllm(filename: str) -> str | None:
    """A file's path below vLLM's package, also where the folders above it were cut off; None for anybody else's file."""
    _, found, rest = f"/{filename}".replace("\\", "/").rpartition("/vllm/")
    return rest if found else None


def category_of_stack(frames: Sequence[Frame]) -> Category:
    """What a stack asked memory for; unknown where no rule knows any of its frames."""
    files = {path for frame in frames if (path := below_vllm(frame.filename)) is not None}
    names = {frame.name.rpartition(".")[2] for frame in frames if below_vllm(frame.filename) is not None}
    for rule in _RULES:
        if rule.names & names or any(path.startswith(rule.files) for path in files if rule.files):
            return rule.category
    return Category.UNKNOWN


def is_of_profile_run(frames: Sequence[Frame]) -> bool:
    """Whether vLLM's trial run at the start asked for it; what is still live of it once the server is up is no activation."""
    return any(frame.name == "profile_run" and below_vllm(frame.filename) is not None for frame in frames)

"""Which step failed, from tracebacks as both engines' releases print them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.root_cause import judge
from plimsoll.doctor.rules.timeline import (
    CODES,
    RUNTIME,
    ServerProgress,
    TracebackFrame,
    read_timeline,
    step_of_frames,
    step_of_progress,
)
from plimsoll.findings import Code
from plimsoll.vllm.failure_texts import STEP_FRAMES, seen_in
from tests.doctor.log_maker import OOM, log
from tests.each import each

SITE = "/usr/lib/python3.12/site-packages/"
TORCH = TracebackFrame(f"{SITE}torch/nn/modules/module.py", "_call_impl")
# Files that occur often, and the calls that lead to a step.
SHORT = {
    "core": "v1/engine/core.py", "worker": "v1/worker/gpu_worker.py", "runner": "v1/worker/gpu_model_runner.py",
    "old-engine": "engine/llm_engine.py", "old-worker": "worker/worker.py", "old-runner": "worker/model_runner.py",
    "llama": "model_executor/models/llama.py", "sampler": "v1/sample/sampler.py",
    "START": "core:run_engine_core core:__init__ core:_initialize_kv_caches",
    "SERVE": "core:run_busy_loop core:step runner:execute_model",
    "OLD-START": "old-engine:__init__ old-engine:_initialize_kv_caches",
    "OLD-SERVE": "engine/async_llm_engine.py:engine_step worker/worker_base.py:execute_model",
}  # fmt: skip
TRACEBACKS = [
    # The second engine.
    ("weights", "worker:load_model runner:load_model llama:__init__ model_executor/layers/linear.py:create_weights"),
    ("profile", "START worker:determine_available_memory runner:profile_run runner:_dummy_run llama:forward"),
    ("profile", "START worker:determine_available_memory runner:profile_run runner:_dummy_sampler_run sampler:forward"),
    ("kv-allocation", "START worker:initialize_from_config runner:initialize_kv_cache runner:_allocate_kv_cache_tensors"),
    ("graph-capture", "START worker:compile_or_warm_up_model runner:capture_model runner:_dummy_run"),
    ("graph-capture", "START worker:determine_available_memory runner:profile_cudagraph_memory"),
    ("sampler-warmup", "START worker:compile_or_warm_up_model runner:_dummy_sampler_run sampler:forward"),
    ("warm-up", "START worker:compile_or_warm_up_model runner:_dummy_run"),
    ("device", "worker:init_device worker:init_worker_distributed_environment"),
    ("wake-up", "worker:wake_up device_allocator/cumem.py:wake_up device_allocator/cumem.py:create_and_map"),
    ("lora", "SERVE v1/worker/lora_model_runner_mixin.py:set_active_loras lora/worker_manager.py:set_active_adapters"),
    ("multimodal", "SERVE runner:_execute_mm_encoder model_executor/models/qwen2_5_vl.py:embed_multimodal"),
    ("logits", "SERVE llama:compute_logits model_executor/layers/logits_processor.py:_get_logits"),
    ("logits", "SERVE runner:_get_prompt_logprobs_dict sampler:compute_logprobs"),
    ("logits", "core:run_busy_loop worker:sample_tokens runner:_sample"),
    ("collectives", "SERVE llama:forward distributed/device_communicators/pynccl.py:all_reduce"),
    ("forward", "SERVE llama:forward model_executor/layers/activation.py:forward_cuda"),
    # The first engine.
    ("weights", "old-worker:load_model old-runner:load_model model_executor/model_loader/loader.py:_initialize_model"),
    ("profile", "OLD-START old-worker:determine_num_available_blocks old-runner:profile_run old-runner:execute_model"),
    ("kv-allocation", "OLD-START old-worker:_init_cache_engine worker/cache_engine.py:_allocate_kv_cache"),
    ("graph-capture", "OLD-START old-worker:initialize_cache old-worker:_warm_up_model old-runner:capture_model"),
    ("lora", "OLD-SERVE old-runner:set_active_loras lora/worker_manager.py:_apply_adapters lora/models.py:activate_adapter"),
    ("logits", "OLD-SERVE old-runner:execute_model model_executor/layers/sampler.py:_get_logprobs"),
    ("multimodal", "OLD-SERVE model_executor/models/llava.py:_process_image_input model_executor/models/clip.py:forward"),
    ("forward", "OLD-SERVE old-runner:execute_model llama:forward"),
]  # fmt: skip


def calls_of(short: str) -> list[tuple[str, str]]:
    """The file and function of each call, short names written out."""
    words = " ".join(SHORT.get(word, word) for word in short.split())
    calls = (word.split(":") for word in words.split())
    return [(SHORT.get(file, file), function) for file, function in calls]


def frames(short: str) -> list[TracebackFrame]:
    """The calls in vLLM's folder, with torch's own in between as in life."""
    return [frame for file, function in calls_of(short) for frame in (TracebackFrame(f"{SITE}vllm/{file}", function), TORCH)]


@each(("name", "calls"), TRACEBACKS)
def test_tracebacks_of_both_engines_name_their_step(name: str, calls: str) -> None:
    """Each step is known by the functions its traceback passes through, whatever they call inside."""
    step = step_of_frames(frames(calls))
    assert step is not None
    assert (step.name, step.code) == (name, CODES[name])
    assert 0.5 < step.confidence <= 0.95


def test_every_step_but_the_hopeless_has_a_traceback_of_vllms_own_functions() -> None:
    """No step goes untested."""
    for _, calls in TRACEBACKS:
        assert any(seen_in(function) for _, function in calls_of(calls))
    assert {name for name, _ in STEP_FRAMES} <= {name for name, _ in TRACEBACKS}


def test_functions_of_torchs_own_or_below_a_running_step_do_not_count() -> None:
    """`step` of an optimiser, `capture_graphs` of torch's, `load_weights` below `execute_model`."""
    assert (
        step_of_frames([TracebackFrame(f"{SITE}torch/optim/sgd.py", "step"), TracebackFrame("torch/x.py", "load_model")])
        is None
    )
    step = step_of_frames(frames("SERVE llama:load_weights"))
    assert step is not None
    assert step.name == "forward"


def test_a_graph_being_captured_and_a_model_being_built_are_known_by_one_frame() -> None:
    """Torch's context manager and a layer's constructor run at no other time."""
    calls = [*frames("worker:compile_or_warm_up_model"), TracebackFrame(f"{SITE}torch/cuda/graphs.py", "__exit__")]
    step = step_of_frames(calls)
    assert step is not None
    assert step.name == "graph-capture"
    step = step_of_frames([TracebackFrame("vllm/model_executor/layers/linear.py", "__init__"), TORCH])
    assert step is not None
    assert (step.name, step.confidence) == ("weights", 0.8)


@pytest.mark.parametrize(("inside", "name"), [("load_model", "weights"), ("execute_model", "lora")])
def test_adapters_made_with_the_model_are_weights(inside: str, name: str) -> None:
    """Slots for adapters are taken at load; adapters themselves while serving."""
    step = step_of_frames(frames(f"runner:{inside} lora/models.py:activate_adapter"))
    assert step is not None
    assert step.name == name


def test_a_first_collective_that_fails_is_the_collective() -> None:
    """The ranks are joined in the device's first steps."""
    step = step_of_frames(frames("worker:init_device distributed/device_communicators/pynccl.py:__init__"))
    assert step is not None
    assert step.code is Code.RUNTIME_COLLECTIVES


@pytest.mark.parametrize(
    ("progress", "name"),
    [
        (ServerProgress.UNKNOWN, None),
        (ServerProgress.BEGUN, None),
        (ServerProgress.LOADING, "weights"),
        (ServerProgress.LOADED, "profile"),
        (ServerProgress.MEASURED, "kv-allocation"),
        (ServerProgress.CAPTURING, "graph-capture"),
        (ServerProgress.CAPTURED, "sampler-warmup"),
        (ServerProgress.SERVING, "forward"),
    ],
)
def test_progress_alone_is_a_guess_and_says_so(progress: ServerProgress, name: str | None) -> None:
    """The step after what was last reached, never with more than 0.6."""
    for frames_seen in (False, True):
        step = step_of_progress(progress, frames_seen=frames_seen)
        assert (step.name if step is not None else None) == name
        assert step is None or step.confidence <= 0.6


def test_a_traceback_cut_to_torchs_device_context_hints_at_weights() -> None:
    """Parameters are made under it, and little else."""
    for file, function, step in (("_device.py", "__torch_function__", "weights"), ("_foreach.py", "f", "unknown")):
        frame = f'  File "{SITE}torch/utils/{file}", line 104, in {function}'
        root = judge(read_timeline(log(["Traceback (most recent call last):", frame, "    return f()", OOM]))).root
        assert root is not None
        assert root.step is not None
        assert root.step.name == step


def test_codes_of_running_steps_are_runtime_codes() -> None:
    """What may fail while serving is told apart from the start."""
    assert {name for name, code in CODES.items() if code.startswith("runtime.")} == set(RUNTIME)


KNOWN = st.sampled_from([function for _, functions in STEP_FRAMES for function in functions])


@given(st.lists(st.builds(TracebackFrame, st.text(max_size=20), st.one_of(st.text(max_size=20), KNOWN)), max_size=12))
def test_any_frames_give_a_step_or_none(some: list[TracebackFrame]) -> None:
    """Whatever a log pretends, the answer is a known step or that it cannot be told."""
    step = step_of_frames(some)
    assert step is None or (step.name in CODES and 0 < step.confidence < 1)

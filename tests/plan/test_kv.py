"""The KV block arithmetic: vLLM's published results by hand, and what must hold for any layers and any memory."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.engine.kv_cases import GIB, Case, named, published, random_case
from plimsoll.errors import BadInput
from plimsoll.plan.kv import KvPlan, WhyRefused, plan_kv
from plimsoll.plan.kv_layers import (
    CannotGroupError,
    ChunkedSpec,
    FullSpec,
    KvSpec,
    MlaSpec,
    SlidingSpec,
    StateSpec,
    in_flight_tokens,
    layers_by_stage,
)
from plimsoll.plan.settings import AUTO_FIT, Settings
from tests.each import each

CASES = {case.name: case for case in published()}
LLAMA = FullSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16")
WINDOW = SlidingSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16", window=128)

# What vLLM 0.32 answers (tests/real/test_kv_planner.py asks it again): bytes a block, blocks, tokens, blocks a request.
ANSWERS = {
    "llama-3.1-8b": (2 << 20, 20480, 327_680, 8192),
    "llama-3.1-8b fp8": (1 << 20, 40960, 655_360, 8192),
    "deepseek-v3": (4_497_408, 9549, 611_136, 2048),
    "deepseek-v3.2": (3_076_352, 13961, 893_504, 2048),
    "gpt-oss-20b async": (393_216, 27306, 387_973, 8192 + 1033),
    "gpt-oss-20b sync": (393_216, 27306, 410_771, 8192 + 521),
    "gemma-3-27b": (1_310_720, 32768, 291_658, 14726),
    "gemma-3-27b without hybrid manager": (8_126_464, 10570, 169_120, 8192),
    "qwen3-next-80b none": (25_952_256, 1654, 1_720_580, 252),
    "qwen3-next-80b align": (25_952_256, 1654, 1_700_337, 255),
}


def planned(case: Case) -> KvPlan:
    """Our plan of a case."""
    return plan_kv(case.ranks, case.settings, case.available)


def plan(specs: Sequence[KvSpec], memory: int, **changes: Any) -> KvPlan:
    """The plan of one rank with these layers."""
    chosen = replace(Settings(max_model_len=8192, prefix_caching=False), **changes)
    return plan_kv((named(specs),), chosen, memory)


@each("name", ANSWERS)
def test_a_published_case_has_vllms_numbers(name: str) -> None:
    """Every case vLLM's planner was asked about comes out to the integer."""
    result = planned(CASES[name])
    assert (result.bytes_per_block, result.num_blocks, result.tokens, result.blocks_per_request) == ANSWERS[name]
    assert result.fits_one_request


def test_gemma_has_six_window_groups_and_one_full() -> None:
    """52 window layers go into six groups of at most ten, the ten full ones into one."""
    groups = planned(CASES["gemma-3-27b"]).groups
    assert sorted((group.kind, group.layers) for group in groups) == [
        ("full", 10), ("sliding", 8), ("sliding", 8), ("sliding", 9), ("sliding", 9), ("sliding", 9), ("sliding", 9),
    ]  # fmt: skip
    assert {group.blocks_per_request for group in groups if group.kind == "sliding"} == {1089}


def test_the_null_block_is_part_of_the_check() -> None:
    """One request's blocks are not enough: one more is kept by vLLM, and one byte less than that is refused."""
    needed = 512 * (2 << 20)
    exact = plan([LLAMA] * 32, needed + (2 << 20))
    assert (exact.num_blocks, exact.fits_one_request, exact.max_concurrency) == (513, True, 513 / 512)
    short = plan([LLAMA] * 32, needed + (2 << 20) - 1)
    assert short.refusal is not None
    assert (short.refusal.why, short.refusal.needed_bytes) == (WhyRefused.TOO_LONG, needed)
    assert (short.refusal.estimated_max_len, short.largest_context_that_fits) == (8176, 8176)
    assert plan([LLAMA] * 32, needed, release="0.28.0").fits_one_request  # the check came with 0.29.0


def test_no_memory_is_told_apart_from_too_little() -> None:
    """Nothing left for blocks is another refusal than a context that is too long."""
    for memory in (-5, 0, 2 << 20):
        refusal = plan([LLAMA] * 32, memory).refusal
        assert refusal is not None
        assert refusal.why is WhyRefused.NO_MEMORY
    refusal = plan([LLAMA] * 32, (4 << 20) - 1).refusal
    assert refusal is not None
    assert refusal.why is WhyRefused.TOO_LONG


def test_auto_fit_lowers_the_context_to_what_fits() -> None:
    """With --max-model-len -1 the start succeeds with a shorter context, unless not one token fits."""
    fitted = plan([LLAMA] * 32, 101 * (2 << 20), max_model_len=AUTO_FIT, model_context=8192)
    assert (fitted.fits_one_request, fitted.max_model_len, fitted.tokens) == (True, 1600, 1616)
    refusal = plan([LLAMA] * 32, 1 << 20, max_model_len=AUTO_FIT, model_context=8192).refusal
    assert refusal is not None
    assert refusal.why is WhyRefused.NOTHING_FITS


def test_an_override_replaces_the_blocks_and_the_memory_of_the_check() -> None:
    """--num-gpu-blocks-override decides alone, in both directions."""
    assert plan([LLAMA] * 32, 0, num_gpu_blocks_override=513).fits_one_request
    assert not plan([LLAMA] * 32, 1 << 40, num_gpu_blocks_override=512).fits_one_request


def test_the_smallest_rank_rules() -> None:
    """Pipeline stages of unlike size or memory all get the fewest blocks any of them can hold."""
    layers = named([LLAMA] * 32)
    ranks = (layers[:12], layers[12:])
    result = plan_kv(ranks, Settings(max_model_len=8192, pipeline_parallel=2), (GIB, GIB))
    assert (result.bytes_per_block_by_rank, result.num_blocks) == ((12 << 16, 20 << 16), GIB // (20 << 16))
    assert plan_kv(ranks, Settings(max_model_len=8192, pipeline_parallel=2), (GIB // 4, GIB)).num_blocks == GIB // 4 // (
        12 << 16
    )


def test_pipeline_stages_share_the_groups_of_the_whole_model() -> None:
    """A stage without a window layer still costs what its own layers of each group need."""
    layers = named([*[LLAMA, WINDOW] * 4, *[LLAMA] * 4])
    result = plan_kv((layers[:8], layers[8:]), Settings(max_model_len=8192, pipeline_parallel=2), (GIB, GIB))
    assert sorted((group.layers, group.kind) for group in result.groups) == [(4, "full"), (4, "full"), (4, "sliding")]
    assert result.bytes_per_block_by_rank == (4 << 16, 2 << 16)


def test_dcp_shards_the_tokens_of_full_attention_and_refuses_windows() -> None:
    """With decode context parallelism 4 a request needs a quarter of the blocks; sliding windows are refused."""
    result = plan([MlaSpec(block_size=64, head_size=576, dtype="bfloat16")] * 4, GIB, decode_context_parallel=4)
    assert result.blocks_per_request == 32
    assert plan([LLAMA, WINDOW], GIB).groups[1].blocks_per_request == 513
    with pytest.raises(CannotGroupError):
        plan([LLAMA, WINDOW], GIB, decode_context_parallel=4)


def test_windows_hold_what_is_in_flight() -> None:
    """A window layer holds its window and every batch that is not settled, never more than the context."""
    in_flight = {
        (True, 1, True): 2, (False, 1, True): 1, (True, 2, True): 3, (True, 2, False): 2, (False, 3, True): 3,
    }  # fmt: skip
    for (scheduling, pp, v2_runner), batches in in_flight.items():
        chosen = Settings(max_model_len=10**6, async_scheduling=scheduling, pipeline_parallel=pp, v2_runner=v2_runner)
        assert in_flight_tokens(chosen) == batches * 8192
    assert in_flight_tokens(Settings(max_model_len=1, release="0.25.1")) == 8192


def test_pages_become_equal_by_longer_blocks_or_by_padding() -> None:
    """A page that divides the largest gets a longer block, one that does not is padded, and an MLA page is neither."""
    half = replace(WINDOW, heads=4)
    assert [group.block_size for group in plan([LLAMA, half], GIB).groups] == [16, 32]
    odd = replace(WINDOW, head_size=80, head_size_v=80)
    result = plan([LLAMA, odd], GIB)
    assert ([group.block_size for group in result.groups], result.bytes_per_block) == ([16, 16], LLAMA.page_bytes)
    latent = MlaSpec(block_size=16, head_size=576, dtype="bfloat16")
    with pytest.raises(CannotGroupError):
        plan([latent, ChunkedSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16", chunk=64)], GIB,
             hybrid_manager=True)  # fmt: skip
    assert [group.kind for group in plan([latent, WINDOW], GIB).groups] == ["mixed"]  # allocated as full attention


def test_the_group_length_follows_the_larger_type_when_close() -> None:
    """12 windows and 13 full layers are padded to 13 each; before 0.12 they made groups of 12."""
    layers: list[KvSpec] = [*[WINDOW, LLAMA] * 12, LLAMA]
    assert [group.layers for group in plan(layers, GIB).groups] == [12, 13]
    assert [group.layers for group in plan(layers, GIB, release="0.11.0").groups] == [12, 7, 6]


def test_states_take_blocks_by_the_cache_mode() -> None:
    """A state needs one block, two under prefix caching, and one more for every speculative token and checkpoint."""
    state = StateSpec(block_size=8192, shapes=((3, 64), (8, 16)), dtypes=("bfloat16", "float32"), spec_blocks=2)
    assert state.page_bytes == 3 * 64 * 2 + 8 * 16 * 4
    assert plan([state] * 3, GIB).blocks_per_request == 3
    assert plan([state] * 3, GIB, prefix_caching=True).blocks_per_request == 4
    assert plan([replace(state, checkpoint_blocks=1)] * 3, GIB, prefix_caching=True).blocks_per_request == 5
    every = plan([replace(state, block_size=16)] * 3, GIB, prefix_caching=True, mamba_cache_mode="all", release="0.19.0")
    assert every.blocks_per_request == 512


def test_the_printed_size_has_had_two_meanings() -> None:
    """Up to 0.20 a hybrid's "KV cache size" is blocks over groups, later concurrency times context."""
    case = CASES["gpt-oss-20b async"]
    old = plan_kv(case.ranks, replace(case.settings, release="0.19.0"), case.available)
    assert old.tokens == 27306 // 2 * 16
    assert old.groups[0].blocks_per_request == 521  # one batch in flight, then
    new = plan_kv(case.ranks, replace(case.settings, release="0.21.0"), case.available)
    assert new.tokens == int(27306 / (8192 + 521) * 131072)


def test_before_the_hybrid_manager_every_layer_was_full() -> None:
    """0.9.0 had one group, whatever the layers' windows."""
    case = CASES["gemma-3-27b"]
    assert len(plan_kv(case.ranks, replace(case.settings, release="0.9.0"), 80 * GIB).groups) == 1


def test_pipeline_stages_as_vllm_cuts_them() -> None:
    """The remainder goes to the stages before the last, or where VLLM_PP_LAYER_PARTITION says."""
    assert [len(span) for span in layers_by_stage(61, 2)] == [31, 30]
    assert [len(span) for span in layers_by_stage(62, 4)] == [15, 16, 16, 15]
    assert [len(span) for span in layers_by_stage(63, 4)] == [16, 16, 16, 15]
    assert layers_by_stage(32, 2, (10, 22)) == [range(10), range(10, 32)]
    with pytest.raises(BadInput, match="VLLM_PP_LAYER_PARTITION=10,22"):
        layers_by_stage(33, 2, (10, 22))
    with pytest.raises(ValueError, match="not a version"):
        plan([LLAMA], GIB, release="latest")


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_whatever_the_layers_the_blocks_fit_and_memory_only_helps(seed: int, more: int) -> None:
    """Blocks never exceed the memory, more memory is never fewer blocks, and what fits shorter fits."""
    case = random_case(random.Random(seed))
    try:
        result = planned(case)
        richer = plan_kv(case.ranks, case.settings, tuple(memory + more for memory in case.available))
    except CannotGroupError:
        return
    if case.settings.num_gpu_blocks_override is None:
        for memory, cost in zip(case.available, result.bytes_per_block_by_rank, strict=True):
            assert result.num_blocks * cost <= max(memory, 0)
    assert richer.num_blocks >= result.num_blocks
    assert richer.fits_one_request >= result.fits_one_request
    assert richer.largest_context_that_fits >= result.largest_context_that_fits
    assert result.fits_one_request == (result.largest_context_that_fits >= result.max_model_len)
    shorter = result.largest_context_that_fits
    if shorter and not case.settings.auto_fit:
        again = plan_kv(case.ranks, replace(case.settings, max_model_len=shorter), case.available)
        assert again.fits_one_request


def test_a_thousand_plans_are_quick() -> None:
    """Planning is cheap enough to search with: a thousand plans of an 80-layer model in well under two seconds."""
    layers = named([LLAMA] * 80)
    began = time.process_time()
    for length in range(8192, 9192):
        plan_kv((layers,), Settings(max_model_len=length), 40 * GIB)
    assert time.process_time() - began < 2  # 0.2 s on an idle core

"""Settings that vLLM would not start with are refused in one line; step times by the data sheet, padded to graphs."""

from __future__ import annotations

import ast
import gzip
import json
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import Gpu, gpu_named
from plimsoll.simulate import layout as at
from plimsoll.simulate import start as start_module
from plimsoll.simulate.settings import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    OVERHEAD_NS,
    CacheGroup,
    EngineLimits,
    Experts,
    HostCache,
    Sheet,
    Speculation,
    StepTime,
    graph_sizes,
    groups_of,
    padded,
    sheet_time,
    step_table,
)
from plimsoll.simulate.start import BOUNDS, MOST_BLOCKS, check, start, too_long
from plimsoll.simulate.trace import make_trace
from tests.each import each

REFUSED: list[tuple[EngineLimits, tuple[str, ...]]] = [
    (EngineLimits(block_size=0), ("--block-size", "between 1 and", "0")),
    (EngineLimits(max_num_seqs=0), ("--max-num-seqs", "between 1 and", "0")),
    (EngineLimits(max_num_batched_tokens=-5), ("--max-num-batched-tokens", "between 1 and", "-5")),
    (EngineLimits(max_model_len=0), ("--max-model-len", "between 1 and", "0")),
    (EngineLimits(num_blocks=1), ("--num-blocks", "between 2 and", "null block")),
    (EngineLimits(num_blocks=-3), ("--num-blocks", "-3")),
    (EngineLimits(block_size=32, groups=(CacheGroup("full", 16), CacheGroup("mamba", 16))), ("--groups", "--block-size")),
    *(
        (EngineLimits().turned(**{name: most + 1}), (f"--{name.replace('_', '-')}", str(most)))
        for name, (_, most, _) in BOUNDS.items()
    ),
    (EngineLimits(long_prefill_token_threshold=-1), ("--long-prefill-token-threshold", "0 is off")),
    (EngineLimits(watermark=1.0), ("--watermark", "between 0 and 1", "1.0")),
    (EngineLimits(watermark=-0.1), ("--watermark", "-0.1")),
    (EngineLimits(watermark=float("nan")), ("--watermark", "nan")),
    (EngineLimits(max_num_seqs=257, max_num_batched_tokens=256), ("--max-num-batched-tokens 256", "--max-num-seqs 257")),
    (EngineLimits(chunked_prefill=False), ("--max-num-batched-tokens 2048", "--max-model-len 16384", "chunked prefill")),
    (EngineLimits(groups=(CacheGroup("full", 0), CacheGroup())), ("group", "block size", "0")),
    (EngineLimits(groups=(CacheGroup("sliding", 16),)), ("sliding group", "window")),
    (EngineLimits(groups=(CacheGroup("full", 16), CacheGroup("mamba", 32))), ("Mamba", "block size", "prefix caching")),
    (
        EngineLimits(groups=(CacheGroup("mamba", 16),), chunked_prefill=False, max_num_batched_tokens=16384),
        ("Mamba", "prefix caching", "chunked prefill"),
    ),
    (EngineLimits(groups=(CacheGroup("full", 32),)), ("32", "--block-size", "16")),
    (EngineLimits(host_cache=HostCache(0, 0)), ("host", str(MOST_BLOCKS))),
    (EngineLimits(groups=(CacheGroup(), CacheGroup("mamba")), speculation=Speculation(2, 0.5)), ("speculative", "Mamba")),
    (
        EngineLimits(max_num_batched_tokens=256, speculation=Speculation(256, 0.6, slots=256)),
        ("--max-num-batched-tokens 256 must be above 256", "slots of a step"),
    ),
]


@each(("settings", "said"), REFUSED)
def test_what_cannot_start_is_one_line(settings: EngineLimits, said: tuple[str, ...]) -> None:
    """The option, its value or its limit; before anything is laid out."""
    with pytest.raises(BadInput) as caught:
        start(make_trace("t", [0], [5], [1]), settings, StepTime(), np.zeros(1, dtype=np.int64))
    for words in said:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_refusal_is_left_out_above() -> None:
    """Every line of the check that refuses something is reached by one of the cases."""
    tree = ast.parse(Path(start_module.__file__).read_text(encoding="utf-8"))
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in ("check", "_check_groups")]
    raising = {one.lineno for function in checks for one in ast.walk(function) if isinstance(one, ast.Raise)}
    reached: set[int | None] = set()
    for settings, _ in REFUSED:
        with pytest.raises(BadInput) as caught:
            check(settings)
        reached.add(traceback.extract_tb(caught.value.__traceback__)[-1].lineno)
    assert len(raising) >= 10
    assert reached == raising


@each(
    "settings",
    [
        EngineLimits(),
        EngineLimits(num_blocks=2, block_size=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1),
        EngineLimits(watermark=0.999),
        EngineLimits(chunked_prefill=False, max_num_batched_tokens=16384),
        EngineLimits(groups=(CacheGroup("full", 16), CacheGroup("mamba", 32)), prefix_caching=False),
        EngineLimits(groups=(CacheGroup("full", 16), CacheGroup("sliding", 32, 1))),
        EngineLimits(groups=(CacheGroup("mamba", 16),)),
    ],
)
def test_what_vllm_starts_with_is_taken(settings: EngineLimits) -> None:
    """The limits themselves are fine."""
    check(settings)


def test_one_full_group_is_the_default() -> None:
    """Without prefix caching a Mamba state is one block, however long the request."""
    assert groups_of(EngineLimits(block_size=32)) == (CacheGroup("full", 32),)
    settings = EngineLimits(groups=(CacheGroup("full", 16), CacheGroup("mamba", 16)), max_model_len=500)
    assert groups_of(settings) == settings.groups
    assert groups_of(settings._replace(prefix_caching=False)) == (CacheGroup("full", 16), CacheGroup("mamba", 500))


def test_the_longest_request_is_what_model_and_pool_hold() -> None:
    """Full groups share the pool; a window or a state never needs it all, so that only the model limits."""
    lengths = np.arange(1, 20_000, dtype=np.int64)
    for settings, longest in (
        (EngineLimits(num_blocks=11, block_size=16), 160),
        (EngineLimits(num_blocks=11, max_model_len=100), 100),
        (EngineLimits(num_blocks=11, groups=(CacheGroup(), CacheGroup())), 81),
        (EngineLimits(num_blocks=31, groups=(CacheGroup("full", 16), CacheGroup("full", 32))), 321),
        (EngineLimits(num_blocks=11, groups=(CacheGroup(), CacheGroup("sliding", 16, 64))), 161),
        (EngineLimits(num_blocks=11, groups=(CacheGroup("sliding", 16, 64),)), 16384),
    ):
        assert lengths[~too_long(lengths, settings)].max() == longest


def test_a_start_has_every_block_free_and_nobody_in() -> None:
    """All but the null block, in order of their numbers; as many slots as can ever be used."""
    trace = make_trace("t", [0, 1], [5, 5], [1, 1])
    state = start(trace, EngineLimits(num_blocks=5, watermark=0.5), StepTime(), trace.arrival_ns)
    order, block = [], int(state.links[5, at.NEXT])
    while block != 6:
        order.append(block)
        block = int(state.links[block, at.NEXT])
    assert order == [1, 2, 3, 4]
    assert state.counts[at.FREE_BLOCKS] == 4
    assert state.counts[at.FREE_SLOTS] == 2
    assert state.limits[at.WATERMARK_BLOCKS] == 2
    assert state.requests[:, at.STATUS].tolist() == [at.NOT_ARRIVED] * 2
    huge = make_trace("huge", [0], [2**31], [1])
    with pytest.raises(BadInput, match="huge: a request of 2147483649 tokens is longer"):
        start(huge, EngineLimits(), StepTime(), huge.arrival_ns)


def test_a_table_reaches_further_as_a_line() -> None:
    """Steps larger than those that were fitted cost what a token costs; a table that is long enough stays as it is."""
    times = StepTime(token_ns=5, by_tokens=np.array([10, 11, 12]))
    assert times.reaching(2) is times
    further = times.reaching(4)
    assert further.by_tokens is not None
    assert further.by_tokens.tolist() == [10, 11, 12, 17, 22]
    assert StepTime().reaching(99) == StepTime()


META = Path(__file__).resolve().parents[3] / "shared/data/traces/real_runs/RTX4090_Llama-3.1-8B_meta.json.gz"


def test_steps_are_padded_to_the_captured_sizes() -> None:
    """1, 2, 4, then by 8 and by 16 up to 512; above the largest nothing is padded, and a step costs more."""
    assert graph_sizes(1) == (1, 2)
    assert graph_sizes(10) == (1, 2, 4, 8, 16)
    assert graph_sizes(128)[-3:] == (240, 248, 256)
    assert graph_sizes(140)[-2:] == (256, 272)
    assert graph_sizes(5000)[-2:] == (496, 512)
    assert padded((1, 2, 4, 8), 11).tolist() == [0, 1, 2, 4, 4, 8, 8, 8, 8, 9, 10, 11]
    assert padded((), 3).tolist() == [0, 1, 2, 3]
    assert padded((64,), 3).tolist() == [0, 64, 64, 64]
    table = step_table(1000, 10, 6, (1, 2, 4), 500)
    assert table.tolist() == [1000, 1010, 1020, 1040, 1040, 1550, 1560]
    assert table.dtype == np.int64
    assert step_table(1000, 10, 2, (), 500).tolist() == [1000, 1010, 1020]


@pytest.mark.skipif(not META.exists(), reason="the measured runs are not beside the repository")
def test_sizes_are_those_of_a_real_engine() -> None:
    """What vLLM 0.19 wrote down of itself."""
    config = json.loads(gzip.decompress(META.read_bytes()))["resolved_config"]
    captured = config["compilation_config"]["cudagraph_capture_sizes"]
    assert list(graph_sizes(config["scheduler_config"]["max_num_seqs"])) == captured


CARD = replace(gpu_named("A100 SXM 80GB"), bandwidth_bytes_per_s=10**12, bf16_flops=16 * 10**13)
DENSE = Sheet(weights_bytes=16e9, block_bytes=16 * 131_072, parameters=8e9)
SPARSE = Sheet(60e9, 16 * 98_304, 30e9, 28.8e9, Experts(128, 8, 0.95))


def timed(sheet: Sheet, card: Gpu = CARD, tokens: int = 2048, *, is_eager: bool = True) -> StepTime:
    """By the data sheet."""
    settings = EngineLimits(max_num_seqs=128, max_num_batched_tokens=tokens)
    found = sheet_time(sheet._replace(is_eager=is_eager), card, settings)
    assert found is not None
    return found


@each(("sheet", "is_eager"), [(sheet, is_eager) for sheet in (DENSE, SPARSE) for is_eager in (True, False)])
def test_more_tokens_never_take_less(sheet: Sheet, is_eager: bool) -> None:
    """The table is above 0 and does not fall, with graphs and without."""
    found = timed(sheet, is_eager=is_eager)
    table = found.table(2048)
    assert len(table) == 2049
    assert (table > 0).all()
    assert (np.diff(table) >= 0).all()
    assert min(found.base_ns, found.token_ns, found.seq_ns, found.ctx_ps) > 0


def test_small_steps_read_weights_and_large_ones_compute() -> None:
    """By hand at both ends; twice the card is half the time, but for what the engine itself needs."""
    table = timed(DENSE).table(2048)
    assert table[1] == pytest.approx(OVERHEAD_NS + 16e9 / (1e12 * BANDWIDTH_SHARE) * 1e9)
    assert table[2048] == pytest.approx(OVERHEAD_NS + 2 * 8e9 * 2048 / (1.6e14 * COMPUTE_SHARE) * 1e9)
    fast = timed(DENSE, replace(CARD, bandwidth_bytes_per_s=2 * 10**12, bf16_flops=32 * 10**13), 512)
    two = timed(DENSE._replace(weights_bytes=8e9, block_bytes=8 * 131_072, cards=2), tokens=512)
    assert np.allclose(fast.table(512), two.table(512))
    assert np.allclose((table[:513] - OVERHEAD_NS) / 2, fast.table(512) - OVERHEAD_NS, atol=2)
    assert two.ctx_ps == fast.ctx_ps


def test_few_tokens_read_few_experts() -> None:
    """Many read all of them; a token is computed with the chosen ones alone."""
    experts = Experts(128, 8, 0.95)
    assert experts.read(np.array([0.0, 1.0, 1000.0])) == pytest.approx([0.05, 0.05 + 0.95 * 8 / 128, 1.0])
    assert Experts(4, 9, 1.0).hit(np.array([1.0]))[0] == 1.0
    assert timed(SPARSE).token_ns == round(1e9 * 2 * 3e9 / (1.6e14 * COMPUTE_SHARE))


def test_eight_bit_floats_have_a_rate_of_their_own() -> None:
    """One byte a parameter; four bits are unpacked and computed with in sixteen."""
    for card, bytes_a_parameter, flops in (
        ("H100", 1.0, "fp8"), ("H100", 2.0, "bf16"), ("H100", 0.55, "bf16"), ("A100 SXM 80GB", 1.0, "bf16"),
    ):  # fmt: skip
        gpu = gpu_named(card)
        found = sheet_time(Sheet(8e9 * bytes_a_parameter, 2e6, 8e9), gpu, EngineLimits())
        assert found is not None
        assert found.token_ns == round(1e9 * 2 * 8e9 / (getattr(gpu, f"{flops}_flops") * COMPUTE_SHARE))

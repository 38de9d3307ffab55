"""The overhead terms: ranges, monotony, bands, and that odd shapes never break them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.models.shape import ModelShape, Tower
from plimsoll.plan.ledger import ERAS, Overhead, era_of, overhead
from plimsoll.plan.settings import Settings, v2_by_default
from plimsoll.units import GIB
from plimsoll.vllm.versions import Behaviour, Version
from tests.each import each
from tests.models.model_configs import LLAMA_8B

RELEASES = (
    "0.6.0 0.6.1 0.6.2 0.6.3 0.6.4 0.6.5 0.6.6 0.7.0 0.7.1 0.7.2 0.7.3 0.8.0 0.8.1 0.8.2 0.8.3 0.8.4 0.8.5 0.9.0 0.9.0.1 0.9.1 "
    "0.9.2 0.10.0 0.10.1 0.10.1.1 0.10.2 0.11.0 0.11.1 0.11.2 0.12.0 0.13.0 0.14.0 0.14.1 0.15.0 0.15.1 0.16.0 0.17.0 0.17.1 "
    "0.18.0 0.18.1 0.19.0 0.19.1 0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1 "
    "0.28.0 0.29.0 0.30.0 0.31.0 0.32.0"
).split()


def llama(**changes: object) -> ModelShape:
    return ModelShape.from_config({**LLAMA_8B, **changes})


def on_h100(release: str = "0.19.0", shape: ModelShape | None = None, **changes: Any) -> Overhead:
    shape = shape or llama()
    plain = Settings(
        release=release, gpu_bytes=int(79.19 * GIB), compute_capability=(9, 0), max_num_seqs=1024, max_num_batched_tokens=8192,
        max_model_len=4096, v2_runner=v2_by_default(release, shape),
        estimates_graphs=Behaviour.GRAPH_ESTIMATE.is_in(release),
    )  # fmt: skip
    return overhead(shape, replace(plain, **changes))


def test_every_release_has_a_range() -> None:
    """From 0.6 to 0.32 each release falls into one range, and the ranges follow each other without a gap."""
    assert ERAS[0].since is None
    assert [era.first for era in ERAS] == sorted({era.first for era in ERAS}, key=lambda first: Version(first).release)
    seen = [era_of(release).name for release in RELEASES]
    assert set(seen) == {era.name for era in ERAS}
    places = [[era.name for era in ERAS].index(name) for name in seen]
    assert places == sorted(places)


@pytest.mark.parametrize("release", ["0.33.0", "1.0.0", "0.32.1.dev7+g1234567"])
def test_unknown_release_is_met_as_the_newest(release: str) -> None:
    """A release newer than the table is planned with the newest range."""
    assert era_of(release) is ERAS[-1]


@each("release", RELEASES)
@each("field", ["max_num_seqs", "max_num_batched_tokens"])
def test_more_batch_never_takes_less(release: str, field: str) -> None:
    """More sequences or more tokens never need less memory."""
    values = [on_h100(release, None, **{field: size}).activation.value for size in (1, 16, 64, 256, 1024, 4096, 16384)]
    assert values == sorted(values)


@each("release", RELEASES)
def test_more_vocabulary_never_takes_less(release: str) -> None:
    """A larger vocabulary never needs less memory."""
    shapes = [llama(vocab_size=size) for size in (32000, 49152, 128256, 151936, 256000)]
    values = [on_h100(release, shape=shape).activation.value for shape in shapes]
    assert values == sorted(values)


@each("release", RELEASES)
def test_eager_has_no_graphs(release: str) -> None:
    """Under --enforce-eager there are no graphs, neither subtracted nor captured."""
    terms = on_h100(release, enforce_eager=True, estimates_graphs=True)
    assert terms.graphs.high == terms.graphs_actual.high == 0


def test_graphs_are_subtracted_when_vllm_subtracts_them() -> None:
    """Not before 0.18, on request in 0.18 and 0.19, by default from 0.20; the second runner estimates 0 until 0.28."""
    assert on_h100("0.17.0", estimates_graphs=True).graphs.high == 0
    assert on_h100("0.19.0").graphs.high == 0
    assert on_h100("0.19.0", estimates_graphs=True).graphs.value > 0
    assert on_h100("0.20.0").graphs.value > 0
    assert on_h100("0.20.0", estimates_graphs=False).graphs.high == 0
    assert on_h100("0.25.1", v2_runner=True).graphs.high == 0
    assert on_h100("0.29.0").graphs.value > 0


def test_the_default_runner_follows_the_release() -> None:
    """Qwen 3 ran on the second model runner from 0.22, Llama from 0.23, all dense models from 0.24, all models from 0.29."""
    qwen = llama(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    mixtral = llama(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert [v2_by_default(release, qwen) for release in ("0.21.0", "0.22.0")] == [False, True]
    assert [v2_by_default(release, llama()) for release in ("0.22.1", "0.23.0", "0.28.0")] == [False, True, True]
    assert [v2_by_default(release, mixtral) for release in ("0.25.1", "0.28.0", "0.29.0")] == [False, False, True]


def test_tensor_parallel_leaves_the_sampler_alone() -> None:
    """Logits are gathered on every rank, so the sampler's peak does not shrink with tensor parallelism."""
    one, four = (on_h100(tensor_parallel=size).activation.value for size in (1, 4))
    assert abs(one - four) < GIB // 100


def test_a_range_without_starts_says_so() -> None:
    """Where no start was measured the band is wider and the reason is in the estimate."""
    measured, unmeasured = on_h100("0.26.0").activation, on_h100("0.29.0").activation
    assert "wide band" in unmeasured.why
    assert "wide band" not in measured.why
    assert (unmeasured.high - unmeasured.low) / unmeasured.value > (measured.high - measured.low) / measured.value


def test_figures_of_the_campaign() -> None:
    """Peaks printed by vLLM 0.19.0 on H100 (llm-d-planner#205): dense, experts and vision come out within 0.02 GiB."""
    qwen = llama(architectures=["Qwen3ForCausalLM"], model_type="qwen3", intermediate_size=12288, vocab_size=151936)
    moe = llama(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_key_value_heads=4, vocab_size=151936,
    )  # fmt: skip
    gemma = llama(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma2", hidden_size=5376, intermediate_size=21504,
        vocab_size=262208, tie_word_embeddings=True,
    )  # fmt: skip
    gemma = replace(gemma, towers=(Tower("vision", patch_size=14),))
    for shape, printed in ((qwen, 2.21), (moe, 2.68), (gemma, 3.99)):
        assert on_h100(shape=shape).activation.value / GIB == pytest.approx(printed, abs=0.02)


SHAPES = st.builds(
    lambda hidden, vocab, inter, layers, experts, heads, towers: replace(
        llama(
            hidden_size=hidden, vocab_size=vocab, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=1, head_dim=64, **({"num_local_experts": experts, "num_experts_per_tok": 1} if experts else {}),
            **({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} if experts else {}),
        ),
        towers=(Tower("vision"), Tower("audio", hidden_size=8))[:towers],
    ),
    st.integers(1, 20000), st.integers(1, 500000), st.integers(1, 100000), st.integers(1, 200), st.integers(0, 512),
    st.integers(1, 256), st.integers(0, 2),
)  # fmt: skip


@given(
    SHAPES, st.sampled_from([*RELEASES, "9.9"]), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 64),
    st.integers(1, 16), st.booleans(), st.booleans(),
    st.sampled_from([None, (3, 5), (8, 0), (9, 0), (12, 0), (99, 0)]), st.sampled_from(["bfloat16", "float32", "odd"]),
)  # fmt: skip
def test_bands_hold_for_any_input(
    shape: ModelShape, release: str, sequences: int, tokens: int, tensor: int, pipeline: int, eager: bool, v2: bool,
    capability: tuple[int, int] | None, dtype: str,
) -> None:  # fmt: skip
    """No input makes a term negative, turns its band around or raises."""
    asked = Settings(
        release=release, gpu_bytes=1, compute_capability=capability, tensor_parallel=tensor, pipeline_parallel=pipeline,
        max_num_seqs=sequences, max_num_batched_tokens=tokens, max_model_len=0, enforce_eager=eager, estimates_graphs=v2,
        v2_runner=v2, dtype=dtype,
    )  # fmt: skip
    terms = overhead(shape, asked)
    for term in (terms.activation, terms.non_torch, terms.graphs, terms.graphs_actual):
        assert 0 <= term.low <= term.value <= term.high
        assert term.why

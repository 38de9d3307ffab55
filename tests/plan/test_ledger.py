"""The ledger: what adds up, what real starts showed, what goes wrong and what helps."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.findings import Code, Finding, Severity
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.shape import ModelShape, Tower
from plimsoll.plan.findings import Advice, advise, findings_of
from plimsoll.plan.kv_layers import in_flight_tokens
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, Settings, read_settings
from plimsoll.units import GIB, Estimate

H100 = Card("H100 SXM 80GB", int(79.19 * GIB), int(79.15 * GIB), int(79.25 * GIB), (9, 0))
H200 = Card("H200 SXM 141GB", int(139.80 * GIB), int(139.7 * GIB), int(139.85 * GIB), (9, 0))
L4 = Card("L4", int(22.03 * GIB), int(22.0 * GIB), int(22.1 * GIB), (8, 9))


def _llama(layers: int, hidden: int, heads: int, kv: int, wide: int, words: int = 128256, context: int = 131072) -> ModelFacts:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": words,
        "max_position_embeddings": context, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelFacts("llama", ModelShape.from_config(config))


LLAMA_8B = _llama(32, 4096, 32, 8, 14336)
LLAMA_70B = _llama(80, 8192, 64, 8, 28672)


def _settings(model: ModelFacts, card: Card, command: str = "", release: str = "0.25.1") -> Settings:
    line = read_command_line(["m", *shlex.split(command)], release)
    return read_settings(Flags(line, release), {}, model.shape, card)


def _plan(model: ModelFacts, card: Card, command: str = "", release: str = "0.25.1") -> Ledger:
    return plan_ledger(model, _settings(model, card, command, release), card)


def _findings(ledger: Ledger, model: ModelFacts) -> list[Finding]:
    return findings_of(ledger, model.shape, (), {})


def _codes(model: ModelFacts, card: Card, command: str = "", release: str = "0.25.1") -> set[Code]:
    return {f.code for f in _findings(_plan(model, card, command, release), model) if f.severity is Severity.CRITICAL}


def _advice(model: ModelFacts, card: Card, command: str, release: str = "0.25.1") -> list[Advice]:
    def replan(changed: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(model, changed, card)
        return ledger, _findings(ledger, model)

    ledger, findings = replan(_settings(model, card, command, release))
    return advise(ledger, model.shape, findings, replan)


@pytest.mark.parametrize(
    ("command", "kv_gib", "tokens"),
    [
        # Measured on one H200 with vLLM 0.25.1 and this very shape (tests/captures/vllm-0.25.1-h200).
        ("--max-model-len 8192", 112.28, 919_824),
        ("--max-model-len 8192 --gpu-memory-utilization 0.9 --enforce-eager", 109.72, 898_784),
        ("--gpu-memory-utilization 0.88 --max-model-len 32768 --max-num-seqs 64 --max-num-batched-tokens 24576 --enforce-eager",
         105.25, 862_192),
    ],
)  # fmt: skip
def test_real_starts_on_an_h200(command: str, kv_gib: float, tokens: int) -> None:
    """The KV cache of three real starts lies in the band, and the central figure is within 1 % and not above by more."""
    ledger = _plan(LLAMA_8B, H200, command)
    assert ledger.kv.low <= kv_gib * GIB <= ledger.kv.high
    assert abs(ledger.kv.value / (kv_gib * GIB) - 1) < 0.01
    assert abs(ledger.kv_plan.tokens / tokens - 1) < 0.01


def test_a_model_that_fills_the_card() -> None:
    """Qwen2.5-72B in 16 bits on one H200 left -4.76 GiB for the cache when it was tried; the sign and the code are foreseen."""
    qwen = _llama(80, 8192, 64, 8, 29568, 152064, 32768)
    ledger = _plan(qwen, H200, "--gpu-memory-utilization 0.95")
    assert ledger.kv.low <= -4.76 * GIB <= ledger.kv.high
    assert _codes(qwen, H200, "--gpu-memory-utilization 0.95") == {Code.STARTUP_NO_CACHE_BLOCKS}


def test_the_terms_add_up_and_a_fixed_cache_is_exact() -> None:
    """Requested is the sum of its parts; 4 GiB were 32,768 tokens on the H200."""
    ledger = _plan(LLAMA_8B, H100)
    parts = ledger.weights.value + ledger.non_torch.value + ledger.activation.value + ledger.graphs.value + ledger.kv.value
    assert parts == ledger.requested.value == math.ceil(H100.total_bytes * 0.92)
    buffers = int(4.125 * 1024 * 128256)
    assert ledger.slack.value == H100.total_bytes - ledger.context.value - ledger.requested.value - buffers
    ledger = _plan(LLAMA_8B, H200, "--kv-cache-memory-bytes 4294967296 --enforce-eager --max-model-len 8192")
    assert ledger.kv == Estimate.exact(4 * GIB, "--kv-cache-memory-bytes")
    assert ledger.kv_plan.tokens == 32768


def test_a_draft_model_takes_its_share() -> None:
    """A one-billion drafter adds its weights and, layer by layer, its cache: fewer blocks of more bytes."""
    small = _llama(16, 2048, 32, 8, 8192)
    command = "--speculative-config.model d --speculative-config.num_speculative_tokens 3"
    alone = _plan(LLAMA_8B, H100, command)
    both = _plan(replace(LLAMA_8B, drafter=small), H100, command)
    assert both.weights.value - alone.weights.value == _plan(small, H100).weights.value
    # Eight KV heads of 64 over 16 layers: a quarter of what 32 layers of eight heads of 128 keep.
    assert both.kv_plan.bytes_per_block == alone.kv_plan.bytes_per_block * 5 // 4
    assert both.kv_plan.num_blocks < alone.kv_plan.num_blocks


def test_a_head_of_the_models_own_keeps_a_cache() -> None:
    """Drafting with the model's own head adds one layer's cache for each of its layers."""
    shape = replace(LLAMA_8B.shape, mtp_layers=1)
    model = replace(LLAMA_8B, shape=shape)
    command = "--speculative-config.method mtp --speculative-config.num_speculative_tokens 1"
    assert _plan(model, H100, command).kv_plan.bytes_per_block == _plan(model, H100).kv_plan.bytes_per_block * 33 // 32


def test_flags_of_the_states_are_heard() -> None:
    """A state of 32 bits needs a longer block, and in mode `all` (until 0.31) a request keeps one state a block."""
    config = {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 262144, "torch_dtype": "bfloat16", "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
    }  # fmt: skip
    model = ModelFacts("bamba", ModelShape.from_config(config))
    caching = "--enable-prefix-caching --max-model-len 65536"
    plain = _plan(model, H100, caching).kv_plan
    assert _plan(model, H100, f"{caching} --mamba-ssm-cache-dtype float32").kv_plan.block_size > 1.5 * plain.block_size
    assert _plan(model, H100, f"{caching} --mamba-cache-dtype float32").kv_plan.block_size > 1.5 * plain.block_size
    assert _plan(model, H100, f"{caching} --mamba-cache-mode all").kv_plan.blocks_per_request > plain.blocks_per_request


@pytest.mark.parametrize(("runner", "batches"), [("0", 2), ("1", 3)])
def test_the_runner_decides_what_is_in_flight(runner: str, batches: int) -> None:
    """Two stages with async scheduling: the second runner has a batch more under way, which a window must hold."""
    line = read_command_line(["m", "--pipeline-parallel-size", "2", "--max-num-batched-tokens", "8192"], "0.32.0")
    variables = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    assert in_flight_tokens(read_settings(Flags(line, "0.32.0"), variables, LLAMA_8B.shape, H100)) == batches * 8192


def test_a_whole_encoder_on_every_rank() -> None:
    """--mm-encoder-tp-mode data keeps all of the encoder on each of two GPUs, not half of it."""
    tower = Tower("vision", layers=24, hidden_size=1024, heads=16, intermediate_size=4096, patch_size=14)
    model = replace(LLAMA_8B, shape=replace(LLAMA_8B.shape, towers=(tower,)))
    halves = _plan(model, H100, "--tensor-parallel-size 2").weights.value
    assert _plan(model, H100, "--tensor-parallel-size 2 --mm-encoder-tp-mode data").weights.value > halves + 0.2 * GIB


def test_weights_beyond_the_card() -> None:
    """70 billion parameters in 16 bits do not fit one H100, and two are the smallest number that do."""
    assert Code.STARTUP_WEIGHTS_DO_NOT_FIT in _codes(LLAMA_70B, H100)
    first = next(a for a in _advice(LLAMA_70B, H100, "") if a.clears is Code.STARTUP_WEIGHTS_DO_NOT_FIT)
    assert (first.flag, first.value) in {("--tensor-parallel-size", "4"), ("--tensor-parallel-size", "2")}


def test_a_context_that_does_not_fit() -> None:
    """131,072 tokens of an 8B model do not fit beside it on an L4; the context offered is the largest that does."""
    assert _codes(LLAMA_8B, L4) == {Code.STARTUP_CONTEXT_TOO_LONG}
    offers = {a.flag: a for a in _advice(LLAMA_8B, L4, "")}
    fits = int(offers["--max-model-len"].value)
    assert _codes(LLAMA_8B, L4, f"--max-model-len {fits}") == set()
    longer = _plan(LLAMA_8B, L4, f"--max-model-len {fits + 16}")
    assert not longer.fits
    assert longer.fits_at_high_end  # so the finding is a warning: a little less overhead would do


def test_every_offer_was_planned_and_clears_what_it_says() -> None:
    """Following any offer, word for word, clears the finding it was made for."""
    cases = ((LLAMA_8B, L4, "", 1), (LLAMA_8B, L4, "--gpu-memory-utilization 0.7", 1), (LLAMA_70B, H100, "-tp 2", 2))
    for model, card, command, _ in cases:
        for offer in _advice(model, card, command):
            assert offer.clears not in _codes(model, card, f"{command} {offer.flag} {offer.value}")


def test_neighbours_are_seen() -> None:
    """With 10 GiB held by another process vLLM refuses 0.92 of the card; the share offered is what is free."""
    busy = replace(H100, used_bytes=10 * GIB)
    assert Code.STARTUP_FREE_MEMORY_CHECK in _codes(LLAMA_8B, busy)
    offer = next(a for a in _advice(LLAMA_8B, busy, "") if a.clears is Code.STARTUP_FREE_MEMORY_CHECK)
    assert Code.STARTUP_FREE_MEMORY_CHECK not in _codes(LLAMA_8B, busy, f"{offer.flag} {offer.value}")


def test_little_slack_is_a_warning() -> None:
    """0.98 of the card leaves too little for a full batch of logits; it may start, so it is not called a refusal."""
    found = _findings(_plan(LLAMA_8B, H100, "--gpu-memory-utilization 0.98"), LLAMA_8B)
    assert Code.RUNTIME_LOGITS in {f.code for f in found if f.severity is Severity.WARNING}
    assert _findings(_plan(LLAMA_8B, H100), LLAMA_8B) == []


def test_segments_beside_a_connector_are_refused() -> None:
    """vLLM stops at expandable segments with a KV connector since 0.21.0."""
    command = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for release, codes in (("0.25.1", {Code.STARTUP_BAD_FLAG}), ("0.19.0", set())):
        ledger = _plan(LLAMA_8B, H100, command, release)
        found = findings_of(ledger, LLAMA_8B.shape, (), environment)
        assert {f.code for f in found if f.severity is Severity.CRITICAL} == codes


@given(
    st.sampled_from([LLAMA_8B, LLAMA_70B]),
    st.sampled_from([H100, H200, L4]),
    st.floats(0.3, 0.99),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["0.7.3", "0.10.2", "0.19.0", "0.25.1", "0.32.0"]),
)
def test_bands_hold_their_value_and_more_memory_is_never_worse(
    model: ModelFacts, card: Card, share: float, ranks: int, release: str
) -> None:
    """For any card, share, split and release the bands are in order, and a larger share gives no fewer blocks."""
    one = _plan(model, card, f"--gpu-memory-utilization {share} -tp {ranks}", release)
    more = _plan(model, card, f"--gpu-memory-utilization {min(1.0, share + 0.01)} -tp {ranks}", release)
    for term in (one.weights, one.non_torch, one.activation, one.graphs, one.kv, one.slack):
        assert term.low <= term.value <= term.high
    assert one.kv_plan.num_blocks <= more.kv_plan.num_blocks

"""The ledger: what adds up, and what real starts showed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.plan.ledger import Ledger, ModelFacts
from plimsoll.plan.settings import Card
from plimsoll.units import GIB, Estimate
from tests.each import cases, each
from tests.models.model_configs import LLAMA_8B as CONFIG
from tests.plan.planning import H100, H200, L4, LLAMA, facts_of, ledger_of

LLAMA_70B = facts_of(CONFIG, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)


def _plan(model: ModelFacts, card: Card, command: str = "", release: str = "0.25.1") -> Ledger:
    return ledger_of(command, release, model, card)


@each(("command", "kv_gib", "tokens"), cases("plan", "real_starts_on_an_h200_in_bytes"))
def test_real_starts_on_an_h200(command: str, kv_gib: float, tokens: int) -> None:
    """The KV cache of three real starts lies in the band, and the central figure is within 1 % and not above by more."""
    ledger = _plan(LLAMA, H200, command)
    assert ledger.kv.low <= kv_gib * GIB <= ledger.kv.high
    assert abs(ledger.kv.value / (kv_gib * GIB) - 1) < 0.01
    assert abs(ledger.kv_plan.tokens / tokens - 1) < 0.01


def test_the_terms_add_up_and_a_fixed_cache_is_exact() -> None:
    """Requested is the sum of its parts; 4 GiB were 32,768 tokens on the H200."""
    ledger = _plan(LLAMA, H100)
    parts = ledger.weights.value + ledger.non_torch.value + ledger.activation.value + ledger.graphs.value + ledger.kv.value
    assert parts == ledger.requested.value == math.ceil(H100.total_bytes * 0.92)
    buffers = int(4.125 * 1024 * 128256)
    assert ledger.slack.value == H100.total_bytes - ledger.context.value - ledger.requested.value - buffers
    ledger = _plan(LLAMA, H200, "--kv-cache-memory-bytes 4294967296 --enforce-eager --max-model-len 8192")
    assert ledger.kv == Estimate.exact(4 * GIB, "--kv-cache-memory-bytes")
    assert ledger.kv_plan.tokens == 32768


def test_a_draft_model_takes_its_share() -> None:
    """A one-billion drafter adds its weights and, layer by layer, its cache: fewer blocks of more bytes."""
    small = facts_of(CONFIG, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
    command = "--speculative-config.model d --speculative-config.num_speculative_tokens 3"
    alone = _plan(LLAMA, H100, command)
    both = _plan(replace(LLAMA, drafter=small), H100, command)
    assert both.weights.value - alone.weights.value == _plan(small, H100).weights.value
    # Eight KV heads of 64 over 16 layers: a quarter of what 32 layers of eight heads of 128 keep.
    assert both.kv_plan.bytes_per_block == alone.kv_plan.bytes_per_block * 5 // 4
    assert both.kv_plan.num_blocks < alone.kv_plan.num_blocks


def test_a_head_of_the_models_own_keeps_a_cache() -> None:
    """Drafting with the model's own head adds one layer's cache for each of its layers."""
    shape = replace(LLAMA.shape, mtp_layers=1)
    model = replace(LLAMA, shape=shape)
    command = "--speculative-config.method mtp --speculative-config.num_speculative_tokens 1"
    assert _plan(model, H100, command).kv_plan.bytes_per_block == _plan(model, H100).kv_plan.bytes_per_block * 33 // 32


def test_flags_of_the_states_are_heard() -> None:
    """A state of 32 bits needs a longer block, and in mode `all` (until 0.31) a request keeps one state a block."""
    states: dict[str, Any] = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "attn_layer_indices": [9, 18, 27]}
    model = facts_of(CONFIG | states, architectures=["BambaForCausalLM"], model_type="bamba", max_position_embeddings=262144)
    caching = "--enable-prefix-caching --max-model-len 65536"
    plain = _plan(model, H100, caching).kv_plan
    assert _plan(model, H100, f"{caching} --mamba-ssm-cache-dtype float32").kv_plan.block_size > 1.5 * plain.block_size
    assert _plan(model, H100, f"{caching} --mamba-cache-dtype float32").kv_plan.block_size > 1.5 * plain.block_size
    assert _plan(model, H100, f"{caching} --mamba-cache-mode all").kv_plan.blocks_per_request > plain.blocks_per_request


@given(
    st.sampled_from([LLAMA, LLAMA_70B]),
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

"""Real starts of vLLM 0.25.1 on an H200 with dummy weights, as numbers.

CAPTURES: shared/data/captures/vllm-0.25.1-h200 (base.log, eager90.log, seedcfg.log): total 139.80 GiB x utilisation less
"Model loading took" less "Available KV cache memory". No figure of the table was fitted on them.
STARTS: our own runs of 2026-11-15 with the allocator read in the worker, as lab/gpu/measure_overhead.py does; the raw figures
are in tests/captures/vllm-0.25.1-h200-overhead/starts.json. The table's range 0.20 to 0.26 was worked out with these.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import Overhead, overhead
from plimsoll.plan.settings import Settings
from plimsoll.units import GIB
from tests.each import each

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_8B = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
QWEN_32B = QWEN_8B | {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000,
                   "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
QWEN_MOE = QWEN_8B | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
                      "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                      "num_key_value_heads": 4}  # fmt: skip
GEMMA_9B = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584,
                    "num_attention_heads": 16, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
                    "tie_word_embeddings": True}  # fmt: skip
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "intermediate_size": 12800,
                   "vocab_size": 49155, "tie_word_embeddings": True}  # fmt: skip

CAPTURED = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-overhead"

# name, tokens, sequences, eager, bytes that are neither weights nor KV in GiB
CAPTURES = [
    ("base", 8192, 1024, False, 139.80 * 0.92 - 15.0 - 112.28),
    ("eager90", 8192, 1024, True, 139.80 * 0.90 - 15.0 - 109.72),
    ("seedcfg", 24576, 64, True, 139.80 * 0.88 - 14.99 - 105.25),
]

# model, layers, second runner, eager, tokens, sequences; bytes: activation, outside torch, graph estimate, graphs captured
STARTS = [
    (LLAMA, 4, True, False, 8192, 1024, 1184948736, 241172480, 0, 788529152),
    (LLAMA, 4, True, True, 8192, 1024, 939540992, 241172480, 0, 0),
    (LLAMA, 4, False, False, 8192, 1024, 2025986048, 243269632, 425721856, 440401920),
    (LLAMA, 4, False, True, 8192, 1024, 2027034624, 241172480, 0, 0),
    (LLAMA, 4, True, False, 2048, 256, 1084248576, 241172480, 0, 379584512),
    (LLAMA, 4, True, False, 16384, 1024, 1908425216, 241172480, 0, 788529152),
    (LLAMA, 4, False, True, 8192, 64, 939524096, 241172480, 0, 0),
    (LLAMA, 4, False, True, 2048, 4, 260046848, 241172480, 0, 0),
    (LLAMA, 32, False, False, 8192, 1024, 2025986048, 249561088, 532676608, 687865856),
    (QWEN_8B, 4, True, False, 8192, 1024, 1379983872, 241172480, 0, 773849088),
    (QWEN_32B, 64, False, False, 8192, 1024, 2397364224, 262144000, 1168113664, 1337982976),
    (QWEN_MOE, 4, False, False, 8192, 1024, 2872369152, 243269632, 425721856, 404750336),
    (QWEN_MOE, 4, True, False, 8192, 1024, 1544159744, 241172480, 0, 757071872),
    (QWEN_MOE, 4, False, True, 2048, 256, 803046400, 241172480, 0, 0),
    (QWEN_MOE, 4, False, True, 8192, 64, 897581056, 241172480, 0, 0),
    (MIXTRAL, 2, False, True, 8192, 1024, 2005571584, 241172480, 0, 0),
    (GEMMA_9B, 4, False, True, 8192, 1024, 3914287104, 241172480, 0, 0),
    (GRANITE, 4, False, True, 8192, 1024, 931135488, 358612992, 0, 0),
]


def on_h200(config: dict[str, object], tokens: int, sequences: int, *, eager: bool, v2: bool = True) -> Overhead:
    settings = Settings(release="0.25.1", gpu_bytes=150109880320, compute_capability=(9, 0), max_num_seqs=sequences,
                        v2_runner=v2, max_num_batched_tokens=tokens, max_model_len=8192, enforce_eager=eager)  # fmt: skip
    return overhead(ModelShape.from_config(config), settings)


@pytest.mark.parametrize(("name", "tokens", "sequences", "eager", "measured"), CAPTURES, ids=[row[0] for row in CAPTURES])
def test_captures(name: str, tokens: int, sequences: int, eager: bool, measured: float) -> None:
    """What is neither weights nor KV is within 0.3 GiB or 15 %, and never under by more than 0.3 GiB."""
    terms = on_h200(LLAMA, tokens, sequences, eager=eager)
    predicted = (terms.activation.value + terms.non_torch.value + terms.graphs.value) / GIB
    assert abs(predicted - measured) <= max(0.3, 0.15 * measured), name
    assert predicted >= measured - 0.3, name


@each("row", STARTS, ids=lambda row: f"{row[0]['model_type']}-{row[1]}-{row[4]}-{row[5]}-{row[2]}-{row[3]}")
def test_starts(row: tuple[dict[str, object], int, bool, bool, int, int, int, int, int, int]) -> None:
    """Each peak is within 0.07 GiB of the allocator's, and every term lies in its band."""
    config, layers, v2, eager, tokens, sequences, *measured = row
    terms = on_h200(config | {"num_hidden_layers": layers}, tokens, sequences, eager=eager, v2=v2)
    assert terms.activation.value / GIB == pytest.approx(measured[0] / GIB, abs=0.07)
    order = (terms.activation, terms.non_torch, terms.graphs, terms.graphs_actual)
    for term, figure in zip(order, measured, strict=True):
        assert term.low <= figure <= term.high


def test_every_start_is_backed_by_its_recording() -> None:
    """No figure in this file is without the raw record it came from."""
    recorded = json.loads((CAPTURED / "starts.json").read_text(encoding="utf-8"))
    known = {
        (r["case"][2] == 2, bool(r["case"][3]), *r["case"][4:], r["act"], r["nt"], r["est"], r.get("graph") or 0)
        for r in recorded
    }
    assert {start[2:] for start in STARTS} == known

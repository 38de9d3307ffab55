"""From a model's shape to the caches of a rank, with the numbers of models people run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.shape import Indexer, Layer, LayerKind, LinearAttention, Mamba, Mla, ModelShape, Quantization, ShortConv
from plimsoll.plan.kv import KvPlan, plan_kv
from plimsoll.plan.kv_layers import (
    AttentionSpec,
    RankSpecs,
    SlidingMlaSpec,
    StateSpec,
    block_size_of,
    cache_dtype_of,
    specs_of_all_stages,
)
from plimsoll.plan.settings import Card, Flags, Settings, caches_prefixes_by_default, read_settings, v2_by_default
from tests.each import cases, each

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
NO_DATA = "the shared data folder is not beside the repository"
GIB = 1 << 30
LONG = Settings(max_model_len=131072)


def specs_of(model: ModelShape, settings: Settings) -> RankSpecs:
    """The caches of the first stage."""
    return specs_of_all_stages(model, settings)[0]


def shape(layers: list[Layer], **more: Any) -> ModelShape:
    """A model of these layers."""
    first = next((layer for layer in layers if layer.kv_heads), Layer(LayerKind.NONE))
    usual: dict[str, Any] = {
        "architectures": ("Any",), "model_type": "any", "text_model_type": "any", "hidden_size": 4096,
        "attention_heads": 32, "kv_heads": first.kv_heads, "head_dim": first.head_dim, "v_head_dim": first.v_head_dim,
        "vocab_size": 128256, "max_context": 131072, "default_context": 131072, "embedding_size": 4096,
    }  # fmt: skip
    return ModelShape(layers=tuple(layers), **(usual | more))


def full(heads: int = 8, size: int = 128, **more: Any) -> Layer:
    """A layer of full attention."""
    return Layer(LayerKind.FULL, kv_heads=heads, head_dim=size, v_head_dim=size, **more)


def sliding(heads: int, size: int, window: int) -> Layer:
    return Layer(LayerKind.SLIDING, kv_heads=heads, head_dim=size, v_head_dim=size, window=window)


def planned(model: ModelShape, settings: Settings, memory: int = 40 * GIB) -> KvPlan:
    """The plan over all stages."""
    return plan_kv(specs_of_all_stages(model, settings), settings, memory)


LLAMA = shape([full()] * 32)
LATENT = Layer(LayerKind.MLA, kv_heads=1, head_dim=576)
QWEN_NEXT = shape(
    [full(2, 256) if (layer + 1) % 4 == 0 else Layer(LayerKind.GATED_DELTA_NET) for layer in range(48)],
    linear=LinearAttention(16, 32, 128, 128, conv_kernel=4),
)


@pytest.mark.parametrize(("dtype", "bytes_per_token"), cases("plan", "a_cache_type_costs_what_it_packs"))
def test_a_cache_type_costs_what_it_packs(dtype: str, bytes_per_token: int) -> None:
    """Bytes per token and layer of a Llama 8B under every --kv-cache-dtype."""
    result = planned(LLAMA, replace(LONG, kv_cache_dtype=dtype))
    assert result.bytes_per_block == 32 * 16 * bytes_per_token


def test_published_models_from_their_shapes() -> None:
    """Shapes give the numbers vLLM's planner gave for hand-made specs."""
    assert planned(LLAMA, LONG).tokens == 327_680
    assert planned(shape([LATENT] * 61), replace(LONG, block_size=64)).num_blocks == 9549
    gpt = planned(shape([sliding(8, 64, 128), full(8, 64)] * 12), LONG, 10 * GIB)
    assert (gpt.tokens, [group.blocks_per_request for group in gpt.groups]) == (387_973, [1033, 8192])
    gemma = shape([full(16) if (layer + 1) % 6 == 0 else sliding(16, 128, 1024) for layer in range(62)])
    assert planned(gemma, LONG).blocks_per_request == 14726
    alone = planned(gemma, replace(LONG, hybrid_manager=False), 80 * GIB)
    assert (alone.num_blocks, alone.bytes_for_one_request) == (10570, 62 * GIB)


@pytest.mark.parametrize(("prefix_caching", "blocks"), [(False, 252), (True, 255)])
def test_a_hybrids_blocks_are_as_long_as_its_states_are_large(prefix_caching: bool, blocks: int) -> None:
    """Qwen3-Next with float32 states: blocks of 1056 tokens, and states padded to their pages."""
    settings = Settings(max_model_len=262144, prefix_caching=prefix_caching, mamba_ssm_cache_dtype="float32")
    result = planned(QWEN_NEXT, settings)
    assert (result.block_size, result.bytes_per_block, result.num_blocks) == (1056, 25_952_256, 1654)
    assert result.blocks_per_request == blocks


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_tensor_parallelism_splits_heads_and_then_copies_them(tp: int, heads: int) -> None:
    """Beyond one head a rank, more ranks hold copies."""
    spec = specs_of(LLAMA, replace(LONG, tensor_parallel=tp))[0].spec
    assert isinstance(spec, AttentionSpec)
    assert spec.heads == heads


def test_mla_is_copied_to_every_rank_and_dcp_shards_its_tokens() -> None:
    """TP does not make MLA's cache smaller; DCP does."""
    model = shape([LATENT] * 61, attention_heads=128)
    alone, wide = planned(model, LONG), planned(model, replace(LONG, tensor_parallel=8))
    assert alone.tokens == wide.tokens
    assert (
        planned(model, replace(LONG, tensor_parallel=8, decode_context_parallel=8)).blocks_per_request
        == alone.blocks_per_request // 8
    )


def test_splits_vllm_refuses_are_refused() -> None:
    """Heads that TP does not divide, too many stages, a DCP that TP is no multiple of."""
    for changes, words in [
        ({"tensor_parallel": 3}, "32 attention heads"),
        ({"pipeline_parallel": 33}, "more than the model's 32 layers"),
        ({"tensor_parallel": 4, "decode_context_parallel": 3}, "decode-context-parallel-size 3"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "turboquant_k8v4"),
        ({"dtype": "int3"}, "int3"),
    ]:  # fmt: skip
        with pytest.raises(BadInput, match=words):
            specs_of(LLAMA, replace(LONG, **changes))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="6 key-value heads"):
        specs_of(shape([full(6)] * 2), replace(LONG, tensor_parallel=4))


def test_layers_without_a_cache_of_their_own_cost_nothing() -> None:
    """Layers that share another's cache, encoders and pruned attention are left out."""
    model = shape([full(), full(shares_kv=True), Layer(LayerKind.NONE), Layer(LayerKind.ENCODER)])
    assert [layer for layer, _ in specs_of(model, LONG)] == ["layers.0.attn"]
    nothing = planned(shape([Layer(LayerKind.ENCODER)] * 2), LONG)
    assert (nothing.num_blocks, nothing.max_concurrency, nothing.fits_one_request) == (1, None, True)


def test_two_caches_in_one_layer() -> None:
    """Falcon-H1 keeps keys and a state in every layer: two groups of all layers."""
    both = Layer(LayerKind.FULL_AND_MAMBA2, kv_heads=2, head_dim=128, v_head_dim=128)
    mamba = Mamba(inner_size=3072, state_size=256, conv_kernel=4, heads=24, head_dim=128, groups=1)
    result = planned(shape([both] * 36, mamba=mamba, attention_heads=12), Settings(max_model_len=8192, prefix_caching=False))
    assert [(group.layers, group.kind) for group in result.groups] == [(36, "full"), (36, "state")]


def test_states_are_split_over_ranks_with_their_groups_copied() -> None:
    """Mamba 2 with one group copies it to every rank; a state TP does not divide is refused."""
    mamba = Mamba(inner_size=4096, state_size=128, conv_kernel=4, heads=64, head_dim=64, groups=1, ssm_dtype="float32")
    model = shape([Layer(LayerKind.MAMBA2), full(2)], mamba=mamba, attention_heads=32)
    state = specs_of(model, replace(LONG, tensor_parallel=4, speculative={"num_speculative_tokens": 2}))[0].spec
    assert isinstance(state, StateSpec)
    assert state.shapes == ((5, (4096 + 2 * 4 * 128) // 4), (16, 64, 128))
    assert (state.dtypes, state.spec_blocks, state.checkpoint_blocks) == (("bfloat16", "float32"), 2, 1)
    with pytest.raises(BadInput, match="Mamba heads"):
        specs_of(replace(model, mamba=replace(mamba, heads=66)), replace(LONG, tensor_parallel=4))


def test_nemotron_h_keeps_float32_states_unless_its_config_says_otherwise() -> None:
    """Of all families only this one has a default of its own, and before 0.13 it was not heard."""
    mamba = Mamba(inner_size=4096, state_size=128, conv_kernel=4, heads=64, head_dim=64, groups=8)
    model = shape([Layer(LayerKind.MAMBA2), full(2)], mamba=mamba, text_model_type="nemotron_h")
    for settings, dtype in [(LONG, "float32"), (replace(LONG, release="0.12.0"), "bfloat16")]:
        state = specs_of(model, settings)[0].spec
        assert isinstance(state, StateSpec)
        assert state.dtypes == ("bfloat16", dtype)


def test_prefix_caching_by_default() -> None:
    """On for attention, for hybrids from 0.26, never for states alone."""
    states = shape([Layer(LayerKind.MAMBA1)], mamba=Mamba(inner_size=4096, state_size=16, conv_kernel=4))
    asked = [(LLAMA, "0.19.0"), (QWEN_NEXT, "0.25.1"), (QWEN_NEXT, "0.26.0"), (states, "0.32.0")]
    assert [caches_prefixes_by_default(model, version) for model, version in asked] == [True, False, True, False]


def test_other_states() -> None:
    """Mamba 1, Kimi's delta attention, lightning attention and short convolutions have their own shapes."""
    one = shape([Layer(LayerKind.MAMBA1)] * 2, mamba=Mamba(inner_size=4096, state_size=16, conv_kernel=4), attention_heads=0)
    kimi = shape([Layer(LayerKind.KIMI_DELTA), LATENT], linear=LinearAttention(32, 32, 128, 128))
    lightning = shape([Layer(LayerKind.LINEAR), full()], linear=LinearAttention(64, 64, 128, 128), attention_heads=64)
    short = shape([Layer(LayerKind.SHORT_CONV), full()], short_conv=ShortConv(width=2048, kernel=3))
    states = [specs_of(model, LONG)[0].spec for model in (one, kimi, lightning, short)]
    assert [spec.shapes for spec in states if isinstance(spec, StateSpec)] == [
        ((3, 4096), (4096, 16)), ((3, 12288), (32, 128, 128)), ((64, 128, 128),), ((2, 2048),),
    ]  # fmt: skip
    assert block_size_of(kimi, LONG) == 16
    assert planned(kimi, LONG).block_size % 128 == 0  # MLA hybrids keep whole kernel pages


def test_sparse_mla_keeps_an_indexer_beside_its_latents() -> None:
    """DeepSeek V3.2: 656 and 132 bytes a token on Hopper with fp8, in blocks of 64."""
    sparse = Layer(LayerKind.MLA, kv_heads=1, head_dim=576, indexer=True)
    model = shape([sparse] * 61, mla=Mla(512, 64), indexer=Indexer(128))
    fp8 = planned(model, replace(LONG, kv_cache_dtype="fp8"))
    assert (fp8.block_size, fp8.bytes_per_block, fp8.num_blocks) == (64, 3_076_352, 13961)
    assert planned(model, LONG).bytes_per_block == 61 * 64 * (1152 + 132)
    assert cache_dtype_of(model, replace(LONG, kv_cache_dtype="fp8", compute_capability=(10, 0))) == "fp8"
    assert cache_dtype_of(model, replace(LONG, compute_capability=(12, 0))) == "fp8_ds_mla"


def test_block_sizes_by_backend() -> None:
    """The default block follows the backend of the GPU; a given one is kept."""
    mla = shape([LATENT] * 2)
    assert [block_size_of(mla, replace(LONG, compute_capability=(major, 0))) for major in (8, 9, 10, 12)] == [16, 16, 32, 16]
    assert block_size_of(mla, replace(LONG, kv_cache_dtype="fp8")) == 64
    assert block_size_of(mla, replace(LONG, release="0.12.0")) == 64
    assert block_size_of(LLAMA, replace(LONG, block_size=32)) == 32


def test_auto_takes_the_checkpoints_word() -> None:
    """A checkpoint that stores fp8 scales for its cache gets an fp8 cache under auto."""
    quantized = replace(LLAMA, quantization=Quantization("modelopt", kv_cache="fp8"))
    assert planned(quantized, LONG).bytes_per_block == planned(LLAMA, LONG).bytes_per_block // 2
    assert planned(quantized, replace(LONG, kv_cache_dtype="bfloat16")).bytes_per_block == 2 << 20


def test_chunked_attention_is_allocated_as_full_unless_told() -> None:
    """Llama 4: vLLM turns its hybrid manager off for chunked local attention."""
    local = Layer(LayerKind.CHUNKED_LOCAL, kv_heads=8, head_dim=128, v_head_dim=128)
    scout = shape([local, local, local, full()] * 12, chunk_size=8192)
    assert [group.kind for group in planned(scout, LONG).groups] == ["full"]
    assert len(planned(scout, replace(LONG, hybrid_manager=True)).groups) == 4


def test_deepseek_v4_packs_its_caches() -> None:
    """Each compressed layer keeps a window, compressed latents and the state of its compressor; sparse ones two more."""
    sparse = Layer(LayerKind.MLA_COMPRESSED, kv_heads=1, head_dim=512, window=128, indexer=True, compress_ratio=4)
    dense = replace(sparse, indexer=False, compress_ratio=128)
    first = Layer(LayerKind.MLA_SLIDING, kv_heads=1, head_dim=512, window=128)
    model = shape([first, sparse, dense], indexer=Indexer(128))
    specs = dict(specs_of(model, LONG))
    assert len(specs) == 1 + 5 + 3
    assert sum(isinstance(spec, SlidingMlaSpec) for spec in specs.values()) == 1 + 3 + 2
    assert specs["layers.1.attn"].page_bytes == specs["layers.0.swa_cache"].page_bytes == 37440  # 64 x 584, to 576
    card = Card("H100", 79 * GIB, 79 * GIB, 79 * GIB, (9, 0))
    assert read_settings(Flags(read_command_line(["m"], "0.32.0"), "0.32.0"), {}, model, card).interleaved
    assert planned(model, replace(LONG, interleaved=True)).block_size == 256


@pytest.mark.skipif(not DATA.is_dir(), reason=NO_DATA)
@each("path", sorted((DATA / "model-configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_public_config_has_caches_or_a_clear_no(path: Path) -> None:
    """Whatever the family, TP and PP, a config gives a plan or one line that says why not."""
    model = ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
    for tp, pp in ((1, 1), (8, 1), (2, 4)):
        settings = Settings(
            max_model_len=model.default_context,
            tensor_parallel=tp,
            pipeline_parallel=pp,
            interleaved=LayerKind.MLA_COMPRESSED in model.kinds,
        )
        if model.attention_heads % tp:
            with pytest.raises(BadInput, match="tensor-parallel-size"):
                planned(model, settings)
            continue
        result = planned(model, settings)
        assert result.num_blocks > 0
        assert result.bytes_per_block * result.num_blocks <= 40 * GIB


def _starts() -> list[tuple[dict[str, Any], Path]]:
    """Real starts with a KV figure, of models whose config we have."""
    rows = [json.loads(line) for line in (DATA / "startups" / "startups.jsonl").read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows:
        if row.get("kv_available_gib") and (row.get("kv_tokens") or row.get("gpu_blocks")):
            names = [str(row.get(key)).replace("/", "__") for key in ("arch_ref", "model")]
            paths = [DATA / "model-configs" / f"{name}.json" for name in names]
            found += [(row, path) for path in paths if path.is_file()][:1]
    return found


def _agrees(row: dict[str, Any], path: Path) -> bool:
    """Whether the tokens (or blocks) it printed follow from the GiB it printed, to that figure's rounding."""
    model = ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
    version = re.search(r"0\.\d+(\.\d+)?", row.get("vllm_version") or "0.19.0")
    release = version[0] if version else "0.32.0"
    settings = Settings(
        max_model_len=row.get("max_model_len") or model.default_context,
        prefix_caching=caches_prefixes_by_default(model, release),
        tensor_parallel=row.get("tensor_parallel") or 1,
        pipeline_parallel=row.get("pipeline_parallel") or 1,
        kv_cache_dtype=row.get("kv_cache_dtype") or "auto",
        dtype={"half": "float16"}.get(row.get("dtype") or "", row.get("dtype") or model.dtype or "bfloat16"),
        release=release,
        v2_runner=v2_by_default(release, model),
        interleaved=LayerKind.MLA_COMPRESSED in model.kinds,
    )
    low, high = (planned(model, settings, int((row["kv_available_gib"] + off) * GIB)) for off in (-0.0051, 0.0051))
    if row.get("kv_tokens"):
        return bool(low.tokens <= row["kv_tokens"] <= high.tokens)
    return bool(low.num_blocks <= row["gpu_blocks"] <= high.num_blocks)


# Their logs name what the table does not: an fp8 cache, --decode-context-parallel-size 8, an Ascend build, another rank's GiB.
UNSTATED = {
    "vllm21348-qwen3-235b-a22b-fp8-tp4",
    "vllm-project-recipes-moo-kimi-k2-thinking-tp8-2",
    "vllm40585-qwen3.5-35b-a3b-tp8",
    "idx63574967224-qwen3.5-35b-a3b-tp1",
    "vllm33333-nvidia-nemotron-3-nano-30b-a3b-nvfp4-tp2",
    "idx55144767765-qwen3-30b-a3b-tp1",
}


@pytest.mark.skipif(not DATA.is_dir(), reason=NO_DATA)
def test_real_starts_printed_the_tokens_we_compute() -> None:
    """From the KV memory a real start printed follow the tokens it printed, wherever its settings are known."""
    starts = _starts()
    missed = {row["id"] for row, path in starts if not _agrees(row, path)}
    print(f"{len(starts) - len(missed)} of {len(starts)} real starts agree")
    assert len(starts) >= 30
    assert missed <= UNSTATED

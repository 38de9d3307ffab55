"""Sets of cache specs to plan: nine whose results vLLM published through its own planner, and any number of random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from plimsoll.plan.kv import plan_kv
from plimsoll.plan.kv_layers import (
    CannotGroupError,
    ChunkedSpec,
    FullSpec,
    KvSpec,
    MlaSpec,
    NamedSpec,
    RankSpecs,
    SlidingMlaSpec,
    SlidingSpec,
    StateSpec,
    packing,
    state_mode_of,
    token_packing,
)
from plimsoll.plan.settings import AUTO_FIT, Settings

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """What is asked of both planners."""

    name: str
    ranks: tuple[RankSpecs, ...]
    settings: Settings
    available: tuple[int, ...]


def named(specs: Sequence[KvSpec]) -> RankSpecs:
    """One rank with these layers."""
    return tuple(NamedSpec(f"layers.{index}", spec) for index, spec in enumerate(specs))


def published() -> Iterator[Case]:
    """Models people run, spec by spec, as vLLM's layers would declare them at TP 1."""

    def case(name: str, specs: list[KvSpec], gib: int, settings: Settings) -> Case:
        return Case(name, (named(specs),), settings, (gib * GIB,))

    long = Settings(max_model_len=131072, prefix_caching=False)
    llama = FullSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16")
    yield case("llama-3.1-8b", [llama] * 32, 40, long)
    yield case("llama-3.1-8b fp8", [replace(llama, dtype="uint8", quant="fp8")] * 32, 40, long)
    latent = MlaSpec(block_size=64, head_size=576, dtype="bfloat16", cache_dtype="auto")
    yield case("deepseek-v3", [latent] * 61, 40, long)
    packed = replace(latent, dtype="uint8", quant="fp8", cache_dtype="fp8_ds_mla", content_bytes=656)
    indexer = MlaSpec(block_size=64, head_size=132, dtype="uint8", indexer=True)
    yield case("deepseek-v3.2", [packed, indexer] * 61, 40, long)
    full = FullSpec(block_size=16, heads=8, head_size=64, head_size_v=64, dtype="bfloat16")
    slide = SlidingSpec(block_size=16, heads=8, head_size=64, head_size_v=64, dtype="bfloat16", window=128)
    yield case("gpt-oss-20b async", [slide, full] * 12, 10, long)
    yield case("gpt-oss-20b sync", [slide, full] * 12, 10, replace(long, async_scheduling=False))
    wide = replace(full, heads=16, head_size=128, head_size_v=128)
    narrow = replace(slide, heads=16, head_size=128, head_size_v=128, window=1024)
    gemma: list[KvSpec] = [wide if (layer + 1) % 6 == 0 else narrow for layer in range(62)]
    yield case("gemma-3-27b", gemma, 40, long)
    yield case("gemma-3-27b without hybrid manager", gemma, 80, replace(long, hybrid_manager=False))
    for mode in ("none", "align"):
        settings = Settings(max_model_len=262144, prefix_caching=mode == "align")
        attention = FullSpec(block_size=1056, heads=2, head_size=256, head_size_v=256, dtype="bfloat16")
        state = StateSpec(
            block_size=1056 if mode == "align" else 262144, shapes=((3, 8192), (32, 128, 128)), dtypes=("bfloat16", "float32"),
            page_padded=attention.page_bytes, mode=mode, mixer="gdn",
        )  # fmt: skip
        qwen: list[KvSpec] = [attention if (layer + 1) % 4 == 0 else state for layer in range(48)]
        yield case(f"qwen3-next-80b {mode}", qwen, 40, settings)


def random_case(dice: random.Random) -> Case:
    """Layers of one or several kinds, split over ranks, with memory that is ample, scarce, or within a byte of a limit."""
    context = dice.choice((1, 17, 2048, 4096, 32768, 131072, dice.randint(1, 300_000)))
    settings = Settings(
        max_model_len=AUTO_FIT if dice.random() < 0.15 else context,
        model_context=context,
        max_num_batched_tokens=dice.choice((256, 2048, 8192, dice.randint(1, 20000))),
        async_scheduling=dice.random() < 0.6,
        prefix_caching=dice.random() < 0.5,
        hybrid_manager=dice.random() > 0.2,
        num_gpu_blocks_override=dice.choice((1, 2, 40, 5000)) if dice.random() < 0.1 else None,
        pipeline_parallel=dice.choice((1, 1, 2, 3)),
        decode_context_parallel=dice.choice((1, 1, 1, 2, 4)),
        v2_runner=dice.random() < 0.7,
        interleaved=dice.random() < 0.2,
    )
    name, declare = dice.choice(tuple(FAMILIES.items()))
    layers = declare(dice, settings)
    if dice.random() < 0.1:
        dice.shuffle(layers)
    settings = replace(settings, pipeline_parallel=min(settings.pipeline_parallel, len(layers)))
    ranks = _split(dice, named(layers), settings.pipeline_parallel)
    return Case(name, ranks, settings, tuple(_memory(dice, ranks, settings)))


def _split(dice: random.Random, specs: RankSpecs, stages: int) -> tuple[RankSpecs, ...]:
    cuts = sorted(dice.sample(range(1, len(specs)), stages - 1)) if dice.random() < 0.5 else None
    cuts = cuts or [len(specs) * stage // stages for stage in range(1, stages)]
    return tuple(specs[start:end] for start, end in zip([0, *cuts], [*cuts, len(specs)], strict=True))


def _memory(dice: random.Random, ranks: tuple[RankSpecs, ...], settings: Settings) -> list[int]:
    """Bytes for each rank, often just around what one request or one more block needs."""
    try:
        plan = plan_kv(ranks, settings, 1 << 40)
    except CannotGroupError:
        return [GIB] * len(ranks)
    chosen = dice.random()
    blocks = plan.blocks_per_request + 1
    if chosen < 0.4:
        return [cost * blocks + dice.choice((-1, 0, 1)) for cost in plan.bytes_per_block_by_rank]
    if chosen < 0.5:
        return [dice.choice((-5, 0, cost - 1, cost, cost + 1)) for cost in plan.bytes_per_block_by_rank]
    if chosen < 0.7:
        return [cost * dice.randint(1, blocks) + dice.randint(0, cost) for cost in plan.bytes_per_block_by_rank]
    return [cost * blocks * dice.randint(1, 40) + dice.randint(0, 10 * cost) for cost in plan.bytes_per_block_by_rank]


DTYPES = ("auto", "auto", "auto", "float16", "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4")


def _common(dice: random.Random, dtype: str | None = None) -> dict[str, object]:
    """Heads, sizes and packing of an attention layer."""
    dtype = dtype or dice.choice(DTYPES)
    heads, size = dice.choice((1, 2, 4, 8, 16)), dice.choice((64, 80, 128, 192, 256))
    value = size if dtype == "nvfp4" or dice.random() < 0.8 else dice.choice((64, 128))
    element, quant = packing(dtype, "bfloat16")
    slots, content = token_packing(quant, heads, size, value)
    return {
        "block_size": dice.choice((16, 16, 32, 64, 128)), "heads": heads, "head_size": size, "head_size_v": value,
        "dtype": element, "quant": quant, "head_slots": slots, "content_bytes": content,
        "dcp_sharded": dice.random() > 0.05,
    }  # fmt: skip


def _full(dice: random.Random, **more: object) -> FullSpec:
    return FullSpec(**{**_common(dice), **more})  # type: ignore[arg-type]


def _repeat(dice: random.Random, *specs: KvSpec) -> list[KvSpec]:
    """The specs in a pattern, each a few times, as layers of a model alternate."""
    pattern = [spec for spec in specs for _ in range(dice.randint(1, 5))]
    return (pattern * dice.randint(1, 6))[: dice.randint(len(pattern), 64)]


def _uniform(dice: random.Random, _: Settings) -> list[KvSpec]:
    return [_full(dice)] * dice.randint(1, 64)


def _mixed_sizes(dice: random.Random, _: Settings) -> list[KvSpec]:
    first = _full(dice)
    return _repeat(dice, first, *(_full(dice, block_size=first.block_size) for _ in range(dice.randint(1, 3))))


def _windows(dice: random.Random, _: Settings) -> list[KvSpec]:
    common = _common(dice)
    specs: list[KvSpec] = [FullSpec(**common)] if dice.random() < 0.8 else []  # type: ignore[arg-type]
    for _number in range(dice.randint(1, 2)):
        other = common if dice.random() < 0.6 else {**_common(dice), "block_size": common["block_size"]}
        width = dice.choice((1, 128, 1024, 4096, dice.randint(2, 9000)))
        if dice.random() < 0.7:
            specs.append(SlidingSpec(**other, window=width))  # type: ignore[arg-type]
        else:
            specs.append(ChunkedSpec(**other, chunk=width))  # type: ignore[arg-type]
    return _repeat(dice, *specs)


def _latents(dice: random.Random, _: Settings) -> list[KvSpec]:
    dtype = dice.choice(("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"))
    element, quant = packing(dtype, "bfloat16")
    block = dice.choice((16, 32, 64, 128))
    latent = MlaSpec(
        block_size=block, head_size=dice.choice((320, 512, 576)), dtype=element, quant=quant, cache_dtype=dtype,
        content_bytes={"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(dtype), leader=dice.random() < 0.3,
    )  # fmt: skip
    specs: list[KvSpec] = [latent]
    if dice.random() < 0.4:
        specs.append(MlaSpec(block_size=block, head_size=132, dtype="uint8", indexer=True))
    if dice.random() < 0.3:
        specs.append(replace(latent, leader=not latent.leader))
    if dice.random() < 0.3:
        specs.append(SlidingSpec(**_common(dice), window=dice.choice((128, 512))))  # type: ignore[arg-type]
    if dice.random() < 0.2:
        specs.append(_full(dice, block_size=block))
    return _repeat(dice, *specs)


def _states(dice: random.Random, settings: Settings) -> list[KvSpec]:
    heads, width = dice.choice((8, 16, 32)), dice.choice((64, 128))
    mode = state_mode_of(settings)
    state = StateSpec(
        block_size=settings.context, shapes=((3, heads * width * 2), (heads, width, 128)),
        dtypes=("bfloat16", dice.choice(("bfloat16", "float32"))), mode=mode, mixer=dice.choice(("mamba2", "gdn", "linear")),
        spec_blocks=dice.choice((0, 0, 1, 3)), checkpoint_blocks=dice.choice((0, 0, 1)),
    )  # fmt: skip
    if dice.random() < 0.25:
        return [state] * dice.randint(1, 40)
    attention = _full(dice)
    token = attention.page_bytes // attention.block_size
    block = attention.block_size
    if dice.random() < 0.8:  # as vLLM aligns them; else it must pad or lengthen by itself
        block *= -(-state.page_bytes // (block * token))
        state = replace(state, page_padded=block * token)
    attention = replace(attention, block_size=block)
    state = replace(state, block_size=block if mode == "align" else settings.context)
    specs: list[KvSpec] = [attention, state]
    if dice.random() < 0.2:
        specs.append(SlidingSpec(**{**_common(dice), "block_size": block}, window=512))  # type: ignore[arg-type]
    return _repeat(dice, *specs)


def _compressed(dice: random.Random, _: Settings) -> list[KvSpec]:
    """DeepSeek V4's four kinds of cache."""
    alignment = dice.choice((512, 576, None))
    window = SlidingMlaSpec(
        block_size=64, head_size=512, dtype="uint8", quant="fp8", content_bytes=584, alignment=alignment,
        window=dice.choice((128, 512)), version="deepseek_v4", cache_dtype="fp8_ds_mla",
    )  # fmt: skip
    latent = MlaSpec(
        block_size=256, head_size=512, dtype="uint8", quant="fp8", content_bytes=584, alignment=alignment,
        tokens_per_state=dice.choice((4, 128)), version="deepseek_v4", cache_dtype="fp8_ds_mla",
    )  # fmt: skip
    keys = MlaSpec(block_size=256, head_size=132, dtype="uint8", tokens_per_state=4, alignment=alignment)
    small = SlidingMlaSpec(block_size=4, head_size=2048, dtype="float32", window=8, alignment=alignment)
    smaller = SlidingMlaSpec(block_size=4, head_size=512, dtype="float32", window=8, alignment=alignment)
    pool: list[KvSpec] = [window, latent, keys, small, smaller]
    return _repeat(dice, *dice.sample(pool, dice.randint(1, len(pool))))


def _anything(dice: random.Random, settings: Settings) -> list[KvSpec]:
    drawn = [declare(dice, settings)[0] for declare in (_uniform, _windows, _latents, _states)]
    return _repeat(dice, *dice.sample(drawn, dice.randint(2, 4)))


FAMILIES: dict[str, Callable[[random.Random, Settings], list[KvSpec]]] = {
    "uniform": _uniform,
    "full attention of mixed sizes": _mixed_sizes,
    "windows and chunks": _windows,
    "latents and indexers": _latents,
    "states": _states,
    "compressed latents": _compressed,
    "anything": _anything,
}

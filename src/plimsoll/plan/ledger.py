"""The memory of one GPU before anything is started, term by term.

    |<------------------------------- what vLLM sees of the card ------------------------------->|
    |<-- others -->|<-- context -->|<------ requested = math.ceil(total x utilisation) ------>|       |
    |  neighbours  | CUDA, NCCL    | weights | non-torch | activation | graphs |   KV   | slack |

vLLM takes its snapshot after the CUDA context and NCCL are up, so both lie outside the budget, and so do neighbours: what is
left at the right, the slack, is all there is for everything that vLLM's own profile does not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from plimsoll.models.shape import LayerKind, ModelShape
from plimsoll.plan.kv import KvPlan, plan_kv
from plimsoll.plan.kv_layers import DTYPE_BYTES, NamedSpec, RankSpecs, specs_of_all_stages
from plimsoll.plan.settings import SMALLER_CARD, WHOLE_ITEM_TOKENS, Card, Settings, auto_dtype_of
from plimsoll.plan.weights import weights_from_shape
from plimsoll.plan.weights_checkpoint import lora_bytes, weights_from_tensors, weights_from_total
from plimsoll.units import GIB, MIB, Estimate, format_gib
from plimsoll.vllm.versions import Behaviour, table

# The measured figures are in data/overhead.json, with their sources; docs/overhead.md says how far off they are.
_TABLE = table("overhead", "plan")
NON_TORCH: Mapping[str, Any] = _TABLE["non_torch"]  # growth of memory outside torch since vLLM's snapshot: GiB, low, high
Gib = tuple[float, float, float]


def _circumstance(name: str) -> Gib:
    """Returns the memory that a circumstance takes outside torch, whatever the release: GiB, low, high."""
    value, low, high = NON_TORCH["circumstances"][name]["gib"]
    return value, low, high


@dataclass(frozen=True, slots=True)
class Era:
    """A range of releases whose profile run allocates alike."""

    name: str
    since: Behaviour | None  # the change that the range begins with; it ends where the next one begins
    evidence: str
    sampler_bytes: float  # per row and vocabulary entry at the peak of the sampler's dummy run, first model runner
    forward_hidden: float  # hidden-sized tensors alive beside the widest feed-forward of a compiled pass
    non_torch: Mapping[str, Gib]
    activation_band: tuple[float, float]  # share below and above the value that about 90 % of held-out starts stay in
    band_gib: float  # and a constant part of that band
    graph_estimate: str = "none"  # or "opt-in": when asked for; "v1": default, but the second runner returns 0; "both"
    has_rows: bool = True  # whether a start of this range was measured

    @property
    def first(self) -> str:
        return self.since.since if self.since is not None else "0"

    def does(self, behaviour: Behaviour) -> bool:
        return behaviour.is_in(self.first)

    @property
    def may_pin_copies(self) -> bool:
        """True if a block that a compiled pass freed may stay consumed because a small one was cut from it."""
        return self.does(Behaviour.CONSUMED_MEMORY) and not self.does(Behaviour.UNSPLIT_PROFILE)


def _era(row: Mapping[str, Any]) -> Era:
    since = Behaviour[row["since"]] if row["since"] else None
    return Era(**{**row, "since": since, "non_torch": NON_TORCH[row["non_torch"]]})


ERAS: tuple[Era, ...] = tuple(map(_era, _TABLE["eras"]))
_MEASURED: Mapping[str, Any] = {name: row["is"] for name, row in _TABLE["measured"].items()}  # there with what was seen
_PINNED_BESIDE_ENCODER: tuple[float, float] = _MEASURED["pinned beside an encoder"]
_PINNED_ON_ADA_GIB: float = _MEASURED["pinned on Ada"]
ODD_VOCABULARY_GIB: float = _MEASURED["odd vocabulary"]
TWO_GPUS_LESS_GIB: float = _MEASURED["two GPUs, less"]
V0_ITEM_GIB: tuple[float, float] = _MEASURED["an item of the first engine"]
V0_ITEM_TOKENS = 256
V2_SAMPLER_BYTES = {False: 6.0, True: 2.0}  # per row and vocabulary entry: 16-bit logits and, until 0.27, their 32-bit copy
V2_PENALTY_BYTES = 4.125  # the second runner's penalty counters, made when the model is loaded: 4 B an entry and one bit
# CUDA graphs: GiB = fixed + per layer x layers + experts (if any) + quantised (if so), at 51 capture sizes (up to 512).
GRAPH_ACTUAL, GRAPH_ESTIMATE, GRAPH_V2 = map(tuple, _MEASURED["graphs: taken, estimated, second runner's"])
GRAPH_BAND_GIB, GRAPH_LARGEST_SIZE = 0.35, 512
GRAPH_LEAST_GIB: float = _MEASURED["least graphs"]
FLASHINFER_GRAPH_GIB = 0.385  # its workspace is made while graphs are estimated: VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
AMD_GRAPHS: tuple[float, float] = _MEASURED["graphs on AMD"]

# The most tokens of one picture or film by the makers' own processor, which vLLM profiles even where a batch is smaller. The
# older Qwens read up to 14 frames of a film, two at a time, as many as the context holds (qwen2_vl.py).
_FILM_FRAMES = 7
_FILM_READERS = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")
_GATED_TOWERS = ("qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm4v_moe")
_QWEN_VL = (*_FILM_READERS, "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
DEEPSTACK = {"qwen3_vl": 4, "qwen3_vl_moe": 4}  # embeddings of several layers beside the last one's
ITEM_TOKENS = {"gemma3": 256, "llava": 576, **WHOLE_ITEM_TOKENS, **dict.fromkeys(_QWEN_VL, 16384)}
# No start of the other models prints what the encoder took; Qwen2.5-Omni took 1 GiB where its film alone should take 2.6.
MEASURED_TOWERS = frozenset({"gemma3", "gemma4", *_QWEN_VL}) - {"qwen2_5_omni"}
ITEM_TOKENS |= dict.fromkeys(("glm4v", "glm4v_moe"), 30000)  # a film of 47,040,000 pixels (glm4_1v.py), if the context holds it

# Multiprocessors by compute capability: rows of the top-k buffer. The largest card of each.
MULTIPROCESSORS = {(7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188}
CUBLAS_WORKSPACE = {True: 32 * MIB, False: 8 * MIB + 128 * 1024}  # torch's own, by whether the card is Hopper or newer


# The peaks of vLLM's profile run, as its tensors add up: sampler, forward pass, embedding, encoder. Each was checked to a few
# MiB against starts whose allocator we read (docs/overhead.md); vLLM subtracts the largest one.

_MIXERS = (LayerKind.MAMBA1, LayerKind.MAMBA2, LayerKind.FULL_AND_MAMBA2)
_DELTAS = (LayerKind.GATED_DELTA_NET, LayerKind.KIMI_DELTA, LayerKind.LINEAR)
_SIDES = {"Gemma3": 4, "Gemma4": 3}
_MLA_WORKSPACE_TOKENS = 65536  # the most context MLA up-projects at once, mla_attention.py


@dataclass(frozen=True)
class Batch:
    """A full batch as one rank sees it."""

    tokens: int
    rows: int  # of logits: sequences that sample
    context: int
    tensor_parallel: int
    dtype_bytes: int
    is_hopper: bool
    multiprocessors: int
    reads_videos: bool = True

    def encoder_tokens(self, shape: ModelShape) -> int:
        """The tokens of the pictures that the profile run encodes: a full batch, or one of the largest if that is more."""
        item = ITEM_TOKENS.get(shape.model_type, 0)
        if self.reads_videos and shape.model_type in _FILM_READERS:
            item *= min(_FILM_FRAMES, max(1, self.context // item))
        return max(self.tokens, item if shape.model_type in MEASURED_TOWERS else min(item, self.context))


def sampler_peak(shape: ModelShape, batch: Batch, era: Era, *, v2: bool, lean: bool = False) -> int:
    """Logits and the sampler's copies of them, on top of all that outlives the forward pass."""
    per_logit = V2_SAMPLER_BYTES[lean] if v2 else era.sampler_bytes
    if batch.dtype_bytes > 2:
        per_logit += batch.dtype_bytes - 2
    buffer = 0
    if era.does(Behaviour.TRITON_TOP_K) and not v2:
        buffer = min(batch.rows, batch.multiprocessors) * shape.vocab_size * 4
    hidden = (batch.tokens + 2 * batch.rows) * shape.hidden_size * batch.dtype_bytes
    logits = math.ceil(batch.rows * shape.vocab_size * per_logit)
    return logits + buffer + hidden + persistent(shape, batch, era) + encoder_outputs(shape, batch)


def forward_peak(shape: ModelShape, batch: Batch, era: Era, *, compiled: bool) -> int:
    """The widest moment of one layer over the whole batch of tokens."""
    hidden_tensors = era.forward_hidden if compiled else (4.0 if era.name == "V0" else 3.0)
    shared = (shape.moe.shared_intermediate_size or 0) if shape.moe is not None else 0
    widths = [layer.intermediate_size or 0 for layer in shape.layers]
    dense = max([shape.intermediate_size or 4 * shape.hidden_size, shared, *widths])
    # Attention: residual, input, the projected heads, a normalised copy of the queries and the output.
    queries, keys = shape.attention_heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    if (mla := shape.mla) is not None:
        queries = shape.attention_heads * ((mla.qk_nope_head_dim or 128) + mla.qk_rope_head_dim)
        keys = shape.attention_heads * ((mla.qk_nope_head_dim or 128) + (mla.v_head_dim or 128))
    mixing = 2 * shape.hidden_size + (3 * queries + keys) / batch.tensor_parallel
    # Mamba or a delta net: projections, convolution and output; not measured, so on the wide side.
    if shape.mamba is not None and shape.count(*_MIXERS):
        mixing = max(mixing, 4 * shape.hidden_size + 6.0 * shape.mamba.inner_size / batch.tensor_parallel)
    if (linear := shape.linear) is not None and shape.count(*_DELTAS):
        heads = linear.value_heads * linear.value_head_dim + linear.key_heads * linear.key_head_dim
        mixing = max(mixing, 4 * shape.hidden_size + 6.0 * heads / batch.tensor_parallel)
    per_token = max(3 * dense / batch.tensor_parallel + hidden_tensors * shape.hidden_size, mixing)
    experts = moe_workspace(shape, batch)
    if experts and not any("dense" in layer.feed_forward for layer in shape.layers):
        # No dense layer is as wide: what is alive beside the experts is the attention's or a few hidden tensors.
        per_token = max(6.0 * shape.hidden_size, mixing)
    stored = "" if shape.quantization is None else f"{shape.quantization.method} {shape.quantization.algorithm}".lower()
    if shape.moe is not None and ("fp4" in stored or "mixed" in stored):
        # NVFP4 experts: every routed row again in four bits, and the weighted rows before they are added (cutlass_moe_fp4).
        rows = batch.tokens * (shape.moe.experts_per_token or 1)
        experts += int(rows * shape.hidden_size * (batch.dtype_bytes + 0.5))
    context = 0
    if mla is not None:  # the up-projected context that an MLA layer's profile run stands in for
        tokens = min(max(8 * batch.context, 4 * batch.rows * 64), _MLA_WORKSPACE_TOKENS)
        heads = max(1, shape.attention_heads // batch.tensor_parallel)
        width = heads * ((mla.qk_nope_head_dim or 128) + (mla.v_head_dim or 128)) + mla.cached_dim
        context = tokens * width * batch.dtype_bytes
    transient = math.ceil(batch.tokens * per_token * batch.dtype_bytes)
    return transient + experts + CUBLAS_WORKSPACE[batch.is_hopper] + context + encoder_outputs(shape, batch)


def embedding_table(shape: ModelShape, settings: Settings) -> int:
    return shape.vocab_size * shape.embedding_size * DTYPE_BYTES.get(settings.model_dtype, 2) // settings.tensor_parallel


def keeps_copies(settings: Settings, shape: ModelShape) -> int:
    """How many copies of the embedding table a cold compile cache may leave in this start, and a warm one does not."""
    era = era_of(settings.release, first_engine=settings.first_engine)
    if settings.enforce_eager or (shape.towers and not settings.language_model_only):
        return 0
    # On an H200 0.25.1 copied it with a warm cache too; a 4090 with 0.24 had 5.08 and 6.03 GiB of cache in two starts, and an
    # A100 with 0.19.1 and a warm one had no copy.
    if era.does(Behaviour.CONSUMED_MEMORY):
        return 2
    return int(era.does(Behaviour.NCCL_BEFORE_SNAPSHOT) and not _is_measured(settings, shape))


def _is_measured(settings: Settings, shape: ModelShape) -> bool:  # our own starts were plain models on an H200
    return (9, 0) <= likely_capability(settings) < (10, 0) and not shape.towers and shape.quantization is None


def encoder_peak(shape: ModelShape, batch: Batch) -> int:
    """A vision or audio encoder over as many items as the batch holds: the widest moment of one of its layers."""
    patches = batch.encoder_tokens(shape) * _merge(shape) ** 2
    # Residual, the turned queries and keys in 32 bits, values and output beside the widest feed-forward, which has two halves
    # where it is gated: three starts of Qwen3.5 and 3.6 on 0.19, 0.22 and 0.27 are met to 0.04 GiB, 15.3 GiB of Qwen2.5-VL's
    # film (0.23) to 0.2.
    halves = 2 if shape.model_type in _GATED_TOWERS else 1
    widths = (halves * (t.intermediate_size or 4 * t.hidden_size) + 7 * t.hidden_size for t in shape.towers if t.hidden_size)
    layer = patches * max(widths, default=0) * batch.dtype_bytes
    return layer + encoder_outputs(shape, batch) + CUBLAS_WORKSPACE[batch.is_hopper]


def encoder_outputs(shape: ModelShape, batch: Batch) -> int:
    """Pixels and embeddings of the dummy items, alive until the profile run ends."""
    if not shape.towers:
        return 0
    merged, patch = _merge(shape), max((tower.patch_size or 14) for tower in shape.towers)
    frames = 2 if shape.model_type in _QWEN_VL else 1
    pixels = (merged * patch) ** 2 * 3 * 2 * frames
    width = shape.hidden_size * DEEPSTACK.get(shape.model_type, 1) * batch.dtype_bytes
    return batch.encoder_tokens(shape) * (width + pixels)


def persistent(shape: ModelShape, batch: Batch, era: Era) -> int:
    """Returns the bytes that the forward pass leaves allocated: cuBLAS's workspace and, in some releases, the experts'."""
    return CUBLAS_WORKSPACE[batch.is_hopper] + (moe_workspace(shape, batch) if era.does(Behaviour.MOE_WORKSPACE) else 0)


def moe_workspace(shape: ModelShape, batch: Batch) -> int:
    """The two buffers of the fused experts (fused_moe.py, workspace_shapes): M x top-k x max(I, K) and x max(2I, K)."""
    moe = shape.moe
    if moe is None:
        return 0
    inner = (moe.intermediate_size or shape.intermediate_size or shape.hidden_size) / batch.tensor_parallel
    outer = moe.latent_size or shape.hidden_size
    width = max(inner, outer) + max(2 * inner, outer)
    return math.ceil(batch.tokens * (moe.experts_per_token or 1) * width * batch.dtype_bytes)


def _merge(shape: ModelShape) -> int:
    """The number of patches along a side of one token: 4 in Gemma 3 (256 tokens of 64 x 64 patches), 3 in Gemma 4, else 2."""
    return next((side for name in shape.architectures for start, side in _SIDES.items() if name.startswith(start)), 2)


def film_tokens(shape: ModelShape, settings: Settings) -> int:
    """The tokens of the film that the profile run encodes; 0 where pictures or the batch decide."""
    reads_pictures = shape.towers and not settings.language_model_only and not settings.skips_mm_profiling
    tokens = batch_of(settings).encoder_tokens(shape) if reads_pictures and shape.model_type in _FILM_READERS else 0
    return tokens if tokens > max(ITEM_TOKENS.get(shape.model_type, 0), settings.max_num_batched_tokens) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The memory that one start takes beside weights and cache, per GPU, on the rank that holds most."""

    activation: Estimate
    non_torch: Estimate
    graphs: Estimate  # what vLLM subtracts for CUDA graphs; 0 where it subtracts nothing
    graphs_actual: Estimate  # what the graphs will take, subtracted or not


def overhead(shape: ModelShape, settings: Settings, era: Era | None = None) -> Overhead:
    """The terms of one start; `era` is for the fit, which holds rows out of the table."""
    era = era or era_of(settings.release, first_engine=settings.first_engine)
    v2 = settings.v2_runner and era.does(Behaviour.GRAPH_ESTIMATE)  # an experiment until then, without figures
    graphs, actual = _graphs(shape, settings, era, v2=v2)
    return Overhead(
        activation=_activation(shape, settings, era, v2=v2),
        non_torch=_non_torch(shape, settings, era, v2=v2),
        graphs=graphs,
        graphs_actual=actual,
    )


def era_of(release: str, *, first_engine: bool = False) -> Era:
    """The range a release belongs to; a release newer than we know counts to the newest range."""
    if first_engine:
        return ERAS[0]
    return next(era for era in reversed(ERAS) if era.since is None or era.since.is_in(release))


def likely_capability(settings: Settings) -> tuple[int, int]:
    """The card's compute capability; a large card that is known by its size alone is taken for a Hopper."""
    return settings.compute_capability or ((9, 0) if settings.gpu_bytes >= 70 * GIB else (8, 6))


def batch_of(settings: Settings) -> Batch:
    """The largest batch that vLLM builds, which its profile run tries."""
    capability = likely_capability(settings)
    known = [count for have, count in MULTIPROCESSORS.items() if have <= capability]
    tokens = max(1, settings.max_num_batched_tokens)
    return Batch(
        tokens=tokens,
        rows=max(1, min(settings.max_num_seqs, tokens)),
        context=max(1, settings.context),
        tensor_parallel=max(1, settings.tensor_parallel),
        dtype_bytes=DTYPE_BYTES.get(settings.model_dtype, 2),
        is_hopper=capability >= (9, 0),
        multiprocessors=known[-1] if known else 80,
        reads_videos=settings.reads_videos,
    )


def _activation(shape: ModelShape, settings: Settings, era: Era, *, v2: bool) -> Estimate:
    batch, compiled = batch_of(settings), not settings.enforce_eager and era.name != "V0"
    # A model that takes pictures is given embeddings: the table is looked up outside the compiled pass and is not copied.
    copies = compiled and (not shape.towers or settings.language_model_only)
    if settings.language_model_only or settings.skips_mm_profiling or (v2 and not era.does(Behaviour.CONSUMED_MEMORY)):
        shape = replace(shape, towers=())
    contest = {
        "sampler": sampler_peak(shape, batch, era, v2=v2, lean=Behaviour.LEAN_PROFILE.is_in(settings.release)),
        "forward pass": forward_peak(shape, batch, era, compiled=compiled),
    }
    if shape.towers:
        contest["encoder"] = encoder_peak(shape, batch)
    without_copy = max(contest.values())
    # A compiled pass begins with a second copy of the embedding table (0.19.0 and 0.25.1, warm or cold cache).
    rows = shape.vocab_size * shape.embedding_size // batch.tensor_parallel + 2 * batch.tokens * shape.hidden_size
    embedding = rows * batch.dtype_bytes if copies else 0
    if era.does(Behaviour.NCCL_BEFORE_SNAPSHOT):
        contest["embedding"] = embedding
    winner = max(contest, key=lambda peak: contest[peak])
    value = contest[winner]
    below, above = era.activation_band
    low = value * (1 - below) - era.band_gib * GIB
    if settings.pipeline_parallel > 1:  # only the last rank samples, and it need not be the one that is shown
        low = min(low, 0.9 * contest["forward pass"])
    high = value * (1 + above) + era.band_gib * GIB
    if era.does(Behaviour.GRAPH_ESTIMATE) and not _is_measured(settings, shape):
        low, high = low - 0.1 * GIB, high + 0.08 * value + 0.1 * GIB
    if era.name != "V0":
        high = max(high, embedding)
    if settings.batch_by_size:  # a card with another name may have other defaults
        sequences, tokens = map(min, SMALLER_CARD, (settings.max_num_seqs, settings.max_num_batched_tokens))
        smaller = replace(settings, batch_by_size=False, max_num_seqs=sequences, max_num_batched_tokens=tokens)
        low = min(low, _activation(shape, smaller, era, v2=v2).low)
    if copies and keeps_copies(settings, shape):  # with a warm compile cache there is no copy
        low = min(low, 0.6 * without_copy - 0.1 * GIB)
        if era.may_pin_copies:
            table = embedding_table(shape, settings)
            pinned = {8: min(table, int(_PINNED_ON_ADA_GIB * GIB)), 12: table}.get(likely_capability(settings)[0], table // 2)
            value, high = value + pinned, high + table
    if shape.towers:
        high += encoder_outputs(shape, batch)
        if era.may_pin_copies:
            value, high = value + int(_PINNED_BESIDE_ENCODER[0] * GIB), high + _PINNED_BESIDE_ENCODER[1] * GIB
        if shape.model_type not in MEASURED_TOWERS:
            low, high = min(low, 0.85 * max(contest["sampler"], contest["forward pass"])), high + contest["encoder"]
    if shape.moe is not None and shape.quantization is not None:  # other kernels, whose workspaces were not measured
        low, high = low - moe_workspace(shape, batch) / 2, high + moe_workspace(shape, batch) / 2
    crosses = shape.is_encoder_decoder or any(name.startswith("Mllama") for name in shape.architectures)
    if era.name == "V0" and (shape.towers or crosses):
        items = batch.rows if crosses else min(batch.rows, batch.tokens // V0_ITEM_TOKENS)
        likely, most = (items * gib * GIB for gib in V0_ITEM_GIB)
        value, high, winner = math.ceil(value + likely), high + most, f"{winner} and {items} encoder items"
    return _estimate(value, low, high, f"{winner} of the profile run, vLLM {era.name}{_thin(era)}")


def _non_torch(shape: ModelShape, settings: Settings, era: Era, *, v2: bool) -> Estimate:
    capability = likely_capability(settings)
    fast = (9, 0) <= capability < (12, 0)
    stored = shape.quantization is not None or settings.quantization is not None
    name = "one GPU"
    if settings.tensor_parallel > 1:
        band = era.non_torch["together" if fast else "together_slow_link"]
        if capability >= (10, 0) and fast:
            band = _circumstance("together on Blackwell")
        elif capability >= (8, 6) and not fast and era.does(Behaviour.GRAPH_ESTIMATE):
            band = _circumstance("together without NVLink")
        name = f"tensor parallel {settings.tensor_parallel}"
    elif settings.pipeline_parallel > 1:
        band, name = era.non_torch["staged"], "pipeline parallel"
    elif capability[0] == 12 and shape.moe is not None and stored:
        runs_triton = shape.model_type.startswith("gemma4")
        band = _circumstance(f"quantised experts on {'Triton' if runs_triton else 'RTX'}")
        name = "one GPU, quantised experts"
    else:
        band = era.non_torch["alone" if fast else "alone_elsewhere"]
    if settings.shares_host_memory:
        several = settings.tensor_parallel * settings.pipeline_parallel > 1
        band = _circumstance("host memory" + (", several" if several else ", LoRA" if settings.max_loras else ""))
        name += ", memory shared with the host"
    value, low, high = (gib * GIB for gib in band)
    if settings.is_amd:  # two starts on MI300X, of 0.17 and 0.29, show 0.6 and 1.0 GiB more
        value, high = value + 0.5 * GIB, high + 1.5 * GIB
    if settings.shares_host_memory and settings.max_loras:  # the adapters that wait in host memory
        waiting = lora_bytes(shape, settings).value * max(1, settings.max_cpu_loras / settings.max_loras)
        value, high = value + waiting, high + waiting
    if settings.tensor_parallel == 2 and fast and era.does(Behaviour.GRAPH_ESTIMATE_ASKED):
        value -= TWO_GPUS_LESS_GIB * GIB
    if settings.tensor_parallel == 1 and settings.data_parallel > 1:
        high += GIB  # communicators of the data-parallel group: one start showed 0.61
    if shape.vocab_size % 8 and era.does(Behaviour.GRAPH_ESTIMATE_ASKED):
        value, high = value + ODD_VOCABULARY_GIB * GIB, high + 2 * ODD_VOCABULARY_GIB * GIB
    if era.does(Behaviour.CONSUMED_MEMORY):
        buffers = _buffers(shape, settings, v2=v2)
        value, low, high = value + buffers, low + 0.8 * buffers, high + buffers + 0.5 * GIB
        name += f", and {format_gib(int(buffers))} of torch's buffers outside the weights"
    return _estimate(value, low, high, f"{name}, vLLM {era.name}{_thin(era)}")


def _buffers(shape: ModelShape, settings: Settings, *, v2: bool) -> float:
    """Returns the bytes of the runner's buffers, which vLLM counts since 0.27: penalty counters, or input embeddings."""
    if v2:
        return V2_PENALTY_BYTES * max(1, settings.max_num_seqs) * shape.vocab_size
    return float(DTYPE_BYTES.get(settings.model_dtype, 2) * max(1, settings.max_num_batched_tokens) * shape.hidden_size)


def _graphs(shape: ModelShape, settings: Settings, era: Era, *, v2: bool) -> tuple[Estimate, Estimate]:
    """Returns the memory that vLLM subtracts for graphs, and the memory they will take."""
    if settings.enforce_eager:
        return Estimate.exact(0, "eager: no graphs"), Estimate.exact(0, "eager: no graphs")
    rows = settings.max_num_seqs * (1 + settings.speculative_tokens)  # of a decode step, with the tokens drafted ahead
    band = GRAPH_BAND_GIB * GIB
    taken = _graph_gib(shape, settings, GRAPH_V2 if v2 else GRAPH_ACTUAL, largest=rows * (1 if v2 else 2)) * GIB
    actual = _estimate(taken, 0.5 * taken - band / 2, taken + 2 * band, "layers, experts and capture sizes")
    if era.name in ("V0", "0.8.0 to 0.9.0", "0.9.1 to 0.10"):  # up to 3.2 GiB was seen on one GPU
        why = f"graphs of 0.19 by layers, vLLM {era.name} differs widely"
        actual = _estimate(taken, 0.1 * taken, 3.0 * taken + band, why)
    if era.graph_estimate == "none" or not settings.estimates_graphs:
        unless = "" if settings.estimates_graphs else " unless asked"
        return Estimate.exact(0, f"vLLM {era.name} does not subtract graphs{unless}"), actual
    if v2 and era.graph_estimate != "both":
        return Estimate.exact(0, f"the second model runner of {era.name} estimates 0"), actual
    # Attention runs on FlashInfer on Blackwell's data centre cards, and on all Blackwells with a cache of 8 bits.
    major = likely_capability(settings)[0]
    runs_flashinfer = major in (10, 11) or (major == 12 and settings.kv_cache_dtype.startswith("fp8"))
    flashinfer = FLASHINFER_GRAPH_GIB * GIB if shape.mla is None and runs_flashinfer else 0.0
    more, most = AMD_GRAPHS if settings.is_amd else (1.0, 0.0)
    if v2:
        value, high = more * actual.value + flashinfer, more * actual.high + flashinfer + most * GIB
        return _estimate(value, 0.4 * actual.low, high, f"as captured, vLLM {era.name}{_thin(era)}"), actual
    value = _graph_gib(shape, settings, GRAPH_ESTIMATE, largest=2 * rows) * GIB
    low, value = 0.9 * value - band, more * value + flashinfer
    wider = 0.6 if any(layer.kind.keeps_state for layer in shape.layers) else 0.0  # states 1.94 for 1.28
    if shape.mla is not None:  # sparse latents took 4.99 GiB for 2.06 on four GPUs, 1.58 for 1.05 on two
        value, wider = 1.9 * value, 0.5
    high = (1 + wider) * value + band + most * GIB
    return _estimate(value, low, high, f"layers, experts and capture sizes, vLLM {era.name}"), actual


def _graph_gib(shape: ModelShape, settings: Settings, shares: tuple[float, float, float, float], largest: int) -> float:
    """Graphs in GiB; `largest` is the largest batch captured, at most 512; fewer capture sizes take less."""
    fixed, per_layer, experts, quantised = shares
    layers = max(1, len(shape.layers)) / max(1, settings.pipeline_parallel)
    gib = fixed + per_layer * layers
    gib += experts if shape.moe is not None else 0.0
    gib += quantised if shape.quantization is not None else 0.0
    reach = min(1.0, max(1, largest) / GRAPH_LARGEST_SIZE)
    return max(GRAPH_LEAST_GIB, gib) * (0.1 + 0.9 * reach)


def _thin(era: Era) -> str:
    return "" if era.has_rows else f"; wide band: {era.evidence}"


def _estimate(value: float, low: float, high: float, why: str) -> Estimate:
    whole = max(0, math.ceil(value))
    return Estimate(whole, max(0, min(whole, int(low))), max(whole, math.ceil(high)), why)


PIECES_AT_MOST: float = _MEASURED["pieces, at most"]  # of a full batch's peak, beyond it


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model: its shape, and its tensors where they were read."""

    name: str
    shape: ModelShape
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] | None = None  # name, dtype, shape
    total_bytes: int | None = None
    unquantised: bool = False  # known to hold plain weights; False also where it is not known
    drafter: ModelFacts | None = None  # of speculative decoding: its weights and its cache come on top


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(Overhead):
    """All that one start takes beside its cache, as predicted or as real starts have shown it."""

    weights: Estimate
    context: Estimate  # before the snapshot, outside the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Terms):
    """Every term per GPU, of the rank that rules."""

    card: Card
    settings: Settings
    requested: Estimate
    kv: Estimate
    slack: Estimate
    kv_plan: KvPlan

    @property
    def fits(self) -> bool:
        """True if one request of full length can be served, by the central figures."""
        return self.kv.value > 0 and self.kv_plan.fits_one_request

    @property
    def free_bytes(self) -> int:
        """The bytes that vLLM's snapshot finds free, by the central figures: the card less its neighbours and the context."""
        return self.card.total_bytes - self.card.used_bytes - self.context.value

    @property
    def fits_at_low_end(self) -> bool:
        """True if one request of full length can be served even with a KV cache at the low end of its band."""
        return self.fits and (self.kv.is_exact or self.kv.low >= self._needed)

    @property
    def fits_at_high_end(self) -> bool:
        """True if one request of full length can be served with a KV cache at the high end of its band."""
        return self.fits or (not self.kv.is_exact and self.kv.high >= self._needed)

    @property
    def _needed(self) -> int:
        return 1 if self.settings.auto_fit else max(1, self.kv_plan.bytes_for_one_request)

    @property
    def context_at_low_end(self) -> int | None:
        """The longest request that a cache at the low end holds; None where kinds of layers share it, or nothing is left."""
        plan = self.kv_plan
        is_plain = (
            len(plan.groups) == 1 and plan.groups[0].kind in ("full", "mla") and self.settings.decode_context_parallel == 1
        )
        if not is_plain or plan.bytes_per_block <= 0:
            return None
        tokens = (self.kv.low // plan.bytes_per_block - 1) * plan.block_size  # vLLM keeps one block
        return min(tokens, plan.largest_context_that_fits) if tokens > 0 else None


def plan_ledger(model: ModelFacts, settings: Settings, card: Card) -> Ledger:
    """Predict every term and add it all up."""
    predicted = _values(overhead(model.shape, settings))
    terms = Terms(**predicted, weights=_weights(model, settings), context=_context(settings, card))
    return added_up(model, settings, card, terms)


def _values(terms: Overhead) -> dict[str, Estimate]:
    return {field.name: getattr(terms, field.name) for field in fields(terms)}


def added_up(model: ModelFacts, settings: Settings, card: Card, terms: Terms, remainder: Estimate | None = None) -> Ledger:
    """The ledger of these terms; `remainder` is non-torch and activation together, where their sum is known better."""
    requested = Estimate.exact(math.ceil(card.total_bytes * settings.utilization), f"{settings.utilization:g} x total")
    beside = (terms.non_torch, terms.activation) if remainder is None else (remainder,)
    spent = (terms.weights, *beside, terms.graphs)
    if settings.kv_cache_memory_bytes is not None:
        kv = Estimate.exact(settings.kv_cache_memory_bytes, "--kv-cache-memory-bytes")
    else:
        given_back = Estimate(0, -int(NON_TORCH["host gives back"]["gib"] * GIB) if settings.shares_host_memory else 0, 0)
        kv = left_of(requested, (*spent, given_back, Estimate.exact(neighbours_in_budget(settings, card))))
    planned = plan_kv(cache_specs(model, settings), settings, max(kv.value, 0))
    if model.shape.is_encoder_decoder:  # each request also keeps its cross-attention, which is not counted
        planned = replace(planned, max_concurrency=None)
    if settings.num_gpu_blocks_override is not None:
        kv = Estimate.exact(planned.num_blocks * planned.bytes_per_block, "--num-gpu-blocks-override")
    # With a fixed cache vLLM takes what it takes, whatever the utilisation says.
    taken = sum_of((*spent, kv)) if settings.has_fixed_cache else requested
    free = Estimate(card.total_bytes - card.used_bytes, card.low_bytes - card.used_bytes, card.high_bytes - card.used_bytes)
    # What the second runner allocates after the weights were weighed and before the profile begins: in no term until 0.27.
    era = era_of(settings.release, first_engine=settings.first_engine)
    is_unseen = settings.v2_runner and era.does(Behaviour.GRAPH_ESTIMATE) and not era.does(Behaviour.CONSUMED_MEMORY)
    unseen = Estimate.exact(int(_buffers(model.shape, settings, v2=True)) if is_unseen else 0)
    # What a cache of a given size must leave beside the activations: freed memory comes back in pieces, and a batch that finds
    # none large enough fails. A utilisation leaves room for that outside the request.
    pieces = Estimate(0, 0, int(PIECES_AT_MOST * terms.activation.value) if settings.has_fixed_cache else 0)
    slack = left_of(free, (terms.context, taken, unseen, pieces))
    sums = {"requested": requested, "kv": kv, "slack": slack}
    return Ledger(card=card, settings=settings, kv_plan=planned, **_values(terms), **sums)


def neighbours_in_budget(settings: Settings, card: Card) -> int:
    """Returns the bytes that other processes hold on the card, in engines that take them off the budget, else 0."""
    if settings.first_engine:
        is_counted = Behaviour.NEIGHBOURS_COUNTED.is_in(settings.release)
    else:
        is_counted = not Behaviour.NEIGHBOURS_APART.is_in(settings.release)
    return card.used_bytes if is_counted else 0


def cache_specs(model: ModelFacts, settings: Settings) -> tuple[RankSpecs, ...]:
    """The caches of every stage; a drafter's layers live on the last one."""
    ranks = specs_of_all_stages(model.shape, settings)
    if model.drafter is None:
        return ranks
    (drafted,) = specs_of_all_stages(model.drafter.shape, replace(settings, pipeline_parallel=1, pipeline_partition=None))
    return (*ranks[:-1], (*ranks[-1], *(NamedSpec(f"drafter.{spec.layer}", spec.spec) for spec in drafted)))


def _weights(model: ModelFacts, settings: Settings) -> Estimate:
    """The model's weights with LoRA slots, less what is offloaded, and its drafter's."""
    stored = model.shape.quantization
    is_as_stored = settings.quantization in (None, stored.method if stored is not None else None)
    if model.tensors is not None and is_as_stored:
        weights = weights_from_tensors(model.tensors, model.shape, settings)
    elif model.total_bytes is not None and is_as_stored:
        weights = weights_from_total(model.total_bytes, model.shape, settings)
    else:
        weights = weights_from_shape(model.shape, settings)
    if settings.max_loras:
        slots = lora_bytes(model.shape, settings)
        weights = replace(sum_of((weights, slots)), why=f"{weights.why}, and {slots.why}")
    offloaded = int(settings.cpu_offload_gib * GIB)
    value, low, high = (max(0, size - offloaded) for size in (weights.value, weights.low, weights.high))
    weights = Estimate(value, low, high, weights.why)
    if model.drafter is None:
        return weights
    own = (settings.speculative or {}).get("draft_tensor_parallel_size")
    ranks = own if isinstance(own, int) and own > 0 else settings.tensor_parallel
    alone = replace(settings,
        tensor_parallel=ranks, pipeline_parallel=1, pipeline_partition=None, max_loras=0, cpu_offload_gib=0,
        auto_dtype=auto_dtype_of(model.drafter.shape),
    )  # fmt: skip
    drafted = _weights(model.drafter, alone)
    return replace(sum_of((weights, drafted)), why=f"{weights.why}, and the draft model {model.drafter.name}")


def _context(settings: Settings, card: Card) -> Estimate:
    several = settings.tensor_parallel * settings.pipeline_parallel > 1
    together = several and Behaviour.NCCL_BEFORE_SNAPSHOT.is_in(settings.release)
    linked = card.compute_capability is None or card.compute_capability >= (9, 0)
    value, low, high = _MEASURED["context alone" if not together else "context together" if linked else "context elsewhere"]
    return Estimate(int(value * GIB), int(low * GIB), int(high * GIB), "CUDA context and NCCL before vLLM's snapshot")


def sum_of(terms: tuple[Estimate, ...]) -> Estimate:
    """Adds terms with independent errors: half-widths add in squares, each side for itself."""
    value = sum(term.value for term in terms)
    down = math.sqrt(sum((term.value - term.low) ** 2 for term in terms))
    up = math.sqrt(sum((term.high - term.value) ** 2 for term in terms))
    return Estimate(value, int(value - down), math.ceil(value + up))


def left_of(budget: Estimate, spent: tuple[Estimate, ...]) -> Estimate:
    """Returns the rest of a budget: its low end comes from high spending."""
    used = sum_of(spent)
    value = budget.value - used.value
    down = math.hypot(budget.value - budget.low, used.high - used.value)
    up = math.hypot(budget.high - budget.value, used.value - used.low)
    return Estimate(value, int(value - down), math.ceil(value + up))

"""The memory of one GPU before anything is started, term by term.

    |<------------------------------- what vLLM sees of the card ------------------------------->|
    |<-- others -->|<-- context -->|<------ requested = ceil(total x utilisation) ------>|       |
    |  neighbours  | CUDA, NCCL    | weights | non-torch | activation | graphs |   KV   | slack |

vLLM takes its snapshot after the CUDA context and NCCL are up, so both lie outside the budget, and so do neighbours: what is
left at the right, the slack, is all there is for everything that vLLM's own profile does not see.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from plimsoll.models.shape import ModelShape
from plimsoll.plan.kv import KvPlan, KvSettings, plan_kv, specs_of_all_stages
from plimsoll.plan.kv_shapes import is_interleaved
from plimsoll.plan.kv_specs import RankSpecs
from plimsoll.plan.overhead import OverheadInput, overhead, unseen_buffers
from plimsoll.plan.settings import AUTO_FIT, Settings
from plimsoll.plan.weights import Placement, lora_bytes, weights_from_shape, weights_from_tensors, weights_from_total
from plimsoll.units import GIB, Estimate
from plimsoll.vllm.versions import Behaviour

# What a worker holds before vLLM's snapshot, in GiB: 19 starts of 0.19.0 on H100 print it (0.51 on one GPU in eleven of
# eleven, 1.53 to 2.07 with tensor parallelism). Other cards and releases: the band is widened, not measured; a public start
# on two RTX 4090 (0.97 of the card was granted) shows that without Hopper's links it is far less.
_CONTEXT_ALONE = (0.51, 0.25, 0.8)
_CONTEXT_TOGETHER = (1.55, 1.0, 2.1)
_CONTEXT_TOGETHER_ELSEWHERE = (0.6, 0.3, 1.6)

# What torch's pool takes beyond the peak that a full batch allocates, as a share of it: 0.19 to 0.43 in six loads on an H200
# with room to spare, 0.68 in one that had a cache of a given size beside it and failed (docs/overhead.md).
PIECES_AT_MOST = 0.7


class Card(NamedTuple):
    """The GPU that is planned for."""

    name: str
    total_bytes: int
    low_bytes: int
    high_bytes: int
    compute_capability: tuple[int, int] | None = None
    used_bytes: int = 0  # by others, before vLLM starts


class ModelFacts(NamedTuple):
    """What is known of the model: its shape, and its tensors where they were read."""

    name: str
    shape: ModelShape
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] | None = None  # name, dtype, shape
    total_bytes: int | None = None
    unquantised: bool = False  # known to hold plain weights; False too where nothing is known
    drafter: ModelFacts | None = None  # of speculative decoding: its weights and its cache come on top


class Ledger(NamedTuple):
    """Every term per GPU, of the rank that rules."""

    card: Card
    settings: Settings
    requested: Estimate
    weights: Estimate
    non_torch: Estimate
    activation: Estimate
    graphs: Estimate  # what vLLM subtracts for CUDA graphs; 0 where it subtracts nothing
    graphs_actual: Estimate  # what the graphs will take, subtracted or not
    context: Estimate  # before the snapshot, outside the budget
    kv: Estimate
    slack: Estimate
    kv_plan: KvPlan

    @property
    def fits(self) -> bool:
        """Whether one request of full length can be served, by the central figures."""
        return self.kv.value > 0 and self.kv_plan.fits_one_request

    @property
    def free_bytes(self) -> int:
        """What vLLM's snapshot finds free, by the central figures: the card less its neighbours and the context."""
        return self.card.total_bytes - self.card.used_bytes - self.context.value

    @property
    def fits_at_low_end(self) -> bool:
        """Whether that is so too where the KV cache comes out at the low end of its band."""
        needed = 1 if self.settings.max_model_len == AUTO_FIT else max(1, self.kv_plan.bytes_for_one_request)
        return self.fits and (self.kv.is_exact or self.kv.low >= needed)

    @property
    def context_at_low_end(self) -> int | None:
        """The longest request that such a cache holds; None where layers of several kinds share it, or nothing is left."""
        plan = self.kv_plan
        is_plain = (
            len(plan.groups) == 1 and plan.groups[0].kind in ("full", "mla") and self.settings.decode_context_parallel == 1
        )
        if not is_plain or plan.bytes_per_block <= 0:
            return None
        tokens = (self.kv.low // plan.bytes_per_block - 1) * plan.block_size  # vLLM keeps one block
        return min(tokens, plan.largest_context_that_fits) if tokens > 0 else None


class Terms(NamedTuple):
    """What one start takes beside its cache, as `overhead` and the weights predict it or as real starts have shown it."""

    weights: Estimate
    non_torch: Estimate
    activation: Estimate
    graphs: Estimate
    graphs_actual: Estimate
    context: Estimate


def plan_ledger(model: ModelFacts, settings: Settings, card: Card) -> Ledger:
    """Predict every term and add it all up."""
    predicted = overhead(_overhead_input(model.shape, settings, card))
    terms = Terms(
        weights=_all_weights(model, settings, card),
        non_torch=predicted.non_torch,
        activation=predicted.activation,
        graphs=predicted.graphs,
        graphs_actual=predicted.graphs_actual,
        context=_context(settings, card),
    )
    return added_up(model, settings, card, terms)


def added_up(model: ModelFacts, settings: Settings, card: Card, terms: Terms, remainder: Estimate | None = None) -> Ledger:
    """The ledger of these terms; `remainder` is non-torch and activation together, where their sum is known better."""
    requested = Estimate.exact(math.ceil(card.total_bytes * settings.utilization), f"{settings.utilization:g} x total")
    beside = (terms.non_torch, terms.activation) if remainder is None else (remainder,)
    spent = (terms.weights, *beside, terms.graphs)
    if settings.kv_cache_memory_bytes is not None:
        kv = Estimate.exact(settings.kv_cache_memory_bytes, "--kv-cache-memory-bytes")
    else:
        kv = left_of(requested, (*spent, Estimate.exact(neighbours_in_budget(settings, card))))
    cache = kv_settings(model.shape, settings, card)
    planned = plan_kv(cache_specs(model, cache), cache, max(kv.value, 0))
    if settings.num_gpu_blocks_override is not None:
        kv = Estimate.exact(planned.num_blocks * planned.bytes_per_block, "--num-gpu-blocks-override")
    # With a fixed cache vLLM takes what it takes, whatever the utilisation says.
    taken = sum_of((*spent, kv)) if settings.has_fixed_cache else requested
    free = Estimate(card.total_bytes - card.used_bytes, card.low_bytes - card.used_bytes, card.high_bytes - card.used_bytes)
    unseen = unseen_buffers(_overhead_input(model.shape, settings, card))
    return Ledger(
        card=card,
        settings=settings,
        requested=requested,
        **terms._asdict(),
        kv=kv,
        slack=left_of(free, (terms.context, taken, Estimate.exact(unseen), _pieces(settings, terms.activation))),
        kv_plan=planned,
    )


def _pieces(settings: Settings, activation: Estimate) -> Estimate:
    """What a cache of a given size must leave beside the activations: freed memory comes back in pieces, and a batch that finds
    none large enough fails. A utilisation leaves room for that outside the request."""
    return Estimate(0, 0, int(PIECES_AT_MOST * activation.value)) if settings.has_fixed_cache else Estimate.exact(0)


def neighbours_in_budget(settings: Settings, card: Card) -> int:
    """What other processes hold on the card, in releases that take it off the budget."""
    return 0 if Behaviour.NEIGHBOURS_APART.is_in(settings.release) else card.used_bytes


def kv_settings(shape: ModelShape, settings: Settings, card: Card) -> KvSettings:
    """The launch as the block arithmetic sees it."""
    context = shape.max_context if settings.max_model_len == AUTO_FIT else settings.max_model_len
    return KvSettings(
        max_model_len=context,
        auto_fit=settings.max_model_len == AUTO_FIT,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        async_scheduling=settings.async_scheduling,
        prefix_caching=settings.prefix_caching,
        tp=settings.tensor_parallel,
        pp=settings.pipeline_parallel,
        dcp=settings.decode_context_parallel,
        pp_partition=settings.pipeline_partition,
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        model_dtype=model_dtype(shape, settings),
        mamba_cache_dtype=settings.mamba_cache_dtype,
        mamba_ssm_cache_dtype=settings.mamba_ssm_cache_dtype,
        state_mode=settings.mamba_cache_mode,
        num_spec=settings.speculative_tokens,
        mtp_layers=shape.mtp_layers if settings.drafts_with_own_head else 0,
        hybrid_manager=None if settings.hybrid_manager else False,
        interleaved=is_interleaved(shape),
        num_blocks_override=settings.num_gpu_blocks_override,
        v2_runner=settings.v2_runner,
        capability=card.compute_capability[0] if card.compute_capability else 9,
        version=settings.release,
    )


def cache_specs(model: ModelFacts, cache: KvSettings) -> tuple[RankSpecs, ...]:
    """The caches of every stage; a drafter's layers live on the last one."""
    ranks = specs_of_all_stages(model.shape, cache)
    if model.drafter is None:
        return ranks
    alone = replace(cache, pp=1, pp_partition=None, mtp_layers=0)
    (drafted,) = specs_of_all_stages(model.drafter.shape, alone)
    return (*ranks[:-1], (*ranks[-1], *(spec._replace(layer=f"drafter.{spec.layer}") for spec in drafted)))


def _all_weights(model: ModelFacts, settings: Settings, card: Card) -> Estimate:
    weights = _weights(model, settings, card)
    if model.drafter is None:
        return weights
    own = (settings.speculative or {}).get("draft_tensor_parallel_size")
    ranks = own if isinstance(own, int) and own > 0 else settings.tensor_parallel
    alone = settings._replace(tensor_parallel=ranks, pipeline_parallel=1, max_loras=0, cpu_offload_gib=0)
    drafted = _weights(model.drafter, alone, card)
    return sum_of((weights, drafted))._replace(why=f"{weights.why}, and the draft model {model.drafter.name}")


def model_dtype(shape: ModelShape, settings: Settings) -> str:
    """The type activations and an unquantised cache have: as given, else 16 bits as vLLM picks."""
    given = {"half": "float16", "float": "float32"}.get(settings.dtype, settings.dtype)
    if given != "auto":
        return given
    return "bfloat16" if shape.dtype in (None, "bfloat16", "float32") else shape.dtype


def _weights(model: ModelFacts, settings: Settings, card: Card) -> Estimate:
    placement = Placement(
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        data_parallel=settings.data_parallel,
        expert_parallel=settings.expert_parallel,
        partition=settings.pipeline_partition,
        encoders=not settings.language_model_only,
        encoders_whole=settings.encoders_whole,
        whole_segments=Behaviour.WHOLE_SEGMENTS.is_in(settings.release),
        wide_zeros=card.compute_capability == (9, 0) and Behaviour.AWQ_MACHETE.is_in(settings.release),
    )
    dtype = model_dtype(model.shape, settings)
    stored = model.shape.quantization
    is_as_stored = settings.quantization in (None, stored.method if stored is not None else None)
    if model.tensors is not None and is_as_stored:
        found = weights_from_tensors(model.tensors, model.shape, placement, dtype)
    elif model.total_bytes is not None and is_as_stored:
        found = weights_from_total(model.total_bytes, model.shape, placement)
    else:
        found = weights_from_shape(model.shape, placement, dtype, settings.quantization)
    if settings.max_loras:
        slots = lora_bytes(model.shape, placement, settings.max_loras, settings.max_lora_rank, dtype)
        found = sum_of((found, slots))._replace(why=f"{found.why}, and {slots.why}")
    offloaded = int(settings.cpu_offload_gib * GIB)
    return Estimate(max(0, found.value - offloaded), max(0, found.low - offloaded), max(0, found.high - offloaded), found.why)


def _overhead_input(shape: ModelShape, settings: Settings, card: Card) -> OverheadInput:
    context = shape.max_context if settings.max_model_len == AUTO_FIT else settings.max_model_len
    return OverheadInput(
        release=settings.release,
        shape=shape,
        gpu_bytes=card.total_bytes,
        compute_capability=card.compute_capability,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        data_parallel=settings.data_parallel,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=context,
        enforce_eager=settings.enforce_eager,
        estimates_graphs=settings.estimates_graphs,
        v2_runner=settings.v2_runner,
        dtype=model_dtype(shape, settings),
    )


def _context(settings: Settings, card: Card) -> Estimate:
    is_spread = settings.tensor_parallel * settings.pipeline_parallel > 1
    together = is_spread and Behaviour.NCCL_BEFORE_SNAPSHOT.is_in(settings.release)
    linked = card.compute_capability is None or card.compute_capability >= (9, 0)
    value, low, high = _CONTEXT_ALONE if not together else _CONTEXT_TOGETHER if linked else _CONTEXT_TOGETHER_ELSEWHERE
    return Estimate(int(value * GIB), int(low * GIB), int(high * GIB), "CUDA context and NCCL before vLLM's snapshot")


def sum_of(terms: tuple[Estimate, ...]) -> Estimate:
    """Independent errors: half-widths add in squares, each side for itself."""
    value = sum(term.value for term in terms)
    down = math.sqrt(sum((term.value - term.low) ** 2 for term in terms))
    up = math.sqrt(sum((term.high - term.value) ** 2 for term in terms))
    return Estimate(value, int(value - down), math.ceil(value + up))


def left_of(budget: Estimate, spent: tuple[Estimate, ...]) -> Estimate:
    """What is left of a budget: high spending makes the low end."""
    used = sum_of(spent)
    value = budget.value - used.value
    down = math.hypot(budget.value - budget.low, used.high - used.value)
    up = math.hypot(budget.high - budget.value, used.value - used.low)
    return Estimate(value, int(value - down), math.ceil(value + up))

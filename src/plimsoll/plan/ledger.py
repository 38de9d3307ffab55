"""The memory of one GPU before anything is started, term by term.

    |<------------------------------- what vLLM sees of the card ------------------------------->|
    |<-- others -->|<-- context -->|<------ requested = ceil(total x utilisation) ------>|       |
    |  neighbours  | CUDA, NCCL    | weights | non-torch | activation | graphs |   KV   | slack |

vLLM takes its snapshot after the CUDA context and NCCL are up, so both lie outside the budget, and so do neighbours: what is
left at the right, the slack, is all there is for everything that vLLM's own profile does not see.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from plimsoll.models.shape import ModelShape
from plimsoll.plan.kv import KvPlan, plan_kv
from plimsoll.plan.kv_layers import RankSpecs, specs_of_all_stages
from plimsoll.plan.overhead import overhead, unseen_buffers
from plimsoll.plan.settings import Card, Settings, auto_dtype_of
from plimsoll.plan.weights import lora_bytes, weights_from_shape, weights_from_tensors, weights_from_total
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
        needed = 1 if self.settings.auto_fit else max(1, self.kv_plan.bytes_for_one_request)
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
    predicted = overhead(model.shape, settings)
    terms = Terms(
        weights=_all_weights(model, settings),
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
    planned = plan_kv(cache_specs(model, settings), settings, max(kv.value, 0))
    if settings.num_gpu_blocks_override is not None:
        kv = Estimate.exact(planned.num_blocks * planned.bytes_per_block, "--num-gpu-blocks-override")
    # With a fixed cache vLLM takes what it takes, whatever the utilisation says.
    taken = sum_of((*spent, kv)) if settings.has_fixed_cache else requested
    free = Estimate(card.total_bytes - card.used_bytes, card.low_bytes - card.used_bytes, card.high_bytes - card.used_bytes)
    unseen = unseen_buffers(model.shape, settings)
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


def cache_specs(model: ModelFacts, settings: Settings) -> tuple[RankSpecs, ...]:
    """The caches of every stage; a drafter's layers live on the last one."""
    ranks = specs_of_all_stages(model.shape, settings)
    if model.drafter is None:
        return ranks
    (drafted,) = specs_of_all_stages(model.drafter.shape, settings._replace(pipeline_parallel=1, pipeline_partition=None))
    return (*ranks[:-1], (*ranks[-1], *(spec._replace(layer=f"drafter.{spec.layer}") for spec in drafted)))


def _all_weights(model: ModelFacts, settings: Settings) -> Estimate:
    weights = _weights(model, settings)
    if model.drafter is None:
        return weights
    own = (settings.speculative or {}).get("draft_tensor_parallel_size")
    ranks = own if isinstance(own, int) and own > 0 else settings.tensor_parallel
    alone = settings._replace(
        tensor_parallel=ranks, pipeline_parallel=1, pipeline_partition=None, max_loras=0, cpu_offload_gib=0,
        auto_dtype=auto_dtype_of(model.drafter.shape),
    )  # fmt: skip
    drafted = _weights(model.drafter, alone)
    return sum_of((weights, drafted))._replace(why=f"{weights.why}, and the draft model {model.drafter.name}")


def _weights(model: ModelFacts, settings: Settings) -> Estimate:
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
        weights = sum_of((weights, slots))._replace(why=f"{weights.why}, and {slots.why}")
    offloaded = int(settings.cpu_offload_gib * GIB)
    value, low, high = (max(0, size - offloaded) for size in (weights.value, weights.low, weights.high))
    return Estimate(value, low, high, weights.why)


def _context(settings: Settings, card: Card) -> Estimate:
    several = settings.tensor_parallel * settings.pipeline_parallel > 1
    together = several and Behaviour.NCCL_BEFORE_SNAPSHOT.is_in(settings.release)
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

"""What a plan hands over: its cache groups by our names, and step times by the data sheet of its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import Gpu
from plimsoll.simulate.roofline import Experts, Speed, Work, active_parameters, dense_rate, graph_sizes, roofline
from plimsoll.simulate.settings import Group, Kind, Settings, StepTime

REPLAYED_ALL_THE_SAME = "; it is replayed as if it did"
"""How the note ends that the plan of a replayed server says it does not start."""

_KINDS: Mapping[str, Kind] = {
    "full": "full", "mla": "full", "indexer": "full", "sliding": "sliding", "sliding-mla": "sliding", "state": "mamba",
}  # fmt: skip
"""`plan`'s names of groups, and ours."""


def group_of(kind: object, block_size: int, window: int | None) -> Group:
    """A group of a plan; a kind that the scheduler's replica does not know is BadInput."""
    ours = _KINDS.get(kind if isinstance(kind, str) else "")
    if ours is None:
        raise BadInput(f"the plan has layers of kind {kind!r}: their blocks cannot be replayed yet")
    return Group(ours, block_size, (window or 0) if ours == "sliding" else 0)


def with_groups(settings: Settings, groups: Sequence[Group]) -> Settings:
    """The settings with these groups; a single one of full attention is what they mean without any."""
    is_plain = len(groups) == 1 and groups[0].kind == "full" and groups[0].block_size == settings.block_size
    return settings._replace(groups=() if is_plain else tuple(groups))


class PlannedGroup(Protocol):
    """A cache group as `plan` describes it."""

    @property
    def kind(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def window(self) -> int | None: ...


class PlannedCache(Protocol):
    """The blocks that `plan` found."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def groups(self) -> Sequence[PlannedGroup]: ...


class PlannedLimits(Protocol):
    """What `plan` read of a command that the scheduler is told."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def chunked_prefill(self) -> bool: ...
    @property
    def long_prefill_token_threshold(self) -> int: ...
    @property
    def async_scheduling(self) -> bool: ...
    @property
    def watermark(self) -> float: ...
    @property
    def reserve_full_isl(self) -> bool: ...
    @property
    def scheduling_policy(self) -> str: ...


def planned_settings(said: PlannedLimits, kv: PlannedCache) -> Settings:
    """The planned server's scheduler: its blocks, its cache groups and its limits."""
    settings = Settings(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_num_seqs=said.max_num_seqs,
        max_num_batched_tokens=said.max_num_batched_tokens,
        max_model_len=kv.max_model_len,
        prefix_caching=said.prefix_caching,
        chunked_prefill=said.chunked_prefill,
        long_prefill_token_threshold=said.long_prefill_token_threshold,
        async_scheduling=said.async_scheduling,
        watermark=said.watermark,
        reserve_full_isl=said.reserve_full_isl,
        policy="priority" if said.scheduling_policy == "priority" else "fcfs",
    )
    return with_groups(settings, [group_of(group.kind, group.block_size, group.window) for group in kv.groups])


class Sheet(NamedTuple):
    """What the step time depends on besides the card: figures of one GPU, and how many GPUs there are."""

    weights_bytes: float
    block_bytes: float
    parameters: float
    routed: float = 0.0  # Of the parameters, those of routed experts
    experts: Experts | None = None
    cards: int = 1  # Tensor parallel size
    stages: int = 1  # Pipeline parallel size: a step goes through one stage after the other
    is_eager: bool = False


def experts_of(total: float, routed: float, experts: object, per_token: object) -> Experts | None:
    """A mixture's experts, if these counts make one."""
    if not (isinstance(experts, int) and isinstance(per_token, int)):
        return None
    return Experts(experts, per_token, routed / total) if 0 < per_token <= experts and 0 < routed <= total else None


def captured_sizes(settings: Settings, *, is_eager: bool) -> tuple[int, ...]:
    """The sizes of the graphs that pad small steps."""
    return () if is_eager else graph_sizes(settings.max_num_seqs)


def sheet_time(sheet: Sheet, card: Gpu, settings: Settings) -> StepTime | None:
    """Step times by the card's bandwidth and rate and the model's size; None if no data sheet gives the card's rates."""
    if not card.bandwidth_bytes_per_s or not card.bf16_flops:
        return None
    spread = sheet.cards * sheet.stages
    weights = sheet.weights_bytes * spread
    flops = dense_rate(card.bf16_flops, card.fp8_flops, weights / max(1.0, sheet.parameters))
    full = sum(group.kind == "full" for group in settings.groups) if settings.groups else 1
    active = active_parameters(sheet.parameters, sheet.routed, sheet.experts)
    work = Work(weights, active, full * sheet.block_bytes * spread / settings.block_size, sheet.experts, sheet.cards)
    speed = Speed(card.bandwidth_bytes_per_s, flops)
    return roofline(work, speed, settings.max_num_batched_tokens, captured_sizes(settings, is_eager=sheet.is_eager))

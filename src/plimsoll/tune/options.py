"""Every candidate with the pool that plan gives it, and whether plan calls it safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from plimsoll.domain.finding import Finding
from plimsoll.domain.gpu import gpu_named
from plimsoll.domain.model import ModelShape
from plimsoll.errors import BadInput
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings as Launch
from plimsoll.plan.weights import parameters, routed_parameters
from plimsoll.simulate.planned import Sheet, experts_of, planned_settings, sheet_time
from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.tune.space import Candidate

Replan = Callable[[Launch], tuple[Ledger, list[Finding]]]


class Option(NamedTuple):
    """A candidate as plan sees it."""

    candidate: Candidate
    ledger: Ledger
    findings: tuple[Finding, ...]

    @property
    def is_safe(self) -> bool:
        """Whether plan finds nothing to object to: not even a warning, and one request fits also at the low end of its band."""
        return self.ledger.fits_at_low_end and not self.findings

    @property
    def why_not(self) -> str:
        """Plan's first objection, in its own words."""
        if self.findings:
            return f"{self.findings[0].code}: {self.findings[0].title}"
        return "one request fits by the estimate, not at its low end" if self.ledger.fits else "one request does not fit"

    @property
    def because(self) -> str:
        """Its figures, behind a colon; empty where it gives none."""
        return f": {self.findings[0].because}" if self.findings and self.findings[0].because else ""

    @property
    def settings(self) -> Settings:
        """What is replayed."""
        return planned_settings(self.ledger.settings, self.ledger.kv_plan)

    @property
    def kv_tokens(self) -> int:
        """Tokens the cache holds."""
        return self.ledger.kv_plan.tokens


def candidate_of(ledger: Ledger) -> Candidate:
    """The setting that a planned command has."""
    said = ledger.settings
    return Candidate(said.max_num_seqs, said.max_num_batched_tokens, ledger.kv_plan.block_size, said.utilization)


def launch_of(candidate: Candidate, base: Launch, usual_block: int) -> Launch:
    """The command's settings with this candidate in them; a block size that vLLM takes by itself is not asked for."""
    return base._replace(
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        block_size=base.block_size if candidate.block_size == usual_block else candidate.block_size,
        utilization=candidate.gpu_memory_utilization,
    )


def plan_all(candidates: Iterable[Candidate], base: Ledger, replan: Replan) -> list[Option]:
    """Each candidate, planned; one that plan cannot describe is left out."""
    usual = base.kv_plan.block_size
    found = []
    for candidate in candidates:
        try:
            ledger, findings = replan(launch_of(candidate, base.settings, usual))
        except BadInput:
            continue
        found.append(Option(candidate, ledger, tuple(findings)))
    return found


def roomiest(options: Sequence[Option]) -> dict[tuple[int, int], Option]:
    """Of the safe ones, for each pair of requests at once and tokens in a step, the one with the largest cache.

    With the same two limits a larger cache admits sooner, preempts less and keeps more prefixes. That is where to begin, and
    not always where to end: the search looks at smaller ones, too.
    """
    found: dict[tuple[int, int], Option] = {}
    for option in options:
        key = option.candidate[:2]
        if option.is_safe and (key not in found or _room(option) > _room(found[key])):
            found[key] = option
    return found


def _room(option: Option) -> tuple[int, int, float]:
    """More tokens first; of equal caches the smaller blocks, then the smaller share of the card."""
    candidate = option.candidate
    return option.kv_tokens, -candidate.block_size, -candidate.gpu_memory_utilization


def sheet_times(ledger: Ledger, shape: ModelShape, settings: Settings) -> StepTime | None:
    """Step times by the data sheet of the card; None where none gives its rates."""
    try:
        card = gpu_named(ledger.card.name)
    except BadInput:
        return None
    total, routed = parameters(shape), routed_parameters(shape)
    counts = (shape.moe.experts, shape.moe.experts_per_token) if shape.moe is not None else (None, None)
    sheet = Sheet(
        weights_bytes=ledger.weights.value,
        block_bytes=ledger.kv_plan.bytes_per_block,
        parameters=total,
        routed=routed,
        experts=experts_of(total, routed, *counts),
        cards=ledger.settings.tensor_parallel,
        stages=ledger.settings.pipeline_parallel,
        is_eager=ledger.settings.enforce_eager,
    )
    return sheet_time(sheet, card, settings)

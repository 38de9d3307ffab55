"""Lints files that start vLLM: flags, the traps of a deployment and, where the card is known, the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plimsoll.errors import PlimsollError
from plimsoll.findings import Severity
from plimsoll.launch.check_flags import check, with_branches
from plimsoll.launch.command_line import config_of, engine_meant
from plimsoll.lint.deployment import Deployment, deployments_in
from plimsoll.lint.traps import Trap, traps_of
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import MemoryPlan, plan_launch


@dataclass(frozen=True, slots=True)
class LintedServer:
    """One server of a file: what it was judged by, and the traps."""

    source: str
    model: str | None
    vllm: str
    because: str
    card: str | None  # None: not known, so nothing was planned
    traps: tuple[Trap, ...]


def lint_file(path: str, options: ServerOptions) -> list[LintedServer]:
    """Every vLLM server in a file; BadInput where it cannot be read or starts none."""
    return [_linted(deployment, options) for deployment in deployments_in(path)]


def _linted(at: Deployment, options: ServerOptions) -> LintedServer:
    folder = str(Path(at.file).parent)
    engine = engine_meant(at.launch, options.vllm)
    checked = with_branches(check(at.launch, engine, None, config_of(at.launch, folder)))
    card = options.gpu or at.card
    plan, problem = None, ""
    if card is not None or options.gpu_memory_gib is not None:
        planned = ServerOptions(
            gpu=card, gpu_memory_gib=options.gpu_memory_gib, gpus=options.gpus, used_gib=options.used_gib, vllm=engine.asked
        )
        try:
            plan = plan_launch(planned, at.launch, folder, learned=False)
        except PlimsollError as error:
            problem = str(error)
    weights = plan.ledger.weights.value * max(1, plan.ledger.settings.gpus) if plan is not None else None
    traps = [*traps_of(at, checked, weights), *(_of_plan(at, plan) if plan is not None else ())]
    if problem:
        line = at.lines.get("command", at.line)
        why = "the plan needs the model's shape and a card that is known"
        trap = Trap(
            at.file, line, at.launch.source, "plan.unknown", Severity.INFO, f"not planned: {problem}", why, "plimsoll plan"
        )
        traps.append(trap)
    traps.sort(key=lambda trap: (trap.line, trap.rule))
    return LintedServer(at.launch.source, checked.model, engine.release, engine.because or "asked for", card, tuple(traps))


def _of_plan(at: Deployment, plan: MemoryPlan) -> Iterator[Trap]:
    """What will go wrong with the memory, by plan's own findings; flags are judged already."""
    for finding in plan.findings:
        if finding.code == "startup.bad-flag" or finding.severity is Severity.INFO:
            continue
        fix = "; ".join(f"{advice.flag} {advice.value}: {advice.why}" for advice in plan.advice[:2]) or "docs/plan.md"
        line = at.lines.get("command", at.line)
        yield Trap(at.file, line, at.launch.source, str(finding.code), finding.severity, finding.title, finding.because, fix)

"""A failure with only what a test knows of it: everything else is unknown."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.doctor.rules.symptoms import Complaint, OutOfMemory
from plimsoll.doctor.rules.facts import Case, LogFacts, PlanSays
from plimsoll.doctor.rules.timeline import Frame, Progress, Raised, Step
from plimsoll.findings import Code
from plimsoll.vllm.failure_texts import TEXTS
from plimsoll.vllm.log_lines import Measured

_BY_NAME = {text.name: text for text in TEXTS}


def case_of(
    code: Code,
    *,
    line: str = "",
    text: str | None = None,
    kind: str = "RuntimeError",
    frames: tuple[Frame, ...] | None = None,
    step: str | None = None,
    oom: OutOfMemory | None = None,
    version: str | None = None,
    flags: Mapping[str, str] | None = None,
    measured: Measured | None = None,
    scheduler: Mapping[str, float] | None = None,
    plan: PlanSays | None = None,
) -> Case:
    """The case, made of the real types."""
    raised = None if frames is None else Raised(kind, line, frames, "", 0, 0, None, in_logging=False)
    complaint = Complaint(0, code, 0.9, _BY_NAME[text] if text else None, raised, Step(step, code, 0.9) if step else None, oom)
    facts = LogFacts(version, None, None, flags or {}, measured or Measured(), (), scheduler or {}, None, Progress.UNKNOWN)
    return Case(complaint, facts, line, plan)

"""A failure with only what a test knows of it: everything else is unknown."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.doctor.case import Case, PlanSays
from plimsoll.doctor.complaints import Complaint
from plimsoll.doctor.facts import LogFacts
from plimsoll.doctor.oom_text import OutOfMemory
from plimsoll.doctor.steps import Progress, Step
from plimsoll.doctor.tracebacks import Frame, Raised
from plimsoll.domain.finding import Code
from plimsoll.domain.measured import Measured
from plimsoll.engine.failure_texts import TEXTS

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

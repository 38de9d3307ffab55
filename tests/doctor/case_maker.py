"""A failure with only what a test knows of it: everything else is unknown."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.doctor.rules.facts import FailureCase, LogFacts, PlanFigures
from plimsoll.doctor.rules.out_of_memory import OomFigures
from plimsoll.doctor.rules.root_cause import Symptom
from plimsoll.doctor.rules.timeline import FailedStep, LoggedException, ServerProgress, TracebackFrame
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
    frames: tuple[TracebackFrame, ...] | None = None,
    step: str | None = None,
    oom: OomFigures | None = None,
    version: str | None = None,
    flags: Mapping[str, str] | None = None,
    measured: Measured | None = None,
    scheduler: Mapping[str, float] | None = None,
    plan: PlanFigures | None = None,
) -> FailureCase:
    """The case, made of the real types."""
    raised = None if frames is None else LoggedException(kind, line, frames, "", 0, 0, None, in_logging=False)
    symptom = Symptom(
        0, code, 0.9, _BY_NAME[text] if text else None, raised, FailedStep(step, code, 0.9) if step else None, oom
    )
    return FailureCase(symptom, facts_with(version, flags, measured, scheduler), line, plan)


def facts_with(
    version: str | None = None, flags: Mapping[str, str] | None = None, measured: Measured | None = None,
    scheduler: Mapping[str, float] | None = None,
) -> LogFacts:  # fmt: skip
    """Facts of a log that says no more than this."""
    return LogFacts(version, None, None, flags or {}, measured or Measured(), scheduler or {}, None, ServerProgress.UNKNOWN)

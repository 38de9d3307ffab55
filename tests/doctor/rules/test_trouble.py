"""What counts as a shortage of memory, and which "no use" cannot stand beside it."""

from __future__ import annotations

from plimsoll.doctor.rules.diagnose import InputVerdict, diagnose
from plimsoll.findings import Code, Finding, Remedy, Severity
from tests.each import each

NONE = "any memory setting: this is not a memory failure"
WAIT = "changing memory settings before it is known who killed it"
ALONE = "a restart: it changes nothing"
STOP = Finding(Code.OTHER_STOPPED_BY_OPERATOR, Severity.INFO, 0.9, "t", "b", not_a_remedy=(NONE, WAIT, ALONE))
STORM = Finding(Code.KV_PREEMPTION_STORM, Severity.WARNING, 0.5, "t", "b", remedy=(Remedy("more cache", "it is full"),))
PAGE = {"is": "metrics", "engines": [{"model": "m"}]}


@each(("beside", "facts", "memory", "kept"), [
    ([], PAGE, False, (NONE, WAIT, ALONE)),
    ([], {}, None, (WAIT, ALONE)),
    ([STORM], PAGE, None, (ALONE,)),
    ([STORM._replace(confidence=0.7)], PAGE, True, (ALONE,)),
    ([STORM._replace(severity=Severity.INFO)], PAGE, False, (NONE, WAIT, ALONE)),
])  # fmt: skip
def test_no_finding_denies_what_another_advises(
    beside: list[Finding], facts: dict[str, object], memory: bool | None, kept: tuple[str, ...]
) -> None:
    """Nor does one deny a memory failure where the answer is that it cannot be told; a mere word is no shortage."""
    told = diagnose([], [InputVerdict("page", [STOP, *beside], facts)])
    assert told.memory_failure is memory
    assert next(one for one in told.findings if one.code is STOP.code).not_a_remedy == kept

"""What counts as a shortage of memory, and which "no use" cannot stand beside it."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.diagnose import is_memory_trouble, without_denials
from plimsoll.findings import Code, Finding, Remedy, Severity

NONE = "any memory setting: this is not a memory failure"
WAIT = "changing memory settings before it is known who killed it"
ALONE = "a restart: it changes nothing"
STOP = Finding(Code.OTHER_STOPPED_BY_OPERATOR, Severity.INFO, 0.9, "t", "b", not_a_remedy=(NONE, WAIT, ALONE))
STORM = Finding(Code.KV_PREEMPTION_STORM, Severity.WARNING, 0.5, "t", "b", remedy=(Remedy("more cache", "it is full"),))


@pytest.mark.parametrize(
    ("beside", "memory", "kept"),
    [
        ([], False, (NONE, WAIT, ALONE)),
        ([], None, (WAIT, ALONE)),
        ([STORM], None, (ALONE,)),
        ([STORM], True, (ALONE,)),
        ([STORM._replace(severity=Severity.INFO)], False, (NONE, WAIT, ALONE)),
    ],
)
def test_no_finding_denies_what_another_advises(beside: list[Finding], memory: bool | None, kept: tuple[str, ...]) -> None:
    """Nor does one deny a memory failure where the answer is that it cannot be told."""
    assert next(without_denials([STOP, *beside], memory=memory)).not_a_remedy == kept


def test_a_word_about_memory_is_no_trouble() -> None:
    """What is only worth a word, and what is of something else, is no shortage."""
    assert is_memory_trouble(STORM)
    assert not is_memory_trouble(STORM._replace(severity=Severity.INFO))
    assert not is_memory_trouble(STOP._replace(severity=Severity.CRITICAL))

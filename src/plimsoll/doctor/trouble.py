"""What counts as a shortage of memory beside a cause, and which "no use" cannot stand beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from plimsoll.domain.finding import Finding, Severity

SURE = 0.6  # from here on a shortage is shown; below it is a hint
_DENIES = re.compile(r"(?:any |changing |GPU )?memory settings?\b")
_IS_NONE = "this is not a memory failure"


def is_trouble(finding: Finding) -> bool:
    """Whether it says that a server is short of memory, also where nothing has failed of it yet."""
    return finding.code.is_memory and finding.severity is not Severity.INFO


def without_denials(findings: Sequence[Finding], *, memory: bool | None) -> Iterator[Finding]:
    """The findings, none of which calls memory settings useless beside one that wants them changed.

    That it is no memory failure at all is said only where that is the answer.
    """
    wanted = any(is_trouble(one) and one.remedy for one in findings)
    for finding in findings:
        kept = tuple(
            one
            for one in finding.not_a_remedy
            if not (_DENIES.match(one) and wanted and not finding.code.is_memory)
            and not (memory is not False and _IS_NONE in one)
        )
        yield finding if kept == finding.not_a_remedy else finding._replace(not_a_remedy=kept)

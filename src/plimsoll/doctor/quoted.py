"""Text that only quotes a log: what `plimsoll doctor` printed before, and a page that somebody wrote about failures.

Both name errors that nobody had. A written page is told by its Markdown, and only where no record of a log stands in it:
somebody may have pasted one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plimsoll.domain.log import Line, Log

_HEAD = re.compile(r"memory failure: (?:yes|no|cannot be told)(?:   \(|\s*$)")
# The lines of a report that are not indented; what it quotes has lost the level that a log's record has.
_GOES_ON = re.compile(
    r"\s|$|\d{1,3}\. [a-z-]{1,20}\.[a-z-]{1,40} \((?:critical|warning|info), |and \d{1,4} more: --json|"
    r"The start's own figures: |plan computes for this command: |Started with: |Harmless, whatever it says: |The page shows: |"
    r"Looked at: |The snapshot's device |Read |Remark: |Note: |To settle it, collect:|"
    r"Nothing wrong was found\.|No failure was recognised\."
)
_HEADING = re.compile(r"#{1,6} [A-Za-z]")
_MARKED = re.compile(r"`[^`]{1,200}`|\]\([^)\s]{1,200}\)")  # code within a sentence, a link
_QUOTES = re.compile(r"`|\"[^\"]{4,}\"")
FEWEST_HEADINGS = 2


def without_quotes(log: Log) -> tuple[Log, bool]:
    """The log with every line blanked that only quotes one, and whether it is a page that somebody wrote."""
    lines = _without_reports(log.lines)
    prose = _prose(lines)
    if prose:
        lines = [line._replace(text="", process="") if at in prose else line for at, line in enumerate(lines)]
    return (log if lines is log.lines else log._replace(lines=lines)), bool(prose)


def _without_reports(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines without earlier reports of this command."""
    if not any("memory failure: " in line.text for line in lines):
        return lines
    kept: list[Line] = []
    inside = False
    for line in lines:
        goes_on = inside and not line.level and (bool(line.process) or _GOES_ON.match(line.text) is not None)
        inside = goes_on or _HEAD.match(line.text) is not None
        kept.append(line._replace(text="", process="") if inside else line)
    return kept


def _prose(lines: Sequence[Line]) -> frozenset[int]:
    """The lines of a page in Markdown that quote something; none where a program speaks in it, or it is no such page."""
    first = next((line.text for line in lines if line.text.strip()), "")
    if not first.startswith(("# ", "<")) or any(map(_is_record, lines)):
        return frozenset()
    headings = sum(_HEADING.match(line.text) is not None for line in lines)
    if headings < FEWEST_HEADINGS or not any(_MARKED.search(line.text) for line in lines):
        return frozenset()
    return frozenset(at for at, line in enumerate(lines) if _QUOTES.search(line.text))


def _is_record(line: Line) -> bool:
    return bool(line.level or line.process) or "Traceback (most recent call last)" in line.text

"""What is left of a server as text: lines with who said them and when, whatever they were wrapped in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """One line as the program said it: colours, container wrapping and vLLM's own prefix are taken off `text`."""

    number: int | None  # counted from 1 in the file as it lies there; None where it cannot be known
    process: str  # "EngineCore_DP0 pid=123", "Worker_TP1 pid=7", "VllmWorker rank=0 pid=1"; "" where nobody is named
    level: str  # DEBUG, INFO, WARNING, ERROR, CRITICAL; "" where the line does not say
    at: float | None  # seconds; comparable within one file only (vLLM prints no year)
    text: str  # at most `LONGEST` characters; indentation after the prefix is kept
    server: str = ""  # the container, pod or unit the line came from, where the wrapping names one


class Log(NamedTuple):
    """One text input: a server's log, kernel lines, the output of a tool, or several of them in one file."""

    source: str  # as the user named it
    lines: Sequence[Line]
    skipped: tuple[tuple[int, int], ...] = ()  # (index into lines, lines left out before it): a huge file's uneventful middle
    size_bytes: int | None = None


LONGEST = 16 << 10  # characters of one line that are kept: a dumped configuration is long, a progress bar endless

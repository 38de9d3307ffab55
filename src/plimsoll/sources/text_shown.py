"""What a terminal would have shown of a line: colours taken off, progress bars that overwrite themselves shown once."""

from __future__ import annotations

import re
from functools import cache

_PIECES = 400  # of one line, from its end


@cache
def _colours() -> re.Pattern[str]:
    # The escape itself, or what is left of it where a collector or a copy spelled it out.
    return re.compile(
        r"(?:\x1b|\^\[|\\u001[bB]|\\x1[bB]|\\033|#033)\[[0-9;:?]{0,24}[A-Za-z]|\x1b\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|\x1b[()][0-9A-B]"
    )


@cache
def _lost_escape() -> re.Pattern[str]:
    # "[0;36m(APIServer pid=1)[0;0m text": the escape character was lost on the way.
    return re.compile(r"(?:^|(?<=\)))\[(?:\d{1,2};){0,2}\d{1,2}m|\[(?:\d{1,2};){0,2}\d{1,2}m(?=\()")


@cache
def _progress() -> re.Pattern[str]:
    return re.compile(
        r"\d{1,3}%(?:\s{0,3}\||\s{1,3}Completed)|\d{1,9}/\d{1,9} {1,3}\[|\d(?:it/s|s/it)\b|"
        r"^\s{0,8}\d{1,3}(?:\.\d{1,2})?%\s{0,4}$"
    )


def without_colours(text: str) -> str:
    """The text without terminal escapes."""
    if "\x1b" in text or "^[[" in text or "\\u001" in text or "\\x1" in text or "\\033[" in text or "#033[" in text:
        text = _colours().sub("", text)
    if "m(" in (start := text[:200]) or ")[" in start or start.startswith("["):
        text = _lost_escape().sub("", text)
    return text


def is_progress(text: str) -> bool:
    """Whether this is one frame of a progress bar and no message."""
    return _progress().search(text[:400]) is not None and "rror" not in text and "ERROR" not in text


def shown(text: str) -> list[str]:
    """The messages of one line: pieces after a carriage return, of a run of progress bars only the last."""
    if "\r" not in text:
        return [text]
    pieces = [piece for piece in text.split("\r") if piece.strip()][-_PIECES:] or [""]
    kept: list[str] = []
    was_progress = False
    for piece in pieces:
        now = is_progress(piece)
        if now and was_progress:
            kept[-1] = piece
        else:
            kept.append(piece)
        was_progress = now
    return kept

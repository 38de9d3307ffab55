"""Lines that fit a screen."""

from __future__ import annotations

import re

WIDTH = 110


def wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most WIDTH, broken at blanks; a word longer than that keeps its line."""
    lines: list[str] = []
    current = ""
    for blank, word in re.findall(r"(\s*)(\S+)", text):
        if current.strip() and len(current) + len(blank) + len(word) > WIDTH:
            lines.append(current)
            current = indent + word
        else:
            current += blank + word
    return [*lines, current]

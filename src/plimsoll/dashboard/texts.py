"""Texts as the page gets them: without secrets, of bounded length, and with nothing in them that turns letters around."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from plimsoll.domain.redaction import redact
from plimsoll.domain.user_text import hide_user_text

LONGEST = 300
DEEPEST = 6
MOST_ITEMS = 200
MORE = "…"


@lru_cache(8192)  # the same few words for hundreds of engines, and looking for secrets is the slow part
def _shown(text: str) -> str:
    safe = "".join(letter if letter.isprintable() else _named(letter) for letter in hide_user_text(redact(text)).strip())
    return safe if len(safe) <= LONGEST else safe[: LONGEST - 1] + MORE


def _named(letter: str) -> str:
    """What cannot be seen, or moves what can, by its number; line breaks and tabs are only space."""
    return " " if letter in "\n\r\t" else f"[U+{ord(letter):04X}]"


def shown(text: str) -> str:
    """One text for people, whoever wrote it."""
    cut = text[: 4 * LONGEST]
    found = _shown(cut)
    return found if len(cut) == len(text) or found.endswith(MORE) else found[: LONGEST - 1] + MORE


def tidy(value: object, depth: int = DEEPEST) -> object:
    """Plain data with every text in it shown; too deep or too many is cut, and says so."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if value is None or isinstance(value, bool | int):
        return value
    if depth == 0:
        return MORE
    if isinstance(value, Mapping):
        pairs = list(value.items())[:MOST_ITEMS]
        return {shown(str(name)): tidy(inner, depth - 1) for name, inner in pairs}
    if isinstance(value, list | tuple):
        return [tidy(inner, depth - 1) for inner in value[:MOST_ITEMS]] + ([MORE] if len(value) > MOST_ITEMS else [])
    return shown(str(value))

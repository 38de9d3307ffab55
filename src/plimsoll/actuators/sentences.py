"""What others say, as it may stand in a sentence of ours."""

from __future__ import annotations

from plimsoll.actuators.bundle_text import shown_line
from plimsoll.domain.printable import printable

LONGEST = 300


def quoted_words(text: str, most: int = LONGEST) -> str:
    """One line without secrets and without anything that a terminal would obey."""
    shown = shown_line(text[: 10 * most])
    return printable(shown).strip()[:most]

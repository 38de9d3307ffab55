"""Text from outside on its way to a terminal or a page."""

from __future__ import annotations


def printable(text: str, instead: str = " ") -> str:
    """The text without anything that a terminal would obey, in one line: each such letter becomes `instead`."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else instead for letter in text)

"""Cuts a line into words where no shell does it: in Compose files and Dockerfiles."""

from __future__ import annotations

import re

from plimsoll.errors import BadInput

_PART = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^ \t\r\n'\"\\]+)|([ \t\r\n]+)", re.DOTALL)
_ESCAPED = re.compile(r"\\([\"\\])")


def plain_words(text: str, where: str) -> list[str]:
    """The same words as `shlex.split` gives, whose time grows with the square of a word's length."""
    words: list[list[str]] = []
    at, ended = 0, True
    while at < len(text):
        found = _PART.match(text, at)
        if found is None:
            raise BadInput(f"{where}: a quote or backslash in the command is never finished")
        single, double, escaped, plain, blanks = found.groups()
        at = found.end()
        if blanks is None:
            if ended:
                words.append([])
            words[-1].append(_ESCAPED.sub(r"\1", double) if double is not None else single or escaped or plain or "")
        ended = blanks is not None
    return ["".join(parts) for parts in words]

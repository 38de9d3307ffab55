"""Fills variables into the texts of Compose files and Dockerfiles, and cuts their commands into words without a shell."""

from __future__ import annotations

import re
from collections.abc import Mapping

from plimsoll.errors import BadInput, TooLarge

_MARK = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(:?[-+?])?)")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]")
_BRACE = re.compile(r"[{}]")
_DEPTH_MAX = 4
_BRACES_MAX = 16


class Growth:
    """A budget for the text that variables add: a few lines of `ENV A=$A$A` would otherwise fill the memory."""

    def __init__(self, characters_max: int = 4 * 1024 * 1024) -> None:
        self._left = characters_max

    def add(self, value: str) -> str:
        """The value itself, once it is counted."""
        self._left -= len(value) + 1
        if self._left < 0:
            raise TooLarge("the variables multiply beyond what is read")
        return value


def interpolate(text: str, variables: Mapping[str, str], growth: Growth, depth: int = 0) -> tuple[str, list[str]]:
    """The text with what is known filled in, and the names that are not; `$$` stands for one `$`."""
    done: list[str] = []
    missing: list[str] = []
    at = 0
    while found := _MARK.search(text, at):
        done.append(text[at : found.start()])
        at = found.end()
        escaped, plain, name, operator = found.groups()
        argument = ""
        if name is not None:
            end = _closing(text, at)
            if end < 0 or (operator is None and end != at):
                done.append(found.group())
                continue
            argument, at = text[at:end], end + 1
        if escaped:
            done.append("$")
            continue
        value = variables.get(plain or name)
        absent = value is None or (bool(operator) and operator.startswith(":") and not value)
        if operator and operator[-1] != "?" and absent == (operator[-1] == "-"):
            if depth < _DEPTH_MAX:
                argument, inner = interpolate(argument, variables, growth, depth + 1)
                missing += inner
            done.append(argument)
        elif operator and operator[-1] == "+":
            continue
        elif value is None:
            missing.append(plain or name)
            done.append(f"${{{name}}}" if name and _IDENTIFIER.match(text, at) else f"${plain or name}")
        else:
            done.append(growth.add(value))
    done.append(text[at:])
    return "".join(done), missing


def _closing(text: str, at: int) -> int:
    """Where the brace that is open at `at` closes, or -1; looks no further than a sane default is long and deep."""
    depth = 1
    for found in _BRACE.finditer(text, at, at + 2000):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
        if depth > _BRACES_MAX:
            break
    return -1


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

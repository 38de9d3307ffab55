"""Finds where a shell's brackets and here-documents end, without recursion and in one pass."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"""[\\'"`$(){}#<\n]""")
_HERE = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s'\"<>;&|()]+))")
_BACKTICK_STOP = re.compile(r"[\\`]")
_ANSI_STOP = re.compile(r"[\\']")

# What is open at a point inside `$(...)` or `${...}`.
_COMMAND, _GROUP, _BRACE, _QUOTED_BRACE, _QUOTE = range(5)
_PARENTHESES = (_COMMAND, _GROUP)
_BRACES = (_BRACE, _QUOTED_BRACE)
_INSIDE_QUOTES = (_QUOTE, _QUOTED_BRACE)


def _after(stop: re.Pattern[str], text: str, at: int) -> int:
    """Just after the first unescaped stop character from `at` on, or -1."""
    while found := stop.search(text, at):
        if text[found.start()] != "\\":
            return found.end()
        at = found.start() + 2
    return -1


def after_backtick(text: str, at: int) -> int:
    """Just after the backtick that ends what began before `at`, or -1."""
    return _after(_BACKTICK_STOP, text, at)


def after_ansi(text: str, at: int) -> int:
    """Just after the quote that ends the `$'...'` whose text starts at `at`, or -1."""
    return _after(_ANSI_STOP, text, at)


def after_here_documents(text: str, at: int, pending: list[tuple[str, bool]]) -> int:
    """Just after the bodies of these (delimiter, strips tabs) here-documents; an unfinished one ends with the text."""
    for delimiter, strip in pending:
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line = text[at:end].lstrip("\t") if strip else text[at:end]
            at = end + 1
            if line == delimiter:
                break
    return min(at, len(text))


class _Scan:
    """One walk from an opening bracket to the one that closes it."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self._open: list[int] = []
        self._pending: list[tuple[str, bool]] = []
        self._at = at

    def end(self) -> int:
        self._dollar_or_bracket()
        while self._open:
            found = _SPECIAL.search(self._text, self._at)
            if found is None:
                return -1
            self._at = found.start()
            self._step(found.group())
            if self._at < 0:
                return -1
        return self._at

    def _dollar_or_bracket(self) -> None:
        """Opens what `$(`, `$((`, `${`, `$'`, `<(` or `>(` at this point opens; else steps over one character."""
        text, at = self._text, self._at
        quoted = bool(self._open) and self._open[-1] in _INSIDE_QUOTES
        if text.startswith("((", at + 1) and text[at] == "$":
            self._open += [_GROUP, _GROUP]  # arithmetic: `<<` in there is a shift, not a here-document
            self._at = at + 3
        elif text.startswith("(", at + 1):
            self._open.append(_COMMAND)
            self._at = at + 2
        elif text.startswith("{", at + 1):
            self._open.append(_QUOTED_BRACE if quoted else _BRACE)
            self._at = at + 2
        elif text.startswith("'", at + 1) and not quoted:
            self._at = after_ansi(text, at + 2)
        else:
            self._at = at + 1

    def _step(self, char: str) -> None:
        text, at, top = self._text, self._at, self._open[-1]
        self._at = at + 1
        if char == "\\":
            self._at = at + 2
        elif char == "$":
            self._at = at
            self._dollar_or_bracket()
        elif char == "`":
            self._at = after_backtick(text, at + 1)
        elif char == "'" and top not in _INSIDE_QUOTES:
            end = text.find("'", at + 1)
            self._at = end + 1 if end >= 0 else -1
        elif char == '"':
            if top == _QUOTE:
                self._open.pop()
            else:
                self._open.append(_QUOTE)
        elif char == "(" and top in _PARENTHESES:
            self._open.append(_GROUP)
        elif (char == ")" and top in _PARENTHESES) or (char == "}" and top in _BRACES):
            self._open.pop()
        elif top == _COMMAND:
            self._inside_command(char)

    def _inside_command(self, char: str) -> None:
        """Steps over comments and here-documents: an apostrophe in them is not a quote."""
        text, at = self._text, self._at - 1
        if char == "#" and text[at - 1] in " \t\n;(":
            end = text.find("\n", at)
            self._at = end if end >= 0 else -1
        elif char == "<" and (here := here_document(text, at)):
            delimiter, strip, self._at = here
            self._pending.append((delimiter, strip))
        elif char == "\n" and self._pending:
            self._at = after_here_documents(text, at + 1, self._pending)
            self._pending = []


def here_document(text: str, at: int) -> tuple[str, bool, int] | None:
    """The delimiter of the `<<` at `at`, whether tabs are stripped, and where it ends; None where there is none."""
    if text.startswith("<<<", at):
        return None
    found = _HERE.match(text, at)
    if found is None:
        return None
    dash, single, double, plain = found.groups()
    delimiter = next(name for name in (single, double, plain) if name is not None)
    return delimiter, dash == "-", found.end()


def closing(text: str, at: int) -> int:
    """Just after the bracket that closes the `$(`, `${`, `<(` or `>(` at `at`, or -1 when nothing does."""
    return _Scan(text, at).end()

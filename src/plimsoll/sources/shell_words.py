"""Cuts a shell script into words and operators; runs and expands nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.sources.shell_brackets import after_ansi, after_backtick, after_here_documents, closing, here_document


class Text(NamedTuple):
    """Characters that stand for themselves."""

    text: str
    quoted: bool


class Parameter(NamedTuple):
    """`$NAME` or `${NAME...}`; `operator` is None where we do not know what the braces ask for."""

    source: str
    name: str
    quoted: bool
    subscript: str = ""
    operator: str | None = ""
    argument: tuple[Part, ...] = ()


class Substitution(NamedTuple):
    """`$(...)`, backticks, `$((...))`, `<(...)`: what only running it could tell."""

    source: str
    quoted: bool


Part = Text | Parameter | Substitution


class Word(NamedTuple):
    """One word as written; `elements` is set for `NAME=(...)`."""

    parts: tuple[Part, ...]
    line: int
    elements: tuple[Word, ...] | None = None

    @property
    def keyword(self) -> str | None:
        """The word where it is bare text, as reserved words must be."""
        match self.parts:
            case (Text(text, quoted=False),) if self.elements is None:
                return text
        return None


class Operator(NamedTuple):
    """`;`, `|`, a newline...; a redirection's target is the word after it."""

    text: str
    line: int
    redirects: bool = False


_DEPTH_MAX = 8  # ${A:-${B:-...}} deeper than this is left as it is written
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_PLAIN = re.compile(r"[^ \t\n\\'\"$`;&|()<>]+")
_PLAIN_QUOTED = re.compile(r"[^\\\"$`]+")
_PLAIN_ARGUMENT = re.compile(r"[^\\'\"$`]+")
_REDIRECT = re.compile(r"[0-9]*(?:<<<|<>|<&|<|>>|>&|>\||>)|&>>?")
_OPERATOR = re.compile(r";;&|;;|;&|;|&&|&|\|\||\|&|\||\(|\)")
_ARITHMETIC = re.compile(r"\(\([^\n]{0,200}?\)\)")  # in there `<<` shifts and `<` compares
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]")
_BRACED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])(?:\[([@*]|[0-9]{1,6})\])?(:?[-=+?])?")
_ANSI = re.compile(r"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|(.))", re.DOTALL)
_ANSI_LETTERS = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _ansi_character(found: re.Match[str]) -> str:
    octal, *hexadecimal, letter = found.groups()
    if letter is not None:
        return _ANSI_LETTERS.get(letter, letter if letter in "\\'\"?" else found.group())
    code = int(octal, 8) & 0xFF if octal else int(next(digits for digits in hexadecimal if digits), 16)
    return chr(code) if 0 < code < 0x110000 and not 0xD800 <= code < 0xE000 else found.group()


class Reader:
    """Reads words from a text, from left to right; every quote and bracket must end."""

    def __init__(self, text: str, first_line: int = 1, depth: int = 0) -> None:
        self._text = text
        self._at = 0
        self._first_line = self._line = first_line
        self._line_at = 0  # the position that `_line` is true for
        self._depth = depth

    def tokens(self) -> Iterator[Word | Operator]:
        """Every word and operator in order; comments, blanks and here-documents are left out."""
        text, pending = self._text, list[tuple[str, bool]]()
        while (blanks := _BLANKS.match(text, self._at)) or self._at < len(text):
            if blanks:
                self._at = blanks.end()
                continue
            char, line = text[self._at], self._line_here()
            if char == "\n":
                yield Operator("\n", line)
                self._at = after_here_documents(text, self._at + 1, pending)
                pending = []
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif self._is_process_substitution():
                yield self._word(line)
            elif arithmetic := _ARITHMETIC.match(text, self._at):
                yield Word((Substitution(arithmetic.group(), quoted=True),), line)
                self._at = arithmetic.end()
            elif redirect := _REDIRECT.match(text, self._at):
                if here := here_document(text, redirect.end() - 1):
                    delimiter, strip, self._at = here
                    pending.append((delimiter, strip))
                else:
                    self._at = redirect.end()
                    yield Operator(redirect.group(), line, redirects=True)
            elif operator := _OPERATOR.match(text, self._at):
                self._at = operator.end()
                yield Operator(operator.group(), line)
            else:
                yield self._word(line)

    def _line_here(self) -> int:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._line

    def _never_closed(self, what: str, at: int) -> BadInput:
        line = self._first_line + self._text.count("\n", 0, at)
        return BadInput(f"line {line}: the {what} that opens here is never closed")

    def _is_process_substitution(self) -> bool:
        return self._text.startswith(("<(", ">("), self._at)

    def _word(self, line: int) -> Word:
        parts: list[Part] = []
        if self._is_process_substitution():
            self._substitution(parts, quoted=True)
        self._collect(parts, _PLAIN)
        match parts:
            case [Text(text, quoted=False)] if _ARRAY.fullmatch(text) and self._text.startswith("(", self._at):
                return Word(tuple(parts), line, self._elements())
        return Word(tuple(parts), line)

    def _elements(self) -> tuple[Word, ...]:
        """The words of `NAME=(...)`; newlines and comments may stand between them."""
        start, text = self._at, self._text
        self._at += 1
        elements: list[Word] = []
        while self._at < len(text):
            if blanks := _BLANKS.match(text, self._at):
                self._at = blanks.end()
            elif (char := text[self._at]) == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif char == ")":
                self._at += 1
                return tuple(elements)
            elif char in "\n;&|(<>":
                self._at += 1  # only the newline is allowed here; what bash would refuse we step over
            else:
                parts: list[Part] = []
                line = self._line_here()
                self._collect(parts, _PLAIN)
                elements.append(Word(tuple(parts), line))
        raise self._never_closed("list", start)

    def _collect(self, parts: list[Part], plain: re.Pattern[str]) -> None:
        """Adds parts until a character that neither `plain` nor quoting takes."""
        text = self._text
        while self._at < len(text):
            if found := plain.match(text, self._at):
                parts.append(Text(found.group(), quoted=False))
                self._at = found.end()
                continue
            char = text[self._at]
            if char == "\\":
                following = text[self._at + 1 : self._at + 2]
                if following != "\n":
                    parts.append(Text(following or "\\", quoted=True))
                self._at += 2
            elif char == "'":
                end = text.find("'", self._at + 1)
                if end < 0:
                    raise self._never_closed("single quote", self._at)
                parts.append(Text(text[self._at + 1 : end], quoted=True))
                self._at = end + 1
            elif char == '"':
                self._double_quoted(parts)
            elif char == "$":
                self._dollar(parts, quoted=False)
            elif char == "`":
                self._backticks(parts, quoted=False)
            else:
                return

    def _double_quoted(self, parts: list[Part]) -> None:
        start = self._at
        self._at += 1
        before = len(parts)
        self._quoted_run(parts)
        if len(parts) == before:
            parts.append(Text("", quoted=True))  # "" is a word
        if self._at >= len(self._text):
            raise self._never_closed("double quote", start)
        self._at += 1

    def _quoted_run(self, parts: list[Part]) -> None:
        """Adds what stands between double quotes, up to the closing one or the end."""
        text = self._text
        while self._at < len(text) and (char := text[self._at]) != '"':
            if found := _PLAIN_QUOTED.match(text, self._at):
                parts.append(Text(found.group(), quoted=True))
                self._at = found.end()
            elif char == "\\":
                following = text[self._at + 1 : self._at + 2]
                if following != "\n":
                    kept = following if following in ("$", "`", '"', "\\") else "\\" + following
                    parts.append(Text(kept, quoted=True))
                self._at += 2
            elif char == "$":
                self._dollar(parts, quoted=True)
            else:
                self._backticks(parts, quoted=True)

    def _backticks(self, parts: list[Part], *, quoted: bool) -> None:
        end = after_backtick(self._text, self._at + 1)
        if end < 0:
            raise self._never_closed("backtick", self._at)
        parts.append(Substitution(self._text[self._at : end], quoted))
        self._at = end

    def _substitution(self, parts: list[Part], *, quoted: bool) -> None:
        end = closing(self._text, self._at)
        if end < 0:
            raise self._never_closed(self._text[self._at : self._at + 2], self._at)
        parts.append(Substitution(self._text[self._at : end], quoted))
        self._at = end

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        text, at = self._text, self._at
        following = text[at + 1 : at + 2]
        if following == "(":
            self._substitution(parts, quoted=quoted)
        elif following == "{":
            end = closing(text, at)
            if end < 0:
                raise self._never_closed("${", at)
            parts.append(self._braced(text[at:end], following=text[end : end + 1], quoted=quoted))
            self._at = end
        elif following == "'" and not quoted:
            end = after_ansi(text, at + 2)
            if end < 0:
                raise self._never_closed("single quote", at)
            parts.append(Text(_ANSI.sub(_ansi_character, text[at + 2 : end - 1]), quoted=True))
            self._at = end
        elif found := _NAME.match(text, at + 1):
            parts.append(Parameter(text[at : found.end()], found.group(), quoted))
            self._at = found.end()
        else:
            if following != '"' or quoted:  # $"..." is a translated string: the quotes are all that matters
                parts.append(Text("$", quoted=True))
            self._at = at + 1

    def _braced(self, source: str, *, following: str, quoted: bool) -> Parameter:
        inner = source[2:-1]
        found = _BRACED.match(inner)
        if found is None or self._depth >= _DEPTH_MAX or (found.group(3) is None and found.end() < len(inner)):
            known = re.search(r"[A-Za-z_][A-Za-z0-9_]*", inner)
            return Parameter(source, known.group() if known else source, quoted, operator=None)
        name, subscript, operator = found.group(1), found.group(2) or "", found.group(3) or ""
        argument = Reader(inner[found.end() :], self._line_here(), self._depth + 1).argument(quoted=quoted)
        if not subscript and not _IDENTIFIER.match(following) and (len(name) == 1 or not name.isdigit()):
            source = f"${name}"  # the way people write it
        return Parameter(source, name, quoted, subscript, operator, argument)

    def argument(self, *, quoted: bool) -> tuple[Part, ...]:
        """All of this reader's text as what stands behind the operator of `${NAME:-...}`."""
        parts: list[Part] = []
        while quoted and self._at < len(self._text):
            self._quoted_run(parts)
            self._at += 1  # quotes inside "${A:-"x"}" group nothing
        self._collect(parts, _PLAIN_ARGUMENT)
        return tuple(parts)

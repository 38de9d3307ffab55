"""Cuts a shell script into words and operators; runs and expands nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from plimsoll.errors import BadInput

_HERE = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s'\"<>;&|()]+))")
_BACKTICK_STOP = re.compile(r"[\\`]")
_ANSI_STOP = re.compile(r"[\\']")


def _after(stop: re.Pattern[str], text: str, at: int) -> int:
    """Returns the place just after the first unescaped stop character from `at` on, or -1."""
    while found := stop.search(text, at):
        if text[found.start()] != "\\":
            return found.end()
        at = found.start() + 2
    return -1


def after_here_documents(text: str, at: int, pending: list[tuple[str, bool]]) -> int:
    """Returns the place after the bodies of these (delimiter, strips tabs) here-documents; an open one ends with the text."""
    for delimiter, strip in pending:
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line = text[at:end].lstrip("\t") if strip else text[at:end]
            at = end + 1
            if line == delimiter:
                break
    return min(at, len(text))


def here_document(text: str, at: int) -> tuple[str, bool, int] | None:
    """Returns the delimiter of the `<<` at `at`, whether tabs are stripped, and its end; None without a `<<`."""
    found = _HERE.match(text, at)
    if found is None or text.startswith("<<<", at):
        return None
    dash, *names = found.groups()
    return next(name for name in names if name is not None), dash == "-", found.end()


def joined_words(text: str, part: re.Pattern[str], read: Callable[[re.Match[str]], str], problem: str) -> list[str]:
    """Splits words at blanks, without a shell: `part` matches one piece of a word, and `read` returns its text."""
    words: list[list[str]] = []
    at, ended = 0, True
    while at < len(text):
        if text[at] in " \t\r\n\v\f":
            at, ended = at + 1, True
            continue
        found = part.match(text, at)
        if found is None:
            raise BadInput(problem)
        if ended:
            words.append([])
        words[-1].append(read(found))
        at, ended = found.end(), False
    return ["".join(pieces) for pieces in words]


class LiteralText(NamedTuple):
    text: str
    quoted: bool


class Parameter(NamedTuple):
    """`$NAME` or `${NAME...}`; `operator` is None where the operator in the braces is unknown."""

    source: str
    name: str
    quoted: bool
    subscript: str = ""
    operator: str | None = ""
    argument: tuple[WordPart, ...] = ()


class Substitution(NamedTuple):
    """`$(...)`, backticks, `$((...))`, `<(...)`: text that only a run could show."""

    source: str
    quoted: bool


WordPart = LiteralText | Parameter | Substitution


class Word(NamedTuple):
    """One word as written; `elements` is set for `NAME=(...)`."""

    parts: tuple[WordPart, ...]
    line: int
    elements: tuple[Word, ...] | None = None

    @property
    def keyword(self) -> str | None:
        """The word if it is bare text, as reserved words must be; else None."""
        match self.parts:
            case (LiteralText(text, quoted=False),) if self.elements is None:
                return text
        return None


class Operator(NamedTuple):
    """`;`, `|`, a newline...; a redirection's target is the word after it."""

    text: str
    line: int
    redirects: bool = False


_DEPTH_MAX = 40  # of brackets in brackets: $(a $(b ${C:-$D}))
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_PLAIN = re.compile(r"[^ \t\n\\'\"$`;&|()<>]+")
_PLAIN_QUOTED = re.compile(r"[^\\\"$`]+")
_PLAIN_IN_BRACES = {False: re.compile(r"[^\\'\"$`}]+"), True: re.compile(r"[^\\\"$`}]+")}  # outside and inside quotes
_ESCAPABLE = ("$", "`", '"', "\\")  # in double quotes; before anything else a backslash is itself
_PARENTHESIS = re.compile(r"[()]")
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

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = self._depth = 0
        self._line, self._line_at = 1, 0  # the line, and the position that it is true for
        # Their first lines and texts, as far as they were read, and whether the shell expands them.
        self.here_documents: list[tuple[int, str, bool]] = []

    def tokens(self) -> Iterator[Word | Operator]:
        """Yields every word and operator in order, without comments, blanks and here-documents."""
        text, pending = self._text, list[tuple[str, bool, bool]]()
        while (blanks := _BLANKS.match(text, self._at)) or self._at < len(text):
            if blanks:
                self._at = blanks.end()
                continue
            char, line = text[self._at], self._line_here()
            if char == "\n":
                yield Operator("\n", line)
                for each in pending:
                    start, self._at = self._at + 1, after_here_documents(text, self._at + 1, [each[:2]]) - 1
                    body = text[start : self._at].removesuffix(each[0])
                    body = re.sub(r"(?m)^\t+", "", body) if each[1] else body
                    self.here_documents.append((self._line_here() - text.count("\n", start, self._at), body, each[2]))
                self._at, pending = self._at + 1, []
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
                    pending.append((delimiter, strip, not re.search(r"[\"'\\]", text[redirect.start() : self._at])))
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
        line = 1 + self._text.count("\n", 0, at)
        return BadInput(f"line {line}: the {what} that opens here is never closed")

    def _is_process_substitution(self) -> bool:
        return self._text.startswith(("<(", ">("), self._at)

    def _word(self, line: int) -> Word:
        parts: list[WordPart] = []
        if self._is_process_substitution():
            self._substitution(parts, quoted=True)
        self._collect(parts, _PLAIN)
        match parts:
            case [LiteralText(text, quoted=False)] if _ARRAY.fullmatch(text) and self._text.startswith("(", self._at):
                return Word(tuple(parts), line, self._elements())
        return Word(tuple(parts), line)

    def _elements(self) -> tuple[Word, ...]:
        """Reads the words of `NAME=(...)`, with newlines and comments between them."""
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
                self._at += 1  # only the newline is allowed here; skip what bash would refuse
            else:
                parts: list[WordPart] = []
                line = self._line_here()
                self._collect(parts, _PLAIN)
                elements.append(Word(tuple(parts), line))
        raise self._never_closed("list", start)

    def _collect(self, parts: list[WordPart], plain: re.Pattern[str], *, quoted: bool = False, end: str = "") -> None:
        """Adds parts until `end`, or a character that neither `plain` nor quoting takes; `quoted`: inside double quotes."""
        text = self._text
        while self._at < len(text) and (char := text[self._at]) != end:
            if found := plain.match(text, self._at):
                parts.append(LiteralText(found.group(), quoted))
                self._at = found.end()
            elif char == "\\":
                following = text[self._at + 1 : self._at + 2]
                if following != "\n":
                    kept = following if following in _ESCAPABLE or not quoted else "\\" + following
                    parts.append(LiteralText(kept or "\\", quoted=True))
                self._at += 2
            elif char == "'":
                closing = text.find("'", self._at + 1)
                if closing < 0:
                    raise self._never_closed("single quote", self._at)
                parts.append(LiteralText(text[self._at + 1 : closing], quoted=True))
                self._at = closing + 1
            elif char == '"':
                start, before = self._at, len(parts)
                self._at += 1
                self._collect(parts, _PLAIN_QUOTED, quoted=True, end='"')
                if len(parts) == before:
                    parts.append(LiteralText("", quoted=True))  # "" is a word
                if self._at >= len(text):
                    raise self._never_closed("double quote", start)
                self._at += 1
            elif char == "$":
                self._dollar(parts, quoted=quoted)
            elif char == "`":
                self._backticks(parts, quoted=quoted)
            else:
                return

    def _backticks(self, parts: list[WordPart], *, quoted: bool) -> None:
        end = _after(_BACKTICK_STOP, self._text, self._at + 1)
        if end < 0:
            raise self._never_closed("backtick", self._at)
        if quoted or not re.fullmatch(r"`\s*#[^\n]*`", self._text[self._at : end]):  # a comment between two words is nothing
            parts.append(Substitution(self._text[self._at : end], quoted))
        self._at = end

    def _substitution(self, parts: list[WordPart], *, quoted: bool) -> None:
        """Adds `$(...)`, `$((...))`, `<(...)` or `>(...)`, as it is written."""
        text, start, depth = self._text, self._at, 0
        with self._deeper(start):
            if text.startswith("$((", start):  # arithmetic: `<<` in there is a shift, not a here-document
                for found in _PARENTHESIS.finditer(text, start):
                    depth, self._at = depth + (1 if found.group() == "(" else -1), found.end()
                    if not depth:
                        break
            else:
                self._at += 1
                for token in self.tokens():
                    depth += {"(": 1, ")": -1}.get(token.text, 0) if isinstance(token, Operator) else 0
                    if not depth:
                        break
        if depth:
            raise self._never_closed(text[start : start + 2], start)
        parts.append(Substitution(text[start : self._at], quoted))

    @contextmanager
    def _deeper(self, at: int) -> Iterator[None]:
        """Counts brackets inside brackets, each of which is read by a call of its own."""
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise self._never_closed(f"bracket in {_DEPTH_MAX} others", at)
        yield
        self._depth -= 1

    def _dollar(self, parts: list[WordPart], *, quoted: bool) -> None:
        text, at = self._text, self._at
        following = text[at + 1 : at + 2]
        if following == "(":
            self._substitution(parts, quoted=quoted)
        elif following == "{":
            parts.append(self._braced(quoted=quoted))
        elif following == "'" and not quoted:
            end = _after(_ANSI_STOP, text, at + 2)
            if end < 0:
                raise self._never_closed("single quote", at)
            parts.append(LiteralText(_ANSI.sub(_ansi_character, text[at + 2 : end - 1]), quoted=True))
            self._at = end
        elif found := _NAME.match(text, at + 1):
            parts.append(Parameter(text[at : found.end()], found.group(), quoted))
            self._at = found.end()
        else:
            if following != '"' or quoted:  # $"..." is a translated string: only the quotes matter
                parts.append(LiteralText("$", quoted=True))
            self._at = at + 1

    def _braced(self, *, quoted: bool) -> Parameter:
        """Reads `${NAME}` or `${NAME:-...}`."""
        text, at, argument = self._text, self._at, list[WordPart]()
        found = _BRACED.match(text, at + 2)
        self._at = found.end() if found else at + 2
        with self._deeper(at):
            self._collect(argument, _PLAIN_IN_BRACES[quoted], quoted=quoted, end="}")
        self._at += 1
        if self._at > len(text):
            raise self._never_closed("${", at)
        source = text[at : self._at]
        if found is None or (found.group(3) is None and argument):
            known = re.search(r"[A-Za-z_][A-Za-z0-9_]*", source)
            return Parameter(source, known.group() if known else source, quoted, operator=None)
        name, subscript, operator = found.group(1), found.group(2) or "", found.group(3) or ""
        if not subscript and not _IDENTIFIER.match(text, self._at) and (len(name) == 1 or not name.isdigit()):
            source = f"${name}"  # the way people write it
        return Parameter(source, name, quoted, subscript, operator, tuple(argument))

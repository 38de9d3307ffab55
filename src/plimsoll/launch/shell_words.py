"""Cuts a shell script into words and operators; runs and expands nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plimsoll.errors import BadInput

_SPECIAL = re.compile(r"""[\\'"`$(){}#<\n]""")
_HERE = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s'\"<>;&|()]+))")
_BACKTICK_STOP = re.compile(r"[\\`]")
_ANSI_STOP = re.compile(r"[\\']")

# Kinds of open brackets and quotes inside `$(...)` or `${...}`.
_COMMAND, _GROUP, _BRACE, _QUOTED_BRACE, _QUOTE = range(5)
_PARENTHESES = (_COMMAND, _GROUP)
_BRACES = (_BRACE, _QUOTED_BRACE)
_INSIDE_QUOTES = (_QUOTE, _QUOTED_BRACE)


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


class _Scan:
    """Finds the bracket that closes an opening one."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self._open: list[int] = []
        self._pending: list[tuple[str, bool]] = []
        self._at = at

    def end(self) -> int:
        """Returns the place after the bracket that closes the `$(`, `${`, `<(` or `>(` at the start, or -1 without one."""
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
        """Records an opening `$(`, `$((`, `${`, `$'`, `<(` or `>(` at this point; else skips one character."""
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
            self._at = _after(_ANSI_STOP, text, at + 2)
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
            self._at = _after(_BACKTICK_STOP, text, at + 1)
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
        # Comments and here-documents are skipped: an apostrophe in them is not a quote.
        elif top == _COMMAND and char == "#" and text[at - 1] in " \t\n;(":
            end = text.find("\n", at)
            self._at = end if end >= 0 else -1
        elif top == _COMMAND and char == "<" and (here := here_document(text, at)):
            delimiter, strip, self._at = here
            self._pending.append((delimiter, strip))
        elif top == _COMMAND and char == "\n" and self._pending:
            self._at = after_here_documents(text, at + 1, self._pending)
            self._pending = []


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
        """Yields every word and operator in order, without comments, blanks and here-documents."""
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

    def _collect(self, parts: list[WordPart], plain: re.Pattern[str]) -> None:
        """Adds parts until a character that neither `plain` nor quoting takes."""
        text = self._text
        while self._at < len(text):
            if found := plain.match(text, self._at):
                parts.append(LiteralText(found.group(), quoted=False))
                self._at = found.end()
                continue
            char = text[self._at]
            if char == "\\":
                following = text[self._at + 1 : self._at + 2]
                if following != "\n":
                    parts.append(LiteralText(following or "\\", quoted=True))
                self._at += 2
            elif char == "'":
                end = text.find("'", self._at + 1)
                if end < 0:
                    raise self._never_closed("single quote", self._at)
                parts.append(LiteralText(text[self._at + 1 : end], quoted=True))
                self._at = end + 1
            elif char == '"':
                start, before = self._at, len(parts)
                self._at += 1
                self._quoted_run(parts)
                if len(parts) == before:
                    parts.append(LiteralText("", quoted=True))  # "" is a word
                if self._at >= len(text):
                    raise self._never_closed("double quote", start)
                self._at += 1
            elif char == "$":
                self._dollar(parts, quoted=False)
            elif char == "`":
                self._backticks(parts, quoted=False)
            else:
                return

    def _quoted_run(self, parts: list[WordPart]) -> None:
        """Adds the text between double quotes, up to the closing one or the end."""
        text = self._text
        while self._at < len(text) and (char := text[self._at]) != '"':
            if found := _PLAIN_QUOTED.match(text, self._at):
                parts.append(LiteralText(found.group(), quoted=True))
                self._at = found.end()
            elif char == "\\":
                following = text[self._at + 1 : self._at + 2]
                if following != "\n":
                    kept = following if following in ("$", "`", '"', "\\") else "\\" + following
                    parts.append(LiteralText(kept, quoted=True))
                self._at += 2
            elif char == "$":
                self._dollar(parts, quoted=True)
            else:
                self._backticks(parts, quoted=True)

    def _backticks(self, parts: list[WordPart], *, quoted: bool) -> None:
        end = _after(_BACKTICK_STOP, self._text, self._at + 1)
        if end < 0:
            raise self._never_closed("backtick", self._at)
        if quoted or not re.fullmatch(r"`\s*#[^\n]*`", self._text[self._at : end]):  # a comment between two words is nothing
            parts.append(Substitution(self._text[self._at : end], quoted))
        self._at = end

    def _substitution(self, parts: list[WordPart], *, quoted: bool) -> None:
        end = _Scan(self._text, self._at).end()
        if end < 0:
            raise self._never_closed(self._text[self._at : self._at + 2], self._at)
        parts.append(Substitution(self._text[self._at : end], quoted))
        self._at = end

    def _dollar(self, parts: list[WordPart], *, quoted: bool) -> None:
        text, at = self._text, self._at
        following = text[at + 1 : at + 2]
        if following == "(":
            self._substitution(parts, quoted=quoted)
        elif following == "{":
            end = _Scan(text, at).end()
            if end < 0:
                raise self._never_closed("${", at)
            parts.append(self._braced(text[at:end], following=text[end : end + 1], quoted=quoted))
            self._at = end
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

    def argument(self, *, quoted: bool) -> tuple[WordPart, ...]:
        """Reads all of this text as the argument of the operator in `${NAME:-...}`."""
        parts: list[WordPart] = []
        while quoted and self._at < len(self._text):
            self._quoted_run(parts)
            self._at += 1  # quotes inside "${A:-"x"}" group nothing
        self._collect(parts, _PLAIN_ARGUMENT)
        return tuple(parts)

"""Reads the commands of a shell script without running any of it.

The subset of POSIX shell and bash that people write in start scripts: quoting, variables, arrays, defaults such as
`${PORT:-8000}`, pipes, redirections, here-documents. Control flow is not followed; the text is read once, from top to
bottom, under these rules:

- every command counts, in any branch, loop, function or subshell;
- inside if, case, while, until and for, and after `&&` and `||`, an assignment counts only while the variable has no
  value: the first one wins, and what was set before the branch stays. Adding to itself (`A+=...`, `A="$A ..."`) counts, so
  that flags which are added on a condition are seen, unless it adds an empty variable. Such variables are listed in
  `guessed`, and a start of vLLM is also given with each value that was not taken, in `otherwise`;
- a loop's variable, and what `read` reads, is unknown;
- an unset variable stays in the text as `$NAME`, `$(...)` stays as it is written, and both are listed in `unresolved`.

Not done: globs, `~`, `{a,b}`, functions' arguments, `set --`, aliases, a changed IFS; `source` is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from plimsoll.errors import TooLarge
from plimsoll.launch.shell_words import LiteralText, Operator, Parameter, Reader, Substitution, Word, WordPart

OTHER_VALUES_MAX = 8  # of one variable, from the branches that were not taken
WORK_MAX = 16 * 1024 * 1024  # characters produced in all; A="$A$A" doubles with every line
_BLANKS = re.compile(r"[ \t\n]+")


class Origin(Enum):
    WRITTEN = "stands in the script"
    UNSET = "a variable that nobody assigned"
    COMPUTED = "what only running it could tell"


class Piece(NamedTuple):
    """Text of one origin; `name` is the unset or computed name, or the variable that a branch of the script decides."""

    text: str
    origin: Origin = Origin.WRITTEN
    name: str = ""


Value = tuple[Piece, ...]


def text_of(value: Iterable[Piece]) -> str:
    """Returns the value as one string, with `$NAME` where a variable is unknown."""
    return "".join(piece.text for piece in value)


def is_blank(value: Value) -> bool:
    """True if the value is empty once unset variables are taken as empty, as the shell takes them."""
    return all(piece.origin is Origin.UNSET or not piece.text for piece in value)


def _merged(pieces: Sequence[Piece]) -> Value:
    """Returns the same value in as few pieces as possible, so that a value built in many steps stays small."""
    merged: list[Piece] = []
    for (origin, name), run in groupby(pieces, key=lambda piece: (piece.origin, piece.name)):
        whole = list(run)
        merged += [Piece(text_of(whole), origin, name)] if origin is Origin.WRITTEN else whole
    return tuple(merged)


class _Fields:
    def __init__(self) -> None:
        self.done: list[Value] = []
        self.open: list[Piece] | None = None

    def add(self, piece: Piece) -> None:
        if self.open is None:
            self.open = []
        self.open.append(piece)

    def close(self) -> None:
        if self.open is not None:
            self.done.append(_merged(self.open))
            self.open = None

    def split(self, piece: Piece) -> None:
        """Adds unquoted text: blanks in it end words."""
        if piece.origin is not Origin.WRITTEN:
            self.add(piece)
            return
        for number, run in enumerate(_BLANKS.split(piece.text)):
            if number:
                self.close()
            if run:
                self.add(Piece(run, piece.origin, piece.name))


class Variables:
    """The shell's variables so far; a plain one is a list of one."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Value, ...]] = {}
        self._in_branch: set[str] = set()
        self._others: dict[str, list[tuple[Value, ...]]] = {}
        self._work_left = WORK_MAX

    def spend(self, amount: int) -> None:
        """Counts work done, so that a script which multiplies itself ends in an error and not in a hang."""
        self._work_left -= amount
        if self._work_left < 0:
            raise TooLarge("the script is too long, or its variables multiply; print the final command and give that")

    def values(self, name: str) -> tuple[Value, ...]:
        return self._values.get(name, ())

    def assign(self, name: str, values: Sequence[Value], *, append: bool = False, array: bool = False) -> None:
        """Sets or extends a variable; `+=` of plain text extends the first element, as in bash."""
        before = self._values.get(name, ()) if append else ()
        after = tuple(values)
        if before and array:
            after = before + after
        elif before:
            after = (_merged(before[0] + after[0]), *before[1:])
        self.spend(sum(len(piece.text) + 16 for value in after for piece in value) + len(after))
        self._values[name] = after

    def forget(self, name: str) -> None:
        self._values.pop(name, None)
        self._others.pop(name, None)

    def keep_first(self, name: str, values: Sequence[Value], *, adds: bool) -> bool:
        """True if a branch's value does not count, since an earlier one does; it is kept as another value."""
        self._in_branch.add(name)
        if adds or all(map(is_blank, self.values(name))):
            return False
        others = self._others.setdefault(name, [])
        self.spend(sum(len(piece.text) + 16 for value in values for piece in value))
        if tuple(values) not in (*others, self._values.get(name)) and len(others) < OTHER_VALUES_MAX:
            others.append(tuple(values))
        return True

    def expand_otherwise(self, name: str, words: Sequence[Word]) -> Iterator[list[Value]]:
        """Yields the fields of these words for each value of a variable in branches that were not taken."""
        taken = self._values.get(name, ())
        for values in self._others.get(name, ()):
            self._values[name] = values
            yield [field for word in words for field in self.expand(word.parts)]
        if name in self._others:
            self._values[name] = taken

    def join(self, parts: Iterable[WordPart]) -> Value:
        """Returns the single value of these parts on the right of `=`."""
        fields = self.expand(parts, split=False)
        return fields[0] if fields else ()

    def expand(self, parts: Iterable[WordPart], *, split: bool = True) -> list[Value]:
        fields = _Fields()
        self._add(fields, parts, split=split)
        fields.close()
        self.spend(sum(len(piece.text) + 16 for value in fields.done for piece in value))
        return fields.done

    def _add(self, fields: _Fields, parts: Iterable[WordPart], *, split: bool) -> None:
        for part in parts:
            match part:
                case LiteralText(text, quoted):
                    put = fields.add if quoted or not split else fields.split
                    put(Piece(text))
                case Substitution(source):
                    fields.add(Piece(source, Origin.COMPUTED, source))
                case Parameter():
                    self._add_parameter(fields, part, split=split)

    def _add_parameter(self, fields: _Fields, part: Parameter, *, split: bool) -> None:
        values = self._found(part)
        if part.quoted and part.subscript != "@":
            fields.add(Piece(""))  # "$EMPTY" is a word, "${EMPTY[@]}" is none
        if part.operator is None:
            fields.add(Piece(part.source, Origin.UNSET, part.name))
            return
        absent = not values or (part.operator.startswith(":") and all(map(is_blank, values)))
        action = part.operator[-1:]
        if action == "+":
            if not absent:
                self._add(fields, part.argument, split=split)
        elif absent and action == "-":
            self._add(fields, part.argument, split=split)
        elif absent and action == "=":
            self.assign(part.name, [self.join(part.argument)])
            self._add_values(fields, part, self._found(part) or (), split=split)
        elif values is None:
            fields.add(Piece(part.source, Origin.UNSET, part.name))
        else:
            self._add_values(fields, part, values, split=split)

    def _found(self, part: Parameter) -> tuple[Value, ...] | None:
        """Returns the values of the parameter; None where it is not set."""
        values = self._values.get(part.name)
        if part.name in self._in_branch and values:
            values = tuple(
                tuple(Piece(p.text, p.origin, p.name or part.name) if p.text else p for p in value) for value in values
            )
        if values is None or part.subscript in ("@", "*"):
            return values
        index = int(part.subscript or "0")
        return values[index : index + 1] or None

    def _add_values(self, fields: _Fields, part: Parameter, values: tuple[Value, ...], *, split: bool) -> None:
        together = not split or (part.quoted and part.subscript != "@")
        self.spend(sum(len(piece.text) for value in values for piece in value) + len(values))
        for number, value in enumerate(values):
            if number and together:
                fields.add(Piece(" "))
            elif number:
                fields.close()
            if part.quoted and not together:
                fields.add(Piece(""))  # an empty element is a word of its own
            for piece in value:
                put = fields.add if part.quoted or not split else fields.split
                put(piece)


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]=]*\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_OPENING = frozenset({"if", "while", "until"})
_CLOSING = frozenset({"fi", "done"})
_OTHERWISE_MAX = 16  # ways to run one command
_TOKEN_COST = 64  # of WORK_MAX: a quarter of a million words and operators in all
_SKIPPED = frozenset({"then", "elif", "else", "do", "{", "}", "!", "coproc"})


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """One command as the script would run it, as far as the text alone can tell."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]  # exported so far, then `A=B` in front of the command
    line: int
    unresolved: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()  # variables whose value depends on a branch
    otherwise: tuple[ShellCommand, ...] = ()  # the command with another branch's value of one of those


def commands_in(text: str, environment: Iterable[tuple[str, str]] = ()) -> list[ShellCommand]:
    """Returns every command of a script in the order of its text; assignments and exports are applied, not listed."""
    script = _Script(environment)
    for token in Reader(text.replace("\r\n", "\n")).tokens():
        script.variables.spend(_TOKEN_COST)
        if isinstance(token, Word):
            script.word(token)
        else:
            script.operator(token)
    script.operator(Operator("\n", 0))
    return script.commands


class _Script:
    """Gathers words into commands and keeps their assignments."""

    def __init__(self, environment: Iterable[tuple[str, str]]) -> None:
        self.commands: list[ShellCommand] = []
        self.variables = Variables()
        self._exported: dict[str, None] = {}
        self._snapshot: tuple[tuple[str, str], ...] | None = None  # exported variables; None when they have changed
        self._behind_environment: list[str] = []  # variables that its values lack
        self._words: list[Word] = []
        self._branches = 0  # how many if, while, for, case are open
        self._cases = 0
        self._behind_and_or = False
        self._in_pattern = False  # between `case X in` or `;;` and the `)` behind the pattern
        self._skip_word = False  # a redirection's target, or the name behind `function`
        self._parenthesis = False  # `name(` was seen: `)` makes it a function
        self._export_all = False
        for name, value in environment:
            self.variables.assign(name, [(Piece(value),)])
            self._exported[name] = None

    def word(self, word: Word) -> None:
        self._settle_parenthesis()
        if self._skip_word:
            self._skip_word = False
            return
        if not self._words and (keyword := word.keyword) is not None and self._is_reserved(keyword):
            return
        self._words.append(word)

    def _is_reserved(self, keyword: str) -> bool:
        """True if the shell takes this first word for itself; keeps count of what is open."""
        if keyword == "esac":
            self._cases = max(0, self._cases - 1)
            self._branches = max(0, self._branches - 1)
            self._in_pattern = False
        elif self._in_pattern:
            return False
        elif keyword in _OPENING:
            self._branches += 1
        elif keyword in _CLOSING:
            self._branches = max(0, self._branches - 1)
        elif keyword == "function":
            self._skip_word = True
        else:
            return keyword in _SKIPPED
        return True

    def operator(self, operator: Operator) -> None:
        text, first = operator.text, self._words[0].keyword if self._words else None
        if first == "[[" and self._words[-1].keyword != "]]" and text != "\n":
            return  # `<`, `(` and `&&` compare and group in there
        if operator.redirects:
            self._settle_parenthesis()
            self._skip_word = True
            return
        if text == ")" and self._parenthesis:
            self._words, self._parenthesis = [], False
            return
        self._settle_parenthesis()
        if text == "(" and len(self._words) == 1 and first is not None and not self._in_pattern:
            self._parenthesis = True
            return
        goes_on = text == "\n" and not self._words  # `a &&` may end its line
        self._finish(text)
        if text in ("&&", "||"):
            self._behind_and_or = True
        elif text in ("\n", "&", "(", ")") or text.startswith(";"):
            self._behind_and_or = self._behind_and_or and goes_on
        if text in (";;", ";&", ";;&") and self._cases:
            self._in_pattern = True

    def _settle_parenthesis(self) -> None:
        """Ends a `name(` that turned out to be no function: the name was a command."""
        if self._parenthesis:
            self._parenthesis = False
            self._finish("(")

    def _finish(self, terminator: str) -> None:
        """Handles the words so far as a whole command, a loop's head or a pattern."""
        words, self._words = self._words, []
        self._skip_word = False
        if self._in_pattern:
            self._in_pattern = terminator != ")"
            return
        if not words:
            return
        first = words[0].keyword
        if first == "case":
            self._cases += 1
            self._branches += 1
            self._in_pattern = terminator != ")"
        elif first in ("for", "select"):
            self._branches += 1
            if len(words) > 1 and (name := words[1].keyword) is not None:
                self.variables.forget(name)
        else:
            self._command(words)

    def _command(self, words: Sequence[Word]) -> None:
        assignments = 0
        while assignments < len(words) and _assigned(words[assignments]):
            assignments += 1
        before, rest = words[:assignments], words[assignments:]
        if rest and rest[0].keyword in _DECLARING:
            self._declare(rest)
            return
        fields = [field for word in rest for field in self.variables.expand(word.parts)]
        if not fields:
            for word in before:
                self._assign(word)
            return
        texts = tuple(text_of(field) for field in fields)
        if texts[0] == "unset":
            for name in texts[1:]:
                self._unset(name)
            return
        match texts:  # a builtin's effect on the variables
            case ("set", "-a" | "+a" as option, *_) | ("set", "-o" | "+o" as option, "allexport", *_):
                self._export_all = option.startswith("-")
            case ("read", *names):
                for name in names:
                    self._unset(name)
        environment = self._environment()
        unresolved: dict[str, None] = {}
        guessed: dict[str, None] = {}
        own: list[tuple[str, str]] = []
        for word in before:
            name, value = self._named_value(word)
            own.append((name, text_of(value)))
            fields.append(tuple(piece for piece in value if piece.name != name))
        for piece in (piece for field in fields for piece in field if piece.name):
            (guessed if piece.origin is Origin.WRITTEN else unresolved)[piece.name] = None
        unresolved.update(dict.fromkeys(self._behind_environment))
        command = ShellCommand(texts, environment + tuple(own), words[0].line, tuple(unresolved), tuple(guessed))
        if any("vllm" in text.lower() for text in texts):
            # The command as the branches that were not taken would run it.
            otherwise = []
            for others in (others for name in guessed for others in self.variables.expand_otherwise(name, rest)):
                missing = [piece.name for field in others for piece in field if piece.origin is not Origin.WRITTEN]
                unseen = tuple(dict.fromkeys((*command.unresolved, *missing)))
                otherwise.append(replace(command, words=tuple(map(text_of, others)), unresolved=unseen))
            command = replace(command, otherwise=tuple(otherwise[:_OTHERWISE_MAX]))
        self.commands.append(command)

    def _environment(self) -> tuple[tuple[str, str], ...]:
        if self._snapshot is None:
            values = {name: self.variables.values(name) for name in self._exported}
            self._snapshot = tuple((name, text_of(value[0])) for name, value in values.items() if value)
            pieces = ((name, piece) for name, found in values.items() for value in found for piece in value)
            behind = [(name, piece) for name, piece in pieces if piece.origin is not Origin.WRITTEN]
            # `export PATH=/opt/bin:$PATH` adds to the caller's value: nothing is missing there.
            self._behind_environment = [piece.name for name, piece in behind if piece.name != name]
            self.variables.spend(16 * (len(values) + len(behind)))
        self.variables.spend(len(self._behind_environment))
        return self._snapshot

    def _unset(self, name: str) -> None:
        if not self._branches and not self._behind_and_or and _NAME.fullmatch(name):
            self.variables.forget(name)
            self._snapshot = None

    def _declare(self, words: Sequence[Word]) -> None:
        """Applies `export A=1 B`, `declare -x A=1`, `readonly A=1`, `local A=1`."""
        exports, withdraws = words[0].keyword == "export", False
        for word in words[1:]:
            text = text_of(self.variables.join(word.parts))
            if text.startswith(("-", "+")):
                exports = exports or (text.startswith("-") and "x" in text)
                withdraws = withdraws or text in ("-n", "+x")
                continue
            name = _NAME.match(text)
            if name is None:
                continue
            if _assigned(word):
                self._assign(word)
            elif found := _ASSIGNMENT.match(text):  # export "A=$B", export $NAME=1
                self._set(found, [self._without_prefix(self.variables.join(word.parts), found.end())])
            if withdraws:
                self._exported.pop(name.group(), None)
            elif exports:
                self._exported[name.group()] = None
            self._snapshot = None

    @staticmethod
    def _without_prefix(value: Value, length: int) -> Value:
        pieces: list[Piece] = []
        for piece in value:
            cut = min(length, len(piece.text))
            length -= cut
            if piece.text[cut:]:
                pieces.append(Piece(piece.text[cut:], piece.origin, piece.name))
        return tuple(pieces)

    def _named_value(self, word: Word) -> tuple[str, Value]:
        found = _assigned(word)
        assert found is not None, "only words that assign come here"
        first = word.parts[0]
        assert isinstance(first, LiteralText), "an assignment starts with its name"
        rest = LiteralText(first.text[found.end() :], first.quoted)
        return found.group(1), self.variables.join((rest, *word.parts[1:]))

    def _assign(self, word: Word) -> None:
        found = _assigned(word)
        assert found is not None, "only words that assign come here"
        name = found.group(1)
        if word.elements is None:
            values = [self._named_value(word)[1]]
        else:
            values = [value for element in word.elements for value in self.variables.expand(element.parts)]
        inside = [part for each in (word, *(word.elements or ())) for part in each.parts]
        adds = any(isinstance(part, Parameter) and part.name == name for part in inside)
        self._set(found, values, inside, adds=adds, array=word.elements is not None)

    def _is_empty(self, part: WordPart, but: str) -> bool:
        """True if it is a variable other than `but` that the script has set to nothing, as `X=${X:-}` does."""
        values = self.variables.values(part.name) if isinstance(part, Parameter) and part.name != but else ()
        return bool(values) and not any(text_of(value) for value in values)

    def _set(
        self,
        found: re.Match[str],
        values: Sequence[Value],
        inside: Sequence[WordPart] = (),
        *,
        adds: bool = False,
        array: bool = False,
    ) -> None:
        """Assigns under the rule for branches; an element of an array, `A[1]=x`, is not followed."""
        name, subscript, plus = found.groups()
        if subscript:
            return
        adds = adds or bool(plus)
        if self._branches or self._behind_and_or:
            if adds and any(self._is_empty(part, name) for part in inside):
                return  # behind `if [ -n "$X" ]`, most likely
            if self.variables.keep_first(name, values, adds=adds):
                return
        elif not adds:
            self.variables.forget(name)
        self.variables.assign(name, values, append=bool(plus), array=array)
        if self._export_all:
            self._exported[name] = None
        self._snapshot = None


def _assigned(word: Word) -> re.Match[str] | None:
    """Returns the `NAME=`, `NAME+=` or `NAME[1]=` at the start of the word; None if there is none."""
    match word.parts:
        case (LiteralText(text, quoted=False), *_):
            return _ASSIGNMENT.match(text)
    return None

"""What the words of a shell script become once its variables are filled in, as far as the script alone can tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from plimsoll.errors import TooLarge
from plimsoll.sources.shell_words import Parameter, Part, Substitution, Text

OTHER_VALUES_MAX = 8  # of one variable, from the branches that were not taken
WORK_MAX = 16 * 1024 * 1024  # characters produced in all; A="$A$A" doubles with every line
_BLANKS = re.compile(r"[ \t\n]+")


class Origin(Enum):
    """How a piece of text came about."""

    WRITTEN = "stands in the script"
    UNSET = "a variable that nobody assigned"
    COMPUTED = "what only running it could tell"


class Piece(NamedTuple):
    """Text of one origin; `name` says what is unset or computed, or which variable a branch of the script decides."""

    text: str
    origin: Origin = Origin.WRITTEN
    name: str = ""


Value = tuple[Piece, ...]


def text_of(value: Iterable[Piece]) -> str:
    """The value as one string, with `$NAME` where a variable is not known."""
    return "".join(piece.text for piece in value)


def is_blank(value: Value) -> bool:
    """Whether the value is empty once unset variables are taken as empty, as the shell takes them."""
    return all(piece.origin is Origin.UNSET or not piece.text for piece in value)


def _merged(pieces: Sequence[Piece]) -> Value:
    """The same value in as few pieces as it takes, so that a value built in many steps stays small."""
    runs: list[list[str]] = []
    kinds: list[tuple[Origin, str]] = []
    for piece in pieces:
        kind = (piece.origin, piece.name)
        if kinds and kinds[-1] == kind and piece.origin is Origin.WRITTEN:
            runs[-1].append(piece.text)
        else:
            runs.append([piece.text])
            kinds.append(kind)
    return tuple(Piece("".join(run), *kind) for run, kind in zip(runs, kinds, strict=True))


class _Fields:
    """The words that one word becomes: none, one or many."""

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

    def has_value(self, name: str) -> bool:
        """Whether the script gave it a value that is not empty."""
        values = self._values.get(name)
        return bool(values) and not all(map(is_blank, values or ()))

    def names_behind(self, name: str) -> list[str]:
        """The unset variables and computed parts that its value is made of."""
        pieces = (piece for value in self._values.get(name, ()) for piece in value)
        return [piece.name for piece in pieces if piece.origin is not Origin.WRITTEN]

    def text(self, name: str) -> str | None:
        """Its value as a child process would see it; None where it has none."""
        values = self._values.get(name)
        return text_of(values[0]) if values else None

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
        """Makes it unset."""
        self._values.pop(name, None)
        self._others.pop(name, None)

    def mark_branch(self, name: str) -> None:
        """Remembers that its value depends on a branch of the script."""
        self._in_branch.add(name)

    def add_other_value(self, name: str, values: Sequence[Value]) -> None:
        """Remembers what another branch would have set it to."""
        others = self._others.setdefault(name, [])
        self.spend(sum(len(piece.text) + 16 for value in values for piece in value))
        if tuple(values) not in (*others, self._values.get(name)) and len(others) < OTHER_VALUES_MAX:
            others.append(tuple(values))

    def other_values(self, name: str) -> tuple[tuple[Value, ...], ...]:
        """What the branches that were not taken would have set it to."""
        return tuple(self._others.get(name, ()))

    def exchange(self, name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """Sets a variable that has a value to another, and gives back the one it had."""
        before, self._values[name] = self._values[name], values
        return before

    def expand(self, parts: Iterable[Part]) -> list[Value]:
        """The words that these parts become."""
        return self._expand(parts, split=True)

    def join(self, parts: Iterable[Part]) -> Value:
        """The one value that these parts become on the right of `=`."""
        fields = self._expand(parts, split=False)
        return fields[0] if fields else ()

    def _expand(self, parts: Iterable[Part], *, split: bool) -> list[Value]:
        fields = _Fields()
        self._add(fields, parts, split=split)
        fields.close()
        self.spend(sum(len(piece.text) + 16 for value in fields.done for piece in value))
        return fields.done

    def _add(self, fields: _Fields, parts: Iterable[Part], *, split: bool) -> None:
        for part in parts:
            match part:
                case Text(text, quoted):
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
        """What the parameter stands for; None where it is not set."""
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

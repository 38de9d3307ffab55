"""Recorded events in one step each: a snapshot with history is little else, and nearly all of them are written alike.

The first event of a kind is read opcode by opcode as everything is. What it looks like is kept as a pattern, in which names
and words stand as they are and only numbers and frames may differ; an event that fits it means what the first one meant, and
any other is read opcode by opcode again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_PAIRS_MAX = 24
_ATTEMPTS_MAX = 200  # patterns cost time to make: a file with ever new ones is read without them
_NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x01.|\x02.{2}|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_NUMBER_SIZES = {0x4B: 1, 0x4D: 2, 0x4A: 4}
RUN = rb"((?:j....|h.){1,999})e"  # a list of things met before, to its end; pickle fills longer ones in batches
_FRAMES = rb"(?:\]\x94\(" + RUN + rb"|(h.|j....)|\]\x94)u"


class Shape(NamedTuple):
    """How one kind of event is written."""

    match: Callable[[bytes, int], re.Match[bytes] | None]
    made: tuple[str | None, ...]  # what the memo gets before the frames: the event itself, then its texts


class Shapes:
    """The kinds of events that were met so far, by their first bytes."""

    def __init__(self, memo: list[object], text: Callable[[bytes], str]) -> None:
        self.known: dict[bytes, Shape] = {}
        self.width = 0  # of the name `action` and its value, which come first
        self._memo, self._text = memo, text
        self._attempts = 0

    def learn(self, code: bytes, at: int) -> None:
        """Keep the shape of the event that begins at this place, if it is one that is not kept."""
        if self._attempts >= _ATTEMPTS_MAX or code[at : at + 3] != b"}\x94(":
            return
        try:
            if code[at + 3] not in b"hj" or self._referred(code, at + 3)[0] != "action":
                return
            self._attempts += 1
            self._learn(code, at)
        except IndexError:
            return  # cut short here, or damaged: the reader will see

    def _referred(self, code: bytes, at: int) -> tuple[object, int]:
        """What a reference refers to, and the place behind it."""
        if code[at] == 0x68:
            return self._memo[code[at + 1]], at + 2
        return self._memo[int.from_bytes(code[at + 1 : at + 5], "little")], at + 5

    def _learn(self, code: bytes, at: int) -> None:
        _, head = self._referred(code, at + 3)
        if code[head] not in b"hj":
            return
        action, place = self._referred(code, head)
        if not isinstance(action, str) or action == "oom" or self.width not in (0, place - at - 3):
            return
        width = place - at - 3
        pattern, made = [re.escape(code[at:place])], [b""]
        for _ in range(_PAIRS_MAX):
            begin = place
            if code[place] not in b"hj":
                return
            name, place = self._referred(code, place)
            if not isinstance(name, str) or name in ("action", "filename"):
                return
            pattern.append(re.escape(code[begin:place]))
            if name == "frames":
                pattern.append(_FRAMES)
                break
            place = self._value(code, place, pattern, made)
            if not place:
                return
        else:
            return
        self.width = width
        texts = tuple(self._text(piece) for piece in made[1:])
        match = re.compile(b"".join(pattern), re.DOTALL).match
        self.known[code[at + 3 : at + 3 + self.width]] = Shape(match, (None, *texts))

    def _value(self, code: bytes, place: int, pattern: list[bytes], made: list[bytes]) -> int:
        """Add the pattern of one plain value; the place behind it, or 0 where it is none."""
        opcode, begin = code[place], place
        if opcode in b"hj":
            _, place = self._referred(code, place)
            pattern.append(re.escape(code[begin:place]))
        elif opcode in _NUMBER_SIZES or opcode == 0x8A:
            size = _NUMBER_SIZES.get(opcode) or 1 + code[place + 1]
            pattern.append(_NUMBER)
            place += 1 + size
        elif opcode == 0x8C:
            end = place + 2 + code[place + 1]
            if code[end] != 0x94:
                return 0
            made.append(code[place + 2 : end])
            place = end + 1
            pattern.append(re.escape(code[begin:place]))
        else:
            return 0
        return place


def places_of(run: bytes) -> list[int]:
    """The places in the memo that a run of references names."""
    places, at = [], 0
    while at < len(run):
        if run[at] == 0x68:
            places.append(run[at + 1])
            at += 2
        else:
            places.append(int.from_bytes(run[at + 1 : at + 5], "little"))
            at += 5
    return places

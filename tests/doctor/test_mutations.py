"""Damaged logs: cut, thinned, mixed with another server's, stripped. Doctor never crashes, and never turns a truth round."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable

from plimsoll.doctor.rules.diagnose import diagnose
from tests.doctor.labelled import Labelled, labelled
from tests.each import each, times
from tests.log_bytes import log_of_bytes

TIMES = times(3, 100)  # for each log: half of the ways to damage it, another half for others; or many times each
PREFIX = re.compile(rb"^\([^)]{1,80}pid=[^)]{1,40}\) ?(?:(?:DEBUG|INFO|WARNING|ERROR) [0-9:\- ]{10,20} \[[^\]]{1,200}\] ?)?")
# The proof's many good starts are alike; other healthy servers stand for them.
ALL = [one for one in labelled() if one.codes or one.path.parent.name != "vllm-0.25.1-h200-proof"]
HEALTHY = next(one for one in ALL if one.name == "0.25.1-healthy").data().split(b"\n")[:60]

LineSplitter = list[bytes]
Mutation = Callable[[LineSplitter, random.Random], LineSplitter]


def _without_head(lines: LineSplitter, dice: random.Random) -> LineSplitter:
    return lines[dice.randrange(len(lines)) :]


def _without_tail(lines: LineSplitter, dice: random.Random) -> LineSplitter:
    return lines[: dice.randrange(1, len(lines) + 1)]


def _thinned(lines: LineSplitter, dice: random.Random) -> LineSplitter:
    lost = dice.choice((0.02, 0.1, 0.3, 0.6))
    return [line for line in lines if dice.random() > lost]


def _mixed(lines: LineSplitter, dice: random.Random) -> LineSplitter:
    """With a healthy server's lines, each in its own order."""
    mine, others, mixed = list(lines), list(HEALTHY), []
    while mine or others:
        mixed.append(
            (mine if mine and (not others or dice.random() < len(mine) / (len(mine) + len(others))) else others).pop(0)
        )
    return mixed


def _stripped(lines: LineSplitter, dice: random.Random) -> LineSplitter:
    share = dice.random()
    return [PREFIX.sub(b"", line) if dice.random() < share else line for line in lines]


def _carriage_returns(lines: LineSplitter, _: random.Random) -> LineSplitter:
    return [line + b"\r" for line in lines]


MUTATIONS: tuple[Mutation, ...] = (_without_head, _without_tail, _thinned, _mixed, _stripped, _carriage_returns)


def _flips(one: Labelled, said: bool | None, confidence: float) -> bool:
    """Whether a confident answer is the opposite of the truth."""
    return said is not None and confidence >= 0.5 and said not in one.memory and None not in one.memory


@each("one", ALL, ids=lambda one: one.name)
def test_damage_never_turns_the_answer_round(one: Labelled) -> None:
    """Of a damaged log the answer may become "cannot be told", never the confident opposite of what happened.

    A log that is cut before its failure shows a server that was well until then: to say so is no mistake.
    """
    lines = one.data().split(b"\n")
    for number in range(TIMES):
        mutation = MUTATIONS[(number + TIMES * (len(lines) % 2)) % len(MUTATIONS)]
        damaged = mutation(lines, random.Random(zlib.crc32(f"{one.name} {number}".encode())))
        found = diagnose([log_of_bytes("damaged.log", b"\n".join(damaged))])
        confidence = found.findings[0].confidence if found.findings else 1.0
        if _flips(one, found.memory_failure, confidence) and not _is_still_well(one, damaged, found.memory_failure):
            raise AssertionError(f"{mutation.__name__}, number {number}: {found.memory_failure}, {found.findings[:1]}")


def _is_still_well(one: Labelled, damaged: LineSplitter, said: bool | None) -> bool:
    """Whether nothing that is left shows the failure: no error, no traceback, no cache that is known to be full.

    Whether a cache is full below 95 % depends on --max-num-seqs: without the line of arguments it is not known.
    """
    if one.codes == ("runtime.contained",) and _is_unsigned(damaged):
        return said is False
    left = [line for line in damaged if b"WARNING" not in line]
    known = any(b"non-default args" in line for line in left)
    full = rb"[89]\d" if known else rb"9[5-9]"
    telling = re.compile(rb"ERROR|Traceback|out of memory|rror:|KV cache usage: (?:" + full + rb"|100)")
    return one.memory == (True,) and said is False and not any(telling.search(line) for line in left)


def _is_unsigned(damaged: LineSplitter) -> bool:
    """Whether containment's lines have all lost the engine core's name that others keep: anybody may have written them."""
    told = [line for line in damaged if b"survive: contained failure" in line or b"survive: aborted request" in line]
    return not any(line.startswith(b"(EngineCore") for line in told) and any(
        line.startswith(b"(EngineCore") for line in damaged
    )


@each("one", [one for one in ALL if one.codes][:: times(2, 1)], ids=lambda one: one.name)
def test_line_ends_and_prefixes_change_nothing(one: Labelled) -> None:
    """With CRLF line ends the answer is the same to the letter; without any prefix memory is judged the same."""
    lines = one.data().split(b"\n")
    plain = diagnose([log_of_bytes("x.log", b"\n".join(lines))])
    returned = diagnose([log_of_bytes("x.log", b"\r\n".join(lines))])
    assert [str(f.code) for f in returned.findings] == [str(f.code) for f in plain.findings]
    bare = diagnose([log_of_bytes("x.log", b"\n".join(PREFIX.sub(b"", line) for line in lines))])
    assert bare.memory_failure in (plain.memory_failure, None)

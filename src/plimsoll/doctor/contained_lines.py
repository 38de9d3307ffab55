"""Reads what containment (`plimsoll.inside`, PLIMSOLL_SURVIVE) writes into a server's log.

    plimsoll: survive: contained failure 3: a step of 8192 tokens in 48 requests ran out of device memory at forward (...); ...
    plimsoll: survive: aborted request cmpl-1: it ran out of device memory alone, in a step of 512 tokens at encoder (...)

Only a line that begins with these words counts, after vLLM's own prefix, and where the log names its processes only one of the
engine core, where containment runs: a request's text may quote anything, and the API server prints it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from plimsoll.doctor.oom_text import parse_size
from plimsoll.domain.log import Line
from plimsoll.domain.survive import SITES, UNKNOWN_SITE

START = "plimsoll: survive: "
CORE = "EngineCore"
LONGEST_REASON = 300
MOST_LINES = 20_000
_compiled = cache(re.compile)
_SIZE = r"\d{1,12}(?:\.\d{1,6})? (?:bytes|B|KiB|MiB|GiB|TiB)"
_SITE = rf" at (?P<site>[a-z]{{1,20}})(?: \((?:asked for (?P<asked>{_SIZE}))?(?:, )?(?:(?P<free>{_SIZE}) free)?\))?"
_CONTAINED = (
    r"contained failure (?P<number>\d{1,9}): a step of (?P<tokens>\d{1,9}) tokens? in (?P<requests>\d{1,9}) requests? "
    rf"ran out of device memory{_SITE}"
)
_LIMIT = r"steps of at most (?P<tokens>\d{1,9}) tokens and (?P<sequences>\d{1,9}) sequences"
_LOST = r"; (?P<preempted>\d{1,9}) requests? preempted, (?P<recomputed>\d{1,12}) tokens? to recompute"
_ABORTED = rf"aborted request \S{{1,300}}: it ran out of device memory alone, in a step of (?P<tokens>\d{{1,9}}) tokens?{_SITE}"


class Failure(NamedTuple):
    """One contained failure, or one request that was aborted for one; None for what its line leaves out."""

    at: int  # index of its line
    site: str = UNKNOWN_SITE
    tokens: int | None = None
    requests: int | None = None
    asked: int | None = None
    free: int | None = None
    recomputed: int | None = None
    limit_tokens: int | None = None  # of a step from here on
    limit_sequences: int | None = None
    number: int | None = None  # as its engine core counts them
    process: str = ""


class Words(NamedTuple):
    """A line of containment that is no failure."""

    at: int
    text: str


class ContainedLines(NamedTuple):
    """All that containment says in a log, in its order."""

    contained: tuple[Failure, ...] = ()
    aborted: tuple[Failure, ...] = ()
    armed: tuple[Words, ...] = ()
    not_armed: tuple[Words, ...] = ()  # the text is the reason alone
    grown: tuple[Failure, ...] = ()
    storms: tuple[Words, ...] = ()
    given_up: tuple[Words, ...] = ()  # also what it could not contain: vLLM ends

    def __bool__(self) -> bool:
        return any(self)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What the server survived, in the order of the log."""
        return tuple(sorted((*self.contained, *self.aborted), key=lambda one: one.at))

    @property
    def total(self) -> int:
        """How many failures were contained, also those between two lines of which a huge log keeps none."""
        total = 0
        last: dict[str, int] = {}
        for one in self.contained:
            number, before = one.number or 0, last.get(one.process)
            total += 1 if before is None or number <= before else number - before
            last[one.process] = number
        return total

    @property
    def ends(self) -> list[tuple[int, bool]]:
        """Where the log tells how a failed step ended, in order: True where the server survived, False where vLLM ends."""
        return sorted([(one.at, True) for one in self.failures] + [(one.at, False) for one in self.given_up])


def read_contained(lines: Sequence[Line]) -> ContainedLines:
    """Everything that containment says in these lines; of lines by the API server nothing."""
    said = [(at, line) for at, line in enumerate(lines) if line.text.startswith(START)][:MOST_LINES]
    if not said:
        return ContainedLines()
    is_named = any(line.process.startswith(CORE) for line in lines)
    texts = [
        (at, line.text.removeprefix(START).strip())
        for at, line in said
        if (line.process.startswith(CORE) if is_named else not line.process)
    ]
    return ContainedLines(
        contained=tuple(
            found._replace(process=lines[at].process) for at, text in texts if (found := _contained(at, text)) is not None
        ),
        aborted=tuple(
            _failure(at, match)._replace(requests=1)
            for at, text in texts
            if (match := _compiled(_ABORTED).match(text)) is not None
        ),
        armed=_words(texts, "armed"),
        not_armed=tuple(one._replace(text=one.text.removeprefix(_NOT_ARMED)) for one in _words(texts, _NOT_ARMED)),
        grown=tuple(
            Failure(at, limit_tokens=int(limit["tokens"]), limit_sequences=int(limit["sequences"]))
            for at, text in texts
            if (limit := _compiled(rf"growing back: {_LIMIT}").match(text)) is not None
        ),
        storms=_words(texts, "storm: "),
        given_up=_words(texts, "gave up after ", "cannot contain this failure: "),
    )


_NOT_ARMED = "not armed: "


def _words(texts: Sequence[tuple[int, str]], *starts: str) -> tuple[Words, ...]:
    return tuple(Words(at, text[:LONGEST_REASON]) for at, text in texts if text.startswith(starts))


def _contained(at: int, text: str) -> Failure | None:
    match = _compiled(_CONTAINED).match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    found = _failure(at, match)._replace(requests=int(match["requests"]), number=int(match["number"]))
    if (lost := _compiled(_LOST).match(rest)) is not None:
        found = found._replace(recomputed=int(lost["recomputed"]))
    if (limit := _compiled(_LIMIT).search(rest)) is not None:
        found = found._replace(limit_tokens=int(limit["tokens"]), limit_sequences=int(limit["sequences"]))
    return found


def _failure(at: int, match: re.Match[str]) -> Failure:
    site = match["site"]
    return Failure(
        at,
        site if site in SITES else UNKNOWN_SITE,
        int(match["tokens"]),
        asked=parse_size(match["asked"]) if match["asked"] else None,
        free=parse_size(match["free"]) if match["free"] else None,
    )

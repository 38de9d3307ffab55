"""Reads any text as lines: a server's log, kernel lines, the output of a tool, however wrapped, packed, cut or mixed.

A small input is read whole. Of a huge one the end, the start, and what is telling in between are kept, with exact line numbers.
A wrapping (a container runtime's, a collector's, of a copy into an issue) is known by its first characters; wrappings nest.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import LONGEST, WRAPPED_SHARE, Log, LogLine
from plimsoll.doctor.words import words
from plimsoll.errors import BadInput
from plimsoll.net.inputs import SAMPLE_BYTES, Budget, Descriptor, is_plain, is_text, opened, text_blocks

# The prefixes of a line: which process speaks, at what level, and when.
# (EngineCore_DP0 pid=12) ERROR 11-15 08:00:00 [core.py:700] text         vLLM 0.8 and later
# ERROR 12-16 21:40:15 engine.py:135] text                                the first engine (V0)
# (RayWorkerWrapper pid=1, ip=10.0.0.1) text                              Ray
# [rank0]: text                                                           torch
# vLLM's own prefix is cut off; the level of somebody else's format is only read, and the text left whole.

LEVELS: dict[str, str] = words("names")["levels"]
_JSON: dict[str, list[str]] = words("names")["json"]

MOST_PARTS = 1000  # of one line: a traceback posted without its line ends has one a frame

_PROCESS = r"\((?P<process>(?:[A-Za-z_][\w.:\-]{0,60}(?: [\w.=:,\-]{1,40}){0,3} )?pid=\d{1,10}(?:, ip=[0-9A-Fa-f.:]{1,45})?)\)"
_STAMP = r"(?P<stamp>(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
_OWN = rf"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {_STAMP} \[?(?P<place>[^\]\[\s]{{1,200}}:\d{{1,6}})\] ?"


class ParsedLine(NamedTuple):
    """A line taken apart."""

    process: str
    level: str
    stamp: str  # "11-15 08:00:00", as written; "" where the line does not say
    text: str
    place: str = ""  # "core.py:845"


_PROCESS_RE = re.compile(_PROCESS)
_OWN_RE = re.compile(_OWN)
_RANK_RE = re.compile(r"\[rank(\d{1,5})\]: ?")


_OWN_WORDS = ("DEBUG ", "INFO ", "WARNING ", "ERROR ", "CRITICAL ")
# A process that names itself, or a whole prefix, right after what somebody else was writing.
_BARE_PROCESS, _BARE_OWN = (re.sub(r"\?P<\w+>", "?:", pattern) for pattern in (_PROCESS, _OWN))
_COLLISION_RE = re.compile(rf"(?<![\s(]){_BARE_PROCESS} (?:{_BARE_OWN})?|(?<![(\"'`])(?:{_BARE_PROCESS} )?{_BARE_OWN}")
_FOREIGN_RE = re.compile(rf"[\s|\-\[(]{{0,6}}(?P<level>{'|'.join(LEVELS)})\b(?:[\])]? ?[:|\-]|[\])]|\s{{1,8}}[|\[])")


def said(text: str) -> ParsedLine:
    """Take a line apart; what is not a prefix stays in the text, with its indentation."""
    process = ""
    if text[:1] == " " and (bare := text.lstrip(" "))[:1] in "(DIWEC" and is_prefixed(bare):
        text = bare  # the whole log was indented to post it
    for _ in range(3):  # Ray's prefix may stand before the process's own, which says more
        if not text.startswith("(") or (match := _PROCESS_RE.match(text)) is None:
            break
        found = match["process"]
        if not process or not found.startswith("pid="):
            process = found
        text = text[match.end() + 1 :] if text.startswith(" ", match.end()) else text[match.end() :]
    if text.startswith("[rank") and (match := _RANK_RE.match(text)):
        process = process or f"rank{match[1]}"
        text = text[match.end() :]
    if text[:1] in "DIWEC" and (match := _OWN_RE.match(text)):
        return ParsedLine(process, match["level"], match["stamp"], text[match.end() :], match["place"])
    # The level where another logger (uvicorn, Python's own, loguru, torch) puts it: at the start of the line.
    level, first = "", text[:1]
    if first == "[" and text[1:2] in "IWEF" and text[2:5].isdigit() and text[5:7].strip("0123456789") in ("", " "):
        level = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}[text[1]]  # torch: [W1115 08:00:00.0 file.cpp:1]
    elif first and first in "TDINWECF|-[( " and (match := _FOREIGN_RE.match(text)):
        level = LEVELS[match["level"]]
    return ParsedLine(process, level, "", text)


def is_prefixed(text: str) -> bool:
    """True if the line begins as vLLM's own do."""
    return _PROCESS_RE.match(text) is not None or _OWN_RE.match(text) is not None


def split_writers(text: str) -> list[str]:
    """The text cut where another process's message begins in the middle of it: two writers shared one terminal."""
    if "pid=" not in text and not any(word in text for word in _OWN_WORDS):
        return [text]
    cuts = [match.start() for match in _COLLISION_RE.finditer(text) if match.start() > 0][:MOST_PARTS]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


_PIECES = 400  # of one line, from its end
# The escape itself, or what is left of it where a collector or a copy spelled it out.
_COLOURS_RE = re.compile(
    r"(?:\x1b|\^\[|\\u001[bB]|\\x1[bB]|\\033|#033)\[[0-9;:?]{0,24}[A-Za-z]|\x1b\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|\x1b[()][0-9A-B]"
)
# [0;36m(APIServer pid=1)[0;0m text": the escape character was lost on the way.
_LOST_ESCAPE_RE = re.compile(r"(?:^|(?<=\)))\[(?:\d{1,2};){0,2}\d{1,2}m|\[(?:\d{1,2};){0,2}\d{1,2}m(?=\()")
_PROGRESS_RE = re.compile(
    r"\d{1,3}%(?:\s{0,3}\||\s{1,3}Completed)|\d{1,9}/\d{1,9} {1,3}\[|\d(?:it/s|s/it)\b|"
    r"^\s{0,8}\d{1,3}(?:\.\d{1,2})?%\s{0,4}$"
)


def without_colours(text: str) -> str:
    """The text without terminal escapes."""
    if "\x1b" in text or "^[[" in text or "\\u001" in text or "\\x1" in text or "\\033[" in text or "#033[" in text:
        text = _COLOURS_RE.sub("", text)
    if "m(" in (start := text[:200]) or ")[" in start or start.startswith("["):
        text = _LOST_ESCAPE_RE.sub("", text)
    return text


def shown(text: str) -> list[str]:
    """The messages of one line: pieces after a carriage return, of a run of progress bars only the last."""
    if "\r" not in text:
        return [text]
    pieces = [piece for piece in text.split("\r") if piece.strip()][-_PIECES:] or [""]
    kept: list[str] = []
    was_progress = False
    for piece in pieces:
        now = _PROGRESS_RE.search(piece[:400]) is not None and "rror" not in piece and "ERROR" not in piece
        if now and was_progress:
            kept[-1] = piece
        else:
            kept.append(piece)
        was_progress = now
    return kept


DEPTH = 6  # wrappings around one line
_FEWEST_RECORDS = 5  # by which indented JSON is known
_MESSAGE_LINES = 2000  # of one JSON message
_DOCKER_PIECE_BYTES = 16_000  # docker cuts longer lines into records
_STAMPED = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"


class UnwrappedLine(NamedTuple):
    """A line without its wrapping."""

    text: str
    server: str = ""
    stamp: str = ""
    level: str = ""
    at: float | None = None  # where the wrapping counts in seconds already
    goes_on: bool = False  # the runtime cut a long line here: the next one continues it
    is_record: bool = False  # of a runtime that cuts long lines


class LineFormat(NamedTuple):
    """The prefixes that many lines of this file share."""

    services: frozenset[str] = frozenset()  # "vllm" of "vllm  | "
    word: str = ""  # "vllm-server: "
    quoted: bool = False  # "> " of a quotation
    one_level: bool = False  # every record is of the same level, whatever it says: the collector's, not the speaker's
    width: int = 0  # at which a terminal broke all longer lines; 0 where none did
    json: bool = True  # records are JSON; a lone one in plain text is another program's, and is left as it is
    field: str = ""  # '"textPayload": ' of JSON with a line for each field: the others are not the program's words


_CRI_RE = re.compile(rf"({_STAMPED}) (?:stdout|stderr) ([FP])(?::[^ ]{{0,20}})?(?: |$)")
_STAMP_RE = re.compile(rf"({_STAMPED})(?: |\t|$)")
_LEVEL_RE = re.compile(rf" {{0,2}}({'|'.join(LEVELS)}) ")
_SYSLOG_RE = re.compile(r"(?P<host>[\w.\-]{1,64}) (?P<unit>[\w.@/\-]{1,64})(?:\[(?P<pid>\d{1,10})\])?: ?")
_JOURNAL_RE = re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})? ")
_COMPOSE_RE = re.compile(r"(?P<service>[A-Za-z0-9][\w.\-]{0,80}?(?P<number>[_-]\d{1,4})?) {0,40}\| ?")
_POD_RE = re.compile(r"\[pod/(?P<name>[\w.\-]{1,120}/[\w.\-]{1,120})\] ?")
_BRACKETED_RE = re.compile(rf"\[({_STAMPED})\] ?")
_LEVELLED_RE = re.compile(rf'"(?:{"|".join(_JSON["level"])})"\s{{0,4}}:\s{{0,4}}"(\w{{1,20}})"')
_WORD_RE = re.compile(r"[A-Za-z][\w.\-]{1,60}: ?(?=\S|$)|\[[A-Za-z][\w.\-/ ]{0,40}\] ?")


# What a program that logs another's output puts between the time and the line: Python's logging, loguru.
_LOGGED_LEVEL, _LOGGED_PLACE = "DEBUG|INFO|WARNING|ERROR|CRITICAL", r"[\w./<>]{1,100}:[\w<>]{1,60}(?::\d{1,6})?"
_LOGGER_RE = re.compile(
    rf"(?:- )?(?:[\w.\-<>]{{1,80}} - )?(?P<level>{_LOGGED_LEVEL}) - (?:{_LOGGED_PLACE} - )?(?:\[[A-Za-z][\w.\-]{{0,30}}\] )?"
    rf"|\| (?P<loguru>{_LOGGED_LEVEL}) {{0,8}}\| {_LOGGED_PLACE} - "
)


def unwrap(text: str, habits: LineFormat, *, up_to_record: bool = False) -> list[UnwrappedLine]:
    """The line, or the lines of the message it holds, without the wrapping; or only as far as a runtime's record."""
    if habits.field:
        try:
            value = json.loads(text.strip().removesuffix(",").removeprefix(habits.field)) if habits.field in text else None
        except ValueError:
            value = None
        return unwrap(value, habits._replace(field="")) if isinstance(value, str) else []
    bare = UnwrappedLine(text)
    for _ in range(DEPTH):
        inner = _one_off(bare.text, habits)
        if inner is None:
            break
        bare = merge_wrapping(inner, bare)
        if bare.goes_on or (up_to_record and bare.is_record):
            break
        if "\n" in bare.text:
            pieces = bare.text.split("\n", _MESSAGE_LINES)[:_MESSAGE_LINES]
            return [merge_wrapping(part, bare) for piece in pieces for part in unwrap(piece.rstrip("\r"), habits)]
    return [bare]


def merge_wrapping(inner: UnwrappedLine, outer: UnwrappedLine) -> UnwrappedLine:
    """The fields of the inner wrapping, completed by those of the outer one."""
    return UnwrappedLine(inner.text, inner.server or outer.server, inner.stamp or outer.stamp, inner.level or outer.level,
                outer.at if inner.at is None else inner.at, inner.goes_on, inner.is_record)  # fmt: skip


def _one_off(text: str, habits: LineFormat) -> UnwrappedLine | None:
    first = text[:1]
    if first == "{":
        return _of_json(text) if habits.json else None
    if habits.word and text.startswith(habits.word):
        return UnwrappedLine(text[len(habits.word) :], habits.word.strip("[]: "))
    if first.isdigit():
        return _of_stamp(text) or (_of_compose(text, habits) if "|" in text[:130] else None)
    if first == "[":
        if match := _POD_RE.match(text):
            return UnwrappedLine(text[match.end() :], match["name"])
        if match := _BRACKETED_RE.match(text):
            return UnwrappedLine(text[match.end() :], stamp=match[1])
        return None
    if first == ">" and habits.quoted:
        return UnwrappedLine(text[2:] if text.startswith("> ") else text[1:])
    if not first.isalpha():
        return None
    if text[3:4] == " " and (match := _JOURNAL_RE.match(text)) and (unit := _SYSLOG_RE.match(text, match.end())):
        return UnwrappedLine(text[unit.end() :], unit["unit"], match[0].strip())
    return _of_compose(text, habits) if "|" in text[:130] else None


def _of_compose(text: str, habits: LineFormat) -> UnwrappedLine | None:
    """A line of `docker compose logs`: the service with its number, or a name this file is known to use as one."""
    match = _COMPOSE_RE.match(text)
    if match is None or not (match["number"] or match["service"] in habits.services):
        return None
    return UnwrappedLine(text[match.end() :], match["service"])


def _of_stamp(text: str) -> UnwrappedLine | None:
    """A line that begins with the date: CRI, `docker logs -t`, `kubectl logs --timestamps`, GitHub Actions, syslog."""
    if text[4:5] != "-":
        return None
    if match := _CRI_RE.match(text):
        return UnwrappedLine(text[match.end() :], stamp=match[1], goes_on=match[2] == "P", is_record=True)
    match = _STAMP_RE.match(text)
    if match is None:
        return None
    # Without a process number "host unit:" could as well be "CUDA error:".
    if (unit := _SYSLOG_RE.match(text, match.end())) and (unit["pid"] or unit["unit"] == "kernel"):
        return UnwrappedLine(text[unit.end() :], unit["unit"], match[1])
    if text.startswith(("- ", "| "), match.end()) and (logger := _LOGGER_RE.match(text, match.end())):
        return UnwrappedLine(text[logger.end() :], stamp=match[1], level=logger["level"] or logger["loguru"])
    level = _LEVEL_RE.match(text, match.end())  # of a program in Rust or Java, which writes it bare
    return UnwrappedLine(text[match.end() :], stamp=match[1], level=level[1] if level else "")


def _of_json(text: str) -> UnwrappedLine | None:
    """One JSON object with the message in a field of its own."""
    if text[1:2] not in ('"', " ") or not text.rstrip().endswith("}"):
        return None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict):
        return None
    said = next((tree[key] for key in _JSON["text"] if isinstance(tree.get(key), str | list)), None)
    if isinstance(said, list):  # journald writes what is not UTF-8 as numbers
        if not all(isinstance(number, int) and 0 <= number < 256 for number in said):
            return None
        said = without_colours(bytes(said).decode("utf-8", "replace"))
    if said is None:
        return None
    if isinstance(kubernetes := tree.get("kubernetes"), dict):
        tree = {**kubernetes, **tree}
    if raised := _first(tree, _JSON["raised"]):
        said = f"{said}\n{raised}"
    is_docker = isinstance(tree.get("log"), str)
    goes_on = is_docker and not said.endswith("\n") and len(said.encode("utf-8", "replace")) >= _DOCKER_PIECE_BYTES
    # The time where it is written as a number: of seconds, or of microseconds by journald.
    at, seconds = tree.get("__REALTIME_TIMESTAMP"), None
    if isinstance(at, str) and at.isdecimal() and len(at) < 20:
        seconds = int(at) / 1e6
    elif (
        number := next((tree[key] for key in _JSON["stamp"] if isinstance(tree.get(key), int | float)), 0)
    ) and 1e8 < number < 1e10:
        seconds = float(number)
    return UnwrappedLine(
        said.removesuffix("\n"), _first(tree, _JSON["server"]).removesuffix(".service"), _first(tree, _JSON["stamp"]),
        _first(tree, _JSON["level"]), seconds, goes_on, is_docker,
    )  # fmt: skip


def _first(tree: dict[str, object], keys: Iterable[str]) -> str:
    return next((value for key in keys if isinstance(value := tree.get(key), str)), "")


def detect_format(sample: Iterable[str]) -> LineFormat:
    """The format that nearly all of these lines share."""
    lines = [line for line in sample if line.strip()]
    if not lines:
        return LineFormat()
    quoted = sum(line.startswith("> ") for line in lines) >= 3
    bare = [line[2:] if quoted and line.startswith("> ") else line for line in lines]
    services: dict[str, list[str]] = {}
    for line in bare:
        if "|" in line[:130] and (match := _COMPOSE_RE.match(line)):
            services.setdefault(match["service"], []).append(line[match.end() :])
    most = sum(map(len, services.values())) >= max(3, 0.6 * len(bare)) and len(services) <= 40
    # A table has words and bars as well; what speaks like vLLM behind them is a server.
    known = {name for name, said_by in services.items() if most or (len(said_by) >= 3 and any(map(is_prefixed, said_by)))}
    known = {name for name in known if any(map(str.strip, services[name]))}  # a server says something behind its name
    words = Counter(match[0] for line in bare if (match := _WORD_RE.match(_STAMP_RE.sub("", line, count=1))))
    word, times = next(iter(words.most_common(1)), ("", 0))
    if word.strip("[]: ").upper() in LEVELS or times < max(3, 0.9 * len(bare)):
        word = ""
    levels = [match[1] for line in lines if line.startswith("{") and (match := _LEVELLED_RE.search(line))]
    one_level = len(levels) >= 8 and len(set(levels)) == 1
    is_json = sum('{"' in line[:160] or '{ "' in line[:160] for line in lines) >= WRAPPED_SHARE * len(lines)
    # The width at which longer lines were broken: no line is longer, and many are exactly as long.
    longest, width = max(map(len, lines)), 0
    pairs = [(line, after) for line, after in pairwise(lines) if len(line) == longest]
    if 60 <= longest < 400 and len(pairs) >= max(3, 0.08 * len(lines)) and sum(map(is_prefixed, lines)) >= 3:
        rests = sum(1 for line, after in pairs if not is_prefixed(after) and after[:8] != line[:8])
        width = longest if rests >= (0.8 if len(pairs) >= 5 else 1) * len(pairs) else 0
    # Which field holds the words, in what Google's and Amazon's consoles and commands write with indentation.
    field, begins = "", [line.strip().partition(": ")[0] for line in lines if lines[0].strip() in ("[", "{")]
    if begins.count('"textPayload"') >= _FEWEST_RECORDS:
        field = '"textPayload": '
    elif begins.count('"ingestionTime"') >= _FEWEST_RECORDS <= begins.count('"message"'):
        field = '"message": '
    return LineFormat(frozenset(known), word, quoted, one_level, width, is_json, field)


_MONTHS = {name: at for at, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
_NO_YEAR = 1972  # a leap year, for 29 February


class StampClock:
    """Reads stamps in the order of the file; a stamp without a year belongs to the year of those before it.

    Where stamps without one came first, those with one are put beside them: another program's line does not move the clock.
    """

    def __init__(self) -> None:
        self._last = _NO_YEAR, 0  # year and month
        self._has_bare = False  # whether a stamp without a year was seen
        self._years: int | None = None  # from the years of the others to those

    def seconds(self, stamp: str) -> float | None:
        """Of "11-15 08:00:00", "2025-11-15T08:00:00.123Z", "2025-11-15 08:00:00,123" or "Nov 15 08:00:00"."""
        try:
            if stamp[:1].isalpha():
                stamp = f"{_MONTHS[stamp[:3]]:02}-{int(stamp[4:6]):02} {stamp[7:]}"
            if is_bare := stamp[4:5] != "-":
                year, month = self._last
                is_next = month - int(stamp[:2]) >= 6  # December, then January
                stamp = f"{year + is_next}-{stamp}"
            moment = datetime.fromisoformat(stamp)
            if self._has_bare and not is_bare:
                self._years = self._last[0] - moment.year if self._years is None else self._years
                moment = moment.replace(year=moment.year + self._years)
        except (ValueError, KeyError):
            return None
        if not 1970 <= moment.year <= 2200:
            return None
        if is_bare or not self._has_bare:
            self._last = moment.year, moment.month
        self._has_bare = self._has_bare or is_bare
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# Of each telling word in the middle of a huge text, the first and the last few places are kept with the lines around them; of
# the periodic lines an even sample. Everything is bounded: a log of nothing but errors costs no more than one with none.
BLOCK_BYTES = 1 << 20
HEAD_BYTES, HEAD_LINES = 2 << 20, 30_000
LINES_BEFORE, BYTES_BEFORE = 120, 48 << 10
LINES_AFTER, BYTES_AFTER = 60, 24 << 10
FIRST_PLACES, LAST_PLACES = 4, 4  # kept of each word; of the last ones, one a block
SAMPLED_LINES, SAMPLED_BYTES = 2_000, 1 << 10

PERIODIC = b"Avg prompt throughput"
TELLING: tuple[bytes, ...] = (
    b"Traceback (most", b"ERROR", b"CRITICAL", b"ut of memory", b"OutOfMemory", b"LLM engine (v",
    b"API server version", b"non-default args", b"Available KV cache memory", b"died unexpectedly", b"Killed",
    b"is preempted by", b"[shutdown]", b"SIGTERM", b"Segmentation fault", b"NCCL WARN", b"NVRM", b"plimsoll: survive: ",
)  # fmt: skip


class Chunk(NamedTuple):
    """Lines that follow each other, and the number of the first; None where it cannot be known."""

    first: int | None
    data: bytes


class _Region(NamedTuple):
    start: int  # in the whole text
    first: int  # the number of its first line
    data: bytes


class _Span(NamedTuple):
    start: int  # in the buffer
    end: int


class MiddleSifter:
    """Takes the text block by block, in order, from its first byte."""

    def __init__(self) -> None:
        self._head: list[bytes] = []
        self._head_is_full = False
        self._buffer = bytearray()
        self._base = 0  # where the buffer begins in the whole text
        self._base_lines = 0  # newlines before the buffer
        self._searched = 0  # everything before this place was looked through
        self._left = dict.fromkeys(TELLING, FIRST_PLACES)
        self._firsts: list[_Region] = []
        self._lasts: dict[bytes, deque[_Region]] = {word: deque(maxlen=LAST_PLACES) for word in TELLING}
        self._samples: list[_Region] = []
        self._stride = 0
        self._next_sample = 0

    def feed(self, block: bytes) -> None:
        """Take the next bytes."""
        self._buffer += block if self._head_is_full else self._fill_head(block)
        if len(self._buffer) >= BLOCK_BYTES + BYTES_BEFORE + BYTES_AFTER:
            self._search(len(self._buffer) - BYTES_AFTER)

    @property
    def newlines(self) -> int:
        """How many line ends there were in all that was fed."""
        return self._base_lines + self._buffer.count(b"\n")

    def _fill_head(self, block: bytes) -> bytes:
        """Keep the start whole; returns what is no longer part of it."""
        lines = block.count(b"\n")
        if len(block) <= HEAD_BYTES - self._base and self._base_lines + lines <= HEAD_LINES:
            self._head.append(block)
            self._base += len(block)
            self._base_lines += lines
            return b""
        self._head_is_full = True
        data = b"".join([*self._head, block])
        cut = data.rfind(b"\n", 0, HEAD_BYTES) + 1 or min(HEAD_BYTES, len(data))
        if data.count(b"\n", 0, cut) > HEAD_LINES:
            cut = 0
            for _ in range(HEAD_LINES):
                cut = data.find(b"\n", cut) + 1
        self._head = [data[:cut]]
        self._base = self._searched = self._next_sample = cut
        self._base_lines = data.count(b"\n", 0, cut)
        return data[cut:]

    def chunks(self) -> list[Chunk]:
        """All that is kept, in order; nothing may be fed after this."""
        self._search(len(self._buffer))
        kept = {region.start: region for region in self._samples}
        for region in [*self._firsts, *(region for some in self._lasts.values() for region in some)]:
            if region.start not in kept or len(kept[region.start].data) < len(region.data):
                kept[region.start] = region
        found = [Chunk(1, b"".join(self._head))] if self._head else []
        reached = sum(map(len, self._head))
        for start in sorted(kept):
            region = kept[start]
            skip = max(0, reached - start)
            if skip >= len(region.data):
                continue
            found.append(Chunk(region.first + region.data.count(b"\n", 0, skip), region.data[skip:]))
            reached = start + len(region.data)
        return found

    def _search(self, high: int) -> None:
        """Look through the buffer up to here, then let go of what no later place can want as context."""
        low = self._searched - self._base
        firsts: set[_Span] = set()
        lasts: dict[bytes, _Span] = {}
        for word in TELLING:
            end = high + len(word) - 1
            # Most words are in few blocks: a long one is sooner found missing forwards, a short one backwards.
            if len(word) >= 10 and self._buffer.find(word, low, end) < 0:
                continue
            last = self._buffer.rfind(word, low, end)
            if last < 0:
                continue
            at = low
            while self._left[word] and (at := self._buffer.find(word, at, end)) >= 0:
                self._left[word] -= 1
                span = self._around(at, firsts)
                firsts.add(span)
                at = max(span.end, at + 1)
            lasts[word] = self._around(last, lasts.values())
        samples = []
        at = max(low, self._next_sample - self._base)
        while at < high and (at := self._buffer.find(PERIODIC, at, high + len(PERIODIC) - 1)) >= 0:
            start = self._buffer.rfind(b"\n", max(0, at - SAMPLED_BYTES), at) + 1
            end = self._buffer.find(b"\n", at, at + SAMPLED_BYTES) + 1
            if end > 0 and start > 0:
                samples.append(_Span(start, end))
            at += max(self._stride, 1)
            self._next_sample = self._base + at
        drop = max(0, high - BYTES_BEFORE)
        regions = self._regions(sorted({*firsts, *lasts.values(), *samples}), drop)
        self._firsts += [regions[span] for span in firsts]
        for word, span in lasts.items():
            self._lasts[word].append(regions[span])
        self._samples += [regions[span] for span in samples]
        while len(self._samples) > SAMPLED_LINES:  # then every second one of all
            self._samples = self._samples[::2]
            self._stride = max(2 * self._stride, (self._samples[-1].start - self._samples[0].start) // SAMPLED_LINES)
        self._searched = self._base + high
        self._base += drop
        del self._buffer[:drop]

    def _around(self, at: int, known: Iterable[_Span]) -> _Span:
        """The lines around a place: those of a known span that holds it already, where there is one."""
        if (near := next((span for span in known if span.start <= at < span.end), None)) is not None:
            return near
        floor, ceiling = max(0, at - BYTES_BEFORE), min(len(self._buffer), at + BYTES_AFTER)
        before = self._buffer[floor:at].rsplit(b"\n", LINES_BEFORE + 1)
        after = self._buffer[at:ceiling].split(b"\n", LINES_AFTER + 1)
        # The first and the last piece are what is not wanted, or cut by the limit in bytes: begin and end with a whole line,
        # unless this very line is longer than that.
        start = floor + len(before[0]) + 1 if len(before) > 1 else floor
        end = ceiling - len(after[-1]) if len(after) > 1 else ceiling
        return _Span(start, end)

    def _regions(self, spans: list[_Span], drop: int) -> dict[_Span, _Region]:
        """These places as bytes, with the numbers of their lines; moves the count of lines on to where the buffer will begin.

        Line ends are the one thing that is counted in every byte of the text, so they are counted once.
        """
        found: dict[_Span, _Region] = {}
        lines, reached, at_drop = self._base_lines, 0, None
        for span in spans:
            if at_drop is None and span.start >= drop:
                lines += self._buffer.count(b"\n", reached, drop)
                reached, at_drop = drop, lines
            lines += self._buffer.count(b"\n", reached, span.start)
            reached = span.start
            found[span] = _Region(self._base + span.start, lines + 1, bytes(self._buffer[span.start : span.end]))
        self._base_lines = lines + self._buffer.count(b"\n", reached, drop) if at_drop is None else at_drop
        return found


# A plain file is read tail first: if time runs out in its middle, the end and the start are there, the end without numbers.
WHOLE_BYTES, WHOLE_LINES = 8 << 20, 120_000
TAIL_BYTES, TAIL_LINES = 4 << 20, 60_000
PROBES = 16  # places of a file that are looked at to tell whether it is text


def _kept(blocks: Iterator[bytes]) -> list[Chunk]:
    """All of it while it is small; from then on a window at its end, and the middle sifted."""
    held: deque[bytes] = deque()
    size = lines = 0
    middle: MiddleSifter | None = None
    for block in blocks:
        held.append(block)
        size += len(block)
        lines += block.count(b"\n")
        if middle is None and (size > WHOLE_BYTES or lines > WHOLE_LINES):
            middle = MiddleSifter()
        while middle is not None and size - len(held[0]) >= TAIL_BYTES:
            size -= len(held[0])
            middle.feed(held.popleft())
    data = b"".join(held)
    if middle is None:
        return [Chunk(1, data)] if data else []
    before, tail = _split(data)
    middle.feed(before)
    return [*middle.chunks(), Chunk(middle.newlines + 1, tail)]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The tail that is kept whole, beginning with a line where there is one, and what comes before it."""
    cut = max(0, len(data) - TAIL_BYTES)
    if cut:
        cut = data.find(b"\n", cut) + 1 or cut
    if data.count(b"\n", cut) > TAIL_LINES:
        at = len(data) - 1
        for _ in range(TAIL_LINES):
            at = data.rfind(b"\n", 0, at)
        cut = at + 1
    return data[:cut], data[cut:]


def _kept_of_huge(path: str, descriptor: int, size: int, budget: Budget) -> list[Chunk]:
    probes = [max(0, size - SAMPLE_BYTES), *(_next_data(descriptor, size * part // PROBES) for part in range(PROBES))]
    if not any(is_text(os.pread(descriptor, SAMPLE_BYTES, at)) for at in probes if at < size):
        raise BadInput(f"{path}: not text")
    begin = size - TAIL_BYTES
    before, tail = _split(os.pread(descriptor, TAIL_BYTES + 1, begin - 1)) if begin > 0 else (b"", b"")
    end = begin - 1 + len(before)
    middle = MiddleSifter()
    at = 0
    while at < end and not budget.is_over():
        at = _next_data(descriptor, at)
        block = os.pread(descriptor, min(BLOCK_BYTES, end - at), at) if at < end else b""
        if not block:
            break
        middle.feed(block)
        at += len(block)
    return [*middle.chunks(), Chunk(None if budget.was_short else middle.newlines + 1, tail)]


def _next_data(descriptor: int, at: int) -> int:
    """The next place at or after this one that is no hole; a hole holds neither text nor line ends."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else at
    except OSError as problem:
        return 1 << 62 if problem.errno == errno.ENXIO else at


_SAMPLE, _SAMPLE_BYTES = 400, 64 << 10  # lines at either end that show this file's habits
_LONGEST_RAW = 64 * LONGEST  # a line of progress bars may be long and end in the error


def read_log(path: str, *, source: str = "", deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> Log:
    """The lines of this file; BadInput where it is not text, TimedOut where nothing came before the deadline."""
    budget = Budget(deadline, clock)
    descriptor, what = opened(path)
    try:
        is_file, was_short = stat.S_ISREG(what.st_mode), False
        if is_file and what.st_size > WHOLE_BYTES and is_plain(os.pread(descriptor, 512, 0)):
            chunks = _kept_of_huge(path, descriptor, what.st_size, budget)
        else:
            chunks = _kept(text_blocks(path, Descriptor(descriptor, budget), budget))
            was_short = budget.was_short  # time ran out, and the rest was not read
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)
    head = chunks[0].data[:_SAMPLE_BYTES] if chunks else b""
    tail = chunks[-1].data[-_SAMPLE_BYTES:] if len(chunks) > 1 or len(head) == _SAMPLE_BYTES else b""
    ends = [*head.split(b"\n")[:_SAMPLE], *tail.split(b"\n")[-_SAMPLE:]] if chunks else []
    reader = _LineReader(detect_format(without_colours(raw[:400].decode("utf-8", "replace")) for raw in ends))
    skipped: list[tuple[int, int]] = []
    after = 1  # the number the next line would have if nothing was left out
    for chunk in chunks:
        if chunk.first is None or chunk.first > after:
            skipped.append((len(reader.lines), 0 if chunk.first is None else chunk.first - after))
            reader.flush()
        after = reader.read(chunk)
    reader.flush()
    if was_short:
        skipped.append((len(reader.lines), 0))
    lines = reader.lines
    # A console may show the last line on top: then nearly every stamp is older than the one above it.
    stamps = [line.at for line in lines if line.at is not None]
    if not skipped and len(stamps) >= max(8, len(lines) // 3):
        rising, falling = sum(b > a for a, b in pairwise(stamps)), sum(b < a for a, b in pairwise(stamps))
        lines = lines[::-1] if falling >= 5 and falling > 9 * rising else lines
    return Log(source or path, lines, tuple(skipped), what.st_size if is_file else None)


class _LineReader:
    """Turns raw lines into lines, remembering what one line says of the next."""

    def __init__(self, habits: LineFormat) -> None:
        self.lines: list[LogLine] = []
        self._habits = habits
        self._clock = StampClock()
        self._begun: dict[str, tuple[int | None, UnwrappedLine]] = {}  # by server: the start of a line the runtime cut

    def read(self, chunk: Chunk) -> int:
        """Read the lines of this chunk; returns the number of the line after it."""
        number = chunk.first
        count, begun, since = 0, "", 0
        lines = (chunk.data.replace(b"\0", b"") if b"\0" in chunk.data else chunk.data).split(b"\n")
        if not lines[-1]:
            lines.pop()
        for line in lines:
            cut = line
            if len(line) > _LONGEST_RAW:
                cut = line[-_LONGEST_RAW:] if b"\r" in line else line[:_LONGEST_RAW]
            raw = cut.decode("utf-8", "replace")
            if self._habits.width and len(raw) == self._habits.width and len(begun) < LONGEST:
                since = since if begun else count
                begun += raw  # a terminal broke the line here
            else:
                self._line(None if number is None else number + (since if begun else count), begun + raw)
                begun = ""
            count += 1
        if begun:
            self._line(None if number is None else number + since, begun)
        return (number or 1) + count

    def _line(self, number: int | None, raw: str) -> None:
        text = without_colours(raw.rstrip("\r"))
        for bare in unwrap(text, self._habits, up_to_record=bool(self._begun)):
            if not bare.is_record or not (bare.goes_on or self._begun):
                self._add(number, bare)
                continue
            at, start = self._begun.pop(bare.server, (number, None))
            whole = bare if start is None else start._replace(text=start.text + bare.text, goes_on=bare.goes_on)
            if whole.goes_on:
                self._begun[bare.server] = at, whole._replace(text=whole.text[:_LONGEST_RAW])
            else:
                self._add_whole(at, whole)

    def flush(self) -> None:
        for number, bare in self._begun.values():
            self._add_whole(number, bare)
        self._begun.clear()

    def _add_whole(self, number: int | None, bare: UnwrappedLine) -> None:
        for inner in unwrap(without_colours(bare.text), self._habits):
            self._add(number, merge_wrapping(inner, bare))

    def _add(self, number: int | None, bare: UnwrappedLine) -> None:
        text = bare.text
        if "\x1b" in text:  # spelled out in JSON, cut in two by a runtime, or none of a terminal's
            text = without_colours(text).replace("\x1b", "")
        if text.startswith("```"):
            text = text.lstrip("`")
            if len(text) < 20 and " " not in text:
                return  # the fence of a code block, with or without its language
        level = "" if self._habits.one_level else LEVELS.get(bare.level.upper(), "")
        first = said(text)
        if "\r" not in text and len(parts := split_writers(first.text)) == 1:
            self._append(number, bare, first, level)
            return
        speaker = first.process
        pieces = shown(first.text)
        for piece in pieces:
            one = first._replace(text=piece) if piece is pieces[0] else said(piece)
            parts = split_writers(one.text)
            for part in parts:
                now = one._replace(text=part) if part is parts[0] else said(part)
                # What follows a carriage return is the same process's, unless it says otherwise.
                speaker = now.process or (speaker if part is parts[0] else "")
                if now.text or len(parts) == len(pieces) == 1:
                    self._append(number, bare, now._replace(process=speaker), level)

    def _append(self, number: int | None, bare: UnwrappedLine, one: ParsedLine, level: str) -> None:
        at = bare.at
        if at is None and bare.stamp:
            at = self._clock.seconds(bare.stamp)
        if at is None and one.stamp:
            at = self._clock.seconds(one.stamp)
        self.lines.append(LogLine(number, one.process, one.level or level, at, one.text[:LONGEST], one.place, bare.server))

"""Takes off what a container runtime, a log collector or a copy into an issue puts around a line.

Each wrapping is known by its first characters, so a plain line costs next to nothing. Wrappings nest: a line of journald may
hold one of docker, and that one a stamp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

# The prefixes of a line: which process speaks, at what level, and when.
# (EngineCore_DP0 pid=12) ERROR 11-15 08:00:00 [core.py:700] text         vLLM 0.10 and later
# (VllmWorker rank=0 pid=1) ERROR 05-20 12:00:00 [file.py:1] text         0.8 to 0.10
# ERROR 12-16 21:40:15 engine.py:135] text                                the first engine (V0)
# (RayWorkerWrapper pid=1, ip=10.0.0.1) text                              Ray
# [rank0]: text                                                           torch
# vLLM's own prefix is cut off; the level of somebody else's format is only read, and the text left whole.

LEVELS = {"TRACE": "DEBUG", "DEBUG": "DEBUG", "INFO": "INFO", "NOTICE": "INFO", "WARN": "WARNING", "WARNING": "WARNING",
          "ERROR": "ERROR", "CRITICAL": "CRITICAL", "FATAL": "CRITICAL"}  # fmt: skip

MOST_PARTS = 1000  # of one line: a traceback posted without its line ends has one a frame

_PROCESS = r"\((?P<process>(?:[A-Za-z_][\w.:\-]{0,60}(?: [\w.=:,\-]{1,40}){0,3} )?pid=\d{1,10}(?:, ip=[0-9A-Fa-f.:]{1,45})?)\)"
_STAMP = r"(?P<stamp>(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
_OWN = (
    rf"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {_STAMP} (?:\[[^\]\s]{{1,200}}:\d{{1,6}}\]|[\w./\-]{{1,100}}:\d{{1,6}}\]) ?"
)


class ParsedLine(NamedTuple):
    """A line taken apart."""

    process: str
    level: str
    stamp: str  # "11-15 08:00:00", as written; "" where the line does not say
    text: str


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
        return ParsedLine(process, match["level"], match["stamp"], text[match.end() :])
    return ParsedLine(process, foreign_level(text), "", text)


def is_prefixed(text: str) -> bool:
    """True if the line begins as vLLM's own do."""
    return _PROCESS_RE.match(text) is not None or _OWN_RE.match(text) is not None


def foreign_level(text: str) -> str:
    """The level where another logger (uvicorn, Python's own, loguru, torch) puts it: at the start of the line."""
    first = text[:1]
    if first == "[" and text[1:2] in "IWEF" and text[2:5].isdigit() and text[5:7].strip("0123456789") in ("", " "):
        return {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}[text[1]]  # torch: [W1115 08:00:00.0 file.cpp:1]
    if first not in "TDINWECF|-[( " or first == "":
        return ""
    match = _FOREIGN_RE.match(text)
    return LEVELS[match["level"]] if match else ""


def split_writers(text: str) -> list[str]:
    """The text cut where another process's message begins in the middle of it: two writers shared one terminal."""
    if "pid=" not in text and not any(word in text for word in _OWN_WORDS):
        return [text]
    cuts = [match.start() for match in _COLLISION_RE.finditer(text) if match.start() > 0][:MOST_PARTS]
    if not cuts:
        return [text]
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
_JSON_TEXT = ("log", "MESSAGE", "message", "msg", "text", "textPayload", "body", "event", "line")
_JSON_SERVER = ("CONTAINER_NAME", "container_name", "_SYSTEMD_UNIT", "UNIT", "pod_name", "pod", "SYSLOG_IDENTIFIER")
_JSON_STAMP = ("time", "timestamp", "@timestamp", "ts", "asctime")
_JSON_LEVEL = ("level", "levelname", "severity")
_JSON_RAISED = ("exc_info", "exception", "exc_text", "stack_trace", "traceback", "stack")


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
    field: str = ""  # '"textPayload": ' of JSON with a line for each field: the others are not the program's words


_CRI_RE = re.compile(rf"({_STAMPED}) (?:stdout|stderr) ([FP])(?::[^ ]{{0,20}})?(?: |$)")
_STAMP_RE = re.compile(rf"({_STAMPED})(?: |\t|$)")
_SYSLOG_RE = re.compile(r"(?P<host>[\w.\-]{1,64}) (?P<unit>[\w.@/\-]{1,64})(?:\[(?P<pid>\d{1,10})\])?: ?")
_JOURNAL_RE = re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})? ")
_COMPOSE_RE = re.compile(r"(?P<service>[A-Za-z0-9][\w.\-]{0,80}?(?P<number>[_-]\d{1,4})?) {0,40}\| ?")
_POD_RE = re.compile(r"\[pod/(?P<name>[\w.\-]{1,120}/[\w.\-]{1,120})\] ?")
_BRACKETED_RE = re.compile(rf"\[({_STAMPED})\] ?")
_LEVELLED_RE = re.compile(rf'"(?:{"|".join(_JSON_LEVEL)})"\s{{0,4}}:\s{{0,4}}"(\w{{1,20}})"')
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
        said = _of_field(text, habits.field)
        return unwrap(said, habits._replace(field="")) if said is not None else []
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
        return _of_json(text)
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
    return UnwrappedLine(text[match.end() :], stamp=match[1])


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
    said = next((tree[key] for key in _JSON_TEXT if isinstance(tree.get(key), str | list)), None)
    if isinstance(said, list):  # journald writes what is not UTF-8 as numbers
        if not all(isinstance(number, int) and 0 <= number < 256 for number in said):
            return None
        said = without_colours(bytes(said).decode("utf-8", "replace"))
    if said is None:
        return None
    if isinstance(kubernetes := tree.get("kubernetes"), dict):
        tree = {**kubernetes, **tree}
    if raised := _first(tree, _JSON_RAISED):
        said = f"{said}\n{raised}"
    is_docker = isinstance(tree.get("log"), str)
    goes_on = is_docker and not said.endswith("\n") and len(said.encode("utf-8", "replace")) >= _DOCKER_PIECE_BYTES
    return UnwrappedLine(
        said.removesuffix("\n"), _first(tree, _JSON_SERVER).removesuffix(".service"), _first(tree, _JSON_STAMP),
        _first(tree, _JSON_LEVEL), _seconds_of(tree), goes_on, is_docker,
    )  # fmt: skip


def _of_field(text: str, field: str) -> str | None:
    bare = text.strip().removesuffix(",")
    if not bare.startswith(field):
        return None
    try:
        said = json.loads(bare.removeprefix(field))
    except ValueError:
        return None
    return said if isinstance(said, str) else None


def _field_of(lines: list[str]) -> str:
    """Which field holds the words, in what cloud consoles and their commands write with indentation."""
    if lines[0].strip() not in ("[", "{"):
        return ""
    begins = [line.strip().partition(": ")[0] for line in lines]
    if begins.count('"textPayload"') >= _FEWEST_RECORDS:  # Google's
        return '"textPayload": '
    return '"message": ' if begins.count('"ingestionTime"') >= _FEWEST_RECORDS <= begins.count('"message"') else ""  # Amazon's


def _seconds_of(tree: dict[str, object]) -> float | None:
    """The time where it is written as a number: of seconds, or of microseconds by journald."""
    at = tree.get("__REALTIME_TIMESTAMP")
    if isinstance(at, str) and at.isdecimal() and len(at) < 20:
        return int(at) / 1e6
    number = next((tree[key] for key in _JSON_STAMP if isinstance(tree.get(key), int | float)), None)
    return float(number) if isinstance(number, int | float) and 1e8 < number < 1e10 else None


def _first(tree: dict[str, object], keys: tuple[str, ...]) -> str:
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
    words: dict[str, int] = {}
    for line in bare:
        if match := _WORD_RE.match(line):
            words[match[0]] = words.get(match[0], 0) + 1
    word = max(words, key=lambda one: words[one], default="")
    if word.strip("[]: ").upper() in LEVELS or words.get(word, 0) < max(3, 0.9 * len(bare)):
        word = ""
    levels = [match[1] for line in lines if line.startswith("{") and (match := _LEVELLED_RE.search(line))]
    one_level = len(levels) >= 8 and len(set(levels)) == 1
    return LineFormat(frozenset(known), word, quoted, one_level, _width_of(lines), _field_of(lines))


def _width_of(lines: list[str]) -> int:
    """The width at which longer lines were broken: no line is longer, and many are exactly as long."""
    longest = max(map(len, lines))
    pairs = [(line, after) for line, after in pairwise(lines) if len(line) == longest]
    if not 60 <= longest < 400 or len(pairs) < max(5, 0.08 * len(lines)):
        return 0
    rests = sum(1 for line, after in pairs if not is_prefixed(after) and after[:8] != line[:8])
    is_servers = sum(map(is_prefixed, lines)) >= 3
    return longest if is_servers and rests >= 0.8 * len(pairs) else 0

"""Shows only those parts of an engine's log that are certainly no user's text: what fits a known pattern from end to end.

A record's process, level, time and place in the source are always shown; its message if it is one of vLLM's own texts, each
field of its type. An exception's kind and message are shown if they are known, frames if their package is, and known lines of
the system, the driver and the collectives. Everything else is hidden: a part as "[hidden]", and a line says how many.
safe_log.yaml lists the patterns, safe_records.txt the texts.
"""

from __future__ import annotations

import builtins
import errno
import http.client
import json
import keyword
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from plimsoll.doctor.words import words
from plimsoll.guard.adapters.own_process import NEW_LIFE
from plimsoll.redaction import HIDDEN
from plimsoll.vllm.failure_texts import TEXTS
from plimsoll.vllm.versions import rows

_KNOWN = words("safe_log", "guard/daemon")


def _any_of(patterns: str | Iterable[str]) -> str:
    """Returns one pattern for all of these; a text is a list of words."""
    return f"(?:{'|'.join(patterns.split() if isinstance(patterns, str) else patterns)})"


_RECORD = re.compile(
    r"(?P<head>(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?(?P<file>[\w./]{1,200})\.py:\d{1,6}\] ?)"
    r"(?P<text>.*)",
    re.DOTALL | re.ASCII,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}m")
_WRAPPING = re.compile(
    r"(?:<\d{1,3}>|\[\d{4}-\d\d-\d\d[T ][\d:.,Z+\-]{8,24}\] ?|\[pod/[a-z\d./-]{1,200}\] ?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d:.,Z+\-]{0,20}(?: (?:stdout|stderr) [FP])? "
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w./-]{1,60}\[\d{1,10}\]: ?"
    r"|[a-z\d][a-z\d_.-]{0,60}[_-]\d{1,4} {0,40}\| ?|[a-z\d_.-]{0,30}vllm[a-z\d_.-]{0,30} {0,40}\| ?){1,4}",
    re.ASCII,
)
_PROCESS = re.compile(
    r"(?:\((?:API_?[Ss]erver|ApiServer|EngineCore|DPCoordinator|Vllm\w|Worker|Ray\w|raylet|Pooler|Process)[\w.:=-]{0,60}"
    r"(?: \w{1,12}=\d{1,6})? pid=\d{1,10}(?:, ip=[\d.:a-f]{1,45})?\) ?|\[rank\d{1,4}\]: ?)+",
    re.ASCII,
)
_PID = re.compile(r"\bpid=(\d{1,10})")
_FRAME = re.compile(
    r'(?P<before>\s*File ")(?:<(?:frozen [\w.]{1,60}|string|stdin|unknown|eval_with_key>\.\d{1,6})>'
    r'|(?P<path>[\w./@+-]{1,300}))(?P<after>", line \d{1,7}(?:, in [\w.<>]{1,120})?\s*)',
    re.ASCII,
)
_PACKAGES, _FOLDERS = frozenset(_KNOWN["packages"].split()), frozenset(["", *_KNOWN["folders"].split()])
_STANDARD = sys.stdlib_module_names
_STANDARD_FILES = _STANDARD | {f"{name}.py" for name in _STANDARD}
_CARET = re.compile(r"\s*[\^~]+\s*")
_STRUCTURE = re.compile(_any_of(_KNOWN["structure"]))
_WORD = rf"(?!(?:{'|'.join(keyword.kwlist)})\b)[A-Za-z_]\w*"
_NO_CODE = re.compile(rf"\b{_WORD} +{_WORD}|[^\x00-\x7f]|#")
_REMARK = re.compile(r"  # (?:type: ignore|noqa|pragma)[\w:,() \[\]-]{0,60}$")
_EXCEPTION = re.compile(
    r"\s*(?P<kind>(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"\w{0,60}(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Dead|Disconnect|NotFound|Warning))(?:: (?P<text>.*))?\s*",
    re.DOTALL | re.ASCII,
)
_BARE_KINDS = {name for name in vars(builtins) if _EXCEPTION.fullmatch(name)} | set(_KNOWN["exceptions"].split())
_ERRORS = [re.escape(os.strerror(number)) for number in errno.errorcode]
_SHORT_MESSAGE = re.compile(
    rf"(?:\[Errno \d{{1,4}}\] ?)?{_any_of([*_ERRORS, *_KNOWN['short_messages']])}"
    rf"(?:[ :,;.()]+{_any_of(_KNOWN['short_words'])})*[ :,;.()]*",
    re.ASCII,
)
_CUDA = f"(?:{_KNOWN['cuda'].replace(' |', '|').strip()})"
_SYSTEM, _BEGINS = (
    re.compile(_any_of(_KNOWN[name]).replace("DEATH", f"(?:{_KNOWN['death']})").replace("{cuda}", _CUDA), re.ASCII)
    for name in ("system", "begins")
)
_BANNER = re.compile(r"[^\w\n]{0,80}[█▀▄▌▐][^\w\n]{0,80}(?:version \d[\w.+-]{0,60})?\s*", re.ASCII)
_PROGRESS = re.compile(
    rf"(?:\s*(?:{_any_of(_KNOWN['bars'])}:? *)?\d{{1,3}}%(?:\|[^|A-Za-z\n]{{0,200}}\|| Completed \|)[\d.?kMGTB/ ]{{1,40}}"
    r"\[[\d:?<, .]{1,40}[\w/?.]{0,20}\]\s*)+",
    re.ASCII,
)
_ACCESS = re.compile(
    r'(INFO: {5})(\S{1,80})( - "[A-Z]{3,8} )([^\s?"]{0,300})(\?[^\s"]*)?( HTTP/[\d.]{1,3}" )(\d{3})[ \w]{0,40}\s*', re.ASCII
)
_CLIENT = re.compile(r"[\d.]{7,15}:\d{1,5}|\[?[\da-f:]{2,39}\]?:\d{1,5}|-")
_PATHS = re.compile(
    _any_of(
        {re.sub(r"\\\{\w+\\\}", r"[\\w-]{1,64}", re.escape(row.partition(" ")[2])) for row in rows("endpoints")}
        | {"/plimsoll/[a-z]{1,20}"}
    ),
    re.ASCII,
)
_QUOTED = re.compile(r"'(?:[^'\\\n]|\\.){0,4000}'|\"(?:[^\"\\\n]|\\.){0,4000}\"|`[^`\n]{0,4000}`")
_MARK = NEW_LIFE.decode().strip()
_INTRODUCES = ("api_server", "api_utils", "utils")  # they print vLLM's name and release when a process begins
_INTRODUCTION = re.compile(r"[█▀▄] {1,4}version |vLLM (?:API )?server version ")
SHORTEST_NEEDLE = 12
_JSON_TIMES = ("time", "timestamp", "asctime", "ts")
_UP = re.compile(r"Application startup complete|Uvicorn running|Started server process|\] (?:Received|Added) request| HTTP/1")


class _Text:
    """A known text: words, and fields of a type between them."""

    _FIELD = re.compile(r"\{(n|x|b|cuda|)\}")
    _TYPES: ClassVar[dict[str, re.Pattern[str]]] = {
        "n": re.compile(r"-?[\d,]{1,20}(?:\.\d{1,15})?(?:e[+-]?\d{1,3})?(?: ?(?:%|x|m?s|[kKMGT]?i?B|tokens))?", re.ASCII),
        "cuda": re.compile(_CUDA),
        "": re.compile(r"[\w./:+@%=,*&~<>|()\[\]{}'\"; -]{0,400}", re.ASCII),
    }
    _PROSE = re.compile(r"[A-Za-z]['\"]? +['\"]?[A-Za-z]")

    def __init__(self, text: str) -> None:
        self.parts: Sequence[str] = self._FIELD.split(text)
        self.known = sum(map(len, self.parts[::2]))

    def fit(self, line: str, begun: str) -> tuple[str, int] | None:
        """Returns what may be shown of the beginning of the line, and where that ends; None where the line has other words."""
        if not line.startswith(self.parts[0]):
            return None
        shown, at = self.parts[0], len(self.parts[0])
        for kind, after in zip(self.parts[1::2], self.parts[2::2], strict=True):
            pattern = self._TYPES.get(kind)
            exact = pattern.match(line, at) if pattern is not None and kind else None  # a number may have the mark that follows
            if exact is not None and line.startswith(after, exact.end()):
                end = exact.end()
            else:
                end = line.find(after, at) if after else len(line)
            if end < 0:
                return None
            field, at = line[at:end], end + len(after)
            is_safe = pattern is not None and pattern.fullmatch(field) and (kind or not self._PROSE.search(field))
            shown += (field if is_safe else (kind == "b" and begun) or HIDDEN) + after
        return None if line[at : at + 1].isalnum() and shown[-1:].isalnum() else (shown, at)


LONGEST_KNOWN = 8_192


def _by_beginning(texts: Iterable[str]) -> dict[str, list[_Text]]:
    found: dict[str, list[_Text]] = {}
    for text in texts:
        found.setdefault(text[:3], []).append(_Text(text))
    return found


_TEXTS = _by_beginning(
    [*_KNOWN["messages"], *Path(__file__).with_name("safe_records.txt").read_text(encoding="utf-8").splitlines()]
)
_NEEDLES = re.compile(_any_of(re.escape(text.needle) for text in TEXTS if len(text.needle) >= SHORTEST_NEEDLE))


def _known(line: str, begun: str = "") -> str:
    """Returns the line with what is not known hidden; sentences may follow each other.

    Of what is not known, the constant words by which doctor knows a failure are shown.
    """
    shown = ""
    while line:
        # Each known text may search all of the line: a user's text of many of them must not hold guard up.
        texts = _TEXTS.get(line[:3], ()) if len(line) <= LONGEST_KNOWN else ()
        fits = [(text.known, *fit) for text in texts if (fit := text.fit(line, begun)) is not None]
        if not fits:
            return shown + f" {HIDDEN} ".join(["", *_NEEDLES.findall(line), ""]).strip()
        _, best, end = max(fits, key=lambda fit: (fit[0], HIDDEN not in fit[1]))
        rest = line[end:].lstrip()
        shown, line = shown + best + line[end : len(line) - len(rest)], rest
    return shown


def safe_lines(lines: Iterable[str], begun: str = "") -> Iterator[str]:
    """Yields a log's lines and hides those not known to be safe; `begun` replaces the text of vLLM's dump of its last step."""
    hidden, is_frame, ending = 0, False, ""  # `ending`: the head of a record whose exception may continue in the next lines
    is_up, has_served, logged = True, False, list(lines)  # not up while a process starts: it has had no requests
    spans: dict[str, list[int]] = {}  # of each process: its first and its last line
    for place, raw in enumerate(logged):
        for pid in _PID.findall(raw[:200]):
            spans.setdefault(pid, [place, place])[1] = place
    for place, raw in enumerate(logged):
        line = _COLOUR.sub("", raw.rstrip("\r\n"))
        wrap = _WRAPPING.match(line)
        head, bare = (wrap[0], line[wrap.end() :]) if wrap is not None else ("", line)
        if bare.startswith("{") and (plain := _from_json(bare)) is not None:
            bare = plain
        process = _PROCESS.match(bare)
        own, text = (process[0], bare[process.end() :]) if process is not None else ("", bare)
        record = _RECORD.match(text)
        file = "" if record is None else record["file"].rpartition("/")[2]
        if record is not None:
            own, text = own + record["head"], record["text"]
        shown, goes_on = _shown(text, file, begun, is_frame=is_frame, is_after=bool(ending) and ending == (own or "-"))
        if text == _MARK or (file in _INTRODUCES and _INTRODUCTION.search(text)):
            # A log that a user pasted begins like a process, and is none: those that ran before it go on after it.
            own_pid = _PID.search(raw[:200])
            is_first = own_pid is not None and spans[own_pid[1]][0] == place
            is_up = has_served and (not is_first or any(first < place < last for first, last in spans.values()))
        if _UP.search(bare) is not None:
            is_up = has_served = True
        if not is_up:
            shown, goes_on = text, False
        is_frame = _FRAME.fullmatch(text) is not None and shown is not None
        ending = (own or "-") if goes_on else ""
        if shown is None and record is None:
            hidden += 1
            continue
        if hidden:
            yield f"[{hidden} lines hidden: not known to be free of users' text]\n"
            hidden = 0
        yield f"{head}{own}{HIDDEN if shown is None else shown}\n"
    if hidden:
        yield f"[{hidden} lines hidden: not known to be free of users' text]\n"


def _shown(text: str, file: str, begun: str, *, is_frame: bool, is_after: bool) -> tuple[str | None, bool]:
    """Returns the part of one line that may be shown, or None; and True if an exception's message may continue after it."""
    if _STRUCTURE.fullmatch(text.strip()) or _CARET.fullmatch(text) or text == _MARK:
        return text, False
    if (frame := _FRAME.fullmatch(text)) is not None:
        return _frame(frame), False
    if is_frame and text.startswith("    "):
        code = _plain(text)
        return ("    " + HIDDEN if _NO_CODE.search(_REMARK.sub("", code)) else code), False  # the source line of the frame
    if (found := _EXCEPTION.fullmatch(text)) is not None:
        kind, message = found["kind"], found["text"]
        if kind not in _BARE_KINDS and kind.partition(".")[0] not in _PACKAGES | _STANDARD:
            return None, True
        if message is not None:
            message = message if _SHORT_MESSAGE.fullmatch(message) else _known(message)
        return kind if message is None else f"{kind}: {message}", True
    if is_after:
        return None, True
    if _BANNER.fullmatch(text):
        return text, False
    if file:
        return _known(text, begun), False
    if (access := _ACCESS.fullmatch(text)) is not None:
        client = access[2] if _CLIENT.fullmatch(access[2]) else HIDDEN
        path = access[4] if _PATHS.fullmatch(access[4]) else "/" + HIDDEN
        status = f"{access[7]} {http.client.responses.get(int(access[7]), '')}".rstrip()
        return f"{access[1]}{client}{access[3]}{path}{'?' + HIDDEN if access[5] else ''}{access[6]}{status}", False
    if _SYSTEM.fullmatch(text):
        return text, False
    if (start := _BEGINS.match(text) or _PROGRESS.match(text)) is not None:
        return start[0] + (HIDDEN if text[start.end() :].strip() else ""), False
    return None, False


def _frame(frame: re.Match[str]) -> str | None:
    """Returns the frame of a known package or of Python itself; folders before it are shown where every one is usual."""
    if (path := frame["path"]) is None:
        return frame[0]
    folders = path.split("/")
    known = [place for place, name in enumerate(folders) if name.removesuffix(".py") in _PACKAGES]
    python = [place for place, name in enumerate(folders) if name in _STANDARD_FILES and "python3" in "/".join(folders[:place])]
    if not (begins := known or python):
        return None
    before, rest = folders[: begins[0]], "/".join(folders[begins[0] :])
    is_usual = all(name in _FOLDERS or re.fullmatch(r"(?:python3|cpython-)[\w.-]*", name) for name in before)
    return f"{frame['before']}{'/'.join([*(before if is_usual else [HIDDEN]), rest])}{frame['after']}"


def _plain(text: str) -> str:
    """Returns the text, with quotations hidden that are more than a name."""
    return _QUOTED.sub(_identifier, text)


def _identifier(quoted: re.Match[str]) -> str:
    inner = quoted[0][1:-1]
    is_name = re.fullmatch(r"[\w./:+@%=,*-]{1,120}", inner, re.ASCII) is not None
    return quoted[0] if is_name else quoted[0][0] + HIDDEN + quoted[0][-1]


def _from_json(line: str) -> str | None:
    """Returns a structured record as vLLM would print it, or docker's line; drops fields of an application's own."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    text = next((found[key] for key in ("log", "message", "msg", "MESSAGE", "text") if isinstance(found.get(key), str)), "")
    name = str(found.get("name", found.get("logger", "")))
    process = _PROCESS.match(text)
    if _RECORD.match(text, process.end() if process is not None else 0):
        return text.rstrip("\n")
    if not name.startswith("vllm") and "filename" not in found:
        return text.rstrip("\n") if set(found) <= {"log", "stream", "time", "attrs"} else ""
    level = str(found.get("levelname", found.get("level", found.get("severity", "INFO")))).upper()
    level = level if level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") else "INFO"
    stamp = re.search(r"(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)", str(next((found[key] for key in _JSON_TIMES if key in found), "")))
    when = f"{stamp[1]} {stamp[2]}" if stamp is not None else "00-00 00:00:00"
    file = str(found.get("filename", "")) or f"{name.rpartition('.')[2]}.py"
    number = found.get("lineno")
    return f"{level} {when} [{file}:{number if isinstance(number, int) else 0}] {text}"

"""Shows only those parts of an engine's log that are certainly no user's text: fields of vLLM's own records, known messages.

A record's process, level, time and place in the source are always shown; its message if that source file logs no user's text;
an exception's kind always, its message if it is known. Frames of packages and of Python are shown, and known lines of the
system, the driver and the collectives. Everything else is hidden, and a line says how much. safe_log.yaml lists the known
files and messages.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator

from plimsoll.doctor.words import words
from plimsoll.guard.adapters.own_process import NEW_LIFE
from plimsoll.redaction import HIDDEN

_KNOWN = words("safe_log", "guard/daemon")
SAFE_FILES = frozenset(_KNOWN["files"].split())


def _any_of(patterns: str | Iterable[str]) -> str:
    """Returns one pattern for all of these; a text is a list of words."""
    return f"(?:{'|'.join(patterns.split() if isinstance(patterns, str) else patterns)})"


_RECORD = re.compile(
    r"(?P<head>(?:\([A-Za-z][^()\n]{0,80}pid=\d{1,10}[^()\n]{0,60}\) ?)?"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?(?P<file>[\w./]{1,200})\.py:\d{1,6}\] ?)(?P<text>.*)",
    re.DOTALL,
)
_WRAPPING = re.compile(
    r"(?:\x1b\[[0-9;]{0,16}m|<\d{1,3}>|\[\d{4}-\d\d-\d\d[T ][\d:.,Z+\-]{8,24}\] ?|\[pod/[^\]\s]{1,200}\] ?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,20}(?: (?:stdout|stderr) [FP])? "
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [^\s:]{1,80}: ?|[A-Za-z0-9][\w.\-]{0,80} {0,40}\| ?){1,4}"
)
_PROCESS = re.compile(r"\([A-Za-z][^()\n]{0,80}pid=\d{1,10}[^()\n]{0,60}\) ?|\[rank\d{1,4}\]: ?")
_FRAME = re.compile(
    rf'\s*File "(?:<[\w. ]{{1,60}}>|(?:[^"\n]{{0,300}}/)?{_any_of(_KNOWN["packages"])}/[^"\n]{{1,300}})", line \d{{1,7}}'
    r"(?:, in [\w.<>]{1,120})?\s*"
)
_CARET = re.compile(r"\s*[\^~]+\s*")
_STRUCTURE = re.compile(_any_of(_KNOWN["structure"]))
_EXCEPTION = re.compile(
    r"\s*(?P<kind>(?:[A-Za-z_]\w*\.){0,8}(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Dead|NotFound|Warning))"
    r"(?:: (?P<text>.*))?\s*",
    re.DOTALL,
)
_MESSAGES = re.compile(_any_of(_KNOWN["messages"]))
_ERRORS = [re.escape(os.strerror(number)) for number in errno.errorcode]
_SHORT_MESSAGE = re.compile(
    rf"(?:\[Errno \d{{1,4}}\] ?)?{_any_of([*_ERRORS, *_KNOWN['short_messages']])}"
    rf"(?:[ :,;.()]+{_any_of(_KNOWN['short_words'])})*[ :,;.()]*"
)
_SYSTEM = re.compile(_any_of(_KNOWN["system"]).replace("DEATH", f"(?:{_KNOWN['death']})"))
_BANNER = re.compile(r"[^\w\n]{0,80}[█▀▄▌▐][^\w\n]{0,80}(?:(?:version|model {3}) ?\S{1,200})?\s*$")
_PROGRESS = re.compile(
    r"(?:\s*(?:(?:Loading|Capturing|Compiling|Downloading|Fetching|Processed|Rendering)[\w ().,=/-]{0,80}:\s*)?\d{1,3}%"
    r"(?:\|[^|A-Za-z\n]{0,200}\|| Completed \|)[\d.?kMGTB/ ]{1,40}\[[\d:?<, .]{1,40}[\w/?.]{0,20}\]\s*)+"
)
_ACCESS = re.compile(r'(INFO: {5}\S{1,80} - "[A-Z]{3,8} /[^\s?"]{0,200})(\?[^\s"]*)?( HTTP/[\d.]{1,3}" \d{3}[ \w]{0,40})\s*')
_QUOTED = re.compile(r"'(?:[^'\\\n]|\\.){0,4000}'|\"(?:[^\"\\\n]|\\.){0,4000}\"|`[^`\n]{0,4000}`")
_SETTINGS = re.compile(r"(?:non-default )?args: |Initializing an? ")  # the operator's own words
_MARK = NEW_LIFE.decode().strip()
_INTRODUCES = ("api_server", "api_utils", "utils")  # they print vLLM's name and release when a process begins
_INTRODUCTION = re.compile(r"[█▀▄] {1,4}version |vLLM (?:API )?server version ")
MOST_BARS = 100
_JSON_TIMES = ("time", "timestamp", "asctime", "ts")
_UP = re.compile(r"Application startup complete|Uvicorn running|Started server process|\] (?:Received|Added) request| HTTP/1")


def safe_lines(lines: Iterable[str], begun: str = "") -> Iterator[str]:
    """Yields a log's lines and hides those not known to be safe; `begun` replaces the text of vLLM's dump of its last step."""
    hidden, is_frame, ending = 0, False, ""  # `ending`: the head of a record whose exception may continue in the next lines
    is_up = True  # False while a process starts: it has had no requests
    for raw in lines:
        line = raw.rstrip("\r\n")
        wrap = _WRAPPING.match(line)
        head, bare = (wrap[0], line[wrap.end() :]) if wrap is not None else ("", line)
        if bare.startswith("{") and (plain := _from_json(bare)) is not None:
            bare = plain
        record = _RECORD.match(bare)
        if record is not None:
            own, text, file = record["head"], record["text"], record["file"].rpartition("/")[2]
        else:
            process = _PROCESS.match(bare)
            own, text, file = (process[0], bare[process.end() :], "") if process is not None else ("", bare, "")
        shown, goes_on = _shown(text, file, begun, is_frame=is_frame, is_after=bool(ending) and ending == (own or "-"))
        if text == _MARK or (file in _INTRODUCES and _INTRODUCTION.search(text)):
            is_up = False
        is_up = is_up or _UP.search(bare) is not None
        if not is_up:
            shown, goes_on = text, False
        is_frame = _FRAME.fullmatch(text) is not None
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
    if _STRUCTURE.fullmatch(text.strip()) or _FRAME.fullmatch(text) or _CARET.fullmatch(text) or text == _MARK:
        return text, False
    if is_frame and text.startswith("    "):
        return _plain(text), False  # the source line of the frame
    if (found := _EXCEPTION.fullmatch(text)) is not None:
        message = found["text"]
        is_known = message is None or bool(_MESSAGES.match(message) or _SHORT_MESSAGE.fullmatch(message))
        return f"{found['kind']}" + ("" if message is None else f": {_plain(message) if is_known else HIDDEN}"), True
    if is_after:
        return None, True
    if file == "dump_input":
        what = text.partition(":")[0] if text.startswith("Dumping ") else ""
        return (f"{what}: {begun or HIDDEN}" if "output" in what else f"{what}: {HIDDEN}") if what else None, False
    if file in SAFE_FILES:
        return (text if _SETTINGS.match(text) else _plain(text)), False
    if file:
        return None, False
    if (access := _ACCESS.fullmatch(text)) is not None:
        return f"{access[1]}{'?' + HIDDEN if access[2] else ''}{access[3]}", False
    if _SYSTEM.match(text) or _BANNER.match(text):
        return _plain(text), False
    if (bar := _PROGRESS.match(text)) is not None:
        rest = text[bar.end() :]
        if rest and rest.count("%") < MOST_BARS:  # a bar behind another's head would be looked at in turn
            rest = next(safe_lines([rest], begun), "").rstrip("\n")
        elif rest:
            rest = HIDDEN
        return bar[0] + rest, False
    return None, False


def _plain(text: str) -> str:
    """Returns the text, with quotations hidden that are more than a name."""
    return _QUOTED.sub(_identifier, text)


def _identifier(quoted: re.Match[str]) -> str:
    inner = quoted[0][1:-1]
    is_name = re.fullmatch(r"[\w./:+@%=,*-]{1,120}", inner) is not None
    return quoted[0] if is_name or inner.startswith(("CUDA ", "HIP ")) else quoted[0][0] + HIDDEN + quoted[0][-1]


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
    if _RECORD.match(text):
        return text.rstrip("\n")
    if not name.startswith("vllm") and str(found.get("filename", "")).removesuffix(".py") not in SAFE_FILES:
        return text.rstrip("\n") if set(found) <= {"log", "stream", "time", "attrs"} else ""
    level = str(found.get("levelname", found.get("level", found.get("severity", "INFO")))).upper()
    level = level if level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") else "INFO"
    stamp = re.search(r"(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)", str(next((found[key] for key in _JSON_TIMES if key in found), "")))
    when = f"{stamp[1]} {stamp[2]}" if stamp is not None else "00-00 00:00:00"
    file = str(found.get("filename", "")) or f"{name.rpartition('.')[2]}.py"
    number = found.get("lineno")
    return f"{level} {when} [{file}:{number if isinstance(number, int) else 0}] {text}"

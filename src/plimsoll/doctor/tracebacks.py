"""Finds what was raised, where, and by whom: Python tracebacks put together again from the lines of several processes.

Every process is read as a stream of its own, since their lines come mixed. A traceback may have lost its head or its tail,
carry a prefix on every line, or have been flattened onto one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from plimsoll.domain.log import Line

MOST_FRAMES = 400
MOST_RAISED = 5_000
FOLLOWING = 8  # lines after the exception's own that may belong to its message
_compiled = cache(re.compile)

_FRAME = r'^\s{0,40}File "?([^"\n]{1,400}?)"?, line (\d{1,9})(?:, in (\S.{0,200}))?'
_NOTEBOOK_FRAME = r"^(?:File )?(~?/[^\s:]{1,400})(?::\d{1,9}, in |\s{1,4}in )([A-Za-z_][\w.]{0,200})\("
_INLINE_FRAME = r'File "([^"\n]{1,400})", line (\d{1,9}), in ([\w<>.]{1,200})'
_RANK = r"^(?:\[rank\d{1,5}\]: ?|\|\s{1,8}|: )"
_EXCEPTION = (
    r"^(?:\[?ERROR\]?:?\s{1,4})?"
    r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}?"
    r"(?:Error|Exception|Exit|Interrupt|Unavailable|NotFound|OutOfResources|OutOfMemory|Timeout|Killed|Died|Dead\w{0,20}|Failed"
    r"|TimeoutExpired)(?:\([\w.]{1,80}\))?)(?::\s?(.*))?$"
)
_ANY_EXCEPTION = r"^(?!INFO|WARNING|ERROR|DEBUG|CRITICAL|NOTE|Process )((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})(?::\s(.*))?$"
_INLINE_EXCEPTION = r"\b((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception)): (.*)$"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_WRITING = frozenset(
    {"emit", "format", "getMessage", "prepare_object_to_dump", "dump_engine_exception", "_dump_engine_exception"}
)
_NOT_RAISED = ("KeyError: 'pynvml'",)


class Frame(NamedTuple):
    """One call of a traceback."""

    file: str
    function: str


class Raised(NamedTuple):
    """One exception as the log shows it."""

    kind: str  # "torch.OutOfMemoryError"; "" where the log breaks off before it says
    message: str  # with the lines that follow it, joined by newlines
    frames: tuple[Frame, ...]  # outermost first
    process: str
    first: int  # index of its first line
    at: int  # index of the line that names it
    cause: int | None  # position in the list of the exception it was raised from or while handling
    in_logging: bool  # raised while a log record was being written: never the failure itself
    warned: bool = False  # printed by a warning, or for debugging

    @property
    def name(self) -> str:
        """The class alone."""
        return self.kind.rpartition(".")[2]

    def functions(self) -> frozenset[str]:
        """The functions it passed through."""
        return frozenset(frame.function for frame in self.frames)


class _Stream:
    """What one process has said of a traceback so far."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.first: int | None = None
        self.chained = False
        self.in_logging = False
        self.in_stack = False  # below "Call stack:", whose frames belong to no exception
        self.last: int | None = None  # position of the last exception of this stream
        self.awaits = 0  # lines that may still belong to its message
        self.quiet = 0
        self.said: tuple[str, float | None] = ("", None)  # level and time of the last exception's record

    def reset(self) -> None:
        self.frames, self.first = [], None


def raised_in(lines: Sequence[Line]) -> list[Raised]:
    """Every exception in the order the log shows them."""
    found: list[Raised] = []
    streams: dict[tuple[str, str], _Stream] = {}
    last: _Stream | None = None
    for index, line in enumerate(lines):
        stream = streams.setdefault((line.server, line.process), _Stream())
        if (
            not line.process
            and not stream.frames
            and last is not None
            and last.frames
            and last.quiet == 0
            and _ends_it(line.text)
        ):
            stream = last  # its prefix was lost on the line that matters
        last = stream
        for text in _pieces(line.text):
            _take(text, index, line, stream, found)
        if len(found) >= MOST_RAISED:
            break
    for (_, process), stream in streams.items():
        if stream.frames and stream.first is not None:  # its last line is missing
            found.append(
                Raised("", "", tuple(stream.frames), process, stream.first, len(lines) - 1, None, in_logging=stream.in_logging)
            )
    return found


def _ends_it(text: str) -> bool:
    return _compiled(_EXCEPTION).match(text) is not None


def _pieces(text: str) -> Iterator[str]:
    """A traceback written as one string, with its line ends escaped, taken apart."""
    if "\\n" in text and 'File \\"' in text:
        text = text.replace('\\"', '"')
    if "\\n" in text and ('\\n  File "' in text or "Traceback (most recent call last):\\n" in text):
        yield from text.split("\\n")
    else:
        yield text


def _take(text: str, index: int, line: Line, stream: _Stream, found: list[Raised]) -> None:
    text = _compiled(_RANK).sub("", text, count=1) if text[:1] in "[|:" else text
    stripped = text.strip()
    if line.level and stream.in_logging and "--- Logging error ---" not in text:
        stream.in_logging = stream.in_stack = False  # the next record: what was written while logging is over
    if "Traceback (most recent call last)" in text or "Traceback (innermost last)" in text:
        stream.reset()
        stream.first, stream.awaits, stream.in_stack, stream.quiet = index, 0, False, 0
        if text.count('File "') >= 2:
            _flattened(text, index, line, stream, found)
        return
    if text.count('File "') >= 2:
        _flattened(text, index, line, stream, found)
        return
    frame = _frame(text)
    if frame is not None:
        stream.first = index if stream.first is None else stream.first
        stream.quiet = 0
        if len(stream.frames) < MOST_FRAMES and not stream.in_stack:
            stream.frames.append(frame)
        return
    if stripped.startswith("--- Logging error ---"):
        stream.in_logging = True
        return
    if stripped == "Call stack:" and stream.last is not None and index - found[stream.last].at <= 3:
        # Python prints this below an exception that a log record caused while it was written.
        found[stream.last] = found[stream.last]._replace(in_logging=True)
        stream.in_logging = True
    if stream.in_logging and stripped.startswith(("Call stack:", "Unable to print the message", "Message:", "Arguments:")):
        stream.in_stack = stripped.startswith("Call stack:")
        stream.in_logging = stream.in_stack
        stream.reset()
        return
    if stripped.startswith(_CHAINED):
        stream.chained, stream.awaits = True, 0
        return
    if not _names_exception(text, index, line, stream, found) and stripped:
        is_code = bool(stream.frames) and (text[0].isspace() or stripped[0] in "^~")
        if line.level and (line.level, line.at) != stream.said:
            stream.awaits = 0  # a record of its own, no part of the message before it
        _follow(stripped, stream, found, is_code=is_code)


def _frame(text: str) -> Frame | None:
    """A call, as Python prints it or as a notebook does."""
    if "line " in text and "File " in text[:60]:
        match = _compiled(_FRAME).match(text)
        return Frame(match[1], (match[3] or "").split(" ")[0]) if match else None
    if (
        " in " in text
        and text.removeprefix("File ")[:1] in "/~"
        and (match := _compiled(_NOTEBOOK_FRAME).match(text)) is not None
    ):
        return Frame(match[1], match[2].rpartition(".")[2])
    return None


def _names_exception(text: str, index: int, line: Line, stream: _Stream, found: list[Raised]) -> bool:
    """Whether this line is the last one of a traceback, or an exception printed without one."""
    if not text or text[0] in " \t":
        return False
    match = _compiled(_EXCEPTION).match(text)
    if match is None and stream.frames and stream.quiet == 0:
        match = _compiled(_ANY_EXCEPTION).match(text)
    if match is None or text.startswith(_NOT_RAISED):
        return False
    if not stream.frames and not match[2]:
        return False  # a bare word that merely looks like one
    _add(match[1], match[2] or "", index, line, stream, found)
    return True


def _add(kind: str, message: str, index: int, line: Line, stream: _Stream, found: list[Raised]) -> None:
    in_logging = stream.in_logging or any(
        frame.function in _WRITING and frame.file.endswith(("logging/__init__.py", "dump_input.py")) for frame in stream.frames
    )
    found.append(
        Raised(
            kind, message, tuple(stream.frames), line.process, index if stream.first is None else stream.first, index,
            stream.last if stream.chained else None, in_logging, line.level in ("DEBUG", "WARNING"),
        )
    )  # fmt: skip
    stream.reset()
    stream.chained, stream.last, stream.awaits, stream.said = False, len(found) - 1, FOLLOWING, (line.level, line.at)


def _flattened(text: str, index: int, line: Line, stream: _Stream, found: list[Raised]) -> None:
    """A whole traceback on one line."""
    stream.frames += [Frame(m[1], m[3]) for m in _compiled(_INLINE_FRAME).finditer(text)][: MOST_FRAMES - len(stream.frames)]
    stream.first, stream.quiet = index if stream.first is None else stream.first, 0
    last = text.rfind('File "')
    match = _compiled(_INLINE_EXCEPTION).search(text, last)
    if match is not None:
        _add(match[1], match[2], index, line, stream, found)


def _follow(stripped: str, stream: _Stream, found: list[Raised], *, is_code: bool) -> None:
    """A further line of the last message, code that a frame quotes, or a line in between that ends the wait for one."""
    stream.quiet += 0 if is_code else 1
    if stream.quiet > 40:
        stream.reset()  # the traceback this belonged to was cut off
    if stream.awaits and stream.last is not None and not stream.frames:
        last = found[stream.last]
        stream.awaits -= 1
        if len(last.message) < 8_000:
            found[stream.last] = last._replace(message=f"{last.message}\n{stripped}" if last.message else stripped)

"""The timeline of a log: server runs, how far each came, the exceptions, and the known texts."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import KINDS, WRAPPED_SHARE, WRITTEN_BY, Log, LogLine, kernel_message
from plimsoll.doctor.words import words
from plimsoll.findings import Code
from plimsoll.redaction import hide_user_text_lines
from plimsoll.vllm.failure_texts import (
    CLIENTS,
    COLLECTIVE_FILES,
    ENDERS,
    GRAPH_FILES,
    LOGITS_FILES,
    MODEL_FILES,
    MULTIMODAL_FILES,
    STEP_FRAMES,
    TEXTS,
    TRAINER_FILES,
    FailureText,
    Role,
)

# Every process is read as a stream of its own, since their lines come mixed. A traceback may lack its head or its tail, carry
# a prefix on every line, or be flattened onto one.
MOST_FRAMES = 400
MOST_RAISED = 5_000
REACH = 12  # lines of another program's that may stand between the calls of a traceback
FOLLOWING = 8  # lines after the exception's own that may belong to its message
_traceback_pattern = cache(re.compile)

_FRAME = r'^\s{0,40}File "?([^"\n]{1,400}?)"?, line (\d{1,9})(?:, in (\S.{0,200}))?'
_NOTEBOOK_FRAME = (
    r"^(?:File )?(Cell In\[|~?/[^\s:]{1,400})(?:\d{1,6}\], |:\d{1,9}, in |\s{1,4}in )([A-Za-z_][\w.]{0,200})(?:\(| \d)"
)
_INLINE_FRAME = r'File "([^"\n]{1,400})", line (\d{1,9}), in ([\w<>.]{1,200})'
_RANK = r"^(?:\[rank\d{1,5}\]: ?|\|\s{1,8}|: )"
_RAISED = (
    r"^(?:\[?ERROR\]?:?\s{1,4})?"
    r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}?"
    r"(?:Error|Exception|Exit|Interrupt|Unavailable|NotFound|OutOfResources|OutOfMemory|Timeout|Killed|Died|Dead\w{0,20}|Failed"
    r"|TimeoutExpired)(?:\([\w.]{1,80}\))?)(?::\s?(.*))?$"
)
_ANY_EXCEPTION = r"^(?!INFO|WARNING|ERROR|DEBUG|CRITICAL|NOTE|Process )((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})(?::\s(.*))?$"
_INLINE_EXCEPTION = r"\b((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception)): (.*)$"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_HEADS = ("Call stack:", *_CHAINED)
_IGNORED = ("Exception ignored in", "Exception in thread", "Task exception was never retrieved")
_OVERCOME = ("alling back ", "fall back to ", "will be disabled", "trying again", "etrying")
_WRITING = frozenset(
    {"emit", "format", "getMessage", "prepare_object_to_dump", "dump_engine_exception", "_dump_engine_exception"}
)
_NOT_RAISED = ("KeyError: 'pynvml'",)


class TracebackFrame(NamedTuple):
    """One call of a traceback."""

    file: str
    function: str


class LoggedException(NamedTuple):
    """One exception as the log shows it."""

    kind: str  # "torch.OutOfMemoryError"; "" where the log breaks off before it says
    message: str  # with the lines that follow it, joined by newlines
    frames: tuple[TracebackFrame, ...]  # outermost first
    process: str
    first: int  # index of its first line
    at: int  # index of the line that names it
    cause: int | None  # position in the list of the exception it was raised from or while handling
    in_logging: bool  # raised while a log record was being written: never the failure itself
    warned: bool = False  # printed by a warning, for debugging, or where Python itself ignores it
    in_thread: bool = False  # it ended a thread, not the process

    @property
    def name(self) -> str:
        """The class alone; of what Ray passes on, RayTaskError(X), that is X."""
        return self.kind.removesuffix(")").rpartition("(")[2].rpartition(".")[2]

    def functions(self) -> frozenset[str]:
        """The functions it passed through."""
        return frozenset(frame.function for frame in self.frames)


def is_whole_and_foreign(one: LoggedException, lines: Sequence[LogLine]) -> bool:
    """True for a whole traceback that nobody of vLLM's signs and none of whose calls is vLLM's."""
    if one.process or not one.frames or lines[one.at].place or "Traceback (" not in lines[one.first].text:
        return False
    ours = ("vllm", "/multiprocessing/spawn", ".pyx")
    return not any(part in frame.file.lower() for frame in one.frames for part in ours)


def is_overcome(line: LogLine) -> bool:
    """True for the headline of a record of vLLM's that says how it goes on without what failed."""
    return bool(line.place) and any(words in line.text for words in _OVERCOME)


class _Stream:
    """The part of a traceback that one process has printed so far."""

    def __init__(self) -> None:
        self.frames: list[TracebackFrame] = []
        self.first: int | None = None
        self.chained = False
        self.in_logging = False
        self.in_stack = False  # below "Call stack:", whose frames belong to no exception
        self.last: int | None = None  # position of the last exception of this stream
        self.awaits = 0  # lines that may still belong to its message
        self.quiet = 0
        self.said: tuple[str, float | None] = ("", None)  # level and time of the last exception's record
        self.process = ""  # whose calls these are
        self.call = -1  # the line of the last one
        self.header: tuple[str, int, str] = ("", -9, "")  # "Exception ignored in", "Exception in thread"; its line and place
        self.broken: tuple[list[TracebackFrame], int | None] = [], None  # vLLM's traceback, in which another's was printed

    def reset(self) -> None:
        self.frames, self.first = [], None

    @property
    def is_ours(self) -> bool:
        """True if a call of vLLM's is among them."""
        return any("vllm" in frame.file for frame in self.frames)


def read_exceptions(lines: Sequence[LogLine]) -> list[LoggedException]:
    """Every exception in the order the log shows them."""
    found: list[LoggedException] = []
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
            and _traceback_pattern(_RAISED).match(line.text) is not None
        ):
            stream = last  # its prefix was lost on the line that matters
        last = stream
        text = line.text
        if "\\n" in text and 'File \\"' in text:
            text = text.replace('\\"', '"')
        # A traceback written as one string, with its line ends escaped, is taken apart.
        is_whole = "\\n" in text and ('\\n  File "' in text or "Traceback (most recent call last):\\n" in text)
        for piece in text.split("\\n") if is_whole else (text,):
            if not is_whole and stream.frames and _is_intruder(lines, index, stream):
                continue
            _take(piece, index, line, stream, found)
        if len(found) >= MOST_RAISED:
            break
    for (_, process), stream in streams.items():
        if stream.frames and stream.first is not None:  # its last line is missing
            found.append(
                LoggedException(
                    "", "", tuple(stream.frames), process, stream.first, len(lines) - 1, None, in_logging=stream.in_logging
                )
            )
    return found


def _is_intruder(lines: Sequence[LogLine], index: int, stream: _Stream) -> bool:
    """True for what looks like a traceback's end while its calls or their code go on below; Ray prints several in a row."""
    text, following = lines[index].text, lines[index + 1] if index + 1 < len(lines) else None
    if following is None or following.process != stream.process or text[:1].isspace() or "Trace" in text or "ray::" in text:
        return False
    if stream.broken[0] and not stream.is_ours:
        return False  # it ends what another program printed in between
    below = following.text.strip()
    is_code = (index == stream.call + 1 and following.text.startswith("    ")) or (bool(below) and not set(below) - {"^", "~"})
    if is_code:
        return True
    reach = REACH if stream.is_ours else 2
    for line in lines[index + 1 : index + reach]:  # its calls go on below, without a head of their own
        if "most recent call" in line.text or line.text.startswith(_HEADS) or line.process != stream.process:
            break
        if _traceback_pattern(_FRAME).match(line.text) is not None:
            return True
    # Words before a colon that are no exception's name, or a client's, and below them the name of one.
    raised, words = _traceback_pattern(_RAISED), _traceback_pattern(_ANY_EXCEPTION)
    is_doubtful = text.partition(".")[0] in CLIENTS or (raised.match(text) is None and words.match(text) is not None)
    return is_doubtful and raised.match(following.text) is not None


def _take(text: str, index: int, line: LogLine, stream: _Stream, found: list[LoggedException]) -> None:
    text = _traceback_pattern(_RANK).sub("", text, count=1) if text[:1] in "[|:" else text
    stripped = text.strip()
    if line.level and stream.in_logging and "--- Logging error ---" not in text:
        stream.in_logging = stream.in_stack = False  # the next record: what was written while logging is over
    if "Traceback (most recent call last)" in text or "Traceback (innermost last)" in text:
        stream.broken = (stream.frames, stream.first) if stream.is_ours else ([], None)
        stream.reset()
        stream.first, stream.awaits, stream.in_stack, stream.quiet = index, 0, False, 0
        if text.count('File "') >= 2:
            _flattened(text, index, line, stream, found)
        return
    if text.count('File "') >= 2:
        _flattened(text, index, line, stream, found)
        return
    frame = None  # a call, as Python prints it or as a notebook does
    if "line " in text and "File " in text[:60]:
        match = _traceback_pattern(_FRAME).match(text)
        frame = TracebackFrame(match[1], (match[3] or "").split(" ")[0]) if match else None
    elif (" in " in text and text.removeprefix("File ")[:1] in "/~") or text.startswith("Cell In["):
        match = _traceback_pattern(_NOTEBOOK_FRAME).match(text)
        frame = TracebackFrame(match[1], match[2].rpartition(".")[2]) if match else None
    if frame is not None:
        stream.first = index if stream.first is None else stream.first
        stream.quiet, stream.process, stream.call = 0, line.process, index
        if len(stream.frames) < MOST_FRAMES and not stream.in_stack:
            stream.frames.append(frame)
        return
    if stripped.startswith("--- Logging error ---"):
        stream.in_logging = True
        return
    if stripped.startswith(_IGNORED) or is_overcome(line):
        stream.header = stripped, index, line.place
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
    # The last line of a traceback, or an exception printed without one.
    match = _traceback_pattern(_RAISED).match(text) if text and text[0] not in " \t" else None
    if match is None and text and text[0] not in " \t" and stream.frames and stream.quiet == 0:
        match = _traceback_pattern(_ANY_EXCEPTION).match(text)
    is_word = match is not None and not stream.frames and not match[2]  # a bare word that merely looks like one
    if match is not None and not is_word and not text.startswith(_NOT_RAISED):
        _add(match[1], match[2] or "", index, line, stream, found)
    elif stripped:
        is_code = bool(stream.frames) and (text[0].isspace() or stripped[0] in "^~")
        if line.level and (line.level, line.at) != stream.said:
            stream.awaits = 0  # a record of its own, no part of the message before it
        _follow(stripped, stream, found, is_code=is_code)


def _add(kind: str, message: str, index: int, line: LogLine, stream: _Stream, found: list[LoggedException]) -> None:
    in_logging = stream.in_logging or any(
        frame.function in _WRITING and frame.file.endswith(("logging/__init__.py", "dump_input.py")) for frame in stream.frames
    )
    first = index if stream.first is None else stream.first
    above, at, place = stream.header
    header = above if 0 <= first - at <= 2 and place in ("", line.place) else ""
    in_thread = header.startswith("Exception in thread")
    found.append(
        LoggedException(
            kind, message, tuple(stream.frames), line.process, first, index, stream.last if stream.chained else None,
            in_logging, line.level in ("DEBUG", "WARNING") or (bool(header) and not in_thread), in_thread,
        )
    )  # fmt: skip
    was_ours = stream.is_ours
    stream.reset()
    stream.chained, stream.last, stream.awaits, stream.said = False, len(found) - 1, FOLLOWING, (line.level, line.at)
    if not was_ours:
        stream.frames, stream.first = stream.broken
    stream.broken = [], None


def _flattened(text: str, index: int, line: LogLine, stream: _Stream, found: list[LoggedException]) -> None:
    """A whole traceback on one line."""
    stream.frames += [TracebackFrame(m[1], m[3]) for m in _traceback_pattern(_INLINE_FRAME).finditer(text)][
        : MOST_FRAMES - len(stream.frames)
    ]
    stream.first, stream.quiet = index if stream.first is None else stream.first, 0
    last = text.rfind('File "')
    match = _traceback_pattern(_INLINE_EXCEPTION).search(text, last)
    if match is not None:
        _add(match[1], match[2], index, line, stream, found)


def _follow(stripped: str, stream: _Stream, found: list[LoggedException], *, is_code: bool) -> None:
    """A further line of the last message, code that a frame quotes, or a line in between that ends the wait for one."""
    stream.quiet += 0 if is_code else 1
    if stream.quiet > 40:
        stream.reset()  # the traceback this belonged to was cut off
    if stream.awaits and stream.last is not None and not stream.frames:
        last = found[stream.last]
        stream.awaits -= 1
        if len(last.message) < 8_000:
            found[stream.last] = last._replace(message=f"{last.message}\n{stripped}")


class ServerProgress(IntEnum):
    """The milestones of a server's start."""

    UNKNOWN = 0
    BEGUN = 1  # its version or its arguments were printed
    LOADING = 2
    LOADED = 3
    MEASURED = 4  # memory was profiled: the cache's size is known
    CAPTURING = 5
    CAPTURED = 6
    SERVING = 7


class FailedStep(NamedTuple):
    """A step, and how sure its naming is."""

    name: str
    code: Code
    confidence: float


CODES = {step: Code(code) for step, code in words("names")["steps"].items()}
_SERVING = frozenset({"execute_model", "_execute_model", "engine_step", "sample_tokens"})
RUNTIME = frozenset({"wake-up", "lora", "multimodal", "logits", "collectives", "forward"})


def step_of_frames(frames: Sequence[TracebackFrame]) -> FailedStep | None:
    """The step the traceback passed through; None where it names none."""
    functions = {
        frame.function for frame in frames if not (frame.file.startswith("torch/") or "site-packages/torch" in frame.file)
    }

    def in_files(pieces: Sequence[str], some: Sequence[TracebackFrame] = frames) -> bool:
        return any(piece in frame.file for frame in some for piece in pieces)

    serves = "load_model" not in functions and not functions.isdisjoint(_SERVING)
    for name, members in STEP_FRAMES:
        if name == "forward":
            break
        # Of these two several may apply: the innermost decides, below. A `load_weights` below `execute_model` is no start.
        if name in ("multimodal", "logits") or not functions & set(members) or (name == "weights" and serves):
            continue
        if name == "device" and in_files(COLLECTIVE_FILES, frames[-6:]):
            return FailedStep("collectives", Code.RUNTIME_COLLECTIVES, 0.8)
        if name == "warm-up" and in_files(GRAPH_FILES):
            name = "graph-capture"  # noqa: PLW2901
        elif name == "warm-up" and in_files(LOGITS_FILES, frames[-3:]):
            name = "sampler-warmup"  # noqa: PLW2901
        elif name == "lora" and any(frame.function == "load_model" for frame in frames):
            name = "weights"  # noqa: PLW2901  the slots of adapters are made with the model
        return FailedStep(name, CODES[name], 0.6 if name == "warm-up" else 0.95)
    if in_files(GRAPH_FILES):
        return FailedStep("graph-capture", CODES["graph-capture"], 0.85)
    if in_files(MODEL_FILES, [frame for frame in frames if frame.function == "__init__"]) and not serves:
        return FailedStep("weights", CODES["weights"], 0.8)
    return _while_serving(frames, functions)


CALLERS = 4  # calls above a collective: what is gathered belongs to the one who gathers it


def _while_serving(frames: Sequence[TracebackFrame], functions: set[str]) -> FailedStep | None:
    members = dict(STEP_FRAMES)
    logits, multimodal, forward = (set(members[name]) for name in ("logits", "multimodal", "forward"))
    if not functions & (logits | multimodal | forward) and not any("vllm" in frame.file for frame in frames):
        return None
    collective = None
    for depth, frame in enumerate(reversed(frames)):  # the innermost call that says what ran
        if any(piece in frame.file for piece in COLLECTIVE_FILES):
            collective = depth
            continue
        if collective is not None and depth > collective + CALLERS:
            break
        if any(piece in frame.file for piece in LOGITS_FILES) or (frame.function in logits and "vllm" in frame.file):
            return FailedStep("logits", CODES["logits"], 0.9)
        if frame.function in multimodal or any(piece in frame.file for piece in MULTIMODAL_FILES):
            return FailedStep("multimodal", CODES["multimodal"], 0.9)
    if collective is not None:
        return FailedStep("collectives", CODES["collectives"], 0.8)
    if functions & forward:
        return FailedStep("forward", CODES["forward"], 0.9)
    return None


def step_of_progress(progress: ServerProgress, *, frames_seen: bool) -> FailedStep | None:
    """The step that follows what was last reached; a guess, and marked as one."""
    name = words("names")["next_step"].get(progress.name.lower())
    if name is None:
        return None
    return FailedStep(name, CODES[name], 0.5 if frames_seen else 0.6)


_compiled = cache(re.compile)

# What each of these texts proves.
MILESTONES = [(text, ServerProgress[step.upper()]) for step, some in words("names")["milestones"].items() for text in some]
_EXCEPTION = r"(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception): "
_BEGINS = (
    "API server version", "Initializing a V1 LLM engine", "Initializing a V0 LLM engine", "Initializing an LLM engine", "█▄█▀",
)  # fmt: skip
MOST_HITS = 20_000
MOST_RUNS = 50  # the last ones; those before them are one


_REQUESTS = ('"POST /v1/', "Received request ", "Added request ")
UP = ("Application startup complete", "Uvicorn running on")


class Hit(NamedTuple):
    """A known text, and the line it stands in."""

    text: FailureText
    at: int


class ServerRun(NamedTuple):
    """One run of a server, from its first line to its last."""

    first: int
    end: int  # one past its last line


class LogTimeline(NamedTuple):
    """The runs, milestones, exceptions and known texts of one log."""

    log: Log
    exceptions: list[LoggedException]
    hits: list[Hit]
    milestones: list[tuple[int, ServerProgress]]
    runs: list[ServerRun]
    serving: list[int]  # the lines that show work being done

    def progress_at(self, index: int, process: str = "") -> ServerProgress:
        """How far the server had come before this line: by its own process where that has spoken of it, else by any."""
        run = self.run_at(max(0, index - 1))
        if bisect_left(self.serving, index) > bisect_left(self.serving, run.first):
            return ServerProgress.SERVING
        reached = self.milestones[bisect_left(self.milestones, (run.first,)) : bisect_left(self.milestones, (index,))]
        own = [step for at, step in reached if process and self.log.lines[at].process == process]
        return max(own or [step for _, step in reached], default=ServerProgress.UNKNOWN)

    def run_at(self, index: int) -> ServerRun:
        """The life this line belongs to."""
        return self.runs[max(0, bisect_right(self.runs, index, key=lambda run: run.first) - 1)]

    def serves_after(self, index: int) -> bool:
        """True if work was still being done well after this line, in the same life."""
        run = self.run_at(index)
        later = bisect_left(self.serving, run.end) - bisect_right(self.serving, index)
        return later >= 2 or any(
            '" 200' in self.log.lines[at].text and "POST" in self.log.lines[at].text
            for at in range(index + 20, min(run.end, index + 2_000))
        )

    def came_up_before(self, index: int) -> bool:
        """True if an API server had come up before this line, in the same life."""
        first = self.run_at(index).first
        some = self.serving[bisect_left(self.serving, first) : bisect_left(self.serving, index)]
        return any(word in self.log.lines[at].text for at in some for word in UP)

    def goes_on_after(self, index: int, process: str | None = None) -> bool:
        """True if a later step of the same start, or work, follows this line: what it tells was overcome."""
        end = self.run_at(index).end
        for at, step in self.milestones[bisect_left(self.milestones, (index + 1,)) :]:
            line = self.log.lines[at]
            is_step = step is not ServerProgress.SERVING or any(word in line.text for word in UP)
            if at < end and is_step and process in (None, line.process):
                return True
        return self.serves_after(index)


def read_timeline(log: Log, texts: Sequence[FailureText] = TEXTS) -> LogTimeline:
    """Reads the timeline in one pass over the lines."""
    lines = log.lines
    lines = _without_others(lines)
    # Without what users wrote: a prompt may quote a traceback, and it is nobody's failure.
    if any(word in line.text for line in lines for word in _USERS):
        marked = (f"{_RECORD}{line.text}" if line.level else line.text for line in lines)
        hidden = zip(lines, hide_user_text_lines(marked), strict=True)
        lines = [line._replace(text=text.removeprefix(_RECORD)) for line, text in hidden]
    exceptions = read_exceptions(lines)
    hits = list(_hits(lines, texts))
    told = {hit.at for hit in hits}
    # Texts that a terminal broke over several lines: found in the message put together again.
    for one in exceptions:
        if "\n" in one.message and one.at not in told and not any(at in told for at in range(one.at, one.at + 4)):
            whole = LogLine(None, one.process, "", None, f"{one.kind}: " + " ".join(one.message.split()))
            told_in = (text for text in texts if text.role is not Role.STOP and text.needle in whole.text)
            hits += [Hit(text, one.at) for text in told_in if _counts(text, whole)]
    hits.sort(key=lambda hit: hit.at)
    milestones = list(_milestones(lines))
    serving = [at for at, step in milestones if step is ServerProgress.SERVING]
    return LogTimeline(log._replace(lines=lines), exceptions, hits, milestones, _runs(lines, hits, exceptions), serving)


# A record of a program beside the server: one JSON object, logfmt, klog of a program in Go.
_STRANGER = re.compile(
    r'\{ ?"|(?:time|ts)="?\d{4}-\d\d-\d\dT\S{1,40} level=|[IWEF]\d{4} [\d:.]{8,16} {1,8}\d{1,9} [\w-]{1,60}\.go:\d'
)
_STRANGERS_BEGIN = frozenset("{tIWEF")
# Where another logger's record begins without a level that is known; and what has a level and is the server's: uvicorn, torch.
_BEGINS_RECORD = re.compile(r"\S.{0,23}?\b\d\d:\d\d:\d\d\b|\d\d:\d\d:\d\d\b|[=*#]{2}|-{3,}(?![->])|>>> ")
_IS_SERVERS = re.compile(r"INFO: {5}|WARNING: {2}|ERROR: {4}|\[?[IWEF]\d{4} ")


def is_servers(line: LogLine) -> bool:
    """True if a process of the server signs the line, or it is a record of uvicorn's or torch's."""
    return bool(line.process or line.place) or _IS_SERVERS.match(line.text) is not None


def _is_kernels_without_stamp(line: LogLine) -> bool:
    """True for what the kernel says of a killed process or a card, without the stamp that it prints before it."""
    is_told = any(word in line.text for word in (*WRITTEN_BY["oom_killer"], "NVRM"))
    return is_told and line.at is None and line.text.lstrip()[:1] not in "[<" and kernel_message(line) is not None


def _without_others(lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The lines without the text of what other programs wrote beside a server that signs its own."""
    foreign = {
        at
        for at, line in enumerate(lines)
        if line.text[:1] in _STRANGERS_BEGIN and not line.process and _STRANGER.match(line.text)
    }
    if len(foreign) >= WRAPPED_SHARE * sum(bool(line.text) for line in lines):
        foreign = set()  # such records are what holds the server's own
    foreign.update(_of_strange_writers(lines))
    if any(line.place for line in lines):
        foreign.update(_below_strange_records(lines))
    return [line._replace(text="") if at in foreign else line for at, line in enumerate(lines)] if foreign else lines


def _of_strange_writers(lines: Sequence[LogLine]) -> Iterator[int]:
    """What containers and Ray's processes wrote that never say a word of vLLM's, and that no other judge reads."""
    roles = words("names")["roles"]["patterns"][:-1]
    daemons = (text.needle for text in TEXTS if text.speaker in ("kernel", "nvml", "slurm", "systemd", "docker"))
    judged = (word for kind in KINDS.values() for some in kind for word in WRITTEN_BY[some])
    marks = (*TRAINER_FILES, *daemons, *judged)
    named = {line.process for line in lines}
    actors = {one for one in named if one and not one.startswith("pid=") and not any(re.match(role, one) for _, role in roles)}
    writers = [(line.server, line.process if line.process in actors else "") for line in lines]
    strange = set(writers) - {("", "")}
    is_named = False  # whether the rest speaks of vLLM
    for line, writer in zip(lines, writers, strict=True) if strange else ():
        is_ours = bool(line.place) or (line.process != "" and not writer[1]) or "vllm" in line.text.lower()
        is_named = is_named or is_ours
        if writer in strange and (is_ours or any(word in line.text for word in marks)):
            strange.discard(writer)
    return (at for at, writer in enumerate(writers) if is_named and writer in strange)


def _below_strange_records(lines: Sequence[LogLine]) -> Iterator[int]:
    """What stands without a signature below a record of another logger: more of it.

    That is an exception without its traceback, which Python never prints, a word of the kernel's without its stamp, and
    everything where the record announces a text by a colon. A traceback is not, whoever it belongs to; and a call below it
    goes on with one that the record broke into.
    """
    bare = [line.at is not None for line in lines if line.text and not (line.process or line.place or line.level)]
    is_stamped = sum(bare) * 2 > len(bare)
    in_traceback = inside = announces = broken = False
    quoted: list[int] = []
    for at, line in enumerate([*lines, _END]):
        text, is_signed = line.text, is_servers(line)
        is_call = text.startswith("  File ")
        if not is_signed and (line.level or (line.at is not None and not is_stamped) or _BEGINS_RECORD.match(text)):
            inside, announces, broken = True, text.rstrip().endswith(":"), broken or in_traceback
        elif is_signed or is_call or "Traceback (" in text or "%|" in text or text.startswith("usage: "):
            if broken and not is_call:  # the last exception was that of the traceback
                last = next((one for one in reversed(quoted) if _compiled(_RAISED).match(lines[one].text)), at)
                quoted = [one for one in quoted if one < last]
            yield from quoted
            quoted, inside, broken = [], False, False
            in_traceback = is_call or "Traceback (" in text
        elif inside and (announces or _compiled(_RAISED).match(text.lstrip("> ")) or _is_kernels_without_stamp(line)):
            quoted.append(at)
        elif text and not text[0].isspace():
            in_traceback = False


_END = LogLine(None, "end", "", None, "")


_USERS = ("Received request ", "prompt: '", 'prompt: "', "Generated response")
_RECORD = "INFO 01-01 00:00:00 [a.py:1] "  # what a record of vLLM's begins with: it ends a text that was never closed


def present(lines: Sequence[LogLine], needles: Sequence[str]) -> set[str]:
    """Those needles that occur at all: most of them do not, and then no line need be asked."""
    found: set[str] = set()
    step = 4_000
    for start in range(0, len(lines), step):
        block = "\n".join(line.text for line in lines[start : start + step])
        found.update(needle for needle in needles if needle not in found and needle in block)
    return found


def kinds_in(log: Log) -> frozenset[str]:
    """Which judges are worth asking: of "kernel", "supervisor" and "nvidia-smi"; most logs need none."""
    return frozenset(
        kind
        for kind, writers in KINDS.items()
        if present(log.lines, [word for writer in writers for word in WRITTEN_BY[writer]])
    )


def _hits(lines: Sequence[LogLine], texts: Sequence[FailureText]) -> Iterator[Hit]:
    needles = present(lines, [text.needle for text in texts])
    texts = [text for text in texts if text.needle in needles]
    if not texts:
        return
    found = 0
    for index, line in enumerate(lines):
        for text in texts:
            if text.needle in line.text and _counts(text, line):
                yield Hit(text, index)
                found += 1
        if found >= MOST_HITS:
            return


_KERNELS = frozenset({"kernel-oom", "off-the-bus", "driver-no-memory"})  # words that only the kernel's own records mean


def _counts(text: FailureText, line: LogLine) -> bool:
    is_quiet = line.level in ("DEBUG", "INFO", "WARNING")
    if is_quiet and line.level != "DEBUG":
        # Who logs another program's output line by line calls all of it INFO, its exceptions too.
        is_quiet = _compiled(_EXCEPTION).match(line.text) is None
    if is_quiet and not text.any_level and text.role is not Role.NOISE:
        return False
    if (text.name in _KERNELS and kernel_message(line) is None) or _is_quotation(text, line):
        return False
    return text.pattern is None or _compiled(text.pattern).search(line.text) is not None


def is_quoted(line: LogLine) -> bool:
    """True if a line of nobody's does not begin with the error that it tells."""
    speakers = (
        r"CUDA|HIP|XPU|NPU|Cuda|NCCL|terminate|what\(\):|RESOURCE_EXHAUSTED: |[EF]\d{4} [\d:.]{8,16} {1,8}\d{1,9} \w{1,80}\.cc:"
    )
    tag = r"\W{0,4}(?:[A-Za-z]{1,10}[\]】>)]\W{0,3})?(?:\[?rank\d{1,4}\]?:? ?)?"
    begins = rf"{tag}(?:[\w.]{{0,80}}(?:Error|Exception)|{speakers})"
    return not (line.process or line.place) and _traceback_pattern(begins).match(line.text) is None


def _is_quotation(text: FailureText, line: LogLine) -> bool:
    """True if the words stand between quotation marks in a line that is nobody's of vLLM's, and no code of a traceback."""
    if line.process or line.place or (line.text[:1].isspace() and line.text.lstrip()[:1] not in '{["'):
        return False
    before, _, after = line.text.partition(text.needle)
    return bool(before.count('"') % 2) and '"' in after


def _milestones(lines: Sequence[LogLine]) -> Iterator[tuple[int, ServerProgress]]:
    needles = present(lines, [needle for needle, _ in MILESTONES])
    known = [(needle, step) for needle, step in MILESTONES if needle in needles]
    reached = ServerProgress.UNKNOWN
    for index, line in enumerate(lines):
        for needle, step in known:
            if needle in line.text and not line.text.startswith("  "):
                if needle in _REQUESTS and (ServerProgress.BEGUN <= reached < ServerProgress.MEASURED or '" 4' in line.text):
                    break  # no server takes requests before it is up; a client's mistake is answered without the engine
                reached = step if step is ServerProgress.BEGUN else max(reached, step)
                yield index, step
                break


def is_of_another_file(line: LogLine) -> bool:
    """True for a record of vLLM's by a file that tells of no end: what it says of an exception was caught."""
    file = line.place.rpartition(":")[0]
    return bool(file) and file.rpartition("/")[2] not in ENDERS


def _runs(lines: Sequence[LogLine], hits: Sequence[Hit], exceptions: Sequence[LoggedException]) -> list[ServerRun]:
    """Split where a server introduces itself after another has come to its end.

    The API server speaks first and its engine after it: the engine's introduction begins a life of its own only where no
    API server has spoken since the last one began.
    """
    raised = {one.at for one in exceptions if not is_of_another_file(lines[one.at])}
    # Another program's exception, with the line that announces it, ends no server.
    foreign = {at for one in exceptions if is_whole_and_foreign(one, lines) for at in range(one.first - 1, one.at + 1)}
    own = [hit for hit in hits if hit.text.role is not Role.NOISE and hit.at not in foreign]
    ends = [hit.at for hit in own if hit.at in raised or not (hit.text.may_go_on or is_quoted(lines[hit.at]))]
    over = [hit.at for hit in hits if hit.text.role is Role.STOP]
    starts, introduced, by_api = [0], False, False
    for index, line in enumerate(lines):
        if not any(needle in line.text for needle in _BEGINS):
            continue
        is_api = "LLM engine" not in line.text
        place = bisect_left(ends, starts[-1])
        failed = place < len(ends) and ends[place] < index
        was_stopped = bisect_left(over, index) > bisect_left(over, starts[-1])
        if failed and (is_api or (introduced and (not by_api or was_stopped))):
            starts.append(index)
            by_api = False
        introduced, by_api = True, by_api or is_api
    starts = starts[-MOST_RUNS:] if len(starts) <= MOST_RUNS else [0, *starts[-MOST_RUNS:]]
    return [ServerRun(first, end) for first, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


# A report of `plimsoll doctor` quotes errors.
_HEAD = re.compile(r"memory failure: (?:yes|no|unknown|cannot be told|(?:probably|perhaps)(?: not)?)(?:   \(|\s*$)")
# The lines of a report that are not indented; what it quotes has lost the level that a log's record has.
_GOES_ON = re.compile(
    r"\s|$|\d{1,3}\. [a-z-]{1,20}\.[a-z-]{1,40} \((?:critical|warning|info), |and \d{1,4} more: --json|"
    r"The start's own figures: |plan computes for this command: |Started with: |Harmless, whatever it says: |The page shows: |"
    r"Looked at: |The snapshot's device |Read |Remark: |Note: |To settle it, collect:|"
    r"look next: |Failed first: |Run \d|No version is |"
    r"Nothing wrong was found\.|No failure was recognised\."
)


def without_reports(log: Log) -> Log:
    """The log with every line of a report of `plimsoll doctor` blanked."""
    if not any("memory failure: " in line.text for line in log.lines):
        return log
    kept: list[LogLine] = []
    inside = False
    for line in log.lines:
        goes_on = inside and not line.level and (bool(line.process) or _GOES_ON.match(line.text) is not None)
        inside = goes_on or _HEAD.match(line.text) is not None
        kept.append(line._replace(text="", process="") if inside else line)
    return log._replace(lines=kept)

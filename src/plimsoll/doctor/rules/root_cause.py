"""Finds what ended a server: the symptoms in its log, and one root cause among them, or none where it is unknown.

A symptom is a known text, an allocation that failed, or an unknown exception. The first solid symptom of the last run that
failed is the cause; what follows it is its noise. An out-of-memory error while the server was already being stopped, or while
a log record was written, is never the cause.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import LogLine
from plimsoll.doctor.rules.out_of_memory import OomFigures, parse_oom, without_siblings
from plimsoll.doctor.rules.timeline import (
    CODES,
    FOLLOWING,
    RUNTIME,
    UP,
    FailedStep,
    Hit,
    LoggedException,
    LogTimeline,
    ServerProgress,
    ServerRun,
    TracebackFrame,
    is_of_another_file,
    is_overcome,
    is_quoted,
    is_whole_and_foreign,
    step_of_frames,
    step_of_progress,
)
from plimsoll.doctor.words import words
from plimsoll.findings import Code
from plimsoll.vllm.failure_texts import CLIENTS, CONSEQUENCE_WORDS, CONSEQUENCES, PLACES, TRAINER_FILES, FailureText, Role

MOST_SYMPTOMS = 400  # the first ones decide; a log may repeat one a million times
NEAR = 64  # exceptions of other processes that may stand between a line and its own


class Symptom(NamedTuple):
    """A sign of failure in the log that may be the cause."""

    at: int
    code: Code
    confidence: float
    text: FailureText | None = None
    exception: LoggedException | None = None
    step: FailedStep | None = None
    oom: OomFigures | None = None
    quoted: bool = False  # an error of the card, told in somebody's sentence
    caught: bool = False  # logged by who caught the exception

    @property
    def is_loose(self) -> bool:
        """True for a complaint after which whoever wrote it may have gone on: a line, or an exception that was caught."""
        if self.caught:
            return True
        if self.exception is not None or self.text is None:
            return False
        return self.quoted or (self.oom is None and self.text.may_go_on)


LOOSE_REACH = 8  # lines: what complains further away from an end has nothing to do with it


def find_symptoms(
    timeline: LogTimeline, hits: Sequence[Hit], exceptions: Sequence[LoggedException]
) -> tuple[list[Symptom], tuple[Hit, ...]]:
    """Possible causes in the order of the log, and the out-of-memory texts that are none."""
    noisy, lines = {hit.at for hit in hits if hit.text.role is Role.NOISE}, timeline.log.lines
    found: list[Symptom] = []
    noise: list[Hit] = []
    covered: set[int] = set()
    owners = _Owners(exceptions, lines)
    pids: frozenset[int] | None = None
    strangers = _strangers(timeline, exceptions)
    are_named = any("pid=" in line.process for line in lines)
    for hit in hits:
        if hit.text.role not in (Role.CAUSE, Role.OUT_OF_MEMORY) or len(found) >= MOST_SYMPTOMS:
            continue
        owner, text = owners.of(hit.at), lines[hit.at].text
        is_others = hit.text.code is Code.STARTUP_BAD_FLAG or re.match(_QUOTES_ANOTHER, text.partition(hit.text.needle)[0])
        if owner is not None and hit.at > owner.at and is_others:
            owner = None  # the parser's own line or somebody's, below an exception and no part of its message
        following = lines[hit.at + 1].text if hit.at + 1 < len(lines) else ""
        is_code = text.lstrip().startswith("raise ") or (owner is not None and hit.at < owner.at and text.startswith("    "))
        if is_code and (owner is None or owner.kind):
            continue  # a traceback quotes it, and what it raised stands below; where it breaks off, its code is all there is
        if owner is not None:
            covered.add(owner.at)
        if owner is not None and owner.at in strangers:
            continue
        if hit.at in noisy or (owner is not None and (owner.in_logging or owner.warned or _is_of_a_side_thread(owner))):
            noise += [hit] if hit.text.role is Role.OUT_OF_MEMORY else []
            continue
        # The few lines that NCCL prints with its error may name memory as its reason.
        near = (line.text for line in lines[hit.at : hit.at + 5] if line.process == lines[hit.at].process)
        is_nccl = hit.text.code is Code.OTHER_COLLECTIVES and any("out of memory" in text for text in near)
        if hit.text.role is Role.OUT_OF_MEMORY or is_nccl:
            if pids is None:  # of the server's workers, as far as its lines name them
                run = timeline.run_at(hit.at)
                names = {line.process for line in lines[run.first : run.end] if "orker" in line.process}
                pids = frozenset(int(match[1]) for name in names if (match := re.search(r"pid=(\d{1,10})", name)))
            found.append(_out_of_memory(timeline, hit, owner, exceptions, pids))
        elif hit.text.code is None or (owner is None and (", retrying " in text or following.startswith("Retrying in "))):
            continue
        elif (
            owner is not None and is_consequence(owner) and hit.text.code.startswith("other.")
            and hit.text.needle[:12] not in owner.message
        ):  # fmt: skip
            continue  # inside an exception that only passes on another's failure, and not in the message that it passes on
        else:
            quoted = hit.text.speaker == "cuda" and owner is None and is_quoted(lines[hit.at])
            confidence = 0.95 if owner is not None else 0.85
            found.append(Symptom(hit.at, hit.text.code, confidence, hit.text, owner, quoted=quoted))
        is_named = are_named and hit.text.role is Role.CAUSE
        found[-1] = found[-1]._replace(caught=owner is not None and _is_caught(owner, lines, are_named=is_named))
    for one in exceptions[:MOST_SYMPTOMS]:
        if one.at in covered | strangers or one.in_logging or one.warned or is_consequence(one):
            continue
        if _is_of_a_side_thread(one) or not _is_fatal(one, timeline):
            continue
        if re.search(_RAN_OUT, one.message.partition("\n")[0][:2_000]):  # of a device whose words nobody here knows
            found.append(_out_of_memory(timeline, Hit(_ANY_DEVICE, one.at), one, exceptions, ())._replace(confidence=0.6))
        else:
            found.append(Symptom(one.at, _kind_of(one, timeline), 0.6, None, one))
        found[-1] = found[-1]._replace(caught=_is_caught(one, lines, are_named=True))
    # The engine's echo of a worker's error, where the worker's own words are lost.
    echoes = [one for one in exceptions if re.match(r"Worker failed with error '.{4}", one.message) and not one.in_logging]
    found = found or [Symptom(one.at, Code.OTHER_ENGINE_ERROR, 0.5, None, one) for one in echoes]
    # A traceback that breaks off: by the innermost of its calls, where that tells.
    broken = [one for one in exceptions if not one.kind and (one.process.startswith(_INSIDE) or lines[one.first].place)]
    cut = [(one, _code_of_place(one, one.frames[-2:])) for one in broken]
    found = found or [Symptom(one.at, code, 0.5, None, one) for one, code in cut if code is not None]
    return sorted(found, key=lambda one: one.at), tuple(noise)


def _is_caught(one: LoggedException, lines: Sequence[LogLine], *, are_named: bool) -> bool:
    """True if a record of vLLM's holds the exception, and none of those that tell of an end; or nobody known says it.

    `are_named`: what a server's processes say has their names before it.
    """
    is_told_by_nobody = are_named and not (one.process or one.frames or lines[one.at].place)
    return is_told_by_nobody or is_of_another_file(lines[one.at])


def _strangers(timeline: LogTimeline, exceptions: Sequence[LoggedException]) -> frozenset[int]:
    """The lines of exceptions that another program raised: whole tracebacks, no call of which is vLLM's, in a server's log.

    What one of vLLM's own was raised from is vLLM's; and so is what nothing was written after, unless an API server had come
    up, whose errors pass through vLLM, or the engine had died already: then it is a client's on the same terminal.
    """
    lines = timeline.log.lines
    of_clients = {one.at for one in exceptions if not _is_signed(one.at, one, lines) and one.kind.partition(".")[0] in CLIENTS}
    if not of_clients and not any(is_whole_and_foreign(one, lines) for one in exceptions):
        return frozenset()
    if not timeline.milestones and not any(line.process or line.place or "vllm" in line.text for line in lines):
        return frozenset()
    last = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].text.strip()), 0)
    ours: set[int] = set()
    for one in timeline.exceptions:
        at: LoggedException | None = one
        while at is not None and at.at not in ours and (at is not one or not is_whole_and_foreign(at, lines)):
            ours.add(at.at)
            at = timeline.exceptions[at.cause] if at.cause is not None else None
    died = [hit.at for hit in timeline.hits if hit.text.role is Role.DEATH and hit.text.name not in _WEAK_DEATHS]

    def is_last_word(one: LoggedException) -> bool:
        first = timeline.run_at(one.first).first
        refused = (hit.at > one.at and hit.text.speaker == "argparse" for hit in timeline.hits)  # it never came to run
        is_late = timeline.came_up_before(one.first) or any(first <= at < one.first for at in died) or any(refused)
        return one.at + one.message.count("\n") >= last and not is_late

    return frozenset(one.at for one in exceptions if one.at in of_clients or (one.at not in ours and not is_last_word(one)))


def _is_signed(at: int, raised: LoggedException | None, lines: Sequence[LogLine]) -> bool:
    """True if a process of the server says so: by its prefix or its record, or by calls of vLLM's in the traceback."""
    return bool(lines[at].process or lines[at].place) or (
        raised is not None and any("vllm" in one.file for one in raised.frames)
    )


_QUOTES_ANOTHER = r"\S.{0,160}?(?:\W\w{1,40}(?:Error|Exception): | NCCL WARN )"
_RAN_OUT = r"(?i)\bout of memory\b|\bnot enough (?:device |free |gpu )?(?:memory|space) (?:to|for) (?:allocate|allocation)"
_OF_ANOTHER_CARD = (
    r"(?i)\b(?:only supports?|requires?|needs?)\b.{0,60}\b(?:GPUs? or newer|compute capability|sm_?\d\d)"
    r"|\bnot (?:yet )?(?:implemented|supported|available|compiled)\b.{0,40}"
    r"\b(?:Blackwell|Hopper|Ada|Ampere|Turing|Volta|sm_?\d\d)\b"
)
_ASKS = r"(?i)\b(?:set|enable|use|pass|with|add|remove|disable)\b.{0,40}(?:\bVLLM_\w{3,60} ?=|[ `'\"]--[a-z][\w-]{3,50})"
_ANY_DEVICE = FailureText("any-device", "", Role.OUT_OF_MEMORY, speaker="")


def _kind_of(one: LoggedException, timeline: LogTimeline) -> Code:
    """The code of an exception that matches no known text: by the place it was raised at, and by its kind."""
    if one.name.endswith("ValidationError"):
        return Code.OTHER_BAD_CONFIG
    if re.search(_OF_ANOTHER_CARD, one.message[:400]):
        return Code.OTHER_UNSUPPORTED_GPU
    if (code := _code_of_place(one, one.frames)) is not None:
        return code
    step = step_of_frames(one.frames)
    if step is not None and step.name == "weights":
        return Code.OTHER_BAD_MODEL
    is_early = (step is None or step.name == "device") and timeline.progress_at(one.at) is not ServerProgress.SERVING
    if (one.name in ("ValueError", "NotImplementedError") and one.frames and is_early) or re.search(_ASKS, one.message[:400]):
        return Code.OTHER_BAD_CONFIG  # refused before anything is loaded, or the setting that helps is named
    return Code.OTHER_ENGINE_ERROR


def _code_of_place(one: LoggedException, frames: Sequence[TracebackFrame]) -> Code | None:
    for frame in reversed(frames):
        for pieces, names, code in PLACES:
            if (not names or one.name in names or not one.kind) and any(piece in frame.file for piece in pieces):
                return code
    return None


class _Owners:
    """Which exception a line belongs to: its traceback, its message, or the lines right after it."""

    def __init__(self, exceptions: Sequence[LoggedException], lines: Sequence[LogLine]) -> None:
        self._exceptions = sorted(exceptions, key=lambda one: one.at)
        self._ends = [one.at for one in self._exceptions]
        self._lines = lines

    def of(self, index: int) -> LoggedException | None:
        """The exception that this line is part of."""
        place = bisect_left(self._ends, index)
        for one in self._exceptions[place : place + NEAR]:
            if one.at == index or (one.first <= index and self._is_of_record(index, one)):
                return one
        before = reversed(self._exceptions[max(0, place - NEAR) : place])
        return next((one for one in before if index <= one.at + FOLLOWING and self._is_of_record(index, one)), None)

    def _is_of_record(self, index: int, one: LoggedException) -> bool:
        """True unless the line is another process's, or a record of its own that came in between."""
        line, named = self._lines[index], self._lines[one.at]
        if index < one.at and not (line.process or line.level or line.text[:1].isspace() or line.text.startswith("Trace")):
            return False  # between the calls of a traceback stand calls and code alone
        return line.process == one.process and (not line.level or (line.level, line.at) == (named.level, named.at))


def is_consequence(one: LoggedException) -> bool:
    """True if an exception only passes on that something else failed."""
    said = one.message.partition("\n")[0]
    return one.name in CONSEQUENCES or any(words in said for words in CONSEQUENCE_WORDS)


def _is_of_a_side_thread(one: LoggedException) -> bool:
    """True if an exception ended a thread beside the engine's work, which goes on without it."""
    return one.in_thread and not one.process.startswith(_INSIDE) and not one.functions() & _ENGINE_FUNCTIONS


_WORKERS = ("Worker", "VllmWorker", "RayWorker")
_INSIDE = ("EngineCore", *_WORKERS, "Process")


def _is_fatal(one: LoggedException, timeline: LogTimeline) -> bool:
    """True if an unknown exception may have ended the server: raised in the engine, or the last line."""
    functions = one.functions()
    # An exception may have answered one request and left the server as it was. A refused start passes through the functions
    # that start an engine; a request's error never does.
    of_an_answer = any(part in frame.file for frame in one.frames for part in _REQUEST_FILES)
    if not one.kind or functions & _REQUEST_FUNCTIONS or one.message.startswith(_DOOR_REFUSALS) or of_an_answer:
        return False
    is_invalid = one.name.endswith("ValidationError") and timeline.progress_at(one.at) is ServerProgress.SERVING
    if not functions & _ENGINE_FUNCTIONS and (is_invalid or functions & _STREAM_FUNCTIONS):
        return False
    if one.process.startswith("APIServer") and one.frames and not any("vllm" in frame.file for frame in one.frames):
        return False  # of a connection
    inside = one.process.startswith(_INSIDE) or bool(functions & _ENGINE_FUNCTIONS)
    if timeline.goes_on_after(one.at, one.process or None):
        return False
    if not one.frames:  # somebody's error on the way, unless nothing came after it
        goes_on = bool(timeline.milestones) and timeline.milestones[-1][0] > one.at
        return inside or not (one.process or goes_on or timeline.came_up_before(one.at))
    if inside or timeline.serves_after(one.at):
        return inside
    # Beside an engine that serves, it ended something where a death or nothing follows; an API server's own end is told inside.
    lines, end = timeline.log.lines, timeline.run_at(one.at).end
    if timeline.progress_at(one.at) is not ServerProgress.SERVING or any(hit.text.role is Role.DEATH for hit in timeline.hits):
        return True
    if timeline.came_up_before(one.first):
        return False
    return not any(line.text.strip() for line in lines[one.at + one.message.count("\n") + 1 : end])


# The sentences of plimsoll's door (plimsoll.inside.door), which refuses requests one by one.
_DOOR_REFUSALS = (
    "this server cannot run this request within its GPU memory", "this server has no GPU memory for this request now",
)  # fmt: skip
_ENGINE_FUNCTIONS, _REQUEST_FUNCTIONS, _STREAM_FUNCTIONS = (
    frozenset(words("names")["functions"][of]) for of in ("engine", "request", "stream")
)
_REQUEST_FILES = ("/vllm/tool_parsers/", "/openai/tool_parsers/", "/vllm/reasoning/", "/vllm/parser/")  # of one answer


def _out_of_memory(
    timeline: LogTimeline, hit: Hit, owner: LoggedException | None, exceptions: Sequence[LoggedException], pids: Collection[int]
) -> Symptom:
    """An allocation that failed: which step, and whether somebody else holds the memory."""
    line = timeline.log.lines[hit.at]
    oom = parse_oom(owner.message if owner is not None and "ried to allocate" in owner.message else line.text)
    oom = without_siblings(oom, pids)
    step = _step(timeline, hit, owner, exceptions)
    if step is None:
        code = Code.RUNTIME_COLLECTIVES if hit.text.speaker == "nccl" or hit.text.role is Role.CAUSE else Code.RUNTIME_FORWARD
        step = FailedStep("unknown", code, 0.4 if code is Code.RUNTIME_FORWARD else 0.7)
    step = _at_start(timeline, hit, step, oom)
    code, confidence = step.code, step.confidence
    progress = timeline.progress_at(hit.at, line.process)
    is_runtime = step.name in RUNTIME or (
        step.name == "unknown" and progress in (ServerProgress.SERVING, ServerProgress.UNKNOWN)
    )
    if hit.text.name == "cumem-oom" and progress is not ServerProgress.SERVING and step.name in ("unknown", "wake-up"):
        code = CODES["weights"] if progress in (ServerProgress.LOADING, ServerProgress.BEGUN) else CODES["wake-up"]
    if oom.has_neighbour and code is not Code.RUNTIME_WAKE_UP:
        code, confidence = (Code.RUNTIME_NEIGHBOUR if is_runtime else Code.STARTUP_FREE_MEMORY_CHECK), 0.9
    elif hit.text.speaker not in ("nccl", "kernel") and owner is None and is_quoted(line):
        return Symptom(hit.at, code, 0.3, hit.text, None, step, oom, quoted=True)  # not to be called either way
    elif owner is not None and oom.tried is None and any(re.search(_PINNED, frame.function) for frame in owner.frames[-3:]):
        code, confidence = Code.HOST_OUT_OF_MEMORY, 0.7
    elif hit.text.name == "cuda-driver-not-ready":
        confidence = min(confidence, 0.7)  # a guess: only WSL2 has been seen to say so
    elif owner is not None:  # a trainer's own step may have failed, in the process in which it also holds an engine
        files = [frame.file for frame in owner.frames]
        is_trainers = any(part in file for file in files for part in TRAINER_FILES)
        if is_trainers and not any("/vllm/" in file for file in files):
            code, confidence = Code.RUNTIME_NEIGHBOUR, 0.7
    return Symptom(hit.at, code, confidence, hit.text, owner, step, oom)


_PINNED = r"(?i)pin_memory|is_pinned|pinned|cpu_memory|host_mem|host_alloc"  # page-locked memory of the host


_START_DEATHS = frozenset({
    "initialization-failed", "engine-failed-to-start", "worker-failed-to-start", "worker-init-failed", "engine-process-failed",
})  # fmt: skip


def _at_start(timeline: LogTimeline, hit: Hit, step: FailedStep, oom: OomFigures) -> FailedStep:
    """A step that also occurs while serving, of a server that never came to serve: one of the start's trial runs."""
    if step.name not in ("logits", "forward", "multimodal", "unknown") or step.code is Code.RUNTIME_COLLECTIVES:
        return step
    run = timeline.run_at(hit.at)
    progress = timeline.progress_at(hit.at)
    died = any(one.text.name in _START_DEATHS for one in timeline.hits if run.first <= one.at < run.end)
    above = timeline.log.lines[max(timeline.run_at(hit.at).first, hit.at - 40) : hit.at]
    warmed = oom.private is not None and step.name == "logits" and any("dummy_metadata" in line.text for line in above)
    if progress is ServerProgress.SERVING or not (died or warmed):
        return step
    if warmed or oom.private is not None or progress >= ServerProgress.MEASURED:
        name = "sampler-warmup" if step.name == "logits" else "warm-up"
    elif progress is ServerProgress.LOADING:
        name = "weights"
    else:
        name = "profile"
    return FailedStep(name, CODES[name], min(step.confidence, 0.75))


def _step(
    timeline: LogTimeline, hit: Hit, owner: LoggedException | None, exceptions: Sequence[LoggedException]
) -> FailedStep | None:
    """By the frames of this error, of the same error told again, or by how far the server had come."""
    if owner is not None and not is_consequence(owner) and (step := step_of_frames(owner.frames)) is not None:
        return step
    process = timeline.log.lines[hit.at].process
    siblings = [
        one for one in exceptions if one.frames and (not one.kind or "ut of memory" in one.message) and not one.in_logging
    ]
    near = nsmallest(16, siblings, key=lambda one: (is_consequence(one), one.process != process, abs(one.at - hit.at)))
    for one in near:
        if (step := step_of_frames(one.frames)) is not None:
            return step._replace(confidence=step.confidence - 0.1)
    lines, run = timeline.log.lines, timeline.run_at(hit.at)
    # The worker's method that vLLM itself names around an error whose traceback is lost.
    for index in (
        hit.at,
        *range(hit.at - 1, max(run.first, hit.at - 60) - 1, -1),
        *range(hit.at + 1, min(run.end, hit.at + 20)),
    ):
        if "method" in lines[index].text and (match := re.search(_METHOD, lines[index].text)) is not None:
            return step_of_frames([TracebackFrame("vllm", match[1])])
    # A traceback whose frames are lost still quotes the code: the calls in it name the step.
    quoted = [
        line.text
        for line in lines[max(run.first, hit.at - 30) : hit.at]
        if line.process == process and "(" in line.text and line.level in ("", "ERROR")
    ]
    calls = [TracebackFrame("vllm", name) for text in quoted for name in re.findall(r"\b([a-z_]\w{2,60})\(", text[:400])]
    if any("logits.sort" in text or "log_softmax" in text for text in quoted):
        calls.append(TracebackFrame("vllm", "compute_logprobs"))
    step = step_of_frames(calls) if calls else None
    if step is not None and step.name != "forward":
        return step._replace(confidence=0.6)
    # Parameters are made under a device context, and little else is: a traceback cut down to torch's own frames.
    frames = owner.frames if owner is not None else ()
    if any(frame.function == "__torch_function__" and frame.file.endswith("_device.py") for frame in frames):
        return FailedStep("weights", CODES["weights"], 0.6)
    progress = timeline.progress_at(hit.at, process) or timeline.progress_at(timeline.run_at(hit.at).end)
    return step_of_progress(progress, frames_seen=bool(owner and owner.frames))


_METHOD = r"(?:processing method|executing method|[Ii]nvocation of|Call to) '?([a-z_]{3,60})'?"


class LogVerdict(NamedTuple):
    """The cause of a server's end, as far as its log tells."""

    root: Symptom | None
    noise: tuple[Hit, ...]  # out-of-memory words that mean nothing here
    deaths: tuple[Hit, ...]
    memory_failure: bool | None
    progress: ServerProgress
    run: ServerRun
    runs_failed: int  # runs that ended in a failure
    stopped: bool  # somebody ended it on purpose


def judge_runs(timeline: LogTimeline) -> list[LogVerdict]:
    """The verdict on each run of a server, in the order of the log."""
    # When each process was first told to end, in all runs: an older server may still be on its way out.
    stop_requests: dict[str, int] = {}
    for hit in timeline.hits:
        if hit.text.role is Role.STOP:
            stop_requests.setdefault(timeline.log.lines[hit.at].process, hit.at)
    return [_judge_run(timeline, run, stop_requests) for run in timeline.runs]


def judge(timeline: LogTimeline, verdicts: Sequence[LogVerdict] = ()) -> LogVerdict:
    """The verdict on one log: that on its last run which failed."""
    verdicts = verdicts or judge_runs(timeline)
    failed = [verdict for verdict in verdicts if verdict.root is not None and not verdict.stopped]
    died = [verdict for verdict in verdicts if verdict.deaths and not verdict.stopped]
    stopped = [verdict for verdict in verdicts if verdict.stopped]
    # A port that the last server still holds is found in use by every restart: it says nothing of how that one failed.
    first_hand = [one for one in failed if one.root is not None and one.root.code is not Code.OTHER_PORT_IN_USE]
    chosen = (first_hand or failed or died or stopped or verdicts)[-1]
    return chosen._replace(runs_failed=len(failed))


def _judge_run(timeline: LogTimeline, run: ServerRun, stop_requests: Mapping[str, int]) -> LogVerdict:
    first, end = (bisect_left(timeline.hits, at, key=lambda hit: hit.at) for at in (run.first, run.end))
    exceptions = [one for one in timeline.exceptions if run.first <= one.at < run.end]
    lines = timeline.log.lines
    hits = _without_strangers(timeline, run, timeline.hits[first:end], exceptions)
    deaths = tuple(hit for hit in hits if hit.text.role is Role.DEATH)
    for hit in deaths:
        # A script that had all its answers ends, and takes its engine with it: the client then calls that a death.
        if hit.text.name == "worker-died" and "Engine core proc" in lines[hit.at].text:
            before = lines[max(run.first, hit.at - 2_000) : hit.at]
            bar = next((line.text for line in reversed(before) if "Processed prompts:" in line.text), "")
            if "100%" in bar and not any("Traceback" in line.text or "EngineDeadError" in line.text for line in before):
                deaths = tuple(one for one in deaths if one is not hit)
    symptoms, noise = find_symptoms(timeline, hits, exceptions)
    symptoms = [
        one._replace(confidence=UNSURE)
        if _is_nobodys(one, timeline, run) and not any(hit.at > one.at for hit in deaths)
        else one
        for one in symptoms
    ]
    stop = _stop(timeline, hits, exceptions, is_sound=not symptoms and not deaths)
    before_stop = [one for one in symptoms if stop is None or (one.at < stop and _ended_something(one, deaths, timeline))]
    progress = timeline.progress_at(run.end)
    died = [hit.at for hit in deaths if hit.text.name not in _WEAK_DEATHS]
    stopped = stop is not None and not before_stop and not any(at < stop for at in died)
    root = _choose_root(before_stop, deaths, timeline) if not stopped else None
    if root is None and not stopped and symptoms and stop is not None:
        root = _choose_root(symptoms, deaths, timeline)
    if stopped:
        assert stop is not None
        text = next((hit.text for hit in hits if hit.at == stop), None)
        is_weak = text is not None and text.name == "uvicorn-stopped" and _is_cut(timeline)
        root = Symptom(stop, Code.OTHER_STOPPED_BY_OPERATOR, 0.5 if is_weak else 0.9, text)
        noise = (*noise, *(hit for hit in hits if hit.text.role is Role.OUT_OF_MEMORY and hit.at > stop))
    memory = _is_memory_failure(root, deaths, progress, timeline, run)
    ends = [Symptom(hit.at, Code.ENGINE_DEAD, UNSURE, hit.text) for hit in deaths if hit.text.name not in _WEAK_DEATHS]
    later = _failure_of_another_server(timeline, run, stop_requests, [*symptoms, *ends]) if stopped else None
    if later is not None:
        root, memory = (root if later.code is Code.ENGINE_DEAD else later), None
        noise = tuple(hit for hit in noise if hit.at != later.at)
    return LogVerdict(root, tuple(noise), deaths, memory, progress, run, 0, stopped)


def _is_nobodys(one: Symptom, timeline: LogTimeline, run: ServerRun) -> bool:
    """True for a shortage without a call or a signature, in the log of a server that signs what it says."""
    is_bare = one.code.is_memory and one.exception is not None and not one.exception.frames
    lines = timeline.log.lines
    return is_bare and not lines[one.at].process and any(line.place for line in lines[run.first : run.end])


def _without_strangers(
    timeline: LogTimeline, run: ServerRun, hits: Sequence[Hit], exceptions: Sequence[LoggedException]
) -> list[Hit]:
    """The texts without those that no process of the server signs and after which it went on: another program's.

    So are a shell's words of a process while the API server writes on, or of a command that is not the server's; and Ray's
    words where the server names a failure of its own and nothing shows that it runs in Ray.
    """
    lines = timeline.log.lines
    signed = [at for at in range(run.first, run.end) if lines[at].place]
    if not signed:
        return list(hits)
    steps = [at for at, step in timeline.milestones if run.first <= at < run.end and step is not ServerProgress.SERVING]
    work = [at for at in timeline.serving if run.first <= at < run.end]
    outlived = max([*steps[-1:], *work[-2:-1], *(at for at in work if any(word in lines[at].text for word in UP))], default=-1)
    owners = _Owners(exceptions, lines)
    names_failure = any(_is_signed(one.at, one, lines) for one in exceptions)
    servers = spans_of_servers(lines, run.first, run.end)

    def is_anothers(hit: Hit) -> bool:
        if hit.text.speaker == "ray" and names_failure:
            return not any(re.search(_RAYS, f"{lines[at].process} {lines[at].place} {lines[at].text}") for at in signed)
        if (job := re.search(_SHELLS_JOB, lines[hit.at].text)) is None:
            return False
        is_named = job["pid"] is None or "vllm" in job["command"] or f"{_SERVER}{job['pid']}" in servers or not servers
        return not is_named or any(first < hit.at < last - LOOSE_REACH for first, last in servers.values())

    return [
        hit for hit in hits
        if _is_signed(hit.at, owners.of(hit.at), lines)
        or not (is_anothers(hit) or (hit.at <= outlived and hit.text.speaker not in ("kernel", "nvml")))
    ]  # fmt: skip


_RAYS = r"\b[Rr]ay|\bip="
_SHELLS_JOB = (
    r"^(?:\S.{0,159}: line \d{1,6}:\s{1,8}(?P<pid>\d{1,10}) )?\s{0,8}"
    r"(?:Killed|(?:[A-Z][\w ]{3,40})\(core dumped\))(?P<command>$| {2,}.*)"
)


def _failure_of_another_server(
    timeline: LogTimeline, run: ServerRun, stop_requests: Mapping[str, int], symptoms: Sequence[Symptom]
) -> Symptom | None:
    """A failure after one server was stopped, while a second one in the same log went on: its owner is unknown.

    The second must have spoken before the stop and after it, and not have been told to end before the symptom; a process
    that was told itself is excused.
    """
    lines = timeline.log.lines
    stop = min((at for at in stop_requests.values() if at >= run.first), default=None)
    later = [one for one in symptoms if stop is not None and one.at > stop]
    if stop is None or not later:
        return None
    spans = spans_of_servers(lines, run.first, run.end)
    across = [process for process, (first, last) in spans.items() if first < stop < last]
    for one in later:
        if stop_requests.get(lines[one.at].process, one.at) < one.at:
            continue
        going_on = [process for process in across if stop_requests.get(process, one.at) >= one.at]
        # Where only an engine's own line tells of the stop, one of the servers here is its own.
        if len(going_on) > (0 if any(process in stop_requests and stop_requests[process] <= stop for process in spans) else 1):
            return one._replace(confidence=UNSURE)
    return None


def spans_of_servers(lines: Sequence[LogLine], first: int, end: int) -> dict[str, tuple[int, int]]:
    """The first and the last line of each API server between these."""
    spans: dict[str, tuple[int, int]] = {}
    for index in range(first, end):
        process = lines[index].process
        if process.startswith(_SERVER):
            spans[process] = (spans.get(process, (index, 0))[0], index)
    return spans


_WEAK_DEATHS = frozenset({"worker-exception", "terminate-called"})  # printed before the error they belong to, or long after


def _stop(timeline: LogTimeline, hits: Sequence[Hit], exceptions: Sequence[LoggedException], *, is_sound: bool) -> int | None:
    """The line at which somebody asked it to end, or None.

    Uvicorn's farewell, and what nobody signs, count only where nothing else was wrong.
    """
    lines = timeline.log.lines
    is_signed = any(line.place for line in lines)
    weak = [hit for hit in hits if is_signed and hit.text.speaker == "python" and not _is_signed(hit.at, None, lines)]
    hits = [hit for hit in hits if is_sound or not (hit.text.name == "uvicorn-stopped" or hit in weak)]
    # A key on the terminal is heard by whatever runs there: the server's only where it says so, or nothing more.
    answers = [hit.at for hit in hits if hit.text.role is Role.STOP and hit.text.speaker != "terminal"]
    heard = max([*answers, *(one.at for one in exceptions if one.name == "KeyboardInterrupt")], default=0)
    end = timeline.run_at(hits[0].at).end - LOOSE_REACH if hits else 0
    hits = [hit for hit in hits if hit.text.speaker != "terminal" or hit.at < heard or hit.at >= end]
    # A worker is stopped by its engine, also where the engine failed: only the others hear an operator.
    asked = [
        hit.at for hit in hits if hit.text.role is Role.STOP and not timeline.log.lines[hit.at].process.startswith(_WORKERS)
    ]
    for one in exceptions:
        by_signal = one.name == "SystemExit" and one.functions() & {"signal_handler", "_signal_handler", "sigterm_handler"}
        if (by_signal or one.name == "KeyboardInterrupt") and not one.process.startswith(_WORKERS):
            asked.append(one.at)
    return min(asked, default=None)


_OUTSIDE = frozenset("kernel nvml shell slurm systemd script docker argparse ray".split())  # write without vLLM's prefix
_SERVER = "APIServer pid="  # one a server: those of --api-server-count have a number in their name
UNSURE = 0.35  # told, and neither blamed on memory nor ruled out
_NAMES_STEP = frozenset({"sampler-warmup", "weights-too-large"})


def _choose_root(symptoms: Sequence[Symptom], deaths: Sequence[Hit], timeline: LogTimeline) -> Symptom | None:
    """The cause: the first symptom that ended something; vLLM's own naming of the step refines an allocation error.

    A line that is no part of an exception, and no signal, is the cause only where no exception and no signal is; and what
    nobody signs only where none of the server's processes names a cause.
    """
    lines = timeline.log.lines
    signed = [one for one in symptoms if _is_signed(one.at, one.exception, lines)]
    outside = [one for one in symptoms if one.text is not None and one.text.speaker in _OUTSIDE]
    refused = [one for one in outside if one.text is not None and one.text.speaker == "argparse"]
    outside = refused or outside  # nothing that nobody signs ended what was refused before it did anything
    if refused or any(one.text is not None and not one.is_loose for one in signed):
        symptoms = [one for one in symptoms if one in signed or one in outside]
    solid = [one for one in symptoms if one.text is not None and _ended_something(one, deaths, timeline)]
    if any(not one.is_loose for one in symptoms) or any(hit.text.speaker != "vllm" for hit in deaths):
        solid = [one for one in solid if not one.is_loose]
    solid = [one for one in solid if one.code is not Code.OTHER_ENGINE_ERROR] or solid
    generic = [one for one in symptoms if one.text is None and (not one.is_loose or _ended_something(one, deaths, timeline))]
    waits = [one for one in solid if one.code is Code.ENGINE_WEDGED]
    solid = [one for one in solid if one.code is not Code.ENGINE_WEDGED]
    solid = solid or ([] if generic or deaths else waits)  # a notice of waiting is no cause beside one, nor of a death
    root = solid[0] if solid else None
    if root is None:
        return generic[0] if generic else None
    # The line that announces the cause's own traceback is no death before it.
    begins = root.at if root.exception is None else root.exception.first - 2
    died = [hit.at for hit in deaths if hit.text.name not in _WEAK_DEATHS and hit.at < begins]
    ended = next((one for one in generic if any(one.at <= at for at in died)), None)
    cause = root.exception.cause if root.exception is not None else None
    if ended is not None and not (cause is not None and timeline.exceptions[cause] is ended.exception):
        return ended  # nobody has words for it, but the engine was dead of it before anything else was said
    if root.code is Code.OTHER_COMPILER:  # which the host's memory may have ended
        root = next((one for one in solid if one.code is Code.HOST_OUT_OF_MEMORY), root)
    if root.text is not None and root.text.name in ("kv-negative", "no-gpu-blocks"):  # the figure that vLLM then complains of
        return next((one for one in solid if one.code is root.code and one.exception is not None), root)
    if root.text is not None and root.text.name == "validation-error":  # what was invalid stands in the lines below
        below = (one for one in solid[1:] if one.exception is root.exception and one.at <= root.at + FOLLOWING)
        return next((one for one in below if not one.code.is_memory), root)
    if root.step is not None and root.code not in (Code.STARTUP_FREE_MEMORY_CHECK, Code.RUNTIME_NEIGHBOUR):
        named = next((one for one in solid if one.text is not None and one.text.name in _NAMES_STEP), None)
        if named is not None:
            return root._replace(code=named.code, confidence=0.97, text=named.text)
    return root


def _ended_something(one: Symptom, deaths: Sequence[Hit], timeline: LogTimeline) -> bool:
    """True if a death follows, or nothing does: a symptom the server outlived without dying ended nothing."""
    if one.code is Code.ENGINE_WEDGED:  # a notice that it waits: overcome where anything was done afterwards
        return timeline.run_at(one.at).end <= one.at or not timeline.milestones or timeline.milestones[-1][0] < one.at
    if one.is_loose:
        end = next((hit.at for hit in deaths if hit.at >= one.at), timeline.run_at(one.at).end)
        is_over = timeline.goes_on_after(one.at) or timeline.progress_at(one.at) is ServerProgress.SERVING
        return end - one.at <= LOOSE_REACH and not is_over
    if one.exception is not None and not one.code.is_memory and timeline.goes_on_after(one.at, one.exception.process or None):
        return False
    if any(hit.at >= one.at for hit in deaths):
        return True
    if one.code.is_memory and one.exception is not None:
        # A client's own script may fail on the same terminal while the server goes on.
        is_ours = not one.exception.frames or any("vllm" in frame.file for frame in one.exception.frames)
        return is_ours or not timeline.serves_after(one.at)
    return not timeline.serves_after(one.at)


def _is_memory_failure(
    root: Symptom | None, deaths: Sequence[Hit], progress: ServerProgress, timeline: LogTimeline, run: ServerRun
) -> bool | None:
    """Yes or no by the root cause's code; None where the log stops without a word or nobody says who killed it."""
    if root is not None and root.code is Code.OTHER_STOPPED_BY_OPERATOR:
        # Asked to stop: but something may have gone wrong before, of which the log shows no more than a trace.
        complains = _complains(timeline, run, root.at)
        if root.text is not None and root.text.name == "uvicorn-stopped":  # also printed after the engine has died
            return None if complains or _is_cut(timeline) else False
        # An error may have ended something: its traceback breaks off, or nothing was served after it.
        last = next((at for at in range(root.at - 1, run.first - 1, -1) if _is_error(timeline.log.lines[at])), None)
        broken = any(not one.kind and run.first <= one.first < root.at for one in timeline.exceptions)
        doubts = _is_cut(timeline) or broken or (last is not None and not timeline.serves_after(last))
        return None if complains and doubts else False
    if root is not None and root.code is Code.ENGINE_WEDGED:
        return None if deaths or _complains(timeline, run, run.end) else False
    if root is not None:
        if root.code.is_memory:
            return True if root.confidence >= 0.4 else None
        unknown = root.exception if root.text is None else None
        calls = " ".join(f"{frame.file} {frame.function}" for frame in unknown.frames[-2:]) if unknown is not None else ""
        if unknown is not None and (not unknown.kind or "alloc" in calls.lower()):
            return None  # it breaks off, or whoever was asked for memory says nothing that is known
        # Words about memory in an exception nobody knows: not to be called either way.
        said = unknown.message[:2_000] if unknown is not None else ""
        return None if re.search(_ABOUT_MEMORY, said) and not re.search(_REFUSED, said) else False
    if deaths or _complains(timeline, run, run.end):
        return None  # something failed, and what is here does not say of what
    if progress is ServerProgress.SERVING and not _is_cut(timeline):
        # A collector may call everything a warning: an error that only warns is not ruled out.
        quiet, lines = ("DEBUG", "WARNING"), timeline.log.lines
        warned = [one for one in timeline.exceptions if lines[one.at].level in quiet and run.first <= one.at < run.end]
        return None if any("ut of memory" in one.message for one in warned) else False
    return None


_ABOUT_MEMORY = r"(?i)\bmemory\b(?!')|\bOOM\b|\ballocation\b|\balloc.{0,49}(?:fail|bytes|\d ?[KMGT]i?B)|fail.{0,40}\balloc"

# A wrong setting or shape, whatever it says of memory.
_REFUSED = (
    r"(?i)\bunsupported\b|(?:not|n't) (?:currently |yet )?support|not implemented|\billegal\b|"
    r"\b(?:must be|is not|not) (?:a )?(?:multiple of|power of|divisible by)"
)


def _is_cut(timeline: LogTimeline) -> bool:
    """True if the log begins in the middle: no server introduces itself in it."""
    return not any(step is ServerProgress.BEGUN for _, step in timeline.milestones)


def _complains(timeline: LogTimeline, run: ServerRun, end: int) -> bool:
    """True if an engine or a worker reports an error, or a traceback breaks off, whatever it was about."""
    if any(not one.kind and run.first <= one.first < run.end for one in timeline.exceptions):
        return True
    lines = timeline.log.lines
    overcome = {(line.place, line.at) for line in lines[run.first : end] if is_overcome(line)}
    errors = [at for at in range(run.first, end) if _is_error(lines[at]) and (lines[at].place, lines[at].at) not in overcome]
    # One line alone is a complaint; what ended something says more.
    pairs = [at for at, following in pairwise(errors) if following - at <= 2 and lines[at].process == lines[following].process]
    return bool(pairs) and not timeline.goes_on_after(pairs[-1])


def _is_error(line: LogLine) -> bool:
    return line.level in ("ERROR", "CRITICAL") and line.process.startswith(("EngineCore", *_WORKERS))

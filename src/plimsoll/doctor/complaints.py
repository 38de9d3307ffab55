"""Everything in a log that may be the cause of its server's end: known texts, allocations that failed and at which step,
and exceptions that nobody has words for."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import NamedTuple

from plimsoll.doctor.oom_text import OutOfMemory, parse_oom
from plimsoll.doctor.steps import CODES, RUNTIME, Progress, Step, hinted_by_torch, step_of_frames, step_of_progress
from plimsoll.doctor.story import Hit, Story
from plimsoll.doctor.tracebacks import FOLLOWING, Frame, Raised
from plimsoll.domain.finding import Code
from plimsoll.engine.failure_texts import CONSEQUENCE_WORDS, CONSEQUENCES, Role, Text

MOST_COMPLAINTS = 400  # the first ones decide; a log may repeat one a million times
NEAR = 64  # exceptions of other processes that may stand between a line and its own


class Complaint(NamedTuple):
    """Something that may be the cause."""

    at: int
    code: Code
    confidence: float
    text: Text | None = None
    raised: Raised | None = None
    step: Step | None = None
    oom: OutOfMemory | None = None


def complaints_in(story: Story, hits: Sequence[Hit], raised: Sequence[Raised]) -> tuple[list[Complaint], tuple[Hit, ...]]:
    """What may be the cause, in the order of the log, and the out-of-memory words that are not."""
    noisy = {hit.at for hit in hits if hit.text.role is Role.NOISE}
    found: list[Complaint] = []
    noise: list[Hit] = []
    covered: set[int] = set()
    owners = _Owners(raised)
    for hit in hits:
        if hit.text.role not in (Role.CAUSE, Role.OUT_OF_MEMORY) or len(found) >= MOST_COMPLAINTS:
            continue
        owner = owners.of(hit.at, story.log.lines[hit.at].process)
        text = story.log.lines[hit.at].text
        if _is_quoted_code(text, hit.at, owner):
            continue  # what it raised stands below
        if owner is not None:
            covered.add(owner.at)
        if hit.at in noisy or (owner is not None and (owner.in_logging or owner.warned)):
            noise += [hit] if hit.text.role is Role.OUT_OF_MEMORY else []
            continue
        is_nccl = hit.text.code is Code.OTHER_COLLECTIVES and _says_memory(story, hit.at)
        if hit.text.role is Role.OUT_OF_MEMORY or is_nccl:
            found.append(_out_of_memory(story, hit, owner, raised))
        elif hit.text.code is not None and not _is_harmless(hit, owner):
            found.append(Complaint(hit.at, hit.text.code, 0.95 if owner is not None else 0.85, hit.text, owner))
    found += [
        Complaint(one.at, _kind_of(one), 0.6, None, one)
        for one in raised[:MOST_COMPLAINTS]
        if one.at not in covered and not one.in_logging and not one.warned and not is_consequence(one) and _is_fatal(one, story)
    ]
    found = found or [*_echoes(raised)]
    return sorted(found, key=lambda one: one.at), tuple(noise)


def _is_quoted_code(text: str, at: int, owner: Raised | None) -> bool:
    """Whether a traceback quotes this line as code; where it breaks off, its code is all there is to go by."""
    if owner is not None and not owner.kind:
        return False
    return text.lstrip().startswith("raise ") or (owner is not None and at < owner.at and text.startswith("    "))


def _echoes(raised: Sequence[Raised]) -> Iterator[Complaint]:
    """The engine's echo of a worker's error, where the worker's own words are lost."""
    for one in raised:
        match = re.match(r"Worker failed with error '(.{4,})", one.message)
        if match is not None and not one.in_logging:
            yield Complaint(one.at, Code.OTHER_ENGINE_ERROR, 0.5, None, one)


def _kind_of(one: Raised) -> Code:
    """What can be said of an exception that nobody has words for."""
    if one.name.endswith("ValidationError"):
        return Code.OTHER_BAD_CONFIG
    step = step_of_frames(one.frames)
    if step is not None and step.name == "weights" and one.name in ("RuntimeError", "AssertionError", "KeyError", "ValueError"):
        return Code.OTHER_BAD_MODEL
    return Code.OTHER_ENGINE_ERROR


def _says_memory(story: Story, at: int) -> bool:
    """Whether the few lines that NCCL prints with its error name memory as its reason."""
    process = story.log.lines[at].process
    return any("out of memory" in line.text for line in story.log.lines[at : at + 5] if line.process == process)


def _is_harmless(hit: Hit, owner: Raised | None) -> bool:
    """Words inside an exception that only passes on another's failure, and not in the message that it passes on."""
    if owner is not None and is_consequence(owner) and hit.text.code is not None and hit.text.code.startswith("other."):
        return hit.text.needle[:12] not in owner.message
    return False


class _Owners:
    """Which exception a line belongs to: its traceback, its message, or the lines right after it."""

    def __init__(self, raised: Sequence[Raised]) -> None:
        self._raised = sorted(raised, key=lambda one: one.at)
        self._ends = [one.at for one in self._raised]

    def of(self, index: int, process: str) -> Raised | None:
        """The exception that line `index` of this process is part of."""
        place = bisect_left(self._ends, index)
        for one in self._raised[place : place + NEAR]:
            if one.at == index or (one.first <= index and one.process == process):
                return one
        before = reversed(self._raised[max(0, place - NEAR) : place])
        return next((one for one in before if index <= one.at + FOLLOWING and one.process == process), None)


def is_consequence(one: Raised) -> bool:
    """Whether an exception only passes on that something else failed."""
    said = one.message.partition("\n")[0]
    return one.name in CONSEQUENCES or any(words in said for words in CONSEQUENCE_WORDS)


def _is_fatal(one: Raised, story: Story) -> bool:
    """Whether an exception nobody has words for may have ended the server: raised in the engine, or the last thing said."""
    if not one.kind or _is_of_one_request(one, story):
        return False
    inside = one.process.startswith(("EngineCore", "Worker", "VllmWorker", "RayWorker", "Process"))
    inside = inside or bool(one.functions() & _ENGINE_FUNCTIONS)
    if not one.frames:  # somebody's complaint on the way, unless nothing came after it
        goes_on = bool(story.marks) and story.marks[-1][0] > one.at
        return inside or (not one.process and not goes_on)
    return inside or not story.serves_after(one.at)


def _is_of_one_request(one: Raised, story: Story) -> bool:
    """Whether an exception answered one request and left the server as it was.

    A refused start passes through the functions that start an engine; a request's error never does.
    """
    functions = one.functions()
    if functions & _REQUEST_FUNCTIONS or one.message.startswith(_DOOR_REFUSALS):
        return True
    if functions & _ENGINE_FUNCTIONS:
        return False
    is_invalid = one.name.endswith("ValidationError") and story.progress_at(one.at) is Progress.SERVING
    return is_invalid or not functions.isdisjoint(_STREAM_FUNCTIONS)


# The sentences of plimsoll's door (plimsoll.inside.door), which refuses requests one by one.
_DOOR_REFUSALS = (
    "this server cannot run this request within its GPU memory", "this server has no GPU memory for this request now",
)  # fmt: skip
_ENGINE_FUNCTIONS = frozenset({
    "run_engine_core", "worker_main", "worker_busy_loop", "execute_model", "init_device", "load_model", "run_busy_loop",
    "create_engine_config", "from_engine_args", "run_server", "make_async_mp_client", "_run_engine", "run_mp_engine",
    "engine_step", "build_async_engine_client", "run_engine_loop",
})  # fmt: skip
_REQUEST_FUNCTIONS = frozenset({
    "create_completion", "create_chat_completion", "create_embedding", "_preprocess_chat", "create_responses",
    "run_endpoint_function", "_validate_input", "create_tokenize", "show_available_models",
})  # fmt: skip
_STREAM_FUNCTIONS = frozenset({  # of a streamed answer; each catches what its request raises
    "completion_stream_generator", "chat_completion_stream_generator", "_speech_to_text_stream_generator",
    "serve_tokens_stream_generator",
})  # fmt: skip


def _out_of_memory(story: Story, hit: Hit, owner: Raised | None, raised: Sequence[Raised]) -> Complaint:
    """An allocation that failed: which step, and whether somebody else holds the memory."""
    line = story.log.lines[hit.at]
    oom = parse_oom(owner.message if owner is not None and "ried to allocate" in owner.message else line.text)
    step = _step(story, hit, owner, raised)
    if step is None:
        code = Code.RUNTIME_COLLECTIVES if hit.text.speaker == "nccl" or hit.text.role is Role.CAUSE else Code.RUNTIME_FORWARD
        step = Step("unknown", code, 0.4 if code is Code.RUNTIME_FORWARD else 0.7)
    step = _at_start(story, hit, step, oom)
    code, confidence = step.code, step.confidence
    progress = story.progress_at(hit.at, line.process)
    is_runtime = step.name in RUNTIME or (step.name == "unknown" and progress in (Progress.SERVING, Progress.UNKNOWN))
    if hit.text.name == "cumem-oom" and progress is not Progress.SERVING and step.name in ("unknown", "wake-up"):
        code = CODES["weights"] if progress in (Progress.LOADING, Progress.BEGUN) else CODES["wake-up"]
    if oom.has_neighbour and code is not Code.RUNTIME_WAKE_UP:
        code, confidence = (Code.RUNTIME_NEIGHBOUR if is_runtime else Code.STARTUP_FREE_MEMORY_CHECK), 0.9
    elif owner is None and not line.process and hit.text.speaker != "nccl" and not _is_first_hand(line.text):
        confidence = 0.3  # quoted by somebody: not to be called either way
    elif _is_pinned(owner) and oom.tried is None:
        code, confidence = Code.HOST_OUT_OF_MEMORY, 0.7
    return Complaint(hit.at, code, confidence, hit.text, owner, step, oom)


_START_DEATHS = frozenset({
    "initialization-failed", "engine-failed-to-start", "worker-failed-to-start", "worker-init-failed", "engine-process-failed",
})  # fmt: skip


def _at_start(story: Story, hit: Hit, step: Step, oom: OutOfMemory) -> Step:
    """A step that also occurs while serving, of a server that never came to serve: one of the start's trial runs."""
    if step.name not in ("logits", "forward", "multimodal", "unknown"):
        return step
    life = story.life_at(hit.at)
    progress = story.progress_at(hit.at)
    died = any(one.text.name in _START_DEATHS for one in story.hits if life.first <= one.at < life.end)
    warmed = oom.private is not None and step.name == "logits" and _quotes(story, hit, "dummy_metadata")
    if progress is Progress.SERVING or not (died or warmed):
        return step
    if warmed or oom.private is not None or progress >= Progress.MEASURED:
        name = "sampler-warmup" if step.name == "logits" else "warm-up"
    elif progress is Progress.LOADING:
        name = "weights"
    else:
        name = "profile"
    return Step(name, CODES[name], min(step.confidence, 0.75))


def _quotes(story: Story, hit: Hit, word: str) -> bool:
    first = max(story.life_at(hit.at).first, hit.at - 40)
    return any(word in line.text for line in story.log.lines[first : hit.at])


def _is_first_hand(text: str) -> bool:
    """Whether a line begins with the error, and does not merely quote it."""
    speakers = "CUDA|HIP|XPU|NPU|Cuda|NCCL|terminate"
    return re.match(rf"\W{{0,4}}(?:\[?rank\d{{1,4}}\]?:? ?)?(?:[\w.]{{0,80}}(?:Error|Exception)|{speakers})", text) is not None


def _is_pinned(owner: Raised | None) -> bool:
    return owner is not None and bool(
        {frame.function for frame in owner.frames[-3:]} & {"pin_memory", "_pin_memory", "is_pinned"}
    )


def _step(story: Story, hit: Hit, owner: Raised | None, raised: Sequence[Raised]) -> Step | None:
    """By the frames of this error, of the same error told again, or by how far the server had come."""
    if owner is not None and not is_consequence(owner) and (step := step_of_frames(owner.frames)) is not None:
        return step
    process = story.log.lines[hit.at].process
    siblings = [one for one in raised if one.frames and (not one.kind or "ut of memory" in one.message) and not one.in_logging]
    near = nsmallest(16, siblings, key=lambda one: (is_consequence(one), one.process != process, abs(one.at - hit.at)))
    for one in near:
        if (step := step_of_frames(one.frames)) is not None:
            return step._replace(confidence=step.confidence - 0.1)
    if (method := _method_named(story, hit.at)) is not None:
        return step_of_frames([Frame("vllm", method)])
    if (step := _step_of_code(story, hit)) is not None:
        return step
    if owner is not None and (step := hinted_by_torch(owner.frames)) is not None:
        return step
    progress = story.progress_at(hit.at, process) or story.progress_at(story.life_at(hit.at).end)
    return step_of_progress(progress, frames_seen=bool(owner and owner.frames))


def _step_of_code(story: Story, hit: Hit) -> Step | None:
    """A traceback whose frames are lost still quotes the code: the calls in it name the step."""
    lines = story.log.lines
    process, first = lines[hit.at].process, max(story.life_at(hit.at).first, hit.at - 30)
    quoted = [
        line.text
        for line in lines[first : hit.at]
        if line.process == process and "(" in line.text and line.level in ("", "ERROR")
    ]
    calls = [Frame("vllm", name) for text in quoted for name in re.findall(r"\b([a-z_]\w{2,60})\(", text[:400])]
    if any("logits.sort" in text or "log_softmax" in text for text in quoted):
        calls.append(Frame("vllm", "compute_logprobs"))
    step = step_of_frames(calls) if calls else None
    return step._replace(confidence=0.6) if step is not None and step.name != "forward" else None


_METHOD = r"(?:processing method|executing method|[Ii]nvocation of|Call to) '?([a-z_]{3,60})'?"


def _method_named(story: Story, at: int) -> str | None:
    """The worker's method that vLLM itself names around an error whose traceback is lost."""
    life = story.life_at(at)
    for index in (at, *range(at - 1, max(life.first, at - 60) - 1, -1), *range(at + 1, min(life.end, at + 20))):
        text = story.log.lines[index].text
        if "method" in text and (match := re.search(_METHOD, text)) is not None:
            return match[1]
    return None

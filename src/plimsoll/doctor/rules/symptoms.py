"""Everything in a log that may be the cause of its server's end: known texts, allocations that failed and at which step,
and exceptions that nobody has words for."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from plimsoll.doctor.rules.timeline import (
    CODES,
    FOLLOWING,
    RUNTIME,
    Frame,
    Hit,
    Progress,
    Raised,
    Step,
    Story,
    hinted_by_torch,
    step_of_frames,
    step_of_progress,
)
from plimsoll.findings import Code
from plimsoll.units import GIB
from plimsoll.vllm.failure_texts import CONSEQUENCE_WORDS, CONSEQUENCES, Role, Text

# Reads torch's own words on an allocation that failed: what was asked for, what was free, and who held the rest.

_compiled = cache(re.compile)
_SIZE = r"(\d{1,12}(?:\.\d{1,6})?) ?(bytes|B|KiB|KB|MiB|MB|GiB|GB|TiB)"
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "KB": 1 << 10, "MiB": 1 << 20, "MB": 1 << 20, "GiB": 1 << 30, "GB": 1 << 30,
          "TiB": 1 << 40}  # fmt: skip
_TRIED = rf"Tried to allocate {_SIZE}"
_CAPACITY = rf"total capaci?ty of {_SIZE} of which {_SIZE} is free"
_CAPACITY_OLD = rf"\(GPU (\d{{1,4}}); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free(?:; {_SIZE} reserved)?"
_THIS = rf"this process has {_SIZE} memory in use"
_PROCESS = rf"Process (\d{{1,10}}) has {_SIZE} memory in use"
_ALLOCATED = rf"{_SIZE} is allocated by PyTorch"
_PRIVATE = rf"with {_SIZE} allocated in private pools"
_RESERVED = rf"{_SIZE} is reserved by PyTorch but unallocated"
_GPU = r"GPU (\d{1,4}) has a total"

MOST_PROCESSES = 64
# Where NVML cannot tell, torch prints the largest number there is (17179869184.00 GiB), or 0 bytes.
BEYOND_ANY_CARD_BYTES = 1 << 42
# Memory that no listed process accounts for: the driver itself keeps up to about a GiB of a large card.
HIDDEN_MATTERS_BYTES = 3 * GIB
# A desktop, a monitoring agent or the API server's own context: real, but not what a server fails for.
NEIGHBOUR_MATTERS_BYTES = 3 * GIB // 2
NEIGHBOUR_MATTERS_SHARE = 0.04


class OutOfMemory(NamedTuple):
    """The figures of one message; None where it does not state them."""

    tried: int | None = None
    total: int | None = None
    free: int | None = None
    gpu: int | None = None
    allocated: int | None = None  # live, by torch
    private: int | None = None  # of these, in private pools such as CUDA graphs
    reserved_unallocated: int | None = None
    this_process: int | None = None
    processes: tuple[tuple[int, int], ...] = ()  # (pid, bytes) as listed

    @property
    def is_fragmented(self) -> bool:
        """Whether torch held enough unused memory for the request, but not in one piece."""
        return self.tried is not None and self.reserved_unallocated is not None and self.reserved_unallocated >= self.tried

    @property
    def own(self) -> int | None:
        """What this process holds on the card, as far as the message tells."""
        if self.this_process is not None:
            return self.this_process
        if self.allocated is None:
            return None
        torch = self.allocated + (self.reserved_unallocated or 0)
        # Inside a container torch cannot tell which of the listed processes it is itself: the one that could hold its memory.
        return min((size for _, size in self.processes if size >= torch - GIB // 4), default=torch)

    @property
    def others(self) -> int:
        """What other processes hold: as listed, or what nobody accounts for. 0 where the message cannot tell."""
        own = self.own
        if own is None:
            return 0
        listed = sum(size for _, size in self.processes)
        if self.this_process is None:
            return max(0, listed - own) if listed else 0
        hidden = self.total - self.free - own if self.total is not None and self.free is not None else 0
        return max(listed, hidden if hidden >= HIDDEN_MATTERS_BYTES else 0)

    @property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """The listed processes that are not this one."""
        if self.this_process is not None:
            return self.processes
        own = next((one for one in self.processes if one[1] == self.own), None)
        return tuple(one for one in self.processes if one is not own)

    @property
    def is_limited(self) -> bool:
        """Whether the card had what was asked for: then a limit set for this process refused it."""
        return self.free is not None and self.tried is not None and self.free > self.tried

    @property
    def has_neighbour(self) -> bool:
        """Whether others hold enough to be the reason; not where the card had room and a limit of its own stopped it."""
        if self.is_limited:
            return False
        floor = max(NEIGHBOUR_MATTERS_BYTES, NEIGHBOUR_MATTERS_SHARE * (self.total or 0))
        short = (self.tried or 0) - (self.free or 0)
        return self.others >= max(floor, short * 0.5)


def parse_oom(message: str) -> OutOfMemory:
    """The figures of torch's message, in its newer or older wording; empty for a bare driver error."""
    text = " ".join(message.split())
    tried = _size(_TRIED, text)
    old = _compiled(_CAPACITY_OLD).search(text)
    if old is not None:
        total, allocated, free = _bytes(old[2], old[3]), _bytes(old[4], old[5]), _bytes(old[6], old[7])
        reserved = _bytes(old[8], old[9]) if old[8] else None
        left = max(0, reserved - allocated) if reserved is not None else None
        return OutOfMemory(tried, total, free, int(old[1]), allocated, None, left)
    capacity = _compiled(_CAPACITY).search(text)
    gpu = _compiled(_GPU).search(text)
    return OutOfMemory(
        tried=tried,
        total=_bytes(capacity[1], capacity[2]) if capacity else None,
        free=_bytes(capacity[3], capacity[4]) if capacity else None,
        gpu=int(gpu[1]) if gpu else None,
        allocated=_size(_ALLOCATED, text),
        private=_size(_PRIVATE, text),
        reserved_unallocated=_size(_RESERVED, text),
        this_process=_known(_size(_THIS, text)),
        processes=tuple(islice(_listed(text), MOST_PROCESSES)),
    )


def _listed(text: str) -> Iterator[tuple[int, int]]:
    for match in _compiled(_PROCESS).finditer(text):
        if (size := _known(_bytes(match[2], match[3]))) is not None:
            yield int(match[1]), size


def _known(size: int | None) -> int | None:
    """None for what the driver could not tell."""
    return size if size is not None and 0 < size < BEYOND_ANY_CARD_BYTES else None


def parse_size(text: str) -> int | None:
    """The bytes of a size that stands alone, as torch writes it: "1.95 GiB"."""
    return _size(f"^{_SIZE}$", text)


def _size(pattern: str, text: str) -> int | None:
    match = _compiled(pattern).search(text)
    return _bytes(match[1], match[2]) if match else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


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

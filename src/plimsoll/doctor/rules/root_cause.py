"""Decides what ended a server: one root cause among everything its log complains about, or that it cannot be told.

The first solid complaint of the last life that failed is the cause; what follows it is noise it made. An out-of-memory error
while the server was already being stopped, or while a log record was written, is never the cause.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.symptoms import Complaint, complaints_in
from plimsoll.doctor.rules.log_text import Line
from plimsoll.doctor.rules.timeline import FOLLOWING, Hit, Life, Progress, Raised, Story
from plimsoll.findings import Code
from plimsoll.vllm.failure_texts import Role


class Verdict(NamedTuple):
    """What ended the server, as far as its log tells."""

    root: Complaint | None
    noise: tuple[Hit, ...]  # out-of-memory words that mean nothing here
    deaths: tuple[Hit, ...]
    memory_failure: bool | None
    progress: Progress
    life: Life
    lives_failed: int  # lives that ended in a failure
    stopped: bool  # somebody ended it on purpose


def judge(story: Story) -> Verdict:
    """The verdict on one log."""
    told = _told(story)
    verdicts = [_judge_life(story, life, told) for life in story.lives]
    failed = [verdict for verdict in verdicts if verdict.root is not None and not verdict.stopped]
    died = [verdict for verdict in verdicts if verdict.deaths and not verdict.stopped]
    stopped = [verdict for verdict in verdicts if verdict.stopped]
    # A port that the last server still holds is found in use by every restart: it says nothing of how that one failed.
    first_hand = [one for one in failed if one.root is not None and one.root.code is not Code.OTHER_PORT_IN_USE]
    chosen = (first_hand or failed or died or stopped or verdicts)[-1]
    return chosen._replace(lives_failed=len(failed))


def _at(hit: Hit) -> int:
    return hit.at


def _judge_life(story: Story, life: Life, told: Mapping[str, int]) -> Verdict:
    hits = story.hits[bisect_left(story.hits, life.first, key=_at) : bisect_left(story.hits, life.end, key=_at)]
    raised = [one for one in story.raised if life.first <= one.at < life.end]
    deaths = tuple(hit for hit in hits if hit.text.role is Role.DEATH and not _is_farewell(story, hit))
    complaints, noise = complaints_in(story, hits, raised)
    stop = _stop(story, hits, raised, is_sound=not complaints and not deaths)
    before_stop = [one for one in complaints if stop is None or one.at < stop]
    progress = story.progress_at(life.end)
    stopped = stop is not None and not before_stop and not _died_before(deaths, stop)
    root = _first(before_stop, deaths, story) if not stopped else None
    if root is None and not stopped and complaints and stop is not None:
        root = _first(complaints, deaths, story)
    if stopped:
        assert stop is not None
        text = next((hit.text for hit in hits if hit.at == stop), None)
        is_weak = text is not None and text.name == "uvicorn-stopped" and _is_cut(story)
        root = Complaint(stop, Code.OTHER_STOPPED_BY_OPERATOR, 0.5 if is_weak else 0.9, text)
        noise = (*noise, *(hit for hit in hits if hit.text.role is Role.OUT_OF_MEMORY and hit.at > stop))
    memory = _memory(root, deaths, progress, story, life)
    if stopped and (later := _of_another(story, life, told, [*complaints, *_as_complaints(deaths)])) is not None:
        root, memory = (root if later.code is Code.ENGINE_DEAD else later), None
        noise = tuple(hit for hit in noise if hit.at != later.at)
    return Verdict(root, tuple(noise), deaths, memory, progress, life, 0, stopped)


def _told(story: Story) -> dict[str, int]:
    """When each process was first told to end, in all lives: an older server may still be on its way out."""
    told: dict[str, int] = {}
    for hit in story.hits:
        if hit.text.role is Role.STOP:
            told.setdefault(story.log.lines[hit.at].process, hit.at)
    return told


def _as_complaints(deaths: Sequence[Hit]) -> list[Complaint]:
    return [Complaint(hit.at, Code.ENGINE_DEAD, UNSURE, hit.text) for hit in deaths if hit.text.name not in _WEAK_DEATHS]


def _of_another(story: Story, life: Life, told: Mapping[str, int], complaints: Sequence[Complaint]) -> Complaint | None:
    """What failed after one server was stopped, where a second one in the same log went on: whose it was is not said.

    The second must have spoken before the stop and after it, and not have been told to end before the complaint; a process
    that was told itself is excused.
    """
    lines = story.log.lines
    stop = min((at for at in told.values() if at >= life.first), default=None)
    later = [one for one in complaints if stop is not None and one.at > stop]
    if stop is None or not later:
        return None
    spans = spans_of_servers(lines, life.first, life.end)
    across = [process for process, (first, last) in spans.items() if first < stop < last]
    for one in later:
        if told.get(lines[one.at].process, one.at) < one.at:
            continue
        going_on = [process for process in across if told.get(process, one.at) >= one.at]
        # Where only an engine's own line tells of the stop, one of the servers here is its own.
        if len(going_on) > (0 if any(process in told and told[process] <= stop for process in spans) else 1):
            return one._replace(confidence=UNSURE)
    return None


def spans_of_servers(lines: Sequence[Line], first: int, end: int) -> dict[str, tuple[int, int]]:
    """The first and the last line of each API server between these."""
    spans: dict[str, tuple[int, int]] = {}
    for index in range(first, end):
        process = lines[index].process
        if process.startswith(_SERVER):
            spans[process] = (spans.get(process, (index, 0))[0], index)
    return spans


def _is_farewell(story: Story, hit: Hit) -> bool:
    """A script that had all its answers ends, and takes its engine with it: the client then calls that a death."""
    if hit.text.name != "worker-died" or "Engine core proc" not in story.log.lines[hit.at].text:
        return False
    before = story.log.lines[max(story.life_at(hit.at).first, hit.at - 2_000) : hit.at]
    bar = next((line.text for line in reversed(before) if "Processed prompts:" in line.text), "")
    return "100%" in bar and not any("Traceback" in line.text or "EngineDeadError" in line.text for line in before)


_WEAK_DEATHS = frozenset({"worker-exception", "terminate-called"})  # printed before the error they belong to, or long after


def _died_before(deaths: Sequence[Hit], stop: int) -> bool:
    return any(hit.at < stop and hit.text.name not in _WEAK_DEATHS for hit in deaths)


def _stop(story: Story, hits: Sequence[Hit], raised: Sequence[Raised], *, is_sound: bool) -> int | None:
    """The line at which somebody asked it to end, or None. Uvicorn's farewell counts only where nothing else was wrong."""
    hits = [hit for hit in hits if is_sound or hit.text.name != "uvicorn-stopped"]
    # A worker is stopped by its engine, also where the engine failed: only the others hear an operator.
    asked = [hit.at for hit in hits if hit.text.role is Role.STOP and not _is_worker(story.log.lines[hit.at].process)]
    for one in raised:
        if _is_worker(one.process):
            continue
        if one.name == "SystemExit" and one.functions() & {"signal_handler", "_signal_handler", "sigterm_handler"}:
            asked.append(one.at)
        if one.name == "KeyboardInterrupt":
            asked.append(one.at)
    return min(asked, default=None)


def _is_worker(process: str) -> bool:
    return process.startswith(("Worker", "VllmWorker", "RayWorker"))


_SERVER = "APIServer pid="  # one a server: those of --api-server-count have a number in their name
UNSURE = 0.35  # told, and neither blamed on memory nor ruled out
_NAMES_STEP = frozenset({"sampler-warmup", "weights-too-large"})


def _first(complaints: Sequence[Complaint], deaths: Sequence[Hit], story: Story) -> Complaint | None:
    """The cause: the first complaint that ended something; vLLM's own naming of the step refines an allocation error."""
    solid = [one for one in complaints if one.text is not None and _ended_something(one, deaths, story)]
    solid = [one for one in solid if one.code is not Code.OTHER_ENGINE_ERROR] or solid
    generic = [one for one in complaints if one.text is None]
    waits = [one for one in solid if one.code is Code.ENGINE_WEDGED]
    solid = [one for one in solid if one.code is not Code.ENGINE_WEDGED]
    solid = solid or ([] if generic or deaths else waits)  # a notice of waiting is no cause beside one, nor of a death
    root = solid[0] if solid else None
    if root is None:
        return generic[0] if generic else None
    ended = next(
        (one for one in generic if any(one.at <= hit.at < root.at for hit in deaths if hit.text.name not in _WEAK_DEATHS)), None
    )
    if ended is not None and not _is_chained(root.raised, ended.raised, story):
        return ended  # nobody has words for it, but the engine was dead of it before anything else was said
    if root.code is Code.OTHER_COMPILER:  # which the host's memory may have ended
        root = next((one for one in solid if one.code is Code.HOST_OUT_OF_MEMORY), root)
    if root.text is not None and root.text.name in ("kv-negative", "no-gpu-blocks"):  # the figure that vLLM then complains of
        return next((one for one in solid if one.code is root.code and one.raised is not None), root)
    if root.text is not None and root.text.name == "validation-error":  # what was invalid stands in the lines below
        return next((one for one in solid[1:] if one.raised is root.raised and one.at <= root.at + FOLLOWING), root)
    if root.step is not None and root.code not in (Code.STARTUP_FREE_MEMORY_CHECK, Code.RUNTIME_NEIGHBOUR):
        named = next((one for one in solid if one.text is not None and one.text.name in _NAMES_STEP), None)
        if named is not None:
            return root._replace(code=named.code, confidence=0.97, text=named.text)
    return root


def _is_chained(later: Raised | None, earlier: Raised | None, story: Story) -> bool:
    return later is not None and earlier is not None and later.cause is not None and story.raised[later.cause] is earlier


def _ended_something(one: Complaint, deaths: Sequence[Hit], story: Story) -> bool:
    """Whether a death follows, or nothing does: a complaint the server outlived without dying ended nothing."""
    if one.code is Code.ENGINE_WEDGED:  # a notice that it waits: overcome where anything was done afterwards
        return story.life_at(one.at).end <= one.at or not story.marks or story.marks[-1][0] < one.at
    if any(hit.at >= one.at for hit in deaths):
        return True
    if one.code.is_memory and one.raised is not None:
        # A client's own script may fail on the same terminal while the server goes on.
        is_ours = not one.raised.frames or any("vllm" in frame.file for frame in one.raised.frames)
        return is_ours or not story.serves_after(one.at)
    return not story.serves_after(one.at)


def _memory(root: Complaint | None, deaths: Sequence[Hit], progress: Progress, story: Story, life: Life) -> bool | None:
    if root is not None and root.code is Code.OTHER_STOPPED_BY_OPERATOR:
        # Asked to stop: but something may have gone wrong before, of which the log shows no more than a trace.
        complains = _complains(story, life, root.at)
        if root.text is not None and root.text.name == "uvicorn-stopped":  # also printed after the engine has died
            return None if complains or _is_cut(story) else False
        return None if complains and _leaves_doubt(story, life, root.at) else False
    if root is not None and root.code is Code.ENGINE_WEDGED:
        return None if deaths or _complains(story, life, life.end) else False
    if root is not None:
        if root.code.is_memory:
            return True if root.confidence >= 0.4 else None
        return None if root.text is None and _smells_of_memory(root) else False
    if deaths or _complains(story, life, life.end):
        return None  # something failed, and what is here does not say of what
    if progress is Progress.SERVING and not _is_cut(story):
        # A collector may call everything a warning: an error that only warns is not ruled out.
        warned = any(one.warned and "ut of memory" in one.message for one in story.raised if life.first <= one.at < life.end)
        return None if warned else False
    return None


def _smells_of_memory(root: Complaint) -> bool:
    """An exception nobody has words for whose own words are about memory: not to be called either way."""
    return root.raised is not None and re.search(r"(?i)memory|alloc|\bOOM\b", root.raised.message[:2_000]) is not None


def _is_cut(story: Story) -> bool:
    """Whether the log begins in the middle: no server introduces itself in it."""
    return not any(step is Progress.BEGUN for _, step in story.marks)


def _leaves_doubt(story: Story, life: Life, end: int) -> bool:
    """Whether an error was reported that may have ended something: its traceback breaks off, or nothing was served after it."""
    if _is_cut(story) or any(not one.kind and life.first <= one.first < end for one in story.raised):
        return True
    last = next((at for at in range(end - 1, life.first - 1, -1) if _is_error(story.log.lines[at])), None)
    return last is not None and not story.serves_after(last)


def _complains(story: Story, life: Life, end: int) -> bool:
    """Whether an engine or a worker reports an error, or a traceback breaks off, whatever it was about."""
    if any(not one.kind and life.first <= one.first < life.end for one in story.raised):
        return True
    return any(_is_error(line) for line in story.log.lines[life.first : end])


def _is_error(line: Line) -> bool:
    inside = ("EngineCore", "Worker", "VllmWorker", "RayWorker")
    return line.level in ("ERROR", "CRITICAL") and line.process.startswith(inside)

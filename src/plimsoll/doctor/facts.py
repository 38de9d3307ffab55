"""What a log states about its server, before anybody judges: all of it optional, what is absent is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from plimsoll.doctor.arguments import flags_of
from plimsoll.doctor.oom_text import OutOfMemory
from plimsoll.doctor.steps import Progress
from plimsoll.doctor.story import Life, Story
from plimsoll.domain.log import Line
from plimsoll.domain.measured import Measured
from plimsoll.domain.version import Version
from plimsoll.engine.start_figures import NEEDLES, measured_of

_VERSION = r"(?:LLM engine \(v|API server version |vLLM version:? |[█▀▄] {1,4}version )([0-9][^)\s,]{1,60})"
_SCHEDULER = r"(?:Dumping scheduler stats: )?SchedulerStats\((.{0,600})"
_FIGURE = r"\b(num_running_reqs|num_waiting_reqs|kv_cache_usage|gpu_cache_usage|step_counter)=([\d.]{1,24})"
_EXIT = r"(?:died unexpectedly|died)[^(\n]{0,40}\(?,? ?exit ?code:? ?(-?\d{1,5})"
_GPU_NAME = r"\b(?:device_name=|GPU name: |Using device: )'?((?:NVIDIA|AMD|Tesla|GeForce|Instinct)[\w .\-]{2,60})"
MOST_PROCESSES = 64


class Timeline(NamedTuple):
    """One process as its log shows it."""

    process: str
    first_line: int | None
    last_line: int | None
    lines: int
    errors: int
    last_at: float | None


class LogFacts(NamedTuple):
    """What is known of the server from its own log."""

    version: str | None
    model: str | None
    gpu_name: str | None
    flags: Mapping[str, str]
    measured: Measured
    processes: tuple[Timeline, ...]
    scheduler: Mapping[str, float]  # at its death
    worker_exit_code: int | None
    progress: Progress


def facts_of(story: Story, life: Life) -> LogFacts:
    """The facts of one life of the server."""
    lines = story.log.lines[life.first : life.end]
    flags: dict[str, str] = {}
    scheduler: dict[str, float] = {}
    version = gpu = exit_code = None
    for line in lines:
        text = line.text
        if "args: " in text or "with config: " in text:
            found = flags_of(text)
            flags = {**found, **flags} if "with config: " in text else {**flags, **found}
        if version is None and ("version " in text or "engine (v" in text):
            version = _version(text)
        if gpu is None and ("device_name=" in text or "GPU name" in text or "Using device" in text):
            match = re.search(_GPU_NAME, text)
            gpu = match[1].removesuffix(".json").replace("_", " ").strip() if match else None
        if "SchedulerStats(" in text:
            scheduler = _scheduler(text) or scheduler
        if "exit code" in text and "died" in text:
            match = re.search(_EXIT, text)
            exit_code = int(match[1]) if match else exit_code
    measured = measured_of(_raw(lines))
    model = flags.get("model") or flags.get("model_tag")
    return LogFacts(
        version or measured.release, model, gpu, flags, measured, tuple(_timelines(lines)), scheduler, exit_code,
        story.progress_at(life.end),
    )  # fmt: skip


def _version(text: str) -> str | None:
    match = re.search(_VERSION, text)
    if match is None:
        return None
    try:
        return str(Version(match[1]))
    except ValueError:
        return None


def _scheduler(text: str) -> dict[str, float]:
    match = re.search(_SCHEDULER, text)
    found = re.findall(_FIGURE, match[1]) if match else []
    return {name: float(value) for name, value in found if value.count(".") <= 1 and value.strip(".")}


def _raw(lines: Sequence[Line]) -> Iterator[bytes]:
    """The telling lines as the reader of starts wants them: with their speaker in front."""
    needles = [needle.decode() for needle in NEEDLES]
    for line in lines:
        if any(needle in line.text for needle in needles):
            yield (f"({line.process}) " if line.process else "").encode() + line.text.encode("utf-8", "replace")


def _timelines(lines: Sequence[Line]) -> Iterator[Timeline]:
    found: dict[str, Timeline] = {}
    for line in lines:
        known = found.get(line.process)
        if known is None:
            if len(found) >= MOST_PROCESSES:
                continue
            known = Timeline(line.process, line.number, line.number, 0, 0, None)
        found[line.process] = known._replace(
            last_line=line.number,
            lines=known.lines + 1,
            errors=known.errors + (line.level in ("ERROR", "CRITICAL")),
            last_at=known.last_at if line.at is None else line.at,
        )
    yield from found.values()


def oom_facts(oom: OutOfMemory) -> dict[str, object]:
    """The parsed figures of an allocation that failed, for JSON."""
    return {
        "tried_bytes": oom.tried,
        "total_bytes": oom.total,
        "free_bytes": oom.free,
        "gpu": oom.gpu,
        "allocated_bytes": oom.allocated,
        "private_pools_bytes": oom.private,
        "reserved_unallocated_bytes": oom.reserved_unallocated,
        "this_process_bytes": oom.this_process,
        "processes": [{"pid": pid, "bytes": size} for pid, size in oom.processes],
        "others_bytes": oom.others if oom.own is not None else None,
    }

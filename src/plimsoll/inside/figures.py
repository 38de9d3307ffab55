"""The figures of one worker, from the worker to the API servers: one small file each, replaced whole with every sample.

Reading them needs no call into the engine, so they are there while a step hangs, and after the worker has died.
A file may be torn, old, huge or somebody else's: then it is skipped and counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import ancestors, is_same_process, start_ticks


@contextlib.contextmanager
def replacing(folder: str, name: str) -> Iterator[BinaryIO]:
    """Yields a file that takes its name in the folder when it is whole, or not at all; one thread of one process writes it."""
    temporary = f"{folder}/.{name}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, f"{folder}/{name}")  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise


def write_whole(folder: str, stem: str, content: dict[str, Any]) -> None:
    """Writes `stem`.json into the folder, whole or not at all."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    with replacing(folder, f"{stem}.json") as file:
        file.write(text)


FILE_MAX_BYTES = 128 * 1024  # a real one has about 3 KiB
FILES_MAX = 1024


# Reports: a worker's figures, and of an engine core its containment and its knobs, each in a file of its process's own.


def write_report(folder: str, stem: str, schema: str, told: dict[str, Any]) -> None:
    """Writes this process's report, with its process numbers, where API servers find it."""
    pid = os.getpid()
    ids = {"schema": schema, "pid": pid, "started": start_ticks(pid), "ancestors": ancestors(pid)}
    write_whole(folder, f"{stem}-{pid}-{ids['started']}", {**ids, **told})


def read_reports(
    folder: str, stem: str, what: str, shape: dict[str, Any], key: int, *, also_dead: bool = False
) -> list[dict[str, Any]]:
    """Returns the reports of this stem from living processes that descend from process `key`.

    A file that does not fit its shape, is no plain small one or another user's is skipped and counted.
    """
    names: list[str] = []
    with FAULTS.noting(f"listing {what}"):
        names = [name for name in os.listdir(folder) if re.fullmatch(rf"{stem}-\d+-\d+\.json", name)]  # noqa: PTH208
    reports = []
    for name in sorted(names)[:FILES_MAX]:
        with FAULTS.noting(f"reading {what}"), contextlib.suppress(FileNotFoundError):  # removed or replaced since the listing
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(f"{folder}/{name}", flags), "rb") as file:
                about, text = os.fstat(file.fileno()), file.read(FILE_MAX_BYTES + 1)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or len(text) > FILE_MAX_BYTES:
                raise ValueError("not a small file of this user")
            report = json.loads(text, parse_constant=int)  # NaN and Infinity are no JSON: int refuses them
            if wrong := misfit(report, {"pid": int, "started": int, "ancestors": [int], **shape}):
                raise ValueError(f"{wrong} is of another kind")
            if name != f"{stem}-{report['pid']}-{report['started']}.json":
                raise ValueError("written for another process")
            if key in report["ancestors"] and (also_dead or is_same_process(report["pid"], report["started"])):
                reports.append(report)
    return reports


def misfit(value: object, shape: Any, name: str = "it") -> str:
    """Returns the name of the first part that does not fit its shape; empty where all parts fit.

    A shape is a type, a value, a check, a tuple (any of its shapes), a list of one shape, or a table of shapes by name.
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        return next(filter(None, (misfit(value.get(key), kind, str(key)) for key, kind in shape.items())), "")
    if isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (misfit(each, shape[0], name) for each in value)), "")
    if isinstance(shape, tuple):
        fits = not all(misfit(value, kind) for kind in shape)
    elif isinstance(shape, type):
        fits = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    else:
        fits = bool(shape(value) if callable(shape) else value == shape)
    return "" if fits else name


SCHEMA = "plimsoll.figures/1"

# The keys of a file: each a plain value, or None with the reason under `reasons`.
PLAIN_KEYS = tuple(
    "schema pid started ancestors beat at every_s phase engine rank local_rank device device_name vllm torch samples "
    "sample_us walk_us".split()
)
GROUPS = {
    "allocator": tuple(
        "allocated reserved active inactive_split releasable unreleasable segments allocated_peak reserved_peak "
        "alloc_retries ooms expandable private_pool_bytes largest_free_block walked_age_s".split()
    ),
    "device_memory": tuple("total free used by_this_process by_others source".split()),
    "host_memory": tuple("resident resident_peak total available limit used_by_group".split()),
    "budget": tuple("requested weights kv_cache activation_peak non_torch graphs free_at_start total_at_start".split()),
}
LOOSE_KEYS = ("last_compact", "last_snapshot")  # what those calls returned, None before the first
NUMBER = (int, float)
_GROUPS = {group: (None, dict.fromkeys(keys, (None, bool, str, *NUMBER))) for group, keys in GROUPS.items()}
_SHAPE = {"schema": SCHEMA, "beat": NUMBER, "engine": (None, int), "rank": (None, int), "reasons": {}, **_GROUPS}


def empty_figures() -> dict[str, Any]:
    """Returns figures with every key and no value."""
    nothing: dict[str, Any] = dict.fromkeys((*PLAIN_KEYS, *GROUPS, *LOOSE_KEYS))
    return {**nothing, "schema": SCHEMA, "ancestors": [], "reasons": {}, "faults": {}}


def read_figures(folder: str, key: int, now: float) -> list[dict[str, Any]]:
    """Returns the figures of every worker that descends from process `key`, each with its `age_s` and `alive`."""
    reports = read_reports(folder, "worker", "the workers' figures", _SHAPE, key, also_dead=True)
    workers = [{**empty_figures(), **report, "age_s": max(0.0, now - report["beat"])} for report in reports]
    for figures in workers:
        figures["alive"] = is_same_process(figures["pid"], figures["started"])
    return sorted(workers, key=lambda worker: [-1 if worker[k] is None else worker[k] for k in ("engine", "rank", "pid")])

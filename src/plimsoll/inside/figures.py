"""The figures of one worker, from the worker to the API servers: one small file each, replaced whole with every sample.

Reading them needs no call into the engine, so they are there while a step hangs, and after the worker has died.
A file may be torn, old, huge or somebody else's: then it is skipped and counted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import ancestors, is_alive, is_same_process, start_ticks


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


def read_files(
    folder: str, stem: str, what: str, check: Callable[[Any], dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and content of each `stem`-PID.json that passes its check.

    Other files are skipped and counted: also another user's file, and one that is no plain file, too large or no JSON.
    """
    names: list[str] = []
    with FAULTS.noting(f"listing {what}"):
        names = [name for name in os.listdir(folder) if name.startswith(f"{stem}-") and name.endswith(".json")]  # noqa: PTH208
    for name in sorted(names)[:FILES_MAX]:
        content = None
        with FAULTS.noting(f"reading {what}"), contextlib.suppress(FileNotFoundError):  # removed or replaced since the listing
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(f"{folder}/{name}", flags), "rb") as file:
                about, text = os.fstat(file.fileno()), file.read(FILE_MAX_BYTES + 1)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or len(text) > FILE_MAX_BYTES:
                raise ValueError("not a small file of this user")
            read = check(json.loads(text))
            if name != f"{stem}-{read['pid']}.json":
                raise ValueError("written for another process")
            content = read
        if content is not None:
            yield f"{folder}/{name}", content


# Reports: an engine core's containment and its knobs, each in a file of its process's own.

NUMBER = (int, float)


def write_report(folder: str, stem: str, schema: str, told: dict[str, Any]) -> None:
    """Writes this process's report, with its process numbers, where API servers find it."""
    pid = os.getpid()
    line = {"schema": schema, "pid": pid, "started": start_ticks(pid), "ancestors": ancestors(pid), **told}
    write_whole(folder, f"{stem}-{pid}", line)


def read_reports(folder: str, stem: str, what: str, shape: dict[str, Any], key: int) -> list[dict[str, Any]]:
    """Returns the reports of living processes that descend from process `key`, and removes those of dead processes."""
    wanted = {"pid": int, "started": int, "ancestors": [int], **shape}

    def check(report: Any) -> dict[str, Any]:
        if wrong := misfit(report, wanted):
            raise ValueError(f"{wrong} is of another kind")
        found: dict[str, Any] = report
        return found

    reports = []
    for path, report in read_files(folder, stem, what, check):
        if not is_same_process(report["pid"], report["started"]):
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        elif key in report["ancestors"]:
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
WORKERS = "the workers' figures"
ANCESTORS_MAX = 256
REASONS_MAX = 64

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


def empty_figures() -> dict[str, Any]:
    """Returns figures with every key and no value."""
    nothing: dict[str, Any] = dict.fromkeys((*PLAIN_KEYS, *GROUPS, *LOOSE_KEYS))
    return {**nothing, "schema": SCHEMA, "ancestors": [], "reasons": {}, "faults": {}}


def read_figures(folder: str, key: int, now: float) -> list[dict[str, Any]]:
    """Returns the figures of every worker that descends from process `key`, each with its `age_s` and `alive`."""
    workers = [figures for _, figures in read_files(folder, "worker", WORKERS, _checked) if key in figures["ancestors"]]
    for figures in workers:
        figures |= {"age_s": max(0.0, now - figures["beat"]), "alive": is_same_process(figures["pid"], figures["started"])}
    workers.sort(key=lambda figures: (_order(figures["engine"]), _order(figures["rank"]), figures["pid"]))
    return workers


def _order(value: object) -> int:
    return value if isinstance(value, int) else -1


def remove_dead(folder: str) -> None:
    """Removes the files of workers that are gone, also half-written ones."""
    with FAULTS.noting(f"listing {WORKERS}"), os.scandir(folder) as entries:
        for entry in entries:
            kind, _, rest = entry.name.partition("-")
            with contextlib.suppress(OSError, ValueError):
                # A writer needs milliseconds between making a file with a dot and renaming it.
                is_part = kind == ".worker" and time.time() - entry.stat(follow_symlinks=False).st_mtime > 60
                if is_part or (kind == "worker" and not is_alive(int(rest.removesuffix(".json")))):
                    os.unlink(entry.path)  # noqa: PTH108
    for path, figures in read_files(folder, "worker", WORKERS, _checked):
        if not is_same_process(figures["pid"], figures["started"]):
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108


def _checked(content: object) -> dict[str, Any]:
    """Returns figures with every key, and every value of a kind that readers expect. Raises ValueError for anything else."""
    if not isinstance(content, dict) or misfit(content, {"schema": SCHEMA, "pid": int, "beat": NUMBER, "ancestors": list}):
        raise ValueError("not figures of this schema")
    figures = empty_figures()
    figures |= {name: _plain(content.get(name)) for name in PLAIN_KEYS if name != "ancestors"}
    if figures["pid"] is None or figures["beat"] is None or len(content["ancestors"]) > ANCESTORS_MAX:
        raise ValueError("a number or a list beyond all bounds")
    figures["ancestors"] = [pid for pid in content["ancestors"] if isinstance(pid, int)]
    for name, keys in GROUPS.items():
        table = content.get(name)
        if isinstance(table, dict):
            figures[name] = {key: _plain(table.get(key)) for key in keys}
    for name in (*LOOSE_KEYS, "reasons", "faults"):
        table = content.get(name)
        if isinstance(table, dict):
            figures[name] = {str(key): _plain(value) for key, value in list(table.items())[:REASONS_MAX]}
    return figures


def _plain(value: object) -> object:
    """Returns a number, string or boolean as it is; None for anything else, or a number beyond all bounds."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return None
    return value if isinstance(value, bool | int | str) else None

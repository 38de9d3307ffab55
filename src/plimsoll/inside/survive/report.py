"""What containment tells: one small file of the engine core, replaced whole, that the API servers read.

It lies beside the workers' figures. The core writes it when it is armed and when something has changed; reading it needs
no call into the engine. What is read may be torn, old or somebody else's: then it is unknown.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.figures import read_whole, write_whole
from plimsoll.inside.places import ancestors, is_alive, start_ticks

SCHEMA = "plimsoll.survive/1"
FILE_MAX_BYTES = 64 * 1024
FILES_MAX = 256
ABORTED_KEPT = 32  # aborted requests that are named, the newest


def unknown(why: str) -> dict[str, Any]:
    """What is told where no engine core has reported."""
    return {
        "armed": None, "why": why, "contained": 0, "aborted": 0, "recomputed_tokens": 0, "stalled_s": 0.0, "last": None,
        "tokens_per_step": {"now": None, "start": None}, "sequences": {"now": None, "start": None},
        "limping": False, "storm": False,
    }  # fmt: skip


def write(folder: str, told: dict[str, Any]) -> None:
    """Put the report where API servers find it: whole or not at all, for this user's eyes only."""
    pid = os.getpid()
    line = {"schema": SCHEMA, "pid": pid, "started": start_ticks(pid), "ancestors": ancestors(pid), **told}
    write_whole(folder, f"core-{pid}", line)


def read(folder: str, key: int) -> list[dict[str, Any]]:
    """The reports of the living engine cores that come from process `key`; what dead ones left is taken away."""
    reports = []
    for name in _names(folder):
        try:
            line = _read(f"{folder}/{name}")
            if not is_alive(line["pid"]) or start_ticks(line["pid"]) != line["started"]:
                os.unlink(f"{folder}/{name}")  # noqa: PTH108
            elif key in line["ancestors"]:
                reports.append(line)
        except FileNotFoundError:
            continue
        except Exception as error:
            FAULTS.note("reading what containment tells", error)
    return reports


def told(folder: str | None, key: int) -> dict[str, Any]:
    """What all engine cores of this server tell together, as /plimsoll/state shows it."""
    lines = [] if folder is None else read(folder, key)
    if not lines:
        return unknown("no engine core has reported: is PLIMSOLL_SURVIVE=1 set and the plugin installed?")
    # The least healthy core speaks for the size; counts add up.
    first = min(lines, key=lambda line: (bool(line["armed"]), line["tokens_per_step"]["now"] or 0))
    lasts = [line["last"] for line in lines if line["last"] is not None]
    last = max(lasts, key=lambda one: one["at"]) if lasts else None
    if last is not None:
        last = {"age_s": round(max(0.0, time.time() - last["at"]), 3), **{k: v for k, v in last.items() if k != "at"}}
    return {
        "armed": all(line["armed"] for line in lines),
        "why": first["why"],
        **{name: sum(line[name] for line in lines) for name in ("contained", "aborted", "recomputed_tokens")},
        "stalled_s": round(sum(line["stalled_s"] for line in lines), 3),
        "last": last,
        "tokens_per_step": first["tokens_per_step"],
        "sequences": first["sequences"],
        "limping": any(line["limping"] for line in lines),
        "storm": any(line["storm"] for line in lines),
    }


def why_aborted(folder: str | None, key: int, request_id: str) -> str | None:
    """Why a request was aborted, if containment did it; vLLM's core adds to the id that the API server knows."""
    if folder is None or not request_id:
        return None
    own = re.compile(rf"(?:^|_){re.escape(request_id)}(?:-|$)")
    whys = (one["why"] for line in read(folder, key) for one in reversed(line["aborted_requests"]) if own.search(one["id"]))
    return next(map(str, whys), None)


def _names(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.name.startswith("core-") and e.name.endswith(".json"))[:FILES_MAX]
    except OSError as error:
        FAULTS.note("listing what containment tells", error)
        return []


def _read(path: str) -> dict[str, Any]:
    """One report with every key of its kind; ValueError for anything else."""
    line = read_whole(path, FILE_MAX_BYTES)
    if not isinstance(line, dict) or line.get("schema") != SCHEMA:
        raise ValueError("not a report of this schema")
    for name, kinds in _KINDS.items():
        if not isinstance(line.get(name), kinds) or (isinstance(line[name], bool) and bool not in kinds):
            raise ValueError(f"{name} is of another kind")
    for name in ("tokens_per_step", "sequences"):
        if not all(isinstance(line[name].get(end), int | None) for end in ("now", "start")):
            raise ValueError(f"{name} is of another kind")
    if line["last"] is not None and not isinstance(line["last"].get("at"), int | float):
        raise ValueError("last is of another kind")
    if not all(isinstance(one, dict) and isinstance(one.get("id"), str) and "why" in one for one in line["aborted_requests"]):
        raise ValueError("aborted_requests is of another kind")
    return line


_KINDS: dict[str, tuple[type, ...]] = {
    "pid": (int,), "started": (int,), "ancestors": (list,), "armed": (bool,), "why": (str,), "contained": (int,),
    "aborted": (int,), "recomputed_tokens": (int,), "stalled_s": (int, float), "last": (dict, type(None)),
    "tokens_per_step": (dict,), "sequences": (dict,), "limping": (bool,), "storm": (bool,), "aborted_requests": (list,),
}  # fmt: skip

"""Containment's report: one small file of the engine core, replaced whole, that the API servers read.

It is beside the workers' figures. The core writes it when it is armed and when something has changed; reading it needs
no call into the engine. A file that is torn, old or somebody else's counts as no report.
"""

from __future__ import annotations

import re
import time
from typing import Any

from plimsoll.inside.figures import NUMBER, read_reports, write_report

SCHEMA = "plimsoll.survive/1"
ABORTED_KEPT = 32  # the newest aborted requests, which are named
_SIZE = {"now": (int, None), "start": (int, None)}
_SHAPE = {
    "schema": SCHEMA, "armed": bool, "why": str, "contained": int, "aborted": int, "recomputed_tokens": int,
    "stalled_s": NUMBER, "last": (None, {"at": NUMBER}), "tokens_per_step": _SIZE, "sequences": _SIZE,
    "limping": bool, "storm": bool, "aborted_requests": [{"id": str, "why": str}],
}  # fmt: skip


def unknown(why: str) -> dict[str, Any]:
    """Returns the report where no engine core has written one."""
    return {
        "armed": None, "why": why, "contained": 0, "aborted": 0, "recomputed_tokens": 0, "stalled_s": 0.0, "last": None,
        "tokens_per_step": {"now": None, "start": None}, "sequences": {"now": None, "start": None},
        "limping": False, "storm": False,
    }  # fmt: skip


def write(folder: str | None, told: dict[str, Any]) -> None:
    """Writes the report where API servers find it: whole or not at all, readable by this user only."""
    if folder is not None:
        write_report(folder, "core", SCHEMA, told)


def read(folder: str | None, key: int) -> list[dict[str, Any]]:
    return [] if folder is None else read_reports(folder, "core", "what containment tells", _SHAPE, key)


def told(folder: str | None, key: int) -> dict[str, Any]:
    """Returns the reports of all engine cores of this server as one, as /plimsoll/state shows it."""
    lines = read(folder, key)
    if not lines:
        return unknown("no engine core has reported: is PLIMSOLL_SURVIVE=1 set and the plugin installed?")
    # The sizes are those of the least healthy core; counts add up.
    first = min(lines, key=lambda line: (bool(line["armed"]), line["tokens_per_step"]["now"] or 0))
    last = max((line["last"] for line in lines if line["last"] is not None), key=lambda one: one["at"], default=None)
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
    """Returns why containment aborted a request, else None. The core's id for it is the API server's with additions."""
    if not request_id:
        return None
    own = re.compile(rf"(?:^|_){re.escape(request_id)}(?:-|$)")
    whys = (one["why"] for line in read(folder, key) for one in reversed(line["aborted_requests"]) if own.search(one["id"]))
    return next(map(str, whys), None)

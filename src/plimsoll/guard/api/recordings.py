"""Serves the recordings of engines: lengths, times and digests of requests, for a replay on another machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import BinaryIO

from plimsoll.guard.api.actions import json_answer
from plimsoll.net.server import HttpAnswer, Stream, error
from plimsoll.redaction import clean

PATH = "/recordings"
DAY_S = 86_400
MOST_S = 366 * DAY_S
PIECE_BYTES = 1 << 20
_FILES = "requests-*.jsonl"  # the recorder's file names


class Recordings:
    """The recordings of a fleet, by engine: the folder of each `recording` in guard's configuration."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders

    def answer(self, path: str, query: Mapping[str, str]) -> HttpAnswer | Stream:
        """Returns the list of recordings, or one's lines of the requests of the last `seconds`, a day by default."""
        if path == PATH:
            rows = [
                {"engine": clean(engine), "bytes": sum(path.stat().st_size for path in _files(folder, 0.0))}
                for engine, folder in self._folders.items()
            ]
            return json_answer(200, {"recordings": rows})
        folder = next((of for name, of in self._folders.items() if f"{PATH}/{clean(name)}" == path), None)
        if folder is None:
            return error(404, "no recording of that engine; [[engine]] recording names one (see /recordings)")
        seconds = query.get("seconds", str(DAY_S))
        if not seconds.isdecimal() or not 0 < int(seconds[:12]) <= MOST_S:
            return error(400, f"seconds must be a whole number up to {MOST_S}")
        return Stream(_lines(folder, time.time() - int(seconds)), "application/jsonl")


def _files(folder: str, since: float) -> list[Path]:
    """Returns the files that were written to after `since`, the oldest first."""
    found = (path for path in sorted(Path(folder).glob(_FILES)) if path.is_file() and not path.is_symlink())
    return [path for path in found if path.stat().st_mtime >= since]


async def _lines(folder: str, since: float) -> AsyncGenerator[bytes]:
    for path in await asyncio.to_thread(_files, folder, since):
        with path.open("rb") as file:
            while (piece := await asyncio.to_thread(_next_piece, file, since)) is not None:
                if piece:
                    yield piece


def _next_piece(file: BinaryIO, since: float) -> bytes | None:
    """Returns whole lines of requests that came since then; None at the end. Leaves out a line that is still being written."""
    lines = file.readlines(PIECE_BYTES)
    return b"".join(line for line in lines if line.endswith(b"\n") and _arrival(line) >= since) if lines else None


def _arrival(line: bytes) -> float:
    try:
        return float(json.loads(line)["arrival"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("-inf")

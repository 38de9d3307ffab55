"""The service runs as they were kept: every load with its figures, and the requests as the engine stamped them.

A folder holds what `lab.gpu.measure_service` left: STAGE.json, LOAD.requests.jsonl.gz, recordings.tar.gz.
"""

from __future__ import annotations

import gzip
import json
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.simulate.trace import MeasuredRun
from plimsoll.simulate.trace_files import read_measured


class Load(NamedTuple):
    """One load of one stage: what was sent, and what the client and the server's counters say."""

    stage: str
    name: str
    server: str
    flags: tuple[str, ...]
    found: dict[str, Any]
    folder: Path

    @property
    def setting(self) -> str:
        """The name without the number of the round: loads of one setting share it."""
        return self.name.rsplit("-", 1)[0]


def loads_in(folder: Path) -> list[Load]:
    """Every load of every stage, in the order in which they were made."""
    found = []
    for path in sorted(folder.glob("*.json")):
        stage = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stage, dict) or "loads" not in stage:
            continue
        for row in stage["loads"]:
            flags = tuple(stage["servers"][row["server"]]["flags"])
            found.append(Load(stage["stage"], row["load"], row["server"], flags, row, folder))
    return sorted(found, key=lambda load: float(load.found["began"]))


def recorded(load: Load) -> list[str]:
    """The lines that the engine's own recorder wrote of this load."""
    begin, end = load.found["began"], load.found["began"] + load.found["seconds"]
    with tarfile.open(load.folder / "recordings.tar.gz") as archive:
        names = [name for name in archive.getnames() if name.startswith(f"record-{load.server}/")]
        lines = [line for name in names for line in _lines(archive, name)]
    return [line for line in lines if begin <= float(json.loads(line).get("arrival", 0.0)) <= end]


def _lines(archive: tarfile.TarFile, name: str) -> list[str]:
    file = archive.extractfile(name)
    raw = file.read() if file is not None else b""
    text = gzip.decompress(raw) if name.endswith(".gz") else raw
    return [line for line in text.decode().splitlines() if '"arrival"' in line]


def measured(load: Load) -> MeasuredRun:
    """The load as a run with stamps, by the engine's clock."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"{load.name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in recorded(load)), encoding="utf-8")
        return read_measured(str(path))


def by_setting(loads: Sequence[Load]) -> dict[str, list[Load]]:
    """Loads of one setting together, in their order."""
    found: dict[str, list[Load]] = {}
    for load in loads:
        found.setdefault(load.setting, []).append(load)
    return found

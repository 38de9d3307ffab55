"""The captures that carry a label: failures provoked on an H200 and on the CPU build of the real engine."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose

CAPTURES = Path(__file__).parents[1] / "captures"
FOLDERS = ("vllm-0.25.1-h200-failures", "vllm-0.25.1-h200-proof", "vllm-0.25.1-h200-survive", "vllm-0.32.0-failures")


class Labelled(NamedTuple):
    """One log, and which answers about it are right."""

    name: str
    path: Path
    codes: tuple[str, ...]  # any of them as the first finding; none: no finding that matters
    memory: tuple[bool | None, ...]

    def data(self) -> bytes:
        data = self.path.read_bytes()
        return gzip.decompress(data) if self.path.suffix == ".gz" else data


@cache
def diagnosis(path: Path) -> Diagnosis:
    """What doctor says of this file alone."""
    return diagnose([read_log(str(path))])


@cache
def labelled() -> list[Labelled]:
    found = []
    for folder in FOLDERS:
        for row in json.loads((CAPTURES / folder / "labels.json").read_text(encoding="utf-8")):
            paths = [CAPTURES / folder / f"{row['name']}.log{ending}" for ending in ("", ".gz")]
            memory = row["memory_failure"]
            found.append(
                Labelled(
                    f"{folder.split('-')[1]}-{row['name']}",
                    next(path for path in paths if path.is_file()),
                    tuple(row["expect"]),
                    tuple(memory) if isinstance(memory, list) else (memory,),
                )
            )
    return found

"""Take what a GPU host brought back into the repository: python -m lab.proof.keep ARCHIVE.tar.gz... RESULTS CAPTURES

The archives are those of `lab.gpu.provoke_failures`. RESULTS gets results.json (what became of each run), CAPTURES the logs:
trimmed, without the debug lines that hold no figure. What results.json has of other runs stays in it.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

_DEBUG = re.compile(r"(?:\(\w[\w-]{0,40} pid=\d+\) )?DEBUG ")
_FIGURES = re.compile(r"Desired GPU memory|memory snapshot|Initial free memory|Free memory after|non-torch forward")
_HOME = re.compile(r"/root(?=/)")
KEPT = ("name", "ready", "exit_code", "killed_by_us", "seconds", "loads", "notes", "wrong")


def shortened(log: str) -> str:
    """The log without debug lines that say nothing of memory."""
    lines = [line for line in log.split("\n") if not _DEBUG.match(line) or _FIGURES.search(line)]
    return _HOME.sub("/home/vllm", "\n".join(lines))


def keep(archive: Path, captures: Path) -> list[dict[str, Any]]:
    """Write the logs of one archive; the rows of its results."""
    with tarfile.open(archive) as packed:
        texts = {member.name: _text(packed, member) for member in packed.getmembers() if member.isfile()}
    rows = json.loads(texts["results.json"])
    for row in rows:
        log = shortened(texts[f"{row['name']}.trimmed.log"])
        (captures / f"{row['name']}.log").write_text(log, encoding="utf-8")
    return [{key: row[key] for key in KEPT} for row in rows]


def _text(packed: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    stream = packed.extractfile(member)
    assert stream is not None, member.name
    return stream.read().decode("utf-8", "replace")


def main(arguments: list[str]) -> int:
    """Keep all archives."""
    *archives, results, captures = (Path(argument) for argument in arguments)
    captures.mkdir(parents=True, exist_ok=True)
    rows = [row for archive in archives for row in keep(archive, captures)]
    path, new = results / "results.json", {row["name"] for row in rows}
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    kept = [row for row in before if row["name"] not in new]
    path.write_text(json.dumps([*kept, *rows], indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

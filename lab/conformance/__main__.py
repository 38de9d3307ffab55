"""Runs the script and compares.

python -m lab.conformance record real|standin FILE [PART...]   # one server, or some parts of it
python -m lab.conformance compare REAL STANDIN                 # exit 1 when they differ in what is not allowed
python -m lab.conformance --write                              # both servers, the recordings and docs/standin.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lab.conformance.compare import beyond, differences, unused
from lab.conformance.phases import PARTS, tidied
from lab.conformance.report import block, page
from lab.conformance.servers import KINDS, ROOT

CAPTURES = ROOT / "tests" / "captures" / "vllm-0.32.0-conformance"
PAGE = ROOT / "docs" / "standin.md"
SCHEMA = "plimsoll.conformance/1"


def record(kind: str, target: Path, parts: list[str] | None = None) -> dict[str, Any]:
    """Run the script against one kind of server; parts that are not asked for stay as the file has them."""
    found = _read(target) if target.exists() and parts else {"schema": SCHEMA}
    for part in parts or PARTS:
        print(f"{kind}: {part}", flush=True)
        found[part] = tidied(PARTS[part](KINDS[kind]))
        target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def compare(real: dict[str, Any], standin: dict[str, Any]) -> int:
    """Print what differs; 1 when something does that nothing allows, or when a rule allows nothing."""
    found = differences(real, standin)
    left, idle = beyond(found), unused(found)
    for one in left:
        print(one)
    for rule in idle:
        print(f"{rule.where}: allowed, but there is no such difference")
    print(f"{len(found)} differences, {len(left)} of them not allowed")
    return 1 if left or idle else 0


def write() -> int:
    """Run both and write the recordings and the table."""
    CAPTURES.mkdir(exist_ok=True)
    real, standin = (record(kind, CAPTURES / f"{kind}.json") for kind in KINDS)
    made = block(real, differences(real, standin))
    if PAGE.exists():
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made)
    return compare(real, standin)


def main(words: list[str]) -> int:
    """The command line."""
    match words:
        case ["record", ("real" | "standin") as kind, path, *parts]:
            record(kind, Path(path), parts)
            return 0
        case ["compare", real, standin]:
            return compare(_read(Path(real)), _read(Path(standin)))
        case ["--write"]:
            return write()
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

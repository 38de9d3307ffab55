"""Writes src/plimsoll/vllm/data/*.json from the wheels: `python -m lab.catalogue [--check] [--cache DIR]`.

Downloads about 9 GB of wheels once (only their Python files are kept, about 1 GB) and reads them in about two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.catalogue.fetch import RELEASES, cache_folder, fetch
from lab.catalogue.read_architectures import read_architectures
from lab.catalogue.read_endpoints import read_endpoints
from lab.catalogue.read_environment import read_environment
from lab.catalogue.read_failure_texts import read_failure_texts
from lab.catalogue.read_flags import read_flags
from lab.catalogue.read_frames import read_frames
from lab.catalogue.read_inside import read_inside
from lab.catalogue.read_log_lines import read_log_lines
from lab.catalogue.read_log_places import read_log_places
from lab.catalogue.read_metrics import read_metrics
from lab.catalogue.read_values import read_values
from lab.catalogue.source_tree import SourceTree

DATA = Path(__file__).parents[2] / "src" / "plimsoll" / "vllm" / "data"

# What is read, the key that names a row across releases, and how.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[SourceTree], list[dict[str, Any]]]]] = {
    "flags": (("name",), read_flags),
    "values": (("flag", "value"), read_values),
    "architectures": (("name",), read_architectures),
    "environment": (("name",), read_environment),
    "metrics": (("name", "engine"), read_metrics),
    "endpoints": (("method", "path"), read_endpoints),
    "log_lines": (("name",), read_log_lines),
    "failure_texts": (("name",), read_failure_texts),
    "log_places": (("name",), read_log_places),
    "frames": (("name",), read_frames),
    "inside": (("name",), read_inside),
}


def spans(rows_by_release: dict[str, list[dict[str, Any]]], key: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Row by row, the stretches of releases over which it stayed the same: `from` and `to` are the first and last seen."""
    table: dict[str, list[dict[str, Any]]] = {}
    releases = list(rows_by_release)
    for index, release in enumerate(releases):
        for row in rows_by_release[release]:
            name = " ".join(row[k] for k in key)
            facts = {k: v for k, v in row.items() if k not in key}
            stretches = table.setdefault(name, [])
            last = stretches[-1] if stretches else None
            unbroken = last is not None and index > 0 and last["to"] == releases[index - 1]
            if last is not None and unbroken and {k: v for k, v in last.items() if k not in ("from", "to")} == facts:
                last["to"] = release
            else:
                stretches.append({"from": release, "to": release, **facts})
    return dict(sorted(table.items()))


def as_text(value: dict[str, Any]) -> str:
    """JSON with one row a line, so that a change of one fact is a change of one line."""
    lines = ["{"]
    for number, (key, inner) in enumerate(value.items()):
        comma = "," if number < len(value) - 1 else ""
        if isinstance(inner, dict):
            rows = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False, default=sorted)}" for k, v in inner.items()]
            lines += [f"{json.dumps(key)}: {{", ",\n".join(rows), f"}}{comma}"]
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(inner, ensure_ascii=False)}{comma}")
    return "\n".join([*lines, "}", ""])


def read_all(cache: Path, tables: list[str]) -> dict[str, dict[str, Any]]:
    """The tables over every release, as they are to be written."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {table: {} for table in tables}
    wheels: dict[str, str] = {}
    for number, (distribution, version) in enumerate(RELEASES, start=1):
        folder = fetch(distribution, version, cache)
        wheels[version] = (folder / "WHEEL").read_text(encoding="utf-8").strip()
        tree = SourceTree(folder)
        for table in tables:
            rows[table][version] = TABLES[table][1](tree)
        print(f"\r{number}/{len(RELEASES)} {version:10}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    made: dict[str, dict[str, Any]] = {"releases": {"made_by": "python -m lab.catalogue", "wheels": wheels}}
    for table in tables:
        made[table] = {"made_by": "python -m lab.catalogue", "rows": spans(rows[table], TABLES[table][0])}
    return made


def main() -> int:
    """Write the tables, or with --check say whether they are what the wheels say."""
    parser = argparse.ArgumentParser(prog="python -m lab.catalogue", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table would change")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where unpacked releases are kept")
    parser.add_argument("--only", action="append", choices=list(TABLES), help="read this table alone; repeatable")
    options = parser.parse_args()
    stale = []
    for table, value in read_all(options.cache, options.only or list(TABLES)).items():
        path = DATA / f"{table}.json"
        text = as_text(value)
        if options.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
        else:
            DATA.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: {len(text):,} bytes")
    if stale:
        print(f"not what the wheels say: {', '.join(stale)}; run python -m lab.catalogue")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())

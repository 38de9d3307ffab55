"""How often one harmless record turns doctor's verdict: each kind, put into every labelled log at random places.

    python -m benchmarks.doctor_stray_lines [--places 1] [--seed 1] [--logs FOLDER] [--show]

A verdict is memory or not, and the first finding's code. A harmless record is one that a server or something beside it writes
and then goes on: a complaint that vLLM works round, a request or a message that quotes a failure, a client that goes away.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.doctor_accuracy import CAPTURES, LOGS, of_others, of_ours
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose

HARMLESS = CAPTURES / "harmless.txt"
CONFIDENT = 0.6


class Trial(NamedTuple):
    """One log with one harmless record in it."""

    log: str
    kind: str
    place: int
    before: tuple[bool | None, str | None]
    after: tuple[bool | None, str | None]
    confidence: float

    @property
    def is_changed(self) -> bool:
        """Whether memory or not, or the first code, is another one."""
        return self.before != self.after

    @property
    def is_opposite(self) -> bool:
        """Whether it now says with confidence the opposite about memory."""
        before, after = self.before[0], self.after[0]
        return before is not None and after is not None and before != after and self.confidence >= CONFIDENT


def read_harmless() -> dict[str, list[str]]:
    """The records of each kind."""
    kinds: dict[str, list[str]] = {}
    for block in HARMLESS.read_text(encoding="utf-8").strip().split("\n\n"):
        if match := re.match(r"== ([a-z-]+): ", block):
            records = kinds.setdefault(match[1], [])
        elif not kinds:
            continue
        else:
            records.append(block)
    return kinds


def verdict(found: Diagnosis) -> tuple[bool | None, str | None]:
    """Memory or not, and the first code."""
    return found.memory_failure, str(found.findings[0].code) if found.findings else None


def trials(logs: Sequence[tuple[str, Path]], places: int, seed: int, folder: Path) -> Iterator[Trial]:
    """Every log with each kind of record at so many places."""
    chance = random.Random(seed)
    kinds = read_harmless()
    for name, path in logs:
        before = verdict(diagnose([read_log(str(path))]))
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.split(b"\n")
        for kind, records in kinds.items():
            for _ in range(places):
                place, record = chance.randint(0, len(lines)), chance.choice(records)
                stray = folder / "stray.log"
                stray.write_bytes(b"\n".join([*lines[:place], record.encode(), *lines[place:]]))
                found = diagnose([read_log(str(stray))])
                confidence = found.findings[0].confidence if found.findings else 0.0
                yield Trial(name, kind, place, before, verdict(found), confidence)


def main() -> None:
    """Measure, print, and fail where more verdicts turn than 1 in 200, or one to a confident opposite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=LOGS)
    parser.add_argument("--show", action="store_true", help="every verdict that turned")
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("doctor_stray_lines.py") else [])
    labelled = [*(of_others(options.logs) if options.logs.is_dir() else ()), *of_ours()]
    with tempfile.TemporaryDirectory() as folder:
        found = list(trials([(one.name, one.path) for one in labelled], options.places, options.seed, Path(folder)))
    asked, changed = Counter(trial.kind for trial in found), Counter(trial.kind for trial in found if trial.is_changed)
    print("| harmless record | trials | verdicts that turned | to a confident opposite |\n|---|---|---|---|")
    for kind in asked:
        opposite = sum(trial.is_opposite for trial in found if trial.kind == kind)
        print(f"| {kind} | {asked[kind]} | {changed[kind]} | {opposite} |")
    turned, opposite = changed.total(), sum(trial.is_opposite for trial in found)
    print(f"| all | {len(found)} | {turned} | {opposite} |")
    for trial in found if options.show else ():
        if trial.is_changed:
            print(f"  {trial.kind} in {trial.log} at line {trial.place}: {trial.before} -> {trial.after}, {trial.confidence}")
    if turned * 200 > len(found) or opposite:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The replay behind advice on knobs, as a process of its own: one question as a word of JSON, one answer on stdout.

{"folder": RECORDING, "since": UNIX_SECONDS, "limits": {...}, "knobs": [KNOB...], "unfinished": REQUESTS,
 "promise": [TTFT_S, TPOT_S]}
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.simulate.advice import FEWEST_REQUESTS, KnobAdvice, Promise, advise
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace_files import read_measured

MOST_LINES = 20_000
MOST_UNFINISHED = 0.1  # share of the recorded requests: only ended ones are recorded, and in a burst the quick ones end first


def recorded(folder: Path, since: float) -> list[str]:
    """Returns a recording's lines of requests that came after `since`, from a moment when the engine was idle, if any."""
    rows: list[tuple[float, float, str]] = []
    for path in sorted(folder.glob("*.jsonl")):
        if path.stat().st_mtime < since:
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                if row["arrival"] >= since:
                    rows.append((float(row["arrival"]), float(row.get("finished") or row["arrival"]), line))
    rows = sorted(rows)[-MOST_LINES:]
    # Half of them at least: requests before an idle moment say nothing about those after it.
    busy_until, begin = 0.0, 0
    for place, (arrival, finished, _) in enumerate(rows):
        if arrival > busy_until and len(rows) - place >= max(FEWEST_REQUESTS, len(rows) // 2):
            begin = place
        busy_until = max(busy_until, finished)
    return [line for _, _, line in rows[begin:]]


def advice_on(asked: Mapping[str, Any]) -> KnobAdvice:
    """Returns the advice for a recording; tries both ways of scheduling, and uses the one that fits better."""
    lines = recorded(Path(asked["folder"]), float(asked["since"]))
    if len(lines) < FEWEST_REQUESTS:
        return KnobAdvice(len(lines), why_not=f"{len(lines)} requests were recorded lately: {FEWEST_REQUESTS} at least")
    if (unfinished := int(asked["unfinished"])) > MOST_UNFINISHED * len(lines):
        return KnobAdvice(len(lines), why_not=f"{unfinished} requests have not ended yet, beside {len(lines)} that have")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        measured = read_measured(file.name, skip_bad=True)
    promise, knobs = Promise(*asked["promise"]), asked["knobs"]
    found = [advise(measured, EngineLimits(**asked["limits"], async_scheduling=way), promise, knobs) for way in (True, False)]
    return min(found, key=lambda advice: (bool(advice.why_not), abs(advice.replayed - advice.measured)))


def main() -> None:
    """Answers the one question."""
    try:
        advice = advice_on(json.loads(sys.argv[1]))
    except (BadInput, OSError) as problem:
        advice = KnobAdvice(why_not=str(problem)[:300])
    print(json.dumps({**dataclasses.asdict(advice), "sentence": advice.sentence()}))


if __name__ == "__main__":
    main()

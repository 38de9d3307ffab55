"""What the article's sidecar would have done to two real servers on an H200, by what was recorded of them.

    python -m lab.article.recorded

Both were well: their queues drained while they served. The sidecar may have begun at any second of its 30, so each is tried.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from lab.article.sidecar import EVERY_S, IDLE_WITHIN_S, Marks, Reading

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "captures" / "vllm-0.25.1-h200"
_LINE = re.compile(r" \d\d-\d\d (\d\d:\d\d:\d\d) .*Running: (\d+) reqs, Waiting: (\d+) reqs, GPU KV cache usage: ([\d.]+)%")


class Row(NamedTuple):
    """A moment of a recording."""

    at_s: float  # since its first row
    reading: Reading


class Restart(NamedTuple):
    """One that the sidecar would have made."""

    decided_s: float
    at_s: float
    cut: int | None  # requests that ran or waited then; None where the recording was over


class Recording(NamedTuple):
    """A server and what was recorded of it."""

    title: str
    rows: Sequence[Row]
    outcome: str


def burst() -> Recording:
    """400 requests at once on 4 GiB of cache: a row every half second."""
    rows = json.loads((FOLDER / "thrash.series.json").read_text(encoding="utf-8"))
    found = [Row(row[0] - rows[0][0], Reading(row[3], row[1], row[2])) for row in rows]
    last = found[-1].reading
    outcome = f"{int(rows[-1][4])} preemptions; in the last row {last.running:.0f} runs and {last.waiting:.0f} wait"
    return Recording("400 requests at once, a cache of 4 GiB", found, outcome)


def article_flags() -> Recording:
    """120 long prompts on a server with the article's own values: vLLM's line every ten seconds."""
    text = (FOLDER / "seedcfg.log").read_text(encoding="utf-8")
    answers = re.findall(r'"POST /v1/\S+ HTTP/1\.1" (\d+)', text)
    found = [(datetime.strptime(at, "%H:%M:%S"), Reading(float(kv) / 100, float(run), float(wait)))  # noqa: DTZ007 - differences only
             for at, run, wait, kv in _LINE.findall(text)]  # fmt: skip
    rows = [Row((at - found[0][0]).total_seconds(), reading) for at, reading in found]
    good = sum(status == "200" for status in answers)
    return Recording("120 long prompts, the article's values", rows, f"{good} of {len(answers)} answered with 200")


def restart_of(rows: Sequence[Row], begins_s: float) -> Restart | None:
    """The first restart of a sidecar whose first look is so many seconds after the first row; None if it makes none."""
    marks, at_s = Marks(), begins_s
    while at_s <= rows[-1].at_s:
        if marks.see(_at(rows, at_s).reading, at_s):
            soon = [row for row in rows if at_s <= row.at_s < at_s + IDLE_WITHIN_S]
            idle_s = next((row.at_s for row in soon if row.reading.running == 0), None)
            end_s = at_s + IDLE_WITHIN_S if idle_s is None else idle_s
            if end_s > rows[-1].at_s:
                return Restart(at_s, end_s, None)
            then = _at(rows, end_s).reading
            return Restart(at_s, end_s, int(then.running + then.waiting))
        at_s += EVERY_S
    return None


def _at(rows: Sequence[Row], at_s: float) -> Row:
    """The last one by then."""
    return [row for row in rows if row.at_s <= at_s][-1]


def sentence(recording: Recording) -> str:
    """What would have become of it."""
    made = [restart_of(recording.rows, float(begins_s)) for begins_s in range(int(EVERY_S))]
    done = [one for one in made if one is not None]
    cut = [one.cut for one in done if one.cut is not None]
    full = sum(row.reading.cache > 0.95 for row in recording.rows)
    parts = [
        f"{recording.title}: {recording.outcome}; cache over 95 % in {full} of {len(recording.rows)} rows. ",
        f"The sidecar decides to restart it in {len(done)} of {len(made)} cases",
        f", after {min(one.decided_s for one in done):.0f} to {max(one.decided_s for one in done):.0f} s" if done else "",
        f", and {min(cut)} to {max(cut)} requests are cut off" if cut else "",
    ]
    return "".join(parts)


def main() -> int:
    """Print both."""
    for recording in (burst(), article_flags()):
        print(sentence(recording))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The H200 run of lab/gpu/knobs.py in tables: `python -m lab.knobs_score` writes them into docs/knobs.md.

The recording of the first burst held the 16 requests of the warm-up as well; the forecast is made again here for the 64 of the
burst alone, with the same recording and the same limits.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from lab.marked import placed
from plimsoll.simulate.advice import KnobAdvice, Promise, advise
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace_files import read_measured

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "lab" / "results" / "knobs-h200", ROOT / "docs" / "knobs.md"
BEGIN, END = "<!-- h200: made by `python -m lab.knobs_score` -->", "<!-- end of h200 -->"
RUNNERS = ("first", "second")


def result(name: str) -> dict[str, Any]:
    """One file of the run."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def forecast() -> KnobAdvice:
    """The advice for the burst's own requests, by the server's recording."""
    burst = result("burst")
    lines = (RESULTS / "burst-recorded.jsonl").read_text(encoding="utf-8").splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines if json.loads(line)["arrival"] >= burst["bursts"][0]["began"])
        file.flush()
        limits = EngineLimits(**{**burst["limits"], "groups": ()})
        return advise(read_measured(file.name), limits, Promise(*burst["promise_s"]))


def by_guard() -> str:
    """The run in which guard gave its advice amid the first burst, and `guardctl` set it."""
    run = result("burst-by-guard")
    started, *taken = (str(one["good"]) for one in run["bursts"] if one["burst"] != "as started 2")
    early, whole = (re.match(r"with max-num-seqs (\d+), \d+ of (\d+)", run[name]) for name in ("guard_advice", "advice"))
    assert early
    assert whole
    return (
        f"In a second run guard advised **in the middle of the burst**, after {early[2]} of its {whole[2]} requests: "
        f"{early[1]} sequences, set by `guardctl`, kept {' and '.join(taken)} instead of {started}; "
        f"all {whole[2]} would have advised {whole[1]}, with a forecast of {run['forecast']}. "
        "Guard now waits until nearly all requests have ended; that was not run again on the card."
    )


def tables() -> str:
    """Both parts of the run."""
    burst, advice = result("burst"), forecast()
    rows = ["| burst | in force | within the promise | failed | output tokens/s | first token, median | most at once |"]
    rows += ["|---|---|---|---|---|---|---|"]
    for one in burst["bursts"]:
        rows.append(
            f"| {one['burst']} | {one['in_force']} | {one['good']} of {one['requests']} | {one['failed']} | "
            f"{one['output_tokens_per_s']:.0f} | {one['ttft_ms']['p50'] / 1e3:.1f} s | {one['most_running']} |"
        )
    knob, took = burst["set"].partition(" ")[0].split("=")
    tried = {str(value): kept for name, value, kept in advice.tried if name == knob}
    came = " and ".join(str(one["good"]) for one in burst["bursts"] if one["burst"].startswith("set"))
    kept = ", ".join(f"{kept} with {value}" for value, kept in tried.items())
    rows += [
        "",
        (
            f"Forecast for these 64 requests: {tried[took]} with {took}; it was {came}. The replay of the burst as started "
            f"keeps {advice.replayed}, the server's stamps say {advice.measured}, the clients' {burst['bursts'][0]['good']}."
            f" Tried: {kept}. (On the host the recording held 16 requests of a warm-up too, all within it: 51 of 80.)"
        ),
        "",
        by_guard(),
        "",
        "| runner | orders | an order took (median, most) | requests | failed | preemptions | longest gap in a stream |",
        "|---|---|---|---|---|---|---|",
    ]
    for runner in RUNNERS:
        one = result(f"turns-{runner}")
        rows.append(
            f"| {runner} | {one['turns']} in {one['streams_seconds']:.0f} s | {one['order_p50_s'] * 1e3:.0f} ms, "
            f"{one['order_max_s'] * 1e3:.0f} ms | {one['requests']} | {one['failed']} | {one['preemptions']:.0f} | "
            f"{one['streams_gap_max_ms'] / 1e3:.1f} s |"
        )
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with the tables in it."""
    return placed(text, BEGIN, END, f"\n{tables()}\n", PAGE)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(tables())

"""The H200 run of lab/gpu/knobs.py in tables: `python -m lab.knobs_score` writes them into docs/knobs.md."""

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
    order = re.search(r"guardctl set burst (\S+)=(\d+)", burst["guard_advice"])
    assert order
    tried = {str(value): kept for name, value, kept in advice.tried if name == order[1]}
    came = " and ".join(str(one["good"]) for one in burst["bursts"] if one["burst"].startswith("set"))
    kept = ", ".join(f"{kept} with {value}" for value, kept in tried.items())
    rows += [
        "",
        (
            f"{burst['guard_advice_s']:.0f} s after the first burst `guardctl status` showed: `{burst['guard_advice']}`. "
            f"Set so, {came} came. The same replay over all {burst['bursts'][0]['requests']} requests "
            f"keeps {advice.replayed} as started, the server's stamps say {advice.measured}, the clients' "
            f"{burst['bursts'][0]['good']}; tried: {kept}."
        ),
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

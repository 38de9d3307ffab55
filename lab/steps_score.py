"""How many tokens a step: what an H200 measured and what the unfitted clock says of the same requests.

    python -m lab.steps_score        prints the table and puts it into docs/tune.md

The runs are the part `steps` of lab/gpu/knobs.py: one server, started with 24,576 tokens a step, with fewer set as a knob.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import clock_for, ready
from lab.gpu.knobs import BURST_FLAGS
from lab.marked import placed
from lab.service.tuned import model_in
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace import make_trace

ROOT = Path(__file__).resolve().parents[1]
RUNS, PAGE = ROOT / "lab" / "results" / "knobs-h200" / "steps.json", ROOT / "docs" / "tune.md"
BEGIN, END = "<!-- steps: made by `python -m lab.steps_score` -->", "<!-- end of steps -->"
TIE = 0.05  # of the best first token: the spread of one run to the next


def replayed(run: dict[str, Any], limits: EngineLimits, model: Path) -> tuple[float, float, float]:
    """The same requests with the clock that needs no fit: seconds of the whole, mean TTFT and TPOT in milliseconds."""
    rows = sorted(run["requests_seen"])
    flags = [*BURST_FLAGS[:-4], "--max-num-batched-tokens", str(run["value"]), *BURST_FLAGS[-2:]]
    limits = limits._replace(max_num_batched_tokens=run["value"])
    times = clock_for(ready("H200", "0.25.1", (str(model), *flags)), limits).step_time
    arrival = np.array([round(1e9 * row[0]) for row in rows])
    found = replay(make_trace("steps", arrival, [row[1] for row in rows], [row[2] for row in rows]), limits, times)
    further = (found.finish_ns - found.first_token_ns) / np.maximum(1, np.array([row[2] for row in rows]) - 1)
    return float(found.finish_ns.max()) / 1e9, float((found.first_token_ns - arrival).mean()) / 1e6, float(further.mean()) / 1e6


def tables() -> str:
    """One row for each run; the verdict below."""
    told = json.loads(RUNS.read_text(encoding="utf-8"))
    limits = EngineLimits(**{**told["limits"], "groups": ()})
    lines = ["| traffic | tokens a step | seconds, replayed | mean TTFT, ms, replayed | mean TPOT, ms, replayed |"]
    lines += ["|---|---|---|---|---|"]
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        model = model_in(Path(place))
        for traffic in dict.fromkeys(run["traffic"] for run in told["runs"]):
            runs = [run for run in told["runs"] if run["traffic"] == traffic]
            made = [replayed(run, limits, model) for run in runs]
            for run, (seconds, ttft, tpot) in zip(runs, made, strict=True):
                lines.append(
                    f"| {traffic} | {run['value']:,} | {run['seconds']:.1f}, {seconds:.1f} | {run['ttft_ms']['mean']:,.0f}, "
                    f"{ttft:,.0f} | {run['tpot_ms']['mean']:.1f}, {tpot:.1f} |"
                )
            if len(runs) > 1:
                firsts = [run["ttft_ms"]["mean"] for run in runs], [one[1] for one in made]
                words = [
                    ", ".join(
                        f"{run['value']:,}" for run, first in zip(runs, found, strict=True) if first <= min(found) * (1 + TIE)
                    )
                    for found in firsts
                ]
                verdicts.append(
                    f"{traffic}: the first token comes soonest with {words[0]} (within 5 %); the replay says {words[1]}."
                )
    return "\n".join([*lines, *(line for verdict in verdicts for line in ("", verdict))])


if __name__ == "__main__":
    made = tables()
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN in text:
        PAGE.write_text(placed(text, BEGIN, END, f"\n\n{made}\n\n", PAGE), encoding="utf-8")
    print(made)

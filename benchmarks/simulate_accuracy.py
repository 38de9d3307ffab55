"""How near replays come to real servers: four measured runs of vLLM, fitted on their first third, predicted for the rest.

    python -m benchmarks.simulate_accuracy [--runs FOLDER] [--write]

`--write` puts the tables into docs/step-time.md. The measured runs are not part of the repository; FOLDER has them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.measured_runs import before, duration_error, only_first
from plimsoll.errors import PlimsollError
from plimsoll.hardware.cards import gpu_named
from plimsoll.simulate.fit import Fit, FitError, error_of, fit, replayed, series_shift_s
from plimsoll.simulate.replay import STEP_COLUMNS
from plimsoll.simulate.settings import EngineLimits, Experts, Sheet, StepTime, captured_sizes, sheet_time
from plimsoll.simulate.trace import ABSENT, Integers, MeasuredRun
from plimsoll.simulate.trace_files import read_measured, read_trace

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "step-time.md"
RUNS = ROOT.parent / "shared" / "data" / "traces" / "real_runs"
PROMPTS = "sharegpt_300_hashed.jsonl.gz"
PROMISED = {"RTX4090_Llama-3.1-8B": 0.05}
PROMISED_OTHERS = 0.08
PROMISED_POINTS = 3.0
PLENTY = 100_000
"""Blocks, where the run does not say how many it had and never ran out: the number then changes nothing."""


class Run(NamedTuple):
    """A measured run, the settings it ran with, and what its model asks of its cards."""

    name: str
    title: str
    settings: EngineLimits
    work: Sheet
    card: str
    has_known_prompts: bool = False
    """Whether PROMPTS says what its prompts begin with."""


LLAMA = Sheet(weights_bytes=15.0e9, block_bytes=16 * 131_072, parameters=7.5e9)
PRO = "RTX PRO 6000 Blackwell Workstation"
ALL_RUNS = (
    Run(
        "RTX4090_Llama-3.1-8B",
        "RTX 4090, Llama-3.1-8B",
        EngineLimits(num_blocks=2588, max_model_len=32768, async_scheduling=True),
        LLAMA,
        "RTX 4090",
        has_known_prompts=True,
    ),
    Run(
        "RTXPRO6000_Llama-3.1-8B",
        "RTX PRO 6000, Llama-3.1-8B",
        EngineLimits(num_blocks=PLENTY, max_num_seqs=128, max_model_len=131_072, async_scheduling=True),
        LLAMA,
        PRO,
        has_known_prompts=True,
    ),
    Run(
        "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507",
        "2 x RTX PRO 6000 (data and expert parallel), Qwen3-30B-A3B",
        # Two engines in lockstep, replayed as one with twice the seats, the budget and the cards.
        EngineLimits(
            num_blocks=PLENTY, max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=262_144, async_scheduling=True
        ),
        Sheet(30.0e9, 8 * 98_304, 30.0e9, 28.8e9, Experts(128, 8, 0.95), cards=2),
        PRO,
    ),
    Run(
        "RTXPRO6000_Qwen3-32B",
        "2 x RTX PRO 6000 (tensor parallel), Qwen3-32B",
        EngineLimits(num_blocks=PLENTY, max_num_seqs=128, max_model_len=40_960, async_scheduling=True),
        Sheet(32.0e9, 8 * 262_144, 32.0e9, cards=2),
        PRO,
    ),
)
GRAPH_SEATS = {"RTXPRO6000_Qwen3-30B-A3B-Instruct-2507": 128}
"""Requests that decide which graphs are captured, where it is not max_num_seqs: each engine captures its own."""


class Outcome(NamedTuple):
    """Errors of one replay: of the run's duration, of means over the rest, and of the curve of KV use, in points."""

    duration: float
    rest: FitError
    kv_points: float | None
    preemptions: int

    @property
    def worst(self) -> float:
        """The largest of the three that are promised."""
        return max(abs(one) for one in (self.duration, self.rest.mean_ttft, self.rest.mean_tpot) if one is not None)


class Result(NamedTuple):
    """All that is reported of one run."""

    run: Run
    by_time: Fit
    by_time_outcome: Outcome
    by_time_seconds: float
    by_request_outcome: Outcome
    without_start_outcome: Outcome
    unfitted: StepTime
    unfitted_outcome: Outcome

    @property
    def is_kept(self) -> bool:
        """Whether the promise holds: the fit on the first third of the time."""
        points = self.by_time_outcome.kv_points
        within = self.by_time_outcome.worst <= PROMISED.get(self.run.name, PROMISED_OTHERS)
        return within and (points is None or points <= PROMISED_POINTS)


def load(run: Run, folder: Path) -> MeasuredRun:
    """The run with its series, and with the beginnings of its prompts where they are known."""
    path = str(folder / run.name)
    measured = read_measured(f"{path}_requests.jsonl.gz", timeseries=f"{path}_timeseries.csv.gz")
    if run.has_known_prompts:
        known = read_trace(str(folder.parent / PROMPTS), prefix_block=16)
        assert np.array_equal(known.prompt, measured.trace.prompt), "the prompts are those of another run"
        trace = measured.trace._replace(prefix_ids=known.prefix_ids, prefix_start=known.prefix_start, prefix_block=16)
        measured = measured._replace(trace=trace)
    return measured


def third(measured: MeasuredRun) -> int:
    """When the first third of the run's time was over."""
    return int(measured.finish_ns.max()) // 3


def capturing(run: Run) -> EngineLimits:
    """The limits by which its engine captured graphs."""
    return run.settings._replace(max_num_seqs=GRAPH_SEATS.get(run.name, run.settings.max_num_seqs))


def data_sheet(run: Run) -> StepTime:
    """Step times by the card and the model alone."""
    found = sheet_time(run.work, gpu_named(run.card), capturing(run))
    assert found is not None, run.card
    return found


def fit_run(run: Run, measured: MeasuredRun, *, with_start: bool = True) -> Fit:
    """As `plimsoll simulate --plan --fit` does it."""
    start = data_sheet(run) if with_start else None
    sizes = captured_sizes(capturing(run), is_eager=False)
    return fit(measured, run.settings, start=start, sizes=sizes, experts=run.work.experts)


def predict(run: Run, measured: MeasuredRun, step_time: StepTime, rest: MeasuredRun, from_ns: int = ABSENT) -> Outcome:
    """Replay the whole run, and hold it against what is left of it."""
    replay, steps = replayed(measured.trace, run.settings, step_time)
    error = error_of(rest, replay, from_ns=from_ns)
    points = kv_points(run, measured, steps)
    return Outcome(duration_error(measured, replay), error, points, replay.totals.preemptions)


def kv_points(run: Run, measured: MeasuredRun, steps: Integers) -> float | None:
    """The mean distance of the two curves of KV use, in points of 100; None where the run did not record its own."""
    series = measured.series
    if series is None or not series.kv_used_ratio.any():
        return None
    at_ns = (series.at_s + series_shift_s(measured)) * 1e9
    ends = steps[:, STEP_COLUMNS.index("t_end_ns")]
    at = np.minimum(np.searchsorted(ends, at_ns), len(steps) - 1)
    used = steps[at, STEP_COLUMNS.index("used_blocks")] / (run.settings.num_blocks - 1)
    used = np.where(at_ns > ends[-1], 0.0, used)
    return float(100 * np.abs(used - series.kv_used_ratio).mean())


def measure(run: Run, folder: Path) -> Result:
    """Fit, predict and compare one run, by either reading of "the first third", and with no fit at all."""
    measured = load(run, folder)
    until = third(measured)
    begin = time.perf_counter()
    by_time = fit_run(run, before(measured, until))
    seconds = time.perf_counter() - begin
    requests = measured.trace.size // 3
    by_request = fit_run(run, only_first(measured, requests))
    early = np.arange(measured.trace.size) < requests
    later = measured._replace(
        first_token_ns=np.where(early, ABSENT, measured.first_token_ns), finish_ns=np.where(early, ABSENT, measured.finish_ns)
    )
    alone = fit_run(run, before(measured, until), with_start=False)
    unfitted = data_sheet(run)
    return Result(
        run,
        by_time,
        predict(run, measured, by_time.step_time, measured, until),
        seconds,
        predict(run, measured, by_request.step_time, later),
        predict(run, measured, alone.step_time, measured, until),
        unfitted,
        predict(run, measured, unfitted, measured, until),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _outcome(name: str, outcome: Outcome) -> str:
    points = "-" if outcome.kv_points is None else f"{outcome.kv_points:.1f}"
    errors = (outcome.duration, outcome.rest.mean_ttft, outcome.rest.mean_tpot)
    return f"| {name} | {' | '.join(_percent(one) for one in errors)} | {points} | {outcome.preemptions:,} |"


def tables(results: Sequence[Result]) -> list[str]:
    """Markdown."""
    lines = []
    for title, pick in (
        ("Fitted on the first third of the time, from the data sheet's start (what is promised)", "by_time_outcome"),
        ("Fitted on the stamps of the first third of the requests, from the data sheet's start", "by_request_outcome"),
        ("Fitted on the first third of the time, with no data sheet", "without_start_outcome"),
        ("Not fitted: the data sheet alone", "unfitted_outcome"),
    ):
        lines += [f"**{title}**", "", "| run | duration | mean TTFT | mean TPOT | KV use, points | preemptions |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_outcome(one.run.title, getattr(one, pick)) for one in results] + [""]
    lines += ["**The constants** (first third of the time; the data sheet's in brackets)", ""]
    lines += [
        "| run | base, ms | token, us | request, us | context, ns/token | beyond graphs, ms | the fit says of itself | took |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for one in results:
        found, sheet = one.by_time.step_time, one.unfitted
        cells = [
            f"{found.base_ns / 1e6:.1f} ({sheet.base_ns / 1e6:.1f})",
            f"{found.token_ns / 1e3:.0f} ({sheet.token_ns / 1e3:.0f})",
            f"{found.seq_ns / 1e3:.0f} ({sheet.seq_ns / 1e3:.0f})", f"{found.ctx_ps / 1e3:.0f} ({sheet.ctx_ps / 1e3:.0f})",
            f"{step_up_ms(one):.1f}", one.by_time.sentence, f"{one.by_time_seconds:.0f} s",
        ]  # fmt: skip
        lines.append(f"| {one.run.title} | {' | '.join(cells)} |")
    return lines


def step_up_ms(result: Result) -> float:
    """What the fit found a step to cost more where no graph is large enough."""
    table, largest = result.by_time.step_time.by_tokens, max(captured_sizes(capturing(result.run), is_eager=False))
    assert table is not None, "a fit always makes a table"
    return float(table[largest + 1] - table[largest] - result.by_time.step_time.token_ns) / 1e6


def write(lines: Sequence[str]) -> None:
    """Put the tables between the marks of the page."""
    page = DOCS.read_text(encoding="utf-8")
    before, after = page.split("<!-- figures -->")[0], page.split("<!-- end -->")[1]
    DOCS.write_text(f"{before}<!-- figures -->\n\n" + "\n".join(lines).strip() + f"\n\n<!-- end -->{after}", encoding="utf-8")


def main(argv: Sequence[str] = ()) -> None:
    """Print the tables; exit 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate_accuracy")
    parser.add_argument("--runs", type=Path, default=RUNS, help="the folder of the measured runs")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/step-time.md")
    asked = parser.parse_args(argv)
    if not asked.runs.is_dir():
        print(f"left out: no measured runs in {asked.runs.name}")
        return
    try:
        results = [measure(run, asked.runs) for run in ALL_RUNS]
    except PlimsollError as failure:
        raise SystemExit(str(failure)) from None
    lines = tables(results)
    print("\n".join(lines))
    if asked.write:
        write(lines)
    broken = [one.run.title for one in results if not one.is_kept]
    if broken:
        raise SystemExit(f"not as near as promised: {'; '.join(broken)}")


if __name__ == "__main__":
    main(sys.argv[1:])

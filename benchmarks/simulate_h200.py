"""The fit on runs it was not made with: four traffics on an H200, the first third fitted, the rest predicted.

    python -m benchmarks.simulate_h200 [--write]

The runs were made by lab/gpu/measure_traffic.py (vLLM 0.25.1, a Llama-3.1-8B shape with dummy weights) after the method was
settled, and lie in tests/captures/vllm-0.25.1-h200-traffic. `--write` puts the tables into docs/step-time.md.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.marked import placed
from lab.measured_runs import before, duration_error
from plimsoll.cli.main import parse
from plimsoll.hardware.cards import gpu_named
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import read_command
from plimsoll.simulate.fit import error_of, fit
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, Sheet, StepTime, sheet_time
from plimsoll.simulate.silicon import planned_clock
from plimsoll.simulate.trace import MeasuredRun
from plimsoll.simulate.trace_files import read_measured

HERE = Path(__file__).resolve().parents[1]
CAPTURES = HERE / "tests" / "captures" / "vllm-0.25.1-h200-traffic"
DOCS = HERE / "docs" / "step-time.md"
# "GPU KV cache size: 920,592 tokens" and "32,768 tokens" in the servers' logs.
BLOCKS = {"steady": 920_592 // 16, "heavy": 920_592 // 16, "tight": 32_768 // 16, "storm": 32_768 // 16}
PREEMPTED = {"steady": 0, "heavy": 0, "tight": 6, "storm": 197}
"""As the server counted them."""
# Of the shape: weights less the embedding table, bytes of a KV block, and parameters.
LLAMA_8B = Sheet(weights_bytes=15.01e9, block_bytes=16 * 131_072.0, parameters=7.5e9)


HEAD = "| run | duration | mean TTFT | mean TPOT | preemptions | of the server |"


class Outcome(NamedTuple):
    """Relative errors over what happened after the first third."""

    duration: float
    ttft: float
    tpot: float
    preemptions: int


def settings_of(name: str) -> EngineLimits:
    """The server's settings: --max-model-len 16384 --max-num-seqs 256 --max-num-batched-tokens 2048, the rest its defaults."""
    return EngineLimits(num_blocks=BLOCKS[name], async_scheduling=True)


@cache
def kernels(name: str) -> StepTime:
    """The unfitted clock of the server: by measured kernels."""
    words = ["--gpu", "H200", "--vllm", "0.25.1", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    ready = read_command(parse(ServerOptions, [*words, "--max-model-len", "16384"]), learned=False)
    found = planned_clock(ready.replan(ready.settings)[0], ready.model.shape, settings_of(name))
    assert found is not None, "the card is one of those that were measured"
    return found.step_time


def data_sheet() -> StepTime:
    """The step times of an H200 by its data sheet."""
    found = sheet_time(LLAMA_8B, gpu_named("H200"), EngineLimits())
    assert found is not None, "the card has rates"
    return found


def load(name: str) -> MeasuredRun:
    """One run."""
    return read_measured(str(CAPTURES / f"{name}.requests.jsonl.gz"), timeseries=str(CAPTURES / f"{name}.series.csv.gz"))


def outcome(name: str, measured: MeasuredRun, step_time: StepTime, from_ns: int) -> Outcome:
    """The whole run replayed, compared over what came after `from_ns`."""
    run = replay(measured.trace, settings_of(name), step_time)
    error = error_of(measured, run, from_ns=from_ns)
    assert error.mean_ttft is not None
    assert error.mean_tpot is not None
    return Outcome(duration_error(measured, run), error.mean_ttft, error.mean_tpot, run.totals.preemptions)


@cache
def by_stamps(name: str) -> Outcome:
    """Fitted on what was stamped in the first third of the time."""
    measured = load(name)
    third = int(measured.finish_ns.max()) // 3
    found = fit(before(measured, third), settings_of(name), start=data_sheet())
    return outcome(name, measured, found.step_time, third)


def unfitted(name: str) -> Outcome:
    """Measured kernels alone."""
    measured = load(name)
    return outcome(name, measured, kernels(name), int(measured.finish_ns.max()) // 3)


def tables() -> list[str]:
    """All of it, as Markdown."""
    lines = []
    for title, judge in (
        ("Fitted on the first third of the time", by_stamps),
        ("Not fitted: measured kernels alone", unfitted),
    ):
        lines += [f"**{title}**", "", HEAD, "|---|---|---|---|---|---|"]
        for name in BLOCKS:
            found = judge(name)
            errors = " | ".join(f"{100 * error:+.1f} %" for error in found[:3])
            lines.append(f"| {name} | {errors} | {found.preemptions} | {PREEMPTED[name]} |")
        lines.append("")
    return lines[:-1]


def main() -> None:
    """Print the tables, and write them where asked."""
    lines = tables()
    print("\n".join(lines))
    if "--write" in sys.argv[1:]:
        text, made = DOCS.read_text(encoding="utf-8"), "\n".join(lines)
        DOCS.write_text(placed(text, "<!-- unseen -->", "<!-- end of unseen -->", f"\n\n{made}\n\n", DOCS), encoding="utf-8")


if __name__ == "__main__":
    main()

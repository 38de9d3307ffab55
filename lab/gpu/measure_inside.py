"""What `plimsoll.inside` is worth and what it costs on a real GPU: figures, compaction, a neighbour, the overhead.

    PYTHONPATH=src python3 -m lab.gpu.measure_inside figures compact --work DIR [--model FOLDER] [--until 560]
    PYTHONPATH=src python3 -m lab.gpu.measure_inside neighbour --work DIR
    PYTHONPATH=src python3 -m lab.gpu.measure_inside overhead --work DIR
    .venv/bin/python -m lab.gpu.measure_inside figures compact neighbour overhead --work DIR --cpu    # a dry run, no GPU

From the root of the repository, on a host where vLLM is importable. Each stage writes $OUT/STAGE.json, after every step; one
that fails or takes too long does not stop the next. The first three share one server, so call them together if time allows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lab.gpu.inside_bench import ON_CPU, ON_GPU, Bench, Kept
from lab.gpu.inside_compact import alone_longer, compact, neighbour
from lab.gpu.inside_figures import figures
from lab.gpu.models import make_models
from lab.gpu.provoke_failures import HERE
from lab.paired import alternate, compared, serve_for

MODEL = "llama-3.1-8b"
STOP_S = 25.0  # kept back at the end for stopping servers
TELLING = (
    "stage", "took_s", "wrong", "agreement", "cost", "result", "alone", "free_mib", "releasable_mib", "wanted_mib",
    "failed_without", "succeeded_with", "short_failed", "long_failed_after", "long_failed_beside", "exit_code",
)  # fmt: skip


class OutOfTime(Exception):
    """The stage has had its time."""


def overhead(bench: Bench, kept: Kept) -> None:
    """Two servers at once, one under load at a time, turn by turn."""
    one, other = bench.two()
    scale = bench.scale
    kept.put(flags=scale.overhead_flags, shape=scale.steady._asdict())
    for server in (one, other):
        serve_for(server.port, scale.model_name, scale.steady, min(8.0, scale.overhead_run_s))

    def run(name: str, port: int, number: int) -> dict[str, Any]:
        found = serve_for(port, scale.model_name, scale.steady, scale.overhead_run_s, seed=number)
        kept.add("runs", {"pair": number, "server": name, **found})
        return found

    pairs = alternate(scale.overhead_pairs, lambda n: run("with", one.port, n), lambda n: run("without", other.port, n))
    kept.put(result=compared(pairs))


Stage = Callable[[Bench, Kept], None]
STAGES: dict[str, tuple[Stage, float]] = {
    # How long each may take at most, a cold start of its server included.
    "figures": (figures, 300.0),
    "compact": (compact, 360.0),
    "neighbour": (neighbour, 480.0),
    "alone": (alone_longer, 540.0),
    "overhead": (overhead, 540.0),
}


def play(name: str, stage: Stage, limit_s: float, bench: Bench) -> dict[str, Any]:
    """One stage, whatever happens in it: its result with how it went."""
    kept = Kept(bench.out / f"{name}.json")
    began = time.monotonic()
    wrong = None
    previous = signal.signal(signal.SIGALRM, _time_is_over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, limit_s))
        stage(bench, kept)
    except Exception:  # the next stage must get its turn
        wrong = traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    kept.put(stage=name, wrong=wrong, took_s=round(time.monotonic() - began, 1))
    return kept.data


def _time_is_over(number: int, frame: FrameType | None) -> None:
    raise OutOfTime(f"signal {number} at {frame.f_code.co_qualname if frame else 'nowhere'}")


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The few lines of a result that are worth printing."""
    return {name: result[name] for name in TELLING if name in result}


def model_folder(given: Path | None, work: Path) -> Path:
    """The model's folder: the one given, or one made here, without weights."""
    if given is not None:
        return given.absolute()
    models = json.loads((HERE / "failure_runs.json").read_text(encoding="utf-8"))["models"]
    make_models({MODEL: models[MODEL]}, work / "models")
    return work / "models" / MODEL


def main(arguments: list[str]) -> int:
    """Play the stages asked for; 1 if one went wrong."""
    parser = argparse.ArgumentParser(description="Measure plimsoll.inside on this host's GPU.")
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a folder with config.json and a tokenizer; made if not given")
    parser.add_argument("--until", type=float, default=560.0, help="be done after this many seconds")
    parser.add_argument("--cpu", action="store_true", help="a dry run on the lab's CPU engine")
    parser.add_argument("--eager", action="store_true", help="the overhead without CUDA graphs: starts in half the time")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.until - STOP_S
    work = options.work.absolute()
    out = Path(os.environ.get("OUT", str(work / "out"))).absolute()
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    model = Path() if options.cpu else model_folder(options.model, work)
    scale = ON_CPU if options.cpu else ON_GPU
    if options.eager:
        scale = scale._replace(overhead_flags=(*scale.overhead_flags, "--enforce-eager"))
    bench = Bench(model, work, out, scale)
    went_wrong = False
    try:
        for name in options.stages:
            stage, limit_s = STAGES[name]
            result = play(name, stage, min(limit_s, until - time.monotonic()), bench)
            went_wrong |= result["wrong"] is not None
            print(json.dumps(headline(result), indent=1), flush=True)
    finally:
        bench.end()
    return int(went_wrong)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Is the search as good as trying everything, and how much cheaper? Two traces, two servers, 540 settings each.

    python -m benchmarks.tune_grid --traces DIR [--write]

Each pair at three loads, and with either promise alone. For every case all safe settings of the grid are replayed with the
whole trace, and then `tune` is asked about the same grid. Cost is counted in replayed requests, everything that `tune` does
included: screening, the search, slower and faster clocks, the low end of the cache. `--write` puts the table into docs/tune.md.
Takes about twenty minutes on two cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from lab.marked import placed
from plimsoll.cli.main import parse
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import read_command
from plimsoll.simulate.trace_files import read_trace
from plimsoll.tune.answer import Server, Tuning, tune
from plimsoll.tune.goodput import Score, Traffic, parse_slo
from plimsoll.tune.runners import on_cores
from plimsoll.tune.space import Candidate, Space, plan_all

DOCS = Path(__file__).resolve().parents[1] / "docs" / "tune.md"
GRID = Space(
    max_num_seqs=(8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024),
    max_num_batched_tokens=(512, 1024, 2048, 4096, 8192),
    block_size=(16, 32),
    gpu_memory_utilization=(0.85, 0.88, 0.90, 0.92, 0.94),
)
VARIANTS = ((0.7, ("ttft", "tpot")), (1.0, ("ttft", "tpot")), (1.4, ("ttft", "tpot")), (1.0, ("ttft",)), (1.0, ("tpot",)))
"""Times the case's speed, and which of its promises are made."""
HEAD = (
    "| traffic, server | speed | promised | own flags | best of the grid | chosen | of the best | cost | setting |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Case(NamedTuple):
    """A trace on a server, at a speed at which the promise begins to bind."""

    name: str
    trace: str
    gpu: str
    serve: str
    slo: str
    speed: float


LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-72B-Instruct --tensor-parallel-size 4"
SHORT = "--max-model-len 16384"
AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv.csv.gz", "mooncake_synthetic_trace.jsonl.gz"
CASES = (
    Case("Azure conversations, Llama-3.1-8B on L4", AZURE, "L4", f"{LLAMA} --max-model-len 8192", "ttft=5s,tpot=200ms", 0.13),
    Case("Mooncake synthetic, Llama-3.1-8B on L4", MOONCAKE, "L4", f"{LLAMA} {SHORT}", "ttft=20s,tpot=300ms", 0.08),
    Case("Azure conversations, Qwen2.5-72B on 4 H100", AZURE, "H100", f"{QWEN} {SHORT}", "ttft=2s,tpot=50ms", 1.4),
    Case("Mooncake synthetic, Qwen2.5-72B on 4 H100", MOONCAKE, "H100", QWEN, "ttft=10s,tpot=100ms", 0.4),
)


class Outcome(NamedTuple):
    """One case, tried in full and searched."""

    case: Case
    tuning: Tuning
    best: tuple[Candidate, Score]
    points: int
    safe: int
    grid_s: float
    search_s: float

    @property
    def ratio(self) -> float:
        """The chosen setting's goodput over the best of the grid."""
        assert self.tuning.found is not None
        return self.tuning.found.best.score.goodput / self.best[1].goodput

    @property
    def cost(self) -> float:
        """Replayed requests over those of the grid."""
        return self.tuning.requests / (self.safe * self.tuning.traffic.trace.size)


def measure(case: Case, folder: str) -> Outcome:
    """Everything, then the search; the search keeps nothing and is given nothing of what the grid found."""
    words = ["--gpu", case.gpu, "--", "vllm", "serve", *case.serve.split()]
    ready = read_command(parse(ServerOptions, words), learned=False)
    ledger, _ = ready.replan(ready.settings)
    traffic = Traffic(read_trace(str(Path(folder) / case.trace)), case.speed, parse_slo(case.slo))
    server = Server(ledger, ready.model.shape, ready.replan)
    options = [one for one in plan_all(GRID.candidates, ledger, ready.replan) if one.is_safe]
    begin = time.perf_counter()
    results = dict(on_cores(traffic, [server.job_of(one) for one in options]))
    grid_s = time.perf_counter() - begin
    scores = [(one.candidate, results[place]) for place, one in enumerate(options)]
    best = max(((c, s) for c, s in scores if isinstance(s, Score)), key=lambda pair: pair[1].goodput)
    begin = time.perf_counter()
    found = tune(traffic, server, GRID, on_cores)
    return Outcome(case, found, best, len(GRID.candidates), len(options), grid_s, time.perf_counter() - begin)


def row(outcome: Outcome) -> str:
    """One line of the table."""
    found = outcome.tuning.found
    assert found is not None
    chosen = found.best.option.candidate
    own = f"{found.own.score.goodput:.3f}" if found.own is not None else "unsafe"
    return (
        f"| {outcome.case.name} | {outcome.case.speed:g} | {outcome.case.slo} | {own} | {outcome.best[1].goodput:.3f} | "
        f"{found.best.score.goodput:.3f} | {outcome.ratio:.2%} | {outcome.cost:.1%} | "
        f"{chosen.max_num_seqs}, {chosen.max_num_batched_tokens}, {chosen.block_size}, {chosen.gpu_memory_utilization:g} |"
    )


def main() -> None:
    """Print the table as it grows, and write it where asked."""
    words = sys.argv[1:]
    folder = words[words.index("--traces") + 1]
    lines = [HEAD]
    print(HEAD, flush=True)
    for load, promises in VARIANTS:
        for case in CASES:
            slo = ",".join(part for part in case.slo.split(",") if part.split("=")[0] in promises)
            outcome = measure(case._replace(speed=round(case.speed * load, 4), slo=slo), folder)
            lines.append(row(outcome))
            print(lines[-1], flush=True)
            print(f"  {outcome.safe} safe; grid {outcome.grid_s:.0f} s, search {outcome.search_s:.1f} s", file=sys.stderr)
    if "--write" in words:
        text, made = DOCS.read_text(encoding="utf-8"), "\n".join(lines)
        DOCS.write_text(placed(text, "<!-- grid -->", "<!-- end of grid -->", f"\n\n{made}\n\n", DOCS), encoding="utf-8")


if __name__ == "__main__":
    main()

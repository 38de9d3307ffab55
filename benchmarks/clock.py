"""The unfitted clock on every recorded run: how far a replay is off when no step time was fitted to it.

    python -m benchmarks.clock [--runs FOLDER] [--write]

Runs on an H200 (vLLM 0.25.1) lie in tests/captures/vllm-0.25.1-h200-traffic and lab/results/service-h200. FOLDER holds four
runs of vLLM 0.19.0 on RTX cards (LLMServingSim's, MIT), which are not part of the repository. `--write` puts the table into
docs/step-time.md. What AISimulate says of the same runs is read from lab/results/aisimulate.json (lab/peers/aisimulate.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import simulate_accuracy as rtx
from benchmarks import simulate_h200 as h200
from lab.marked import placed
from lab.measured_runs import duration_error
from lab.service.runs import loads_in, measured
from lab.service.tuned import RESULTS, model_in
from plimsoll.cli.main import parse
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import PlanInput, read_command
from plimsoll.simulate.fit import error_of
from plimsoll.simulate.replay import replay
from plimsoll.simulate.replicas import RoutedEngines, merge_replays, replay_routed
from plimsoll.simulate.settings import EngineLimits, planned_settings
from plimsoll.simulate.silicon import RELATIVE_BAND, StepClock, planned_clock
from plimsoll.simulate.trace import MeasuredRun

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "step-time.md"
PEER = ROOT / "lab" / "results" / "aisimulate.json"
BOUNDS = (0.08, 0.15, 0.08)  # duration, mean TTFT, mean TPOT
WANTED = "duration and TPOT within 8 %, TTFT within 15 %"
CHOSEN_BY = {
    "steady", "heavy", "graphs-unlimited-1", "seats-24-1", "segments-off-1", "article-1", "overload-shed-1",
    "RTXPRO6000_Llama-3.1-8B", "RTXPRO6000_Qwen3-32B",
}  # fmt: skip
"""Runs that the constants of simulate/silicon.py were chosen by; all others were held back from that."""
LATE = "these 56 prompts waited 0.5 to 2.3 s for their first step in twelve rounds, 150 others 0.03 s: no model of traffic"
BY_BAND = "RTX4090_Llama-3.1-8B"
REMARKS = {
    "heavy": "a client's TTFT: 60 % of it is the API server's, which is not simulated",
    **{f"block-{size}-1": LATE for size in (16, 32, 64, 128)},
    BY_BAND: "no kernels of this card were measured: only the band counts",
    "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507": "two engines in lockstep",
}
# The model's name and further flags; a Server edition by the bandwidth that the runs show, since none is recorded.
PRO = "RTX PRO 6000 Blackwell Server"
RTX_SERVERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "RTX4090_Llama-3.1-8B": ("RTX 4090", ("meta-llama/Llama-3.1-8B-Instruct",)),
    "RTXPRO6000_Llama-3.1-8B": (PRO, ("meta-llama/Llama-3.1-8B-Instruct",)),
    "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507": (PRO, ("Qwen/Qwen3-30B-A3B", "-dp", "2", "--enable-expert-parallel")),
    "RTXPRO6000_Qwen3-32B": (PRO, ("Qwen/Qwen3-32B", "-tp", "2")),
}


class Case(NamedTuple):
    """One recorded run, and the server that it ran on."""

    name: str
    card: str
    run: MeasuredRun
    limits: EngineLimits  # of one engine
    command: PlanInput
    is_stamped_inside: bool = False  # whether the stamps are the engine's own, without the way in and out


class Outcome(NamedTuple):
    """Relative errors of a replay, above 0 where the replay is slower."""

    duration: float
    ttft: float
    tpot: float

    @property
    def is_within(self) -> bool:
        """Whether all three are as near as is wanted."""
        return all(abs(error) <= bound for error, bound in zip(self, BOUNDS, strict=True))

    @property
    def is_in_band(self) -> bool:
        """Whether all three lie where a clock of borrowed kernels may lie."""
        low, high = RELATIVE_BAND
        return all(1 / high <= 1 + error <= 1 / low for error in self)


def ready(card: str, release: str, words: Sequence[str]) -> PlanInput:
    """A command, read."""
    return read_command(parse(ServerOptions, ["--gpu", card, "--vllm", release, "--", "vllm", "serve", *words]), learned=False)


def clock_for(command: PlanInput, limits: EngineLimits) -> StepClock:
    """The unfitted clock of this command with these limits."""
    ledger, _ = command.replan(command.settings)
    found = planned_clock(ledger, command.model.shape, limits)
    assert found is not None, "every card here has rates"
    return found


def cases(folder: Path) -> Iterator[Case]:
    """Every recorded run; those on RTX cards only where the folder has them."""
    with tempfile.TemporaryDirectory() as place:
        model = model_in(Path(place))
        flags = ("--max-model-len", "16384", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048")
        command = ready("H200", "0.25.1", (str(model), *flags))
        for name in h200.BLOCKS:
            yield Case(name, "H200", h200.load(name), h200.settings_of(name), command)
        for part in ("seats", "seats-graphs", "blocks-shed", "tuned-segments", "article"):
            for load in loads_in(RESULTS / part):
                if load.name.startswith("block-") and not load.name.endswith("-1"):
                    continue  # their prompts lie in the cache since the first round: a replay does not know that
                command = ready("H200", "0.25.1", (str(model), *load.flags))
                ledger, _ = command.replan(command.settings)
                yield Case(load.name, "H200", measured(load), planned_settings(ledger.settings, ledger.kv_plan), command)
    for known in rtx.ALL_RUNS if folder.is_dir() else ():
        card, words = RTX_SERVERS[known.name]
        command = ready(card, "0.19.0", (*words, "--max-model-len", "8192"))
        engines, limits = command.settings.data_parallel, known.settings
        limits = limits._replace(
            max_num_seqs=limits.max_num_seqs // engines, max_num_batched_tokens=limits.max_num_batched_tokens // engines
        )
        yield Case(known.name, card, rtx.load(known, folder), limits, command, is_stamped_inside=True)


def outcome(case: Case) -> Outcome:
    """The whole run replayed with the unfitted clock; several engines of a mixture of experts go in lockstep."""
    times = clock_for(case.command, case.limits).step_time
    if case.is_stamped_inside:
        times = times._replace(front_ns=0)
    trace, engines = case.run.trace, case.command.settings.data_parallel
    if engines > 1:
        engine_of, runs = replay_routed(trace, case.limits, times, RoutedEngines(engines, together=engines))
        found = merge_replays(trace, runs, engine_of)
    else:
        found = replay(trace, case.limits, times)
    error = error_of(case.run, found)
    assert error.mean_ttft is not None
    assert error.mean_tpot is not None
    return Outcome(duration_error(case.run, found), error.mean_ttft, error.mean_tpot)


def table(outcomes: Mapping[str, tuple[str, Outcome]], peer: Mapping[str, Sequence[float]]) -> list[str]:
    """Markdown."""
    head = "| run | card | duration | mean TTFT | mean TPOT | within | AISimulate: duration, TTFT, TPOT | |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for name, (card, found) in outcomes.items():
        errors = " | ".join(f"{100 * error:+.1f} %" for error in found)
        other = ", ".join(f"{100 * error:+.1f} %" for error in peer.get(name, ())) or "-"
        held = "chosen by" if name in CHOSEN_BY else "held back"
        remark = f"{held}; {REMARKS[name]}" if name in REMARKS else held
        within = ("in its band" if found.is_in_band else "no") if name == BY_BAND else "yes" if found.is_within else "no"
        lines.append(f"| {name} | {card} | {errors} | {within} | {other} | {remark} |")
    measured_cards = set(outcomes) - {BY_BAND}
    near = {name for name in measured_cards if outcomes[name][1].is_within}
    held_back = measured_cards - CHOSEN_BY
    counts = f"{len(near)} of {len(measured_cards)} runs on measured cards; of those held back {len(near & held_back)}"
    lines += ["", f"All three ({WANTED}): {counts} of {len(held_back)}."]
    both = [(outcomes[name][1], Outcome(*errors)) for name, errors in peer.items() if name in outcomes]
    for place, what in enumerate(("duration", "TTFT", "TPOT")):
        nearer = sum(abs(ours[place]) <= abs(theirs[place]) for ours, theirs in both)
        lines += [f"Nearer than AISimulate in {what}: {nearer} of {len(both)} runs."] if both else []
    return lines


def main(argv: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clock")
    parser.add_argument("--runs", type=Path, default=rtx.RUNS, help="the folder of the runs on RTX cards")
    parser.add_argument("--write", action="store_true", help="put the table into docs/step-time.md")
    asked = parser.parse_args(argv)
    if asked.write and not PEER.is_file():
        parser.error(f"without {PEER.relative_to(ROOT)} the table would lose a column: lab/peers/aisimulate.py makes it")
    outcomes = {case.name: (case.card, outcome(case)) for case in cases(asked.runs)}
    peer = json.loads(PEER.read_text(encoding="utf-8"))["errors"] if PEER.is_file() else {}
    lines = table(outcomes, peer)
    print("\n".join(lines))
    if asked.write:
        text, made = DOCS.read_text(encoding="utf-8"), "\n".join(lines)
        DOCS.write_text(placed(text, "<!-- clock -->", "<!-- end of clock -->", f"\n\n{made}\n\n", DOCS), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

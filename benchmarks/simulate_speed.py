"""How fast `plimsoll simulate` is, beside the other simulators on the same requests in the same run.

    python -m benchmarks.simulate_speed [--full] [--first-run] [--curve] [--traces FOLDER] [--write]

Compared are DynoSim (installed once into the cache folder, 0.5 GB) and the scheduler of vLLM itself (where
`python -m lab.engine.install` has put it). Rounds of the tools alternate, so that a busy moment of the machine hits them alike,
and medians are compared.
`--first-run` and `--curve` do only that part, `--full` takes more rounds, `--write` puts the tables into
docs/speed.md. The trace is Azure's conversations if FOLDER has them, and a synthetic one of the same size otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lab.engine import install as engine
from lab.engine.parser import FIRST_LIMIT_S, ParserDiedError
from lab.engine.scheduler import SchedulerProcess
from lab.peers import dynosim
from lab.peers.timed import timed
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import Trace
from plimsoll.units import format_count

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "speed.md"
TRACES = ROOT.parent / "shared" / "data" / "traces"
AZURE = "AzureLLMInferenceTrace_conv.csv.gz"
AZURE_LIKE = "synthetic:requests=19366,rate=5.5,prompt=1155,prompt_sigma=1.1,prompt_max=14000,output=211,output_max=1000"
FEW = 2000
"""What vLLM's scheduler, driven in Python, gets through in half a minute."""
ROOMY, TIGHT = EngineLimits(num_blocks=8192), EngineLimits(num_blocks=1025)
BEGIN = datetime.datetime(2023, 11, 16, tzinfo=datetime.UTC)
FIRST_RUN_PROMISED_S = 20.0
TIMES_DYNOSIM, TIMES_VLLM, PEAK_PROMISED_MB = 5, 500, 250
FLAT_TIMES = 2.0
CURVE = (10_000, 30_000, 100_000, 300_000, 1_000_000)
OURS, DYNOSIM, VLLM = "plimsoll", "DynoSim 1.4.2", "vLLM 0.32.0 scheduler"


class Work(NamedTuple):
    """Requests and the cache they are replayed in."""

    name: str
    trace: Trace
    settings: EngineLimits
    folder: Path

    @property
    def ours(self) -> Path:
        """The file that `plimsoll simulate` reads."""
        return self.folder / f"{self.name}.csv".replace(" ", "-")

    @property
    def dynosim(self) -> Path:
        """The file that DynoSim reads."""
        return self.folder / f"{self.name}.jsonl".replace(" ", "-")


class Round(NamedTuple):
    """One run of one tool."""

    simulation_s: float
    whole_s: float | None
    """From the start of the process to its end; None where there is no such command."""
    peak_mb: float
    preemptions: int | None
    steps: int | None


class Failed(Exception):
    """A tool did not run; the message is one line."""


class VllmScheduler(SchedulerProcess):
    """vLLM's own scheduler, asked about traces that take longer than a test's."""

    def replay(self, trace: Trace, settings: EngineLimits) -> Round:
        """One case; the time is that of the answer, so imports do not count."""
        self._limit_s = 4 * FIRST_LIMIT_S
        case = vllm_case(trace, settings)
        start = time.perf_counter()
        answer = self.run(case)
        taken = time.perf_counter() - start
        if not answer["ok"]:
            raise Failed(f"vLLM's scheduler: {answer['message']}")
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        done = answer["summary"]
        return Round(answer.get("seconds", taken), None, peak_kb / 1024, done["preemptions"], done["steps"])


def vllm_case(trace: Trace, settings: EngineLimits) -> dict[str, Any]:
    """The trace as `lab.engine.scheduler` takes it."""
    columns = (trace.arrival_ns, trace.prompt, trace.output, trace.priority)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    step_time = {name: value for name, value in StepTime()._asdict().items() if name != "by_tokens"}
    return {
        "requests": [
            {"arrival_ns": arrival, "prompt": prompt, "output": output, "priority": priority, "ids": []}
            for arrival, prompt, output, priority in rows
        ],
        "prefix_block": trace.prefix_block,
        "settings": settings.named,
        "step_time": step_time,
        "blocks": False,
    }


def csv_lines(trace: Trace) -> Iterator[str]:
    """The trace in the form of Azure's files, exact to the nanosecond."""
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for arrival, prompt, output in zip(trace.arrival_ns.tolist(), trace.prompt.tolist(), trace.output.tolist(), strict=True):
        seconds, ns = divmod(arrival, 10**9)
        yield f"{BEGIN + datetime.timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}.{ns:09d},{prompt},{output}"


def first(trace: Trace, count: int) -> Trace:
    """The first requests of a trace without shared beginnings."""
    cut = {name: getattr(trace, name)[:count] for name in ("arrival_ns", "prompt", "output", "priority")}
    return trace._replace(**cut, prefix_start=trace.prefix_start[: count + 1])


def works(trace: Trace, folder: Path) -> list[Work]:
    """The trace with its own arrivals in a roomy cache, and all at once in a tight one; whole, and the first few."""
    at_once = trace._replace(arrival_ns=trace.arrival_ns * 0)
    made = [
        Work("own arrivals", trace, ROOMY, folder),
        Work("all at once", at_once, TIGHT, folder),
        Work(f"own arrivals, first {FEW}", first(trace, FEW), ROOMY, folder),
        Work(f"all at once, first {FEW}", first(at_once, FEW), TIGHT, folder),
    ]
    for work in made:
        work.ours.write_text("\n".join(csv_lines(work.trace)) + "\n", encoding="utf-8")
        work.dynosim.write_text("\n".join(dynosim.trace_lines(work.trace)) + "\n", encoding="utf-8")
    return made


def load(folder: Path) -> tuple[Trace, str]:
    """Azure's conversations, or as many synthetic requests; and which of the two it is."""
    if (folder / AZURE).is_file():
        from plimsoll.simulate.trace_files import read_trace

        return read_trace(str(folder / AZURE)), "Azure's conversations of 2023"
    from plimsoll.simulate.traffic import generate, parse_synthetic

    return generate(parse_synthetic(AZURE_LIKE)), f"synthetic ones, {AZURE} not being there"


def simulate_command(trace: str, settings: EngineLimits) -> list[str]:
    """The command a user would type."""
    limits = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    words = [str(Path(sys.executable).with_name("plimsoll")), "simulate", trace, "--json"]
    for name in limits:
        words += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
    return words


def run_ours(trace: str, settings: EngineLimits) -> Round:
    """One `plimsoll simulate`."""
    done = timed(simulate_command(trace, settings))
    if done.exit_code != 0:
        raise Failed(f"plimsoll simulate ended with {done.exit_code}: {(done.err.strip() or 'no output').splitlines()[-1]}")
    told = json.loads(done.out)
    return Round(told["wall_seconds"], done.seconds, done.peak_mb, told["preemptions"], told["steps"])


def run_dynosim(work: Work) -> Round:
    """One DynoSim replay."""
    done = dynosim.run(work.dynosim, work.settings)
    if done.requests != work.trace.size:
        raise Failed(f"DynoSim finished {done.requests} of {work.trace.size} requests")
    return Round(done.simulation_s, done.whole_s, done.peak_mb, None, None)


def compare(work: Work, rounds: int, limit_s: float, *, with_dynosim: bool) -> dict[str, list[Round]]:
    """Rounds of both tools in turn; no further round once they have taken so long."""
    found: dict[str, list[Round]] = {OURS: [], DYNOSIM: []}
    start = time.monotonic()
    for _ in range(rounds):
        found[OURS].append(run_ours(str(work.ours), work.settings))
        if with_dynosim:
            found[DYNOSIM].append(run_dynosim(work))
        if time.monotonic() - start > limit_s:
            break
    return {tool: runs for tool, runs in found.items() if runs}


def middle(runs: Sequence[Round]) -> Round:
    """The medians of several rounds; counts are the same in all of them."""
    wholes = [run.whole_s for run in runs if run.whole_s is not None]
    return Round(
        median(run.simulation_s for run in runs),
        median(wholes) if wholes else None,
        median(run.peak_mb for run in runs),
        runs[0].preemptions,
        runs[0].steps,
    )


def per_second(requests: int, seconds: float | None) -> str:
    """A rate for the table."""
    return "-" if seconds is None else format_count(round(requests / seconds))


def comparison(work: Work, found: dict[str, list[Round]], preemptions: dict[str, int]) -> list[str]:
    """The rows of one work: its tools, and how often ours goes into each of them."""
    ours = middle(found[OURS])
    rows = []
    for tool, runs in found.items():
        one = middle(runs)
        ratio = whole_ratio = ""
        if tool != OURS:
            ratio = f"{one.simulation_s / ours.simulation_s:.1f}x"
            if one.whole_s is not None and ours.whole_s is not None:
                whole_ratio = f"{one.whole_s / ours.whole_s:.1f}x"
        lost = preemptions.get(tool, one.preemptions)
        cells = [
            work.name, tool, str(len(runs)), per_second(work.trace.size, one.simulation_s), ratio,
            per_second(work.trace.size, one.whole_s), whole_ratio, f"{one.peak_mb:.0f} MB",
            "-" if one.steps is None else format_count(one.steps), "-" if lost is None else format_count(lost),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


HEAD = """\
| requests | tool | rounds | requests/s, replay alone | ours is faster | requests/s, whole command | ours is faster | peak memory | steps | preemptions |
|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501 - one line of a table


def peers_ready() -> tuple[bool, bool]:
    """Whether DynoSim and vLLM's scheduler can be had; what cannot is named in one line."""
    with_dynosim = True
    try:
        dynosim.install()
    except (engine.InstallError, OSError) as failure:
        with_dynosim = False
        print(f"DynoSim is left out: {failure}")
    if not engine.installed():
        print("vLLM's scheduler is left out: `python -m lab.engine.install` installs it")
    return with_dynosim, engine.installed()


def compare_all(traces: Path, rounds: int, limit_s: float) -> tuple[list[str], list[str]]:
    """The table of all tools on all works, and which promises it breaks."""
    with_dynosim, with_vllm = peers_ready()
    broken: list[str] = []
    trace, what = load(traces)
    lines = [f"The requests: {what}, {format_count(trace.size)} of them.", "", HEAD]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        all_works = works(trace, Path(folder))
        run_ours(str(all_works[-1].ours), TIGHT)  # compiles, and brings files into memory, for both
        if with_dynosim:
            run_dynosim(all_works[-1])
        answers = vllm_rounds(all_works) if with_vllm else {}
        for work in all_works:
            found = compare(work, rounds, limit_s, with_dynosim=with_dynosim)
            if work.name in answers:
                found[VLLM] = [answers[work.name]]
            counted: dict[str, int] = {}
            if with_dynosim and work.trace.size <= FEW:
                counted[DYNOSIM] = dynosim.run(work.dynosim, work.settings, count_preemptions=True).preemptions or 0
            rows = comparison(work, found, counted)
            print("\n".join(rows), flush=True)
            lines += rows
            broken += promises_broken(work, found)
    return lines, broken


def promises_broken(work: Work, found: Mapping[str, Sequence[Round]]) -> list[str]:
    """What is promised of the replay alone, and not kept."""
    seconds = {tool: median(one.simulation_s for one in rounds) for tool, rounds in found.items() if rounds}
    broken = []
    for tool, times in ((DYNOSIM, TIMES_DYNOSIM), (VLLM, TIMES_VLLM)):
        if tool in seconds and seconds[tool] < times * seconds[OURS]:
            broken.append(f"{work.name}: {seconds[tool] / seconds[OURS]:.1f} times {tool}, promised are {times}")
    peak = max(one.peak_mb for one in found[OURS])
    if peak > PEAK_PROMISED_MB:
        broken.append(f"{work.name}: {peak:.0f} MB, promised are {PEAK_PROMISED_MB}")
    return broken


def vllm_rounds(all_works: Sequence[Work]) -> dict[str, Round]:
    """vLLM's scheduler on the short works, once each: it takes half a minute for one."""
    answers = {}
    with VllmScheduler() as scheduler:
        scheduler.replay(first(all_works[-1].trace, 2), ROOMY)  # waits for the imports
        for work in all_works:
            if work.trace.size <= FEW:
                answers[work.name] = scheduler.replay(work.trace, work.settings)
    return answers


def first_run() -> tuple[list[str], str]:
    """The time of a first run, with nothing compiled yet, beside the second; and in what it breaks its promise."""
    lines, broken = [], ""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "XDG_CACHE_HOME": folder}
        environ.pop("NUMBA_CACHE_DIR", None)
        command = simulate_command("synthetic:requests=1000", ROOMY)
        for name in ("first run", "second run"):
            done = timed(command, environ)
            if done.exit_code != 0:
                raise Failed(f"plimsoll simulate ended with {done.exit_code}: {done.err.strip()}")
            told = " / ".join(done.err.split("\n")).strip(" /") or "nothing"
            lines.append(f"- {name}: {done.seconds:.1f} s, {done.peak_mb:.0f} MB; it says: {told}")
            if name == "first run":
                lines[-1] += f" (promised: {FIRST_RUN_PROMISED_S:.0f} s)"
                if done.seconds > FIRST_RUN_PROMISED_S:
                    broken = f"the first run took {done.seconds:.0f} s: promised are {FIRST_RUN_PROMISED_S:.0f} s"
                elif not done.err.strip():
                    broken = "the first run does not say what it is doing"
    return lines, broken


def curve(sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    """Cost of a request over the length of the trace, each in a process of its own; and whether it is flat."""
    costs: list[float] = []
    lines = ["| requests | replay alone | per request | whole command | peak memory | steps |", "|---|---|---|---|---|---|"]
    for size in sizes:
        one = run_ours(f"synthetic:requests={size},rate=5,prompt=1000,output=200", ROOMY)
        cells = [
            format_count(size), f"{one.simulation_s:.2f} s", f"{one.simulation_s / size * 1e6:.0f} us",
            f"{one.whole_s or 0:.2f} s", f"{one.peak_mb:.0f} MB", format_count(one.steps or 0),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        costs.append(one.simulation_s / size)
    is_flat = max(costs) < FLAT_TIMES * min(costs)
    return lines, [] if is_flat else [f"a request costs {max(costs) / min(costs):.1f} times as much in one trace as in another"]


def machine() -> str:
    """What the figures were taken on."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def write(parts: Sequence[Sequence[str]]) -> None:
    """Put the tables between the marks of the page."""
    page = DOCS.read_text(encoding="utf-8")
    before, after = page.split("<!-- figures -->")[0], page.split("<!-- end -->")[1]
    text = "\n\n".join("\n".join(part) for part in ([f"Measured on {machine()}."], *parts))
    DOCS.write_text(f"{before}<!-- figures -->\n\n{text}\n\n<!-- end -->{after}", encoding="utf-8")


def main(argv: Sequence[str] = ()) -> None:
    """Print the tables, a peer that cannot be had being left out with one line; exit 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate_speed")
    parser.add_argument("--full", action="store_true", help="5 rounds instead of 3, also where one takes minutes")
    parser.add_argument("--first-run", action="store_true", help="only the first run of a fresh machine")
    parser.add_argument("--curve", action="store_true", help="only the cost over the length of the trace")
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"the folder that has {AZURE}")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/speed.md")
    asked = parser.parse_args(argv)
    some = asked.first_run or asked.curve
    parts: list[list[str]] = []
    broken: list[str] = []
    try:
        if not some:
            lines, broken = compare_all(asked.traces, *((5, 300.0) if asked.full else (3, 60.0)))
            parts.append(lines)
        if asked.first_run or not some:
            lines, slow = first_run()
            parts.append(lines)
            broken += [slow] if slow else []
            print("\n" + "\n".join(parts[-1]), flush=True)
        if asked.curve or not some:
            lines, uneven = curve(CURVE)
            parts.append(lines)
            broken += uneven
            print("\n" + "\n".join(parts[-1]), flush=True)
    except (Failed, dynosim.DynoSimError, ParserDiedError, OSError) as failure:
        raise SystemExit(str(failure).splitlines()[0]) from None
    if asked.write:
        write(parts)
    if broken:
        raise SystemExit("; ".join(broken))


if __name__ == "__main__":
    main(sys.argv[1:])

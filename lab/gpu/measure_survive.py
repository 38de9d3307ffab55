"""What containment (PLIMSOLL_SURVIVE=1) is worth and costs on a real GPU: every killer three ways, the overhead, certificates.

    PYTHONPATH=src python3 -m lab.gpu.measure_survive small --work DIR [--budget-s 560] [--done NAME,NAME]
    PYTHONPATH=src python3 -m lab.gpu.measure_survive 8b --work DIR
    PYTHONPATH=src python3 -m lab.gpu.measure_survive rest overhead trial --work DIR
    .venv/bin/python -m lab.gpu.measure_survive small overhead --work DIR --cpu --only NAME,NAME      # a dry run, no GPU

From the root of the repository, on a host where vLLM is importable; survive_on_host.sh has the calls. survive_runs.json lists
the runs of each stage in the order of their value: what does not fit into the budget is left for the next call, which leaves
out what has a result already (in --work, in lab/results/survive-h200, or named with --done). Servers start in waves: as many
on the GPU as fit, one under load at a time, the next wave importing vLLM meanwhile. Writes $OUT/survive-STAGES.json after
every run and $OUT/logs-STAGES.tar.gz; prints one line of JSON for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from lab.gpu.models import make_models
from lab.gpu.provoke_failures import HERE
from lab.gpu.survive_host import REACH_S, READY_S, ROOT, Host, Server
from lab.gpu.survive_plan import ON_CPU_FLAGS, Plan, Run
from lab.gpu.survive_play import Rounds, Row, play_overhead, play_rounds, play_trial
from lab.gpu.trim_log import trim

RESULTS = ROOT / "lab" / "results" / "survive-h200"
TRIALS = ROOT / "lab" / "certify" / "h200.json"
AHEAD = 10  # servers that import vLLM while a wave is played
END_S = 12.0  # kept back for stopping servers and writing
GRAPHS_GUESS_MIB = 900
Wave = list[tuple[Run, Server]]


class Campaign:
    """The stages of one call: starts servers, plays them, keeps what they found."""

    def __init__(self, host: Host, plan: Plan, out: Path, call: str, until: float, survive: str) -> None:
        self.host, self.plan, self.out, self.call, self.until, self.survive = host, plan, out, call, until, survive
        self.rows: list[Row] = []
        self.pair: dict[str, Server] = {}
        """The two servers of the overhead, once they are started."""
        self.fresh_mib = host.fresh_mib()

    # How a server is started

    def spawn(self, run: Run, cache: str) -> Server:
        """Start a run's server, which waits before the GPU; `cache` names its compile cache."""
        model = self.host.model_folder(self.plan.model(run))
        flags = self.plan.flags(run, model, self.fresh_mib, self.graphs_mib(run))
        env: dict[str, str] = {}
        if not self.host.is_cpu:
            env["VLLM_CACHE_ROOT"] = str(self.host.work / f"cache-{cache}")
            env |= self.plan.trials[run.trial].get("env", {}) if run.trial >= 0 else {"VLLM_USE_V2_MODEL_RUNNER": run.runner}
        if run.prefix:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if run.way != "plain":
            env["PLIMSOLL_SURVIVE"] = self.plan.killer(run).survive or self.survive
        if run.way == "door":
            env |= {"PLIMSOLL_ADMIT": "certified", "PLIMSOLL_CERTIFICATE": str(self.table(run, flags, model))}
        is_ours = run.way != "plain" or (run.trial < 0 and self.plan.killer(run).compacts)
        return Server(self.host, run.name, model, flags, env, is_ours=is_ours)

    def graphs_mib(self, run: Run) -> int:
        """What the graphs of such a server took in an earlier run of this call, with a little for what comes with them."""
        if run.mode != "graphs":
            return 0
        alike = [row.get("graphs_mib") for row in self.rows if str(row.get("combination")) == run.combination]
        return max((int(mib) for mib in alike if mib), default=GRAPHS_GUESS_MIB) + 150

    def table(self, run: Run, flags: list[str], model: Path) -> Path:
        """The file of the door's table: what `plan --certify --table` wrote for this command, or else by hand."""
        made = HERE / "survive_tables" / f"{run.killer}-{run.shape}.json"
        if made.is_file() and not self.host.is_cpu:
            return made
        path = self.host.work / f"table-{run.name}.json"
        path.write_text(json.dumps(self.plan.table(run, flags, model, self.fresh_mib)), encoding="utf-8")
        return path

    def spawn_wave(self, left: deque[Run]) -> Wave:
        """Start the next servers that can be on the GPU together.

        No two of them share a compile cache; those of later waves find the caches of earlier ones, whose servers have ended.
        """
        wave: Wave = []
        for number, run in enumerate(self.plan.next_wave(left, self.fresh_mib)):
            wave.append((run, self.spawn(run, f"{run.combination}-{number if run.trial < 0 else run.name}")))
        return wave

    # Waves

    def play_all(self, runs: list[Run], *, wants_overhead: bool) -> None:
        """Every run in its order, as far as time goes, and the overhead at the end, for which time is kept."""
        end = self.until
        if wants_overhead:
            self.until -= float(self.plan.content["overhead"]["needs_s"])
        try:
            self.play_runs(deque(runs), wants_overhead=wants_overhead)
        finally:
            self.until = end
        if wants_overhead:
            self.overhead()

    def play_runs(self, left: deque[Run], *, wants_overhead: bool) -> None:
        """Wave after wave; the servers of the next ones import vLLM meanwhile."""
        begun: deque[Wave] = deque()

        def spawn_ahead() -> None:
            while left and not self.host.is_cpu and sum(map(len, begun)) < AHEAD:
                begun.append(self.spawn_wave(left))
            if not left and wants_overhead and not self.host.is_cpu:
                self.spawn_pair()

        try:
            while left or begun:
                if not begun:
                    begun.append(self.spawn_wave(left))
                if not self.play_wave(begun.popleft(), spawn_ahead):
                    break
        finally:
            for run, server in (pair for waiting in begun for pair in waiting):
                print(json.dumps({"name": run.name, "left": "out of time"}), flush=True)
                server.end()

    def play_wave(self, wave: Wave, spawn_ahead: Callable[[], None]) -> bool:
        """Open the gates, wait for all, play one after the other; False when there is no time left."""
        try:
            needed_s = max(self.plan.ready_seconds(run) for run, _ in wave) + self.plan.seconds(wave[0][0])
            for _, server in wave:
                server.wait_gate(min(time.monotonic() + REACH_S, self.until))
            if time.monotonic() + needed_s > self.until:
                return False
            if self.plan.is_alone(wave[0][0]):
                self.host.leave_alone()
            else:
                self.host.ballast()  # takes seconds to start
            self.host.wait_empty()
            for _, server in wave:
                server.open()
            limit = min(time.monotonic() + READY_S, self.until)
            for run, server in wave:
                if not server.wait_ready(limit):
                    server.end()
                    self.keep(run, server, {"ready": False, "wrong": server.text()[-1500:]}, time.monotonic())
            spawn_ahead()
            for run, server in wave:
                if server.process.poll() is None and time.monotonic() + self.plan.seconds(run) < self.until:
                    self.play_one(run, server)
        finally:
            names = {row["name"] for row in self.rows}
            for run, server in wave:
                if run.name not in names:
                    print(json.dumps({"name": run.name, "left": "out of time"}), flush=True)
                server.end()
            self.write_logs()
        return True

    def play_one(self, run: Run, server: Server) -> None:
        """One run, whatever happens in it."""
        began = time.monotonic()
        row: Row = {"ready": True, "wrong": None}
        try:
            if run.trial >= 0:
                row |= play_trial(self.host, server, self.plan.trials[run.trial], self.until)
            else:
                rounds = Rounds(self.host, server, self.plan.killer(run), self.host.work / "ids", run.combination)
                rounds.row = row
                play_rounds(rounds, run.way, run.number)
        except Exception:  # the next run must get its turn
            row["wrong"] = traceback.format_exc()[-1500:]
        finally:
            self.host.release(server)
            server.end()
        self.keep(run, server, row, began)

    # What is kept

    def keep(self, run: Run, server: Server, row: Row, began: float) -> None:
        """Add a run's row to the results, write them, print its line."""
        whole = {
            "name": run.name, "killer": run.killer, "shape": run.shape, "mode": run.mode, "runner": run.runner, "way": run.way,
            "number": run.number, "combination": run.combination, "flags": server.flags, "reach_s": round(server.reach_s, 1),
            "ready_s": round(server.ready_s, 1), "took_s": round(time.monotonic() - began, 1), **row,
        }  # fmt: skip
        self.rows.append(whole)
        self.write()
        print(json.dumps(headline(whole)), flush=True)

    def write(self) -> None:
        """Put the results where they are fetched from, and the names of what is done where the next call looks."""
        fresh = self.out / f"survive-{self.call}.new"
        fresh.write_text(json.dumps({"fresh_mib": self.fresh_mib, "rows": self.rows}, default=str), encoding="utf-8")
        fresh.rename(self.out / f"survive-{self.call}.json")
        done = self.host.work / "done.json"
        names = set(json.loads(done.read_text(encoding="utf-8"))) if done.is_file() else set()
        names |= {row["name"] for row in self.rows if row["wrong"] is None and row["ready"]}
        done.write_text(json.dumps(sorted(names)), encoding="utf-8")

    def write_logs(self) -> None:
        """One archive of the trimmed logs of this call."""
        texts = self.host.work / "trimmed"
        texts.mkdir(exist_ok=True)
        names = {row["name"] for row in self.rows}
        with tarfile.open(self.out / f"logs-{self.call}.tar.gz", "w:gz", compresslevel=6) as archive:
            for path in sorted((self.host.work / "logs").glob("*.log")):
                if path.stem.removesuffix("-with").removesuffix("-without") in names:
                    kept = texts / path.name
                    kept.write_text(trimmed(path), encoding="utf-8")
                    archive.add(kept, path.name)

    # What it costs where nothing fails

    def spawn_pair(self) -> None:
        """Start two servers, one with containment and one without, everything else the same; they wait before the GPU."""
        spec = self.plan.content["overhead"]
        folder = self.host.model_folder(str(self.plan.content["shapes"][spec["shape"]]["model"]))
        flags = list(ON_CPU_FLAGS) if self.host.is_cpu else list(spec["flags"])
        for name in (name for name in ("with", "without") if name not in self.pair):
            env = {} if self.host.is_cpu else {"VLLM_CACHE_ROOT": str(self.host.work / f"cache-overhead-{name}")}
            if name == "with":
                env["PLIMSOLL_SURVIVE"] = self.survive
            self.pair[name] = Server(self.host, f"overhead-{name}", folder, flags, env, is_ours=True)

    def overhead(self) -> None:
        """Pairs of the same load on both servers; what was measured is kept whatever happens."""
        spec = self.plan.content["overhead"]
        cpu = {"clients": 6, "prompt": [16, 48], "output": [16, 32], "seconds": 4, "pairs": 2}
        began = time.monotonic()
        row: Row = {"ready": True, "wrong": None}
        try:
            self.spawn_pair()
            for server in self.pair.values():
                server.wait_gate(min(self.until, began + REACH_S))
            self.host.wait_empty()
            for server in self.pair.values():
                server.open()
            for server in self.pair.values():
                assert server.wait_ready(min(self.until, time.monotonic() + READY_S)), server.text()[-1500:]
            row["start_s"] = {name: round(server.reach_s + server.ready_s, 1) for name, server in self.pair.items()}
            play_overhead(self.host, self.pair, spec | (cpu if self.host.is_cpu else {}), self.until, row)
        except Exception:
            row["wrong"] = traceback.format_exc()[-1500:]
        finally:
            for server in self.pair.values():
                server.end()
        run = Run("overhead", "none", spec["shape"], "graphs", "", "both", 1)
        self.keep(run, self.pair["with"], row, began)
        self.write_logs()


def trimmed(path: Path) -> str:
    """A log as it is kept, at most its first and last half megabyte."""
    text = trim(
        path.read_text(encoding="utf-8", errors="replace"), places=((str(path.parents[1]), "/work"), (str(ROOT), "/repo"))
    )
    return text if len(text) < 600_000 else text[:300_000] + "\n[...]\n" + text[-300_000:]


def headline(row: Row) -> Row:
    """The few figures of a run that are worth printing."""
    found: Row = {name: row[name] for name in ("name", "ready", "died", "reach_s", "ready_s", "took_s") if name in row}
    for name in ("undisturbed", "round", "after", "again", "later"):
        if name in row:
            part = row[name]
            ends = "/".join(str(part[end]) for end in ("served", "refused", "aborted", "lost"))
            found[name] = [ends, part["seconds"], part["still_s"], part["contained"]]
            found |= {f"{name}_tokens": part[key] for key in ("tokens_as_undisturbed",) if key in part}
    for name in ("undisturbed_twice", "steps", "squeeze", "inside_failed", "died_inside", "died_outside", "same_answers"):
        if name in row:
            found[name] = row[name]
    if "told" in row:
        found["armed"] = row["told"]["armed"]
    if "result" in row:
        found["result"] = row["result"]["in_words"]
    if row["wrong"]:
        found["wrong"] = str(row["wrong"])[-500:]
    return found


def names_done(work: Path, said: str, kept: Path | None) -> set[str]:
    """Runs that have a result: on this host, among the kept results, or named."""
    done = {name for name in said.split(",") if name}
    if (work / "done.json").is_file():
        done |= set(json.loads((work / "done.json").read_text(encoding="utf-8")))
    for path in [] if kept is None else sorted(kept.glob("survive-*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        done |= {row["name"] for row in rows if row["ready"] and row["wrong"] is None}
    return done


def main(arguments: list[str]) -> int:
    """Play the stages asked for, in their order."""
    parser = argparse.ArgumentParser(description="Measure containment on this host's GPU.")
    parser.add_argument("stages", nargs="+", help="stages of --runs, `overhead`, `trial`")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=560.0, help="be done after this many seconds")
    parser.add_argument("--done", default="", help="names of runs to leave out, with commas between them")
    parser.add_argument("--anew", action="store_true", help="make also what has a result among the kept ones")
    parser.add_argument("--only", default="", help="names of runs, with commas between them; all of the stages if not given")
    parser.add_argument("--survive", default="1", choices=("1", "unproven"), help="what PLIMSOLL_SURVIVE is set to")
    parser.add_argument("--runs", type=Path, default=HERE / "survive_runs.json")
    parser.add_argument("--cpu", action="store_true", help="a dry run on the lab's CPU engine")
    options = parser.parse_args(arguments)
    content = json.loads(options.runs.read_text(encoding="utf-8"))
    if unknown := [stage for stage in options.stages if stage not in (*content["stages"], "overhead", "trial")]:
        parser.error(f"no stage {unknown[0]} in {options.runs}")
    until = time.monotonic() + options.budget_s - END_S
    work = options.work.absolute()
    out = Path(os.environ.get("OUT", str(work / "out"))).absolute()
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    host = Host(work, is_cpu=options.cpu)
    trials = json.loads(TRIALS.read_text(encoding="utf-8")) if TRIALS.is_file() else []
    plan = Plan(content, trials, is_cpu=options.cpu)
    only = {name for name in options.only.split(",") if name}
    done = names_done(work, options.done, None if options.anew else RESULTS)
    stages = [stage for stage in options.stages if stage != "overhead"]
    wants_overhead = "overhead" in options.stages and "overhead" not in done
    runs = [run for stage in stages for run in plan.runs(stage) if run.name not in done and (not only or run.name in only)]
    if not options.cpu:
        models = json.loads((HERE / "failure_runs.json").read_text(encoding="utf-8"))["models"]
        shape = content["shapes"][content["overhead"]["shape"]]["model"]
        needed = {plan.model(run) for run in runs} | ({str(shape)} if wants_overhead else set())
        make_models({name: whole_model(models, name) for name in sorted(needed)}, work / "models")
    campaign = Campaign(host, plan, out, "-".join(options.stages), until, options.survive)
    try:
        campaign.play_all(runs, wants_overhead=wants_overhead)
    finally:
        host.leave_alone()
        campaign.write_logs()
    return int(any(row["wrong"] is not None for row in campaign.rows))


def whole_model(models: Row, name: str) -> Row:
    """A model's entry with what it inherits, so that only the models that are served are written."""
    own = dict(models[name])
    like = own.pop("like", None)
    return (whole_model(models, like) if like else {}) | own


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

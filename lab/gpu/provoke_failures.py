"""Makes a real vLLM fail in every way the doctor knows, one run after another, and keeps what each failure leaves behind.

    python3 -m lab.gpu.provoke_failures --work DIR [--only NAME,NAME] [--until SECONDS] [--resume] [--ahead 3]

From the repository's root, on a host with a GPU and vLLM. `failure_runs.json` lists the runs, README.md says what an entry may
hold. Importing vLLM takes longer than failing, so the next servers are started early and wait at a gate before they touch the
GPU. Writes to DIR, for each run: NAME.log, NAME.trimmed.log, nvidia-smi before and at the failure, metrics pages, snapshots;
and results.json. After each run, results.json and failures.tar.gz (all of it) are put into $OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from lab.gpu.load import Load, ask
from lab.gpu.models import make_models
from lab.gpu.trim_log import trim

HERE = Path(__file__).resolve().parent
PORT = 8123
FREE_MIB = 142629  # what a worker finds free on an H200, should the question fail
REACH_S = 200.0  # to the gate: the first start on a machine reads everything from a cold disk
LIMIT_S = 90.0  # of one run, from its gate on
NO_FAILURE_S = 8.0  # a server that shows no failure by then will not end by itself
GATED_MODULE = "vllm.v1.worker.gpu_worker"  # imported by the worker, and first there
FAILURE = re.compile(
    r"out of memory|EngineCore failed to start|EngineCore encountered a fatal error|EngineDeadError|Error in memory"
)
Entry = dict[str, Any]

# Found by every Python below the server; a sitecustomize that it hides still runs.
GATE = f'''
import importlib.machinery, importlib.util, os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
class Gate:
    @staticmethod
    def find_spec(name, path=None, target=None):
        gate = os.environ.get("PLIMSOLL_LAB_GATE")
        if name == "{GATED_MODULE}" and gate:
            open(gate + ".reached", "w").close()
            while not os.path.exists(gate) and os.getppid() != 1:
                time.sleep(0.05)
        return None
sys.meta_path.insert(0, Gate)
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != here])
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
'''


def smi(*query: str) -> str:
    """What nvidia-smi says; nothing where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def used_mib() -> int:
    """Memory in use on the first GPU."""
    said = smi("--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
    return int(said[0]) if said and said[0].isdigit() else 0


class Ballast:
    """A neighbour on the same GPU; see ballast.py."""

    def __init__(self, log: Path) -> None:
        self.log = log
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process: subprocess.Popen[str] = subprocess.Popen([sys.executable, str(HERE / "ballast.py")], **pipes)  # type: ignore[call-overload]

    def tell(self, command: str) -> Entry:
        """Give one command and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(line)
        return dict(json.loads(line or '{"wrong": "the ballast is gone"}'))

    def end(self) -> None:
        """Give everything back."""
        self.process.kill()
        self.process.wait()


class Run:
    """One server and its neighbour, from the start to what it left behind."""

    def __init__(self, entry: Entry, work: Path, port: int, free_mib: int) -> None:
        self.entry, self.work, self.port, self.name = entry, work, port, str(entry["name"])
        self.log = work / f"{self.name}.log"
        self.gate = work / "gates" / self.name
        for old in (self.gate, self.gate.with_name(self.gate.name + ".reached")):
            old.unlink(missing_ok=True)
        self.offset = 0
        self.events = [list(event) for event in entry.get("on", [])]
        self.reached = self.failure_seen = self.ready = False
        self.free_at_ready_mib: int | None = None
        self.notes: list[Any] = []
        self.loads: list[Load] = []
        self.ballast = Ballast(work / f"{self.name}.ballast.jsonl") if self._needs_ballast() else None
        args = list(entry.get("args", []))
        if "kv_leave_mib" in entry:
            args += ["--kv-cache-memory-bytes", str((free_mib - entry["kv_leave_mib"]) << 20)]
        if "kv_like" in entry:
            args += ["--kv-cache-memory-bytes", str(all_but(entry["keep_free_mib"], work, entry["kv_like"]))]
        self.command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(work / "models" / entry["model"]),
        ]
        self.command += [
            "--served-model-name",
            "m",
            "--load-format",
            "dummy",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *args,
        ]
        path = os.pathsep.join(filter(None, [str(work / "gates" / "hook"), os.environ.get("PYTHONPATH", "")]))
        env = os.environ | {"PYTHONPATH": path, "PLIMSOLL_LAB_GATE": str(self.gate)} | entry.get("env", {})
        with self.log.open("wb") as said:
            self.server = subprocess.Popen(
                self.command, stdout=said, stderr=subprocess.STDOUT, env=env, cwd=work, start_new_session=True
            )

    def _needs_ballast(self) -> bool:
        return "ballast" in self.entry or any(step[0] == "ballast" for step in self.entry.get("then", []))

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def watch(self) -> None:
        """Look at what was printed since the last look: set off what waits for a line, photograph the GPU at the failure."""
        with self.log.open("rb") as stream:
            stream.seek(max(0, self.offset - 200))  # a line may have been half written
            new = stream.read()
            self.offset = stream.tell()
        fresh = new.decode(errors="replace")
        for event in [event for event in self.events if event[0] in fresh]:
            self.events.remove(event)
            assert self.ballast is not None, "only the neighbour acts on lines"
            self.notes.append(self.ballast.tell(event[1]))
        if not self.failure_seen and FAILURE.search(fresh):
            self.failure_seen = True
            (self.work / f"{self.name}.smi-at-failure.txt").write_text(smi(), encoding="utf-8")

    def until(self, limit: float) -> bool:
        """Wait until the server is ready; False if it ended or took too long."""
        while time.monotonic() < limit and self.server.poll() is None:
            self.watch()
            if ask(self.port, "GET", "/health")[0] == 200:
                return True
            time.sleep(0.05)
        return False

    def play(self, seconds: float) -> None:
        """Open the gate once the server stands before it, and do what the entry says."""
        reached = self.gate.with_name(self.gate.name + ".reached")
        self._wait(lambda: reached.exists() or self.server.poll() is not None, REACH_S)
        self.reached = reached.exists()
        limit = time.monotonic() + seconds
        (self.work / f"{self.name}.smi-before.txt").write_text(smi(), encoding="utf-8")
        for command in self.entry.get("ballast", []):
            assert self.ballast is not None
            self.notes.append(self.ballast.tell(command))
        self.gate.touch()
        self.ready = self.until(limit)
        if self.ready:
            (self.work / f"{self.name}.smi-ready.txt").write_text(smi(), encoding="utf-8")
            said = smi("--query-gpu=memory.free", "--format=csv,noheader,nounits").split()
            self.free_at_ready_mib = int(said[0]) if said and said[0].isdigit() else None
            for step in self.entry.get("then", []):
                if time.monotonic() > limit:
                    self.notes.append("out of time before " + step[0])
                    break
                self._step(step[0], step[1])
        self.watch()

    def _step(self, verb: str, what: Any) -> None:
        if verb == "metrics":
            status, page = ask(self.port, "GET", "/metrics")
            (self.work / f"{self.name}.metrics-{what}.txt").write_text(
                page if status == 200 else f"# {page}\n", encoding="utf-8"
            )
        elif verb == "load":
            self.loads.append(Load(self.port, what))
            if not what.get("background"):
                self._wait(lambda: not self.loads[-1].busy(), 60)
        elif verb == "wait":
            self._wait(lambda: not self.loads[-1].busy(), what)
        elif verb == "sleep":
            self._wait(lambda: False, what)
        elif verb == "ballast":
            assert self.ballast is not None
            self.notes.append(self.ballast.tell(what))
        elif verb == "snapshot":
            target = self.work / f"{self.name}-{what}.pickle.gz"
            call = {"method": "write_memory_snapshot", "args": [str(target)]}
            self.notes.append(ask(self.port, "POST", "/collective_rpc", call, 60))
        elif verb == "post":
            path, body = what if isinstance(what, list) else [what, None]
            text = json.dumps(body).replace("/models/", f"{self.work}/models/")  # as the trimmed log shows them
            self.notes.append(ask(self.port, "POST", path, json.loads(text), 60))
        elif verb == "kill_engine":
            found = re.search(r"\(EngineCore\S* pid=(\d+)\)", self.text())
            if found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(found[1]), signal.SIGKILL)
            self.notes.append(f"killed {found[1]}" if found else "no engine to kill")
        elif verb == "stop":
            self.server.send_signal(signal.SIGTERM)
            self._wait(lambda: self.server.poll() is not None, what)
        else:
            assert verb == "exit", verb
            patience = time.monotonic() + NO_FAILURE_S
            self._wait(lambda: self.server.poll() is not None or (time.monotonic() > patience and not self.failure_seen), what)

    def _wait(self, done: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not done():
            self.watch()
            time.sleep(0.05)

    def end(self) -> Entry:
        """Stop everything that belongs to this run; its row of the results."""
        ended_itself = self.server.poll() is not None
        if self.ballast is not None:
            self.ballast.end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        code = self.server.wait()
        text = self.text()
        places = ((str(self.work / "models"), "/models"), (str(self.work), "/work"), (str(HERE.parents[1]), "/repository"))
        (self.work / f"{self.name}.trimmed.log").write_text(trim(text, socket.gethostname(), places), encoding="utf-8")
        seen = {pattern: re.search(pattern, text) is not None for pattern in self.entry["see"]}
        return {
            "name": self.name, "expect": self.entry["expect"], "as_expected": all(seen.values()), "seen": seen,
            "exit_code": code if ended_itself else None, "killed_by_us": not ended_itself, "model": self.entry["model"],
            "args": self.command[self.command.index("--load-format") :], "env": self.entry.get("env", {}),
            "reached_gpu": self.reached, "ready": self.ready, "free_at_ready_mib": self.free_at_ready_mib,
            "notes": self.notes, "loads": [load.row() for load in self.loads],
        }  # fmt: skip


def wait_for_gpu(baseline_mib: int) -> None:
    """Wait until the last run's memory is back."""
    end = time.monotonic() + 25
    while time.monotonic() < end and used_mib() > baseline_mib + 300:
        time.sleep(0.3)


def all_but(keep_mib: int, work: Path, like: str) -> int:
    """The cache of another run and what was free beside it, less so much: for what cannot be told from a plan to the MiB."""
    row = next(row for row in json.loads((work / "results.json").read_text(encoding="utf-8")) if row["name"] == like)
    had = int(row["args"][row["args"].index("--kv-cache-memory-bytes") + 1])
    return had + ((int(row["free_at_ready_mib"]) - keep_mib) << 20)


def free_mib() -> int:
    """What a process that has just opened the GPU finds free."""
    try:
        neighbour = Ballast(Path(os.devnull))
        said = neighbour.tell("free")
        neighbour.end()
        return int(said["free_mib"])
    except (KeyError, ValueError, OSError):
        return FREE_MIB


def publish(results: list[Entry], work: Path) -> None:
    """Put the results and one archive of everything where they are fetched from."""
    (work / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    out = Path(os.environ.get("OUT", str(work / "out")))
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    fresh = out / "failures.new"
    with tarfile.open(fresh, "w:gz", compresslevel=4) as archive:
        for path in sorted(work.iterdir()):
            if path.is_file():
                archive.add(path, path.name)
    fresh.rename(out / "failures.tar.gz")


def play_one(run: Run, baseline: int) -> Entry:
    """One run, whatever happens in it."""
    started = time.monotonic()
    wrong = None
    try:
        wait_for_gpu(baseline)
        run.play(run.entry.get("limit", LIMIT_S))
    except Exception as error:  # the next run must get its turn
        wrong = repr(error)[:500]
    row = run.end()
    return row | {"seconds": round(time.monotonic() - started, 1), "wrong": wrong}


def play_all(entries: list[Entry], results: list[Entry], work: Path, until: float, ahead: int) -> None:
    """Every run in its order, the next ones warming up meanwhile."""
    baseline, free, waiting = used_mib(), free_mib(), list(enumerate(entries))
    print(f"{free} MiB free, {baseline} in use before", flush=True)
    begun: list[Run] = []
    try:
        while waiting or begun:
            while waiting and len(begun) < 1 + ahead:
                if begun and "kv_like" in waiting[0][1]:
                    break  # what it is like has not been played yet
                number, entry = waiting.pop(0)
                if not any(row["name"] == entry.get("unless") and row["as_expected"] for row in results):
                    begun.append(Run(entry, work, PORT + number, free))
            if not begun or time.monotonic() > until:
                break
            run = begun.pop(0)
            if any(row["name"] == run.entry.get("unless") and row["as_expected"] for row in results):
                run.end()
                continue
            results.append(play_one(run, baseline))
            print(
                json.dumps({key: results[-1][key] for key in ("name", "as_expected", "seen", "exit_code", "seconds", "wrong")}),
                flush=True,
            )
            publish(results, work)
    finally:
        for run in begun:
            run.end()
            run.log.unlink(missing_ok=True)
            (work / f"{run.name}.trimmed.log").unlink(missing_ok=True)


def chosen(entries: list[Entry], only: str, done: list[Entry]) -> list[Entry]:
    """The entries asked for that have no result yet."""
    names = {name for name in only.split(",") if name}
    unknown = names - {entry["name"] for entry in entries}
    assert not unknown, f"no such run: {', '.join(sorted(unknown))}"
    have = {row["name"] for row in done}
    return [entry for entry in entries if entry["name"] not in have and (not names or entry["name"] in names)]


def main(arguments: list[str]) -> int:
    """Read what to do and do it."""
    parser = argparse.ArgumentParser(description="Provoke the failures of failure_runs.json on this host's GPU.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=HERE / "failure_runs.json")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--until", type=float, default=500.0, help="start no run after this many seconds")
    parser.add_argument("--ahead", type=int, default=3, help="servers that warm up while one runs")
    parser.add_argument("--resume", action="store_true", help="leave out what --work holds results of")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.until
    work = options.work.absolute()
    (work / "gates" / "hook").mkdir(parents=True, exist_ok=True)
    (work / "gates" / "hook" / "sitecustomize.py").write_text(GATE, encoding="utf-8")
    shutil.copy(HERE / "snapshot_extension.py", work / "gates" / "hook")
    plan = json.loads(options.runs.read_text(encoding="utf-8"))
    make_models(plan["models"], work / "models")
    kept = work / "results.json"
    results: list[Entry] = json.loads(kept.read_text(encoding="utf-8")) if options.resume and kept.is_file() else []
    play_all(chosen(plan["runs"], options.only, results), results, work, until, options.ahead)
    publish(results, work)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

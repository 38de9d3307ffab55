"""Servers for measure_survive.py: many on one GPU, or one after the other on the lab's CPU engine for a dry run.

A server is started early and waits at a gate before it touches the GPU (see provoke_failures.py): importing vLLM takes longer
than the rest of its start. Memory is taken away from it by a neighbour on the GPU (ballast.py); on the CPU engine steps of
more than so many tokens fail instead (lab/survive/faults).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.gpu.inside_server import INSIDE, TOKEN, ask
from lab.gpu.provoke_failures import FREE_MIB, GATE, HERE, Ballast, smi, used_mib
from lab.gpu.trim_log import trim

ROOT = HERE.parents[1]
LIVELY = HERE / "lively_weights"
FAULTS = ROOT / "lab" / "survive" / "faults"
REACH_S = 240.0  # to the gate: the first start on a machine reads everything from a cold disk
READY_S = 150.0  # from the gate on: with compilation, on cores that others compile on
END_S = 4.0
NICE = 10  # while it waits for its turn
CONTAINED = re.compile(
    r"plimsoll: survive: contained failure \d+: a step of (\d+) tokens in (\d+) requests ran out of device memory"
    r" at (\w+)[^;\n]*; (\d+) requests preempted, (\d+) tokens to recompute; steps of at most (\d+) tokens"
)
STEPS = re.compile(r"plimsoll: survive: [^\n]*\bsteps of at most (\d+) tokens")
ARMED = re.compile(r"plimsoll: survive: ((?:not )?armed\b[^\n]*)")
OTHERS = {
    "aborts": re.compile(r"plimsoll: survive: aborted request"),
    "storms": re.compile(r"plimsoll: survive: (?:storm|gave up)"),
    "given_up": re.compile(r"plimsoll: survive: (?:gave up|cannot contain)[^\n]*"),
}
GRAPHS = re.compile(r"Graph capturing finished in \S+ secs?, took ([\d.]+) GiB")
DEAD = re.compile(r"torch\.OutOfMemoryError: CUDA out of memory|EngineDeadError")


def write_hook(work: Path) -> None:
    """Write the gate, and plimsoll's entry points: the host has no installed plimsoll, only its source."""
    (work / "gates" / "hook").mkdir(parents=True, exist_ok=True)
    (work / "gates" / "hook" / "sitecustomize.py").write_text(GATE, encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = work / "site" / "plimsoll-0.dist-info"
    home.mkdir(parents=True, exist_ok=True)
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: plimsoll\nVersion: 0\n", encoding="utf-8")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in names.items()), ""]
    (home / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def our_plugins() -> list[str]:
    """The names under which vLLM finds what is ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted({name for group, names in project["entry-points"].items() if group.startswith("vllm.") for name in names})


class Host:
    """The machine: how a server is started on it, and how memory is taken from one."""

    def __init__(self, work: Path, *, is_cpu: bool) -> None:
        self.work, self.is_cpu = work, is_cpu
        self.model_name = "tiny" if is_cpu else "m"
        write_hook(work)
        self.baseline_mib = 0 if is_cpu else used_mib()
        self._ballast: Ballast | None = None
        self._port = 8123

    def next_port(self) -> int:
        """A port that no server of ours has had."""
        while True:
            self._port += 1
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) != 0:
                    return self._port

    def model_folder(self, name: str) -> Path:
        """The folder of a model; the CPU engine has but one."""
        if self.is_cpu:
            from lab.engine.install import model_home

            return model_home()
        return self.work / "models" / name

    def command(self, model: Path, port: int, flags: Sequence[str]) -> list[str]:
        """The command line of a server with dummy weights."""
        if self.is_cpu:
            from lab.engine.server import serve_command

            return serve_command(port, flags)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", self.model_name, "--load-format", "dummy", "--host", "127.0.0.1"]
        return [*command, "--port", str(port), *flags]

    def environment(self, *, is_ours: bool) -> dict[str, str]:
        """Our environment with the gate, the lively weights and, where wanted, everything of plimsoll."""
        if self.is_cpu:
            from lab.engine.server import clean_environment

            env = clean_environment()
        else:
            quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
            kept = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_")}
            env = quiet | {"VLLM_SERVER_DEV_MODE": "1"} | kept
        paths = [self.work / "gates" / "hook", LIVELY]
        plugins = ["lively_weights"]
        if is_ours:
            paths += [self.work / "site", ROOT / "src"]
            plugins += our_plugins()
        if self.is_cpu:
            paths.append(FAULTS)
            plugins.append("survive_faults")
        env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [env.get("PYTHONPATH")])])
        return env | {"VLLM_PLUGINS": ",".join(plugins), "PYTHONUNBUFFERED": "1"}

    # Memory

    def free_mib(self) -> int:
        """What is free on the GPU, by nvidia-smi."""
        said = smi("--query-gpu=memory.free", "--format=csv,noheader,nounits").split()
        return int(said[0]) if said and said[0].isdigit() else FREE_MIB

    def squeeze(self, server: Server, leave_mib: int, fault: Mapping[str, Any]) -> dict[str, Any]:
        """Leave so little on the GPU; on a CPU, let the steps fail that the fault names."""
        if self.is_cpu:
            server.faults.write_text(json.dumps({"faults": [fault]}), encoding="utf-8")
            return {"fault": dict(fault)}
        ballast = self.ballast()
        ballast.tell("free")
        said: dict[str, Any] = {}
        for _ in range(12):  # what the last server held may still be on its way back
            said = ballast.tell(f"leave {leave_mib}")
            time.sleep(0.25)
            if self.free_mib() <= leave_mib + 100:
                break
        return {name: said.get(name) for name in ("held_mib", "free_mib", "wrong")} | {"smi_free_mib": self.free_mib()}

    def release(self, server: Server) -> None:
        """Give back what `squeeze` took."""
        if self.is_cpu:
            server.faults.write_text('{"faults": []}', encoding="utf-8")
        elif self._ballast is not None:
            self._ballast.tell("free")

    def ballast(self) -> Ballast:
        """The neighbour, with its context open."""
        if self._ballast is None:
            self._ballast = Ballast(self.work / "ballast.log")
            self._ballast.tell("free")
        return self._ballast

    def fresh_mib(self) -> int:
        """What a process that has just opened an empty GPU finds free."""
        try:
            return FREE_MIB if self.is_cpu else int(self.ballast().tell("free")["free_mib"])
        except (KeyError, ValueError, OSError):
            return FREE_MIB

    def leave_alone(self) -> None:
        """End the neighbour: a server that wants the whole card gets its context's memory too."""
        if self._ballast is not None:
            self._ballast.end()
            self._ballast = None

    def wait_empty(self, seconds: float = 20.0) -> None:
        """Wait until what ended servers held is back."""
        end = time.monotonic() + seconds
        while not self.is_cpu and time.monotonic() < end and used_mib() > self.baseline_mib + 900:
            time.sleep(0.2)


class Server:
    """One server from its start to its log."""

    def __init__(
        self, host: Host, name: str, model: Path, flags: Sequence[str], env: Mapping[str, str], *, is_ours: bool
    ) -> None:
        self.host, self.name, self.is_ours = host, name, is_ours
        self.port = host.next_port()
        self.log = host.work / "logs" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        self.gate = host.work / "gates" / name
        self.faults = host.work / "gates" / f"{name}.faults"
        for old in (self.gate, self._reached, self.faults):
            old.unlink(missing_ok=True)
        made = host.environment(is_ours=is_ours) | {"PLIMSOLL_LAB_GATE": str(self.gate)}
        if is_ours:
            made |= {"PLIMSOLL_TOKEN": TOKEN, "PLIMSOLL_DIR": str(host.work / f"run-{name}")}
        if host.is_cpu:
            made["PLIMSOLL_LAB_FAULTS"] = str(self.faults)
        self.flags = [*flags, *(INSIDE if is_ours else ())]
        self.began, self.opened = time.time(), time.monotonic()
        self.reach_s = self.ready_s = 0.0
        with self.log.open("wb") as said:
            self.process = subprocess.Popen(
                host.command(model, self.port, self.flags), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                env=made | dict(env), cwd=host.work, start_new_session=True,
            )  # fmt: skip
        self._renice(NICE)

    @property
    def _reached(self) -> Path:
        return self.gate.with_name(self.gate.name + ".reached")

    def _renice(self, nice: int) -> None:
        """Whoever waits for its turn must not slow down whoever is measured; only root gets its turn back."""
        if os.geteuid() != 0:
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self.process.pid, nice)
        with contextlib.suppress(OSError):  # where the kernel groups by session, this counts instead
            Path(f"/proc/{self.process.pid}/autogroup").write_text(f"{nice}", encoding="ascii")

    # From the gate to the end

    def wait_gate(self, limit: float) -> bool:
        """Whether it stands before the GPU by then."""
        while time.monotonic() < limit and self.process.poll() is None and not self._reached.exists():
            time.sleep(0.05)
        if not self._reached.exists():
            return False
        self.reach_s = self._reached.stat().st_mtime - self.began
        return True

    def open(self) -> None:
        """Let it take its memory."""
        self._renice(0)
        self.opened = time.monotonic()
        self.gate.touch()

    def wait_ready(self, limit: float) -> bool:
        """Whether it serves by then."""
        while time.monotonic() < limit and self.process.poll() is None:
            if self.is_healthy():
                self.ready_s = time.monotonic() - self.opened
                return True
            time.sleep(0.1)
        return False

    def is_healthy(self) -> bool:
        """Whether /health answers 200."""
        return ask(self.port, "GET", "/health", 5.0)[0] == 200

    def wait_dead(self, seconds: float) -> bool:
        """Whether it ends, or stops being healthy, by itself."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None or not self.is_healthy():
                return True
            time.sleep(0.2)
        return False

    def end(self) -> None:
        """End all its processes; at once on the GPU's host, where nothing is left behind that matters."""
        if self.process.poll() is None and self.host.is_cpu:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    # What it says

    def state(self) -> dict[str, Any] | None:
        """What /plimsoll/state says of containment; None where it says nothing."""
        status, said = ask(self.port, "GET", "/plimsoll/state", 5.0)
        found = said.get("survive") if status == 200 and isinstance(said, dict) else None
        return found if isinstance(found, dict) else None

    def compact(self) -> Any:
        """Have torch give back what it keeps, so that the next round needs it again."""
        status, said = ask(self.port, "POST", "/plimsoll/compact", 30.0)
        workers = said.get("workers") if isinstance(said, dict) else None
        returned = [worker.get("returned") for worker in workers or () if isinstance(worker, dict)]
        return {"status": status, "returned": returned} if returned else {"status": status, "said": str(said)[:200]}

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def trimmed(self) -> str:
        """The log without its bulk and without this machine's names."""
        places = ((str(self.host.work), "/work"), (str(ROOT), "/repository"))
        return trim(self.text(), socket.gethostname(), places)


def told_in(text: str) -> dict[str, Any]:
    """What the log of a server says of containment: whether it is armed, each contained failure, how many of the rest."""
    failures = [
        {"tokens": int(m[1]), "requests": int(m[2]), "site": m[3], "recompute": int(m[5]), "steps": int(m[6])}
        for m in CONTAINED.finditer(text)
    ]
    armed = ARMED.search(text)
    found: dict[str, Any] = {"armed": armed[1][:160] if armed else None, "failures": failures}
    found |= {name: len(pattern.findall(text)) for name, pattern in OTHERS.items()}
    sizes = STEPS.findall(text)
    found["steps"] = int(sizes[-1]) if sizes else None
    found["out_of_memory_lines"] = len(DEAD.findall(text))
    return found


def graphs_mib(text: str) -> int | None:
    """What the CUDA graphs of a server took, by its log."""
    found = GRAPHS.search(text)
    return round(float(found[1]) * 1024) if found else None

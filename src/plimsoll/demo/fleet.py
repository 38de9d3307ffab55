"""The fleet of the demo: three stand-ins, a balancer in front of them, and an acting guard, each in its own process.

All of it uses one temporary folder that only this user can enter, and free ports. The guard is the real one with an ordinary
configuration file; only its times are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from plimsoll.demo.balancer import HOST, TEMPLATES, DemoBalancer, ask, free_port
from plimsoll.errors import WorldFailed
from plimsoll.guard.adapters.command import ENDED, NOT_RUNNING
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_processes

# Commands that start and stop one stand-in: `python -m plimsoll.demo.fleet FOLDER start|stop|is-running|pids`.
#
# A service manager does this on a real machine. Exit codes are those of guard's contract for commands (see
# docs/balancers.md and docs/guard-config.md): 0 done or running, 3 not running, 151 it ended by itself, else failed.

FILE = "unit.json"
STOP_S = 60.0


def write_unit(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """Saves the command, and the variables that its environment has beside ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE
    path.touch(mode=0o600)
    path.write_text(json.dumps({"words": words, "environment": environment}), encoding="utf-8")


def unit(folder: Path) -> OwnProcess:
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return OwnProcess(
        found["words"], environment={**os.environ, **found["environment"]}, state_path=folder / "engine.json",
        log_path=folder / "engine.log", processes=read_processes, boot=boot_mark(), orphans_s=1.0,
    )  # fmt: skip


async def obey(engine: OwnProcess, verb: str) -> int:
    """Runs one verb of the contract; returns its exit code."""
    if verb == "is-running":
        if await engine.is_running():
            return 0
        last = await engine.last_exit()
        return ENDED if last.is_done and not last.facts.get("asked") else NOT_RUNNING
    if verb == "pids":
        print(*await engine.pids())
        return 0
    if verb not in ("start", "stop"):
        print(f"there is no {verb}")
        return 2
    outcome = await (engine.start() if verb == "start" else engine.stop(float(os.environ.get("PLIMSOLL_DEADLINE_S", STOP_S))))
    print(outcome.message)
    return 0 if outcome.is_done else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(obey(unit(Path(sys.argv[1])), sys.argv[2])))


NAMES = ("a", "b", "c")
START_S = 60.0
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
GPU = "A10"
SERVE = (MODEL, "--max-model-len", "8192", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.85")
GATE = ("--middleware", "plimsoll.inside.Gate", "--worker-extension-cls", "plimsoll.inside.Probe", "--shutdown-timeout", "60")
CONFIG = (TEMPLATES / "guard.toml").read_text(encoding="utf-8")
CTL = (TEMPLATES / "ctl.sh").read_text(encoding="utf-8")
ENGINE = (TEMPLATES / "engine.toml").read_text(encoding="utf-8")


class Guard:
    """`plimsoll guard --act` as a process; its output is kept as lines of JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.token = folder, free_port(), secrets.token_hex(16)
        self.journal = folder / "state" / "guard.journal"
        self.said = folder / "guard.said"
        self.errors = folder / "guard.errors"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, config: Path) -> None:
        """Starts it and waits until its API answers."""
        words = ("guard", "--config", str(config), "--act", "--json")
        with self.said.open("ab") as out, self.errors.open("ab") as err:
            self._process = await asyncio.create_subprocess_exec(
                *plimsoll_command(*words), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        for _ in range(300):
            if self._process.returncode is not None:
                raise WorldFailed(f"guard did not start: {_last_line(self.errors)}")
            if (await ask(self.port, "/healthz", limit_s=1.0)).status:
                return
            await asyncio.sleep(0.1)
        raise WorldFailed("guard did not begin to listen within half a minute")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ask(self, path: str) -> Any:
        told = await ask(self.port, path, token=self.token)
        return told.table() if told.status == 200 else None

    async def stop(self) -> None:
        await end_process(self._process, 3.0)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class DemoFleet:
    """Everything that the demo runs, and the one place that ends it."""

    start_s = START_S

    def __init__(self, folder: Path, *, speed: float = 1.0) -> None:
        self.folder, self._speed = folder, speed
        self.gate_token = secrets.token_hex(16)
        self.ports = {name: free_port() for name in NAMES}
        self.guard = Guard(folder)
        self._units: dict[str, OwnProcess] = {}
        hook_token = secrets.token_hex(16)
        self.balancer = self.make_balancer(hook_token)
        for name, token in (("gate", self.gate_token), ("api", self.guard.token), ("hook", hook_token)):
            path = folder / f"{name}.token"
            path.touch(mode=0o600)
            path.write_text(token, encoding="ascii")

    def make_balancer(self, token: str) -> DemoBalancer:
        return DemoBalancer(self.ports, token)

    @property
    def page(self) -> str:
        return f"http://{HOST}:{self.guard.port}/"

    @property
    def link(self) -> str:
        """The page's address with its token, which ends with the demo."""
        return f"{self.page}#token={self.guard.token}"

    async def start(self) -> None:
        """Starts all of it, the balancer before guard, whose configuration names it, and waits until it is ready."""
        for name in NAMES:
            place = self.folder / name
            write_unit(place, plimsoll_command(*self.words(name)), self.environment(name))
            self._units[name] = unit(place)
            outcome = await self._units[name].start()
            if not outcome.is_done:
                raise WorldFailed(f"a stand-in did not start: {outcome.message}")
        await self.balancer.start()
        path = os.environ.get("PYTHONPATH")
        text = CTL.format(
            export=f"export PYTHONPATH={shlex.quote(path)}\n" if path else "",
            python=shlex.quote(sys.executable),
            folder=shlex.quote(str(self.folder)),
        )
        (self.folder / "ctl").write_text(text, encoding="utf-8")
        await self._watch()
        clock = asyncio.get_running_loop().time
        for name in NAMES:
            end_s = clock() + self.start_s
            while (await ask(self.ports[name], "/plimsoll/ready", limit_s=1.0)).status != 200:
                if clock() > end_s or await self._units[name].is_running() is False:
                    raise WorldFailed(f"a stand-in was not ready in time: {_last_line(self.folder / name / 'engine.log')}")
                await asyncio.sleep(0.1)

    def words(self, name: str) -> list[str]:
        return ["standin", "--gpu", GPU, "--port", str(self.ports[name]), *GATE, *SERVE]

    def environment(self, name: str) -> dict[str, str]:
        place = str(self.folder / name)
        return {
            "PLIMSOLL_TOKEN": self.gate_token, "PLIMSOLL_DIR": place, "TMPDIR": place,
            "PLIMSOLL_WEDGE_S": f"{max(1.0, 3.0 / self._speed):g}", "PLIMSOLL_CANARY_S": f"{max(1.0, 2.0 / self._speed):g}",
            "PLIMSOLL_SAMPLE_S": "0.5", "PLIMSOLL_COMPILE": "0",
        }  # fmt: skip

    async def _watch(self) -> None:
        config = self.folder / "plimsoll.toml"
        config.write_text(self.config(), encoding="utf-8")
        await self.guard.start(config)

    def config(self) -> str:
        """Returns guard's configuration; the balancer must have its port by then."""
        return CONFIG.format(host=HOST, port=self.guard.port) + "".join(self._table(name) for name in NAMES)

    def _table(self, name: str) -> str:
        words = ["/bin/sh", str(self.folder / "ctl"), name]
        verbs = {verb.replace("-", "_"): json.dumps([*words, verb]) for verb in ("stop", "start", "is-running", "pids")}
        log, balancer = self.folder / name / "engine.log", self.balancer.table(name)
        return ENGINE.format(name=name, host=HOST, port=self.ports[name], log=log, balancer=balancer, **verbs)

    async def fault(self, name: str, kind: str, value: int | None = None) -> None:
        body = {"kind": kind} | ({} if value is None else {"value": value})
        told = await ask(self.ports[name], "/standin/faults", body, token=self.gate_token)
        if told.status != 200:
            raise WorldFailed(f"the stand-in {name} took no fault: {told}")

    async def mend(self, name: str) -> None:
        await ask(self.ports[name], "/standin/faults", token=self.gate_token, method="DELETE")

    async def in_flight(self, name: str) -> int:
        told = await ask(self.ports[name], "/plimsoll/state", token=self.gate_token)
        return int(told.table().get("in_flight") or 0)

    async def memory(self, name: str) -> tuple[int, int, int]:
        """Returns bytes of its card that are free, that torch holds without use, and that other processes hold."""
        told = (await ask(self.ports[name], "/plimsoll/memory", token=self.gate_token)).table()
        if not told.get("workers"):
            raise WorldFailed(f"the stand-in {name} does not tell of its memory")
        device, allocator = (told["workers"][0][group] for group in ("device_memory", "allocator"))
        return int(device["free"]), int(allocator["releasable"]), int(device["by_others"])

    async def stop(self) -> None:
        for name in NAMES:  # without this file nothing can be started again
            (self.folder / name / FILE).unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            await self.guard.stop()
        with contextlib.suppress(Exception):
            await self.balancer.stop()
        for _ in range(2):  # a start that guard had begun may end after the first
            await asyncio.gather(*(one.stop(0.5) for one in self._units.values()), return_exceptions=True)
            await asyncio.sleep(0.2)


def plimsoll_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "plimsoll", *words]


async def run_plimsoll(*words: str, limit_s: float = 60.0) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and its whole output."""
    process = await asyncio.create_subprocess_exec(
        *plimsoll_command(*words), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        raise WorldFailed(f"plimsoll {words[0]} did not end within {limit_s:g} s") from None
    finally:
        await end_process(process, 1.0)
    return process.returncode or 0, printed.decode("utf-8", "replace")


async def end_process(process: asyncio.subprocess.Process | None, within_s: float) -> None:
    """Ends a process with SIGTERM, then SIGKILL."""
    if process is None or process.returncode is not None:
        return
    for number, limit_s in ((signal.SIGTERM, within_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), limit_s)
            return


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"
    return "no output"

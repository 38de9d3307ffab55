"""The fleet of the demo: three stand-ins, a balancer before them, and a guard that acts, each a process of its own.

All of it lives in one temporary folder that only this user can enter, on ports that were free. The guard is the real one with
a configuration file as anybody would write it; only its times are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from plimsoll.demo.balancer import Balancer
from plimsoll.demo.haproxy import HAProxy
from plimsoll.demo.unit import unit, write_unit
from plimsoll.demo.wire import HOST, Told, ask
from plimsoll.errors import WorldFailed

NAMES = ("a", "b", "c")
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
GPU = "A10"
SERVE = (MODEL, "--max-model-len", "8192", "--max-num-seqs", "8")
GATE = ("--middleware", "plimsoll.inside.Gate", "--worker-extension-cls", "plimsoll.inside.Probe", "--shutdown-timeout", "60")
CONFIG = """\
# guard's configuration in the demo: as on docs/guard-config.md, with short times

[api]
listen = "{host}:{port}"
token_file = "api.token"

[policy]
every = "1s"                  # looks at each engine

[policy.saturated]            # shed when a new request would wait so long, and the queue has grown for so long
wait = "3s"
grows = "10s"
for = "0s"
clear = "2s"

[policy.neighbour]            # compact when another process is in need
for = "2s"
clear = "0s"
free = "512MiB"
releasable = "256MiB"

[act]
journal = "state/guard.journal"
evidence = "state/evidence"
shed_wait = "3s"
shed_lease = "15s"
stop_within = "5s"            # from SIGTERM to SIGKILL
gone_within = "20s"
start_still = "30s"
probation = "10s"
backoff = "30s"
"""
CTL = """\
#!/bin/sh
# ctl ENGINE start|stop|is-running|pids: what a service manager would be on a real machine
{exports}
exec {python} -m plimsoll.demo.unit {folder}/"$1" "$2"
"""
HANDED_ON = ("PYTHONPATH", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")  # guard's commands get a bare environment
ENGINE = """
[[engine]]
name = "{name}"
url = "http://{host}:{port}"
token_file = "gate.token"
group = "demo"
log = "{log}"
restart = {{ stop = {stop}, start = {start}, is_running = {is_running}, pids = {pids} }}
{balancer}
"""


class Guard:
    """`plimsoll guard --act` as a process; what it says is kept as lines of JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.token = folder, free_port(), secrets.token_hex(16)
        self.journal = folder / "state" / "guard.journal"
        self.said = folder / "guard.said"
        self.errors = folder / "guard.errors"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, config: Path) -> None:
        """Until its API answers."""
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
        """Whether it still lives."""
        return self._process is not None and self._process.returncode is None

    async def ask(self, path: str) -> Any:
        """What its API says; None where it says nothing."""
        told = await ask(self.port, path, token=self.token)
        return told.json() if told.status == 200 else None

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not do."""
        await end_process(self._process, 10.0)


class Fleet:
    """Everything that runs, and the one place that ends it."""

    def __init__(self, folder: Path, *, use_haproxy: bool) -> None:
        self.folder = folder
        self.gate_token = secrets.token_hex(16)
        self.ports = {name: free_port() for name in NAMES}
        self.guard = Guard(folder)
        hook_token = secrets.token_hex(16)
        self.balancer: Balancer | HAProxy = HAProxy(folder, self.ports) if use_haproxy else Balancer(self.ports, hook_token)
        for name, token in (("gate", self.gate_token), ("api", self.guard.token), ("hook", hook_token)):
            path = folder / f"{name}.token"
            path.touch(mode=0o600)
            path.write_text(token, encoding="ascii")

    async def start_engines(self) -> None:
        """Start the stand-ins; they are up a second or two later."""
        for name, port in self.ports.items():
            words = ["standin", "--gpu", GPU, "--port", str(port), *GATE, *SERVE]
            place = self.folder / name
            environment = {"PLIMSOLL_TOKEN": self.gate_token, "PLIMSOLL_WEDGE_S": "4", "PLIMSOLL_CANARY_S": "3"}
            write_unit(place, plimsoll_command(*words), {**environment, "TMPDIR": str(place), "PLIMSOLL_SAMPLE_S": "0.5"})
            outcome = await unit(place).start()
            if not outcome.is_done:
                raise WorldFailed(f"a stand-in did not start: {outcome.says}")

    async def until_ready(self, within_s: float = 60.0) -> None:
        """Wait until each answers."""
        async with contextlib.AsyncExitStack():
            end_s = asyncio.get_running_loop().time() + within_s
            for name, port in self.ports.items():
                while (await ask(port, "/plimsoll/ready", limit_s=1.0)).status != 200:
                    if asyncio.get_running_loop().time() > end_s:
                        raise WorldFailed(f"a stand-in was not ready in time: {_last_line(self.folder / name / 'engine.log')}")
                    await asyncio.sleep(0.1)

    async def start_balancer_and_guard(self) -> None:
        """In this order: guard's configuration says where the balancer is."""
        await self.balancer.start()
        exports = "\n".join(f"export {name}={shlex.quote(os.environ[name])}" for name in HANDED_ON if name in os.environ)
        text = CTL.format(exports=exports, python=shlex.quote(sys.executable), folder=shlex.quote(str(self.folder)))
        (self.folder / "ctl").write_text(text, encoding="utf-8")
        config = self.folder / "plimsoll.toml"
        text = CONFIG.format(host=HOST, port=self.guard.port) + "".join(self._table(name) for name in NAMES)
        config.write_text(text, encoding="utf-8")
        await self.guard.start(config)

    def _table(self, name: str) -> str:
        place = self.folder / name
        word = ["/bin/sh", str(self.folder / "ctl"), name]
        verbs = {verb.replace("-", "_"): json.dumps([*word, verb]) for verb in ("stop", "start", "is-running", "pids")}
        return ENGINE.format(
            name=name, host=HOST, port=self.ports[name], log=place / "engine.log", balancer=self.balancer.table(name), **verbs
        )

    async def fault(self, name: str, kind: str, value: int | None = None) -> None:
        """Make one go wrong."""
        body = {"kind": kind} | ({} if value is None else {"value": value})
        told = await ask(self.ports[name], "/standin/faults", body, token=self.gate_token)
        if told.status != 200:
            raise WorldFailed(f"the stand-in {name} took no fault: {told.status} {told.body[:200]!r}")

    async def mend(self, name: str) -> None:
        """What is wrong with it ends."""
        await ask(self.ports[name], "/standin/faults", token=self.gate_token, method="DELETE")

    async def memory(self, name: str) -> dict[str, Any]:
        """What its worker's probe says of the card."""
        told = await ask(self.ports[name], "/plimsoll/memory", token=self.gate_token)
        workers = (told.json() or {}).get("workers") or [{}]
        found: dict[str, Any] = workers[0]
        return found

    async def stop(self) -> None:
        """End all of it, whatever state it is in."""
        with contextlib.suppress(Exception):
            await self.guard.stop()
        with contextlib.suppress(Exception):
            await self.balancer.stop()
        places = [self.folder / name for name in NAMES if (self.folder / name / "unit.json").exists()]
        await asyncio.gather(*(unit(place).stop(0.5) for place in places), return_exceptions=True)


def plimsoll_command(*words: str) -> list[str]:
    """This very plimsoll as a command."""
    return [sys.executable, "-m", "plimsoll", *words]


async def run_plimsoll(*words: str, limit_s: float = 60.0) -> tuple[int, str]:
    """One command to its end: its exit code, and all that it printed."""
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
    """SIGTERM, then SIGKILL."""
    if process is None or process.returncode is not None:
        return
    for number, limit_s in ((signal.SIGTERM, within_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), limit_s)
            return


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"
    return "it said nothing"


__all__ = ["Fleet", "Guard", "Told", "run_plimsoll"]

"""Two engines of one kind behind the real HAProxy, watched in one of three ways, and clients that count what they get.

| way | the engines | who watches |
|---|---|---|
| nothing | plain vLLM | HAProxy's check on /health; what is broken stays broken until a person comes |
| supervisor | plain vLLM | `Restart=always` for each process, and the article's sidecar beside each engine |
| plimsoll | with gate, probe and containment | `plimsoll guard --act` with its defaults; HAProxy asks /plimsoll/ready |

Clients follow the openai client's rules: a request that got no byte of its answer, or 408, 409, 429 or 5xx, is sent again at
most twice, after Retry-After or half a second; a stream that breaks off is never sent again. In plimsoll's way HAProxy
answers as docs/balancers.md has it when no engine is left: 503 with Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from lab.gpu.inside_server import INSIDE
from lab.gpu.survive_host import Host
from lab.haproxy import COME_AGAIN, Checks, RunningHAProxy
from plimsoll.demo.balancer import HOST, ask, free_port
from plimsoll.demo.fleet import CTL, ENGINE, Guard, end_process, unit, write_unit
from plimsoll.errors import WorldFailed
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.guard.daemon.journal import read_journal

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("a", "b")
NOTHING, SUPERVISOR, PLIMSOLL = WAYS = ("nothing", "supervisor", "plimsoll")
LOOK_S = 0.25
READY_LIMIT_S = 300.0
FAULTS = "faults.json"  # of one engine of the CPU build, see lab/survive/faults
RESTART_S = 0.1  # systemd's RestartSec
STOP_S = 90.0  # systemd's TimeoutStopSec
ANSWER_LIMIT_S = 90.0
RETRIES, PAUSE_S, LONGEST_PAUSE_S = 2, 0.5, 60.0
AGAIN = frozenset((408, 409, 429))
CONFIG = """\
[api]
listen = "{host}:{port}"
token_file = "api.token"
[act]
journal = "state/guard.journal"
evidence = "state/evidence"
"""


class EngineKind(Protocol):
    """How an engine is started, and what it is made to do."""

    model: str
    slowness: float  # a start takes so many times as long as on a card
    is_cpu: bool  # vLLM's CPU build, whose steps can be made to fail

    def words(self, port: int, *, is_ours: bool) -> list[str]:
        """The command."""

    def environment(self, folder: Path, *, is_ours: bool) -> dict[str, str]:
        """What its environment has beside ours."""


class StandinKind:
    """Stand-ins, for a dry run without vLLM."""

    model = "meta-llama/Llama-3.1-8B-Instruct"
    slowness, is_cpu = 1.0, False

    def words(self, port: int, *, is_ours: bool) -> list[str]:
        """The same model as on the card, on a card that is not there."""
        flags = ["--gpu", "H200", "--port", str(port), "--max-model-len", "8192", "--max-num-seqs", "64"]
        return [sys.executable, "-m", "plimsoll", "standin", *flags, *(INSIDE if is_ours else ()), self.model]

    def environment(self, folder: Path, *, is_ours: bool) -> dict[str, str]:
        """Uncompiled: a start is worth more than speed."""
        del folder, is_ours
        return {"PLIMSOLL_COMPILE": "0"}


class VllmKind:
    """The real engine: on the GPU, or the lab's CPU build."""

    def __init__(self, host: Host, model: Path, flags: Sequence[str]) -> None:
        self._host, self._model, self._flags = host, model, flags
        self.model, self.is_cpu, self.slowness = host.model_name, host.is_cpu, 4.0 if host.is_cpu else 1.0

    def words(self, port: int, *, is_ours: bool) -> list[str]:
        """`vllm serve` with dummy weights; a stop waits for what runs where plimsoll drains before it."""
        return self._host.command(self._model, port, [*self._flags, *(INSIDE if is_ours else ())])

    def environment(self, folder: Path, *, is_ours: bool) -> dict[str, str]:
        """Containment is part of plimsoll's way."""
        made = self._host.environment(is_ours=is_ours) | ({"PLIMSOLL_LAB_FAULTS": str(folder / FAULTS)} if self.is_cpu else {})
        return made | ({"PLIMSOLL_SURVIVE": "1", "PLIMSOLL_FAILOVER": "1"} if is_ours else {})


# Processes


def children(pid: int) -> Iterator[tuple[int, str, str]]:
    """Every descendant: its number, state letter and command line."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.setdefault(int(parent), []).append((int(entry.name), state, title))
    queue = [pid]
    while queue:
        for child in found.get(queue.pop(), ()):
            queue.append(child[0])
            yield child


def core_pid(pid: int) -> int | None:
    """The engine core below an API server; None where there is none, as in a stand-in."""
    return next((child for child, _, title in children(pid) if "EngineCore" in title), None)


def is_at_work(pid: int) -> bool:
    """Whether a process lives and is not stopped."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "TtZX"
    return False


# The fleet


class Fleet:
    """Two engines, HAProxy, and whoever watches."""

    def __init__(self, folder: Path, way: str, kind: EngineKind) -> None:
        assert way in WAYS, way
        self.folder, self.way, self.kind, self.is_ours = folder, way, kind, way == PLIMSOLL
        folder.mkdir(parents=True, exist_ok=True)
        self.ports = {name: free_port() for name in NAMES}
        self.token, self.guard = secrets.token_hex(16), Guard(folder)
        self.units: dict[str, OwnProcess] = {}
        self.members: dict[str, frozenset[int]] = {}  # of each engine, when it was last whole
        self.hung: set[int] = set()  # processes that were made to hang in a way that the process table does not show
        path = "/plimsoll/ready" if self.is_ours else "/health"
        again = "conn-failure 503"
        none_left = COME_AGAIN if self.is_ours else ""
        self.balancer = RunningHAProxy(
            folder, self.ports, Checks(path, "inter 1s fall 2 rise 1", "2s", "600s", again, none_left)
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._sidecars: list[asyncio.subprocess.Process] = []
        self.is_held: set[str] = set()  # engines that a person stops: a supervisor is told, as systemd is
        for name, token in (("gate", self.token), ("api", self.guard.token)):
            kept = folder / f"{name}.token"
            kept.touch(mode=0o600)
            kept.write_text(token, encoding="ascii")

    async def start(self) -> None:
        """Start all of it and return when every engine is in service."""
        for name in NAMES:
            place = self.folder / name
            has_token = self.is_ours or isinstance(self.kind, StandinKind)
            made = {"PLIMSOLL_TOKEN": self.token, "PLIMSOLL_DIR": str(place), "TMPDIR": str(place)}
            write_unit(
                place, self.kind.words(self.ports[name], is_ours=self.is_ours),
                (made if has_token else {}) | self.kind.environment(place, is_ours=self.is_ours),
            )  # fmt: skip
            self.units[name] = unit(place)
            outcome = await self.units[name].start()
            if not outcome.is_done:
                raise WorldFailed(f"engine {name} did not start: {outcome.message}")
        await self.balancer.start()
        path = os.environ.get("PYTHONPATH")
        (self.folder / "ctl").write_text(
            CTL.format(
                export=f"export PYTHONPATH={shlex.quote(path)}\n" if path else "",
                python=shlex.quote(sys.executable), folder=shlex.quote(str(self.folder)),
            ), encoding="utf-8",
        )  # fmt: skip
        end = time.monotonic() + READY_LIMIT_S * self.kind.slowness
        while not all((await self.in_service()).values()):
            if time.monotonic() > end:
                raise WorldFailed(f"not every engine was in service after {READY_LIMIT_S * self.kind.slowness:g} s")
            await asyncio.sleep(LOOK_S)
        await self._watch()

    async def _watch(self) -> None:
        if self.way == PLIMSOLL:
            await self.start_guard()
        elif self.way == SUPERVISOR:
            self._tasks = [asyncio.create_task(self._restart_always(name)) for name in NAMES]
            for name in NAMES:
                ctl = f"/bin/sh {shlex.quote(str(self.folder / 'ctl'))} {name}"
                words = [sys.executable, "-m", "lab.article.sidecar", f"http://{HOST}:{self.ports[name]}", "--"]
                sidecar = await asyncio.create_subprocess_exec(
                    *words, "/bin/sh", "-c", f"{ctl} stop; {ctl} start", cwd=ROOT, start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
                )  # fmt: skip
                self._sidecars.append(sidecar)

    async def renew_guard(self) -> None:
        """A guard that knows nothing of the incident before: its budget, cooldown and history are those of a first night."""
        if self.way == PLIMSOLL:
            await self.guard.stop()
            old = self.folder / f"journal-{sum(1 for _ in self.folder.glob('journal-*'))}"
            old.mkdir()
            for path in (self.folder / "state").glob("guard.journal*"):  # the lock stays: its epoch must rise
                path.rename(old / path.name)
            await self.start_guard()

    async def start_guard(self) -> None:
        """Guard with its defaults; what a killed one left is the next one's."""
        config = self.folder / "plimsoll.toml"
        config.write_text(
            CONFIG.format(host=HOST, port=self.guard.port) + "".join(self._table(name) for name in NAMES), encoding="utf-8"
        )
        await self.guard.start(config)

    def _table(self, name: str) -> str:
        words = ["/bin/sh", str(self.folder / "ctl"), name]
        verbs = {verb.replace("-", "_"): json.dumps([*words, verb]) for verb in ("stop", "start", "is-running", "pids")}
        log, balancer = self.folder / name / "engine.log", self.balancer.table(name)
        return ENGINE.format(name=name, host=HOST, port=self.ports[name], log=log, balancer=balancer, **verbs)

    async def _restart_always(self, name: str) -> None:
        """What systemd does for a unit with Restart=always: the whole control group ends with the main process."""
        while True:
            if name not in self.is_held and await self.units[name].is_running() is False:
                await asyncio.sleep(RESTART_S)
                await self.units[name].stop(0.5)
                await self.units[name].start()
            await asyncio.sleep(LOOK_S)

    def pid(self, name: str) -> int:
        """The API server's process; 0 where there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((self.folder / name / "engine.json").read_text(encoding="utf-8"))["pid"])
        return 0

    async def in_service(self) -> dict[str, bool]:
        """Of each engine: HAProxy sends it work, its processes live and none of them is stopped."""
        taken = await self.balancer.takes_work()
        found = {}
        for name in NAMES:
            pid = self.pid(name)
            if taken.get(name) and is_at_work(pid) and not self.members.get(name, frozenset()) >= {pid}:
                core = pid if isinstance(self.kind, StandinKind) else core_pid(pid)
                if core is not None:  # one that has just begun has none yet, whatever HAProxy still believes
                    self.members[name] = frozenset({pid, core})
            at_work = all(is_at_work(one) for one in self.members.get(name, {0}))
            found[name] = bool(taken.get(name)) and at_work and pid in self.members.get(name, ()) and pid not in self.hung
        return found

    def set_faults(self, *rules: dict[str, Any]) -> None:
        """From now on these steps of both engines run out of memory, and no others."""
        for name in NAMES:
            fresh = self.folder / name / f"{FAULTS}.new"
            fresh.write_text(json.dumps({"faults": rules}), encoding="utf-8")
            fresh.rename(self.folder / name / FAULTS)

    async def person_restarts(self, name: str) -> None:
        """What an operator does without plimsoll: `systemctl restart`."""
        self.is_held.add(name)
        await self.units[name].stop(STOP_S)
        await self.units[name].start()
        self.is_held.discard(name)

    async def person_mends(self) -> int:
        """Restart every engine that is not in service; how many that were."""
        broken = [name for name, is_in in (await self.in_service()).items() if not is_in]
        for name in broken:
            self.is_held.add(name)
            pid = self.pid(name)
            for one in [*(child for child, _, _ in children(pid)), *([pid] if pid else ())]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            await self.units[name].stop(1.0)
            await self.units[name].start()
            self.is_held.discard(name)
        return len(broken)

    def steps_begun(self) -> list[tuple[float, str, str]]:
        """What guard wrote down before each step: when, which engine, which step."""
        path = self.guard.journal
        entries = read_journal(path).entries if path.exists() else ()
        return [(entry.at, entry.engine, entry.step) for entry in entries if entry.kind == "intent"]

    async def stop(self) -> None:
        """End all of it, whatever state it is in."""
        for task in self._tasks:
            task.cancel()
        for process in self._sidecars:
            await end_process(process, 1.0)
        with contextlib.suppress(Exception):
            await self.guard.stop()
        with contextlib.suppress(Exception):
            await self.balancer.stop()
        for _ in range(2):
            await asyncio.gather(*(one.stop(0.5) for one in self.units.values()), return_exceptions=True)


# Clients


@dataclass(slots=True)
class Asked:
    """One request and what became of it: `end` is whole, cut, lost or refused."""

    sent: float  # seconds since 1970
    over: float = 0.0
    first: float | None = None  # seconds to the first token
    tokens: int = 0
    tries: int = 0
    refusals: int = 0  # answers that said Retry-After
    end: str = "lost"
    why: str = ""
    is_killer: bool = False


class Clients:
    """Streaming clients, each with its next request after the last and a pause."""

    def __init__(self, port: int, kind: EngineKind, count: int, seed: int, *, most_tokens: int = 120) -> None:
        self.asked: list[Asked] = []
        self._port, self._model, self._dice, self._most = port, kind.model, random.Random(seed), most_tokens
        self._over = asyncio.Event()
        patience = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S * kind.slowness)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=patience)
        self._tasks = [asyncio.create_task(self._client()) for _ in range(count)]

    async def _client(self) -> None:
        await asyncio.sleep(self._dice.uniform(0.0, 2.0))
        while not self._over.is_set():
            await self.send(self._dice.randint(32, 200), self._dice.randint(self._most // 2, self._most))
            await asyncio.sleep(self._dice.uniform(0.5, 1.5))

    async def send(self, prompt: int, tokens: int, **extra: Any) -> Asked:
        """One request to its end, with the retries that the openai client makes."""
        body = {
            "model": self._model, "prompt": [self._dice.randrange(3, 400) for _ in range(prompt)], "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0, "stream": "prompt_logprobs" not in extra, **extra,
        }  # fmt: skip
        asked = Asked(time.time(), is_killer=bool(extra))
        self.asked.append(asked)
        for _ in range(1 + RETRIES):
            asked.tries += 1
            pause_s = await self._try(asked, body)
            if pause_s is None:
                break
            await asyncio.sleep(pause_s)
        asked.over = time.time()
        return asked

    async def _try(self, asked: Asked, body: dict[str, Any]) -> float | None:
        """One try; the seconds until the next one, None where there is none."""
        asked.tokens, asked.end = 0, "lost"
        try:
            async with self._session.post(f"http://{HOST}:{self._port}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    asked.why = f"{answer.status} {(await answer.text())[:160]}"
                    told = answer.headers.get("Retry-After", "")
                    asked.refusals += told.isdigit()
                    asked.end = "refused" if told.isdigit() else "lost"
                    pause_s = min(LONGEST_PAUSE_S, float(told)) if told.isdigit() else PAUSE_S
                    return pause_s if answer.status in AGAIN or answer.status >= 500 else None
                await self._read(asked, answer, is_stream=bool(body["stream"]))
                return None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            asked.why = type(error).__name__
            if asked.tokens:
                asked.end = "cut"
                return None
            return PAUSE_S

    async def _read(self, asked: Asked, answer: aiohttp.ClientResponse, *, is_stream: bool) -> None:
        end = b""
        async for piece in answer.content.iter_any():
            if asked.first is None:
                asked.first = time.time() - asked.sent
            asked.tokens += piece.count(b"data: {")
            end = (end + piece)[-600:]
        if b'"error"' in end:
            asked.end, asked.why = ("cut" if asked.tokens > 1 else "lost"), end.decode(errors="replace")[-160:]
        elif is_stream and b"[DONE]" not in end:
            asked.end, asked.why = "cut", "the stream broke off"
        else:
            asked.end = "whole"

    async def finish(self, within_s: float = 20.0) -> None:
        """Begin no further request, wait for what runs; what is then still there is lost."""
        self._over.set()
        await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()


def rows_of(asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """As they are kept."""
    return [
        {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(one).items()} for one in asked
    ]


async def guardctl(fleet: Fleet, verb: str, *words: str) -> str:
    """`plimsoll guardctl` against this fleet's guard; its exit code and the first line that it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "plimsoll", "guardctl", verb, *words, "--at", f"http://{HOST}:{fleet.guard.port}",
        "--token-file", str(fleet.folder / "api.token"),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await process.communicate()
    return f"guardctl: exit {process.returncode}: {printed.decode(errors='replace').strip().partition(chr(10))[0][:200]}"


async def engine_state(fleet: Fleet, name: str) -> dict[str, Any]:
    """What its gate says; empty where there is none."""
    told = await ask(fleet.ports[name], "/plimsoll/state", token=fleet.token, limit_s=3.0)
    found = told.table() if told.status == 200 else {}
    return found if isinstance(found, dict) else {}

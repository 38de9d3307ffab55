"""Rounds of kills under load: two stand-ins behind the real HAProxy, streaming clients, and a guard that is killed itself.

    python -m lab.guard.kill_rounds [ROUNDS] [CLIENTS]     (10, 50) a line a round; exit 1 where planned work lost a request

Odd rounds: guard is asked for a restart and killed by SIGKILL at a random moment of it; the next guard goes on. Nothing may be
lost. Even rounds: an engine is killed; only requests that had begun on it may be lost, and guard starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import aiohttp

from lab.engine.server import free_port
from lab.guard.reaction import Scene, scene

HAPROXY = """
global
    stats socket {socket} mode 600 level admin
defaults
    mode http
    timeout connect 5s
    timeout client 120s
    timeout server 120s
    timeout http-request 30s
    retries 10
    retry-on conn-failure 503
    option redispatch 1
    option http-buffer-request
frontend clients
    bind 127.0.0.1:{port}
    default_backend llm
backend llm
    balance leastconn
    option httpchk GET /plimsoll/ready
    option contstats
    option http-server-close
    default-server check inter 500ms fall 2 rise 1
    server a 127.0.0.1:{a}
    server b 127.0.0.1:{b}
"""
ACT = """
[act]
journal = "{folder}/guard.journal"
restarts_per_hour = 20
restarts_per_day = 100
fleet_restarts_per_hour = 100
fleet_restarts_per_day = 500
backoff = "30s"
longest_backoff = "60s"
probation = "10s"
rollout = "0s"
[api]
listen = "127.0.0.1:{api}"
"""


BEGUN = {"cut", "502", "ServerDisconnectedError"}  # ends of requests that the killed server had taken


class Clients:
    """Streams, each begun anew when it ends; what became of each is counted, and where it was while it lasted."""

    def __init__(self, port: int, count: int) -> None:
        self.port, self._count = port, count
        self.ends: Counter[str] = Counter()
        self.is_over = False

    async def run(self) -> None:
        limit = aiohttp.ClientTimeout(total=120.0)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as session:
            await asyncio.gather(*(self._one(session, random.Random(number)) for number in range(self._count)))

    async def _one(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        while not self.is_over:
            body = {"prompt": "hello " * dice.randrange(1, 200), "max_tokens": dice.randrange(8, 120), "stream": True}
            try:
                async with session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as answer:
                    text = (await answer.read()).decode("utf-8", "replace")
                    is_whole = "[DONE]" in text and '"error"' not in text
                    end = (
                        "whole" if answer.status == 200 and is_whole else "cut" if answer.status == 200 else str(answer.status)
                    )
            except (aiohttp.ClientError, TimeoutError, OSError) as problem:
                end = "cut" if isinstance(problem, aiohttp.ClientPayloadError | TimeoutError) else type(problem).__name__
            self.ends[end] += 1
            await asyncio.sleep(dice.uniform(0.0, 0.5))

    def lost(self) -> Counter[str]:
        return self.ends - Counter({"whole": self.ends["whole"]})


class Rounds:
    """The scene with its balancer, and one round after the other."""

    def __init__(self, made: Scene, clients: int) -> None:
        self.made, self.api, self.dice = made, free_port(), random.Random(1)
        self.clients = Clients(free_port(), clients)
        socket = made.folder / "haproxy.sock"
        config = HAPROXY.format(socket=socket, port=self.clients.port, a=made.ports["a"], b=made.ports["b"])
        (made.folder / "haproxy.cfg").write_text(config)
        balancer = 'balancer = {{haproxy = "{socket}", backend = "llm", server = "{name}"}}\n'
        text = "".join(made.engine(name) + balancer.format(socket=socket, name=name) for name in ("a", "b"))
        (made.folder / "guard.toml").write_text(text + ACT.format(folder=made.folder, api=self.api))

    def start_guard(self) -> None:
        config = str(self.made.folder / "guard.toml")
        command = [sys.executable, "-m", "plimsoll", "guard", "--act", "--every", "2s", "--config", config]
        out = (self.made.folder / "guard.out").open("a")
        environ = self.made.environ() | {"PLIMSOLL_GUARD_TOKEN": "a-token-for-guards-own-api"}
        self.made.guard = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environ, cwd=self.made.folder)

    def ask_restart(self, name: str) -> bool:
        at = f"http://127.0.0.1:{self.api}"
        command = [sys.executable, "-m", "plimsoll", "guardctl", "restart", name, "--yes", "--at", at]
        environ = self.made.environ() | {"PLIMSOLL_GUARD_TOKEN": "a-token-for-guards-own-api"}
        return subprocess.run(command, env=environ, check=False, capture_output=True, timeout=60).returncode == 0

    async def planned(self, name: str) -> str:
        """A restart that somebody asks for, and guard killed in it."""
        made, before = self.made, self.made.pid(name)
        for _ in range(60):  # after a restart it is blocked for a while
            if await asyncio.to_thread(self.ask_restart, name):
                break
            await asyncio.sleep(2.0)
        else:
            raise SystemExit(f"no restart of {name} was begun:\n{made.said()[-3000:]}")
        await asyncio.sleep(self.dice.uniform(0.0, 14.0))
        assert made.guard is not None
        step = (re.findall(rf"{name}: (\w+): ", made.said()) or [""])[-1]
        made.guard.send_signal(signal.SIGKILL)
        made.guard.wait()
        self.start_guard()
        await self.settled()
        return f"guard killed after `{step}`, " + ("restarted" if made.pid(name) != before else "taken back")

    async def crashed(self, name: str) -> str:
        """The engine is killed, with its word in the log."""
        with (self.made.folder / f"{name}.log").open("a") as log:
            log.write("ERROR 11-15 09:00:00 [core.py:1] EngineCore encountered a fatal error.\n")
        os.kill(self.made.pid(name), signal.SIGKILL)
        began = time.monotonic()
        await asyncio.sleep(3.0)
        await self.settled()
        return f"engine killed, back after {time.monotonic() - began:.0f} s"

    async def settled(self) -> None:
        """Until both engines answer, are ready, and no action is open."""
        end = time.monotonic() + 240
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                ready = all([await asyncio.to_thread(self.made.ask, name, "/plimsoll/ready") == 200 for name in ("a", "b")])
                if ready and not await asyncio.to_thread(self.actions):
                    return
            await asyncio.sleep(1.0)
        raise SystemExit(f"not settled:\n{self.made.said()[-3000:]}")

    def actions(self) -> list[object]:
        command = [sys.executable, "-m", "plimsoll", "guardctl", "actions", "--json", "--at", f"http://127.0.0.1:{self.api}"]
        environ = self.made.environ() | {"PLIMSOLL_GUARD_TOKEN": "a-token-for-guards-own-api"}
        ran = subprocess.run(command, env=environ, check=False, capture_output=True, timeout=60)
        return list(json.loads(ran.stdout)["actions"]) if ran.returncode in (0, 1) and ran.stdout else [1]


async def play(made: Scene, rounds: int, clients: int) -> int:
    all_of = Rounds(made, clients)
    for name in ("a", "b"):
        made.supervise(name, "start")
        made.until(lambda name=name: made.answers(name), 60.0)
    with subprocess.Popen(["haproxy", "-db", "-f", str(made.folder / "haproxy.cfg")], stderr=subprocess.DEVNULL) as balancer:
        all_of.start_guard()
        await all_of.settled()
        running = asyncio.create_task(all_of.clients.run())
        wrong = 0
        try:
            for number in range(1, rounds + 1):
                before = all_of.clients.lost()
                name = all_of.dice.choice("ab")
                words = await (all_of.planned(name) if number % 2 else all_of.crashed(name))
                await asyncio.sleep(2.0)
                lost = all_of.clients.lost() - before
                wrong += bool(lost) if number % 2 else bool(lost.keys() - BEGUN)
                told = ", ".join(f"{count} {what}" for what, count in lost.items()) or "nothing"
                print(f"round {number}: {name}: {words}; lost {told}; {all_of.clients.ends['whole']:,} served", flush=True)
        finally:
            all_of.clients.is_over = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running, 30)
            balancer.terminate()
    return int(bool(wrong))


def main(words: list[str]) -> int:
    rounds, clients = (int(words[0]) if words else 10), (int(words[1]) if len(words) > 1 else 50)
    with scene() as made:
        return asyncio.run(play(made, rounds, clients))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

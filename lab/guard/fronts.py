"""What stands between guards and the world in a test of two of them: it passes everything on, and writes down what counts.

A front is an address that one guard is given in place of the real one, so it is known who asks. Deeds at one gate are passed
on one after the other: their order here is the order in which the gate judged them. A trap waits for one guard at one place,
and does something to it (SIGSTOP, SIGKILL) in the moment in which it is there; what it asked for may be kept back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from plimsoll.net.client import HttpClient, Lost, Reply

SECONDS = 10.0
DEEDS = ("/plimsoll/drain", "/plimsoll/undrain")


class Deed(NamedTuple):
    """One drain or undrain, as the gate or the balancer's hook answered it."""

    guard: str
    engine: str
    place: str  # gate or hook
    verb: str
    epoch: int
    status: int  # 0: there was no answer
    was_kept_back: bool = False


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Answers = Callable[[Asked], Awaitable[Reply | None]]  # None: hang up


class Trap:
    """For one guard at one place: `springs` is called there, and what was asked for waits until `let_go`."""

    def __init__(self, guard: str, place: str, verb: str, springs: Callable[[], None], *, keeps_back: bool) -> None:
        self._wanted, self._springs, self._keeps_back = (guard, place, verb), springs, keeps_back
        self.sprung, self._gone = asyncio.Event(), asyncio.Event()

    async def meets(self, guard: str, place: str, verb: str) -> bool:
        """Somebody passes; whether it was kept back."""
        if (guard, place, verb) != self._wanted or self.sprung.is_set() or self._gone.is_set():
            return False
        self.sprung.set()
        self._springs()
        if self._keeps_back:
            await self._gone.wait()
        return self._keeps_back

    def let_go(self) -> None:
        """Whatever is kept back goes on, and nobody is caught any more."""
        self._gone.set()


class World:
    """All fronts of one scene, and what went through them."""

    def __init__(self, *, lock_ttl_s: int = 1, hook_fences: bool = True) -> None:
        """`hook_fences`: the balancer's hook refuses an epoch older than one it has seen, as docs/balancers.md advises."""
        self._ttl_s, self._fences = lock_ttl_s, hook_fences
        self.deeds: list[Deed] = []
        self.grants: list[tuple[int, str]] = []  # each epoch that etcd gave, and to whom
        self.out: dict[str, bool] = {}  # by engine, at the balancer
        self.trap: Trap | None = None
        self._highest: dict[str, int] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._servers: list[asyncio.Server] = []

    async def open(self, answers: Answers) -> str:

        async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # who was killed reads nothing any more
                reply = await answers(await _read(reader))
                if reply is not None:
                    writer.write(_written(reply))
                    await writer.drain()
            writer.close()

        server = await asyncio.start_server(visited, "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self.trap is not None:
            self.trap.let_go()
        for server in self._servers:
            server.close()

    async def etcd(self, guard: str, url: str) -> str:
        """Before etcd: it gives shorter leases than were asked for, as it may give longer ones; and who got which epoch."""
        target = HttpClient(url)

        async def answers(asked: Asked) -> Reply | None:
            body = asked.body
            if asked.path == "/v3/lease/grant":
                body = json.dumps({**json.loads(body), "TTL": str(self._ttl_s)}).encode()
            reply = await _passed_on(target, asked._replace(body=body))
            if reply is not None and asked.path == "/v3/kv/txn" and reply.table().get("succeeded"):
                found = reply.table()["responses"][-1]["response_range"]["kvs"][0]
                assert "owner" in json.loads(base64.b64decode(found["value"]))
                self.grants.append((int(found["create_revision"]), guard))
            return reply

        return await self.open(answers)

    async def gate(self, guard: str, engine: str, url: str) -> str:
        target, turn = HttpClient(url), self._turns.setdefault(engine, asyncio.Lock())

        async def answers(asked: Asked) -> Reply | None:
            if asked.path not in DEEDS:
                return await _passed_on(target, asked)
            verb, epoch = asked.path.removeprefix("/plimsoll/"), int(json.loads(asked.body)["epoch"])
            was_kept_back = self.trap is not None and await self.trap.meets(guard, "gate", verb)
            async with turn:
                reply = await _passed_on(target, asked)
                status = 0 if reply is None else reply.status
                self.deeds.append(Deed(guard, engine, "gate", verb, epoch, status, was_kept_back))
            return reply

        return await self.open(answers)

    async def hook(self, guard: str) -> str:
        """A balancer of the test's own, as a webhook."""

        async def answers(asked: Asked) -> Reply | None:
            found = json.loads(asked.body)
            engine, verb, epoch = str(found["engine"]), str(found["verb"]), int(found["epoch"])
            if verb == "is-out":
                return Reply(200, json.dumps({"done": self.out.get(engine, False)}).encode())
            if verb == "connections":
                return Reply(200, b'{"done": true, "connections": 0}')
            was_kept_back = self.trap is not None and await self.trap.meets(guard, "hook", verb)
            is_old = epoch < self._highest.get(engine, 0)
            status = 409 if is_old and self._fences else 200
            self.deeds.append(Deed(guard, engine, "hook", verb, epoch, status, was_kept_back))
            if status == 200:
                self._highest[engine] = max(epoch, self._highest.get(engine, 0))
                self.out[engine] = verb == "take-out"
            return Reply(status, json.dumps({"done": status == 200, "says": "an older epoch" if is_old else "done"}).encode())

        return await self.open(answers)


async def _read(reader: asyncio.StreamReader) -> Asked:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")[:-4].split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = next((value for name, value in headers.items() if name.lower() == "content-length"), "0")
    return Asked(method, path, headers, await reader.readexactly(int(length)))


async def _passed_on(target: HttpClient, asked: Asked) -> Reply | None:
    kept = {name: value for name, value in asked.headers.items() if name.lower() == "authorization"}
    reply = await target.call(asked.method, asked.path, asked.body, kept, deadline_s=SECONDS)
    return None if isinstance(reply, Lost) else reply


def _written(reply: Reply) -> bytes:
    kept = ("content-type", "www-authenticate", "allow", "retry-after")
    lines = [f"HTTP/1.1 {reply.status} as it was answered", "Connection: close", f"Content-Length: {len(reply.body)}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items() if name.lower() in kept]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + reply.body


def judge(deeds: list[Deed], grants: Mapping[int, str]) -> dict[str, Any]:
    """Holds all deeds against the rule, each place for itself; counts."""
    highest: dict[tuple[str, str], int] = {}
    for number, deed in enumerate(deeds):
        where = (deed.place, deed.engine)
        before = highest.get(where, 0)
        assert deed.status in (200, 409), f"deed {number} has no answer that counts: {deed}"
        assert grants.get(deed.epoch) == deed.guard, f"deed {number} came with an epoch that its guard was never given: {deed}"
        if deed.status == 200:
            assert deed.epoch >= before, f"deed {number} was taken after one of epoch {before}: {deed}"
            highest[where] = deed.epoch
        else:
            assert deed.epoch < before, f"deed {number} was refused, and the highest before it was {before}: {deed}"
    gate = [deed for deed in deeds if deed.place == "gate"]
    return {
        "taken": sum(deed.status == 200 for deed in gate),
        "late": sum(deed.status == 409 for deed in gate),
        "late_drains": sum(deed.status == 409 and deed.verb == "drain" for deed in gate),
        "late_hooks": sum(deed.status == 409 for deed in deeds if deed.place == "hook"),
        "highest": {engine: epoch for (place, engine), epoch in highest.items() if place == "gate"},
    }

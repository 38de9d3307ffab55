"""HAProxy's runtime API over a real Unix socket, with answers that HAProxy would not give; the real one is in tests/real."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.ports import ServerHealth
from plimsoll.guard.adapters.haproxy import HAProxy, ServerLine
from tests.each import cases, each, in_loop

HEADING = "# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight"
STAT = "# pxname,svname,qcur,qmax,scur,"
UP = (2, 0, 1)
State = tuple[int, int, int]
Visit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Farm:
    """What HAProxy holds of one backend, server -> (op state, admin state, weight); it remembers what it was asked."""

    def __init__(self, **servers: State) -> None:
        self.servers = servers
        self.asked: list[str] = []

    def answer(self, command: str) -> bytes:
        words = command.split()
        if words[:3] == ["show", "servers", "state"]:
            rows = [f"3 farm 1 {name} 127.0.0.1 {op} {admin} {weight}" for name, (op, admin, weight) in self.servers.items()]
            return "\n".join(["1", HEADING, *rows, "", ""]).encode()
        if words[:2] == ["set", "server"]:
            op, _, weight = self.servers[name := words[2].partition("/")[2]]
            self.servers[name] = op, 8 if words[4] == "drain" else 0, weight
            return b"\n"
        return "\n".join([STAT, *(f"farm,{name},1,2,3," for name in self.servers), "", ""]).encode()

    async def visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            self.asked.append((await reader.readline()).decode().strip())
            writer.write(self.answer(self.asked[-1]))
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def haproxy(visited: Visit, *servers: str, deadline_s: float = 10.0) -> AsyncIterator[HAProxy]:
    """The adapter of these servers (BACKEND/SERVER), or of farm/a, at a socket that answers so."""
    places = tuple(ServerLine(*name.split("/")) for name in servers or ("farm/a",))
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        server = await asyncio.start_unix_server(visited, str(Path(folder) / "admin.sock"))
        try:
            yield HAProxy(str(Path(folder) / "admin.sock"), places, deadline_s=deadline_s)
        finally:
            server.close()


@each(("own", "other", "is_last"), cases("guard", "the last one that would get work"))
@in_loop
async def test_the_last_one_that_would_get_work_is_not_taken_out(own: State, other: State, is_last: bool) -> None:
    """Another that is down, stopping, drained, in maintenance, without an address or weight is none; one down is no loss."""
    farm = Farm(a=own, b=other)
    async with haproxy(farm.visited) as balancer:
        told = await balancer.take_out()
        assert (told.is_done, told.facts.get("last", False)) == (not is_last, is_last)
        assert ("set server farm/a state drain" in farm.asked) is not is_last
        assert await balancer.connections() == 4, "sessions and queue"


@in_loop
async def test_two_places_are_one_engine_and_what_counts_is_what_is_read_back() -> None:
    """Its second place is not the other that stays; before a change nothing is done, after one that is not seen who knows."""
    async with haproxy(Farm(a=UP, a2=UP).visited, "farm/a", "farm/a2") as balancer:
        told = await balancer.take_out()
        assert (told.is_done, told.facts["last"]) == (False, True)

    class Deaf(Farm):
        def answer(self, command: str) -> bytes:
            if command.startswith("show") and self.is_deaf(any("set" in asked for asked in self.asked)):
                return b""
            return b"\n" if command.startswith("set") and self.is_idle else super().answer(command)

        def __init__(self, is_deaf: Callable[[bool], bool], *, is_idle: bool = False) -> None:
            super().__init__(a=UP, b=UP)
            self.is_deaf, self.is_idle = is_deaf, is_idle

    for farm, is_done in (
        (Deaf(lambda _: True), False),
        (Deaf(lambda was_set: was_set), None),
        (Deaf(lambda _: False, is_idle=True), None),
    ):
        async with haproxy(farm.visited) as balancer:
            assert (await balancer.take_out()).is_done is is_done
            assert any("set" in asked for asked in farm.asked) is (is_done is None)


@each(("is_endless", "limit_s"), [(True, 10.0), (False, 0.3)])
@in_loop
async def test_an_endless_answer_is_cut_and_a_silent_one_left(is_endless: bool, limit_s: float) -> None:
    """Neither fills the memory nor holds anybody up."""

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while is_endless:
                writer.write(b"3 farm 1 a 127.0.0.1 2 0 1\n" * 1_000)
                await writer.drain()
            await reader.read()
        writer.close()

    async with haproxy(visited, deadline_s=limit_s) as balancer:
        assert await balancer.is_out() is None
        assert await balancer.connections() is None
        assert (await balancer.take_out()).is_done is False
        assert (await balancer.put_back()).is_done is False


WORD = st.sampled_from(["farm", "a", "b", "2", "0", "8", "1", "-", "-1", "9" * 30, "x", "#", "", "\x1b[2J", "ü", '"', ","])
KNOWN = [HEADING, STAT, "1", "3 farm 1 a 127.0.0.1 2 0 1", "farm,a,1,2,x,"]
LINE = st.lists(WORD, max_size=9).map(" ".join) | st.sampled_from(KNOWN)


class Said(Farm):
    """Says what a function of the command says."""

    def __init__(self, says: Callable[[str], bytes]) -> None:
        super().__init__()
        self.says = says

    def answer(self, command: str) -> bytes:
        return self.says(command)


@given(lines=st.lists(LINE, max_size=6), junk=st.binary(max_size=20))
@in_loop
async def test_no_answer_makes_it_raise(lines: list[str], junk: bytes) -> None:
    """Whatever the lines hold, there is an answer with one printable sentence."""
    async with haproxy(Said(lambda _: "\n".join(lines).encode() + junk).visited) as balancer:
        for told in (await balancer.take_out(), await balancer.put_back()):
            assert told.message.isprintable()
        assert await balancer.is_out() in (True, False, None)
        found = await balancer.connections()
        assert found is None or found >= 0


@each("admin", [1, 2, 1 | 8, 1 | 4])
@in_loop
async def test_what_an_operator_has_in_maintenance_is_not_taken_out(admin: int) -> None:
    """In any of its places, its own or inherited: nothing is said to any of them."""
    farm = Farm(a=UP, a2=(2, admin, 1), b=UP)
    async with haproxy(farm.visited, "farm/a", "farm/a2") as balancer:
        told = await balancer.take_out()
        assert (told.is_done, told.facts) == (False, {"maint": True})
        assert told.message == "an operator has it in maintenance in farm/a2: it is left alone"
        assert not [command for command in farm.asked if command.startswith("set")]


@each(("rows", "wanted"), cases("guard", "health by a balancer's own check"))
@in_loop
async def test_it_tells_health_by_its_own_check_and_bytes(rows: list[list[str]], wanted: list[Any]) -> None:
    """Down only where it checks and every place fails; a drained one is still checked, an unchecked one says nothing."""

    def answer(command: str) -> bytes:
        number = int(command.split()[2].removeprefix("b"))
        status, check, count = rows[number]
        return f"# pxname,svname,scur,stot,bout,status,check_status,\nb{number},a,2,9,{count},{status},{check},\n".encode()

    async with haproxy(Said(answer).visited, *(f"b{number}/a" for number in range(len(rows)))) as balancer:
        assert await balancer.health() == ServerHealth(wanted[0], wanted[1], wanted[2], busy=2 * len(rows), ended=7 * len(rows))

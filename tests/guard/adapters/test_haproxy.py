"""HAProxy's runtime API over a real Unix socket, with answers that HAProxy would not give; the real one is in tests/real."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.haproxy import HAProxy, ServerLine
from tests.each import each

HEADING = "# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight"
STAT = "# pxname,svname,qcur,qmax,scur,"
Answers = Callable[[str], bytes]


class Talker:
    """A socket that answers each command as it is told to; it remembers them."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            command = (await reader.readline()).decode().strip()
            self.asked.append(command)
            writer.write(self._answers(command))
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def talking(answers: Answers) -> AsyncIterator[tuple[str, Talker]]:
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        talker = Talker(answers)
        path = str(Path(folder) / "admin.sock")
        server = await asyncio.start_unix_server(talker.visited, path)
        try:
            yield path, talker
        finally:
            server.close()


class Farm:
    """What HAProxy holds of one backend: server -> [op state, admin state, weight]."""

    def __init__(self, **servers: tuple[int, int, int]) -> None:
        self.servers = {name: list(state) for name, state in servers.items()}

    def __call__(self, command: str) -> bytes:
        words = command.split()
        if words[:3] == ["show", "servers", "state"]:
            rows = [f"3 farm {i} {name} 127.0.0.1 {op} {admin} {weight}" for i, (name, (op, admin, weight)) in self._listed()]
            return "\n".join(["1", HEADING, *rows, "", ""]).encode()
        if words[:2] == ["set", "server"]:
            self.servers[words[2].partition("/")[2]][1] = 8 if words[4] == "drain" else 0
            return b"\n"
        return "\n".join([STAT, *(f"farm,{name},1,2,3," for name in self.servers), "", ""]).encode()

    def _listed(self) -> Any:
        return enumerate(self.servers.items(), 1)


def run(scene: Awaitable[Any]) -> Any:
    async def go() -> Any:
        return await asyncio.wait_for(scene, 60)

    return asyncio.run(go())


@each(
    ("other", "is_last"),
    [((2, 0, 1), False), ((1, 0, 1), False), ((0, 0, 1), True), ((3, 0, 1), True), ((2, 8, 1), True), ((2, 1, 1), True),
     ((2, 16, 1), True), ((2, 32, 1), True), ((2, 4, 1), False), ((2, 0, 0), True)],
)  # fmt: skip
def test_the_last_one_that_would_get_work_is_not_taken_out(other: tuple[int, int, int], is_last: bool) -> None:
    """Another that is down, stopping, drained, in maintenance, without an address or without weight is no other."""

    async def scene() -> None:
        async with talking(Farm(a=(2, 0, 1), b=other)) as (path, talker):
            told = await HAProxy(path, (ServerLine("farm", "a"),)).take_out()
            assert told.is_done is not is_last
            assert told.facts.get("last", False) is is_last
            assert ("set server farm/a state drain" in talker.asked) is not is_last

    run(scene())


def test_one_that_is_down_takes_nothing_away() -> None:
    """It is taken out although nobody else is up: it served nobody."""

    async def scene() -> None:
        async with talking(Farm(a=(0, 0, 1), b=(0, 0, 1))) as (path, _):
            assert (await HAProxy(path, (ServerLine("farm", "a"),)).take_out()).is_done is True

    run(scene())


def test_two_places_in_one_backend_are_one_engine() -> None:
    """The engine's second place is not the other that stays."""

    async def scene() -> None:
        async with talking(Farm(a=(2, 0, 1), a2=(2, 0, 1))) as (path, _):
            told = await HAProxy(path, (ServerLine("farm", "a"), ServerLine("farm", "a2"))).take_out()
            assert (told.is_done, told.facts["last"]) == (False, True)

    run(scene())


def test_connections_are_sessions_and_queue() -> None:
    """Both are with this server."""

    async def scene() -> None:
        async with talking(Farm(a=(2, 0, 1))) as (path, _):
            assert await HAProxy(path, (ServerLine("farm", "a"),)).connections() == 4

    run(scene())


def test_a_set_that_changes_nothing_is_not_done() -> None:
    """What counts is what is read back."""

    async def scene() -> None:
        farm = Farm(a=(2, 0, 1), b=(2, 0, 1))
        async with talking(lambda command: b"\n" if command.startswith("set") else farm(command)) as (path, _):
            told = await HAProxy(path, (ServerLine("farm", "a"),)).take_out()
        assert told.is_done is None

    run(scene())


def test_an_answer_lost_after_a_change_is_not_known_and_one_before_is_not_done() -> None:
    """The difference is whether anything may have happened."""

    async def scene() -> None:
        farm = Farm(a=(2, 0, 1), b=(2, 0, 1))
        async with talking(lambda command: b"" if "show" in command else b"\n") as (path, talker):
            assert (await HAProxy(path, (ServerLine("farm", "a"),)).take_out()).is_done is False
            assert not any("set" in command for command in talker.asked)
        was_set = False

        def deaf_afterwards(command: str) -> bytes:
            nonlocal was_set
            was_set = was_set or command.startswith("set")
            return b"" if was_set and "show" in command else farm(command)

        async with talking(deaf_afterwards) as (path, _):
            assert (await HAProxy(path, (ServerLine("farm", "a"),)).take_out()).is_done is None

    run(scene())


def test_an_endless_answer_is_cut_and_a_silent_one_left() -> None:
    """Neither fills the memory nor holds anybody up."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while is_endless[0]:
                writer.write(b"3 farm 1 a 127.0.0.1 2 0 1\n" * 1_000)
                await writer.drain()
            await reader.read()
        writer.close()

    is_endless = [True]

    async def scene() -> None:
        with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
            path = str(Path(folder) / "admin.sock")
            server = await asyncio.start_unix_server(silent, path)
            for endless, limit_s in ((True, 10.0), (False, 0.3)):
                is_endless[0] = endless
                balancer = HAProxy(path, (ServerLine("farm", "a"),), deadline_s=limit_s)
                began = time.monotonic()
                assert await balancer.is_out() is None
                assert await balancer.connections() is None
                assert (await balancer.take_out()).is_done is False
                assert (await balancer.put_back()).is_done is False
                assert time.monotonic() - began < 8
            server.close()

    run(scene())


WORD = st.sampled_from(["farm", "a", "b", "2", "0", "8", "1", "-", "-1", "9" * 30, "x", "#", "", "\x1b[2J", "ü", '"', ","])
ROWS = [HEADING, STAT, "1", "3 farm 1 a 127.0.0.1 2 0 1", "farm,a,1,2,x,"]
LINE = st.lists(WORD, max_size=9).map(" ".join) | st.sampled_from(ROWS)


@given(lines=st.lists(LINE, max_size=6), junk=st.binary(max_size=20))
def test_no_answer_makes_it_raise(lines: list[str], junk: bytes) -> None:
    """Whatever the lines hold, there is an answer with one printable sentence."""

    async def scene() -> None:
        async with talking(lambda _: "\n".join(lines).encode() + junk) as (path, _):
            balancer = HAProxy(path, (ServerLine("farm", "a"),))
            for told in (await balancer.take_out(), await balancer.put_back()):
                assert told.message.isprintable()
            assert await balancer.is_out() in (True, False, None)
            found = await balancer.connections()
            assert found is None or found >= 0

    run(scene())


@pytest.mark.parametrize(
    ("path", "places"),
    [("/run/a.sock", ()), ("a.sock", (ServerLine("farm", "a"),)),
     ("/run/a.sock", (ServerLine("farm", "a; disable server farm/b"),)), ("/run/a.sock", (ServerLine("farm", ""),)),
     ("/run/a.sock", (ServerLine("farm\n", "a"),)), ("/run/a\0.sock", (ServerLine("farm", "a"),))],
)  # fmt: skip
def test_a_name_that_would_be_another_command_is_refused(path: str, places: tuple[ServerLine, ...]) -> None:
    """Names reach HAProxy inside a line of commands."""
    with pytest.raises(BadInput):
        HAProxy(path, places)


@pytest.mark.parametrize("admin", [1, 2, 1 | 8, 1 | 4])
def test_what_an_operator_has_in_maintenance_is_not_taken_out(admin: int) -> None:
    """In any of its places, its own or inherited: nothing is said to any of them."""

    async def scene() -> None:
        async with talking(Farm(a=(2, 0, 1), a2=(2, admin, 1), b=(2, 0, 1))) as (path, talker):
            told = await HAProxy(path, (ServerLine("farm", "a"), ServerLine("farm", "a2"))).take_out()
            assert (told.is_done, told.facts) == (False, {"maint": True})
            assert told.message == "an operator has it in maintenance in farm/a2: it is left alone"
            assert not [command for command in talker.asked if command.startswith("set")]

    run(scene())


@each(
    ("rows", "wanted"),
    [
        ((("DOWN", "L4CON", "10"), ("DOWN", "L7STS", "5")), (True, 15, False)),
        ((("DOWN 1/2", "L7STS", "10"), ("UP", "L7OK", "5")), (False, 15, False)),
        ((("no check", "", "10"),), (None, 10, False)),
        ((("DRAIN", "L7OK", "10"),), (None, 10, False)),
        ((("MAINT", "", "x"),), (None, None, True)),
    ],
)
def test_it_tells_health_by_its_own_check_and_bytes(
    rows: tuple[tuple[str, str, str], ...], wanted: tuple[bool | None, int | None, bool]
) -> None:
    """Down only where it checks and every place fails; a drained or unchecked server says nothing."""

    def answer(command: str) -> bytes:
        number = int(command.split()[2].removeprefix("b"))
        status, check, count = rows[number]
        return f"# pxname,svname,scur,bout,status,check_status,\nb{number},a,0,{count},{status},{check},\n".encode()

    async def story() -> None:
        async with talking(answer) as (path, _):
            haproxy = HAProxy(path, tuple(ServerLine(f"b{number}", "a") for number in range(len(rows))))
            assert await haproxy.health() == wanted

    asyncio.run(story())

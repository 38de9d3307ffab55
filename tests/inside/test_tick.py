"""What happens once a second: each part alone, a stuck engine put to the test, a vLLM that was told to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate import Gate
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.pulse import Listener, Pulse
from plimsoll.inside.recorder import Recorder
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.tick import MOST_CLIENTS, WHERE, OwnPort, Tick, _answers, attach, is_suspect, notice_shutdown, where_of
from tests.each import cases, each, sure
from tests.fakes import TOKEN, EngineClient, State, ask, hello, raw_request, settings
from tests.inside.test_gate_control import feed, made
from tests.inside.vllm_shapes import iteration, scheduler


@each(("silent_s", "longest_s", "ahead_s", "suspect"), cases("inside", "silence_with_work_beyond_the_bound_is_suspect"))
def test_silence_with_work_beyond_the_bound_is_suspect(
    silent_s: float, longest_s: float, ahead_s: float, suspect: bool
) -> None:
    """After 120 s, or three times the longest step that was seen."""
    assert is_suspect(silent_s, longest_s, 120.0, ahead_s) is suspect


class Trial:
    """Stands for the test request; counts how often it was made."""

    def __init__(self, *, fails: bool, does: Any = None) -> None:
        self.fails = fails
        self.made = 0
        self._does = does

    async def __call__(self, client: Any, limit_s: float) -> bool:
        del client, limit_s
        self.made += 1
        if self._does is not None:
            self._does()
        return self.fails


def silent(folder: Path) -> tuple[GateControl, EngineClient]:
    """An engine with work and, for a while, no step."""
    core, client = made(folder, PLIMSOLL_WEDGE_S="0.5")
    feed(core, 1, 0)
    client.add("a", 10)
    core.pulse.last_step = time.monotonic() - 60
    core.publish_queue()
    return core, client


async def look(tick: Tick, times: int = 2) -> None:
    for _ in range(times):
        tick._work_since = tick._work_since and time.monotonic() - 50
        tick._wedge()
        await asyncio.sleep(0.01)


async def test_silence_is_put_to_the_test_and_proven_by_it(tmp_path: Path) -> None:
    """Then the server is not ready, the test is not made again, and one step disproves it."""
    core, _ = silent(tmp_path)
    tester = Trial(fails=True)
    tick = Tick(core, tester)
    await look(tick, 1)
    assert tester.made == 0, "the work has only just been seen"
    await look(tick, 4)
    assert tester.made == 1
    assert core.readiness().reason == "wedged"
    core.pulse.note_step(1, 0, 0.5, 0, 1, time.monotonic())
    core._queue_at_ns = 0
    core.publish_queue()
    assert core.readiness().is_ready


async def test_an_engine_that_answers_the_test_is_not_stuck(tmp_path: Path) -> None:
    """Nor one that steps while the test runs; and it is not asked every second."""
    core, _ = silent(tmp_path)

    def step() -> None:
        core.pulse.note_step(1, 0, 0.5, 0, 1, time.monotonic())
        core._queue_at_ns = 0

    for tester in (Trial(fails=False), Trial(fails=True, does=step)):
        await look(Tick(core, tester), 6)
        assert tester.made == 1
        assert core.readiness().is_ready


async def test_an_engine_with_an_excuse_is_never_tested(tmp_path: Path) -> None:
    """Idle, asleep, dead, busy with a call of ours, or with nobody to tell of its steps."""
    for excuse in ("idle", "asleep", "dead", "call", "unfed"):
        core, client = silent(tmp_path)
        tester = Trial(fails=True)
        tick = Tick(core, tester)
        if excuse == "idle":
            client.output_processor.request_states.clear()
            core._queue_at_ns = 0
            core.publish_queue()
        elif excuse == "asleep":
            core.note_sleep(1)
        elif excuse == "dead":
            client.errored = True
        elif excuse == "call":
            _ = asyncio.create_task(core.calls.call(client, "plimsoll_compact"))  # noqa: RUF006
            await asyncio.sleep(0.01)
            assert not tick._is_excused(time.monotonic() + 0.5), "behind a stuck engine a call hangs, too"
        else:
            core.pulse.is_fed = False
        await look(tick, 4)
        assert tester.made == 0, excuse
        core.note_sleep(0)
        client.may_answer.set()
        await asyncio.sleep(0.01)


def test_sleep_is_passed_on_when_it_changes(tmp_path: Path) -> None:
    """What vLLM's statistics say of it."""
    core, _ = made(tmp_path)
    tick = Tick(core)
    core.pulse.note_sleep(True, 1)
    tick._sleep()
    assert core.readiness().reason == "asleep"
    core.pulse.note_sleep(False, 0)
    tick._sleep()
    assert core.readiness().is_ready


async def test_one_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is counted; the beat goes on."""
    core, _ = made(tmp_path)
    tick = Tick(core)
    core.pulse = None  # type: ignore[assignment]
    before = FAULTS.counts.get("the gate's sleep", 0)
    tick.ensure()
    tick.ensure()
    await asyncio.sleep(0.05)
    assert FAULTS.counts["the gate's sleep"] == before + 1
    assert tick._meters is not None
    await tick.stop()
    assert not list(tmp_path.glob("api-*"))


def test_a_place_that_cannot_be_listened_at_does_not_stop_the_tick(tmp_path: Path) -> None:
    """Whatever is wrong with it."""

    async def go(listen: str) -> None:
        core, _ = made(tmp_path, PLIMSOLL_LISTEN=listen)
        tick = Tick(core)
        tick.ensure()
        for _ in range(300):
            await asyncio.sleep(0.01)
            if core.shared.own["beat_ns"]:
                break
        assert core.shared.own["beat_ns"] > 0
        await tick.stop()

    for listen in ("nonsense", "unix:relative", f"{'x' * 70}.example:9", "unix:/nowhere/at/all.sock", f"unix:/{'x' * 200}"):
        asyncio.run(go(listen))


class Client:
    """An engine client with a `shutdown`, as vLLM calls it on SIGTERM."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def shutdown(self, timeout: float | None = None) -> str:
        self.heard.append(timeout)
        return "done"


def test_vllms_call_to_end_is_noticed_once_and_stays_its_own(tmp_path: Path) -> None:
    """Its argument and its answer pass through; listening twice changes nothing; a client without one is left alone."""
    core, _ = made(tmp_path)
    client = Client()
    notice_shutdown(client, core)
    listening = client.shutdown
    notice_shutdown(client, core)
    assert client.shutdown is listening
    before = core.is_stopping
    assert (client.shutdown(timeout=7.0), client.heard) == ("done", [7.0])
    assert (before, core.is_stopping) == (False, True)
    notice_shutdown(object(), core)


async def test_while_it_ends_new_work_is_refused_and_nothing_else(tmp_path: Path) -> None:
    """503 with Retry-After where vLLM would answer 500; looking still works; the reason is `draining`."""
    gate = Gate(hello, settings(tmp_path))
    core = sure(gate._control)
    core.engine._state = State(engine_client=object())
    core.is_stopping = True
    refused = await ask(gate, "POST", "/v1/completions")
    assert (refused.status, bool(refused.headers["retry-after"])) == (503, True)
    looked = await ask(gate, "GET", "/v1/models")
    assert (looked.status, looked.headers["connection"]) == (200, "close")
    assert core.readiness().reason == "draining"
    assert core.shared.own["in_flight"] == 0


# The endpoints on a place of their own: a socket for this user alone, rude clients bounded, nothing stolen.

AUTH = f"Authorization: Bearer {TOKEN}"


async def talk(path: str, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes to a Unix socket; all that comes back."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def at(folder: Path, does: Callable[[str, OwnPort], Awaitable[None]], **more: Any) -> None:
    """Run it against a port that listens in the folder, with little patience."""

    async def go() -> None:
        path = str(folder / "own.sock")
        core, _ = made(folder, PLIMSOLL_LISTEN=f"unix:{path}", **more)
        port = OwnPort(core, patience_s=0.3)
        await port.open()
        try:
            await does(path, port)
        finally:
            await port.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_place_is_a_path_or_an_address_and_else_a_sentence() -> None:
    """Without an address, this machine alone."""
    assert where_of("unix:/run/a.sock") == ("/run/a.sock", 0)
    assert [where_of(text) for text in ("127.0.0.1:9401", ":9401", "9401")] == [("127.0.0.1", 9401)] * 3
    assert where_of("[::1]:9401") == ("::1", 9401)
    for text in ("", "unix:", "unix:a", "host:", "host:0", "host:99999", "host:-1", "host:x"):
        with pytest.raises(ValueError, match="PLIMSOLL_LISTEN"):
            where_of(text)


RUBBISH = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n", 400),
    (b"GET\r\n\r\n", 400),
    (b"GET /plimsoll/state HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n", 431),
    (raw_request("POST", "/plimsoll/drain", b"x" * 70_000, AUTH), 413),
]


def test_requests_are_answered_with_the_token_and_rubbish_with_an_error(tmp_path: Path) -> None:
    """On a socket that only this user may open; one request a connection; what is not HTTP or too large harms none."""

    async def does(path: str, port: OwnPort) -> None:
        del port
        assert Path(path).stat().st_mode & 0o777 == 0o600
        for data, expected in RUBBISH:
            answer = await talk(path, data)
            assert answer == b"" or status(answer) in (expected, 400)
        ready = raw_request("GET", "/plimsoll/ready")
        assert status(await talk(path, ready, half_close=True)) == 200
        assert (await talk(path, ready * 2)).count(b"HTTP/1.1") == 1
        head, _, body = (await talk(path, raw_request("HEAD", "/plimsoll/ready"))).partition(b"\r\n\r\n")
        assert (status(head), b"content-length" in head.lower(), body) == (200, True, b"")
        assert status(await talk(path, raw_request("GET", "/plimsoll/state"))) == 401
        answer = await talk(path, raw_request("GET", "/plimsoll/state?x=1", b"", AUTH))
        assert (status(answer), b"connection: close" in answer.lower()) == (200, True)
        drained = await talk(path, raw_request("POST", "/plimsoll/drain", b'{"epoch": 1}', AUTH))
        assert b'"phase":"leaving"' in drained
        assert status(await talk(path, raw_request("GET", "/v1/models", b"", AUTH))) == 404

    at(tmp_path, does)
    assert not (tmp_path / "own.sock").exists(), "it goes with the server"


def test_a_client_that_says_nothing_is_left_after_a_while(tmp_path: Path) -> None:
    """Slow or silent ones are cut off, and more than so many at once are not heard."""

    async def does(path: str, port: OwnPort) -> None:
        port._patience_s = 60.0  # all of them must be there at once, on a busy machine too
        held = [await asyncio.open_unix_connection(path) for _ in range(MOST_CLIENTS)]
        for _, writer in held:
            writer.write(b"GET /plimsoll/ready HTTP/1.1\r\n")
        while port._clients < MOST_CLIENTS:
            await asyncio.sleep(0.01)
        assert await talk(path, raw_request("GET", "/plimsoll/ready")) == b""
        for _, writer in held:
            writer.close()
        while port._clients:
            await asyncio.sleep(0.01)
        port._patience_s = 0.2
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /plimsoll/ready HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
        port._patience_s = 60.0
        assert status(await talk(path, raw_request("GET", "/plimsoll/ready"))) == 200

    at(tmp_path, does)


def test_a_socket_left_behind_is_replaced_a_live_one_is_taken_over_when_its_holder_goes(tmp_path: Path) -> None:
    """And a file that is no socket is never taken away."""
    path = tmp_path / "own.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))  # never listens: its server is gone

    async def does(where: str, port: OwnPort) -> None:
        core, _ = made(tmp_path, PLIMSOLL_LISTEN=f"unix:{where}")
        core.key = 1  # one of several
        second = OwnPort(core)
        for is_held in (True, False):
            await second.open()
            assert second.is_open is not is_held
            assert status(await talk(where, raw_request("GET", "/plimsoll/ready"))) == 200
            await port.close()
        await second.close()

    at(tmp_path, does)
    path.write_text("precious")

    async def taken(where: str, port: OwnPort) -> None:
        assert port._server is None
        assert Path(where).read_text() == "precious"

    at(tmp_path, taken)
    assert path.read_text() == "precious"


async def test_tcp_serves_this_machine_and_others_only_with_a_token(tmp_path: Path) -> None:
    """An address that others reach is not even opened without one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    for host, token, opens in (
        ("localhost", "", True),
        ("127.0.0.1", "", True),
        ("0.0.0.0", "", False),
        ("0.0.0.0", TOKEN, True),
    ):
        core, _ = made(tmp_path, PLIMSOLL_LISTEN=f"{host}:{number}", PLIMSOLL_TOKEN=token)
        port = OwnPort(core)
        await port.open()
        assert (port._server is not None) is opens
        if opens:
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            writer.write(raw_request("GET", "/plimsoll/state"))
            assert status(await reader.read()) == (401 if token else 403)
            writer.close()
        await port.close()


def test_a_server_with_a_full_queue_is_alive_and_keeps_its_socket(tmp_path: Path) -> None:
    """And to find that out does not wait for a place in the queue: the one that asks is in vLLM's event loop."""
    path = str(tmp_path / "own.sock")
    clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(path)
        began = time.monotonic()
        assert _answers(path)
        assert time.monotonic() - began < 10
    for client in clients:
        client.close()
    assert not _answers(path), "its server is gone"


# Attaching to engine clients shaped as those of each release, read from their sources.

OFF = Recorder(InsideSettings({}))


class Own:
    def record(self, *args: Any, **named: Any) -> None:
        """Whatever it does with it."""


class Maker:
    """Builds loggers that tell one pulse, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.asked: list[tuple[Any, int | list[int]]] = []

    def __call__(self, config: Any, engines: int | list[int]) -> Listener:
        self.asked.append((config, engines))
        one = Listener()
        one.listen(engines if isinstance(engines, int) else 0, self.pulse, OFF)
        return one


def ours(loggers: list[Any]) -> int:
    return sum(isinstance(one, Listener) for one in loggers)


@pytest.mark.parametrize(
    "client",
    [
        SimpleNamespace(logger_manager=None),  # --disable-log-stats from 0.10 on
        SimpleNamespace(stat_loggers=[]),  # and before
        SimpleNamespace(),  # a client of the engine before V1
        SimpleNamespace(logger_manager=SimpleNamespace()),  # a shape to come
        SimpleNamespace(stat_loggers="odd"),
        SimpleNamespace(logger_manager=SimpleNamespace(per_engine_logger_dict={})),
        SimpleNamespace(logger_manager=SimpleNamespace(per_engine_logger_dict={0: None})),
        None,
    ],
)
def test_what_cannot_be_joined_is_said_and_counted(client: Any) -> None:
    """No error reaches the server, and nothing claims that figures will come."""
    before = FAULTS.counts.get(WHERE, 0)
    assert attach(client, Maker()) is False
    assert FAULTS.counts[WHERE] == before + 1


def clients() -> dict[str, tuple[Any, list[list[Any]], Any]]:
    """Of each release: a client of two engine cores, its lists of loggers, and the cores that ours are made for."""
    flat, nested, by_engine, joint = [Own()], [[Own()], [Own(), Own()]], {0: [Own()], 1: list[Any]()}, [Own(), Own()]
    old = SimpleNamespace(per_engine_logger_dict=by_engine, prometheus_logger=Own(), engine_idxs=[0, 1])
    new = SimpleNamespace(stat_loggers=joint, engine_indexes=[0, 1])
    return {
        "0.8.0": (SimpleNamespace(stat_loggers=flat, vllm_config="c"), [flat], [0]),
        "0.8.3": (SimpleNamespace(stat_loggers=nested, vllm_config="c"), nested, [0, 1]),
        "0.10.0": (SimpleNamespace(logger_manager=old, vllm_config="c"), list(by_engine.values()), [0, 1]),
        "0.11.1": (SimpleNamespace(logger_manager=new, vllm_config="c"), [joint], [[0, 1]]),
    }


@each("release", list(clients()))
def test_each_list_of_loggers_gets_one_of_ours_however_often_it_is_asked(release: str) -> None:
    """Where they are: the output handler holds the lists; each of ours tells of its own engine cores."""
    client, lists, cores = clients()[release]
    make = Maker()
    assert [attach(client, make) for _ in range(3)] == [True] * 3
    assert make.asked == [("c", each) for each in cores]
    for engine, running in ((0, 3), (1, 4)):
        for logger in lists[min(engine, len(lists) - 1)]:
            known = {"engine_idx": engine} if release == "0.11.1" else {}
            logger.record(scheduler(running, 0, kv_cache_usage=0.1), iteration(), **known)
    assert [sum(isinstance(one, Listener) for one in loggers) for loggers in lists] == [1] * len(lists)
    assert make.pulse.running == (4 if release == "0.8.0" else 7)


def test_a_manager_that_vllm_built_anew_is_joined_again_and_without_vllm_nothing_is_attached() -> None:
    """As elastic scaling does; one that the plugin put there is enough; without vLLM's base class the answer is no."""
    make = Maker()
    client = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[make(None, [0]), Own()], engine_indexes=[0]))
    for expected in (1, 2):
        assert attach(client, make)
        assert len(make.asked) == expected
        client.logger_manager = SimpleNamespace(stat_loggers=[Own()], engine_indexes=[0, 1])
    manager = SimpleNamespace(stat_loggers=[], engine_indexes=[0])
    assert attach(SimpleNamespace(logger_manager=manager)) is False
    assert manager.stat_loggers == []

"""What a gate does once a second: feed itself, publish its counts, look for a stuck engine, keep the metrics fresh."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from plimsoll.inside.answers import LARGEST_BODY, GateAnswer, error
from plimsoll.inside.endpoints import GateRequest, answer
from plimsoll.inside.engine_view import canary_fails
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.meters import Meters
from plimsoll.inside.pulse import Listener
from plimsoll.inside.shared import ASLEEP, NS, PAUSED
from plimsoll.inside.survive import frontend

# Our stat logger may not be loaded as a plugin: vLLM knows plugins of this kind from 0.11.1 on, `VLLM_PLUGINS` may leave ours
# out, and scaling the engines makes vLLM build its loggers anew without any. Then it is put in here. The shapes, by release:
# 0.8.0 to 0.8.2    engine.stat_loggers: a list of loggers
# 0.8.3 to 0.9.2    engine.stat_loggers: for each engine core a list of loggers
# 0.10.0 to 0.11.0  engine.logger_manager.per_engine_logger_dict: the same by the number of the engine core
# 0.11.1 and later  engine.logger_manager.stat_loggers: a list of loggers, each for all engine cores

WHERE = "attaching to the engine's statistics"
Make = Callable[[Any, int | list[int]], Any]


def attach(engine_client: Any, make: Make | None = None) -> bool:
    """Whether the pulse is fed from here on; safe to be asked again and again. `make` builds a logger for engine cores."""
    try:
        # The module needs vLLM, so it is loaded when a logger is made.
        own: Make = lambda *arguments: importlib.import_module("plimsoll.inside.stat_logger").StatLogger(*arguments)  # noqa: E731
        return _attach(engine_client, make or own)
    except Exception as error:
        FAULTS.note(WHERE, error)
        return False


def _attach(client: Any, make: Make) -> bool:
    config = getattr(client, "vllm_config", None)
    if hasattr(client, "logger_manager"):
        manager = client.logger_manager
        if manager is None:
            return _cannot("vLLM keeps no statistics (--disable-log-stats): no rates, and nothing is recorded")
        if isinstance(loggers := getattr(manager, "stat_loggers", None), list):
            _join(loggers, make, config, list(getattr(manager, "engine_indexes", [0])))
            return True
        if isinstance(by_engine := getattr(manager, "per_engine_logger_dict", None), dict) and by_engine:
            for engine, loggers in by_engine.items():
                _join(loggers, make, config, engine)
            return True
        return _cannot("this vLLM keeps its statistics in a way that is not known: no rates, and nothing is recorded")
    loggers = getattr(client, "stat_loggers", None)
    if not isinstance(loggers, list):
        return _cannot("this vLLM keeps its statistics in a way that is not known: no rates, and nothing is recorded")
    if not loggers:
        return _cannot("vLLM keeps no statistics (--disable-log-stats): no rates, and nothing is recorded")
    if isinstance(loggers[0], list):
        for engine, own in enumerate(loggers):
            _join(own, make, config, engine)
    else:
        _join(loggers, make, config, 0)
    return True


def _join(loggers: list[Any], make: Make, config: Any, engines: int | list[int]) -> None:
    """Last in the list: whatever vLLM's own loggers do has been done by then."""
    if not any(isinstance(logger, Listener) for logger in loggers):
        loggers.append(make(config, engines))


def _cannot(reason: str) -> bool:
    FAULTS.say(WHERE, reason)
    return False


READ_BYTES = 65_536
PATIENCE_S = 10.0  # for a client to send its whole request
MOST_CLIENTS = 64


class Where(NamedTuple):
    """Where to listen: the path of a Unix socket, or an address and a port."""

    path: str = ""
    host: str = ""
    port: int = 0


def where_of(text: str) -> Where | str:
    """What PLIMSOLL_LISTEN says, or a sentence why it cannot be read."""
    if text.startswith("unix:"):
        path = text[5:]
        return Where(path=path) if path.startswith("/") else "PLIMSOLL_LISTEN=unix: needs a path that starts with /"
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        return "PLIMSOLL_LISTEN is neither unix:/path nor host:port"
    return Where(host=host.strip("[]") or "127.0.0.1", port=int(port))


class OwnPort:
    """Serves the endpoints; with several API servers the first to come serves for all, since what they answer is shared."""

    def __init__(self, gate: GateControl, patience_s: float = PATIENCE_S) -> None:
        self._gate = gate
        self._patience_s = patience_s
        self._server: asyncio.Server | None = None
        self._path = ""
        self._clients = 0
        self._is_hopeless = False  # what was set cannot be served, now or later

    @property
    def is_open(self) -> bool:
        """Whether there is nothing left to do: it listens, or it never will."""
        return self._server is not None or self._is_hopeless

    async def open(self) -> None:
        """Begin to listen; a place that is taken or cannot be used is said once, and nothing listens instead."""
        where = where_of(self._gate.settings.listen)
        if isinstance(where, str):
            self._is_hopeless = True
            FAULTS.say("listening", where)
            return
        if not self._gate.tokens.is_set:
            FAULTS.say("listening", "PLIMSOLL_LISTEN is set and PLIMSOLL_TOKEN is not: every endpoint but ready stays off")
        if where.host and not _is_loopback(where.host) and not self._gate.tokens.is_set:
            self._is_hopeless = True
            return
        try:
            self._server = await (
                self._open_unix(where.path) if where.path else asyncio.start_server(self._serve, where.host, where.port)
            )
            LOG.info("plimsoll: endpoints are served at %s", self._gate.settings.listen)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and self._gate.key != os.getpid():
                return  # one of the other API servers of this server has it; should it go, this one takes over
            FAULTS.note(f"listening at {self._gate.settings.listen}", problem)

    async def _open_unix(self, path: str) -> asyncio.Server:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                if _answers(path):
                    raise OSError(errno.EADDRINUSE, "taken")
                os.unlink(path)  # noqa: PTH108 - left behind by a server that is gone
        place = socket.socket(socket.AF_UNIX)
        try:
            before = os.umask(0o177)  # of the whole process: for this one call, not across an await
            try:
                place.bind(path)
            finally:
                os.umask(before)
            server = await asyncio.start_unix_server(self._serve, sock=place)
        except BaseException:
            place.close()
            raise
        self._path = path
        return server

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                if self._path:
                    os.unlink(self._path)  # noqa: PTH108

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= MOST_CLIENTS:
                await self._converse(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client has gone, or says nothing
        except Exception as problem:
            FAULTS.note("serving an endpoint", problem)
        finally:
            self._clients -= 1
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer, and the connection ends."""
        h11 = importlib.import_module("h11")
        connection = h11.Connection(h11.SERVER)
        try:
            ask = await asyncio.wait_for(_read(h11, connection, reader), self._patience_s)
            reply = error(413, "the body is too large", "BadRequestError") if ask is None else await answer(self._gate, ask)
            is_head = ask is not None and ask.method == "HEAD"
        except h11.RemoteProtocolError:
            reply, is_head = error(400, "this is not HTTP", "BadRequestError"), False
        await _write(h11, connection, writer, reply, is_head=is_head)


async def _read(h11: Any, connection: Any, reader: asyncio.StreamReader) -> GateRequest | None:
    """The whole request; None when its body is too large."""
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
            if len(body) > LARGEST_BODY:
                return None
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            path = bytes(request.target).partition(b"?")[0].decode("latin-1")
            return GateRequest(
                bytes(request.method).decode("latin-1"), path, [(bytes(n), bytes(v)) for n, v in request.headers], body
            )
        else:
            raise OSError("the client has gone")


async def _write(h11: Any, connection: Any, writer: asyncio.StreamWriter, reply: GateAnswer, *, is_head: bool) -> None:
    body, headers = reply.encoded()
    headers = [*(pair for pair in headers if pair[0] != b"connection"), (b"connection", b"close")]
    if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    data = connection.send(h11.Response(status_code=reply.status, headers=headers))
    if not is_head:
        data += connection.send(h11.Data(data=body))
    writer.write(data)
    await asyncio.wait_for(writer.drain(), PATIENCE_S)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _answers(path: str) -> bool:
    """Whether somebody listens there; never waits, since vLLM's event loop would wait along."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full: it lives and is busy
        except OSError:
            return False
    return True


# On SIGTERM with `--shutdown-timeout` vLLM answers /health with 200 and every new request with 500 until its engine is done.
# The first thing it does is to call its engine client's `shutdown`; that call, of this one object, is listened to.

MARK = "plimsoll_notices"


def notice_shutdown(client: Any, gate: GateControl) -> None:
    """Stand before the client's `shutdown`, once; what it does and returns stays vLLM's own."""
    own = getattr(client, "shutdown", None)
    if own is None or hasattr(own, MARK):
        return

    @functools.wraps(own)
    def shutdown(*args: Any, **kwargs: Any) -> Any:
        gate.is_stopping = True
        return own(*args, **kwargs)

    setattr(shutdown, MARK, True)
    client.shutdown = shutdown


# Suspected: no step for longer than three times the longest step seen and than the bound, with work waiting, awake and not
# dead. Proven: suspected, and a request of one token got no answer. One step disproves both.

LONGEST_STEPS = 3.0


class Progress(NamedTuple):
    """What is known of the engine's steps; times are seconds of the monotonic clock."""

    has_work: bool
    work_since: float  # when work was first seen waiting after the last time there was none
    last_step: float | None
    longest_step_s: float
    is_excused: bool  # asleep, paused, dead, starting, or busy with a call of ours


def is_suspect(progress: Progress, bound_s: float, now: float, ahead_s: float = 0.0) -> bool:
    """Whether it is time for the test request, which is sent `ahead_s` before the bound: it takes that long to fail."""
    if not progress.has_work or progress.is_excused:
        return False
    silent_since = max(progress.work_since, progress.last_step or 0.0)
    # A step that took as long as the bound was a failure: it does not make the next one normal.
    longest_s = progress.longest_step_s if progress.longest_step_s < bound_s else 0.0
    return now - silent_since > max(bound_s, LONGEST_STEPS * longest_s) - ahead_s


EVERY_S = 1.0
PORT_TURNS = 10
Test = Callable[[Any, float], Awaitable[bool]]
AGAIN_AFTER_S = 30.0  # between two test requests that brought no clear answer


class Tick:
    """A task on the server's own loop; each part fails alone."""

    def __init__(self, gate: GateControl, test: Test = canary_fails) -> None:
        self._gate = gate
        self._test = test
        self._task: asyncio.Task[None] | None = None
        self._canary: asyncio.Task[None] | None = None
        self._meters: Meters | None = None
        self._port = OwnPort(gate) if gate.settings.listen else None
        self._work_since = 0.0
        self._next_canary = 0.0
        self._sleep_level: int | None = None

    def ensure(self) -> None:
        """Start the task if it does not run; called with every request, so it must be cheap."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        for task in (self._task, self._canary):
            if task is not None:
                task.cancel()
        if self._port is not None:
            await self._port.close()
        self._gate.close()

    async def _run(self) -> None:
        gate = self._gate
        where = gate.settings.listen or "vLLM's own port"
        LOG.info(
            "plimsoll: the gate is in; endpoints %s; recording %s",
            f"at {where}" if gate.tokens.is_set else "but ready are off, since PLIMSOLL_TOKEN is not set",
            f"to {gate.settings.record_folder}" if gate.settings.record_folder else "off",
        )
        if gate.settings.survive and gate.alone is None:
            frontend.install()  # an API server that was started anew has loaded no plugin
        turns = 0
        while True:
            if turns % PORT_TURNS == 0:
                await self._listen()
            turns += 1
            for part in (self._feed, self._publish, self._sleep, self._wedge, self._turn, self._measure):
                try:
                    part()
                except Exception as error:
                    FAULTS.note(f"the gate's {part.__name__.strip('_')}", error)
            await asyncio.sleep(EVERY_S)

    async def _listen(self) -> None:
        """Open the port, or take it over from an API server that is gone."""
        try:
            if self._port is not None and not self._port.is_open:
                await self._port.open()
        except Exception as error:
            FAULTS.note("listening", error)

    def _feed(self) -> None:
        if self._gate.engine.client is not None:
            attach(self._gate.engine.client)
            notice_shutdown(self._gate.engine.client, self._gate)
            self._gate.follow()

    def _publish(self) -> None:
        shared = self._gate.shared
        shared.pages(look=True)
        self._gate.publish_queue()
        shared.own["beat_ns"] = time.monotonic_ns()
        self._gate.end_late_bodies()
        self._gate.end_old_drain()

    def _sleep(self) -> None:
        level = self._gate.pulse.sleep_level
        if level != self._sleep_level:
            self._sleep_level = level
            self._gate.note_sleep(0 if level is None else ASLEEP if level > 0 else PAUSED)

    def _wedge(self) -> None:
        gate, now = self._gate, time.monotonic()
        has_work = gate.shared.own["engine_requests"] > 0
        if not has_work:
            self._work_since = 0.0
        elif self._work_since == 0.0:
            self._work_since = now
        progress = Progress(
            has_work=has_work,
            work_since=self._work_since,
            last_step=gate.shared.latest("last_step_ns") / NS or None,
            longest_step_s=gate.shared.latest("longest_step_ns") / NS,
            is_excused=self._is_excused(now),
        )
        wedge_s, canary_s = gate.settings.wedge_s, gate.settings.canary_s
        if gate.is_wedged() or now < self._next_canary or not is_suspect(progress, wedge_s, now, min(canary_s, wedge_s / 2)):
            return
        if self._canary is None or self._canary.done():
            self._next_canary = now + gate.settings.canary_s + AGAIN_AFTER_S
            self._canary = asyncio.get_running_loop().create_task(self._prove(gate.shared.latest("last_step_ns")))

    def _turn(self) -> None:
        if self._gate.engine.client is not None:
            self._gate.knobs.turn_queue(self._gate.engine.client)

    def _is_excused(self, now: float) -> bool:
        """Whether there is another reason for it not to step; a call of ours is one, but not for ever."""
        gate = self._gate
        is_called = 0 < gate.calls.running_s(now) < gate.settings.wedge_s
        if bool(gate.asleep_words()) or gate.engine.is_dead() or is_called or gate.is_stopping or not gate.pulse.is_fed:
            return True
        last = gate.survive()["last"]  # an engine that computes again what a contained failure cost is at work
        return last is not None and last["age_s"] < gate.settings.wedge_s

    async def _prove(self, last_step_ns: int) -> None:
        gate = self._gate
        fails = await self._test(gate.engine.client, gate.settings.canary_s)
        gate.publish_queue()
        if fails and gate.shared.latest("last_step_ns") <= last_step_ns:
            gate.shared.common["wedged_at_ns"] = time.monotonic_ns()
            FAULTS.say(
                "the engine", "no step for too long with work waiting, and a request of one token was not answered: it is stuck"
            )

    def measure(self) -> None:
        try:
            self._gate.publish_queue()
            self._measure()
        except Exception as error:
            FAULTS.note("the gate's measure", error)

    def _measure(self) -> None:
        if self._meters is None:
            self._meters = Meters(self._gate)
        self._meters.refresh()

"""The gate's work every second: follow vLLM's statistics, publish counts, look for a stuck engine, refresh the metrics."""

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
from typing import Any

from plimsoll.inside.answers import LARGEST_BODY, GateAnswer, error
from plimsoll.inside.endpoints import GateRequest, answer
from plimsoll.inside.engine_view import canary_fails
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.meters import Meters
from plimsoll.inside.pulse import Listener
from plimsoll.inside.shared import ASLEEP, NS, PAUSED
from plimsoll.inside.survive.plugin import install_frontend

# Our stat logger may not be loaded as a plugin: vLLM knows plugins of this kind from 0.11.1 on, `VLLM_PLUGINS` may leave ours
# out, and scaling the engines makes vLLM build its loggers anew without plugins. Then it is added here. The shapes, by release:
# 0.8.0 to 0.8.2    engine.stat_loggers: a list of loggers
# 0.8.3 to 0.9.2    engine.stat_loggers: for each engine core a list of loggers
# 0.10.0 to 0.11.0  engine.logger_manager.per_engine_logger_dict: the same by the number of the engine core
# 0.11.1 and later  engine.logger_manager.stat_loggers: a list of loggers, each for all engine cores

WHERE = "attaching to the engine's statistics"
NO_STATISTICS = "vLLM keeps no statistics (--disable-log-stats)"
Make = Callable[[Any, int | list[int]], Any]


def attach(engine_client: Any, make: Make | None = None) -> bool:
    """Adds our stat logger to vLLM's, once; True if it is there. Safe to call again. `make` builds it for engine cores."""
    with FAULTS.noting(WHERE):
        lists = _logger_lists(engine_client)
        if isinstance(lists, str):
            FAULTS.say(WHERE, f"{lists}: no rates, and nothing is recorded")
            return False
        # The module needs vLLM, so it is loaded when a logger is made.
        own: Make = lambda *arguments: importlib.import_module("plimsoll.inside.stat_logger").StatLogger(*arguments)  # noqa: E731
        for loggers, engines in lists:
            if not any(isinstance(logger, Listener) for logger in loggers):
                # Last in the list: vLLM's own loggers run before it.
                loggers.append((make or own)(getattr(engine_client, "vllm_config", None), engines))
        return True
    return False


def _logger_lists(client: Any) -> list[tuple[list[Any], int | list[int]]] | str:
    """Returns each list of loggers with its engine cores, by the shapes above; or the reason why there is none."""
    manager = getattr(client, "logger_manager", client)
    if manager is None:
        return NO_STATISTICS
    loggers, by_engine = getattr(manager, "stat_loggers", None), getattr(manager, "per_engine_logger_dict", None)
    if manager is not client and isinstance(loggers, list):
        return [(loggers, list(getattr(manager, "engine_indexes", [0])))]
    if manager is not client and isinstance(by_engine, dict) and by_engine:
        return [(own, engine) for engine, own in by_engine.items()]
    if manager is not client or not isinstance(loggers, list):
        return "this vLLM keeps its statistics in a way that is not known"
    if not loggers:
        return NO_STATISTICS
    return [(own, engine) for engine, own in enumerate(loggers)] if isinstance(loggers[0], list) else [(loggers, 0)]


READ_BYTES = 65_536
PATIENCE_S = 10.0  # for a client to send its whole request
MOST_CLIENTS = 64


def where_of(text: str) -> tuple[str, int]:
    """Returns PLIMSOLL_LISTEN's address and port, or a Unix socket's path and 0. Raises ValueError where it is neither."""
    if text.startswith("unix:"):
        if not text.startswith("unix:/"):
            raise ValueError("PLIMSOLL_LISTEN=unix: needs a path that starts with /")
        return text[5:], 0
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError("PLIMSOLL_LISTEN is neither unix:/path nor host:port")
    return host.strip("[]") or "127.0.0.1", int(port)


class OwnPort:
    """The endpoints' own port; of several API servers the first serves for all, since their answers come from shared state."""

    def __init__(self, gate: GateControl, patience_s: float = PATIENCE_S) -> None:
        self._gate = gate
        self._patience_s = patience_s
        self._server: asyncio.Server | None = None
        self._path = ""
        self._clients = 0
        self._is_hopeless = False  # PLIMSOLL_LISTEN's value cannot be served, now or later

    @property
    def is_open(self) -> bool:
        """True if nothing is left to do: it listens, or it never will."""
        return self._server is not None or self._is_hopeless

    async def open(self) -> None:
        """Begins to listen; an address that is taken or cannot be used is logged once, and no other is tried."""
        try:
            place, port = where_of(self._gate.settings.listen)
        except ValueError as problem:
            self._is_hopeless = True
            FAULTS.say("listening", str(problem))
            return
        if not self._gate.tokens.is_set:
            FAULTS.say("listening", "PLIMSOLL_LISTEN is set and PLIMSOLL_TOKEN is not: every endpoint but ready stays off")
            if port and place not in ("localhost", "::1") and not place.startswith("127."):
                self._is_hopeless = True
                return
        try:
            self._server = await (asyncio.start_server(self._serve, place, port) if port else self._open_unix(place))
            LOG.info("plimsoll: endpoints are served at %s", self._gate.settings.listen)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and self._gate.key != os.getpid():
                return  # another API server of this server has it; if that one ends, this one takes over
            FAULTS.note(f"listening at {self._gate.settings.listen}", problem)

    async def _open_unix(self, path: str) -> asyncio.Server:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                if _answers(path):
                    raise OSError(errno.EADDRINUSE, "taken")
                os.unlink(path)  # noqa: PTH108 - left behind by a server that is gone
        place = socket.socket(socket.AF_UNIX)
        try:
            before = os.umask(0o177)  # it holds for the whole process: set for this one call, not across an await
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
        """Answers one request and closes the connection; a client that has gone or sends nothing is no fault."""
        self._clients += 1
        try:
            with FAULTS.noting("serving an endpoint"), contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                if self._clients > MOST_CLIENTS:
                    return
                h11 = importlib.import_module("h11")
                connection, ask = h11.Connection(h11.SERVER), None
                try:
                    ask = await asyncio.wait_for(_read(h11, connection, reader), self._patience_s)
                    reply = error(413, "the body is too large")
                    if ask is not None:
                        reply = await answer(self._gate, ask)
                except h11.RemoteProtocolError:
                    reply = error(400, "this is not HTTP")
                await _write(h11, connection, writer, reply, is_head=ask is not None and ask.method == "HEAD")
        finally:
            self._clients -= 1
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()


async def _read(h11: Any, connection: Any, reader: asyncio.StreamReader) -> GateRequest | None:
    """Returns the whole request; None when its body is too large."""
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


def _answers(path: str) -> bool:
    """True if a process listens at the socket; never waits, since vLLM's event loop would wait too."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.0)
        return probe.connect_ex(path) in (0, errno.EAGAIN)  # its queue is full: it lives and is busy


# On SIGTERM with `--shutdown-timeout` vLLM answers /health with 200 and every new request with 500 until its engine is done.
# First of all it calls its engine client's `shutdown`; so that method, of this one object, is wrapped.

MARK = "plimsoll_notices"


def notice_shutdown(client: Any, gate: GateControl) -> None:
    """Wraps the client's `shutdown`, once, to note the call; its effect and result stay vLLM's own."""
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


def is_suspect(silent_s: float, longest_step_s: float, bound_s: float, ahead_s: float = 0.0) -> bool:
    """True if it is time for the canary request, which is sent `ahead_s` before the bound, because it takes so long to fail."""
    # A step that took as long as the bound was a failure: it does not make the next one normal.
    longest_s = longest_step_s if longest_step_s < bound_s else 0.0
    return silent_s > max(bound_s, LONGEST_STEPS * longest_s) - ahead_s


EVERY_S = 1.0
PORT_TURNS = 10
Test = Callable[[Any, float], Awaitable[bool]]
AGAIN_AFTER_S = 30.0  # between two canary requests, beside the first one's own time limit


class Tick:
    """The gate's task on the server's own event loop; a part that fails does not stop the others."""

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
        """Starts the task if it does not run; called with every request, so it must be cheap."""
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
            install_frontend()  # an API server in a new process has loaded no plugin
        turns = 0
        while True:
            if turns % PORT_TURNS == 0 and self._port is not None and not self._port.is_open:
                with FAULTS.noting("listening"):
                    await self._port.open()  # or take it over from an API server that is gone
            turns += 1
            for part in (self._feed, self._publish, self._sleep, self._wedge, self._turn, self._measure):
                with FAULTS.noting(f"the gate's {part.__name__.strip('_')}"):
                    part()
            await asyncio.sleep(EVERY_S)

    def _feed(self) -> None:
        if self._gate.engine.client is not None:
            attach(self._gate.engine.client)
            notice_shutdown(self._gate.engine.client, self._gate)
            self._gate.follow()

    def _turn(self) -> None:
        if self._gate.engine.client is not None:
            self._gate.knobs.turn_queue(self._gate.engine.client)

    def _publish(self) -> None:
        self._gate.shared.pages(look=True)
        self._gate.publish_queue()
        self._gate.shared.own["beat_ns"] = time.monotonic_ns()
        self._gate.keep_drain()

    def _sleep(self) -> None:
        level = self._gate.pulse.sleep_level
        if level != self._sleep_level:
            self._sleep_level = level
            self._gate.note_sleep(0 if level is None else ASLEEP if level > 0 else PAUSED)

    def _wedge(self) -> None:
        gate, now = self._gate, time.monotonic()
        if gate.shared.own["engine_requests"] == 0:
            self._work_since = 0.0
            return
        self._work_since = self._work_since or now
        wedge_s, canary_s = gate.settings.wedge_s, gate.settings.canary_s
        last_ns, longest_ns = gate.shared.latest("last_step_ns"), gate.shared.latest("longest_step_ns")
        silent_s = now - max(self._work_since, last_ns / NS)
        if gate.is_wedged() or now < self._next_canary or self._is_excused(now):
            return
        if not is_suspect(silent_s, longest_ns / NS, wedge_s, min(canary_s, wedge_s / 2)):
            return
        if self._canary is None or self._canary.done():
            self._next_canary = now + canary_s + AGAIN_AFTER_S
            self._canary = asyncio.get_running_loop().create_task(self._prove(last_ns))

    def _is_excused(self, now: float) -> bool:
        """True if the engine has another reason to make no steps; a call of ours is one, but not for ever."""
        gate = self._gate
        is_called = gate.calls.is_running and now - gate.calls.began < gate.settings.wedge_s
        if bool(gate.asleep_words()) or gate.engine.is_dead() or is_called or gate.is_stopping or not gate.pulse.is_fed:
            return True
        last = gate.survive()["last"]  # an engine that recomputes after a contained failure is at work
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
        with FAULTS.noting("the gate's measure"):
            self._gate.publish_queue()
            self._measure()

    def _measure(self) -> None:
        if self._meters is None:
            self._meters = Meters(self._gate)
        self._meters.refresh()

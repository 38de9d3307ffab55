"""Serves one stand-in or a whole fleet in one process and on one event loop, each on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp
from uvicorn.logging import AccessFormatter

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.inside import places
from plimsoll.inside.gate import Gate
from plimsoll.inside.settings import InsideSettings
from plimsoll.simulate.compiled import telling
from plimsoll.standin import launch_log
from plimsoll.standin.config import Launchable, ServerFlags
from plimsoll.standin.engine import StandinEngine
from plimsoll.standin.faults import NS, ONLY_AT_START, Fault
from plimsoll.standin.launch_log import StartLogLine, failed_lines, start_lines, want_of_memory, written
from plimsoll.standin.request import RequestSpec
from plimsoll.standin.serve.api import make_app
from plimsoll.standin.serve.metrics import Metrics
from plimsoll.standin.serve.service import ClientView, Driver, Service, one_token

BACKLOG = 2048
KEEP_ALIVE_S = 5  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE
LAST_ANSWERS_S = 3  # for clients to take the rest of their answers
COMPILING = "plimsoll: compiling the scheduler; this happens once and takes about 20 s"
LAST_WORDS_S = 1  # for the app to notice that its clients have gone


class StartFailed(PlimsollError):
    """The address cannot be used, or a middleware failed to start; vLLM ends with the same exit code."""

    exit_code = 1


class Port:
    """A bound port that refuses clients until `open`, as vLLM does while it starts."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise StartFailed(f"{host or '*'}:{port}: {error.strerror or error}") from None
        self.number: int = self._socket.getsockname()[1]
        self.server: uvicorn.Server | None = None

    async def open(self, app: ASGIApp, *, root_path: str = "", has_access_log: bool = False) -> None:
        """Lets clients in, without uvicorn's own loop: it would wake ten times a second per server, and take the signals."""
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=has_access_log,
            root_path=root_path,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_ANSWERS_S + LAST_WORDS_S,
            backlog=BACKLOG,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.on_tick(0)
        try:
            await server.startup(sockets=[self._socket])
        except SystemExit:
            raise StartFailed("a --middleware failed in its lifespan.startup; the lines above say how") from None
        self.server = server

    async def close(self) -> None:
        """Refuses new clients, and returns when the last answer is sent; a client that does not take it is cut off."""
        if self.server is None:
            self._socket.close()
            return
        connections = self.server.server_state.connections

        def abort() -> None:
            for connection in list(connections):
                connection.transport.abort()

        cut_off = asyncio.get_running_loop().call_later(LAST_ANSWERS_S, abort)
        await self.server.shutdown(sockets=[self._socket])
        cut_off.cancel()
        self.server = None


# Puts one server together: its app and the middlewares of its flags.


def assemble(
    driver: Driver, options: ServerFlags, *, is_alone: bool = True, settings: InsideSettings | None = None
) -> Starlette:
    """Returns the app, with its service and its engine client in its state.

    `settings` are the gate's. `is_alone`: no other server is in this process.
    """
    service = Service(driver, options)
    client = ClientView(service)
    registry = CollectorRegistry()  # the gate's

    def layer(app: Any, path: str) -> Any:
        module, _, name = path.rpartition(".")
        try:
            middleware: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise BadInput(f"--middleware {path}: {error}") from None
        if not isinstance(middleware, type):
            raise BadInput(f"--middleware {path}: a class that takes an ASGI app is expected")
        if middleware is Gate:
            return Gate(app, settings, client.alone(registry), one_token)
        try:
            return middleware(app)
        except Exception as error:  # a user's own middleware
            says = " ".join(f"{type(error).__name__}: {error}".split())
            raise StartFailed(f"--middleware {path}: {says}") from error

    # The last one named is the outermost, as in vLLM.
    layers = [Middleware(layer, path) for path in reversed(options.middleware)]
    app = make_app(service, Metrics(service, registry, is_alone=is_alone), layers)
    app.state.engine_client = client
    app.state.args = options
    app.middleware_stack = app.build_middleware_stack()  # a middleware that cannot be made ends the start
    return app


# The life of one server and its log: it starts or fails to start, serves, and dies with its engine or is stopped.

WATCHDOG_S = 5.0  # how often vLLM looks whether its engine has died
TEARDOWN_S = 0.5
LOOK_S = 0.02
SHORTEST_S = 0.1  # between two lines of throughput, however fast time passes: people read the log
HAS_ENDED, HAS_FAILED = 0, 1


def say(lines: Iterable[StartLogLine], release: str) -> None:
    for line in lines:
        text = written(line, time.strftime("%m-%d %H:%M:%S"), os.getpid(), release)
        print(text, file=sys.stderr if line.is_error else sys.stdout, flush=True)


async def say_in_time(lines: Iterable[StartLogLine], seconds: float, release: str) -> None:
    """Prints each line when its share of the time has passed; returns when all of it has."""
    began = time.monotonic()
    for line in lines:
        await asyncio.sleep(max(0.0, began + min(1.0, line.share) * seconds - time.monotonic()))
        say([line], release)
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))


class Life:
    """One server from its start to its end; quiet in a fleet."""

    def __init__(self, launch: Launchable, faults: Sequence[Fault], *, speed: float, is_quiet: bool) -> None:
        slow_s = sum(fault.value for fault in faults if fault.kind == "slow-start")
        self.launch = launch
        self.log = replace(launch.log, seconds=launch.log.seconds + slow_s)
        self.port = Port(launch.options.host, launch.options.port)
        self.driver = Driver(
            StandinEngine(launch.config, [one for one in faults if one.kind not in ONLY_AT_START]), time.monotonic_ns, speed
        )
        self._fails = any(fault.kind == "start-failure" for fault in faults)
        self._is_quiet = is_quiet
        self._speed = speed
        self._change = asyncio.Event()  # dead, or told to stop
        self._is_stopped = self._is_met_dead = False

    def stop(self) -> None:
        self._is_stopped = True
        self._change.set()

    async def run(self) -> int:
        launch, log, driver = self.launch, self.log, self.driver
        lines: Iterable[StartLogLine] = start_lines(log, os.getpid())
        if self._fails:
            lines = failed_lines(log, want_of_memory(log))
        else:
            app = assemble(driver, launch.options, is_alone=not self._is_quiet)
        starting = asyncio.create_task(say_in_time(() if self._is_quiet else lines, log.seconds / self._speed, log.release))
        stopping = asyncio.create_task(self._change.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        is_started = starting.done()
        starting.cancel()
        stopping.cancel()
        if self._fails or not is_started:
            await self.port.close()
            return HAS_FAILED if is_started else HAS_ENDED

        def look() -> None:
            if driver.engine.is_dead:
                self._change.set()

        def meet() -> None:
            self._is_met_dead = True

        driver.on_turn = look
        app.state.service.on_death = meet
        has_access_log = launch.options.shows_requests and not self._is_quiet
        await self.port.open(app, root_path=launch.options.root_path, has_access_log=has_access_log)
        driver.start()
        began = time.monotonic()
        telling = asyncio.create_task(self._tell_rates())
        try:
            await self._change.wait()
            if self._is_stopped and not driver.engine.is_dead:
                await self._stop(app.state.service, app.state.engine_client)
            else:
                await self._die(began)
            return HAS_ENDED
        finally:
            telling.cancel()
            driver.stop()

    def _tell(self, part: str, *facts: object) -> None:
        if not self._is_quiet:
            say(launch_log.log_lines(self.log, part, *facts), self.log.release)

    async def _die(self, began: float) -> None:
        engine, watchdog_s = self.driver.engine, WATCHDOG_S / self._speed
        self._tell("death", engine.death or "", engine.figures, engine.died_of_logits)
        if self.launch.options.stays_when_dead:
            while not self._is_stopped:
                await asyncio.sleep(LOOK_S)
        # Once a client was told that the engine is dead, vLLM ends without waiting for its watchdog.
        end = began + watchdog_s * (1 + int((time.monotonic() - began) / watchdog_s))
        while time.monotonic() < end and not self._is_met_dead and not self._is_stopped:
            await asyncio.sleep(min(LOOK_S, watchdog_s))
        await self.port.close()
        self._tell("after_death", os.getpid())

    async def _stop(self, service: Service, client: ClientView) -> None:
        timeout_s = self.launch.options.shutdown_timeout_s
        self._tell("stop", int(timeout_s), len(service.states), os.getpid())
        client.shutdown(timeout=timeout_s)
        end = time.monotonic() + timeout_s / self._speed
        while service.states and not service.engine.is_dead and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        if service.states:
            # vLLM ends its engine then, and clients that still wait find it dead.
            service.engine.die("the time for a shutdown has passed")
            service.driver.turn()
        # vLLM ends its engine first, which takes seconds: answers that are ready meanwhile are still sent.
        await asyncio.sleep(TEARDOWN_S / self._speed)
        await self.port.close()
        self._tell("stopped")

    async def _tell_rates(self) -> None:
        options = self.launch.options
        if self._is_quiet or not options.has_stats:
            return
        figures, was_idle = self.driver.engine.figures, 0
        before, before_ns = (figures.prompt_tokens, figures.generation_tokens), self.driver.now_ns()
        while True:
            await asyncio.sleep(max(SHORTEST_S, options.stats_interval_s / self._speed))
            now, now_ns = (figures.prompt_tokens, figures.generation_tokens), self.driver.now_ns()
            passed_s = max(1e-9, (now_ns - before_ns) / NS)
            is_idle = now == before and not figures.running and not figures.waiting
            was_idle = was_idle + 1 if is_idle else 0
            if was_idle < 2:
                rates = [(after - earlier) / passed_s for after, earlier in zip(now, before, strict=True)]
                self._tell("stats", figures, *rates)
            before, before_ns = now, now_ns


def serve(launches: Sequence[Launchable], *, speed: float = 1.0, faults: Sequence[Fault] = ()) -> int:
    """Serves until all have ended or a signal stops them; returns the exit code of the process."""
    first = launches[0]
    if first.failure is not None:
        lines, seconds = failed_lines(first.log, first.failure), first.log.seconds / speed
        asyncio.run(say_in_time(lines, seconds, first.log.release))
        return HAS_FAILED
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # as many sockets as this user may have, as vLLM does
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with telling(lambda: print(COMPILING, file=sys.stderr, flush=True)):
        # A request to a throwaway engine: the scheduler is compiled at its first step, and clients would wait for it.
        engine = StandinEngine(first.config)
        engine.submit(RequestSpec(np.arange(first.config.settings.block_size, dtype=np.int64), 2), 0)
        engine.advance(NS)
    port = first.options.port
    faults = [one for one in faults if one.kind != "start-failure" or not one.value or _fails_again(int(one.value), port)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(launches, speed, faults))


async def _serve(launches: Sequence[Launchable], speed: float, faults: Sequence[Fault]) -> int:
    is_fleet = len(launches) > 1
    lives = [Life(launch, faults, speed=speed, is_quiet=is_fleet) for launch in launches]
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for life in lives:
            life.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if is_fleet:
        first, last = lives[0].port.number, lives[-1].port.number
        print(f"plimsoll: {len(lives)} stand-ins on ports {first} to {last}", file=sys.stderr, flush=True)
    elif launches[0].options.shows_requests:
        answers = logging.getLogger("uvicorn.access")
        line = launch_log.uvicorn('%(client_addr)s - "%(request_line)s" %(status_code)s')
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(AccessFormatter(written(line, "", os.getpid(), launches[0].log.release), use_colors=False))
        answers.addHandler(handler)
        answers.setLevel(logging.INFO)
        answers.propagate = False

    async def keep_dates() -> None:
        while True:
            await asyncio.sleep(1.0)
            for life in lives:
                if life.port.server is not None:
                    await life.port.server.on_tick(0)

    dates = loop.create_task(keep_dates())
    gc.freeze()  # the present objects stay: later collections need not look at them

    async def lived(life: Life) -> int:
        code = await life.run()
        if is_fleet and life.driver.engine.is_dead:
            print(f"plimsoll: the engine on port {life.port.number} has died", file=sys.stderr, flush=True)
        return code

    codes = await asyncio.gather(*map(lived, lives))
    dates.cancel()
    return HAS_FAILED if all(code == HAS_FAILED for code in codes) else HAS_ENDED


def _fails_again(times: int, port: int) -> bool:
    """True if starts on this port have failed fewer than `times` times; a file counts, since each start is a process."""
    folder = places.run_folder(InsideSettings().folder)
    if folder is None:
        return True
    path = Path(folder) / f"standin-{port}.starts"
    try:
        failed = int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        failed = 0
    if failed >= times:
        path.unlink(missing_ok=True)
        return False
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    os.write(handle, str(failed + 1).encode())
    os.close(handle)
    return True

"""Serves one stand-in or a whole fleet of them in one process and on one event loop, each on a port of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from plimsoll.inside import places
from plimsoll.inside.settings import Settings
from plimsoll.simulate.compiled import telling
from plimsoll.standin.config import Launchable
from plimsoll.standin.engine import Engine
from plimsoll.standin.faults import NS, Fault
from plimsoll.standin.request import Ask
from plimsoll.standin.serve.life import HAS_FAILED, AccessLines, Life
from plimsoll.standin.serve.port import allow_many_sockets, keep_dates


def serve(launches: Sequence[Launchable], *, speed: float = 1.0, faults: Sequence[Fault] = ()) -> int:
    """Until all have ended or somebody stops them; the exit code of the process."""
    allow_many_sockets()
    with telling(_say_compiling):
        _warm_up(launches[0])
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(launches, speed, _counted(faults, launches)))


def _say_compiling() -> None:
    print("plimsoll: compiling the scheduler; this happens once and takes about 20 s", file=sys.stderr, flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop that vLLM runs on, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


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
    elif launches[0].log.shows_requests:
        answers = logging.getLogger("uvicorn.access")
        answers.addHandler(AccessLines(lives[0].log))
        answers.setLevel(logging.INFO)
        answers.propagate = False
    dates = loop.create_task(keep_dates([life.port for life in lives]))
    gc.freeze()  # what is here stays: later collections need not look at it
    codes = await asyncio.gather(*(_lived(life, is_fleet=is_fleet) for life in lives))
    dates.cancel()
    return HAS_FAILED if all(code == HAS_FAILED for code in codes) else 0


async def _lived(life: Life, *, is_fleet: bool) -> int:
    code = await life.run()
    if is_fleet and life.made is not None and life.made.service.engine.is_dead:
        print(f"plimsoll: the engine on port {life.port.number} has died", file=sys.stderr, flush=True)
    return code


def _warm_up(launch: Launchable) -> None:
    """A request to an engine that is thrown away: the scheduler is compiled at its first step, which clients would wait for."""
    engine = Engine(launch.config)
    engine.submit(Ask(np.arange(launch.config.settings.block_size, dtype=np.int64), 2), 0)
    engine.advance(NS)


def _counted(faults: Sequence[Fault], launches: Sequence[Launchable]) -> list[Fault]:
    """The faults without a failing start that has failed often enough: each start is a process of its own, so a file counts."""
    port = launches[0].options.port
    return [
        fault for fault in faults if fault.kind != "start-failure" or not fault.value or _fails_again(int(fault.value), port)
    ]


def _fails_again(times: int, port: int) -> bool:
    folder = places.run_folder(Settings().folder)
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

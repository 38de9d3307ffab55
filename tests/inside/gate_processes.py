"""What the tests of shared pages run in processes of their own; each talks over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from plimsoll.inside.places import server_key
from plimsoll.inside.shared import Shared, SharedPage
from tests.fakes import EngineClient

PAIR = ("first", "second", "third")


def api_server(folder: str, key: int, in_flight: int, pipe: Connection) -> None:
    """An API server with so many requests, until it is told to end: `close` takes its page away."""
    shared = Shared(folder, key, fellows_expected=True)
    shared.own["in_flight"] = in_flight
    pipe.send(os.getpid())
    while (word := pipe.recv()) != "close":
        if word == "total":
            shared.pages(look=True)
            pipe.send((shared.total("in_flight"), shared.is_first))
    shared.close()


def writer(path: str, seconds: float, pipe: Connection) -> None:
    """Changes three numbers together, again and again, dawdling between them now and then."""
    page = SharedPage(PAIR, path)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end or count < 200:
        count += 1
        with page.changing():
            page["first"] = count
            if count % 50 == 0:
                time.sleep(0.003)  # as one that lost its turn on the processor
            page["second"] = -count
            page["third"] = count * 7
    pipe.send(count)


def half_way(path: str, pipe: Connection) -> None:
    page = SharedPage(PAIR, path)
    with page.changing():
        page["first"] = 99
        pipe.send("inside")
        pipe.recv()


def meter(folder: str, key: int, begun: int, pipe: Connection) -> None:
    """An API server that keeps its metrics, in prometheus_client's several-process mode."""
    from plimsoll.inside.gate_control import GateControl
    from plimsoll.inside.meters import Meters
    from plimsoll.inside.pulse import Pulse
    from tests.fakes import State, settings

    core = GateControl(settings(folder), State(engine_client=EngineClient()), Pulse())
    assert core.key == key
    for _ in range(begun):
        core.enter()
        core.begin()
    meters = Meters(core)
    pipe.send(os.getpid())
    while pipe.recv() != "end":
        core.shared.pages(look=True)
        meters.refresh()
        pipe.send(core.shared.is_first)


def tell_key(pipe: Connection) -> None:
    pipe.send(server_key())


def metrics_of_two(folder: str) -> str:
    """The page of a server with two API servers, 3 and 4 requests in flight, and one worker."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    from tests.inside.test_endpoints import put_figures

    context = multiprocessing.get_context("spawn")
    put_figures(Path(folder), allocator={"allocated": 1000, "alloc_retries": 5})
    pipes = []
    for begun in (3, 4):
        here, there = context.Pipe()
        name = f"ApiServer_{begun}"  # as vLLM names them
        context.Process(target=meter, args=(folder, os.getpid(), begun, there), name=name, daemon=True).start()
        here.recv()
        pipes.append(here)
    firsts = []
    for _ in range(3):
        for pipe in pipes:
            pipe.send("refresh")
            firsts.append(pipe.recv())
    assert sum(firsts) == 3, "one of the two speaks for both"
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    page = generate_latest(registry).decode()
    for pipe in pipes:
        pipe.send("end")
    return page


if __name__ == "__main__":
    print(metrics_of_two(sys.argv[1]))

"""The article's sidecar, written anew from its description, to be run beside guard.

    python -m lab.article.sidecar http://127.0.0.1:8000 -- systemctl restart vllm

Every 30 s it asks one engine for /metrics, within 5 s; when that fails, nothing happens. A KV cache over 95 % is one mark, and
more than twice as many requests waiting as running is one mark. With three marks younger than 300 s it waits up to 60 s until
no request runs, then restarts the engine and forgets its marks. Traffic is not stopped meanwhile: the article leaves that open.

One thing is changed, or it would never act: the names of the three metrics are today's. One is chosen: while it waits for
running == 0 it asks once a second, which the description does not say. `--scale 5` divides all of these times by five but for
the limit of 5 s, which is none of its habits. What it does is told as lines of JSON on standard output.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import NamedTuple

CACHE, RUNNING, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
FULL = 0.95
TIMES_RUNNING = 2.0
ENOUGH = 3
EVERY_S, WINDOW_S, IDLE_WITHIN_S, ASKS_S, READ_WITHIN_S = 30.0, 300.0, 60.0, 1.0, 5.0
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Reading(NamedTuple):
    """The three figures that it goes by."""

    cache: float  # from 0 to 1
    running: float
    waiting: float

    @property
    def marks(self) -> int:
        """How many of its two rules hold."""
        return (self.cache > FULL) + (self.waiting > TIMES_RUNNING * self.running)


def read_page(text: str) -> Reading:
    """The figures on a page of metrics; ValueError where one is missing or no number."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (CACHE, RUNNING, WAITING):
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    if len(found) < 3:
        raise ValueError("a figure is missing")
    return Reading(found[CACHE], found[RUNNING], found[WAITING])


class Marks:
    """What it remembers."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._at_s: list[float] = []

    def see(self, reading: Reading, now_s: float) -> bool:
        """Take one reading; whether it is time to restart."""
        self._at_s += [now_s] * reading.marks
        self._at_s = [at_s for at_s in self._at_s if now_s - at_s < self._window_s]
        return len(self._at_s) >= ENOUGH

    def forget(self) -> None:
        """After a restart."""
        self._at_s.clear()


class World(NamedTuple):
    """What it touches: a page, a clock, a pause, a command, and somewhere to tell of it."""

    read: Callable[[], Reading]  # whatever goes wrong is OSError, ValueError or HTTPException
    now_s: Callable[[], float]
    sleep: Callable[[float], None]
    restart: Callable[[], None]
    tell: Callable[[str], None]


class Sidecar:
    """Of one engine."""

    def __init__(self, world: World, scale: float = 1.0) -> None:
        self._world, self._scale = world, scale
        self._marks = Marks(WINDOW_S / scale)

    def turn(self) -> None:
        """One of its rounds, with the pause at its end."""
        world = self._world
        reading = self._read()
        if reading is not None:
            for _ in range(reading.marks):
                world.tell("mark")
            if self._marks.see(reading, world.now_s()):
                world.tell("decided")
                world.tell("idle" if self._waited_for_idle() else "not idle")
                world.restart()
                world.tell("restarted")
                self._marks.forget()
        world.sleep(EVERY_S / self._scale)

    def _read(self) -> Reading | None:
        try:
            return self._world.read()
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def _waited_for_idle(self) -> bool:
        end_s = self._world.now_s() + IDLE_WITHIN_S / self._scale
        while self._world.now_s() < end_s:
            reading = self._read()
            if reading is not None and reading.running == 0:
                return True
            self._world.sleep(ASKS_S / self._scale)
        return False


def real_world(url: str, words: Sequence[str]) -> World:
    """One engine at this address, and the command that restarts it."""

    def read() -> Reading:
        with _HTTP.open(f"{url.rstrip('/')}/metrics", timeout=READ_WITHIN_S) as answer:
            return read_page(answer.read().decode("utf-8", "replace"))

    def restart() -> None:
        subprocess.run(list(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)

    def tell(what: str) -> None:
        print(json.dumps({"at": round(time.time(), 3), "what": what}), flush=True)

    return World(read, time.monotonic, time.sleep, restart, tell)


def main(words: Sequence[str]) -> int:
    """Run until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m lab.article.sidecar")
    parser.add_argument("url", help="what stands before /metrics")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times as fast as in the article")
    parser.add_argument("restart", nargs="+", help="the command that restarts the engine, after --")
    asked = parser.parse_args(words)
    sidecar = Sidecar(real_world(asked.url, asked.restart), asked.scale)
    while True:
        sidecar.turn()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Asks Prometheus, once for each engine, what it remembers of it: growth is judged across guard's own restart.

Asked with the first look that was answered: only then it is known which process is there and since when. An engine that has
answered nobody yet has no past that would matter.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor

from plimsoll.cli.guard_loop import Points
from plimsoll.domain.look import Look
from plimsoll.errors import PlimsollError, WorldFailed
from plimsoll.sources.discovery import Target
from plimsoll.sources.guard_config import Prometheus
from plimsoll.sources.http_get import address
from plimsoll.sources.prometheus_recall import Recalled, recall

AT_ONCE = 4
WAIT_S = 30.0  # for its turn and for the answer: an engine's first judgement waits for it
REST_S = 60.0
NEW_S = 600.0  # an engine that began so lately need not be known yet
# What Prometheus's last figure may differ from what the engine says now. More, and it is another figure of the same name.
APART, APART_BYTES = 0.25, float(512 << 20)


class Recaller:
    """One Prometheus server."""

    def __init__(self, config: Prometheus, ask: Callable[..., Recalled] = recall) -> None:
        self._config, self._ask = config, ask
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="prometheus")
        self.said = f"prometheus {address(config.url).shown}"
        self._failed: dict[str, str] = {}  # by engine: why there is nothing from before
        self._rests_until_s, self._why = -math.inf, ""

    @property
    def trouble(self) -> str:
        """Why some have no past; empty when all have."""
        if not self._failed:
            return ""
        name, why = next(iter(self._failed.items()))
        more = f", and of {len(self._failed) - 1} more" if len(self._failed) > 1 else ""
        return f"{why}; growth of {name}{more} is judged from guard's own looks alone"

    async def fill(self, target: Target, look: Look) -> Points:
        """What is surely this engine's. It is asked for in a thread, and that has its deadline."""
        now = seen_in(look)
        if not now:
            return []  # nothing that could grow is known of it
        ask = functools.partial(self._asked, self._config.match(target), look.started_unix_s)
        try:
            async with asyncio.timeout(WAIT_S):
                found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except PlimsollError as error:
            self._failed[target.name] = str(error)
            return []
        except TimeoutError:
            self._failed[target.name] = f"it did not answer within {WAIT_S:g} s"
            return []
        points, why = fitting(found, look, now)
        if why:
            self._failed[target.name] = why
        return points

    def keep(self, names: Container[str]) -> None:
        """Forget the others: they are no longer watched."""
        self._failed = {name: why for name, why in self._failed.items() if name in names}

    def close(self) -> None:
        """Ask no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _asked(self, match: Mapping[str, str], started_unix_s: float | None) -> Recalled:
        """In a thread. A server that has just failed is not asked for each of hundreds of engines."""
        if time.monotonic() < self._rests_until_s:
            raise WorldFailed(self._why)
        try:
            return self._ask(self._config.url, match, started_unix_s)
        except WorldFailed as error:
            self._rests_until_s, self._why = time.monotonic() + REST_S, str(error)
            raise


def seen_in(look: Look) -> dict[str, float]:
    """The figures of memory that can grow, as this look shows them: of all workers, else of the process alone."""
    found: dict[str, list[float | None]] = {
        "held": [
            None if one.allocated is None or one.unreleasable is None else one.allocated + one.unreleasable
            for one in look.workers
        ],
        "host_resident": [one.host_resident for one in look.workers] or [look.figures.get("host_resident")],
    }
    known = {name: [one for one in row if one is not None] for name, row in found.items()}
    return {name: sum(row) for name, row in known.items() if row and len(row) == len(found[name])}


def fitting(found: Recalled, look: Look, now: Mapping[str, float]) -> tuple[Points, str]:
    """What fits what is seen now, on guard's own clock; and why not all of it does, where that is odd."""
    if not found.points:
        is_new = look.started_unix_s is not None and look.unix_s - look.started_unix_s < NEW_S
        return [], "" if is_new else "it knows nothing of an engine by these labels since its last start"
    made = look.figures.get("generation_tokens")
    if found.tokens is not None and made is not None and made < found.tokens:
        return [], ""  # another process than the one it saw: it has no past
    last = {name: value for _, row in found.points for name, value in row.items()}
    names = {name for name, value in now.items() if name in last and abs(value - last[name]) <= max(APART * value, APART_BYTES)}
    # Of an engine on this machine guard adds up the memory of all its processes; its page knows one of them.
    expected = set() if look.workers else {"host_resident"}
    odd = sorted(now.keys() & last.keys() - names - expected)
    why = f"its {' and '.join(odd)} is another figure than the engine's own" if odd else ""
    if not names:
        return [], why
    shift_s = look.at_s - look.unix_s
    points = [
        (at + shift_s, {name: value for name, value in row.items() if name in names or name == "running"})
        for at, row in found.points
    ]
    return [(at, row) for at, row in points if row and at < look.at_s], why

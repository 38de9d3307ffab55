"""Looks names up for many askers: in threads of its own, with the last good answer at hand while a new one is slow.

A lookup cannot be given up, only left behind: its thread stays until the resolver is done. So each name has one lookup at a
time, those of names that are slow have a share of their own, and none of them keeps another name waiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable

FRESH_S = 45.0
PATIENCE_S = 0.3  # for a new answer, where an old one is at hand
SLOW_S = 1.0
QUICK_MAX = 64  # lookups at once that may yet be quick
ALL_MAX = 160
SLOW_MAX = 32  # of names that were slow before
NAMES_MAX = 20_000
POLL_S = 0.05
LookUp = Callable[[str], list[str]]


def look_up(host: str) -> list[str]:
    """The addresses of a name, as this machine's resolver has them; OSError or UnicodeError if there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class Names:
    """Everything that is known of names. `look_up` may take as long as it likes."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._known: dict[str, _Name] = {}
        self._running: set[_Name] = set()

    async def addresses(self, host: str) -> list[str]:
        """The addresses of a name; OSError or UnicodeError if it has none. Waits as long as it takes to have any at all."""
        name = self._known.get(host)
        if name is None:
            if len(self._known) >= NAMES_MAX:
                self._known = {key: one for key, one in self._known.items() if one in self._running}
            name = self._known[host] = _Name()
        if name.is_fresh:
            return name.addresses
        patience_s = PATIENCE_S if name.addresses else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._renewed(name, host)
        if name.error is not None and not name.addresses:
            raise name.error
        return name.addresses

    def doubt(self, host: str) -> None:
        """Nobody was met at the address that was given: look it up anew the next time."""
        if (name := self._known.get(host)) is not None:
            name.until_s = 0.0

    async def _renewed(self, name: _Name, host: str) -> None:
        while name.job is None or name.job.done():
            if self._has_room(name):
                name.job, name.began_s = concurrent.futures.Future(), time.monotonic()
                self._running.add(name)
                self._begin(name, name.job, host)
                break
            await asyncio.sleep(POLL_S)
            if name.is_fresh:
                return
        assert name.job is not None
        await asyncio.shield(asyncio.wrap_future(name.job))

    def _begin(self, name: _Name, job: concurrent.futures.Future[None], host: str) -> None:
        try:
            threading.Thread(target=self._run, args=(name, job, host), name="plimsoll-name", daemon=True).start()
        except RuntimeError:  # this machine gives us no more threads
            name.fail(OSError("no thread to look it up in"), is_gone=False)
            self._running.discard(name)
            job.set_result(None)

    def _has_room(self, name: _Name) -> bool:
        """A lookup that turns out to be slow does not count among the quick ones any more."""
        running, slow_since_s = list(self._running), time.monotonic() - SLOW_S
        slow = sum(one.is_slow or one.began_s < slow_since_s for one in running)
        return slow < SLOW_MAX if name.is_slow else len(running) - slow < QUICK_MAX and len(running) < ALL_MAX

    def _run(self, name: _Name, job: concurrent.futures.Future[None], host: str) -> None:
        try:
            name.take(self._look_up(host))
        except socket.gaierror as error:
            name.fail(error, is_gone=error.errno == socket.EAI_NONAME)
        except Exception as error:
            name.fail(error if isinstance(error, OSError | UnicodeError) else OSError(str(error)), is_gone=False)
        finally:
            self._running.discard(name)
            job.set_result(None)


class _Name:
    """What is known of one name."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.error: OSError | UnicodeError | None = None
        self.until_s = 0.0
        self.job: concurrent.futures.Future[None] | None = None
        self.began_s = 0.0
        self.is_slow = False  # at the last time

    @property
    def is_fresh(self) -> bool:
        return bool(self.addresses) and time.monotonic() < self.until_s

    def take(self, addresses: list[str]) -> None:
        self._timed()
        self.addresses, self.error, self.until_s = addresses, None, time.monotonic() + FRESH_S

    def fail(self, error: OSError | UnicodeError, *, is_gone: bool) -> None:
        """A resolver that fails for now does not take back what it said; one that knows of no such name does."""
        self._timed()
        self.addresses, self.error = [] if is_gone else self.addresses, error

    def _timed(self) -> None:
        self.is_slow = time.monotonic() - self.began_s > SLOW_S


NAMES = Names()

"""Calls into the workers: one at a time over all API servers, without a timeout, and never cancelled.

vLLM reads a reply that comes after a timeout as the result of the next step, and dies of it. So a call is begun only while
the engine steps or rests, then runs to its end whatever becomes of the client that asked; the client is told after a while
that it still runs, and `/plimsoll/state` has its end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from typing import Any

from plimsoll.inside.faults import FAULTS

PATIENCE_S = 20.0  # how long the one who asked is kept waiting


class Busy(Exception):
    """Another call runs."""


class Calls:
    """The door to the workers of one server; `lock_path` is the same for all its API servers."""

    def __init__(self, lock_path: str | None, patience_s: float = PATIENCE_S) -> None:
        self._lock_path = lock_path
        self._patience_s = patience_s
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self.last: dict[str, Any] | None = None
        self.done = 0
        self._began = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a call of this API server runs."""
        return self._task is not None and not self._task.done()

    def running_s(self, now: float) -> float:
        """How long the call that runs has been running; 0 when none does."""
        return now - self._began if self.is_running else 0.0

    async def call(self, client: Any, method: str, arguments: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Run it in every worker; the outcome, or a word that it still runs. Busy when another one does."""
        if self.is_running:
            raise Busy
        lock = self._take_lock()
        self._began = time.monotonic()
        # By a name of its own: once it is done another caller may come in before this one goes on.
        task = self._task = asyncio.get_running_loop().create_task(self._run(client, method, arguments, lock))
        done, _ = await asyncio.wait({task}, timeout=self._patience_s)  # leaves the task alone, whatever happens
        if done:
            return task.result()
        return {"call": method, "is_running": True, "workers": None}

    def _take_lock(self) -> int:
        if self._lock_path is None:
            return -1
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise Busy from None
        return lock

    async def _run(self, client: Any, method: str, arguments: tuple[Any, ...], lock: int) -> dict[str, Any]:
        began = time.monotonic()
        outcome: dict[str, Any] = {"call": method, "is_running": False, "workers": None, "error": None}
        try:
            results = await client.collective_rpc(method, args=arguments)
            outcome["workers"] = list(results)
        except Exception as error:
            FAULTS.note(f"calling {method}", error)
            outcome["error"] = type(error).__name__
        finally:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would not: a process forked meanwhile has it open too
                os.close(lock)
        outcome["seconds"] = round(time.monotonic() - began, 6)
        outcome["at"] = round(time.time(), 3)
        self.last = outcome
        self.done += 1
        return outcome

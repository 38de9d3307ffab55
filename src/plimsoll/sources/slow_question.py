"""A question that may hang, such as one to a driver: asked in a thread, never twice at once, and nobody waits for it long.

    asked = SlowQuestion(read_everything, deadline_s=1.5, keep_s=2.0)
    await asked.answer()  # None if it is not there in time

A thread of Python's own pools will not do: the interpreter waits for those at its end, and one that hangs never ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SlowQuestion(Generic[Answer]):
    """One question with one thread at most. Its answer serves everybody who asks within `keep_s`."""

    def __init__(self, ask: Callable[[], Answer], *, deadline_s: float, keep_s: float) -> None:
        self._ask, self._deadline_s, self._keep_s = ask, deadline_s, keep_s
        self._job: concurrent.futures.Future[Answer | None] | None = None
        self._began_s = 0.0
        self._answer: Answer | None = None
        self._answered_s: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether it was asked, and has not come back within its time."""
        return self._job is not None and not self._job.done() and time.monotonic() - self._began_s >= self._deadline_s

    async def answer(self) -> Answer | None:
        """The answer; None while there is none: the asking failed, or it hangs. While it hangs nobody waits for it again."""
        if self._answered_s is not None and time.monotonic() - self._answered_s < self._keep_s:
            return self._answer
        if self._job is None or self._job.done():
            self._job, self._began_s = concurrent.futures.Future(), time.monotonic()
            try:
                threading.Thread(target=self._run, args=(self._job,), name="plimsoll-slow-question", daemon=True).start()
            except RuntimeError:  # this machine gives us no more threads
                self._job.set_result(None)
        job, left_s = self._job, self._began_s + self._deadline_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await asyncio.shield(asyncio.wrap_future(job))
        return None

    def forget(self) -> None:
        """The answer that was kept will not do any more."""
        self._answered_s = None

    def _run(self, job: concurrent.futures.Future[Answer | None]) -> None:
        try:
            found: Answer | None = self._ask()
        except Exception:  # whatever a driver does: then it has no answer
            found = None
        self._answer, self._answered_s = found, time.monotonic()
        job.set_result(found)

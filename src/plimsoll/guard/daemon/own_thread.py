"""Work that may hang in the kernel, in a thread that nobody has to wait for: not even the end of the program does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """What it returns or raises; cancelled, the thread is left to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, problem: BaseException | None) -> None:
        if future.done():
            return
        if problem is not None:
            future.set_exception(problem)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # without a problem it is what the work returned

    def run() -> None:
        result: T | None = None
        problem: BaseException | None = None
        try:
            result = work()
        except Exception as error:  # handed over to whoever waits, and raised there
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is over: nobody waits
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, daemon=True).start()
    return await future

"""A deterministic event loop: its time jumps to the next timer, and its processes can be killed or frozen at any await."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

_Loop: Any = asyncio.AbstractEventLoop  # of whose many methods only those that guard needs are here


class Life:
    """One process on the loop: everything that was begun in its context lives and dies with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        self.moments = 0  # times it came to run, or touched the world
        self.dies_at = -1  # the moment at which it is killed
        self.context: contextvars.Context | None = None
        self.signals: dict[int, Callable[[], None]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.kept: list[asyncio.Handle] = []  # what did not run, since it is dead or frozen

    def passes(self) -> bool:
        """One more moment of its life; False where that was its last."""
        self.moments += 1
        self.is_dead = self.is_dead or self.moments == self.dies_at
        return not self.is_dead


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class VirtualLoop(_Loop):  # type: ignore[misc]
    """Runs callbacks in the order of their virtual times; no threads, no sockets, nothing that waits for real."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers: Iterator[int] = itertools.count()
        self.mistakes: list[str] = []  # exceptions that nobody took

    # What asyncio asks of a loop

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio says so; it is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        if (life := LIFE.get()) is not None:
            life.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """At once: there are no threads here."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        life = LIFE.get()
        assert life is not None
        life.signals[sig] = lambda: callback(*args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if problem is not None:
            self.mistakes.append(f"{context.get('message')}: {problem!r}")

    # What the world asks of it

    def begin(self, life: Life, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a process: this work, and whatever it begins."""
        if life.context is None:
            life.context = contextvars.copy_context()
            life.context.run(LIFE.set, life)
        context = life.context.copy() if life.tasks else life.context
        return context.run(self.create_task, work, context=context)

    def thaw(self, life: Life) -> None:
        """Lets it go on where it was frozen."""
        life.is_frozen = False
        kept, life.kept = life.kept, []
        self._ready.extend(kept)

    def run(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Runs everything up to this time, or until it is over."""
        asyncio._set_running_loop(self)
        ready, timers = self._ready, self._timers
        try:
            while not is_over():
                while ready:
                    handle = ready.popleft()
                    if handle._cancelled:
                        continue
                    life = handle._context.get(LIFE)  # type: ignore[attr-defined]
                    if life is not None and (life.is_frozen or not life.passes()):
                        life.kept.append(handle)
                        continue
                    handle._run()
                if not timers or timers[0][0] > until_s:
                    self.now = max(self.now, until_s)
                    return
                self.now = max(self.now, timers[0][0])
                while timers and timers[0][0] <= self.now:
                    ready.append(heapq.heappop(timers)[2])
        finally:
            asyncio._set_running_loop(None)

    def end(self, lives: list[Life]) -> None:
        """Cancels what is left, so that nothing of it lingers; the world has stopped to listen by now."""
        for life in lives:
            life.is_dead, life.dies_at = False, -1
            self.thaw(life)
            for task in life.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task.cancel()
        # The world's own timers are forgotten: only the processes still have something to do.
        self._timers[:] = [row for row in self._timers if row[2]._context.get(LIFE) is not None]  # type: ignore[attr-defined]
        heapq.heapify(self._timers)
        tasks = [task for life in lives for task in life.tasks]
        self.run(self.now + 600.0, lambda: all(task.done() for task in tasks))

"""Lets one engine run in real or scaled time on an asyncio loop: a timer for what is due next, and none while nothing is.

If the loop is late, one turn covers several steps: whoever waits is woken once and finds all its tokens, as in vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from plimsoll.standin.engine import Engine
from plimsoll.standin.request import Ask, Request

LOG = logging.getLogger("vllm.standin")
NS = 1_000_000_000
SHORTEST_PAUSE_S = 0.0005  # between two turns: with time scaled a thousandfold the loop has other things to do, too
LONGEST_PAUSE_S = 3600.0
WOKEN_AT_ONCE = 64  # then whoever else waits has a turn: a step may wake a thousand streams, and somebody scrapes metrics


class Driver:
    """One engine's time. `clock` counts real ns; the engine's time began at 0 when the driver was started."""

    def __init__(self, engine: Engine, clock: Callable[[], int], speed: float = 1.0) -> None:
        self.engine = engine
        self.speed = speed
        self.on_turn: Callable[[], None] | None = None  # told after every turn
        self._clock = clock
        self._origin_ns: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._to_wake: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def start(self) -> None:
        """The engine is ready: its time begins, and what is due of itself (faults) will happen."""
        if self._origin_ns is None:
            self._origin_ns = self._clock()
        self.plan()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due and no timer runs."""
        return self._timer is None

    def now_ns(self) -> int:
        """The engine's time."""
        if self._origin_ns is None:
            return 0
        # What is due is due at a moment of the engine's time; a turn may have been made for one that rounding puts later.
        return max(self.engine.now_ns, int((self._clock() - self._origin_ns) * self.speed))

    def submit(self, ask: Ask, wake: Callable[[], None]) -> Request:
        """Hand a request in, now."""
        request = self.engine.submit(ask, self.now_ns(), wake)
        self.plan()
        return request

    def abort(self, request: Request, *, is_told: bool = False) -> None:
        """Take it back, now."""
        self.engine.abort(request, self.now_ns(), is_told=is_told)
        self.plan()

    def turn(self) -> None:
        """Do what is due, and plan the next turn."""
        self._timer = None
        try:
            self.engine.advance(self.now_ns())
        except Exception as error:
            self._die_of(error)
        if self.on_turn is not None:
            self.on_turn()
        self.plan()

    def _die_of(self, error: Exception) -> None:
        """A mistake of the stand-in's own: without another turn everybody would wait for ever, so they are told."""
        says = " ".join(f"{type(error).__name__}: {error}".split())
        LOG.error("plimsoll: a mistake of the stand-in's own; its engine ends: %s", says)
        self.engine.die(f"a mistake of the stand-in's own: {says}")
        self.engine.advance(self.engine.now_ns)  # a dead one only wakes who waits

    def wake_soon(self, wake: Callable[[], None]) -> None:
        """Call it in one of the next turns of the loop, in the order of asking."""
        self._to_wake.append(wake)
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_AT_ONCE, len(self._to_wake))):
            self._to_wake.popleft()()
        self._is_waking = bool(self._to_wake)
        if self._is_waking:
            asyncio.get_running_loop().call_soon(self._wake_some)

    def plan(self) -> None:
        """Set the timer anew; to be called after everything that may change what is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_stopped or self._origin_ns is None:
            return
        due_ns = self.engine.next_ns()
        if due_ns is None:
            return
        pause_s = (due_ns - self.now_ns()) / NS / self.speed
        pause_s = min(max(pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self.turn)

    def stop(self) -> None:
        """No turn any more."""
        self._is_stopped = True
        self.plan()

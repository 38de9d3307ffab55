"""What the faults do to an engine: it stands still, grows, has a neighbour or too much to do. Each ends as it began."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plimsoll.standin.faults import NS, Fault
from plimsoll.standin.request import Ask, Request

if TYPE_CHECKING:
    from plimsoll.standin.engine import Engine

KILLED = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."  # what a full host does
KEPT_UP = ("growth", "host-growth", "preemption-storm", "neighbour")


class Troubles:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_hung = False
        self._neighbour = 0  # bytes that it has
        self._storm: list[Request] = []
        self._grown_until_ns = 0

    def is_changing(self, now_ns: int) -> bool:
        """Whether something grows or is kept up, so that it must be looked at again and again."""
        return any(self._engine.faults.active(kind, now_ns) for kind in KEPT_UP)

    def suffer(self, now_ns: int) -> None:
        """Bring everything to what the faults want at this moment."""
        engine = self._engine
        if not engine.faults.all and not engine.stands_still and not self._neighbour and not engine.run.is_frozen:
            self._grown_until_ns = now_ns
            return
        self._keep_still(now_ns)
        self._let_neighbour(engine.faults.active("neighbour", now_ns))
        self._grow(now_ns)
        storm = engine.faults.active("preemption-storm", now_ns)
        if storm is None:
            self._end_storm(now_ns)
        elif not engine.is_paused and not engine.is_dead:
            self._keep_up_storm(storm, now_ns)

    def _keep_still(self, now_ns: int) -> None:
        engine, run = self._engine, self._engine.run
        # Who was announced for later is not there yet.
        is_idle = run.next_end_ns is None and run.running == 0 and run.waiting == 0
        self.is_hung = engine.faults.active("idle-hang", now_ns) is not None and (self.is_hung or is_idle)
        wanted = engine.stands_still or self.is_hung or engine.faults.active("wedge", now_ns) is not None
        if wanted and not run.is_frozen:
            run.freeze(now_ns)
        elif not wanted and run.is_frozen:
            run.thaw(now_ns)

    def _let_neighbour(self, fault: Fault | None) -> None:
        """Another process takes what it wants as far as that is free, and the rest as it becomes free."""
        wanted, memory = 0 if fault is None else int(fault.value), self._engine.memory
        if wanted < self._neighbour:
            memory.give_back_neighbour(self._neighbour - wanted)
            self._neighbour = wanted
        more = min(wanted - self._neighbour, memory.free)
        if more > 0 and memory.take_neighbour(more):
            self._neighbour += more

    def _grow(self, now_ns: int) -> None:
        """What grows has grown since the last look, or since its onset if that came later."""
        engine = self._engine
        since_ns, self._grown_until_ns = self._grown_until_ns, now_ns
        size = _grown_bytes(engine.faults.active("growth", now_ns), since_ns, now_ns)
        if size > 0 and (trouble := engine.memory.grow(size)) is not None:
            engine.die(trouble)
        size = _grown_bytes(engine.faults.active("host-growth", now_ns), since_ns, now_ns)
        if size > 0 and not engine.memory.grow_host(size):
            engine.die(KILLED)

    def _keep_up_storm(self, fault: Fault, now_ns: int) -> None:
        """Requests of its own: as many as may run at once, short when they are let in and far too long for all to stay."""
        config, settings = self._engine.config, self._engine.config.settings
        block, pool = settings.block_size, (settings.num_blocks - 1) * settings.block_size
        wanted = int(fault.value) or max(4, min(settings.max_num_seqs, pool // (2 * block)))
        prompt = max(1, min(pool // (2 * wanted), config.max_model_len // 8))
        output = max(2, min(6 * prompt + block, config.max_model_len - prompt, pool - prompt - block))
        for one in range(max(0, wanted - len(self._engine.requests))):
            seed = now_ns + 31 * one
            ask = Ask(np.full(prompt, 1000 + seed % 30_000, dtype=np.int64), output, seed=seed)
            self._storm.append(self._engine.submit(ask, now_ns))
        self._storm = [request for request in self._storm if request.finish is None]

    def _end_storm(self, now_ns: int) -> None:
        """Whoever caused it has gone."""
        for request in self._storm:
            self._engine.abort(request, now_ns)
        self._storm = []


def _grown_bytes(fault: Fault | None, since_ns: int, now_ns: int) -> int:
    return 0 if fault is None else int(fault.value * (now_ns - max(since_ns, fault.at_s * NS)) / NS)

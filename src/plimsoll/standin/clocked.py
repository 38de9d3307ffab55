"""One engine on a clock of its own: for tests of alerts, scalers and guards, which need days and do not have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plimsoll.standin.engine import Engine, EngineConfig
from plimsoll.standin.faults import NS, Fault, parse_fault
from plimsoll.standin.figures import Figures
from plimsoll.standin.page import HttpFigures, Page, ProcessFigures
from plimsoll.standin.request import Ask, Request

HOST_BYTES = 3 << 30
SOME_TOKENS = 1_000  # ids above this are no words of an answer


class StandIn:
    """Seconds count from its first start; a restart begins anew and keeps the clock."""

    def __init__(self, config: EngineConfig, faults: Sequence[Fault | str] = (), *, unix_s: float = 1_700_000_000.0) -> None:
        self.config = config
        self.now_s = 0.0
        self.restarts = -1
        self._unix_s = unix_s
        self._sent = 0
        self._down_until_s: float | None = None
        self._faults = [parse_fault(fault) if isinstance(fault, str) else fault for fault in faults]
        self._start(0.0)

    def _start(self, at_s: float) -> None:
        """A new process: its counters begin at nothing. Faults keep the clock's own time."""
        moved = [fault._replace(at_s=fault.at_s - at_s) for fault in self._faults]
        self._begin_s = at_s
        self.restarts += 1
        self.engine = Engine(self.config, moved, wants_tokens=False)
        self._page = Page(
            self.config.release, self.config.served_names[0], cache_labels=self.config.cache_labels, created=self._unix_s + at_s
        )

    @property
    def figures(self) -> Figures:
        """What the page shows, as numbers."""
        return self.engine.figures

    @property
    def is_up(self) -> bool:
        """Whether anybody answers: it is started, and not dead."""
        return self._down_until_s is None and not self.engine.is_dead

    # What happens to it

    def ask(self, prompt: int, output: int, *, at_s: float | None = None, shared: int = 0, subject: int = 0) -> Request:
        """One request of so many tokens, of which the first `shared` are those of all with this subject."""
        self._sent += 1
        at = self.now_s if at_s is None else at_s
        tokens = np.arange(prompt, dtype=np.int64) + SOME_TOKENS * (subject + 2)
        wanted = Ask(tokens, output, seed=self._sent, max_tokens=output, shared=shared)
        return self.engine.submit(wanted, round((at - self._begin_s) * NS))

    def send(self, arrivals_s: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], *, shared: int = 0) -> None:
        """Many, in the order of their arrival; those still to come are taken as they come."""
        for at_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True):
            self.ask(int(prompt), int(output), at_s=float(at_s), shared=min(shared, int(prompt) - 1))

    def add_fault(self, fault: Fault | str) -> None:
        """One more thing that goes wrong, by this object's clock."""
        made = parse_fault(fault) if isinstance(fault, str) else fault
        self._faults.append(made)
        self.engine.faults.add(made._replace(at_s=made.at_s - self._begin_s))

    def clear_faults(self, kind: str | None = None) -> None:
        """Nothing goes wrong any more."""
        self._faults = [fault for fault in self._faults if kind is not None and fault.kind != kind]
        self.engine.faults.clear(kind)

    def restart(self, takes_s: float = 60.0) -> None:
        """Stop it now; it is up again after so many seconds, with nothing of what it had."""
        self._down_until_s = self.now_s + takes_s

    def until(self, seconds: float) -> None:
        """Let the time pass."""
        if self._down_until_s is not None and seconds >= self._down_until_s:
            at_s, self._down_until_s = self._down_until_s, None
            self._start(at_s)
        if self._down_until_s is None:
            self.engine.advance(round((seconds - self._begin_s) * NS))
        self.now_s = max(self.now_s, seconds)

    # What can be seen of it

    def page(self) -> str:
        """GET /metrics."""
        # Its processor time and open files are nobody's: no line for them.
        process = ProcessFigures(resident=self._host_bytes(), start_time=self._unix_s + self._begin_s)
        return self._page.text(self.figures, HttpFigures(self._unix_s + self._begin_s), process)

    def _host_bytes(self) -> int:
        return int(self.engine.memory.figures()["host_memory"]["resident"] or HOST_BYTES)

    def workers(self) -> list[dict[str, Any]]:
        """What the probe of each worker has written, as /plimsoll/memory shows it."""
        return self.engine.worker_figures(round((self.now_s - self._begin_s) * NS))

"""One engine on a clock of its own: for tests of alerts, scalers and guards that simulate days in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from prometheus_client.core import GaugeMetricFamily

from plimsoll.standin.engine import StandinConfig, StandinEngine
from plimsoll.standin.faults import NS, ONLY_AT_START, Fault, parse_fault
from plimsoll.standin.metrics_page import EnginePage, Families
from plimsoll.standin.request import EngineRequest, Figures, RequestSpec

SOME_TOKENS = 1_000  # larger ids never occur in an answer


# Faults of a server's answers and of its start; there is neither here.
SERVERS_OWN = (*ONLY_AT_START, "frozen-gauges", "lying-page", "cut-page", "huge-page", "slow-loris")
OUTLIVES = ("neighbour",)  # another process; all other faults end with the engine's process


class EngineDown(ConnectionRefusedError):
    """A refused connection: the engine is dead, or starting."""


class StandIn:
    """A simulated engine. Seconds count from its first start; a restart makes a new process and keeps the clock."""

    def __init__(self, config: StandinConfig, faults: Sequence[Fault | str] = (), *, unix_s: float = 1_700_000_000.0) -> None:
        self.config = config
        self.now_s = 0.0
        self.restarts = -1
        self._unix_s = unix_s
        self._sent = 0
        self._down_until_s: float | None = None
        self._coming: list[tuple[float, EngineRequest]] = []  # that arrive after the present start
        self._faults = [_fault(fault) for fault in faults]
        self._start(0.0)

    def _start(self, at_s: float) -> None:
        """Starts a new process, with counters from 0. Faults keep the clock's own time."""
        moved = [replace(fault, at_s=fault.at_s - at_s) for fault in self._faults]
        self._begin_s = at_s
        self.restarts += 1
        self.engine = StandinEngine(self.config, moved, wants_tokens=False)
        self._page = EnginePage(
            self.config.release, self.config.served_names[0], cache_labels=self.config.cache_labels, created=self._unix_s + at_s
        )

    @property
    def figures(self) -> Figures:
        return self.engine.figures

    @property
    def is_up(self) -> bool:
        return self._down_until_s is None and not self.engine.is_dead

    # Events

    def ask(self, prompt: int, output: int, *, at_s: float | None = None, shared: int = 0, subject: int = 0) -> EngineRequest:
        """Sends one request of so many tokens; the first `shared` are the same for all requests of this subject."""
        self._sent += 1
        at = self.now_s if at_s is None else at_s
        if prompt < 1 or output < 1 or prompt + output > self.config.max_model_len:
            raise ValueError(
                f"{prompt} + {output} tokens: vLLM takes up to {self.config.max_model_len} in all, and one of each"
            )
        if at < self.now_s:
            raise ValueError(f"{at} s is over: it is {self.now_s} s now")
        tokens = np.arange(prompt, dtype=np.int64) + SOME_TOKENS * (subject + 2)
        wanted = RequestSpec(tokens, output, seed=self._sent, max_tokens=output, shared=shared)
        if self._down_until_s is not None and at >= self._down_until_s:
            self._coming.append((at, EngineRequest(wanted, 0, lambda: None)))
            return self._coming[-1][1]
        self._check_up()
        return self.engine.submit(wanted, round((at - self._begin_s) * NS))

    def _check_up(self) -> None:
        if not self.is_up:
            raise EngineDown("it is starting" if self._down_until_s is not None else f"it has died: {self.engine.death}")

    def send(self, arrivals_s: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], *, shared: int = 0) -> None:
        """Sends many requests in the order of their arrival; the engine gets later ones when they arrive."""
        if not len(arrivals_s) == len(prompts) == len(outputs):
            raise ValueError("one prompt and one output for each arrival")
        for at_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True):
            self.ask(int(prompt), int(output), at_s=float(at_s), shared=min(shared, int(prompt) - 1))

    def add_fault(self, fault: Fault | str) -> None:
        parsed = _fault(fault)
        self._faults.append(parsed)
        self.engine.faults.append(replace(parsed, at_s=parsed.at_s - self._begin_s))

    def restart(self, takes_s: float = 60.0) -> None:
        """Stops the engine now; it is up again after so many seconds, without its earlier state and faults.

        Requests that it has fail; those that arrive once it is up again are served then.
        """
        for request in self.engine.requests.values():
            at_s = self._begin_s + request.arrival_ns / NS
            if at_s >= self.now_s + takes_s:
                self._coming.append((at_s, request))
            else:
                request.finish = "error"
        self._faults = [fault for fault in self._faults if fault.at_s > self.now_s or fault.kind in OUTLIVES]
        self._down_until_s = self.now_s + takes_s

    def until(self, seconds: float) -> None:
        if self._down_until_s is not None and seconds >= self._down_until_s:
            begin_s, self._down_until_s = self._down_until_s, None
            self._start(begin_s)
            for at_s, request in sorted(self._coming, key=lambda one: one[0]):
                request.arrival_ns = round((at_s - begin_s) * NS)
                self.engine.admit(request, request.arrival_ns)
            self._coming.clear()
        if self._down_until_s is None:
            self.engine.advance(round((seconds - self._begin_s) * NS))
        self.now_s = max(self.now_s, seconds)

    # Observations

    def page(self) -> str:
        """Returns the page of GET /metrics. Raises EngineDown where nobody would answer."""
        self._check_up()
        # It has no process and no HTTP server: no lines for processor time, open files and HTTP requests.
        resident = int(self.engine.memory.figures()["host_memory"]["resident"])
        process = [
            GaugeMetricFamily("process_resident_memory_bytes", "Resident memory size in bytes.", resident),
            GaugeMetricFamily(
                "process_start_time_seconds",
                "Start time of the process since unix epoch in seconds.",
                self._unix_s + self._begin_s,
            ),
        ]
        return Families(process).text() + self._page.text(self.figures)

    def workers(self) -> list[dict[str, Any]]:
        """Returns the records of each worker's probe, as /plimsoll/memory shows them."""
        return self.engine.worker_figures(round((self.now_s - self._begin_s) * NS))


def _fault(fault: Fault | str) -> Fault:
    parsed = parse_fault(fault) if isinstance(fault, str) else fault
    if parsed.kind in SERVERS_OWN:
        raise ValueError(f"{parsed.kind} is what a server does; `plimsoll standin --fault {parsed.kind}` does it")
    return parsed

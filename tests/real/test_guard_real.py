"""Guard's judgement of a real vLLM 0.32.0: each of its faults by name, and nothing else that would lead to an action."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from lab.engine.clients import complete
from lab.engine.server import EngineDiedError, EngineServer
from plimsoll.guard.daemon.engine_look import CanaryPlan, EngineWatcher
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.policy import Policy
from plimsoll.unknown import Condition
from tests.guard.acting import acting
from tests.real.conftest import GATED, GATED_ENV, TOKEN, need_vllm

pytestmark = pytest.mark.once
ENV = {**GATED_ENV, "PLIMSOLL_WEDGE_S": "600"}  # guard is to find it, not the gate
# The windows of an impatient operator, so that a test need not wait as long.
POLICY = Policy(
    {
        ("dead", "refused"): 10.0, ("dead", "for"): 3.0, ("wedged", "still"): 10.0, ("storm", "over"): 30.0,
        ("storm", "for"): 5.0, ("storm", "share"): 0.02, ("storm", "least"): 3.0,
    },
    every_s=1.0,
)  # fmt: skip


class Guarded:
    """A judge that looks at one server, by default once a second, in a thread of its own."""

    def __init__(self, port: int, token: str | None = TOKEN, every_s: float = 1.0) -> None:
        self.judge = Judge("real", POLICY)
        self.acted: set[str] = set()
        self._port, self._token, self._every_s = port, token, every_s
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True)
        self._thread.start()

    async def _watch(self) -> None:
        watcher = EngineWatcher(f"http://127.0.0.1:{self._port}", self._token, CanaryPlan(every_s=3, deadline_s=3))
        while not self._is_over:
            began = time.monotonic()
            self.judge.see(await watcher.look(began, time.time()))
            self.acted |= {one.kind for one in acting(self.judge)}
            await asyncio.sleep(max(0.0, began + self._every_s - time.monotonic()))
        await watcher.close()

    def condition(self, kind: str) -> Condition:
        return next(one for one in self.judge.conditions if one.kind == kind)

    def wait(self, kind: str, *, holds: bool = True, limit_s: float = 90.0) -> Condition:
        """Until it holds, or no longer does."""
        end = time.monotonic() + limit_s
        while self.condition(kind).is_true is not holds:
            assert time.monotonic() < end, f"{self.condition(kind)}; acted: {self.acted}"
            time.sleep(0.2)
        return self.condition(kind)

    def stop(self) -> None:
        self._is_over = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def small() -> Iterator[EngineServer]:
    """A pool that is too small for what it is asked, with gate and probe; the last test kills it."""
    need_vllm()
    with EngineServer(("--num-gpu-blocks-override", "18", "--max-num-seqs", "8", *GATED), ENV) as server:
        server.wait_ready()
        yield server


@pytest.mark.timeout(300)
def test_a_storm_a_stuck_worker_and_a_killed_core_are_each_called_by_name(small: EngineServer) -> None:
    """Recomputed tokens are advice; a stopped worker is stuck and well again when it goes on; a killed core is dead."""
    guarded = Guarded(small.port)
    try:
        is_over = threading.Event()
        clients = threading.Thread(target=lambda: asyncio.run(_six_after_six(small.port, is_over)), daemon=True)
        clients.start()
        storm = guarded.wait("storm", limit_s=120.0)
        assert "recomputed" in storm.message
        is_over.set()
        clients.join(60)
        assert guarded.acted == set(), "a storm alone leads to no action"

        long = threading.Thread(target=lambda: asyncio.run(complete(small.port, 1900, stream=True)), daemon=True)
        long.start()
        time.sleep(1.0)
        worker = next(child.pid for child in small.children() if "Worker" in child.name)
        os.kill(worker, signal.SIGSTOP)
        try:
            stuck = guarded.wait("wedged")
        finally:
            os.kill(worker, signal.SIGCONT)
        assert stuck.reason == "NoStep"
        guarded.wait("wedged", holds=False)
        long.join(120)
        assert guarded.acted == {"wedged"}

        small.kill_engine_core()
        dead = guarded.wait("dead")
        assert dead.evidence
        assert guarded.acted == {"wedged", "dead"}
    finally:
        guarded.stop()


async def _six_after_six(port: int, is_over: threading.Event) -> None:
    """Six at once that need more than the pool has, again and again."""
    while not is_over.is_set():
        await asyncio.gather(*(complete(port, 900, stream=True, prompt=f"tale {number}") for number in range(6)))


@pytest.mark.timeout(300)
def test_a_crash_is_death_and_a_start_that_cannot_succeed_stays_so() -> None:
    """A step without memory kills the server; the next start on its port never comes up, and nothing else is said of it.

    The looks are close together: a question that the dying core leaves unanswered would keep the server from ending.
    """
    need_vllm()
    with EngineServer((), {}, oom_on_demand=True, forks=True) as server:
        server.wait_ready()
        guarded = Guarded(server.port, None, every_s=0.1)
        try:
            while guarded.judge.history.first_answer_s is None:
                time.sleep(0.2)
            assert server.crash_with_oom() == 0
            guarded.wait("dead")
            failing = EngineServer(("--num-gpu-blocks-override", "4"), {}, port=server.port, forks=True)
            with failing, pytest.raises(EngineDiedError):
                failing.wait_ready()
            assert guarded.condition("dead").is_true
            assert guarded.acted == {"dead"}
        finally:
            guarded.stop()

"""Guard's eyes on the real engine: figures, the test request, a stuck engine, a paused one."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from lab.engine.server import EngineServer
from plimsoll.guard.daemon.engine_look import CanaryPlan, CanarySender, EngineWatcher
from plimsoll.guard.daemon.host import SameHost
from plimsoll.guard.judge.look import Look, Reach

PLAN = CanaryPlan(every_s=5, deadline_s=3)


async def looked(engine: EngineServer, count: int, pause_s: float) -> list[Look]:
    """So many looks, five seconds apart for the watcher."""
    watcher, found = EngineWatcher(f"http://127.0.0.1:{engine.port}", None, PLAN), []
    for number in range(count):
        found.append(await watcher.look(5.0 * number, time.time()))
        await asyncio.sleep(pause_s)
    await watcher.close()
    return found


def core_pid(engine: EngineServer) -> int:
    """The process that makes the steps."""
    return next(child.pid for child in engine.children() if "EngineCore" in child.name)


async def test_a_living_engine(engine: EngineServer) -> None:
    """Every figure, its own version, a token; vLLM's words for a model that it does not serve; the memory of its whole tree."""
    assert engine.complete("one two three", max_tokens=4).status == 200
    last = (await looked(engine, 3, 1.5))[-1]
    assert (last.reach, last.health, last.is_paused) == (Reach.ANSWERS, 200, False)
    assert (last.vllm or "").startswith("0.32.0")
    assert {"running", "waiting", "kv_cache_usage", "steps", "success", "prompt_tokens", "host_resident", "asleep"} <= set(
        last.figures
    )
    assert last.started_unix_s is not None
    assert time.time() - 900 < last.started_unix_s < time.time()
    assert last.canary is not None
    assert (last.canary.is_answered, last.canary.is_garbage, last.canary.why) == (True, False, "")
    assert last.canary.seconds is not None
    assert 0 < last.canary.seconds < PLAN.deadline_s

    sender = CanarySender(f"http://127.0.0.1:{engine.port}", PLAN)
    await sender.ask(0.0, "no-such-model")
    assert sender.last is not None
    assert (sender.last.is_answered, sender.last.why) == (None, "the engine does not serve a model named 'no-such-model'")

    here = EngineWatcher(f"http://127.0.0.1:{engine.port}", same_host=SameHost(engine.port))
    whole = await here.look(0.0, time.time())
    await here.close()
    assert whole.figures["host_resident"] > 1.2 * last.figures["host_resident"], "the page's is of one process"
    assert whole.cards == ()


async def test_a_stuck_engine(engine: EngineServer) -> None:
    """A stopped core leaves the page and /health as they were; only the test request shows it."""
    os.kill(core_pid(engine), signal.SIGSTOP)
    try:
        last = (await looked(engine, 4, 1.5))[-1]
    finally:
        os.kill(core_pid(engine), signal.SIGCONT)
    assert (last.reach, last.health) == (Reach.ANSWERS, 200)
    assert last.canary is not None
    assert last.canary.is_answered is False


async def test_a_paused_engine_gets_no_test_request(engine: EngineServer) -> None:
    """Paused, it is seen to be so, and nothing is put into its queue."""
    assert engine.post("/pause").status == 200
    try:
        found = await looked(engine, 2, 0.5)
    finally:
        engine.post("/resume")
    assert [look.is_paused for look in found] == [True, True]
    assert [look.canary for look in found] == [None, None]

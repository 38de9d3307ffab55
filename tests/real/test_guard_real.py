"""A crash and a refused start of a real vLLM 0.32.0: guard's judgement, doctor's word, and nothing else said of them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any, Self

import pytest

from lab.engine.server import EngineDiedError
from plimsoll.guard.daemon.engine_look import CanaryPlan, EngineWatcher
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.policy import Policy
from tests.fakes import eventually
from tests.guard.acting import acting
from tests.real.conftest import StartEngine
from tests.real.small_farm import ran

pytestmark = pytest.mark.once
# Of an impatient operator, so that a test need not wait as long.
POLICY = Policy({("dead", "refused"): 10.0, ("dead", "for"): 3.0}, every_s=1.0)


def doctor(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the object."""
    done = ran(sys.executable, "-m", "plimsoll", "doctor", *words, "--json", timeout=60)
    assert done.stderr == "" or done.returncode > 1, done.stderr
    return done.returncode, dict(json.loads(done.stdout or "{}"))


class Guarded:
    """A judge that looks at one server ten times a second, in a thread of its own.

    A question that a dying core leaves unanswered would keep the server from ending: hence so often.
    """

    def __init__(self, url: str) -> None:
        self.judge, self.acted = Judge("real", POLICY), set[str]()
        self._url, self._is_over = url, False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True)

    async def _watch(self) -> None:
        watcher = EngineWatcher(self._url, None, CanaryPlan(every_s=3, deadline_s=3))
        while not self._is_over:
            began = time.monotonic()
            self.judge.see(await watcher.look(began, time.time()))
            self.acted |= {one.kind for one in acting(self.judge)}
            await asyncio.sleep(max(0.0, began + 0.1 - time.monotonic()))
        await watcher.close()

    def is_dead(self) -> bool:
        return next(one for one in self.judge.conditions if one.kind == "dead").is_true

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self.judge.history.first_answer_s is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(30)


@pytest.mark.timeout(400)
def test_a_step_without_memory_is_death_and_a_start_that_cannot_succeed_stays_so(start_engine: StartEngine) -> None:
    """Well until the crash, whose log shows the step; the next start on its port never comes up, and doctor says why."""
    server = start_engine(oom_on_demand=True, forks=True)
    with Guarded(server.url) as guarded:
        assert server.complete("before", max_tokens=4).status == 200
        assert doctor(server.url)[0] == 0
        code, said = doctor(str(server.log_path), server.url)
        assert (code, said["memory_failure"], said["findings"]) == (0, False, [])
        exit_code = server.crash_with_oom()
        assert exit_code == 0
        eventually(guarded.is_dead, 90)
        for more in ([], ["--exit-code", str(exit_code)], ["--exit-code", "137"]):
            code, said = doctor(str(server.log_path), *more)
            assert (code, said["memory_failure"], said["findings"][0]["code"]) == (1, True, "runtime.forward")
            assert said["findings"][0]["remedy"]
        assert said["facts"]["out_of_memory"]["tried_bytes"] > 0
        assert doctor(server.url, "--timeout", "5")[0] == 3
        failing = start_engine("--num-gpu-blocks-override", "4", wait=False, forks=True, port=server.port)
        with pytest.raises(EngineDiedError):
            failing.wait_ready()
        assert guarded.is_dead()
        assert guarded.acted == {"dead"}
    code, said = doctor(str(failing.log_path), "--exit-code", str(failing.exit_code()))
    finding = said["findings"][0]
    assert (code, said["memory_failure"], finding["code"]) == (1, True, "startup.context-too-long")
    quoted = finding["evidence"][0]
    assert "larger than the available KV cache memory" in quoted["text"]
    assert "To serve at least one request" in failing.log_text().splitlines()[quoted["line"] - 1]
    assert said["facts"]["vllm"].startswith("0.32.0")
    assert said["facts"]["flags"]["num_gpu_blocks_override"] == "4"
    assert finding["remedy"]

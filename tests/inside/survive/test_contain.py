"""Containment in an engine core: nothing is lost, and what it cannot do it leaves to vLLM."""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.survive import contain, report
from tests.inside.survive.fake_core import OUT_OF_MEMORY, EngineCore, OutOfMemoryError, Request, install_vllm

VERSION = "0.32.0"


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(monkeypatch)


def armed(core: EngineCore, folder: Path, **environ: str) -> EngineCore:
    assert contain.arm(core, InsideSettings({"PLIMSOLL_SURVIVE": "1", "PLIMSOLL_DIR": str(folder), **environ}), VERSION) == ""
    return core


def told(folder: Path) -> dict[str, Any]:
    return report.read(str(folder), os.getpid())[0]


def above(tokens: int) -> Any:
    return lambda plan: OutOfMemoryError(OUT_OF_MEMORY) if plan.total_num_scheduled_tokens > tokens else None


def test_an_engine_that_is_well_pays_for_one_try_and_nothing_else(tmp_path: Path) -> None:
    """The step function is vLLM's own under one method of ours; nothing is written, nobody is asked."""
    core = armed(EngineCore(), tmp_path)
    core.add_request(Request("a"))
    before = next(tmp_path.glob("core-*.json")).stat().st_mtime_ns
    for _ in range(50):
        core.step_fn()
    assert core.model_executor.calls == []
    assert core.step_fn.__func__ is contain.Containment.step
    assert next(tmp_path.glob("core-*.json")).stat().st_mtime_ns == before


def test_every_request_goes_on_in_its_place_with_the_tokens_it_had(tmp_path: Path) -> None:
    """Preempted in order, none lost, none sent twice, the cache emptied, the counters settled."""
    core = armed(EngineCore(), tmp_path)
    for name in "abc":
        core.add_request(Request(name, 40))
    for _ in range(5):
        core.step_fn()
    before = {name: one.num_output_tokens for name, one in core.scheduler.requests.items()}
    core.fail = lambda _plan: OutOfMemoryError(OUT_OF_MEMORY)
    assert core.step_fn() == ({}, False)
    scheduler = core.scheduler
    assert [one.request_id for one in scheduler.waiting] == ["a", "b", "c"]
    assert {name: one.num_output_tokens for name, one in scheduler.requests.items()} == before
    assert scheduler.cache == set()
    for one in scheduler.requests.values():
        assert (one.num_in_flight_tokens, one.num_stale_output_tokens, one.drop_stale_output) == (0, 0, False)
    assert scheduler.processed_step_seq == scheduler.sched_step_seq


def test_pictures_of_a_failed_step_are_encoded_again(tmp_path: Path) -> None:
    """The scheduler believes that the failed step has encoded them; the worker may not have."""
    core = EngineCore(lambda _plan: OutOfMemoryError(OUT_OF_MEMORY))
    core.vllm_config.model_config.is_multimodal_model = True
    armed(core, tmp_path)
    core.add_request(Request("a"))
    core.step_fn()
    assert core.scheduler.encoder_resets == 1
    assert core.model_executor.calls == ["forget_step", "reset_encoder_cache"]


def test_a_shortage_ends_in_smaller_steps_and_everyone_is_served(tmp_path: Path) -> None:
    """Steps above 200 tokens fail: four failures from 1024, then all go on."""
    core = armed(EngineCore(above(200)), tmp_path)
    for number in range(6):
        core.add_request(Request(f"r{number}", 400))
    for _ in range(60):
        core.step_fn()
    assert told(tmp_path)["contained"] <= 4
    assert core.scheduler.max_num_scheduled_tokens <= 200
    assert all(one.num_output_tokens > 0 for one in core.scheduler.requests.values())


class FakeClock:
    """A clock that is set; pauses are counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def test_the_one_that_always_fails_is_aborted_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its API server is sent an error with the reason; the others keep their size and their tokens."""
    killer = lambda plan: OutOfMemoryError(OUT_OF_MEMORY) if "bad" in plan.num_scheduled_tokens else None  # noqa: E731
    core = armed(EngineCore(killer), tmp_path)
    for name in ("good", "bad", "fine"):
        core.add_request(Request(name, 300))
    monkeypatch.setattr("plimsoll.inside.survive.contain.time", clock := FakeClock())
    outputs = []
    with caplog.at_level(logging.INFO, "vllm.plimsoll"):
        for _ in range(60):
            clock.now += 0.5
            sent, _executed = core.step_fn()
            outputs += [one for part in sent.values() for one in part.outputs if getattr(one, "finish_reason", None)]
    assert [one.request_id for one in outputs] == ["bad"]
    assert set(core.scheduler.requests) == {"good", "fine"}
    assert "plimsoll: survive: aborted request bad: it ran out of device memory alone" in caplog.text
    assert core.scheduler.max_num_scheduled_tokens == 1024
    assert told(tmp_path)["aborted"] == 1
    assert report.why_aborted(str(tmp_path), told(tmp_path)["pid"], "bad") is not None


def test_a_new_request_the_worker_never_heard_of_is_sent_as_new_again(tmp_path: Path) -> None:
    """A step that failed before the worker took note of it would else be resumed there, and fail for good."""
    core = armed(EngineCore(lambda _plan: OutOfMemoryError(OUT_OF_MEMORY)), tmp_path)
    core.add_request(Request("new"))
    core.add_request(Request("old"))
    worker = core.model_executor
    worker.known = {"old", "gone"}
    own = core.scheduler.schedule
    core.scheduler.schedule = lambda: _forgetting(own(), worker)  # type: ignore[method-assign]
    core.step_fn()
    assert {name: one.status for name, one in core.scheduler.requests.items()} == {"new": "WAITING", "old": "PREEMPTED"}
    assert core.scheduler.finished_req_ids == {"gone"}


def _forgetting(plan: Any, worker: Any) -> Any:
    class Quiet(dict[str, int]):
        """Names that the worker is not told."""

        def keys(self) -> Any:
            return set()

    plan.num_scheduled_tokens = Quiet(plan.num_scheduled_tokens)
    del worker
    return plan


def test_a_request_that_does_not_run_and_holds_blocks_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A streaming session between two inputs: vLLM's reset would fail half way, so nothing is begun."""
    core = armed(EngineCore(lambda _plan: OutOfMemoryError(OUT_OF_MEMORY)), tmp_path)
    core.add_request(Request("a"))
    session = Request("session")
    session.num_computed_tokens = 40
    core.scheduler.requests["session"] = session
    with caplog.at_level(logging.INFO, "vllm.plimsoll"), pytest.raises(OutOfMemoryError):
        core.step_fn()
    assert "a request that does not run holds blocks" in caplog.text
    assert core.model_executor.calls == []


def test_a_sampling_step_that_has_failed_says_so_before_the_next_step(tmp_path: Path) -> None:
    """Under asynchronous scheduling it would stay in its future, and the next step would run on tokens that nobody sampled."""
    core = EngineCore()
    core.batch_queue = deque()
    failed: Future[None] = Future()
    failed.set_exception(OutOfMemoryError(OUT_OF_MEMORY))
    pending: Future[None] = Future()
    answers = [failed, pending]
    core.model_executor.sample_tokens = lambda *_words, **_more: answers.pop(0)  # type: ignore[method-assign]
    armed(core, tmp_path)
    with pytest.raises(OutOfMemoryError):
        core.model_executor.sample_tokens(None, non_block=True)
    assert core.model_executor.sample_tokens(None, non_block=True) is pending


def test_a_fault_while_watching_leaves_the_watch_in_place(tmp_path: Path) -> None:
    """Else small steps would stay small for ever."""
    core = armed(EngineCore(above(200)), tmp_path)
    core.add_request(Request("a", 400))
    _steps(core, 4)
    step = core.step_fn
    step.__self__._watch = lambda _outputs: 1 / 0
    core.step_fn()
    assert core.step_fn == step


def test_another_error_is_vllms_own(tmp_path: Path) -> None:
    """An assertion, a broken device, a host out of memory: raised as it was, nothing preempted."""
    core = armed(EngineCore(lambda _plan: AssertionError("a bug")), tmp_path)
    core.add_request(Request("a"))
    with pytest.raises(AssertionError, match="a bug"):
        core.step_fn()
    assert core.model_executor.calls == []


def test_twice_a_storm_ends_it_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that only fails is better dead: somebody restarts it."""
    core = armed(EngineCore(lambda _plan: OutOfMemoryError(OUT_OF_MEMORY)), tmp_path, PLIMSOLL_SURVIVE_STORM="4")
    for number in range(40):
        core.add_request(Request(f"r{number}", 400))
    with caplog.at_level(logging.INFO, "vllm.plimsoll"), pytest.raises(OutOfMemoryError):
        _steps(core, 20)
    assert "plimsoll: survive: storm: 4 contained failures in 600 s" in caplog.text
    assert "plimsoll: survive: gave up after 8 contained failures in 600 s; vLLM ends" in caplog.text
    assert told(tmp_path)["storm"] is True


def _steps(core: EngineCore, count: int) -> None:
    for _ in range(count):
        core.step_fn()


PARTS = ("running", "waiting", "requests", "finished_req_ids", "reset_prefix_cache", "sched_step_seq", "finish_requests")


@given(
    broken=st.sampled_from([*PARTS, "executor", "plan", "folder"]), steps=st.integers(0, 4), value=st.sampled_from([None, 3])
)
def test_a_fault_of_our_own_leaves_vllm_to_die_as_it_would(
    tmp_path_factory: pytest.TempPathFactory, broken: str, steps: int, value: Any
) -> None:
    """A half-prepared scheduler, a worker that does not answer, a plan of another form: vLLM's own error comes out."""
    folder = tmp_path_factory.mktemp("run")
    core = armed(EngineCore(), folder)
    core.add_request(Request("a"))
    for _ in range(steps):
        core.step_fn()
    error = OutOfMemoryError(OUT_OF_MEMORY)

    def fail(plan: Any) -> BaseException:
        if broken in PARTS:
            setattr(core.scheduler, broken, value)
        elif broken == "executor":
            core.model_executor.collective_rpc = lambda *_args, **_kwargs: [value]  # type: ignore[method-assign]
        elif broken == "plan":
            plan.num_scheduled_tokens = value
        elif broken == "folder":
            next(folder.glob("core-*.json")).unlink()
            folder.rmdir()
        return error

    core.fail = fail
    came = None
    try:
        outcome = core.step_fn()
    except OutOfMemoryError as raised:
        came = raised
    assert came is error or outcome == ({}, False)
    if broken in ("running", "requests", "reset_prefix_cache", "executor"):
        assert came is error

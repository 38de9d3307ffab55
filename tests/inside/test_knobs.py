"""Knobs of the scheduler: what is in force, leases, epochs, and how both ways of admission are turned."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside import knobs
from plimsoll.inside.answers import AskRefused
from plimsoll.inside.figures import write_report
from plimsoll.inside.knobs import (
    HEADROOM,
    KNOBS,
    LONG_PREFILL,
    MAX_SEQS,
    MAX_TOKENS,
    QUEUED_REQS,
    SCHEDULER_KNOBS,
    KnobClient,
    Knobs,
    VllmScheduler,
    strictest,
)
from tests.each import cases
from tests.inside.survive.fake_core import EngineCore, Request


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(knobs, "time", found)
    return found


def core(*, is_old: bool = False, **limits: Any) -> Any:
    """An engine core of 8 sequences and 1024 tokens, with vLLM's names; an old one admits by one bound alone."""
    made: Any = EngineCore()
    given = {"enable_chunked_prefill": True, "watermark": 0.0, "long_prefill_token_threshold": 0, **limits}
    made.vllm_config.scheduler_config = SimpleNamespace(**given)
    made.scheduler.kv_cache_config.num_blocks = 200
    made.scheduler.kv_cache_manager = SimpleNamespace(watermark_blocks=int(given["watermark"] * 200))
    if is_old:
        del made.scheduler.max_num_active_reqs
    return made


def turned(made: Any) -> tuple[int, int, int, int]:
    """What the scheduler reads: sequences, tokens, blocks kept free, the longest piece of a prompt."""
    scheduler = made.scheduler
    admitted = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    limits = made.vllm_config.scheduler_config
    return (
        admitted, scheduler.max_num_scheduled_tokens, scheduler.kv_cache_manager.watermark_blocks,
        limits.long_prefill_token_threshold,
    )  # fmt: skip


def order(made: Knobs, lease_s: float = 60.0, epoch: int | None = None, **values: Any) -> dict[str, Any]:
    asked = {"epoch": epoch, "lease_s": lease_s, "values": {name.replace("_", "-"): value for name, value in values.items()}}
    return dict(json.loads(made.answer(json.dumps(asked))))


@pytest.mark.parametrize(
    ("knob", "values", "least"),
    [
        (MAX_SEQS, (8, 4, None), 4), (MAX_TOKENS, (1024, None, None), 1024), (HEADROOM, (0.01, None, 0.2), 0.2),
        (LONG_PREFILL, (0, None, 512), 512), (LONG_PREFILL, (256, None, 512), 256), (LONG_PREFILL, (0, None, None), 0),
        (QUEUED_REQS, (None, None, 9), 9), (QUEUED_REQS, (None, None, None), None),
        (QUEUED_REQS, (0, None, 9), 0),
    ],
)  # fmt: skip
def test_the_strictest_of_three_holds(knob: str, values: tuple[float | None, ...], least: float | None) -> None:
    """Fewer sequences and tokens, more headroom; 0 is no bound on a prompt's piece, and a queue that takes nobody."""
    assert strictest(knob, *values) == least


def test_a_lease_turns_the_scheduler_and_its_end_turns_it_back(clock: Clock) -> None:
    """What an order names is turned at once; when the lease is over the next step finds the start-up values."""
    made = core()
    found = Knobs(VllmScheduler(made))
    knobs.follow_steps(made.scheduler, found)
    told = order(found, 60.0, max_num_seqs=3, max_num_batched_tokens=200, kv_headroom=0.1, long_prefill_token_threshold=50)
    assert turned(made) == (3, 200, 20, 50)
    assert told["turned_to"] == {MAX_SEQS: 3, MAX_TOKENS: 200, HEADROOM: 0.1, LONG_PREFILL: 50}
    clock.now += 61
    made.scheduler.schedule()
    assert turned(made) == (8, 1024, 0, 0)
    assert found.report()["knobs"][MAX_SEQS]["lease"] is None
    assert found.report()["epoch"] == 0


def test_an_order_replaces_the_one_before_and_an_older_epoch_is_refused(clock: Clock) -> None:
    """Knobs that the new order does not name go back; a holder who was replaced cannot turn anything."""
    made = core()
    found = Knobs(VllmScheduler(made))
    order(found, max_num_seqs=3)
    clock.now += 1
    order(found, max_num_batched_tokens=300)
    assert turned(made) == (8, 300, 0, 0)
    order(found)
    assert turned(made) == (8, 1024, 0, 0)
    made = core()
    found = Knobs(VllmScheduler(made))
    assert order(found, epoch=7, max_num_seqs=3)["epoch"] == 7
    assert "epoch 6 is older than 7" in order(found, epoch=6, max_num_seqs=5)["refused"]
    assert order(found, max_num_seqs=4)["epoch"] == 7
    assert turned(made)[0] == 4


def test_containment_and_lease_do_not_undo_each_other(clock: Clock) -> None:
    """The least of both holds; the end of either removes only its own."""
    made = core()
    found = Knobs(VllmScheduler(made))
    found.contain(256, 5)
    order(found, max_num_seqs=6, max_num_batched_tokens=100)
    assert turned(made)[:2] == (5, 100)
    found.contain(64, 1)
    assert turned(made)[:2] == (1, 64)
    found.contain(1024, 8)  # calm again
    assert turned(made)[:2] == (6, 100)
    found.contain(64, 2)
    clock.now += 100
    found.before_step()
    assert turned(made)[:2] == (2, 64)
    found.contain(1024, 8)
    assert turned(made)[:2] == (8, 1024), "nothing is stuck"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_bound_below_what_runs_admits_nobody_and_trips_no_assertion(*, is_old: bool) -> None:
    """Before 0.31 vLLM asserts that no more run than are admitted: there the bound follows down what runs."""
    made = core(is_old=is_old)
    found = Knobs(VllmScheduler(made))
    running = made.scheduler.running
    running += [Request(f"r{number}") for number in range(7)]
    order(found, max_num_seqs=2)
    assert made.scheduler.max_num_running_reqs >= 7
    assert turned(made)[0] == (7 if is_old else 2)
    del running[1:]
    found.before_step()
    assert turned(made)[0] == 2


def test_a_step_always_has_a_token_for_each_who_runs() -> None:
    """One plus the speculative tokens each, or the tail of the list would starve; never above the start."""
    made = core()
    made.scheduler.num_spec_tokens = 3
    found = Knobs(VllmScheduler(made))
    order(found, max_num_batched_tokens=4)
    made.scheduler.running += [Request(f"r{number}") for number in range(8)]
    found.before_step()
    assert turned(made)[1] == 32
    found.after_step(32)
    assert json.loads(found.answer("{}"))["most_needed"] == 32, "a step of 32 tokens obeys an order of 4"
    made.scheduler.running.clear()
    found.before_step()
    assert turned(made)[1] == 4
    assert "from 4 to 1024" in order(found, max_num_batched_tokens=3)["refused"]


@pytest.mark.parametrize("is_aligned", [True, False])
def test_a_prompt_that_is_cut_at_mamba_blocks_has_room_for_one_beside_those_who_answer(*, is_aligned: bool) -> None:
    """Else a step of a block's tokens, one of which an answer takes, computes nothing of any prompt."""
    made = core()
    made.scheduler.kv_cache_config.kv_cache_groups = (SimpleNamespace(kv_cache_spec=type("MambaSpec", (), {})()),)
    made.scheduler.need_mamba_block_aligned_split = is_aligned
    made.vllm_config.cache_config = SimpleNamespace(mamba_block_size=528 if is_aligned else 131_072)
    found = Knobs(VllmScheduler(made))
    smallest = 528 if is_aligned else 1
    assert f"from {smallest} to 1024" in order(found, max_num_batched_tokens=2000)["refused"]
    order(found, max_num_batched_tokens=smallest)
    made.scheduler.running += [Request("r1"), Request("r2")]
    found.before_step()
    assert turned(made)[1] == (530 if is_aligned else 2)


@pytest.mark.parametrize(("limits", "values", "why"), cases("inside", "what_cannot_be_is_refused_whole"))
def test_what_cannot_be_is_refused_whole(limits: dict[str, Any], values: dict[str, Any], why: str) -> None:
    """Nothing above what was allocated at the start; the other knobs of such an order are not turned either."""
    made = core(**limits)
    found = Knobs(VllmScheduler(made))
    before = turned(made)
    assert why in order(found, **{"max_num_seqs": 1, **values})["refused"]
    assert turned(made) == before


def test_an_engine_that_steps_with_others_is_left_alone() -> None:
    """Data parallel engines, and another scheduler."""
    made = core()
    made.vllm_config.parallel_config.data_parallel_size = 2
    for knob in SCHEDULER_KNOBS:
        asked: dict[str, Any] = {knob: 0.5 if knob == HEADROOM else 2}
        told = order(Knobs(VllmScheduler(made)), **asked)["refused"]
        assert told == (
            f"{knob} cannot be turned here: never tried with data parallel engines, which step together; "
            "run one server for each replica instead"
        )
    other = core()
    other.scheduler.__class__ = type("Mine", (type(other.scheduler),), {"__module__": "mine"})
    assert "never tried with the scheduler Mine" in order(Knobs(VllmScheduler(other)), max_num_seqs=2)["refused"]


class Core:
    """A client whose engine core answers utility calls in this process."""

    def __init__(self, made: Knobs | None, **limits: Any) -> None:
        self.scheduler_config = SimpleNamespace(**{"max_num_queued_reqs": None, "max_num_queued_tokens": None, **limits})
        self.engine_core = self
        self._knobs = made

    def check_admission(self) -> None:
        """vLLM's own bound on the queue."""

    async def call_utility_async(self, method: str, text: str) -> str:
        assert method == knobs.CALL
        if self._knobs is None:
            await asyncio.sleep(60)
        assert self._knobs is not None
        return self._knobs.answer(text)


def test_the_api_server_turns_the_queue_and_reads_the_report(tmp_path: Path, clock: Clock) -> None:
    """Orders go by utility call; the report is a file that every API server of this one engine reads."""
    made = core()
    found = Knobs(VllmScheduler(made), lambda told: write_report(str(tmp_path), "knobs", knobs.SCHEMA, told))
    client, server = Core(found, max_num_queued_reqs=500), KnobClient(str(tmp_path), os.getpid())
    fellow, other = Core(found), KnobClient(str(tmp_path), os.getpid())
    asked = {"epoch": 3, "lease_s": 60.0, "values": {MAX_SEQS: 4, QUEUED_REQS: 20}}
    told = asyncio.run(server.call(client, asked, 5.0))
    assert client.scheduler_config.max_num_queued_reqs == 20
    other.turn_queue(fellow)
    assert fellow.scheduler_config.max_num_queued_reqs == 20
    words = server.words(client, told)
    assert words["knobs"][MAX_SEQS] == {"in_force": 4, "start": 8, "containment": None, "lease": 4, "why_not": ""}
    assert words["knobs"][QUEUED_REQS]["start"] == 500
    assert (words["epoch"], words["lease_left_s"]) == (3, 60.0)
    clock.now += 61
    server.turn_queue(client)
    other.turn_queue(fellow)
    assert (client.scheduler_config.max_num_queued_reqs, fellow.scheduler_config.max_num_queued_reqs) == (500, None)
    # The engine is idle and has made no step since: the reader knows that the lease is over.
    assert server.words(client)["knobs"][MAX_SEQS]["in_force"] == 8
    with pytest.raises(AskRefused, match="from 1 to 500"):
        server.check_queue(client, {QUEUED_REQS: 501})


def test_a_report_of_nonsense_is_passed_over(tmp_path: Path) -> None:
    """Torn, foreign or hostile files cost nothing but themselves."""
    for number, text in enumerate(("{", "[]", '{"schema": "plimsoll.knobs/1"}', '{"schema": "plimsoll.knobs/1", "knobs": 3}')):
        (tmp_path / f"knobs-{number}-1.json").write_text(text)
    server = KnobClient(str(tmp_path), os.getpid())
    assert server.report() is None
    assert {row["in_force"] for row in server.words(Core(None))["knobs"].values()} == {None}
    assert set(server.words(Core(None))["knobs"]) == set(KNOBS)


def test_no_engine_core_and_no_answer_are_told_apart(tmp_path: Path) -> None:
    """Without a report nobody is asked; a stuck engine is waited for only so long; one that dies meanwhile is named."""
    with pytest.raises(AskRefused, match="has not reported knobs"):
        asyncio.run(KnobClient(str(tmp_path), os.getpid()).call(Core(None), {}, 1.0))
    with pytest.raises(AskRefused, match="no utility calls"):
        asyncio.run(KnobClient(None, os.getpid()).call(SimpleNamespace(), {}, 1.0))
    with pytest.raises(AskRefused, match="made no step"):
        asyncio.run(KnobClient(None, os.getpid()).call(Core(None), {}, 0.05))

    async def dies(*_: str) -> str:
        raise RuntimeError("a secret")

    dead = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=dies))
    with pytest.raises(AskRefused, match=r"did not take the order: RuntimeError$"):
        asyncio.run(KnobClient(None, os.getpid()).call(dead, {}, 5.0))


def test_the_plugin_adds_the_call_once() -> None:
    """Each engine core of the process answers it, and reports when its loop begins."""

    class Own:
        def run_busy_loop(self) -> str:
            return "looped"

    module = SimpleNamespace(
        EngineCore=Own, EngineCoreProc=type("EngineCoreProc", (Own,), {"run_busy_loop": Own.run_busy_loop})
    )
    knobs.install_into(module)
    before = module.EngineCoreProc.run_busy_loop
    knobs.install_into(module)
    assert module.EngineCoreProc.run_busy_loop is before
    proc = module.EngineCoreProc()
    made = core()
    proc.scheduler, proc.vllm_config = made.scheduler, made.vllm_config
    assert proc.run_busy_loop() == "looped"
    assert json.loads(proc.plimsoll_knobs("{}"))["knobs"][MAX_SEQS]["start"] == 8

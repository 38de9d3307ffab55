"""What happens once a second: each part alone, a stuck engine put to the test, a vLLM that was told to end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate import Gate
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.tick import LONGEST_STEPS, Progress, Tick, is_suspect, notice_shutdown
from tests.each import each
from tests.fakes import EngineClient, State, ask, hello, settings
from tests.inside.test_gate_control import feed, made

SILENT = Progress(has_work=True, work_since=100.0, last_step=90.0, longest_step_s=2.0, is_excused=False)


@each(
    ("seen", "now", "deadline_s", "suspect"),
    [
        (SILENT, 219.0, 0.0, False),  # counted from when work came, not from the last step before it
        (SILENT, 221.0, 0.0, True),
        (SILENT._replace(last_step=150.0), 221.0, 0.0, False),
        (SILENT._replace(last_step=None), 219.0, 0.0, False),  # the first step may never come
        (SILENT._replace(last_step=None), 221.0, 0.0, True),
        (SILENT._replace(longest_step_s=100.0), 399.0, 0.0, False),  # known for long steps: three of them
        (SILENT._replace(longest_step_s=100.0), 401.0, 0.0, True),
        (SILENT._replace(longest_step_s=200.0), 221.0, 0.0, True),  # as long as the bound: a failure, and not learnt
        (SILENT._replace(has_work=False), 1e9, 0.0, False),
        (SILENT._replace(is_excused=True), 1e9, 0.0, False),  # asleep or dead
        (SILENT, 189.0, 30.0, False),  # the test request is sent so early that it fails at the bound
        (SILENT, 191.0, 30.0, True),
    ],
)
def test_silence_with_work_beyond_the_bound_is_suspect(seen: Progress, now: float, deadline_s: float, suspect: bool) -> None:
    """After 120 s, or three times the longest step that was seen; an engine without work or with an excuse never."""
    assert is_suspect(seen, 120.0, now, deadline_s) is suspect


moments = st.floats(0, 1e6)


@given(work_since=moments, last=st.none() | moments, longest=st.floats(0, 1e4), bound=st.floats(0.5, 1e4), now=moments)
def test_a_recent_step_always_clears(work_since: float, last: float | None, longest: float, bound: float, now: float) -> None:
    """Suspect means silent for longer than the bound, and than three longest steps where these are shorter than the bound."""
    if is_suspect(SILENT._replace(work_since=work_since, last_step=last, longest_step_s=longest), bound, now):
        assert now - (last or 0.0) > max(bound, LONGEST_STEPS * longest if longest < bound else 0.0)


class Trial:
    """Stands for the test request; counts how often it was made."""

    def __init__(self, *, fails: bool, does: Any = None) -> None:
        self.fails = fails
        self.made = 0
        self._does = does

    async def __call__(self, client: Any, limit_s: float) -> bool:
        """Fails or not, after what happens meanwhile."""
        del client, limit_s
        self.made += 1
        if self._does is not None:
            self._does()
        return self.fails


def silent(folder: Path) -> tuple[GateControl, EngineClient]:
    """An engine with work and, for a while, no step."""
    core, client = made(folder, PLIMSOLL_WEDGE_S="0.5")
    feed(core, 1, 0)
    client.add("a", 10)
    core.pulse.last_step = time.monotonic() - 60
    core.publish_queue()
    return core, client


async def look(tick: Tick, times: int = 2) -> None:
    """The tick looks for a stuck engine; the work has been there for a while."""
    for _ in range(times):
        tick._work_since = tick._work_since and time.monotonic() - 50
        tick._wedge()
        await asyncio.sleep(0.01)


async def test_silence_is_put_to_the_test_and_proven_by_it(tmp_path: Path) -> None:
    """Then the server is not ready, the test is not made again, and one step disproves it."""
    core, _ = silent(tmp_path)
    tester = Trial(fails=True)
    tick = Tick(core, tester)
    await look(tick, 1)
    assert tester.made == 0, "the work has only just been seen"
    await look(tick, 4)
    assert tester.made == 1
    assert core.readiness().reason == "wedged"
    core.pulse.note_step(1, 0, 0.5, 0, 1, time.monotonic())
    core._queue_at_ns = 0
    core.publish_queue()
    assert core.readiness().is_ready


async def test_an_engine_that_answers_the_test_is_not_stuck(tmp_path: Path) -> None:
    """Nor one that steps while the test runs; and it is not asked every second."""
    core, _ = silent(tmp_path)

    def step() -> None:
        core.pulse.note_step(1, 0, 0.5, 0, 1, time.monotonic())
        core._queue_at_ns = 0

    for tester in (Trial(fails=False), Trial(fails=True, does=step)):
        tick = Tick(core, tester)
        await look(tick, 6)
        assert tester.made == 1
        assert core.readiness().is_ready


async def test_an_engine_with_an_excuse_is_never_tested(tmp_path: Path) -> None:
    """Idle, asleep, dead, busy with a call of ours, or with nobody to tell of its steps."""
    for excuse in ("idle", "asleep", "dead", "call", "unfed"):
        core, client = silent(tmp_path)
        tester = Trial(fails=True)
        tick = Tick(core, tester)
        if excuse == "idle":
            client.output_processor.request_states.clear()
            core._queue_at_ns = 0
            core.publish_queue()
        elif excuse == "asleep":
            core.note_sleep(1)
        elif excuse == "dead":
            client.errored = True
        elif excuse == "call":
            _ = asyncio.create_task(core.calls.call(client, "plimsoll_compact"))  # noqa: RUF006
            await asyncio.sleep(0.01)
        else:
            core.pulse.is_fed = False
        await look(tick, 4)
        assert tester.made == 0, excuse
        core.note_sleep(0)
        client.may_answer.set()
        await asyncio.sleep(0.01)


def test_sleep_is_passed_on_when_it_changes(tmp_path: Path) -> None:
    """What vLLM's statistics say of it."""
    core, _ = made(tmp_path)
    tick = Tick(core)
    core.pulse.note_sleep(True, 1)
    tick._sleep()
    assert core.readiness().reason == "asleep"
    core.pulse.note_sleep(False, 0)
    tick._sleep()
    assert core.readiness().is_ready


async def test_one_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is counted; the beat goes on."""
    core, _ = made(tmp_path)
    tick = Tick(core)
    core.pulse = None  # type: ignore[assignment]
    before = FAULTS.counts.get("the gate's sleep", 0)
    tick.ensure()
    tick.ensure()
    await asyncio.sleep(0.05)
    assert FAULTS.counts["the gate's sleep"] == before + 1
    assert tick._meters is not None
    await tick.stop()
    assert not list(tmp_path.glob("api-*"))


def test_a_place_that_cannot_be_listened_at_does_not_stop_the_tick(tmp_path: Path) -> None:
    """Whatever is wrong with it."""

    async def go(listen: str) -> None:
        core, _ = made(tmp_path, PLIMSOLL_LISTEN=listen)
        tick = Tick(core)
        tick.ensure()
        for _ in range(300):
            await asyncio.sleep(0.01)
            if core.shared.own["beat_ns"]:
                break
        assert core.shared.own["beat_ns"] > 0
        await tick.stop()

    for listen in ("nonsense", "unix:relative", f"{'x' * 70}.example:9", "unix:/nowhere/at/all.sock", f"unix:/{'x' * 200}"):
        asyncio.run(go(listen))


class Client:
    """An engine client with a `shutdown`, as vLLM calls it on SIGTERM."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def shutdown(self, timeout: float | None = None) -> str:
        """Remembers what it was called with."""
        self.heard.append(timeout)
        return "done"


def test_vllms_call_to_end_is_noticed_once_and_stays_its_own(tmp_path: Path) -> None:
    """Its argument and its answer pass through; listening twice changes nothing; a client without one is left alone."""
    core, _ = made(tmp_path)
    client = Client()
    notice_shutdown(client, core)
    listening = client.shutdown
    notice_shutdown(client, core)
    assert client.shutdown is listening
    before = core.is_stopping
    assert (client.shutdown(timeout=7.0), client.heard) == ("done", [7.0])
    assert (before, core.is_stopping) == (False, True)
    notice_shutdown(object(), core)


async def test_while_it_ends_new_work_is_refused_and_nothing_else(tmp_path: Path) -> None:
    """503 with Retry-After where vLLM would answer 500; looking still works; the reason is `draining`."""
    gate = Gate(hello, settings(tmp_path))
    core = gate._control
    assert core is not None
    core.engine._state = State(engine_client=object())
    core.is_stopping = True
    refused = await ask(gate, "POST", "/v1/completions")
    assert (refused.status, bool(refused.headers["retry-after"])) == (503, True)
    looked = await ask(gate, "GET", "/v1/models")
    assert (looked.status, looked.headers["connection"]) == (200, "close")
    assert core.readiness().reason == "draining"
    assert core.shared.own["in_flight"] == 0

"""What the gate decides: two phases that stay, sleep and wedges that steps disprove, and shedding that spares the idle."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from plimsoll.inside.admission import LEAVING, REFUSING, SERVING, begin
from plimsoll.inside.answers import App, AskRefused
from plimsoll.inside.gate import Gate
from plimsoll.inside.gate_control import Alone, Calls, GateControl
from plimsoll.inside.meters import Meters
from plimsoll.inside.pulse import PULSE, Pulse
from plimsoll.inside.shared import ASLEEP, NS, PAUSED, Shared
from tests.each import sure
from tests.fakes import EngineClient, State, settings


def made(folder: Path, places: int = 4, **more: Any) -> tuple[GateControl, EngineClient]:
    client = EngineClient(places)
    return GateControl(settings(folder, **more), State(engine_client=client), Pulse()), client


class Around(Gate):
    """A gate with this control around an app, without a tick."""

    def __init__(self, app: App, core: GateControl) -> None:
        self.app, self._control, self._tick = app, core, None


def feed(core: GateControl, running: int, waiting: int, *, each_s: float = 0.1) -> None:
    """Four seconds of steps until now, 50 tokens each tenth of a second, and one finished request of 100 and 20 tokens."""
    core.pulse.is_fed = True
    now = time.monotonic()
    for step in range(41):
        core.pulse.note_step(running, waiting, 0.5, 0, 50, now - (40 - step) * each_s)
    core.pulse.note_finished(100, 20)
    core._queue_at_ns = 0


def drain(core: GateControl, ago_s: float = 0.0, **wish: Any) -> None:
    with core.shared.common.changing():
        core.shared.set_drain(begin(core.shared.drain(), time.monotonic() - ago_s, **wish))


def test_phase_two_stays_until_its_drain_ends_and_does_not_come_back(tmp_path: Path) -> None:
    """No late arrival opens the gate again; a new drain begins with its first phase."""
    core, _ = made(tmp_path)
    drain(core, quiet_s=1.0, bound_s=1000.0, ago_s=2.0)
    assert core.phase() == REFUSING
    core.enter()
    core.begin()
    assert core.phase() == REFUSING
    assert core.shared.drain().is_refusing
    core.shared.common["until_ns"] = time.monotonic_ns()
    assert core.phase() == SERVING
    drain(core, quiet_s=50.0)
    assert core.phase() == LEAVING


def test_sleep_is_not_ready_until_it_ends_or_steps_go_on(tmp_path: Path) -> None:
    """Told by requests; steps a good while after it are the better witness, a last one just after it is none."""
    core, _ = made(tmp_path)
    for how, word in ((PAUSED, "paused"), (ASLEEP, "asleep")):
        core.note_sleep(how)
        assert word in core.asleep_words()
        assert core.readiness().reason == "asleep"
        core.note_sleep(0)
        assert core.readiness().is_ready
    core.note_sleep(ASLEEP)
    feed(core, 1, 0)
    core.publish_queue()
    assert core.asleep_words(), "these steps may have been before"
    core.shared.common["asleep_at_ns"] -= 2 * NS
    assert not core.asleep_words()
    assert core.shared.common["asleep"] == 0


def test_a_full_server_refuses_at_its_bound_and_recovers(tmp_path: Path) -> None:
    """The wait is that of the queue; a priority doubles or halves the bound; Retry-After is the rest."""
    core, client = made(tmp_path, PLIMSOLL_SHED_WAIT_S="10")
    for number in range(46):
        client.add(str(number), 105)
    feed(core, 4, 38)  # 38 x (105 + 20) tokens at 500 a second: 9.5 s
    assert core.shed(b"") is None
    feed(core, 4, 42)
    assert (b"retry-after", b"1") in sure(core.shed(b"")).headers
    assert core.shed(b"high") is None
    assert core.shed(b"very high") is not None, "a word that is made up helps nobody"
    assert core.shed(b"low") is not None
    assert core.shared.own["refused_shed"] == 3
    assert core.readiness().is_ready, "being full is no reason to send the load elsewhere"
    core.settings.shed_wait_s = None  # as by default
    assert core.shed(b"low") is None
    core.settings.shed_wait_s = 10.0
    client.output_processor.request_states.clear()
    feed(core, 0, 0)
    assert core.shed(b"low") is None


def test_a_lone_fast_request_or_an_unknown_rate_refuses_nobody(tmp_path: Path) -> None:
    """What is not known is no reason: no rate, no finished request, no step."""
    core, client = made(tmp_path, PLIMSOLL_SHED_WAIT_S="0.01")
    core.in_layer = 1000
    assert core.shed(b"") is None, "no step seen"
    for number in range(50):
        client.add(str(number), 100_000)
    core.pulse.is_fed = True
    core.pulse.note_step(4, 46, 0.9, 0, 50, time.monotonic())
    core._queue_at_ns = 0
    assert core.shed(b"") is None, "no rate yet"


def test_what_waits_is_what_is_still_on_its_way_to_the_engine(tmp_path: Path) -> None:
    """Its last word may be that many wait, and all were taken back; a burst it has not seen waits; slow readers do not."""
    core, _ = made(tmp_path, places=4, PLIMSOLL_SHED_WAIT_S="5")
    feed(core, 4, 40)
    for in_layer, answering, coming, is_refused in ((0, 0, 0, False), (4 + 10, 0, 14, False), (4 + 30, 0, 34, True),
                                                    (100, 100, 0, False), (105, 100, 5, False)):  # fmt: skip
        core.in_layer, core.answering, core._queue_at_ns = in_layer, answering, 0
        assert (core.queue().coming, core.shed(b"") is not None) == (coming, is_refused), in_layer
    core.in_layer, core.answering, core.settings.shed_wait_s = 3, 0, 0.01
    assert core.shed(b"low") is None, "a place is free for each"


def test_vllm_s_own_valve_decides_alone_where_it_is_set(tmp_path: Path) -> None:
    """Then only its refusals get a Retry-After."""
    core, client = made(tmp_path, PLIMSOLL_SHED_WAIT_S="0.01")
    for number in range(50):
        client.add(str(number), 100_000)
    feed(core, 4, 46)
    assert core.shed(b"") is not None
    core.engine._state = State(engine_client=client, args=SimpleNamespace(max_num_queued_reqs=5))
    assert core.shed(b"") is None
    assert core.retry_after_own_valve() == 120


def test_without_a_safe_folder_the_gate_still_counts_and_drains_alone(tmp_path: Path) -> None:
    """Figures are not there then, and that is no fault of a request."""
    (tmp_path / "file").write_text("")
    core = GateControl(settings(tmp_path / "file"), State(engine_client=EngineClient()), Pulse())
    core.enter()
    core.begin()
    assert core.shared.total("in_flight") == 1
    assert core.figures() == []
    assert core.shared.can_drain == (core.key == os.getpid())
    assert not Shared(None, os.getppid(), fellows_expected=True).can_drain, "one of several would stop alone"


# A gate for itself: its pulse, its figures and its metrics are no one else's, and nothing lies in a shared folder.
def alone(figures: list[dict[str, Any]] | None = None) -> Alone:
    return Alone(Pulse(), lambda: figures or [], CollectorRegistry(), lambda requests: not requests)


def test_two_count_apart(tmp_path: Path) -> None:
    """Each has a pulse, figures and a registry of its own, none in the process's, and leaves no file."""
    worker = {"engine": 0, "rank": 0, "age_s": 0.5, "alive": True}
    cores = [GateControl(settings(tmp_path), alone=alone([worker])) for _ in range(2)]
    assert (cores[0].pulse is PULSE, cores[0].figures(), cores[0].shared.can_drain) == (False, [worker], True)
    cores[0].enter()
    cores[0].begin()
    before, pages = generate_latest(REGISTRY).decode(), []
    for core in cores:
        Meters(core).refresh()
        assert core.alone is not None
        pages.append(generate_latest(core.alone.registry).decode())
        core.close()
    assert "plimsoll_begun_total 1.0" in pages[0]
    assert "plimsoll_begun_total 0.0" in pages[1]
    assert list(tmp_path.iterdir()) == []
    after = generate_latest(REGISTRY).decode()
    assert [page.count("plimsoll_in_flight 1.0") for page in (before, after)] in ([0, 0], [1, 1])


# Calls into the workers: one at a time over all API servers, no timeout, never cancelled.
async def test_a_call_is_made_without_a_timeout_and_its_results_come_back(tmp_path: Path) -> None:
    """The fake refuses any timeout; who waits too long is told that it still runs, and the call has no end of its own."""
    client, calls = EngineClient(), Calls(str(tmp_path / "lock"), patience_s=0.02)
    assert (await calls.call(client, "plimsoll_snapshot", (5,)))["is_running"]
    assert calls.is_running
    client.may_answer.set()
    await asyncio.sleep(0.01)
    assert (calls.done, calls.is_running, client.calls) == (1, False, [("plimsoll_snapshot", (5,))])
    found = await calls.call(client, "plimsoll_compact")
    assert (found["workers"], found["error"]) == ([{"released_bytes": 1}], None)
    assert (calls.last, calls.done) == (found, 2)


async def test_a_call_runs_on_when_the_one_who_asked_is_gone(tmp_path: Path) -> None:
    """Its end is kept, and the lock is held until then."""
    client, calls = EngineClient(), Calls(str(tmp_path / "lock"))
    asked = asyncio.create_task(calls.call(client, "plimsoll_compact"))
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.sleep(0.01)
    assert asked.cancelled()
    assert calls.is_running
    other = Calls(str(tmp_path / "lock"))  # as another API server's: the lock belongs to whoever opened it
    with pytest.raises(AskRefused):
        await other.call(client, "plimsoll_compact")
    client.may_answer.set()
    await asyncio.sleep(0.01)
    assert ((await other.call(client, "plimsoll_compact"))["error"], (tmp_path / "lock").stat().st_mode & 0o777) == (
        None,
        0o600,
    )
    assert calls.done == 1
    assert calls.last is not None
    assert calls.last["workers"] == [{"released_bytes": 1}]


async def test_a_call_that_fails_is_told_and_frees_the_place(tmp_path: Path) -> None:
    """By its kind alone; the next one may go."""

    async def broken(method: str, args: tuple[Any, ...]) -> list[Any]:
        raise RuntimeError(f"secret {method} {args}")

    calls = Calls(str(tmp_path / "lock"))
    found = await calls.call(SimpleNamespace(collective_rpc=broken), "plimsoll_compact")
    assert (found["error"], found["workers"]) == ("RuntimeError", None)
    assert "secret" not in str(found)
    client = EngineClient()
    client.may_answer.set()
    assert (await calls.call(client, "plimsoll_compact"))["error"] is None


async def test_a_process_that_was_forked_during_a_call_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It has the same open file; the lock must go with the call, not with the last of those who have it open."""
    client, calls = EngineClient(), Calls(str(tmp_path / "lock"))
    first = asyncio.create_task(calls.call(client, "plimsoll_compact"))
    await asyncio.sleep(0.01)
    held = [int(one.name) for one in Path("/proc/self/fd").iterdir() if _leads_to(one, tmp_path / "lock")]
    copies = [os.dup(one) for one in held]  # what a fork does, without one
    assert copies
    client.may_answer.set()
    await first
    assert (await calls.call(client, "plimsoll_compact"))["error"] is None
    for one in copies:
        os.close(one)


def _leads_to(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except OSError:
        return False


async def test_who_calls_just_as_the_one_before_ends_takes_nothing_from_it() -> None:
    """Both are told their own end; who calls while one runs is told so, also where there is no folder for a lock."""
    client, calls = EngineClient(), Calls(None)
    first = asyncio.create_task(calls.call(client, "plimsoll_compact"))
    await asyncio.sleep(0.01)
    with pytest.raises(AskRefused):
        await calls.call(client, "plimsoll_compact")

    async def as_it_ends() -> dict[str, Any]:
        await client.may_answer.wait()  # woken right after the call that runs, before the one who asked for it
        return await calls.call(client, "plimsoll_snapshot")

    second = asyncio.create_task(as_it_ends())
    await asyncio.sleep(0.01)
    client.may_answer.set()
    assert (await first)["call"] == "plimsoll_compact"
    assert (await second)["call"] == "plimsoll_snapshot"

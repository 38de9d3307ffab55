"""What the gate decides: two phases that stay, sleep and wedges that steps disprove, and shedding that spares the idle."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.admission import LEAVING, REFUSING, SERVING, Drain, Wish, begin
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.pulse import Pulse
from plimsoll.inside.shared import ASLEEP, NS, PAUSED
from tests.fakes import EngineClient, State, settings


def made(folder: Path, places: int = 4, **more: Any) -> tuple[GateControl, EngineClient]:
    """A gate's core with an engine of so many places."""
    client = EngineClient(places)
    return GateControl(settings(folder, **more), State(engine_client=client), Pulse()), client


def feed(core: GateControl, running: int, waiting: int, *, each_s: float = 0.1) -> None:
    """Four seconds of steps until now, 50 tokens each tenth of a second, and one finished request of 100 and 20 tokens."""
    core.pulse.is_fed = True
    now = time.monotonic()
    for step in range(41):
        core.pulse.note_step(running, waiting, 0.5, 0, 50, now - (40 - step) * each_s)
    core.pulse.note_finished(100, 20)
    core._queue_at_ns = 0


def drain(core: GateControl, wish: Wish, ago_s: float = 0.0) -> None:
    """Begin a drain, so long ago."""
    with core.shared.common.changing():
        found = begin(core.shared.read_drain_unlocked(), wish, time.monotonic() - ago_s)
        assert isinstance(found, Drain)
        core.shared.set_drain(found)


def test_requests_in_flight_are_counted_and_none_is_left(tmp_path: Path) -> None:
    """Up, down, and how many there ever were."""
    core, _ = made(tmp_path)
    for _ in range(3):
        core.enter()
        core.begin()
    core.finish()
    assert core.shared.total("in_flight") == 2
    core.finish()
    core.finish()
    assert (core.shared.total("in_flight"), core.shared.total("begun")) == (0, 3)


def test_a_drain_leaves_then_refuses_and_its_lease_ends_it(tmp_path: Path) -> None:
    """Answers ask for new connections in both phases, and work is refused in the second alone."""
    core, _ = made(tmp_path)
    assert (core.phase(), core.closes_connections(), core.refusal(SERVING)) == (SERVING, False, None)
    drain(core, Wish(quiet_s=100, bound_s=100, retry_after_s=9))
    assert (core.phase(), core.closes_connections(), core.refusal(LEAVING)) == (LEAVING, True, None)
    drain(core, Wish(refuse=True))
    assert (core.phase(), core.closes_connections()) == (REFUSING, True)
    refusal = core.refusal(core.phase())
    assert refusal is not None
    assert refusal.status == 503
    assert (b"retry-after", b"9") in refusal.headers
    core.shared.common["until_ns"] = time.monotonic_ns()
    assert (core.phase(), core.closes_connections()) == (SERVING, False)
    assert core.shared.own["refused_drain"] == 1


def test_phase_two_stays_until_its_drain_ends_and_does_not_come_back(tmp_path: Path) -> None:
    """No late arrival opens the gate again; a new drain begins with its first phase."""
    core, _ = made(tmp_path)
    drain(core, Wish(quiet_s=1.0, bound_s=1000.0), ago_s=2.0)
    assert core.phase() == REFUSING
    core.enter()
    core.begin()
    assert core.phase() == REFUSING
    assert core.shared.drain().is_refusing
    core, _ = made(tmp_path)
    drain(core, Wish(quiet_s=1.0), ago_s=2.0)
    assert core.phase() == REFUSING
    core.shared.common["until_ns"] = time.monotonic_ns()
    assert core.phase() == SERVING
    drain(core, Wish(quiet_s=50.0))
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


def test_an_engine_that_is_missing_dead_or_proven_stuck_is_not_ready(tmp_path: Path) -> None:
    """The proof holds until the next step, of whichever API server sees it."""
    core, _ = made(tmp_path)
    core.shared.common["wedged_at_ns"] = time.monotonic_ns()
    assert core.readiness().reason == "wedged"
    core.shared.own["last_step_ns"] = time.monotonic_ns()
    assert core.readiness().is_ready
    assert not core.is_wedged()
    assert GateControl(settings(tmp_path), State(), Pulse()).readiness().reason == "starting"
    core, client = made(tmp_path)
    client.errored = True
    assert core.readiness().reason == "dead"


def test_shedding_is_off_by_default_and_never_a_matter_of_readiness(tmp_path: Path) -> None:
    """However full it is."""
    core, client = made(tmp_path)
    for number in range(200):
        client.add(str(number), 10_000)
    feed(core, 4, 196)
    assert core.shed(b"") is None
    assert core.readiness().is_ready
    core.settings.shed_wait_s = 1.0
    assert core.shed(b"") is not None
    assert core.readiness().is_ready


def test_a_full_server_refuses_at_its_bound_and_recovers(tmp_path: Path) -> None:
    """The wait is that of the queue; a priority doubles or halves the bound; Retry-After is the rest."""
    core, client = made(tmp_path, PLIMSOLL_SHED_WAIT_S="10")
    for number in range(46):
        client.add(str(number), 105)
    feed(core, 4, 38)  # 38 x (105 + 20) tokens at 500 a second: 9.5 s
    assert core.shed(b"") is None
    feed(core, 4, 42)
    refusal = core.shed(b"")
    assert refusal is not None
    assert (b"retry-after", b"1") in refusal.headers
    assert core.shed(b"high") is None
    assert core.shed(b"low") is not None
    assert core.shared.own["refused_shed"] == 2
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


@pytest.mark.parametrize("left", [0, 3])
def test_an_idle_server_refuses_nobody_whatever_it_said_last(tmp_path: Path, left: int) -> None:
    """The last word of an engine whose requests were all taken back may be that many wait."""
    core, _ = made(tmp_path, places=4, PLIMSOLL_SHED_WAIT_S="0.01")
    feed(core, 4, 40)
    core.in_layer = left
    assert core.shed(b"low") is None


def test_requests_beyond_the_places_that_are_still_read_wait_too(tmp_path: Path) -> None:
    """A burst that the engine has not seen yet is no empty queue."""
    core, _ = made(tmp_path, places=4, PLIMSOLL_SHED_WAIT_S="5")
    feed(core, 4, 40)
    core.in_layer = 4 + 30
    assert core.shed(b"") is not None
    core.in_layer = 4 + 10
    core._queue_at_ns = 0
    assert core.shed(b"") is None


def test_items_of_requests_that_are_with_the_engine_do_not_count_again(tmp_path: Path) -> None:
    """Their tokens are the engine's by then: only the share of those that still come is added."""
    core, client = made(tmp_path, places=4)
    feed(core, 4, 6)
    for number in range(10):
        client.add(str(number), 100)
    core.in_layer, core.items = 10, 10
    core._queue_at_ns = 0
    assert core.queue().coming_item_tokens == 0
    core.in_layer = 20
    core._queue_at_ns = 0
    assert core.queue().coming_item_tokens == 5000


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


def test_a_bound_that_was_asked_for_holds_while_its_lease_runs(tmp_path: Path) -> None:
    """Then the one that was set at start is back."""
    core, _ = made(tmp_path, PLIMSOLL_SHED_WAIT_S="30")
    common = core.shared.common
    common["shed_bound_ns"], common["shed_until_ns"] = 2 * NS, time.monotonic_ns() + NS
    assert core.shed_bound_s() == 2.0
    common["shed_until_ns"] = time.monotonic_ns() - 1
    assert core.shed_bound_s() == 30.0


def test_without_a_safe_folder_the_gate_still_counts_and_drains_alone(tmp_path: Path) -> None:
    """Figures are not there then, and that is no fault of a request."""
    (tmp_path / "file").write_text("")
    core = GateControl(settings(tmp_path / "file"), State(engine_client=EngineClient()), Pulse())
    core.enter()
    core.begin()
    assert core.shared.total("in_flight") == 1
    assert core.figures() == []
    assert core.shared.can_drain == (core.key == os.getpid())


def test_answers_that_are_read_slowly_are_not_on_their_way_to_the_engine(tmp_path: Path) -> None:
    """The engine is done with them, so that it is idle, however many clients still read."""
    core, _ = made(tmp_path, places=4, PLIMSOLL_SHED_WAIT_S="0.01")
    feed(core, 4, 40)
    core.in_layer = core.answering = 100
    assert core.queue().coming == 0
    assert core.shed(b"low") is None
    core.in_layer += 5
    assert core.queue().coming == 5

"""Corners of the gate: given twice, a drain long over, a sleep that is only a pause, a port whose holder has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from plimsoll.inside.admission import SERVING, Wish
from plimsoll.inside.gate import Gate
from plimsoll.inside.shared import ASLEEP, PAUSED
from plimsoll.inside.tick import OwnPort, Tick
from tests.fakes import State, ask, hello, settings
from tests.inside.test_gate_control import drain, made


def test_a_gate_given_twice_counts_once(tmp_path: Path) -> None:
    """--middleware twice: the outer one works, the inner one hands on."""
    gate = Gate(Gate(hello, settings(tmp_path)), settings(tmp_path))
    core = gate._control
    assert core is not None
    asyncio.run(ask(gate, "POST", "/v1/completions"))
    assert core.shared.own["begun"] == 1


def test_a_drain_that_is_over_is_forgotten(tmp_path: Path) -> None:
    """The quick way for each request comes back; the epoch stays."""
    core, _ = made(tmp_path)
    drain(core, Wish(epoch=4, lease_s=0.01, refuse=True))
    time.sleep(0.02)
    assert core.shared.common["until_ns"] != 0
    core.end_old_drain()
    assert (core.shared.common["until_ns"], core.shared.drain().epoch, core.phase()) == (0, 4, SERVING)
    drain(core, Wish(epoch=5, lease_s=60))
    core.end_old_drain()
    assert core.shared.common["until_ns"] != 0


def test_asking_after_earlier_work_does_not_put_phase_two_off(tmp_path: Path) -> None:
    """A client that polls its background response is no balancer that still sends."""
    gate = Gate(hello, settings(tmp_path))
    core = gate._control
    assert core is not None
    core.engine._state = State(engine_client=object())
    asyncio.run(ask(gate, "GET", "/v1/responses/resp_1"))
    assert core.shared.own["begun"] == 1
    assert core.shared.own["last_admitted_ns"] == 0
    asyncio.run(ask(gate, "POST", "/v1/responses"))
    assert core.shared.own["last_admitted_ns"] > 0


@pytest.mark.parametrize(("query", "how"), [(b"level=1", ASLEEP), (b"", ASLEEP), (b"level=0", PAUSED)])
def test_sleep_of_level_0_is_a_pause(tmp_path: Path, query: bytes, how: int) -> None:
    """Its memory was not given back, and nobody is told so."""
    gate = Gate(hello, settings(tmp_path))
    core = gate._control
    assert core is not None
    asyncio.run(ask(gate, "POST", "/sleep", query_string=query))
    assert core.shared.common["asleep"] == how


def test_a_port_whose_holder_has_gone_is_taken_over(tmp_path: Path) -> None:
    """The first of two has it; when that one closes, the other listens at its next look."""
    listen = f"unix:{tmp_path / 'own.sock'}"
    first, second = (made(tmp_path / name, PLIMSOLL_LISTEN=listen)[0] for name in "ab")
    second.key = 1  # one of several

    async def scene() -> None:
        one, other = OwnPort(first), Tick(second)
        await one.open()
        await other._listen()
        assert other._port is not None
        before = other._port.is_open
        await one.close()
        await other._listen()
        assert (before, other._port.is_open) == (False, True)
        await other._port.close()

    asyncio.run(scene())


def test_a_call_that_hangs_excuses_an_engine_for_a_while_only(tmp_path: Path) -> None:
    """A compaction behind a stuck engine does not hide that it is stuck."""
    core, client = made(tmp_path, PLIMSOLL_WEDGE_S="1")
    core.pulse.is_fed = True

    async def scene() -> None:
        tick = Tick(core)
        task = asyncio.create_task(core.calls.call(client, "plimsoll_compact"))
        await asyncio.sleep(0.05)
        now = time.monotonic()
        assert tick._is_excused(now)
        assert not tick._is_excused(now + 1.0)
        client.may_answer.set()
        await task

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(scene())
    assert core.calls.running_s(time.monotonic()) == 0

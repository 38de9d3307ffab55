"""Two whole guards, one fleet, a real etcd: whoever is stopped or killed amid a deed does no harm when it comes late."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.guard.contenders import pause
from lab.guard.etcd import Etcd
from lab.guard.fronts import Trap
from lab.guard.two_guards import ENGINES, Places, rounds, scene
from tests.real.small_farm import need, until

pytestmark = pytest.mark.once
SAYS = "not drained: the lock cannot be taken: etcd cannot be reached"


@pytest.fixture
def places() -> Iterator[tuple[Places, Etcd]]:
    """A real etcd, and a folder."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-two-") as name:
        folder = Path(name)
        (folder / "etcd").mkdir()
        etcd = Etcd(need("etcd", "etcd-server"), folder / "etcd")
        try:
            yield Places(folder, etcd.url), etcd
        finally:
            etcd.kill()


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(20, 37, marks=pytest.mark.timeout(300)),
        pytest.param(1_000, 11, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
async def test_rounds_with_holders_that_are_stopped_and_killed(
    places: tuple[Places, Etcd], record_property: Callable[[str, object], None], count: int, seed: int
) -> None:
    """No drain or undrain of an old epoch is taken after a newer one, some came too late, and in the end nothing is open."""
    found = await rounds(places[0], count, seed)
    assert found["late_drains"] > 0, found
    assert found["late"] > found["late_drains"], found
    record_property("figures", str(found["says"]))


async def test_without_etcd_both_stand_back(places: tuple[Places, Etcd]) -> None:
    """Each says so to whoever asked, nothing reaches a gate or the balancer, and with etcd back both act again."""
    where, etcd = places
    async with scene(where, has_front=False) as here:
        for hand in here.hands.values():
            await hand.until_done("drain", "a")
            await hand.until_done("undrain", "a")
        await asyncio.to_thread(etcd.kill)
        before = len(here.world.deeds)
        for hand in here.hands.values():
            for engine in ENGINES:
                told = await hand.ask("drain", engine)
                assert told.status == 409, told
                assert told.json()["reason"] == "NotDone"
                assert "etcd cannot be reached" in told.json()["says"]
            await until(lambda log=hand.guard.log: SAYS in log())  # type: ignore[misc]
        assert len(here.world.deeds) == before
        await asyncio.to_thread(etcd.start)
        for hand in here.hands.values():
            await hand.until_done("drain", "b")
            await hand.until_done("undrain", "b")
        assert len(here.world.deeds) > before


async def test_a_take_out_that_comes_late_is_taken_back(places: tuple[Places, Etcd]) -> None:
    """A balancer knows no epochs: it takes an engine out for a guard that was overtaken. That guard puts it back."""
    async with scene(places[0], hook_fences=False) as here:
        one, two = here.hands["one"], here.hands["two"]
        for hand in (one, two):
            await hand.until_done("drain", "a")
            await hand.until_done("undrain", "a")
        trap = Trap("one", "hook", "take-out", lambda: pause(one.guard.pid), keeps_back=True)
        here.world.trap = trap
        asking = asyncio.create_task(one.ask("drain", "a"))
        await trap.sprung.wait()
        await two.until_done("drain", "a")
        await two.until_done("undrain", "a")
        here.world.trap = None
        trap.let_go()
        os.kill(one.guard.pid, signal.SIGCONT)
        assert (await asking).status == 409
        await until(lambda: not here.world.out["a"])
        assert (await here.gate_state("a"))["phase"] == "serving"

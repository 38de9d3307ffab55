"""The engine's time on an event loop: exact steps, one wake for many of them, and nothing to do while nothing is due."""

from __future__ import annotations

import asyncio
import time

import pytest

from plimsoll.standin.serve.service import Driver
from tests.standin.engines import NS, ask, engine


class Clock:
    def __init__(self) -> None:
        self.now = 1_000 * NS

    def __call__(self) -> int:
        return self.now


def test_a_loop_that_is_late_wakes_a_request_once_for_all_its_tokens() -> None:
    """One turn covers the steps that were due, and tokens come together, as in vLLM."""

    async def run() -> tuple[int, int]:
        clock, wakes = Clock(), []
        driver = Driver(engine(), clock)
        driver.start()
        request = driver.submit(ask(output=50), lambda: wakes.append(1))
        clock.now += NS // 4  # 25 steps of 10 ms
        driver.turn()
        driver.stop()
        return request.produced, len(wakes)

    produced, wakes = asyncio.run(run())
    assert 23 <= produced <= 25
    assert wakes == 1


@pytest.mark.parametrize("speed", [1.0, 8.0])
def test_time_passes_as_fast_as_it_is_told_to(speed: float) -> None:
    """The engine's time is the clock's times the speed, from its start on."""

    async def run() -> tuple[int, int]:
        clock = Clock()
        driver = Driver(engine(), clock, speed)
        assert driver.now_ns() == 0
        driver.start()
        clock.now += 3 * NS
        driver.start()  # again is no new beginning
        first = driver.now_ns()
        driver.stop()
        return first, driver.engine.now_ns

    assert asyncio.run(run())[0] == int(3 * NS * speed)


async def test_an_idle_engine_has_no_timer() -> None:
    """500 of them cost nothing; a submitted request sets one, and it is gone when all is done."""
    drivers = [Driver(engine(), time.monotonic_ns, 100.0) for _ in range(20)]
    for driver in drivers:
        driver.start()
    assert all(driver.is_idle for driver in drivers)
    request = drivers[0].submit(ask(output=5), lambda: None)
    assert [driver.is_idle for driver in drivers].count(False) == 1
    for _ in range(200):
        await asyncio.sleep(0.005)
        if request.finish is not None and drivers[0].is_idle:
            break
    assert (request.finish, drivers[0].is_idle) == ("length", True)


def test_a_stopped_driver_makes_no_turn() -> None:
    """Whatever is due stays undone."""

    async def run() -> int:
        driver = Driver(engine(), time.monotonic_ns, 100.0)
        driver.start()
        request = driver.submit(ask(output=50), lambda: None)
        driver.stop()
        await asyncio.sleep(0.1)
        return request.produced

    assert asyncio.run(run()) == 0


def test_a_fault_of_the_future_comes_without_any_request() -> None:
    """It has a timer of its own."""

    async def run() -> str | None:
        one = engine("growth@5s=1GiB")
        driver = Driver(one, time.monotonic_ns, 100.0)
        driver.start()
        for _ in range(300):
            await asyncio.sleep(0.01)
            if one.is_dead:
                break
        driver.stop()
        return one.death

    assert "out of memory" in (asyncio.run(run()) or "")


def test_a_mistake_in_a_step_ends_the_engine_and_all_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log; the engine is dead, who waited has an error, and whoever looks after each turn sees it."""

    async def run() -> tuple[str | None, str | None, int, list[bool]]:
        one, wakes, seen = engine(), [], []
        driver = Driver(one, time.monotonic_ns, 1.0)
        driver.on_turn = lambda: seen.append(one.is_dead)
        driver.start()
        request = driver.submit(ask(output=500), lambda: wakes.append(1))

        def stumble(*_steps: object) -> None:
            raise RuntimeError("two\nlines")

        one.on_steps = stumble
        await asyncio.sleep(0.2)
        return one.death, request.finish, len(wakes), seen

    death, finish, wakes, seen = asyncio.run(run())
    assert "RuntimeError: two lines" in (death or "")
    assert (finish, wakes) == ("error", 1)
    assert seen[-1]
    assert [record.getMessage() for record in caplog.records] == [
        "plimsoll: a mistake of the stand-in's own; its engine ends: RuntimeError: two lines"
    ]

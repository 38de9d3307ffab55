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


async def test_a_loop_that_is_late_wakes_a_request_once_for_all_its_tokens() -> None:
    """One turn covers the steps that were due, and tokens come together, as in vLLM."""
    clock, wakes = Clock(), []
    driver = Driver(engine(), clock)
    driver.start()
    request = driver.submit(ask(output=50), lambda: wakes.append(1))
    clock.now += NS // 4  # 25 steps of 10 ms
    driver.turn()
    driver.stop()
    assert 23 <= request.produced <= 25
    assert len(wakes) == 1


async def test_time_passes_as_fast_as_it_is_told_to() -> None:
    """The engine's time is the clock's times the speed, from its start on."""
    for speed in (1.0, 8.0):
        clock = Clock()
        driver = Driver(engine(), clock, speed)
        assert driver.now_ns() == 0
        driver.start()
        clock.now += 3 * NS
        driver.start()  # again is no new beginning
        assert driver.now_ns() == int(3 * NS * speed)
        driver.stop()


async def test_an_idle_engine_has_no_timer() -> None:
    """500 of them cost nothing; a submitted request sets one, and it is gone when all is done, or none is made any more."""
    drivers = [Driver(engine(), time.monotonic_ns, 100.0) for _ in range(20)]
    for driver in drivers:
        driver.start()
    assert all(driver.is_idle for driver in drivers)
    request = drivers[0].submit(ask(output=5), lambda: None)
    assert [driver.is_idle for driver in drivers].count(False) == 1
    stopped = drivers[1].submit(ask(output=50), lambda: None)
    drivers[1].stop()
    for _ in range(200):
        await asyncio.sleep(0.005)
        if request.finish is not None and drivers[0].is_idle:
            break
    assert (request.finish, drivers[0].is_idle, stopped.produced) == ("length", True, 0)


async def test_a_fault_of_the_future_comes_without_any_request() -> None:
    """It has a timer of its own."""
    one = engine("growth@5s=1GiB")
    driver = Driver(one, time.monotonic_ns, 100.0)
    driver.start()
    for _ in range(300):
        await asyncio.sleep(0.01)
        if one.is_dead:
            break
    driver.stop()
    assert "out of memory" in (one.death or "")


async def test_a_mistake_in_a_step_ends_the_engine_and_all_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log; the engine is dead, who waited has an error, and whoever looks after each turn sees it."""
    one, wakes, seen = engine(), [], []
    driver = Driver(one, time.monotonic_ns, 1.0)
    driver.on_turn = lambda: seen.append(one.is_dead)
    driver.start()
    request = driver.submit(ask(output=500), lambda: wakes.append(1))

    def stumble(*_steps: object) -> None:
        raise RuntimeError("two\nlines")

    one.on_steps = stumble
    await asyncio.sleep(0.2)
    assert "RuntimeError: two lines" in (one.death or "")
    assert (request.finish, len(wakes), seen[-1]) == ("error", 1, True)
    assert [record.getMessage() for record in caplog.records] == [
        "plimsoll: a mistake of the stand-in's own; its engine ends: RuntimeError: two lines"
    ]

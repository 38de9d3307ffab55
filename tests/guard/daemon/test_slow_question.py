"""Questions that may hang: asked once at a time, in a thread, and never waited for twice."""

from __future__ import annotations

import asyncio
import threading
import time

from plimsoll.guard.daemon.host import SlowQuestion


def test_an_answer_serves_everybody_for_a_while() -> None:
    """Asked once for all who ask at the same time and soon after; again when it is old or will not do."""
    asked: list[float] = []

    def ask() -> int:
        time.sleep(0.05)
        asked.append(time.monotonic())
        return len(asked)

    async def run() -> None:
        question = SlowQuestion(ask, deadline_s=20.0, keep_s=60.0)
        assert await asyncio.gather(*(question.answer() for _ in range(5))) == [1] * 5
        assert await question.answer() == 1
        question.forget()
        assert await question.answer() == 2
        old_at_once = SlowQuestion(ask, deadline_s=20.0, keep_s=0.0)
        assert [await old_at_once.answer(), await old_at_once.answer()] == [3, 4]

    asyncio.run(run())


def test_one_that_hangs_is_waited_for_once() -> None:
    """All who asked with it are let go at its deadline, those who come later at once; nothing is asked until it is back."""
    go, asked = threading.Event(), list[str]()

    def ask() -> str:
        asked.append("x")
        go.wait(60)
        return "back"

    async def run() -> None:
        question = SlowQuestion(ask, deadline_s=0.2, keep_s=0.0)
        began = time.monotonic()
        assert set(await asyncio.gather(question.answer(), question.answer())) == {None}
        assert 0.15 < time.monotonic() - began < 50
        assert bool(question.is_stuck) is True
        for _ in range(100):
            assert await question.answer() is None
        assert len(asked) == 1
        go.set()
        while question.is_stuck:
            await asyncio.sleep(0.01)
        assert await question.answer() == "back"
        assert len(asked) == 2

    asyncio.run(run())


def test_one_that_fails_has_no_answer() -> None:
    """Whatever it raises; and it is asked again."""
    answers = iter([ValueError("a"), OSError("b"), None])

    def ask() -> str:
        error = next(answers)
        if error is not None:
            raise error
        return "well"

    async def run() -> list[str | None]:
        question = SlowQuestion(ask, deadline_s=1.0, keep_s=0.0)
        return [await question.answer() for _ in range(3)]

    assert asyncio.run(run()) == [None, None, "well"]

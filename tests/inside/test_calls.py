"""Calls into the workers: one at a time over all API servers, no timeout, never cancelled."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.gate_control import Busy, Calls
from tests.fakes import EngineClient
from tests.inside.gate_processes import caller


async def test_a_call_is_made_without_a_timeout_and_its_results_come_back(tmp_path: Path) -> None:
    """The fake refuses any timeout."""
    client, calls = EngineClient(), Calls(str(tmp_path / "lock"))
    client.may_answer.set()
    found = await calls.call(client, "plimsoll_snapshot", (5,))
    assert found["workers"] == [{"released_bytes": 1}]
    assert found["error"] is None
    assert client.calls == [("plimsoll_snapshot", (5,))]
    assert (calls.last, calls.done, calls.is_running) == (found, 1, False)
    await calls.call(client, "plimsoll_compact")
    assert calls.done == 2


def test_one_at_a_time_in_one_process(tmp_path: Path) -> None:
    """The second is told so and the first is not disturbed."""

    async def go(path: str | None) -> None:
        client, calls = EngineClient(), Calls(path)
        first = asyncio.create_task(calls.call(client, "plimsoll_compact"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await calls.call(client, "plimsoll_compact")
        client.may_answer.set()
        assert (await first)["error"] is None
        assert len(client.calls) == 1

    asyncio.run(go(str(tmp_path / "lock")))
    asyncio.run(go(None))


def test_one_at_a_time_over_two_processes(tmp_path: Path) -> None:
    """The other API server waits its turn; when the call ends it may."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    path = str(tmp_path / "lock")
    process = context.Process(target=caller, args=(path, there), daemon=True)
    process.start()

    def other() -> Any:
        here.send("try")
        return here.recv()

    async def go() -> None:
        client = EngineClient()
        task = asyncio.create_task(Calls(path).call(client, "plimsoll_compact"))
        await asyncio.sleep(0.01)
        assert await asyncio.to_thread(other) == "busy"
        client.may_answer.set()
        await task
        assert await asyncio.to_thread(other) == "done"

    asyncio.run(go())
    here.send("end")
    process.join()
    assert os.stat(path).st_mode & 0o777 == 0o600  # noqa: PTH116


async def test_a_call_runs_on_when_the_one_who_asked_is_gone(tmp_path: Path) -> None:
    """Its end is kept, and the lock is held until then."""
    client, calls = EngineClient(), Calls(str(tmp_path / "lock"))
    asked = asyncio.create_task(calls.call(client, "plimsoll_compact"))
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.sleep(0.01)
    assert asked.cancelled()
    assert calls.is_running
    with pytest.raises(Busy):
        await Calls(str(tmp_path / "lock")).call(client, "plimsoll_compact")
    client.may_answer.set()
    await asyncio.sleep(0.01)
    assert calls.done == 1
    assert calls.last is not None
    assert calls.last["workers"] == [{"released_bytes": 1}]


def test_a_call_that_fails_is_told_and_frees_the_place(tmp_path: Path) -> None:
    """By its kind alone; the next one may go."""

    async def broken(method: str, args: tuple[Any, ...]) -> list[Any]:
        raise RuntimeError(f"secret {method} {args}")

    async def go() -> None:
        calls = Calls(str(tmp_path / "lock"))
        found = await calls.call(SimpleNamespace(collective_rpc=broken), "plimsoll_compact")
        assert (found["error"], found["workers"]) == ("RuntimeError", None)
        assert "secret" not in str(found)
        client = EngineClient()
        client.may_answer.set()
        assert (await calls.call(client, "plimsoll_compact"))["error"] is None

    asyncio.run(go())


async def test_one_who_waits_too_long_is_told_that_it_still_runs(tmp_path: Path) -> None:
    """And the call has no end of its own."""
    client, calls = EngineClient(), Calls(str(tmp_path / "lock"), patience_s=0.02)
    assert (await calls.call(client, "plimsoll_compact"))["is_running"]
    assert calls.is_running
    client.may_answer.set()
    await asyncio.sleep(0.01)
    assert calls.done == 1


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
    """Both are told their own end."""
    client, calls = EngineClient(), Calls(None)
    first = asyncio.create_task(calls.call(client, "plimsoll_compact"))
    await asyncio.sleep(0.01)

    async def as_it_ends() -> dict[str, Any]:
        await client.may_answer.wait()  # woken right after the call that runs, before the one who asked for it
        return await calls.call(client, "plimsoll_snapshot")

    second = asyncio.create_task(as_it_ends())
    await asyncio.sleep(0.01)
    client.may_answer.set()
    assert (await first)["call"] == "plimsoll_compact"
    assert (await second)["call"] == "plimsoll_snapshot"

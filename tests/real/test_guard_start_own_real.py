"""The server behind --: just started the first time, a restart where it follows another, and never against a person's word.

At the end a real vLLM 0.32.0: found again by another guard, stopped without losing a stream, nothing left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.engine.clients import complete, is_finished
from lab.engine.server import READY_LIMIT_S, free_port
from lab.guard.acting import Fault, State, World
from lab.guard.acting_lives import POLICY, MemoryBook, conductor_of, run_in, to_the_end, unsafe
from lab.guard.acting_parts import ENGINE, FakeSight
from lab.guard.acting_play import ends, killed_at
from lab.guard.own_engine import own_engine
from lab.page_world import answers
from plimsoll.guard.act.journal_entry import RESTART, Entry
from plimsoll.guard.act.journal_replay import PAUSE
from plimsoll.guard.act.steps import BROKEN
from plimsoll.guard.daemon.journal import read_journal
from plimsoll.hardware.processes import read_process
from plimsoll.unknown import Condition, Status
from tests.guard.daemon.guards import Guard, guarding
from tests.real.conftest import need_vllm
from tests.real.small_farm import until

WHY = "guard's own server is not running"


def one_life(world: World, book: MemoryBook, **more: Any) -> str:
    """A guard that takes over what is there, and starts the server unless something speaks against it; that is given."""
    world.new_life(None)
    why: list[str] = []

    async def main() -> None:
        conductor = conductor_of(world, book, **more)
        await conductor.take_over()
        why.append(conductor.why_not_start(ENGINE))
        for _ in range(20):  # what an earlier guard had to take back is tried again a minute later
            if not world.is_running and not conductor.why_not_start(ENGINE):
                conductor.start(ENGINE, WHY)
            await to_the_end(conductor, world, book)
            await asyncio.sleep(5.0)

    run_in(world, main())
    world.is_dying = False
    return "".join(why)


def test_it_is_a_restart_with_all_its_steps() -> None:
    """Under the lock, when the memory is back, counted and watched afterwards; neither hours nor budget speak against it."""
    world, book = World(State("down")), MemoryBook()
    assert one_life(world, book, policy=replace(POLICY, restarts_per_hour=0, fleet_restarts_per_hour=0)) == ""
    assert [one.step for one in book.entries if one.kind == "intent"] == [str(step) for step in BROKEN]
    assert [one.fields["own"] for one in book.entries if one.kind == RESTART] == [True]
    assert (world.state.starts, ends(world)) == (1, ["done"])
    assert unsafe(world, book) == []
    world, book = killed_at("after outcome stop")
    one_life(world, book)
    assert (world.state.stops, world.state.starts, ends(world)) == (1, 1, ["done"]), "what is begun already comes first"
    assert unsafe(world, book) == []


def test_what_speaks_against_it() -> None:
    """A pause, one that was held, a sick card, or an action that waits for the lock: it is left as it is."""
    world, book = World(State("down"), {"start": Fault("fails")}), MemoryBook()
    one_life(world, book)
    assert ends(world) == ["held"]
    world.faults.clear()
    assert "needs attention" in one_life(world, book)
    assert world.state.starts == 0
    world, book = World(State("down")), MemoryBook()
    book.append("switch", engine=ENGINE, step=PAUSE, fields={"on": True})
    assert one_life(world, book) == "it is paused (guardctl resume)"
    book.append("switch", engine=ENGINE, step=PAUSE, fields={"on": False})
    assert one_life(world, book) == ""
    assert world.state.starts == 1

    class Sick(FakeSight):
        """A card that the driver blames."""

        def conditions(self, engine: str) -> Mapping[str, Condition]:
            del engine
            return {"card": Condition("card", Status.TRUE, "Seen", "row remapping failed", 0.0)}

    world, book = World(State("down")), MemoryBook()
    assert one_life(world, book, sight=Sick(world)) == "its GPU is faulty: row remapping failed"
    assert world.state.starts == 0
    world, book = killed_at("after outcome stop", ttl_s=1e6)
    world.state.holder, world.state.held_until = 99, world.state.now + 30.0
    assert "in progress" in one_life(world, book)


# All the way, with a stand-in
def entries(folder: Path, kind: str) -> list[Entry]:
    """What stands in the journal of this kind."""
    return [entry for entry in read_journal(folder / "guard.journal").entries if entry.kind == kind]


def words_of(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """A guard that acts, and the server behind it."""
    url = f"http://127.0.0.1:{port}"
    (folder / "plimsoll.toml").write_text(f"[[engine]]\nname = 'mine'\nurl = '{url}'\n[act]\nprobation = '10s'\n")
    server = [sys.executable, "-m", "plimsoll", "standin", "--port", str(port)]
    words = ["--config", str(folder / "plimsoll.toml"), "--act", "--engine", url, "--listen", "127.0.0.1:0", "--", *server]
    return words, {"STATE_DIRECTORY": str(folder), "PLIMSOLL_TOKEN": "t" * 16}


def pid_of(guard: Guard, text: str) -> int:
    """Of the server, as guard says it."""
    return int(guard.hears(text).rsplit(" ", 1)[1])


def test_started_once_found_again_and_restarted_where_it_has_ended(tmp_path: Path) -> None:
    """The first start is no restart; a living server is left alone; one that ended while guard was away is restarted."""
    words, environ = words_of(tmp_path, free_port())
    pids = []
    try:
        with guarding(tmp_path, *words, **environ) as guard:
            pids.append(pid_of(guard, "it was started as pid"))
            guard.hears("answers, vLLM")
        assert entries(tmp_path, RESTART) == []
        with guarding(tmp_path, *words, **environ) as guard:
            guard.hears("answers, vLLM")
            assert not any("started as pid" in line for line in guard.said)
            assert guard.stop() == 0
            assert f"keeps running as pid {pids[0]}: the next guard finds it, kill {pids[0]} stops it" in guard.complains(
                "keeps running"
            )
        os.kill(pids[0], signal.SIGKILL)
        with guarding(tmp_path, *words, **environ) as guard:
            guard.hears(f"restart because {WHY}: it ended without having been asked to")
            pids.append(pid_of(guard, "start: it was started as pid"))
            guard.hears("restart completed", 60.0)
        assert [one.fields["own"] for one in entries(tmp_path, RESTART)] == [True]
        assert (tmp_path / "engine.log").read_text().count("plimsoll: the engine is started anew") == 1
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_server_that_cannot_be_started_ends_guard_with_its_reason(tmp_path: Path) -> None:
    """One line and exit code 3, as for anything that the world does not give."""
    words = ["--act", "--engine", "http://127.0.0.1:9", "--", "/no/such/server"]
    with guarding(tmp_path, *words, STATE_DIRECTORY=str(tmp_path), PLIMSOLL_TOKEN="t" * 16) as guard:
        assert guard.process.wait(30) == 3
        said = guard.complains("did not start")
        assert "the server did not start: /no/such/server cannot be started (No such file or directory)" in said


@pytest.mark.once
@pytest.mark.soak  # minutes on two cores
@pytest.mark.timeout(900)
async def test_a_real_engine_is_started_lost_found_and_stopped_amid_a_stream(tmp_path: Path) -> None:
    """A guard is killed while it starts; the next one adopts it, does not start a second one, and its stop cuts nobody off."""
    need_vllm()
    root, port = Path(__file__).parents[2], free_port()
    words = [sys.executable, "-m", "lab.guard.own_engine", str(tmp_path), str(port)]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=root, env=environment, text=True) as starter:
        assert starter.stdout is not None
        said = starter.stdout.readline()
        assert said.startswith("it was started as pid "), said
        await asyncio.sleep(15.0)  # amid the start
        starter.kill()
    engine = own_engine(tmp_path, port)
    try:
        assert await engine.is_running() is True, "adopted"
        assert (await engine.start()).is_done is False, "there is one already"
        await until(lambda: answers(f"http://127.0.0.1:{port}/health"), READY_LIMIT_S)
        stream = asyncio.create_task(complete(port, 1900, stream=True))
        await asyncio.sleep(1.0)
        pids = list(await engine.pids())
        outcome = await engine.stop(60.0)
        assert is_finished(await stream)
        assert outcome.is_done, outcome
        assert (outcome.facts["how"], outcome.facts["left"], outcome.facts["exit_code"]) == ("term", 0, 0), outcome
        assert len(pids) >= 3
        assert not [pid for pid in pids if (process := read_process(pid)) is not None and process.is_alive]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(said.rsplit(maxsplit=1)[1]), signal.SIGKILL)

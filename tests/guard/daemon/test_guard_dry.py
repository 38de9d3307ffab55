"""A guard without --act says what it would do, step by step, and decides as one with --act: by the same journal."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll.guard.act.journal_entry import CLOSED, OPENED, RESTART, SWITCH
from plimsoll.guard.act.journal_replay import PAUSE, read_switches
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import BROKEN, STEP_TEXTS, open_action, opening_fields
from plimsoll.guard.adapters.command import CommandRestarter
from plimsoll.guard.config import Files, GuardConfig
from plimsoll.guard.daemon.acting import READ_EVERY_S, ActingSetup, ActionRunner, DryRunJournal, DryRunLock
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.observer import EngineCapabilities, Fleet, Incidents
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.tracker import Grade
from tests.cli.test_guard import QUICK, config, kill_engine, url
from tests.guard.daemon.guards import guarding
from tests.guard.daemon.test_guard_sight import FIGURES, Few
from tests.standin.servers import standin


@pytest.mark.real
def test_the_whole_plan_is_printed_and_nothing_is_done(tmp_path: Path) -> None:
    """The rung, the engine and why; then each step with what is checked before and after, and how it is undone. Once."""
    with standin() as server:
        text = f"{QUICK}[act]\njournal = 'journal'\n[[engine]]\nurl = '{url(server)}'\nname = 'one'\n"
        text += "restart = {stop = ['/bin/false'], start = ['/bin/false', 'x'], is_running = ['/bin/true']}\n"
        with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
            guard.hears("one: answers")
            kill_engine(server)
            guard.hears("probation: watches it")
            time.sleep(1.5)
            assert guard.stop() == 0
    lines = [line.rstrip("\n").partition(" one: ")[2] for line in guard.said]
    first = next(place for place, line in enumerate(lines) if line.startswith("with --act guard would restart it: "))
    texts = [(step, STEP_TEXTS[step]) for step in BROKEN]
    steps = [f"{number}. {step}: {text.does}; before: {text.before}" for number, (step, text) in enumerate(texts, 1)]
    assert len(lines[first:]) == 1 + len(steps)
    for line, step in zip(lines[first + 1 :], steps, strict=True):
        assert line.startswith(step)
        assert "; after: " in line
        assert "; undo: " in line
    assert list(tmp_path.glob("journal*")) == [], "it writes no journal and takes no lock"


LAST_S = 120
FIELDS: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("restart blocked: guard is paused", [(SWITCH, {"step": PAUSE, "fields": {"on": True}})]),
    ("restart blocked: 2 restarts of this engine in an hour", [(RESTART, {"engine": "one", "fields": {"own": False}})] * 2),
    ("restart blocked: its last restart was ", [(RESTART, {"engine": "one", "action": "x", "fields": {"own": True}})]),
    (
        "restart blocked: a restart for the same reason did not help",
        [(CLOSED, {"engine": "one", "action": "x", "fields": {"grade": "restart", "kind": "hung", "end": "failed"}})],
    ),
    (
        "restart blocked: its last restart did not finish",
        [(CLOSED, {"engine": "one", "action": "x", "fields": {"grade": "restart", "kind": "hung", "end": "held"}})],
    ),
    (
        "restart blocked: guard is working on it",
        [(OPENED, {"engine": "one", "action": "x",
                   "fields": opening_fields(open_action("x", "one", Grade.RESTART, "dead", is_broken=True))})],
    ),
]  # fmt: skip


class Dead(Few):
    """A fleet of one that is dead."""

    every_s = 5.0

    def __init__(self) -> None:
        looks = [Look(float(at_s), float(at_s), Reach.ANSWERS, health=503, figures=FIGURES) for at_s in range(0, LAST_S + 1, 5)]
        super().__init__(one=looks)
        self.incidents = Incidents()

    def remark(self, name: str, text: str) -> None:
        """Nobody reads it here."""


def decided(folder: Path, *, is_dry: bool) -> list[str]:
    """What such a guard says of an engine that is dead, in two rounds."""
    files = Files(*(folder / name for name in Files._fields))
    parts, told = (
        {"one": EngineAdapters("one", restarter=CommandRestarter(*[("/bin/false",)] * 3))},
        {"one": EngineCapabilities(has_restarter=True)},
    )
    said: list[str] = []
    fleet = cast("Fleet", Dead())
    acting = ActionRunner(
        ActingSetup(parts, told, ActPolicy(), None),
        GuardConfig(),
        files,
        fleet,
        lambda one: said.append(one.message),
        is_dry=is_dry,
    )
    acting.observer._clock = lambda: float(LAST_S)

    async def story() -> None:
        for _ in range(2):
            await acting._round()
            if not is_dry:
                await acting.conductor.turn()
        await acting.close()

    asyncio.run(story())
    return said


@pytest.mark.parametrize(("says", "entries"), FIELDS, ids=[says[12:40] for says, _ in FIELDS])
def test_it_refuses_by_what_the_journal_remembers(says: str, entries: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    """A pause, the budget, the back-off, what did not help before and what was left open count, as they do with --act."""
    with Journal(tmp_path / "journal") as journal:
        for kind, where in entries:
            journal.append(kind, **where)
    before = (tmp_path / "journal").read_bytes()
    (found,) = decided(tmp_path, is_dry=True)
    assert found.startswith(says)
    assert (tmp_path / "journal").read_bytes() == before
    if OPENED not in [kind for kind, _ in entries]:  # that one would be taken over first
        assert decided(tmp_path, is_dry=False) == [found]


def test_a_journal_that_somebody_writes_is_read_again(tmp_path: Path) -> None:
    """Not at every round; what was noted meanwhile is then in it; damage pauses, as it would pause a guard that acts."""
    path = tmp_path / "journal"
    book = DryRunJournal(path, time.time)

    async def story() -> None:
        await book.refresh(0.0)
        assert (book.kept(), book.trouble) == ([], "")
        book.append(RESTART, engine="a", fields={"own": False})
        assert len(book.kept()) == 1
        with Journal(path) as journal:
            journal.append(SWITCH, step=PAUSE, fields={"on": True})
            await book.refresh(READ_EVERY_S - 1)
            assert [one.kind for one in book.kept()] == [RESTART]
            await book.refresh(READ_EVERY_S)
            assert [one.kind for one in book.kept()] == [SWITCH]
            journal.append(SWITCH, step=PAUSE, fields={"on": False})
        await book.refresh(3 * READ_EVERY_S)
        assert not read_switches(book.kept()).is_paused
        path.write_bytes(path.read_bytes().replace(b'"on":true', b'"on":null'))
        await book.refresh(5 * READ_EVERY_S)
        assert read_switches(book.kept()).is_paused
        assert "checksum" in book.trouble

    asyncio.run(story())


def test_its_lock_is_never_taken() -> None:
    """Whoever asks for it stands back."""
    lock = DryRunLock()
    assert not any(asyncio.run(work).is_done for work in (lock.acquire("x"), lock.renew(), lock.release()))

"""A real guard process with a real journal, killed with SIGKILL at each write of it, and another one that goes on.

    python -m lab.guard.killed FOLDER PLAY

For each numbered write of a guard's life: a process lives it and is killed right before the write, another right after it. The
world (lab/guard/acting.py) is a file, which outlives them. One line of JSON for each: the write, and what is unsafe at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from lab.guard.acting import MAY, Fault, State, World
from lab.guard.acting_lives import CASES, POLICY, Case, live, ports_of, run_in, unsafe
from lab.guard.acting_parts import ENGINE, FakeLock, FakeSight, parts_of
from lab.guard.acting_play import view_of
from plimsoll.guard.act.decide import ActionPlan
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS
from plimsoll.guard.act.steps import Step
from plimsoll.guard.daemon.acting import ForeignRestarts
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.manual_drain import ManualDrains, ReturnToService
from plimsoll.guard.daemon.observer import FleetObserver, ProcessLife
from plimsoll.guard.daemon.steps import SharedLock
from plimsoll.guard.judge.tracker import Grade

JOURNAL, WORLD = "journal", "world.json"
ACTS, TAKES_OVER, BY_HAND, PUTS_BACK, IS_TOLD = "acts", "takes over", "by hand", "puts back", "is told"
# A drain by hand gives the lock back while the engine is out, and takes it again to put it back.
MAY_BY_HAND = {**MAY, **{name: MAY[name] | {Step.IDLE} for name in ("acquire", "release")}}
NEVER = Fault("fails")


class Play(NamedTuple):
    """The life that is killed at each of its writes, and what came before it."""

    case: Case = CASES[0]
    life: str = ACTS
    faults: Mapping[str, Fault] = {}
    left_at: str = ""  # of one that takes over: the point at which an earlier guard was killed
    ttl_s: float = 0.0  # so long the lock of a guard that died lasts


_SHED, _COMPACT = CASES[4], CASES[5]
PLAYS = {
    **{str(case): Play(case) for case in CASES if case.balancer == "told"},
    "restart stood back": Play(faults={"acquire": NEVER}),
    "restart taken back": Play(faults={"idle": NEVER}),
    "restart not taken back": Play(faults={"idle": NEVER, "put_back": NEVER}),
    "restart held": Play(faults={"start": NEVER}),
    "shed not done": Play(_SHED, faults={"shed": NEVER}),
    "takes a drain back": Play(life=TAKES_OVER, left_at="after intent idle"),
    "takes a drain back late": Play(life=TAKES_OVER, left_at="after intent idle", ttl_s=25.0),
    "finishes a stop": Play(life=TAKES_OVER, left_at="after stop"),
    "finishes a start": Play(life=TAKES_OVER, left_at="after intent start"),
    "ends a shedding": Play(_SHED, TAKES_OVER, left_at="after intent hold"),
    "closes a compaction": Play(_COMPACT, TAKES_OVER, left_at="after intent verify"),
    "drain by hand": Play(life=BY_HAND),
    "drain by hand not done": Play(life=BY_HAND, faults={"take_out": NEVER}),
    "put back by hand": Play(life=PUTS_BACK, faults={"check": NEVER}, left_at="after closed"),
    "pause, resume, and what others do": Play(life=IS_TOLD),
}


class FileWorld(World):
    """A world that is written to its file at every point, and whose guard dies by its own SIGKILL."""

    def __init__(self, folder: Path, play: Play) -> None:
        self.path = folder / WORLD
        state = State(play.case.mode, play.case.balancer)
        if self.path.exists():
            vars(state).update(json.loads(self.path.read_text(encoding="utf-8")))
        super().__init__(state, play.faults, ttl_s=play.ttl_s)
        self.saves, self.dies = self.save, self._kill

    def save(self) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(vars(self.state)), encoding="utf-8")
        draft.replace(self.path)

    def _kill(self) -> None:
        self.save()
        os.kill(os.getpid(), signal.SIGKILL)


def is_write(point: str) -> bool:
    """Whether a point is that of an entry: whatever is no deed is one, also of a kind that nobody here has heard of."""
    return point.split()[1] not in MAY


class _Lives(FakeSight):
    """Sees that another process answers than before, each time that it is asked."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._total = -1

    def life(self, engine: str) -> ProcessLife:
        del engine
        self._total += 1
        return ProcessLife(1_000.0 + 500 * self._total, None, self._total)


async def drains_by_hand(world: World, journal: Journal, play: Play) -> None:
    """Out, renewed for longer than its lease, and back."""
    world.may = MAY_BY_HAND
    view = view_of("saturated", is_true=False)
    ports = ports_of(world, journal, lock=SharedLock(FakeLock(world)), view=lambda _: view._replace(engines=view.engines[:1]))
    drains = ManualDrains({ENGINE: parts_of(world)}, replace(POLICY, may_be_last=True), ports, {})
    decision = await drains.drain(ENGINE)
    assert isinstance(decision, ActionPlan) != bool(play.faults), decision
    await asyncio.sleep(2 * POLICY.lease_s)
    if drains.engines:
        assert world.phase != "serving", "nobody renewed it"
        await drains.undrain(ENGINE)
    while drains.engines:
        await asyncio.sleep(1.0)


async def puts_back(world: World, journal: Journal, play: Play) -> None:
    """One that was held, and is still out of the balancer."""
    del play
    assert world.state.is_out, "it was not held"
    ports = ports_of(world, journal)
    parts = {ENGINE: parts_of(world)}
    decision = await ReturnToService(parts, POLICY, ports, Conductor(parts, POLICY, ports)).put_back(ENGINE)
    assert isinstance(decision, ActionPlan), decision
    assert not world.state.is_out


async def is_told(world: World, journal: Journal, play: Play) -> None:
    """What people switch and answer, and what others do to an engine: each is one write."""
    ports = ports_of(world, journal)
    conductor = Conductor({ENGINE: parts_of(world)}, POLICY, ports)
    for name, engine in ((PAUSE, ""), (PAUSE, ENGINE), (f"{RUNGS}restart", "")):
        conductor.switch(name, engine, is_on=True, who="the test")
        conductor.switch(name, engine, is_on=False, who="the test")
    plan = ActionPlan(ENGINE, Grade.RESTART, "dead", "it is dead", play.case.plan.steps, needs_approval=True)
    conductor.approvals.allowed([plan], [plan])
    for one in conductor.approvals.pending():
        conductor.approvals.decide(one.id, is_approved=False, who="the test")
    foreign = ForeignRestarts(conductor, ports.journal, cast("FleetObserver", _Lives(world)), lambda _: None)
    foreign.note()
    foreign.note()


OTHER_LIVES = {BY_HAND: drains_by_hand, PUTS_BACK: puts_back, IS_TOLD: is_told}


def live_as(life: str, world: World, journal: Journal, play: Play, die_at: int | None) -> None:
    if life in (ACTS, TAKES_OVER):
        live(world, journal, play.case.plan if life == ACTS else None, die_at)
        return
    world.new_life(die_at)
    assert run_in(world, OTHER_LIVES[life](world, journal, play))


def one_life(folder: Path, play: Play, life: str, die_at: int | None) -> list[str]:
    """In a process of its own: all its points, with what is unsafe after it as the last; or that it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_lived(folder, play, life, die_at)).encode())
            os._exit(0)
        finally:  # whatever was raised is told, and nothing of the parent's goes on here
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return [f"killed by {os.WTERMSIG(status)}"]
    return list(json.loads(said)) if os.waitstatus_to_exitcode(status) == 0 else ["it failed"]


def _lived(folder: Path, play: Play, life: str, die_at: int | None) -> list[str]:
    world = FileWorld(folder, play)
    with Journal(folder / JOURNAL) as journal:
        live_as(life, world, journal, play, die_at)
        points = list(world.points)
        found = unsafe(world, journal)
    world.save()
    return [*points, "; ".join(found)]


def begin(folder: Path, play: Play, left_at: int | None) -> None:
    """A new world, as an earlier guard left it where there was one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if left_at is not None:
        assert one_life(folder, play, ACTS, left_at) == ["killed by 9"]


def main(folder: Path, name: str) -> int:
    play, left_at = PLAYS[name], None
    if play.left_at:
        begin(folder, play, None)
        left_at = one_life(folder, play, ACTS, None).index(play.left_at) + 1
    begin(folder, play, left_at)
    *points, found = one_life(folder, play, play.life, None)
    assert not found, f"unsafe without any kill: {found}"
    for place, point in enumerate(points, 1):
        if is_write(point):
            begin(folder, play, left_at)
            ended = one_life(folder, play, play.life, place)
            *_, found = one_life(folder, play, TAKES_OVER, None)
            sys.stdout.write(json.dumps({"at": point, "ended": ended, "unsafe": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))

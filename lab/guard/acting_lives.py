"""One guard after the other in a world that is not real: each may die at any point, and the next goes on from the journal."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Protocol

from lab.guard.acting import Died, World
from lab.guard.acting_parts import ENGINE, WALL_S, FakeLock, FakeSight, parts_of
from plimsoll.guard.act.decide import BROKEN_KINDS, ActionPlan, FleetView
from plimsoll.guard.act.journal_entry import INTENT, OUTCOME, Entry, needed
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Lock
from plimsoll.guard.act.steps import End, steps_of
from plimsoll.guard.daemon.conductor import ActionPorts, Announcement, Conductor
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.tracker import Grade

POLICY = ActPolicy(
    drain_within_s=40.0, lease_s=30.0, stop_within_s=20.0, gone_within_s=10.0, start_still_s=20.0, start_within_s=30.0,
    probation_s=5.0, shed_lease_s=30.0,
)  # fmt: skip
LATER_S = 200.0  # every lease of this policy is over by then
ROUNDS = 400  # of ten seconds; an action that is open for longer is never over


class Case(NamedTuple):
    """One action in one world."""

    grade: Grade
    kind: str
    mode: str = "serving"
    balancer: str = "told"

    @property
    def plan(self) -> ActionPlan:
        steps = steps_of(self.grade, is_broken=self.kind in BROKEN_KINDS)
        return ActionPlan(ENGINE, self.grade, self.kind, "the test wants it", steps)

    def __str__(self) -> str:
        return f"{self.grade}-{self.mode}-{self.balancer}"


CASES = (
    Case(Grade.RESTART, "exhausted"),
    Case(Grade.RESTART, "exhausted", balancer="asks"),
    Case(Grade.RESTART, "wedged", "wedged"),
    Case(Grade.RESTART, "dead", "down"),
    Case(Grade.SHED, "saturated"),
    Case(Grade.COMPACT, "neighbour"),
)


class Inner(Protocol):
    """A journal, real or not."""

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        """Write one."""

    def kept(self) -> list[Entry]:
        """What is needed."""


class MemoryBook:
    """A journal that is not on any disk, but keeps the same."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        entry = Entry(len(self.entries) + 1, WALL_S, kind, engine, action, step, dict(fields or {}))
        self.entries.append(entry)
        return entry

    def kept(self) -> list[Entry]:
        return needed(self.entries, WALL_S)


class WatchedBook:
    """A journal at whose every entry a guard may die, before it and after it."""

    def __init__(self, inner: Inner, world: World) -> None:
        self._inner, self._world = inner, world
        self.wrong = getattr(inner, "wrong", ())

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        self._world.point(f"before {kind} {step}".rstrip())
        entry = self._inner.append(kind, engine=engine, action=action, step=step, fields=fields)
        if kind in (INTENT, OUTCOME):
            self._world.intent = step if kind == INTENT else ""
            self._world.when.get(self._world.intent, lambda: None)()
        self._world.point(f"after {kind} {step}".rstrip())
        return entry

    def kept(self) -> list[Entry]:
        return self._inner.kept()


class _Skips(selectors.SelectSelector):
    """Does not wait: the time is over at once."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever happen again"
        if timeout > 0:
            self._world.state.now += timeout + 1e-6
        return super().select(0)


class QuickLoop(asyncio.SelectorEventLoop):
    """Runs by the world's clock."""

    def __init__(self, world: World) -> None:
        super().__init__(_Skips(world))
        self._world = world

    def time(self) -> float:
        return self._world.state.now


def _but_death(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)


def run_in(world: World, main: Coroutine[Any, Any, None]) -> bool:
    """Whether it came to its end; False where the guard died in it."""
    loop = QuickLoop(world)
    loop.set_exception_handler(_but_death)
    try:
        with contextlib.suppress(Died):
            loop.run_until_complete(main)
            return True
        return False
    finally:
        world.is_dying = True
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            with contextlib.suppress(Died):
                loop.run_until_complete(asyncio.wait(tasks))
        loop.close()


def ports_of(
    world: World,
    book: Inner,
    *,
    sight: FakeSight | None = None,
    lock: Lock | None = None,
    view: Callable[[frozenset[str]], FleetView] = lambda _: FleetView([]),
) -> ActionPorts:
    """What a guard in this world is given; at each entry of its journal it may die."""
    names = (f"action-{world.state.life}-{number}" for number in range(1_000))

    def tell(said: Announcement) -> None:
        world.state.told.append((said.message, str(said.fields.get("end", ""))))

    return ActionPorts(
        WatchedBook(book, world), lock or FakeLock(world), sight or FakeSight(world), view, tell,
        lambda: WALL_S + world.state.now, lambda: next(names),
    )  # fmt: skip


def conductor_of(
    world: World,
    book: Inner,
    policy: ActPolicy = POLICY,
    *,
    parts: EngineAdapters | None = None,
    engine: str = ENGINE,
    **given: Any,
) -> Conductor:
    """A guard for this world, which watches nothing that it could begin by itself unless a view shows something."""
    return Conductor({engine: parts or parts_of(world)}, policy, ports_of(world, book, **given))


async def to_the_end(conductor: Conductor, world: World, book: Inner) -> None:
    """Until no action is open, or guard has stopped acting."""
    for _ in range(ROUNDS):
        if conductor.stopped_acting or not (conductor.runs or open_actions(book.kept())):
            return
        await conductor.turn()
        await asyncio.sleep(10.0)
    world.hurt("an action is never over")


def live(
    world: World,
    book: Inner,
    plan: ActionPlan | None,
    die_at: int | None = None,
    policy: ActPolicy = POLICY,
    *,
    is_blind: bool = False,
    parts: EngineAdapters | None = None,
) -> bool:
    """One guard's life: it takes over what is there, does what is planned, and waits; whether it survived."""
    world.new_life(die_at)

    async def main() -> None:
        sight = FakeSight(world)
        sight.is_blind = is_blind
        conductor = conductor_of(world, book, policy, sight=sight, parts=parts)
        await conductor.take_over()
        if plan is not None:
            await conductor.carry_out(plan)
        await to_the_end(conductor, world, book)

    return run_in(world, main())


def unsafe(world: World, book: Inner) -> list[str]:
    """What is not as it should be at the end, long after everybody's leases."""
    state = world.state
    state.now += LATER_S
    world.tick()
    found = list(state.harm)
    is_held = any(end == End.HELD for _, end in state.told)
    if open_actions(book.kept()):
        found.append("an action is still open")
    if state.stops > 1:
        found.append(f"stopped {state.stops} times")
    if state.mode == "ending" or (state.stops and not world.is_running and not is_held):
        found.append("stopped, not started again, and nobody was told")
    if state.is_out and not is_held:
        found.append("out of the balancer, and nobody was told")
    if world.serves and world.phase != "serving":
        found.append(f"its gate is {world.phase}")
    if state.shed_until > state.now:
        found.append("it sheds for ever")
    return found

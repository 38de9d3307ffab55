"""The half of guard that acts: what it is made of, and its rounds. Without `--act` the same decisions are only told."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from plimsoll.actuators.journal import Journal
from plimsoll.actuators.own_process import OwnProcess
from plimsoll.cli.guard_act import Conductor
from plimsoll.cli.guard_asks import Desk
from plimsoll.cli.guard_drain import HandDrain, OneOfTwo
from plimsoll.cli.guard_dry import DryBook, NoLock
from plimsoll.cli.guard_foreign import ForeignRestarts
from plimsoll.cli.guard_light_steps import Parts, TellsEnd
from plimsoll.cli.guard_loop import Fleet
from plimsoll.cli.guard_parts import lock_of, minute_in, own_process, parts_of, policy_of, told_of
from plimsoll.cli.guard_put_back import PutBack
from plimsoll.cli.guard_said import Ports, Said
from plimsoll.cli.guard_sight import FleetSight, Told
from plimsoll.errors import PlimsollError, WorldFailed
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.course import open_courses
from plimsoll.guard.decide import LastEnd, Refusal, View
from plimsoll.guard.ports import Book
from plimsoll.sources.discovery import Target
from plimsoll.sources.guard_act_types import EngineAct, Files
from plimsoll.sources.guard_config import GuardConfig

ROUND_S = 1.0
ENDED_EVERY_S = 5.0
LOG_EVERY_S = 60.0


class Made(NamedTuple):
    """What acting is made of, from the configuration and the engines that were named in it."""

    parts: Mapping[str, Parts]
    told: Mapping[str, Told]
    policy: ActPolicy
    own: OwnProcess | None


def make(config: GuardConfig, targets: tuple[Target, ...], files: Files, command: tuple[str, ...] = ()) -> Made:
    """The adapters of every engine. `command`: the server that guard starts itself, which is the first of them."""
    own = own_process(command, config.own, files) if command else None
    parts, told = {}, {}
    for place, target in enumerate(targets):
        acting = config.acting.get(target.name, EngineAct())
        parts[target.name] = parts_of(target, acting, files, own if place == 0 else None)
        told[target.name] = told_of(acting, parts[target.name])
    return Made(parts, told, policy_of(config.act), own)


class Acting:
    """One guard's hands, or with `is_dry` only its words."""

    def __init__(
        self, made: Made, config: GuardConfig, files: Files, fleet: Fleet, tell: Callable[[Said], None], *, is_dry: bool
    ) -> None:
        self._made, self._tell, self._is_dry, self._files = made, tell, is_dry, files
        self._stopped: dict[str, str] = {}  # by somebody, on purpose
        self.ended: dict[str, str] = {}
        """Of engines whose process is known to have ended on its own: why."""
        minute = minute_in("UTC" if config.act is None else config.act.timezone)
        self.sight = FleetSight(fleet, made.told, fleet.every_s, time.monotonic, minute, self._last_ends)
        self.journal: Journal | None = None
        self.desk: Desk | None = None
        self._drains: HandDrain | None = None
        self._back: PutBack | None = None
        self._said: dict[str, str] = {}
        self._is_own_due, self._own_waits_for = True, ""
        self._dry = DryBook(files.journal, time.time)
        if not is_dry:
            self.journal = Journal(files.journal)
        book: Book = self.journal or self._dry
        lock = OneOfTwo(NoLock() if is_dry else lock_of(config.lock, files))
        ports = Ports(book, lock, self.sight, self._view, tell, time.time)
        parts = {
            name: one._replace(suffering=functools.partial(self.sight.suffering, name, made.policy))
            for name, one in made.parts.items()
        }
        self.conductor = Conductor(parts, made.policy, ports, pause_s=ROUND_S)
        self._foreign = ForeignRestarts(self.conductor, book, self.sight, self._starts_again)
        if self.journal is not None:
            by_hand = ports._replace(lock=lock.other())
            self._drains = HandDrain(parts, made.policy, by_hand, self.conductor.courses)
            self._back = PutBack(made.parts, made.policy, ports._replace(lock=lock.other()), self.conductor)
            self.desk = Desk(self.conductor, self._drains, self.journal, self.journal.path, self._back)

    def _last_ends(self) -> Mapping[str, LastEnd]:
        return self.conductor.last_ends()

    def _starts_again(self, name: str) -> int | None:
        """How often whoever runs it has started it again by itself, where that was asked."""
        parts = self._made.parts.get(name)
        return None if parts is None else getattr(parts.restarter, "restarts_seen", None)

    def _view(self, at_work: frozenset[str]) -> View:
        if self._is_dry:  # what an earlier guard left would come first
            at_work |= {course.engine for course in open_courses(self.conductor.kept())}
        view = self.sight.view(at_work)
        if not self._stopped:
            return view
        engines = [one._replace(only_observed=self._stopped.get(one.name, "") or one.only_observed) for one in view.engines]
        return view._replace(engines=engines)

    async def _start_own(self, own: OwnProcess) -> None:
        """The server that guard was given, where it does not run when guard begins; when it ends later, that is judged.

        The first one is just started. One that follows another is a restart. WorldFailed where the first cannot be started.
        """
        name = next(name for name, parts in self._made.parts.items() if parts.restarter is own)
        is_running = await own.is_running()
        why = "" if is_running or self._is_dry else self.conductor.why_not_start(name)
        if why and why != self._own_waits_for:
            self._tell(Said(name, f"the server that guard was given is not started: {why}"))
        self._own_waits_for = why
        self._is_own_due = not is_running
        if is_running or why:
            return
        if is_running is False and not self._is_dry and (last := await own.last_exit()).is_done:
            await self.conductor.start(name, f"the server that guard was given does not run: {last.says}")
            return
        outcome = await own.start()
        if not outcome.is_done:
            raise WorldFailed(f"the server was not started: {outcome.says}")
        self._tell(Said(name, outcome.says))

    async def run(self) -> None:
        """For ever: first what an earlier guard left, then round after round."""
        if not self._is_dry:
            try:
                await self.conductor.take_over()  # what has to wait for the lock is tried again in later rounds
            except PlimsollError as error:
                self.conductor.stop_acting(error)
        ended_s = log_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= ended_s:
                if self._made.own is not None and self._is_own_due:
                    await self._start_own(self._made.own)
                await self._look_for_ended()
                ended_s = now_s + ENDED_EVERY_S
            if self._made.own is not None and now_s >= log_s:
                await self._made.own.rotate_log()
                log_s = now_s + LOG_EVERY_S
            await self._round()
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> None:
        if self._is_dry:
            await self._dry.refresh(time.monotonic())
        if not self.conductor.stopped_acting:
            try:
                self._foreign.note()
            except PlimsollError as error:
                self.conductor.stop_acting(error)
        if self._is_dry:
            self._tell_what_would_be()
        else:
            await self.conductor.turn()

    def _tell_what_would_be(self) -> None:
        """Every decision once, a plan with all its steps."""
        said: dict[str, str] = {}
        if self._dry.trouble:
            said[""] = f"what was done before is not known, and does not count: {self._dry.trouble}"
        lines: dict[str, list[str]] = {}
        for one in self.conductor.decisions():
            said[one.engine] = f"{one.kind}: {one.reason if isinstance(one, Refusal) else ''}"
            lines[one.engine] = (
                [f"no {one.grade}: {one.says}"]
                if isinstance(one, Refusal)
                else [f"with --act guard would {one.grade} it: {one.why}", *one.lines()]
            )
        for engine, what in said.items():
            if self._said.get(engine) != what:
                for line in lines.get(engine, [what]):
                    self._tell(Said(engine, line))
        self._said = said

    async def _look_for_ended(self) -> None:
        """Who runs an engine knows that it ended, and whether somebody wanted it: a refused connection says neither."""
        busy = frozenset(self.conductor.courses)
        for name, parts in self._made.parts.items():
            ended, stopped = ("", "") if name in busy else await end_of(parts)
            self.ended[name], self._stopped[name] = ended, stopped

    async def runs_on(self) -> str:
        """What is left running of a server that guard started, and how it is ended; empty where there is none."""
        own = self._made.own
        pids = () if own is None or not await own.is_running() else await own.pids()
        if not pids:
            return ""
        return f"the server that guard started runs on as pid {pids[0]}: the next guard finds it, kill {pids[0]} stops it"

    async def close(self) -> None:
        """Stop at once. What is under way is left to the next guard, or to its leases; the engines go on."""
        if self._drains is not None:
            await self._drains.close()
        if self._back is not None:
            await self._back.close()
        await self.conductor.close()
        if self.journal is not None:
            self.journal.close()


async def end_of(parts: Parts) -> tuple[str, str]:
    """Why its process ended by itself, and why it was stopped by somebody; empty for neither."""
    restarter: object = parts.restarter
    outcome = await restarter.last_exit() if isinstance(restarter, TellsEnd) else None
    if outcome is None or not outcome.is_done or outcome.facts.get("asked"):
        return "", ""
    return ("", outcome.says) if outcome.facts.get("by_hand") else (outcome.says, "")

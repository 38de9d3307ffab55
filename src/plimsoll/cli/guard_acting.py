"""The half of guard that acts: what it is made of, and its rounds. Without `--act` the same decisions are only told."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from plimsoll.actuators.journal import Journal
from plimsoll.actuators.own_process import OwnProcess
from plimsoll.actuators.systemd import SystemdUnit
from plimsoll.cli.guard_act import Conductor
from plimsoll.cli.guard_asks import Desk
from plimsoll.cli.guard_drain import HandDrain, OneOfTwo
from plimsoll.cli.guard_loop import Fleet
from plimsoll.cli.guard_parts import lock_of, minute_in, own_process, parts_of, policy_of, told_of
from plimsoll.cli.guard_said import Ports, Said
from plimsoll.cli.guard_sight import FleetSight, Told
from plimsoll.cli.guard_steps import Parts
from plimsoll.domain.outcome import Outcome
from plimsoll.errors import PlimsollError
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.decide import Plan, Refusal, View, decide
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
        self.sight = FleetSight(fleet, made.told, fleet.every_s, time.monotonic, minute)
        self.conductor: Conductor | None = None
        self.journal: Journal | None = None
        self.desk: Desk | None = None
        self._drains: HandDrain | None = None
        self._said: dict[str, str] = {}
        if not is_dry:
            self.journal = Journal(files.journal)
            lock = OneOfTwo(lock_of(config.lock, files))
            ports = Ports(self.journal, lock, self.sight, self._view, tell, time.time)
            parts = {
                name: one._replace(suffering=functools.partial(self.sight.suffering, name, made.policy))
                for name, one in made.parts.items()
            }
            self.conductor = Conductor(parts, made.policy, ports, pause_s=ROUND_S)
            by_hand = ports._replace(lock=lock.other())
            self._drains = HandDrain(made.parts, made.policy, by_hand, self.conductor.courses)
            self.desk = Desk(self.conductor, self._drains, self.journal, self.journal.path)

    def _view(self, at_work: frozenset[str]) -> View:
        ends = {} if self.conductor is None else self.conductor.last_ends()
        view = self.sight.view(at_work, ends)
        if not self._stopped:
            return view
        engines = [one._replace(only_observed=self._stopped.get(one.name, "") or one.only_observed) for one in view.engines]
        return view._replace(engines=engines)

    async def start_own(self) -> Outcome | None:
        """Start the server that guard was given, unless it runs already."""
        own = self._made.own
        if own is None:
            return None
        if await own.is_running():
            return None
        return await own.start()

    async def run(self) -> None:
        """For ever: first what an earlier guard left, then round after round."""
        if self.conductor is not None:
            await self._take_over(self.conductor)
        ended_s = log_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= ended_s:
                await self._look_for_ended()
                ended_s = now_s + ENDED_EVERY_S
            if self._made.own is not None and now_s >= log_s:
                await self._made.own.rotate_log()
                log_s = now_s + LOG_EVERY_S
            await self._round()
            await asyncio.sleep(ROUND_S)

    async def _take_over(self, conductor: Conductor) -> None:
        """What has to wait for the lock is tried again in later rounds."""
        try:
            await conductor.take_over()
        except PlimsollError as error:
            conductor.stopped_acting = str(error)
            self._tell(Said("", f"guard does not act: {error}", is_urgent=True))

    async def _round(self) -> None:
        anew = self.sight.begun_anew()
        if self.conductor is None:
            self._tell_what_would_be()
            return
        for name in anew:
            self.conductor.foreign_restart(name)
        await self.conductor.turn()

    def _tell_what_would_be(self) -> None:
        decisions = {one.engine: one for one in decide(self._view(frozenset()), self._made.policy)}
        for engine, one in decisions.items():
            says = (
                f"no {one.grade}: {one.says}"
                if isinstance(one, Refusal)
                else f"with --act guard would {one.grade} it: {one.why}"
            )
            if isinstance(one, Plan):
                says += f"; steps: {', '.join(one.steps)}"
            if self._said.get(engine) != type(one).__name__ + one.kind:
                self._tell(Said(engine, says, fields={"steps": one.lines()} if isinstance(one, Plan) else {}))
        self._said = {engine: type(one).__name__ + one.kind for engine, one in decisions.items()}

    async def _look_for_ended(self) -> None:
        """Who runs an engine knows that it ended, and whether somebody wanted it: a refused connection says neither."""
        busy = frozenset() if self.conductor is None else frozenset(self.conductor.courses)
        for name, parts in self._made.parts.items():
            ended, stopped = ("", "") if name in busy else await _end_of(parts)
            self.ended[name], self._stopped[name] = ended, stopped

    def needs(self) -> dict[str, str]:
        """Engines that guard can do no more about, and why: until somebody resumes them."""
        ends = {} if self.conductor is None else self.conductor.last_ends()
        says = {"held": "its restart could not be finished", "failed": "its restart did not help"}
        return {engine: f"{says[end]}: a person is needed" for engine, (_, end) in ends.items() if end in says}

    async def close(self) -> None:
        """Stop at once. What is under way is left to the next guard, or to its leases; the engines go on."""
        if self._drains is not None:
            await self._drains.close()
        if self.conductor is not None:
            await self.conductor.close()
        if self.journal is not None:
            self.journal.close()


async def _end_of(parts: Parts) -> tuple[str, str]:
    """Why its process ended by itself, and why it was stopped by somebody; empty for neither."""
    restarter = parts.restarter
    if isinstance(restarter, OwnProcess):
        outcome = await restarter.last_exit()
        return (outcome.says, "") if outcome.is_done and not outcome.facts.get("asked") else ("", "")
    if isinstance(restarter, SystemdUnit):
        state = (await restarter.show() or {}).get("ActiveState", "")
        return ("its unit has failed" if state == "failed" else "", "somebody stopped its unit" if state == "inactive" else "")
    return "", ""

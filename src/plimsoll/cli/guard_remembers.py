"""What one guard remembers, by its journal: what is switched off, what was restarted, and when something is tried again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plimsoll.cli.guard_said import Ports, needs_of
from plimsoll.domain.journal_entry import RESTART, SWITCH, Entry, cleaned
from plimsoll.errors import BadInput
from plimsoll.guard.budget import Restart
from plimsoll.guard.decide import LastEnd, Switches
from plimsoll.guard.grades import Grade
from plimsoll.guard.remembered import last_ends_of, restarts_of, switches_of

AGAIN_S = 60.0  # after an action that changed nothing, doubled each time up to half an hour
LONGEST_AGAIN_S = 1_800.0


class Remembers:
    """The memory of whoever acts."""

    def __init__(self, engines: Iterable[str], ports: Ports) -> None:
        """BadInput where two engines have the same name in the journal, which hides what is secret in one."""
        known = list(engines)
        self._ports = ports
        self._names = {_written(name): name for name in known}
        if len(self._names) < len(known):
            raise BadInput("two engines have the same name but for a password: give each a name of its own")
        self._again: dict[str, tuple[float, float]] = {}  # by engine: when it may be tried again, and the pause then

    @property
    def switches(self) -> Switches:
        """What people have switched off."""
        return switches_of(self.kept())

    def switch(self, name: str, engine: str, *, is_on: bool, who: str = "") -> None:
        """Switch off and on; JournalFailed where it cannot be written down."""
        self._ports.book.append(SWITCH, engine=engine, step=name, fields={"on": is_on, "who": who})
        if not is_on:
            self._again = {one: when for one, when in self._again.items() if engine and one != engine}

    @property
    def restarts(self) -> list[Restart]:
        """All that the journal counts, everybody's."""
        return restarts_of(self.kept())

    def last_ends(self) -> dict[str, LastEnd]:
        """The engines that restarts did not mend, unless somebody has resumed them since."""
        return last_ends_of(self.kept())

    def needs(self) -> dict[str, str]:
        """Engines that guard can do no more about, and why: until somebody resumes them."""
        return {engine: needs_of(engine, end) for engine, end in self.last_ends().items()}

    def foreign_restart(self, engine: str, **seen: Any) -> None:
        """Somebody else restarted it: it counts."""
        self._ports.book.append(RESTART, engine=engine, fields={"own": False, **seen})

    def kept(self) -> list[Entry]:
        """With the engines' names as they are, not as they were fit to be written down."""
        return [one._replace(engine=self._names.get(one.engine, one.engine)) for one in self._ports.book.kept()]

    def _off(self, engine: str, grade: Grade) -> str:
        """Whether somebody has switched it off since it was begun: then it is taken back as long as it can be."""
        off = self.switches
        return "somebody has paused it meanwhile" if off.is_paused or engine in off.paused or grade in off.rungs_off else ""

    def _may_try(self, engine: str) -> bool:
        return self._ports.wall() >= self._again.get(engine, (0.0, 0.0))[0]

    def _try_later(self, engine: str) -> None:
        pause_s = min(LONGEST_AGAIN_S, 2 * self._again.get(engine, (0.0, AGAIN_S / 2))[1])
        self._again[engine] = (self._ports.wall() + pause_s, pause_s)


def _written(name: str) -> str:
    """An engine's name as the journal has it."""
    return cleaned(Entry(0, 0.0, "", engine=name)).engine

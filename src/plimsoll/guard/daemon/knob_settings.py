"""Knobs that an operator sets for a time: journaled, verified by the engine's steps, and set again after a restart.

The lease ends in the engine itself: a guard that dies leaves nothing behind that has to be undone. The journal has each
setting as a switch of its engine, so the next guard knows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from plimsoll.guard.act.journal_entry import NOTE, SWITCH
from plimsoll.guard.act.ports import JournalWriter, Lock, Outcome, TurnsKnobs, failed
from plimsoll.guard.adapters.gate import knob_words

KNOBS = "knobs"  # the step of its switch
LOOK_S = 10.0
LEAST_S = 5.0  # a lease that ends sooner is not set again


@dataclass(frozen=True, slots=True)
class KnobSetting:
    """The knobs set for one engine, and until when (seconds since 1970)."""

    values: Mapping[str, float]
    until: float
    is_verified: bool = False

    def words(self) -> str:
        """Returns the setting as the page shows it."""
        until = time.strftime("%H:%M", time.localtime(self.until))
        shown = "verified by its steps" if self.is_verified else "not seen in its steps yet"
        return f"{knob_words(self.values)} until {until}, {shown} (guardctl set ENGINE --clear ends it)"


class KnobSettings:
    """The settings of all engines; `remark` puts one on the page, or takes it away."""

    def __init__(
        self,
        gates: Mapping[str, TurnsKnobs | None],
        journal: JournalWriter,
        lock: Lock,
        remark: Callable[[str, str], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._gates, self._journal, self._lock, self._remark, self._wall = gates, journal, lock, remark, wall
        self._looked_s = 0.0
        self.settings: dict[str, KnobSetting] = {}
        for entry in journal.kept():
            if entry.kind == SWITCH and entry.step == KNOBS:
                self.settings.pop(entry.engine, None)
                values, until = entry.fields.get("values"), entry.fields.get("until")
                if entry.fields.get("on") and isinstance(values, dict) and isinstance(until, int | float) and until > wall():
                    self._keep(entry.engine, KnobSetting(values, float(until)))

    def _keep(self, engine: str, setting: KnobSetting | None) -> None:
        if setting is None:
            self.settings.pop(engine, None)
        else:
            self.settings[engine] = setting
        self._remark(engine, "" if setting is None else setting.words())

    async def set(self, engine: str, values: Mapping[str, float], for_s: float, who: str) -> Outcome:
        """Sets these knobs in place of those set before; without values, ends the lease. Journaled before it is done."""
        gate = self._gates.get(engine)
        if gate is None:
            return failed("it has no gate that guard can ask: token_file in its [[engine]]")
        until = self._wall() + for_s
        words, before = knob_words(values), self.settings.get(engine)
        if values:
            fields = {"on": True, "set": f"{words} for {for_s:.0f} s", "values": dict(values), "until": until, "who": who}
        else:
            fields = {"on": False, "why": "asked for", "who": who}
        self._journal.append(SWITCH, engine=engine, step=KNOBS, fields=fields)
        outcome = await self._send(engine, gate, values, for_s)
        self._journal.append(NOTE, engine=engine, fields={KNOBS: outcome.message, "done": outcome.is_done})
        if outcome.is_done is False and values:
            old = {"on": before is not None, "why": outcome.message}
            if before is not None:
                old |= {"set": knob_words(before.values), "values": dict(before.values), "until": before.until}
            self._journal.append(SWITCH, engine=engine, step=KNOBS, fields=old)
        elif outcome.is_done is not False:  # an unknown outcome is checked again
            self._keep(engine, KnobSetting(dict(values), until) if values else None)
        return outcome

    async def _send(self, engine: str, gate: TurnsKnobs, values: Mapping[str, float], for_s: float) -> Outcome:
        """Sends the knobs with the fleet's epoch, so that an older guard cannot undo them."""
        held = await self._lock.acquire(f"knobs of {engine}")
        if not held.is_done:
            return failed(f"guard is busy: {held.message}")
        try:
            epoch = held.facts.get("epoch", 0)
            return await gate.set_knobs(values, for_s, int(epoch) if isinstance(epoch, int | float) else 0)
        finally:
            await self._lock.release()

    async def look(self, now_s: float) -> None:
        """At intervals ends settings whose time is over, verifies new ones, and repeats those that an engine has lost."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        await asyncio.gather(*(self._look_at(engine, setting) for engine, setting in list(self.settings.items())))

    async def _look_at(self, engine: str, setting: KnobSetting) -> None:
        left_s, gate = setting.until - self._wall(), self._gates.get(engine)
        if left_s <= 0 or gate is None:
            self._journal.append(SWITCH, engine=engine, step=KNOBS, fields={"on": False, "why": "its time is over"})
            self._keep(engine, None)
            return
        found = await gate.knobs()
        if not found.is_done or self.settings.get(engine) is not setting:
            return
        facts = found.facts
        if facts.get("leased") != knob_words(setting.values):
            if left_s < LEAST_S:
                return
            outcome = await self._send(engine, gate, setting.values, left_s)
            says = f"set again, the engine had lost it (restarted?): {outcome.message}"
            self._journal.append(NOTE, engine=engine, fields={KNOBS: says, "done": outcome.is_done})
            self._keep(engine, replace(setting, is_verified=False))
        elif not setting.is_verified and _is_obeyed(setting.values, facts):
            steps = f"the largest of {facts['steps']:.0f} steps had {facts['largest_step']:.0f} tokens"
            says = f"verified: {facts['running']:.0f} requests run, {steps}"
            self._journal.append(NOTE, engine=engine, fields={KNOBS: says, "done": True})
            self._keep(engine, replace(setting, is_verified=True))


def _is_obeyed(values: Mapping[str, float], facts: Mapping[str, object]) -> bool:
    """True if steps were made since the order, with no more requests running, or tokens in a step, than it allows."""
    found = [facts.get(name) for name in ("steps", "running", "largest_step", "most_needed")]
    numbers = [one for one in found if isinstance(one, int | float)]
    if len(numbers) < len(found) or not numbers[0]:
        return False
    _, running, largest, needed = numbers
    is_few = running <= values.get("max-num-seqs", running)
    return is_few and largest <= max(values.get("max-num-batched-tokens", largest), needed)

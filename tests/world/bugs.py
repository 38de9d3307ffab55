"""Deliberate bugs: each is a small patch of guard in memory, and the world must notice each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

from plimsoll.guard.act import decide
from plimsoll.guard.act.ports import done, failed
from plimsoll.guard.adapters import haproxy
from plimsoll.guard.daemon import acting, conductor, steps
from plimsoll.guard.judge import history, witness
from tests.world.world import Story, play, quick_folder


async def _yes(*_: Any) -> bool:
    return True


async def _empty(*_: Any) -> str:
    return ""


def _without(*reasons: str, real: Any = decide._against) -> Any:
    """Guard's rules but for these."""
    return lambda *given: (rule for rule in real(*given) if rule[0] not in reasons)


def _idle_at_once(samples: Any, *_: Any) -> Any:
    return done("looked at once") if samples else failed("not looked at")


def _write_little(self: Any, kind: str, run: Any, fields: Any, step: str = "") -> None:
    """That an action begins and ends is written, and not what is about to be done."""
    if kind in ("opened", "closed"):
        self.journal.append(kind, engine=run.engine, action=run.action, step=step, fields=fields)


async def _say_that_it_is_back(*_: Any) -> Any:
    return done("it is back, they say")


async def _acquire_anyway(self: Any, owner: str) -> Any:
    outcome = await self._lock.acquire(owner)
    self._part.holders.add(id(self))
    return outcome if outcome.is_done else done("taken all the same", epoch=1_000_000)


async def _exit_by_itself(adapters: Any, log: Any = None, *, real: Any = acting.exit_report) -> Any:
    report = await real(adapters, log)
    return report._replace(ended=report.ended or report.stopped, stopped="")


def _learn_all(self: Any, *_: Any, real: Any = history.CoreSteps.__init__) -> None:
    real(self, math.inf)


BUGS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "drop the second witness": (
        (witness.Witness, "is_proof", property(lambda self: self.says is not witness.Testimony.SERVES)),
    ),
    "look for idleness once": (
        (steps, "idleness", _idle_at_once), (steps.ActionSteps, "_has_let_go", _yes),
        (steps.ActionSteps, "_why_not_idle", _empty),
    ),
    "skip the journal": ((conductor.ActionPorts, "write", _write_little),),
    "ignore the budget": ((decide, "spent", lambda *_: ""),),
    "stop without a fresh look": ((steps.ActionSteps, "_why_serves", _empty),),
    "ignore the lock": (
        (steps.SharedLock, "is_ours", _yes), (steps.SharedLock, "acquire", _acquire_anyway),
        (steps.SharedLock, "_note", lambda *_: None),
    ),
    "take the last one": (
        (decide, "_against", _without("TooManyAway", "OthersCannotCarry")), (haproxy.HAProxy, "_is_last", lambda *_: False),
    ),
    "never put it back": ((steps.ActionSteps, "_undrain", _say_that_it_is_back),),
    "forget what an earlier guard left": ((conductor, "open_actions", lambda _: []),),
    "act while paused": ((decide, "_against", _without("Paused")), (conductor.Conductor, "_off", lambda *_: "")),
    "start what an operator stopped": (
        (steps.ActionSteps, "_stopped_by_hand", _empty), (acting, "exit_report", _exit_by_itself),
    ),
    "learn from hangs": ((history.CoreSteps, "__init__", _learn_all), (history, "LONGEST_GAP_S", math.inf)),
}  # fmt: skip


@contextlib.contextmanager
def bug(name: str) -> Iterator[None]:
    """Guard has this bug meanwhile."""
    real = [(place, word, getattr(place, word)) for place, word, _ in BUGS[name]]
    for place, word, other in BUGS[name]:
        setattr(place, word, other)
    try:
        yield
    finally:
        for place, word, before in real:
            setattr(place, word, before)


def first_noticed(name: str, seeds: Iterable[int]) -> Story | None:
    """The first story that ends in a violation with this bug, and well without it."""
    with quick_folder() as folder:
        for seed in seeds:
            with bug(name):
                story = play(seed, folder)
            if story.wrong and not play(seed, folder).wrong:
                return story
    return None

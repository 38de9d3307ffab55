"""Deliberate bugs: each is a small patch of guard in memory, and the world must notice each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from plimsoll.guard.act import decide
from plimsoll.guard.act.idle import Idleness
from plimsoll.guard.act.ports import done
from plimsoll.guard.adapters import haproxy
from plimsoll.guard.daemon import conductor, steps
from plimsoll.guard.judge import history, life
from tests.world.world import Story, play, quick_folder

Patch = tuple[Any, str, Any]


async def _yes(*_: Any) -> bool:
    return True


async def _nothing(*_: Any) -> str:
    return ""


def _idle_at_once(samples: Any, *_: Any) -> Idleness:
    return Idleness(is_idle=bool(samples), message="looked at once")


def _write_nothing(self: Any, kind: str, run: Any, fields: Any, step: str = "") -> None:
    """Only that an action begins and ends is written, and not what is about to be done."""
    if kind in ("opened", "closed"):
        self.journal.append(kind, engine=run.engine, action=run.action, step=step, fields=fields)


async def _leave_it_out(self: Any, run: Any) -> Any:
    del self, run
    return done("it is back, they say")


BUGS: dict[str, Callable[[], list[Patch]]] = {
    "drop the second witness": lambda: [
        (steps, "idleness", _idle_at_once), (steps.RestartSteps, "_has_let_go", _yes),
        (steps.RestartSteps, "_why_not_idle", _nothing),
    ],
    "skip the journal": lambda: [(conductor.ActionPorts, "write", _write_nothing)],
    "ignore the budget": lambda: [(decide, "spent", lambda *_: decide.RestartBudget(""))],
    "stop without a fresh look": lambda: [(steps.RestartSteps, "_is_broken_or_down", _yes)],
    "ignore the lock": lambda: [
        (steps.LockKeeper, "is_ours", _yes),
        (steps.LockKeeper, "acquire", _acquired),
    ],
    "take the last one": lambda: [
        (decide, "_too_many", lambda *_, **__: ""), (decide, "_capacity", lambda *_, **__: ""),
        (haproxy.HAProxy, "_is_last", lambda *_: False),
    ],
    "never put it back": lambda: [(steps.RestartSteps, "_undrain", _leave_it_out)],
    "forget what an earlier guard left": lambda: [(conductor, "open_actions", lambda _: [])],
    "act while paused": lambda: [(decide, "_paused", lambda *_: ""), (conductor.ActionHistory, "_off", lambda *_: "")],
    "start what an operator stopped": lambda: [(steps.RestartSteps, "_stopped_by_hand", _nothing), *_by_hand()],
    "take a pause for a hang": lambda: [
        (history, "is_resting", lambda _: False), (life, "is_resting", lambda _: False), (life, "_may_rest", lambda _: None),
    ],
    "learn from hangs": lambda: [(history, "LONGEST_GAP_S", 1e9)],
}  # fmt: skip


async def _acquired(self: Any, run: Any) -> Any:
    outcome = await self._lock.acquire(f"{run.action} on {run.engine}")
    self._is_held, self.is_lost = True, False
    return outcome if outcome.is_done else done("taken all the same", epoch=1_000_000)


def _by_hand() -> list[Patch]:
    from plimsoll.guard.daemon import acting

    async def last_exit(adapters: Any) -> tuple[str, str]:
        outcome = await adapters.restarter.last_exit()
        return (outcome.message if outcome.is_done else ""), ""

    return [(acting, "last_exit_of", last_exit)]


@contextlib.contextmanager
def bug(name: str) -> Iterator[None]:
    """Guard has this bug meanwhile."""
    patches = [(place, word, getattr(place, word), other) for place, word, other in BUGS[name]()]
    for place, word, _, other in patches:
        setattr(place, word, other)
    try:
        yield
    finally:
        for place, word, real, _ in patches:
            setattr(place, word, real)


def first_noticed(name: str, seeds: Iterable[int]) -> Story | None:
    """The first story that ends in a violation with this bug, and without it in none."""
    with quick_folder() as folder:
        for seed in seeds:
            with bug(name):
                story = play(seed, folder)
            if story.wrong and not play(seed, folder).wrong:
                return story
    return None

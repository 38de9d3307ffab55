"""Looks with something missing: whole looks, answers, figures, workers, test requests, the gate."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from plimsoll.guard.judge.look import Look, Reach, WorkerMemory


class Drops(NamedTuple):
    """How likely each is lost at each look; `at_once` looks in a row are lost together."""

    seed: int
    looks: float = 0.0  # nobody looked
    answers: float = 0.0  # no answer in time
    nonsense: float = 0.0
    figures: float = 0.0
    workers: float = 0.0
    parts: float = 0.0  # of what a worker tells
    canaries: float = 0.0
    gates: float = 0.0
    starts: float = 0.0
    health: float = 0.0
    at_once: int = 1


_PARTS = tuple(name for name in WorkerMemory._fields if name not in ("rank", "age_s"))
LOST = ("looks", "answers", "nonsense", "figures", "workers", "parts", "canaries", "gates", "starts", "health")


def thinned(looks: Iterable[Look], drops: Drops) -> Iterator[Look]:
    dice = random.Random(drops.seed)
    left = dict.fromkeys(LOST, 0)
    names: tuple[str, ...] = ()
    for look in looks:
        for name in LOST:
            if left[name] == 0 and dice.random() < getattr(drops, name):
                left[name] = dice.randint(1, drops.at_once)
                if name == "figures":
                    names = tuple(dice.sample(sorted(look.figures), min(len(look.figures), dice.randint(1, 11))))
        is_lost = {name: count > 0 for name, count in left.items()}
        left = {name: max(0, count - 1) for name, count in left.items()}
        if is_lost["looks"]:
            continue
        yield _without(look, is_lost, names, dice)


def _without(look: Look, is_lost: dict[str, bool], names: tuple[str, ...], dice: random.Random) -> Look:
    if is_lost["answers"] or is_lost["nonsense"]:
        reach = Reach.SILENT if is_lost["answers"] else Reach.NONSENSE
        look = Look(look.at_s, look.unix_s, reach, "lost on the way", canary=look.canary)
    if is_lost["figures"]:
        look = look._replace(figures={name: value for name, value in look.figures.items() if name not in names})
    if is_lost["workers"] and look.workers:
        kept = [one for one in look.workers if dice.random() < 0.5]
        late = [one._replace(age_s=60.0) for one in look.workers if one not in kept and dice.random() < 0.5]
        look = look._replace(workers=tuple(kept + late))
    if is_lost["parts"]:
        look = look._replace(workers=tuple(_vague(one, dice) for one in look.workers))
    if is_lost["canaries"]:
        look = look._replace(
            canary=None if look.canary is None or dice.random() < 0.5 else look.canary._replace(is_answered=None)
        )
    if is_lost["gates"]:
        look = look._replace(gate=None)
    if is_lost["starts"]:
        look = look._replace(started_unix_s=None)
    if is_lost["health"]:
        look = look._replace(health=None)
    return look


def _vague(worker: WorkerMemory, dice: random.Random) -> WorkerMemory:
    lost = dice.sample(_PARTS, 3)
    return WorkerMemory(*(None if name in lost else value for name, value in zip(WorkerMemory._fields, worker, strict=True)))  # type: ignore[arg-type]

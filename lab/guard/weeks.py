"""Weeks of healthy traffic for a stand-in, all of it drawn from one seed.

Every kind keeps the engine inside what it can carry: a share of the rate at which it ends such requests when it never runs
out of them, which is measured first. What a healthy server does is in it: nights without a request, bursts, deploys that
take seconds or many minutes, counters that begin anew, prompts that grow longer from day to day, a cache that is always full.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lab.guard.looks import EVERY_S, Sight, Watched
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.standin import StandIn, stand_in

DAY_S = 86_400.0
HERD = 30  # of those that were refused, as many come again at once when it is back
SILENT = 0.002  # of all looks: the network, or a busy machine
Numbers = npt.NDArray[np.float64]


class Engine(NamedTuple):
    """What is launched."""

    command: str
    gpu: str
    workers: int = 1


class Mix(NamedTuple):
    """Lengths of prompts and answers: medians of log-normal draws, their spread and their bounds."""

    prompt: float
    output: float
    spread: float
    most_prompt: int
    most_output: int
    shared: int = 0


class Kind(NamedTuple):
    """One kind of week: its mix, its load at each moment as a share of what the engine can carry, and what else happens."""

    name: str
    mix: Mix
    load: Callable[[Numbers], Numbers]  # of the time in seconds
    burstiness: float = 1.0  # the shape of the gamma that each minute's rate is multiplied with; 1,000 and more: none
    flashes: float = 0.0  # bursts of up to 30 requests within 5 s, a day
    deploys: float = 0.0  # a day
    slowest_s: float = 0.0
    grows: bool = False  # prompts become longer and longer
    is_full: bool = False  # as many requests as keep the cache full and the queue short
    engine: Engine | None = None  # the one it needs; None: all of them in turn


LLAMA = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192"
ENGINES = (
    Engine(LLAMA, "L4"),
    Engine(LLAMA + " --max-num-seqs 24 --no-enable-prefix-caching", "L4"),
    Engine(LLAMA + " --enforce-eager", "A10G"),
    Engine(LLAMA + " --tensor-parallel-size 2", "L4", 2),
)
LARGE = ENGINES[3]
# As many of the forms below as it lets in fill its cache to the last blocks, and none is ever thrown out.
FITTING = Engine(LLAMA + " --tensor-parallel-size 2 --max-num-seqs 32 --num-gpu-blocks-override 8350", "L4", 2)
CHAT = Mix(1100, 420, 0.6, 5000, 1500, 256)
ESSAYS = Mix(500, 900, 0.5, 3000, 2500)
DOCUMENTS = Mix(6000, 60, 0.2, 7600, 200)
FORMS = Mix(4000, 100, 0.01, 4060, 110)
TINY = Mix(20, 4, 0.4, 60, 12)


def _daily(low: float, high: float) -> Callable[[Numbers], Numbers]:
    return lambda at: low + (high - low) * (0.5 - 0.5 * np.cos(2 * math.pi * at / DAY_S)) ** 1.5


def _office(high: float) -> Callable[[Numbers], Numbers]:
    return lambda at: np.where((at % DAY_S > 9 * 3600) & (at % DAY_S < 18 * 3600) & (at // DAY_S % 7 < 5), high, 0.0)


def _level(share: float) -> Callable[[Numbers], Numbers]:
    return lambda at: np.full_like(at, share)


KINDS = (
    Kind("diurnal", CHAT, _daily(0.03, 0.75), 50.0),
    Kind("bursty", CHAT, _level(0.30), 2.0, flashes=12.0),
    Kind("idle nights", ESSAYS, _office(0.55), 20.0),
    Kind("deploys", CHAT, _daily(0.05, 0.55), 50.0, deploys=5.0, slowest_s=1_500.0),
    Kind("counter resets", CHAT, _daily(0.05, 0.5), 50.0, deploys=12.0, slowest_s=4.0),
    Kind("staircase", CHAT, _level(0.35), 50.0, grows=True),
    Kind("full cache", FORMS, _level(0.0), is_full=True, engine=FITTING),
    Kind("full, preempts", ESSAYS, _level(0.0), is_full=True, engine=LARGE),
    Kind("long prompts", DOCUMENTS, _daily(0.05, 0.55), 50.0),
    Kind("tiny", TINY, _daily(0.002, 0.02), 20.0),
)


class Day(NamedTuple):
    """What arrives in one day, in order, and where the arrivals of each look begin."""

    times: Numbers
    prompts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]


@functools.cache
def launch(engine: Engine) -> StandIn:
    """One that is planned and started once; others are made of its settings."""
    return stand_in(engine.command, gpu=engine.gpu)


@functools.cache
def carries(engine: Engine, mix: Mix) -> float:
    """Requests a second that it ends when it never runs out of them."""
    dice = np.random.default_rng(7)
    run = StandIn(launch(engine).config)
    span_s = 1200.0
    while run.now_s < 2 * span_s:
        if run.now_s == span_s:
            before = sum(run.figures.success.values())
        wanted = max(0, 64 - run.figures.waiting)
        prompts, outputs = lengths(mix, dice, wanted)
        run.send([run.now_s] * wanted, prompts.tolist(), outputs.tolist())
        run.until(run.now_s + 30.0)
    return (sum(run.figures.success.values()) - before) / span_s


def lengths(
    mix: Mix, dice: np.random.Generator, count: int, longer: float = 1.0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    prompts = mix.prompt * longer * np.exp(mix.spread * dice.standard_normal(count))
    outputs = mix.output * np.exp(mix.spread * dice.standard_normal(count))
    return (
        np.clip(prompts, 8, mix.most_prompt if longer == 1.0 else 7600).astype(np.int64),
        np.clip(outputs, 1, mix.most_output if longer == 1.0 else 200).astype(np.int64),
    )


def one_day(kind: Kind, rate: float, day: int, dice: np.random.Generator) -> Day:
    """The arrivals of the so manieth day; `rate` is what the engine carries."""
    looks = int(DAY_S / EVERY_S)
    at: Numbers = day * DAY_S + np.arange(looks, dtype=np.float64) * EVERY_S
    minutes = -(-looks // 12)
    uneven = np.ones(minutes) if kind.burstiness >= 1000 else dice.gamma(kind.burstiness, 1 / kind.burstiness, minutes)
    longer = 1.0
    if kind.grows:
        longer = min(7.0, 1.0 + day + float(dice.random()))  # each day longer ones than any before
    rates = kind.load(at) * rate / longer * np.minimum(2.5, np.repeat(uneven, 12)[:looks])
    counts = dice.poisson(rates * EVERY_S)
    for place in dice.integers(0, looks, dice.poisson(kind.flashes)):
        counts[place] += dice.integers(5, 31)
    first = np.concatenate(([0], np.cumsum(counts)))
    times = np.repeat(at, counts) + EVERY_S * dice.random(int(first[-1]))
    times.sort()
    prompts, outputs = lengths(kind.mix, dice, len(times), longer)
    return Day(times, prompts, outputs, first)


def engine_for(kind: Kind, number: int) -> Engine:
    """One for this kind of week: all of them in turn, except where the kind needs a certain one."""
    return kind.engine or ENGINES[number % len(ENGINES)]


def week(kind: Kind, engine: Engine, seed: int, days: int, every: int = 1) -> Iterator[Look]:
    """Every look of so many days: one each five seconds, or at every so manieth of them."""
    dice, own = np.random.default_rng(seed), random.Random(seed)
    sight = Sight(
        has_probe=own.random() < 0.75, has_gate=own.random() < 0.4, has_canary=own.random() < 0.7,
        has_start_time=own.random() < 0.8, workers=engine.workers,
    )  # fmt: skip
    watched = Watched(StandIn(launch(engine).config), sight, own)
    rate = 0.0 if kind.is_full else carries(engine, kind.mix)
    for day in range(days):
        yield from _looks(kind, watched, one_day(kind, rate, day, dice), (day, every), dice, own)


def _looks(
    kind: Kind, watched: Watched, day: Day, turn: tuple[int, int], dice: np.random.Generator, own: random.Random
) -> Iterator[Look]:
    run, (number, every) = watched.engine, turn
    deploys = sorted(int(place) for place in dice.integers(0, len(day.first) - 1, dice.poisson(kind.deploys)))
    missed = 0
    for place in range(len(day.first) - 1):
        if deploys and place == deploys[0]:
            while deploys and place == deploys[0]:
                deploys.pop(0)
            if run.is_up:
                run.restart(takes_s=min(kind.slowest_s, math.exp(own.uniform(math.log(1.0), math.log(kind.slowest_s)))))
        low, high = int(day.first[place]), int(day.first[place + 1])
        if kind.is_full:
            _keep_full(run, kind.mix, dice)
        elif not run.is_up:
            missed += high - low
        elif high > low or missed:
            herd, missed = min(HERD, missed), 0
            if herd:
                prompts, outputs = lengths(kind.mix, dice, herd)
                run.send([run.now_s] * herd, prompts.tolist(), outputs.tolist(), shared=kind.mix.shared)
            times, prompts, outputs = day.times[low:high], day.prompts[low:high], day.outputs[low:high]
            run.send(times.tolist(), prompts.tolist(), outputs.tolist(), shared=kind.mix.shared)
        run.until(number * DAY_S + (place + 1) * EVERY_S)
        if (place + 1) % every:
            continue
        look = watched.look()
        if own.random() < SILENT:
            yield Look(look.at_s, look.unix_s, Reach.SILENT, "no answer within 2 s", canary=look.canary)
        else:
            yield look


def _keep_full(run: StandIn, mix: Mix, dice: np.random.Generator) -> None:
    """Some always wait at the door: a tenth of those that run at most, as many as end between two looks."""
    wanted = 12 - run.figures.waiting
    if wanted > 0:
        prompts, outputs = lengths(mix, dice, wanted)
        run.send([run.now_s] * wanted, prompts.tolist(), outputs.tolist())

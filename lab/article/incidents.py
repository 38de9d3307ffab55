"""What happens to the fleet, and the traffic that goes with it: six incidents as data, and each request drawn before it starts.

Times are seconds as the article and guard know them, rates requests a second over the whole fleet. How fast they are played is
the scene's affair.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from plimsoll.demo.traffic import WORDS

LEAD_S = 40.0  # of calm before anything happens
VICTIM = "c"


class Wave(NamedTuple):
    """Requests that come in addition from the beginning of the incident on."""

    rate: float
    lasts_s: float
    prompt: int
    output: int


class Incident(NamedTuple):
    """One of them."""

    name: str
    title: str
    says: str
    right: str  # what a good watcher would do
    lasts_s: float  # how long it is watched
    calm: float  # requests a second all along
    usual: int  # so many requests at once are nothing out of the ordinary
    wave: Wave | None = None
    fault: str = ""  # what the stand-in VICTIM is told to do
    readers: int = 0  # clients that ask about their own long document again and again
    document: int = 0  # its tokens
    answer: int = 0


CALM_PROMPT, CALM_OUTPUT = 300, 150
INCIDENTS = (
    Incident(
        "burst", "a burst fills the KV cache",
        "for a minute nearly three times as many long requests as the engines can serve: caches over 95 %, preemptions, a "
        "queue that is gone some two minutes later",
        "nothing, or tell new requests to wait", 300.0, 0.6, 14, wave=Wave(3.0, 60.0, 1_500, 600),
    ),
    Incident(
        "full", "a full cache that works well",
        "nine clients, each with a long document of its own, ask about it again and again: every cache is over 95 % full, the "
        "documents are found in the prefix cache, nobody waits",
        "nothing", 300.0, 0.0, 11, readers=9, document=6_420, answer=160,
    ),
    Incident(
        "hang", "an engine that hangs",
        "one engine makes no more steps and answers nobody; its /health says 200 and its page stays as it was",
        "restart that one", 420.0, 1.5, 24, fault="wedge",
    ),
    Incident(
        "death", "an engine that dies",
        "one engine runs out of memory in a step and ends, with exit code 0 as vLLM does",
        "start that one again", 240.0, 1.5, 24, fault="oom",
    ),
    Incident(
        "overload", "a slow overload",
        "for five minutes half as much again as the engines can serve: no cache is full, and the queue grows all the time",
        "tell new requests to wait", 520.0, 0.6, 60, wave=Wave(1.65, 300.0, 100, 1_200),
    ),
    Incident(
        "idle", "a quiet night",
        "no request at all for five minutes",
        "nothing", 300.0, 0.0, 2,
    ),
)  # fmt: skip
NAMES = tuple(one.name for one in INCIDENTS)


class Arrival(NamedTuple):
    """One request of the schedule; the incident begins at 0."""

    at_s: float
    prompt: int
    output: int
    stream: bool
    text: str


def schedule(incident: Incident, seed: int) -> list[Arrival]:
    """Every request that does not wait for another: the same for the same seed, whoever watches."""
    chance = random.Random(f"{incident.name} {seed}")
    coming = _poisson(chance, incident.calm, -LEAD_S, incident.lasts_s, CALM_PROMPT, CALM_OUTPUT)
    if incident.wave is not None:
        wave = incident.wave
        coming += _poisson(chance, wave.rate, 0.0, wave.lasts_s, wave.prompt, wave.output)
    found = []
    for place, (at_s, prompt, output) in enumerate(sorted(coming)):
        found.append(Arrival(at_s, prompt, output, place % 2 == 0, words(chance, prompt)))
    return found


def _poisson(
    chance: random.Random, rate: float, begin_s: float, end_s: float, prompt: int, output: int
) -> list[tuple[float, int, int]]:
    found, at_s = [], begin_s
    while rate and (at_s := at_s + chance.expovariate(rate)) < end_s:
        found.append((at_s, prompt, output))
    return found


def documents(incident: Incident, seed: int) -> list[str]:
    """One for each reader, no two of them alike."""
    chance = random.Random(f"{incident.name} documents {seed}")
    return [words(chance, incident.document) for _ in range(incident.readers)]


def words(chance: random.Random, count: int) -> str:
    """So many words, each of them one token to a stand-in."""
    return " ".join(chance.choices(WORDS, k=count))

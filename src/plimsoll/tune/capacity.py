"""Finds how many servers keep a promise and how much more traffic they take, by replaying fleets behind a least-load router.

    share
    100 % |                    .--------   3 servers
          |             .-----'            2
     99 % |- - - - - - + - - - - - - - -   the share to keep
          |      .----'                    1
          +-------------------------------- requests a second

Servers are added until the share of requests served as promised is kept; then the traffic is sped up until it is not.
Both are found by doubling and halving, and every replay is part of the answer. Nothing is random.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_named
from plimsoll.tune.goodput import Job, Score, Traffic, score

MOST_SERVERS = 256
FASTEST = 8.0  # times as much traffic; beyond it the answer is "more than"
CLOSE = 0.03  # how near the highest rate is found, as a share of it


@dataclass(frozen=True, slots=True)
class FleetTrial:
    """One replay of a fleet."""

    servers: int
    speedup: float  # over the traffic in question
    requests: int  # without those that are longer than the model or the cache allows
    met: int  # served as promised
    requests_per_second: float  # that came
    rejected: int = 0  # longer than the model or the cache allows
    ttft_p99: float = 0.0  # seconds; 0 where nothing finished
    refused: int = 0  # they came when the queue was full, and are not served as promised

    @property
    def share(self) -> float:
        """The share of requests served as promised, of those that can be served at all."""
        return self.met / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer."""

    keep: float  # the share of requests that must be served as promised
    servers: int | None  # the fewest that keep it; None: no number that was tried
    highest: FleetTrial | None  # these servers with the most traffic that they still keep it for
    is_bounded: bool  # a trial with more traffic than `highest` broke it
    trials: tuple[FleetTrial, ...]  # every replay, in the order of servers and traffic

    @property
    def now(self) -> FleetTrial | None:
        """The trial of the fewest servers with the traffic as it is."""
        return next((one for one in self.trials if one.servers == self.servers and one.speedup == 1.0), None)

    def is_better_than(self, other: Capacity) -> bool:
        """True if fewer servers keep the promise, or as many keep it for a rate that is higher by more than CLOSE."""
        if self.servers is None or self.highest is None or other.servers is None or other.highest is None:
            return self.servers is not None and other.servers is None
        if self.servers != other.servers:
            return self.servers < other.servers
        return self.highest.speedup > other.highest.speedup * (1 + CLOSE)


def find_capacity(
    traffic: Traffic, job: Job, keep: float, most_servers: int = MOST_SERVERS, *, servers: int | None = None
) -> Capacity:
    """The fewest servers of this setting that keep the promise, or so many, and the highest rate that they keep it for."""
    trials: dict[tuple[int, float], FleetTrial] = {}

    def keeps(servers: int, speedup: float = 1.0) -> bool:
        if (servers, speedup) not in trials:
            trials[servers, speedup] = replay_fleet(traffic, job, servers, speedup)
        return trials[servers, speedup].share >= keep

    def answer(servers: int | None, highest: float, *, is_bounded: bool) -> Capacity:
        ordered = tuple(trials[key] for key in sorted(trials))
        return Capacity(keep, servers, trials.get((servers or 0, highest)), is_bounded, ordered)

    enough = servers or 1
    while not keeps(enough):
        # If twice as many servers keep no more promises, the server itself is too slow.
        if servers or enough >= most_servers or (enough >= 4 and trials[enough, 1.0].met <= trials[enough // 2, 1.0].met):
            return answer(None, 1.0, is_bounded=False)
        enough = min(most_servers, 2 * enough)
    few = enough // 2 if servers is None else enough - 1  # does not keep it, or is 0, or is not asked for
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if keeps(middle) else (middle, enough)
    low, high = 1.0, 2.0
    while keeps(enough, high):
        if high >= FASTEST:
            return answer(enough, high, is_bounded=False)
        low, high = high, 2 * high
    while high / low > 1 + CLOSE:
        middle_rate = round((low * high) ** 0.5, 4)
        low, high = (middle_rate, high) if keeps(enough, middle_rate) else (low, middle_rate)
    return answer(enough, low, is_bounded=True)


def card_word(word: str) -> tuple[str, int]:
    """Splits `L40Sx4`, one server on four L40S, into the card and the number; no card's own name ends like that."""
    name, times, count = word.strip().rpartition("x")
    if times and name and count.isdigit() and 0 < int(count) <= 64:
        return name, int(count)
    return word.strip(), 1


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars an hour for one card, by its name, and the date of the prices."""

    date: str
    usd_per_hour: dict[str, float]

    def of(self, card: str) -> float | None:
        """The price of a card by any of its names; None where the file has none."""
        wanted = gpu_named(card).name
        for name, price in self.usd_per_hour.items():
            with contextlib.suppress(BadInput):
                if gpu_named(name).name == wanted:
                    return price
        return None


def replay_fleet(traffic: Traffic, job: Job, servers: int, speedup: float = 1.0) -> FleetTrial:
    """Replays `servers` servers with the traffic `speedup` times as fast; no request is served where the setting cannot run."""
    trace, span_s = traffic.trace, traffic.span_s / speedup
    rate = trace.size / span_s if span_s > 0 else 0.0
    try:
        found: Score = score(job.replay(traffic, servers, speedup), traffic.slo)
    except BadInput:
        return FleetTrial(servers, speedup, trace.size, 0, rate)
    served = found.requests - found.rejected
    return FleetTrial(servers, speedup, served, found.met, rate, found.rejected, found.ttft_p99 or 0.0, found.refused)

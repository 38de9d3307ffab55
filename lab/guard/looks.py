"""From a stand-in to a look, without a page of text: what guard's sources would have read of it, fast.

    watched = Watched(stand_in(...), has_canary=True, dice=random.Random(1))
    for look in watched.looks(600.0, feed): judge.see(look)

The memory of a real process is never as still as a stand-in's: with `dice` the host's figures wander, and what other
processes hold moves by some MiB.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plimsoll.guard.judge.look import Canary, CardState, GateState, Look, Reach, WorkerMemory
from plimsoll.standin import StandIn
from plimsoll.standin.request import EngineRequest

MIB = float(1 << 20)
EVERY_S = 5.0
CANARY_EVERY_S = 30.0
CANARY_WITHIN_S = 10.0
RATE_S = 60.0
NS = 1e9
UNIX_S = 1_700_000_000.0

Feed = Callable[[StandIn, float, float], None]
"""What arrives between two moments: it sends it. Called only while somebody answers."""


class Sight(NamedTuple):
    """What can be seen of an engine beside its page."""

    has_probe: bool = True
    has_gate: bool = False
    has_canary: bool = True
    has_start_time: bool = True
    has_cards: bool = True
    workers: int = 1
    keeps_door_open: bool = False
    """A dead engine's server goes on listening and says 503 (VLLM_KEEP_ALIVE_ON_ENGINE_DEATH)."""


PLAIN = Sight()


class Watched:
    """One stand-in and what guard knows of it."""

    def __init__(self, engine: StandIn, sight: Sight = PLAIN, dice: random.Random | None = None) -> None:
        self.engine = engine
        self.sight = sight
        self._dice = dice
        self._canary: Canary | None = None
        self._asked: EngineRequest | None = None
        self._asked_at_s = -CANARY_EVERY_S
        self._life, self._begin_s = engine.restarts, engine.now_s - engine.engine.now_ns / NS
        self._steps, self._stepped_at_s = 0, engine.now_s
        self._rates: list[tuple[float, float]] = []
        self._wander = [0.0] * 4
        self._settled = 0.0

    def looks(self, seconds: float, feed: Feed | None = None, every_s: float = EVERY_S) -> Iterator[Look]:
        """A look after each interval of so many seconds from now; `feed` sends what arrives in it."""
        engine = self.engine
        begin_s = engine.now_s
        for number in range(1, int(seconds / every_s) + 1):
            before_s, now_s = engine.now_s, begin_s + number * every_s
            if feed is not None and engine.is_up:
                feed(engine, before_s, now_s)
            engine.until(now_s)
            yield self.look()

    def look(self) -> Look:
        engine, now_s = self.engine, self.engine.now_s
        if engine.restarts != self._life:
            self._life, self._begin_s = engine.restarts, now_s - engine.engine.now_ns / NS
            self._asked, self._steps, self._rates, self._settled = None, 0, [], 0.0
        self._mind_canary(now_s)
        unix_s = UNIX_S + now_s
        if not engine.is_up:
            if engine.engine.is_dead and self.sight.keeps_door_open:
                return Look(now_s, unix_s, Reach.ANSWERS, health=503, figures=self._figures(), canary=self._shown())
            return Look(now_s, unix_s, Reach.REFUSED, "nobody listens", canary=self._shown())
        figures = self._figures()
        workers = self._workers() if self.sight.has_probe else ()
        return Look(
            now_s, unix_s, Reach.ANSWERS, "", 200, figures,
            UNIX_S + self._begin_s if self.sight.has_start_time else None,
            engine.config.release, engine.config.cache_labels,
            self._gate(now_s, figures) if self.sight.has_gate else None,
            workers, (_CARD,) if self.sight.has_cards else (), self._shown(),
        )  # fmt: skip

    def _figures(self) -> dict[str, float]:
        shown = self.engine.figures
        return {
            "running": shown.running, "waiting": shown.waiting, "kv_cache_usage": shown.kv_usage, "steps": shown.steps,
            "preemptions": shown.preemptions, "prompt_tokens": shown.prompt_tokens,
            "generation_tokens": shown.generation_tokens, "success": sum(shown.success.values()),
            "prefix_queries": shown.prefix_queries, "prefix_hits": shown.prefix_hits,
            "asleep": 0.0 if shown.sleep_state == "awake" else 1.0, "cpu_seconds": 0.1 * self.engine.now_s,
        }  # fmt: skip

    # The canary: a request of one token, and whether it ended in time

    def _mind_canary(self, now_s: float) -> None:
        asked = self._asked
        if not self.sight.has_canary:
            return
        if not self.engine.is_up:
            self._asked = self._canary = None
            return
        if asked is not None:
            is_answered = asked.finish is not None and asked.finished_ns - asked.arrival_ns <= CANARY_WITHIN_S * NS
            if is_answered or now_s - self._asked_at_s >= CANARY_WITHIN_S:
                self._canary = Canary(self._asked_at_s, is_answered, (asked.finished_ns - asked.arrival_ns) / NS)
                self.engine.engine.abort(asked, round((now_s - self._begin_s) * NS))
                self._asked = asked = None
        if asked is None and now_s - self._asked_at_s >= CANARY_EVERY_S:
            self._asked, self._asked_at_s = self.engine.ask(8, 1), now_s

    def _shown(self) -> Canary | None:
        return self._canary

    # The gate

    def _gate(self, now_s: float, figures: dict[str, float]) -> GateState:
        steps = int(figures["steps"])
        if steps != self._steps:
            self._steps, self._stepped_at_s = steps, now_s
        requests = len(self.engine.engine.requests)
        wait_s = self._expected_wait(now_s, figures)
        age_s = now_s - self._stepped_at_s
        return GateState(
            ready=True, reason="", in_flight=requests, engine_requests=requests, expected_wait_s=wait_s, last_step_age_s=age_s
        )

    def _expected_wait(self, now_s: float, figures: dict[str, float]) -> float | None:
        """As the gate reckons it: what waits, by what the engine has lately done in a second."""
        done = figures["prompt_tokens"] + figures["generation_tokens"]
        rates = self._rates
        rates.append((now_s, done))
        while rates[0][0] < now_s - RATE_S:
            rates.pop(0)
        if not figures["waiting"]:
            return 0.0
        (then_s, before), ended = rates[0], figures["success"]
        if done <= before or not ended:
            return None
        return figures["waiting"] * (done / ended) * (now_s - then_s) / (done - before)

    # The workers' memory

    def _workers(self) -> tuple[WorkerMemory, ...]:
        found = self.engine.engine.memory.figures()
        torch, device, host = found["allocator"], found["device_memory"], found["host_memory"]
        host_noise, torch_noise, others_noise = self._noise()
        one = WorkerMemory(
            "0", 0.5, torch["allocated"], torch["reserved"], torch["releasable"], torch["unreleasable"] + torch_noise,
            torch["alloc_retries"], torch["ooms"], device["total"], device["free"], device["by_others"] + others_noise,
            host["resident"] + host_noise, host["limit"],
        )  # fmt: skip
        return (one, *(one._replace(rank=str(rank)) for rank in range(1, self.sight.workers)))

    def _noise(self) -> tuple[float, float, float]:
        """Some MiB: a slow wander about where it settled, which rises in the first hour of a process and jumps now and then."""
        if self._dice is None:
            return 0.0, 0.0, 0.0
        gauss, wander = self._dice.gauss, self._wander
        wander[0] = 0.98 * wander[0] + gauss(0.0, 2.0 * MIB)
        wander[1] = 0.95 * wander[1] + gauss(0.0, 1.0 * MIB)
        wander[2] += (150.0 * MIB - wander[2]) / 700.0 if self._settled else -wander[2]
        self._settled = 1.0
        if self._dice.random() < 1e-4:
            wander[3] += self._dice.uniform(-60.0, 60.0) * MIB
            wander[3] = max(0.0, min(400.0 * MIB, wander[3]))
        return wander[0] + wander[2] + wander[3], abs(wander[1]), abs(gauss(0.0, 2.0 * MIB))


_CARD = CardState("0", (), 0)

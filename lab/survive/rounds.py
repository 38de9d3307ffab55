"""Rounds of faults under streaming clients: clients send one request after the other while faults come and go."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lab.survive.clients import Answer, Ask, ask_all, ask_one, differences, mistakes
from lab.survive.server import SurviveServer

EVERY_STEP = ("early", "forward", "layer", "logits", "sampler", "sampled")
TEXT_SITES = (*EVERY_STEP, "prompt_logprobs")
CLIENTS = 32
LONGEST_S = 180.0


@dataclass(frozen=True)
class Reference:
    """The answers of an undisturbed server, and how many of the greedy ones two undisturbed runs answer differently."""

    asks: list[Ask]
    answers: list[Answer]
    allowed: int

    @classmethod
    def of(cls, port: int, asks: Sequence[Ask]) -> Self:
        """Ask twice; whatever is wrong without any fault is an error."""
        first, second = (asyncio.run(ask_all(port, asks, at_once=CLIENTS)) for _ in range(2))
        wrong = [each for answer in (*first, *second) for each in mistakes(answer)]
        assert not wrong, f"wrong without any fault: {wrong[:3]}"
        pairs = [(one, other) for one, other in zip(second, first, strict=True) if not one.ask.is_sampled]
        return cls(list(asks), first, sum(bool(differences(one, other)) for one, other in pairs))

    @property
    def allowed_share(self) -> float:
        """The share of greedy answers that differs between two runs without faults."""
        return self.allowed / sum(not ask.is_sampled for ask in self.asks)


class Clients:
    """So many clients in a thread of their own, each of which sends its next request when the last one has ended."""

    def __init__(self, port: int, reference: Reference, count: int = CLIENTS, seed: int = 0) -> None:
        self.answers: list[tuple[int, Answer]] = []
        """Each with the number of its request in the reference."""
        self.longest_s = 0.0  # that any request took
        self._port, self._reference, self._count = port, reference, count
        self._dice = random.Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(LONGEST_S)
        if kind is None:
            assert not self._thread.is_alive(), "clients still wait for their answers"

    async def _all(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._count)))

    async def _client(self) -> None:
        while not self._is_over.is_set():
            number = self._dice.randrange(len(self._reference.asks))
            began = time.monotonic()
            answer = await ask_one(self._port, self._reference.asks[number])
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.answers.append((number, answer))
            if answer.error:
                await asyncio.sleep(0.2)  # a server that is gone must not be asked a million times

    def wait_answers(self, count: int, limit_s: float = 60.0) -> None:
        """Return when so many answers have come; fail when they do not."""
        deadline = time.monotonic() + limit_s
        while len(self.answers) < count:
            assert time.monotonic() < deadline, f"nobody was answered for {limit_s:.0f} s"
            time.sleep(0.02)

    def tokens(self) -> int:
        """Tokens that came so far in whole answers."""
        return sum(len(tokens) for _, answer in list(self.answers) for tokens in answer.tokens)

    def mistakes(self) -> list[str]:
        """What is wrong with the answers by themselves."""
        return [each for _, answer in self.answers for each in mistakes(answer)]

    def greedy(self) -> list[tuple[Answer, Answer]]:
        """Whole greedy answers, each with the undisturbed one."""
        return [
            (answer, self._reference.answers[number])
            for number, answer in self.answers
            if not answer.ask.is_sampled and not answer.error
        ]

    def differences(self) -> list[str]:
        """Of each greedy answer that differs from the undisturbed one: where."""
        return [found[0] for answer, wanted in self.greedy() if (found := differences(answer, wanted))]

    def noticed(self) -> list[str]:
        """What a client saw of what happened: mistakes, or more differences than two undisturbed runs have."""
        found = self.differences()
        return self.mistakes() or (found if len(found) > self._reference.allowed_share * len(self.greedy()) else [])

    def told(self) -> str:
        """How much was asked, and how much of it differs."""
        greedy, found = len(self.greedy()), len(self.differences())
        return f"{len(self.answers)} answers, {self.tokens()} tokens, {found} of {greedy} greedy ones differ"


def play_rounds(server: SurviveServer, clients: Clients, rounds: int, seed: int, sites: Sequence[str] = TEXT_SITES) -> None:
    """Raise so many faults, one at a time, somewhere in the steps of whatever the clients have sent.

    The next one comes when somebody has been answered: a request that fails three times without a token in between is aborted.
    """
    dice = random.Random(seed)
    before = len(server.raised())
    for number in range(rounds):
        site = dice.choice(sites)
        server.set_faults({"site": site, "every": dice.randint(1, 9) if site in EVERY_STEP else 1, "times": 1})
        server.wait_raised(before + number + 1)
        clients.wait_answers(len(clients.answers) + 1)
    server.set_faults()

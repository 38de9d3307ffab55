"""What is asked of an engine, and one request while it is with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from plimsoll.standin.text import Ids, draw


class Family:
    """The several answers to one prompt: vLLM counts some things once for all of them."""

    __slots__ = ("left", "longest")

    def __init__(self, size: int) -> None:
        self.left = size
        self.longest = 0


class Ask(NamedTuple):
    """What a request wants of the engine."""

    prompt: Ids
    output: int
    """How many tokens it will produce."""
    seed: int = 0
    """What those tokens are drawn from."""
    reason: str = "length"
    """How it ends: "length" or "stop"."""
    max_tokens: int | None = None
    priority: int = 0
    n: int = 1
    family: Family | None = None
    """Of a request that is one of n."""
    shared: int | None = None
    """How many of its first tokens another request could have, too; None: any, those of the answer among them."""


class Request:
    """One that is with the engine. Times are ns since the engine's start, -1 for what has not come yet."""

    __slots__ = (
        "_output_ids", "arrival_ns", "ask", "cached_tokens", "finish", "finished_ns", "first_ns", "number", "preemptions",
        "produced", "scheduled_ns", "wake",
    )  # fmt: skip

    def __init__(self, ask: Ask, arrival_ns: int, wake: Callable[[], None]) -> None:
        self.ask = ask
        self.arrival_ns = arrival_ns
        self.wake = wake
        self.number = -1  # held back while the engine is paused
        self.produced = self.cached_tokens = self.preemptions = 0
        self.scheduled_ns = self.first_ns = self.finished_ns = -1
        self.finish: str | None = None
        self._output_ids: Ids | None = None

    @property
    def output_ids(self) -> Ids:
        """All the tokens it will have produced."""
        if self._output_ids is None:
            self._output_ids = draw(self.ask.seed, self.ask.output)
        return self._output_ids

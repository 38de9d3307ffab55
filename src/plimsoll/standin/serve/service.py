"""What all endpoints of one server share: its engine, its time, its limits, and the answers that are in the making."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from plimsoll.standin.engine import Engine, EngineDead
from plimsoll.standin.request import Ask, Request
from plimsoll.standin.serve import fields
from plimsoll.standin.serve.driver import Driver
from plimsoll.standin.serve.fields import Options


class Choice:
    """One answer in the making: a request of the engine. The gate looks at these as it does at vLLM's own."""

    __slots__ = (
        "_hear",
        "_service",
        "index",
        "is_over",
        "is_streamed",
        "key",
        "name",
        "prompt_len",
        "request",
        "sent",
        "stop",
        "text",
    )

    def __init__(self, name: str, index: int, prompt_len: int, hear: Waiter, service: Service) -> None:
        self.name = name
        self.key = name  # by which it is found among those that are with the engine: clients may use a name twice
        self.index = index
        self.prompt_len = prompt_len
        self.request: Request | None = None
        self.sent = 0  # tokens that the client has been told of
        self.is_over = False  # and that it has ended
        self.is_streamed = True  # else its client need not be told before it has ended
        self.stop: str | int | None = None
        self.text: Any = None
        self._hear = hear
        self._service = service

    @property
    def is_prefilling(self) -> bool:
        """Whether it has no token yet."""
        return self.request is None or self.request.produced == 0

    def wake(self) -> None:
        """The engine has something for it."""
        if self.request is not None and self.request.finish is not None:
            self._service.states.pop(self.key, None)
        elif not self.is_streamed:
            return
        self._service.driver.wake_soon(self._hear.wake)


class Waiter:
    """Where the one coroutine of a client's request waits; woken once for any number of calls."""

    __slots__ = ("_future", "_is_set", "is_gone")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._is_set = False
        self.is_gone = False  # the client

    def wake(self) -> None:
        """Something is new."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
        else:
            self._is_set = True

    async def wait(self) -> None:
        """Until something is new since the last time."""
        if not self._is_set:
            self._future = asyncio.get_running_loop().create_future()
            await self._future
            self._future = None
        self._is_set = False


class Service:
    """One server."""

    def __init__(self, engine: Engine, driver: Driver, options: Options) -> None:
        self.engine = engine
        self.driver = driver
        self.options = options
        self.states: dict[str, Choice] = {}
        self._handed_in = 0
        self.is_stopping = False
        self.load = 0
        self.woken: set[str] = set()  # parts of a sleeping engine
        self.on_death: Callable[[], None] | None = None
        self.on_give_up: Callable[[Request], None] | None = None
        self.on_sleep: Callable[[bool, int], None] | None = None
        self.names = engine.config.served_names
        self.fingerprint = f"vllm-{engine.config.release}-{engine.config.seed & 0xFFFFFFFF:08x}"

    def check_model(self, name: object) -> None:
        """404 for a model that it does not serve; no name is any."""
        if name and name not in self.names:
            raise fields.no_model(name, self.names)

    def admit(self, count: int) -> None:
        """Refuse what must be refused before an answer begins: the engine is dead, or the queue is full."""
        if self.engine.is_dead:
            raise fields.dead()
        limits, rejected = self.options, self.engine.figures.rejected
        if limits.max_num_queued_reqs is not None and len(self.states) + count > limits.max_num_queued_reqs:
            rejected["max_num_queued_reqs"] += 1
            raise fields.plain(503, fields.QUEUE_FULL)
        if limits.max_num_queued_tokens is not None and self.queued_tokens() >= limits.max_num_queued_tokens:
            rejected["max_num_queued_tokens"] += 1
            raise fields.plain(503, fields.TOKENS_FULL)

    def queued_tokens(self) -> int:
        """Prompt tokens of those that have answered nothing yet."""
        return sum(choice.prompt_len for choice in self.states.values() if choice.is_prefilling)

    def submit(self, choice: Choice, ask: Ask) -> None:
        """Hand it to the engine. One that is told to end takes nothing new, and says so by ending it at once."""
        if self.is_stopping:
            choice.request = Request(ask, self.driver.now_ns(), choice.wake)
            choice.request.finish = "abort"
            return choice.wake()
        try:
            choice.request = self.driver.submit(ask, choice.wake)
        except EngineDead:
            raise fields.dead() from None
        self._handed_in += 1
        choice.key = f"{choice.name}-{self._handed_in:x}"
        self.states[choice.key] = choice
        return None

    def give_up(self, choices: Sequence[Choice]) -> None:
        """Their client has gone: take them back."""
        for choice in choices:
            self.states.pop(choice.key, None)
            if choice.request is not None and choice.request.finish is None:
                self.driver.abort(choice.request)
                if self.on_give_up is not None:
                    self.on_give_up(choice.request)

    def abort(self, choices: Sequence[Choice]) -> None:
        """End them; their clients are told so."""
        for choice in choices:
            if choice.request is not None and choice.request.finish is None:
                self.driver.abort(choice.request, is_told=True)

    def tell_death(self) -> None:
        """Whoever keeps the port open is told that a client has met a dead engine."""
        if self.on_death is not None:
            self.on_death()

    def tell_sleep(self, *, is_asleep: bool, level: int) -> None:
        """Whoever listens to the engine is told that it sleeps or wakes."""
        if self.on_sleep is not None:
            self.on_sleep(is_asleep, level)

    def created(self) -> int:
        """Now, as answers have it."""
        return int(time.time())

"""A test request of one token, now and then: the only thing that shows whether an engine still makes tokens.

It runs beside the looks, over a connection of its own, never more than one at a time. Only an engine that took the request
and said nothing until the deadline has failed it. Whatever else goes wrong says nothing about the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.domain.look import Canary
from plimsoll.sources.engine_http import Client, bearer
from plimsoll.sources.http_answer import Late, Missed

ANSWER_MAX = 1 << 20
ASK_AGAIN_S = 300.0
LINGER_S = 5.0  # by then a server has seen that nobody waits any more
PATH = "/v1/completions"
PLAIN_SPACE = "\n\r\t"


class CanaryPlan(NamedTuple):
    """How often to ask, and what it takes."""

    every_s: float = 30.0
    deadline_s: float = 20.0
    model: str | None = None  # None: by the name that the page shows
    api_key: str | None = None


class CanaryAsker:
    """Asks one engine."""

    def __init__(self, url: str, plan: CanaryPlan) -> None:
        self.last: Canary | None = None
        self._plan = plan
        self._auth = {} if plan.api_key is None else bearer(plan.api_key)
        self._client = Client(url)
        self._task: asyncio.Task[None] | None = None
        self._next_s: float | None = None
        self._given_up_s: float | None = None

    @property
    def is_asking(self) -> bool:
        """Whether one is under way."""
        return self._task is not None and not self._task.done()

    @property
    def may_be_counted(self) -> bool:
        """Whether the server may count one among its requests: it is under way, or was given up a moment ago."""
        return self.is_asking or (self._given_up_s is not None and _now_s() - self._given_up_s < LINGER_S)

    def begin(self, now_s: float, model: str | None) -> None:
        """Send one if it is time; the answer is in `last` at some later look."""
        name = self._plan.model or model
        if name is None or self.is_asking or (self._next_s is not None and now_s < self._next_s):
            return
        self._next_s = now_s + self._plan.every_s
        self._task = asyncio.get_running_loop().create_task(self._ask(now_s, name))

    async def close(self) -> None:
        """Take back what is under way, and hang up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._client.close()

    async def _ask(self, at_s: float, model: str) -> None:
        began, plan = _now_s(), self._plan
        body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
        try:
            reply = await self._client.post(PATH, body, deadline_s=plan.deadline_s, most_bytes=ANSWER_MAX, headers=self._auth)
        except Late as error:
            self._given_up_s = _now_s()
            is_failed = error.was_sent and not error.was_begun
            self.last = Canary(at_s, False if is_failed else None, plan.deadline_s if is_failed else None)
        except Missed:
            self.last = Canary(at_s, None)
        else:
            seconds = _now_s() - began
            self._client.close()  # the next one is long after a server has hung up
            if reply.status == 200:
                self.last = Canary(at_s, True, seconds, is_garbage(reply.body))  # noqa: FBT003 - the field's own value
            else:
                self.last = Canary(at_s, None)
                if 400 <= reply.status < 500 and reply.status != 429:  # this server does not take such a request
                    self._next_s = at_s + ASK_AGAIN_S


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def is_garbage(body: bytes) -> bool:
    """Whether an answer to a completion holds no text: none at all, or letters that are none."""
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        text = choice["text"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return True
    if not isinstance(text, str):
        return True
    if text == "":  # a first token that ends the answer has no text, and is none the worse for it
        return _reason(choice) != "stop"
    return "\ufffd" in text or not all(letter.isprintable() or letter.isspace() or letter in PLAIN_SPACE for letter in text)


def _reason(choice: Mapping[str, Any]) -> object:
    return choice.get("finish_reason")

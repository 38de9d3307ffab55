"""A test request of one token, now and then: the only thing that shows whether an engine still makes tokens.

It runs beside the looks, over a connection of its own, never more than one at a time. Only an engine that took the request
and said nothing until the deadline has failed it. Whatever else goes wrong says nothing about the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import NamedTuple

from plimsoll.guard.act.outcome import Outcome, done, failed, unsure
from plimsoll.guard.daemon.engine_http import Client, Late, Missed, Reply
from plimsoll.guard.judge.look import Canary
from plimsoll.net.cluster import bearer

ANSWER_MAX = 1 << 20
ASK_AGAIN_S = 300.0
LINGER_S = 5.0  # by then a server has seen that nobody waits any more
PATH = "/v1/completions"
# What follows is a number, in whatever language a model was taught: never half a letter of another script.
PROMPT = "1, 2, 3, 4, 5,"
NO_LETTER = "\ufffd"
UNKNOWN_TOKENS = ("<unk>", "<UNK>", "[UNK]")  # what a model says whose sums came out as no numbers: its token 0


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
        self._shows_key = False
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
        if self.is_asking or (self._next_s is not None and now_s < self._next_s):
            return
        if name is None:
            self.last = Canary(now_s, None, why="which model it serves is not known")
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
        plan = self._plan
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "skip_special_tokens": False}
        body = json.dumps(asked).encode()
        try:
            reply = await self._sent(body)
        except Late as error:
            self._given_up_s = _now_s()
            if error.was_sent and not error.was_begun:
                self.last = Canary(at_s, False, plan.deadline_s)  # noqa: FBT003 - the field's own value
            else:
                what = "it began to answer and did not end" if error.was_begun else "it could not be reached"
                self.last = Canary(at_s, None, why=f"{what} within {plan.deadline_s:g} s")
        except Missed as error:
            self.last = Canary(at_s, None, why=f"it {error.why}")
        else:
            self._client.close()  # the next one is long after a server has hung up
            self._take(reply, at_s, model)

    async def _sent(self, body: bytes) -> Reply:
        """The key is shown only to a server that asks for one: a list of engines may name any server."""
        deadline_s = self._plan.deadline_s
        if not self._shows_key:
            reply = await self._client.post(PATH, body, deadline_s=deadline_s, most_bytes=ANSWER_MAX)
            if reply.status != 401 or not self._auth:
                return reply
            self._shows_key = True
        return await self._client.post(PATH, body, deadline_s=deadline_s, most_bytes=ANSWER_MAX, headers=self._auth)

    def _take(self, reply: Reply, at_s: float, model: str) -> None:
        if reply.status != 200:
            self.last = Canary(at_s, None, why=refused(reply, model, has_key=bool(self._auth)), status=reply.status)
            if 400 <= reply.status < 500 and reply.status != 429:  # this server does not take such a request
                self._next_s = at_s + ASK_AGAIN_S
            return
        found = is_garbage(reply.body)
        if found is None:
            self.last = Canary(at_s, None, why=f"it answers {PATH} with something that is no completion")
        else:
            self.last = Canary(at_s, True, reply.seconds, found)  # noqa: FBT003 - the field's own value


def refused(reply: Reply, model: str, *, has_key: bool = False) -> str:
    """Why a server did not take the request, in words."""
    if reply.status == 401:
        return "the engine does not take this API key" if has_key else "the engine wants an API key"
    if reply.status == 403:
        return "the engine does not allow it (403)"
    if reply.status == 404:
        if b"model" in reply.body.lower():  # vLLM's words for a name it does not serve; of a path it says "Not Found" alone
            return f"the engine does not serve a model of the name {model[:100]!r}"
        return f"the engine does not serve {PATH}"
    if reply.status == 429:
        return "the engine has too much to do for it (429)"
    return f"the engine answers {PATH} with {reply.status}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def is_garbage(body: bytes) -> bool | None:
    """Whether the token of a completion is no text: nothing at all, half a letter, or letters that nobody prints.

    None if this is no completion: then it says nothing about the model. Log-probabilities would show sums that came out as no
    numbers, but they are not asked for: vLLM would work them out for its whole batch, in memory that it has not set aside.
    """
    try:
        choice = json.loads(body)["choices"][0]
        text, reason = choice["text"], choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(text, str):
        return None
    if text == "":  # a first token that ends the answer has no text, and is none the worse for it
        return bool(reason == "length")
    return text.strip() in UNKNOWN_TOKENS or all(letter == NO_LETTER or _is_control(letter) for letter in text)


def _is_control(letter: str) -> bool:
    return not letter.isprintable() and not letter.isspace()


# Which model an engine serves and how long a request may be; and one request to warm it up.

MODELS = "/v1/models"
LARGEST_MODELS_LIST = 4 << 20
DEADLINE_S = 10.0
WARM_S = 120.0  # the first request of a process may compile
LOOK_EVERY_S = 0.1


class Served(NamedTuple):
    """One model."""

    name: str
    context: float | None  # tokens


async def served(url: str, api_key: str | None = None, *, deadline_s: float = DEADLINE_S) -> Served | None:
    """The first model that it lists; None where it does not tell."""
    client = Client(url)
    try:
        reply = await client.get(MODELS, deadline_s=deadline_s, most_bytes=LARGEST_MODELS_LIST)
        if reply.status == 401 and api_key is not None:
            reply = await client.get(MODELS, deadline_s=deadline_s, most_bytes=LARGEST_MODELS_LIST, headers=bearer(api_key))
    except Missed:
        return None
    finally:
        client.close()
    if reply.status != 200:
        return None
    try:
        first = json.loads(reply.body)["data"][0]
        name, context = first["id"], first.get("max_model_len")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    is_number = isinstance(context, int) and not isinstance(context, bool) and 0 < context < 2**53
    return Served(name, float(context) if is_number else None) if isinstance(name, str) and 0 < len(name) < 1000 else None


async def warm(url: str, api_key: str | None = None, *, deadline_s: float = WARM_S) -> Outcome:
    """One request of one token: answered, or not."""
    model = await served(url, api_key)
    if model is None:
        return unsure("which model it serves is not known: no request was sent")
    asker = CanaryAsker(url, CanaryPlan(deadline_s=deadline_s, model=model.name, api_key=api_key))
    try:
        asker.begin(0.0, model.name)
        while asker.is_asking:
            await asyncio.sleep(LOOK_EVERY_S)
        answer = asker.last
    finally:
        await asker.close()
    if answer is not None and answer.status == 500:  # it took the request and broke over it; a refusal has another number
        return failed("the first request failed: the engine answered it with 500")
    if answer is None or answer.is_answered is None:
        return unsure(f"the first request could not be made: {'' if answer is None else answer.why}")
    if not answer.is_answered:
        return failed(f"the first request got no answer in {deadline_s:.0f} s")
    if answer.is_garbage:
        return failed("the first request was answered with what is no text")
    return done(f"the first request was answered in {answer.seconds or 0.0:.1f} s")

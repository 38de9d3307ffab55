"""One client's request from its prompts to the last token: handed to the engine, waited for, taken back if the client goes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from plimsoll.inside.answers import Receive
from plimsoll.standin.request import RESERVED, Ask, Family, Ids, decode, draw, piece
from plimsoll.standin.serve import fields, sampling
from plimsoll.standin.serve.fields import event_of
from plimsoll.standin.serve.service import Choice, Service, Waiter

HANDED_IN_AT_ONCE = 64  # then others have a turn
PIECES = tuple(piece(token).encode() for token in range(RESERVED))  # letters and a blank: nothing that JSON would escape


class Prompt(NamedTuple):
    """One prompt, and how many tokens may follow it."""

    ids: Ids
    text: str
    most: int


class Text:
    """An answer's text where stop strings are looked for: what is told of it, held back until it is known to be kept."""

    __slots__ = ("_ends", "_hold", "_told", "_whole")

    def __init__(self, whole: str, ends: list[int], hold: int) -> None:
        self._whole = whole
        self._ends = ends
        self._hold = hold
        self._told = 0

    def until(self, tokens: int, *, is_over: bool) -> bytes:
        """What is new of it after so many tokens, ready for JSON."""
        seen = self._ends[tokens - 1] if tokens else 0
        end = min(len(self._whole), seen if is_over else max(self._told, seen - self._hold))
        new, self._told = self._whole[self._told : end], max(self._told, end)
        return new.encode()


class Generation:
    """The choices of one request, in the order in which they are answered."""

    def __init__(self, service: Service, name: str, prompts: Sequence[Prompt], wish: sampling.Wish) -> None:
        self.service = service
        self.name = name
        self.prompts = prompts
        self.wish = wish
        self.created = service.created()
        self.choices: list[Choice] = []
        self.waiter = Waiter()
        self._watch: asyncio.Task[None] | None = None

    async def begin(self, receive: Receive) -> None:
        """Hand all of it to the engine, and have an ear on the client."""
        self._watch = asyncio.get_running_loop().create_task(_listen(receive, self.waiter))
        for prompt in self.prompts:
            family = Family(self.wish.n) if self.wish.n > 1 else None
            for _ in range(self.wish.n):
                index = len(self.choices)
                choice = Choice(f"{self.name}-{index}", index, len(prompt.ids), self.waiter, self.service)
                choice.is_streamed = self.wish.streams
                self.choices.append(choice)
                self.service.submit(choice, _ask(prompt, self.wish, choice)._replace(family=family))
                if len(self.choices) % HANDED_IN_AT_ONCE == 0:
                    await asyncio.sleep(0)
                    if self.waiter.is_gone:
                        return

    async def news(self) -> list[Choice]:
        """The choices that have something new; none when all is told or the client has gone. Refused for a dead engine."""
        while not self.waiter.is_gone:
            found = [choice for choice in self.choices if not choice.is_over and _has_news(choice)]
            if found:
                return found
            if all(choice.is_over for choice in self.choices):
                break
            await self.waiter.wait()
        return []

    async def end(self) -> None:
        """Wait for all of it, for who does not stream."""
        while not self.waiter.is_gone and any(_finish(choice) is None for choice in self.choices):
            await self.waiter.wait()
        for choice in self.choices:
            raise_if_failed(self.service, choice)

    def close(self) -> None:
        """Whatever is left of it is taken back."""
        if self._watch is not None:
            self._watch.cancel()
        self.service.give_up(self.choices)

    def prompt_of(self, choice: Choice) -> Prompt:
        """What a choice answers."""
        return self.prompts[choice.index // self.wish.n]

    def usage(self) -> dict[str, Any]:
        """All the tokens of it, as far as they were told."""
        told = sum(choice.sent for choice in self.choices)
        return usage(sum(len(prompt.ids) for prompt in self.prompts), told)

    def cached(self) -> dict[str, Any] | None:
        """What was found in the prefix cache, where the server tells it."""
        if not self.service.options.has_prompt_tokens_details:
            return None
        last = self.choices[0].request
        return {"cached_tokens": 0 if last is None else last.cached_tokens}


def usage(prompt: int, output: int) -> dict[str, Any]:
    """As vLLM orders it."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def usage_event(found: Generation, top: dict[str, Any]) -> bytes:
    """The last event of a stream, where it is asked for: the usage of all choices."""
    if not found.wish.tells_usage:
        return b""
    details = found.cached()
    told = found.usage() if details is None else {**found.usage(), "prompt_tokens_details": details}
    return event_of({**top, "choices": [], "usage": told, "system_fingerprint": found.service.fingerprint})


def full_usage(generation: Generation) -> dict[str, Any]:
    """As it is in an answer that is no stream."""
    return {**generation.usage(), "prompt_tokens_details": _details(generation), "completion_tokens_details": None}


def _details(generation: Generation) -> dict[str, Any] | None:
    found = generation.cached()
    return None if found is None else {**found, "created_cache_tokens": None, "multimodal_tokens": None}


def tell(choice: Choice) -> tuple[list[int], bytes]:
    """The tokens that are new, and their text, ready for JSON; they count as told."""
    request = choice.request
    assert request is not None, "it was handed in"
    produced, sent = request.produced, choice.sent
    ids: list[int] = request.output_ids[sent:produced].tolist()
    choice.sent = produced
    choice.is_over = request.finish is not None
    if choice.text is None:
        return ids, b"".join([PIECES[token] for token in ids])
    text: Text = choice.text
    return ids, text.until(produced, is_over=choice.is_over)


def finish_of(choice: Choice) -> str | None:
    """Why it ended, once that is told."""
    return _finish(choice) if choice.is_over else None


def stop_of(choice: Choice) -> str | int | None:
    """The stop string or token that it ended at."""
    return choice.stop if _finish(choice) == "stop" else None


def raise_if_failed(service: Service, choice: Choice) -> None:
    """Refused where it was the engine that ended it."""
    if _finish(choice) == "error":
        raise fields.dead() if service.engine.is_dead else fields.Refused(500, "Internal server error", "InternalServerError")


def request_name(prefix: str, headers: Iterable[tuple[bytes, bytes]], given: object) -> str:
    """What a request is called: by its header, its body, or by chance."""
    named = next((bytes(value).decode("latin-1") for name, value in headers if bytes(name).lower() == b"x-request-id"), None)
    return f"{prefix}-{named or (given if isinstance(given, str) else uuid.uuid4().hex[:16])}"


def priority_of(headers: Iterable[tuple[bytes, bytes]], given: int) -> int:
    """How urgent a request is: by its header, else by its body."""
    named = next((bytes(value).decode("latin-1") for name, value in headers if bytes(name).lower() == b"x-vllm-priority"), "")
    try:
        return max(-sampling.PRIORITY, min(sampling.PRIORITY, int(named)))
    except ValueError:
        return given


def _finish(choice: Choice) -> str | None:
    return None if choice.request is None else choice.request.finish


def _has_news(choice: Choice) -> bool:
    request = choice.request
    return request is not None and (request.produced > choice.sent or request.finish is not None)


async def _listen(receive: Receive, waiter: Waiter) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    waiter.is_gone = True
    waiter.wake()


def _ask(prompt: Prompt, wish: sampling.Wish, choice: Choice) -> Ask:
    seed = sampling.seed_of(prompt.ids, wish, choice.index % wish.n)
    output, reason = sampling.length_of(wish, prompt.most, seed)
    if wish.stop or wish.stop_ids:
        output, reason = _cut_at_stop(choice, wish, seed, output, reason)
    return Ask(
        prompt=prompt.ids, output=output, seed=seed, reason=reason, max_tokens=prompt.most, priority=wish.priority, n=wish.n
    )


def _cut_at_stop(choice: Choice, wish: sampling.Wish, seed: int, output: int, reason: str) -> tuple[int, str]:
    """What will be drawn is known: so is where the first stop string or token in it ends it."""
    ids: list[int] = draw(seed, output).tolist()
    ends = np.cumsum([len(PIECES[token]) for token in ids]).tolist()
    whole = decode(ids)
    # One that ends within the first min_tokens is not seen; one that only begins there is.
    least = ends[min(wish.min_tokens, output) - 1] if wish.min_tokens else 0
    found = [(at, text) for text in wish.stop if (at := whole.find(text, max(0, least + 1 - len(text)))) >= 0]
    stop_at, stop = min(found, key=lambda one: one[0] + len(one[1]), default=(len(whole), ""))
    # The tokens until the one in which it ends.
    tokens = int(np.searchsorted(ends, stop_at + len(stop))) + 1 if stop else output
    marked = next((place for place in range(wish.min_tokens, output) if ids[place] in wish.stop_ids), None)
    # A stop token is not read where it is not kept: then no string can end in it.
    if marked is not None and (marked + 1 < tokens or (marked + 1 == tokens and not (stop and wish.keeps_stop))):
        choice.stop = ids[marked]
        last = marked if wish.keeps_stop else marked - 1
        tokens, reason, whole = marked + 1, "stop", whole[: ends[last] if last >= 0 else 0]
    elif stop:
        choice.stop = stop
        reason, whole = "stop", whole[: stop_at + len(stop) if wish.keeps_stop else stop_at]
    hold = 0 if wish.keeps_stop else max((len(text) for text in wish.stop), default=1) - 1
    choice.text = Text(whole, ends, hold)
    return tokens, reason

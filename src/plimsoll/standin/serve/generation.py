"""One client's request from its parameters to the last token: checked, submitted to the engine, answered or aborted."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plimsoll.standin.request import WORDS, Ids, RequestSpec, SampleGroup, encode
from plimsoll.standin.serve.protocol import GenerationRequest, HttpRefusal, Json, dead, dumped, invalid
from plimsoll.standin.serve.service import Choice, Service, Waiter

MOST_SEQUENCES = 16_384  # VLLM_MAX_N_SEQUENCES
GREEDY_BELOW = 1e-5  # of the temperature
PRIORITY = 2**31 - 1  # the scheduler's largest number; larger priorities are cut to it
SHORT = 64  # a request for so few tokens gets them all: models seldom end so early
MEAN_LENGTH, SPREAD = 200.0, 0.8  # of answers that end by themselves: log-normal
HANDED_IN_AT_ONCE = 64  # then other coroutines have a turn
PIECES = tuple(word.encode() for word in WORDS)  # letters and a blank: nothing that JSON would escape
LONGEST_PIECE = 9  # letters of a token, with the blank before it
LONG = 256 * 1024  # letters of a text that is encoded in a thread, so that others need not wait; so many take some 50 ms


# Prompts: refused where they do not fit.


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and how many tokens may follow it."""

    ids: Ids
    most: int


async def prompt_of(service: Service, prompt: str | list[int], max_tokens: int | None, name: str = "max_tokens") -> Prompt:
    """Returns a prompt that fits, with the room it leaves; `name` is the field that `max_tokens` came from."""
    config = service.engine.config
    limit = config.max_model_len
    if max_tokens is not None and max_tokens > limit:
        says = f"{name}={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        raise invalid(says, name, max_tokens)
    if isinstance(prompt, str):
        if len(prompt) > limit * LONGEST_PIECE:  # too long without counting its tokens
            raise invalid(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(prompt)} "
                f"characters (more than {limit * LONGEST_PIECE} characters, which is the upper bound for {limit} input "
                "tokens). Please reduce the length of the input prompt.",
                "input_text",
                len(prompt),
            )
        await asyncio.sleep(0)  # there may be a thousand prompts
        ids = encode(prompt) if len(prompt) <= LONG else await asyncio.to_thread(encode, prompt)
    else:
        ids = prompt
    if len(ids) > limit:
        tokens = limit + 1 if isinstance(prompt, str) else len(ids)  # vLLM counts no further in a text
        count = f"at least {tokens}" if tokens == limit + 1 else str(tokens)
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {count} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            tokens,
        )
    if not ids:
        raise HttpRefusal(400, "The decoder prompt cannot be empty")
    if not isinstance(prompt, str) and max(ids) >= config.sizes.vocab:
        raise HttpRefusal(400, f"Token id {max(ids)} is out of vocabulary")
    room = limit - len(ids)
    return Prompt(np.array(ids, dtype=np.int64), room if max_tokens is None else min(room, max_tokens))


def check_bounds(asked: GenerationRequest, n: int, most: int) -> None:
    """Makes the checks that vLLM makes once it knows the prompt; `most` is how many tokens the request may produce."""
    defaults = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0,
                "top_k": 0, "min_p": 0.0}  # fmt: skip
    value = {name: default if getattr(asked, name) is None else getattr(asked, name) for name, default in defaults.items()}
    penalty, temperature, top_p, top_k, min_p = (value[name] for name in tuple(value)[2:])
    too_many = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
    least = asked.min_tokens
    # A forbidden condition, vLLM's message for it, and the parameter that the message names with its value, if any.
    wrongs: list[tuple[bool, str, str | None]] = [
        (n < 1, f"n must be at least 1, got {n}.", None),
        (n > MOST_SEQUENCES, f"n must be at most {MOST_SEQUENCES}, got {n}. {too_many}", None),
        *(
            (not -2.0 <= value[name] <= 2.0, f"{name} must be in [-2, 2], got {value[name]}.", None)
            for name in ("presence_penalty", "frequency_penalty")
        ),
        (not math.isfinite(penalty), f"repetition_penalty must be a finite number, got {penalty}.", None),
        (penalty <= 0.0, f"repetition_penalty must be greater than zero, got {penalty}.", None),
        (not math.isfinite(temperature), f"temperature must be a finite number, got {temperature}.", "temperature"),
        (temperature < 0.0, f"temperature must be non-negative, got {temperature}.", "temperature"),
        (temperature > 2.0, f"temperature must be in [0, 2], got {temperature}.", "temperature"),
        (temperature < GREEDY_BELOW and n > 1, f"n must be 1 when using greedy sampling, got {n}.", None),
        (not 0.0 < top_p <= 1.0, f"top_p must be in (0, 1], got {top_p}.", "top_p"),
        (top_k < -1, f"top_k must be 0 (disable), or at least 1, got {top_k}.", None),
        (not 0.0 <= min_p <= 1.0, f"min_p must be in [0, 1], got {min_p}.", None),
        (most < 1, f"max_tokens must be at least 1, got {most}.", "max_tokens"),
        (least < 0, f"min_tokens must be greater than or equal to 0, got {least}.", None),
        (least > most, f"min_tokens must be less than or equal to max_tokens={most}, got {least}.", None),
    ]
    for is_wrong, says, param in wrongs:
        if is_wrong:
            raise invalid(says, param, {**value, "max_tokens": most}[param] if param else None)


class Generation:
    """The choices of one request, in the order of their answers. Each endpoint's subclass says how they are shown."""

    prefix: ClassVar[str]  # of the request's name
    kind: ClassVar[str]  # of a whole answer
    chunk_kind: ClassVar[str]
    text_key: ClassVar[bytes]  # the bytes before the text of a plain event
    plain_end: ClassVar[bytes]  # and those after it

    about_prompt: ClassVar[Mapping[str, None]] = {}  # what a whole answer has beside its choices

    def __init__(self, http: Request, asked: GenerationRequest, n: int, max_tokens: int | None) -> None:
        """`max_tokens` is the request's own limit; None for as many as fit."""
        self.http, self.asked, self.n, self.max_tokens = http, asked, n, max_tokens
        self.service: Service = http.app.state.service
        self.name = f"{self.prefix}-{http.headers.get('x-request-id') or asked.request_id or uuid.uuid4().hex[:16]}"
        self.created = int(time.time())
        self.prompts: Sequence[Prompt] = ()
        self.choices: list[Choice] = []
        self.waiter = Waiter()
        self._watch: asyncio.Task[None] | None = None
        options = asked.stream_options
        self.tells_usage = bool(options and options.include_usage)
        # Usage with every event of a stream
        self.tells_usage_always = bool(options and options.include_usage and options.continuous_usage_stats)

    def top(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.service.names[0]}

    def whole(self) -> dict[str, Any]:
        """Returns a whole finished answer, its keys in vLLM's order."""
        return {
            **self.top(self.kind),
            "choices": [self.whole_choice(choice) for choice in self.choices],
            "service_tier": None,
            "system_fingerprint": self.service.fingerprint,
            "usage": self.usage(is_whole=True),
            **self.about_prompt,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def first_events(self) -> bytes:
        return b""

    def event(self, choice: Choice, text: str) -> dict[str, Any]:
        """Returns the choice of an event that has more than its text."""
        raise NotImplementedError

    def usage_of(self, choice: Choice) -> dict[str, Any]:
        return usage(choice.prompt_len, choice.sent)

    async def answer(self, prompts: Sequence[Prompt]) -> Response:
        self.prompts = prompts
        for prompt in prompts:
            check_bounds(self.asked, self.n, prompt.most)
        is_streamed = False
        try:
            await self._begin()
            is_streamed = bool(self.asked.stream)
            if is_streamed:
                return EventStream(self)
            while not self.waiter.is_gone and any(choice.finish is None for choice in self.choices):
                await self.waiter.news()
            self.raise_if_failed(self.choices)
            return Json(self.whole())
        finally:
            if not is_streamed:
                self.close()

    async def _begin(self) -> None:
        self._watch = asyncio.create_task(until_gone(self.http.receive))
        self._watch.add_done_callback(lambda _watch: self.waiter.leave())
        try:
            priority = int(self.http.headers.get("x-vllm-priority", ""))
        except ValueError:
            priority = self.asked.priority
        for prompt in self.prompts:
            family = SampleGroup(self.n) if self.n > 1 else None
            for _ in range(self.n):
                index = len(self.choices)
                choice = Choice(f"{self.name}-{index}", index, len(prompt.ids), self.waiter, self.service)
                choice.is_streamed = bool(self.asked.stream)
                self.choices.append(choice)
                # The same prompt gets the same answer.
                seed = (zlib.crc32(prompt.ids.tobytes()) + (self.asked.seed or 0) + 0x9E3779B1 * (index % self.n)) & 0x7FFFFFFF
                output, reason = self._length(prompt.most, seed)
                spec = RequestSpec(
                    prompt=prompt.ids, output=output, seed=seed, reason=reason, max_tokens=prompt.most,
                    priority=max(-PRIORITY, min(PRIORITY, priority)), n=self.n, family=family,
                )  # fmt: skip
                self.service.submit(choice, spec)
                if len(self.choices) % HANDED_IN_AT_ONCE == 0:
                    await asyncio.sleep(0)
                    if self.waiter.is_gone:
                        return

    def _length(self, most: int, seed: int) -> tuple[int, str]:
        if self.asked.ignore_eos or (self.max_tokens is not None and most <= SHORT):
            return most, "length"
        drawn = np.random.Generator(np.random.PCG64(seed)).lognormal(math.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD)
        wanted = max(1, self.asked.min_tokens, round(drawn))
        return (wanted, "stop") if wanted < most else (most, "length")

    async def news(self) -> list[Choice]:
        """Waits for the choices that have something new and returns them; none when all is sent or the client has gone."""
        while not self.waiter.is_gone:
            changed = [choice for choice in self.choices if choice.has_news]
            if changed:
                self.raise_if_failed(changed)
                return changed
            if all(choice.is_over for choice in self.choices):
                break
            await self.waiter.news()
        return []

    def raise_if_failed(self, choices: Iterable[Choice]) -> None:
        """Raises HttpRefusal where the engine has ended one of these with an error."""
        if any(choice.finish == "error" for choice in choices):
            raise dead() if self.service.engine.is_dead else HttpRefusal(500, "Internal server error", "InternalServerError")

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.service.give_up(self.choices)

    def usage(self, *, is_whole: bool = False) -> dict[str, Any]:
        """Returns the tokens sent so far; with details in a whole answer, or where the server shows them."""
        counts = usage(sum(len(prompt.ids) for prompt in self.prompts), sum(choice.sent for choice in self.choices))
        details: dict[str, Any] | None = None
        if self.service.options.has_prompt_tokens_details:
            first = self.choices[0].request
            details = {"cached_tokens": 0 if first is None else first.cached_tokens}
        if is_whole:
            details = details and {**details, "created_cache_tokens": None, "multimodal_tokens": None}
            return {**counts, "prompt_tokens_details": details, "completion_tokens_details": None}
        return counts if details is None else {**counts, "prompt_tokens_details": details}


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def tell(choice: Choice) -> bytes:
    """Returns the text of the new tokens, ready for JSON, and counts them as sent."""
    request = choice.request
    assert request is not None, "it was handed in"
    ids = request.output_ids[choice.sent : request.produced].tolist()
    choice.sent = request.produced
    choice.is_over = request.finish is not None
    return b"".join([PIECES[token] for token in ids])


def event_of(value: Any) -> bytes:
    return b"data: " + dumped(value) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The events of one generation. A plain one is put together from three pieces of bytes: there are thousands a second."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation) -> None:
        self.status_code = 200
        self.init_headers()
        self._generation = generation
        self._top = generation.top(generation.chunk_kind)
        head = b"data: " + dumped(self._top)[:-1] + b',"choices":[{"index":'
        self._heads = [b"%s%d,%s" % (head, choice.index, generation.text_key) for choice in generation.choices]

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Sends the events as they come; an error among them is the last."""
        generation = self._generation
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                before: bytes | None = None
                while news := await generation.news():
                    before = generation.first_events() if before is None else b""
                    body = before + b"".join([self._event(choice) for choice in news])
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                tail = b""
                if generation.tells_usage:
                    last = {"choices": [], "usage": generation.usage(), "system_fingerprint": generation.service.fingerprint}
                    tail = event_of({**self._top, **last})
            except HttpRefusal as error:
                tail = b"data: " + json.dumps(error.body).encode() + b"\n\n"  # with blanks, as in vLLM
            await send({"type": "http.response.body", "body": tail + b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            generation.close()

    def _event(self, choice: Choice) -> bytes:
        generation, text = self._generation, tell(choice)
        if choice.sent == 0:  # it ended before its first token
            return b""
        if not choice.is_over and not generation.tells_usage_always:
            return self._heads[choice.index] + text + generation.plain_end
        event: dict[str, Any] = {**self._top, "choices": [generation.event(choice, text.decode())]}
        if generation.tells_usage_always:
            event["usage"] = generation.usage_of(choice)
        if choice.is_over and not generation.tells_usage:
            event["system_fingerprint"] = generation.service.fingerprint
        return event_of(event)

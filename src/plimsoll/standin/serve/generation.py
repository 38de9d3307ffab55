"""One client's request from its parameters to the last token: checked, handed to the engine, waited for, taken back."""

from __future__ import annotations

import asyncio
import math
import uuid
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from plimsoll.inside.answers import Receive
from plimsoll.standin.request import RESERVED, Family, Ids, RequestSpec, decode, draw, piece
from plimsoll.standin.serve import fields
from plimsoll.standin.serve.fields import INT64, Field, event_of, invalid, problem, refusal, value_of
from plimsoll.standin.serve.service import Choice, Service, Waiter

MOST_SEQUENCES = 16_384  # VLLM_MAX_N_SEQUENCES
MOST_LOGPROBS = 20
MOST_SALT = 128
GREEDY_BELOW = 1e-5  # of the temperature
PRIORITY = 2**31 - 1  # the scheduler's own numbers; who comes with larger ones is first or last all the same
SHORT = 64  # who asks for so few tokens gets them all: models seldom end so early
MEAN_LENGTH, SPREAD = 200.0, 0.8  # of answers that end by themselves: log-normal

FORMATS = ("text", "json_object", "json_schema")
FIELDS = {
    "model": Field("str"), "frequency_penalty": Field("float"), "presence_penalty": Field("float"),
    "repetition_penalty": Field("float"), "temperature": Field("float"), "top_p": Field("float"), "top_k": Field("int"),
    "min_p": Field("float"), "logit_bias": Field("floats"), "max_tokens": Field("int"),
    "seed": Field("int", least=-INT64 - 1, most=INT64), "stop": Field("strs"), "stop_token_ids": Field("ints"),
    "include_stop_str_in_output": Field("bool", may_be_null=False), "ignore_eos": Field("bool", may_be_null=False),
    "min_tokens": Field("int", may_be_null=False), "stream": Field("bool"), "stream_options": Field("dict"),
    "prompt_logprobs": Field("int"), "response_format": Field("dict"), "user": Field("str"),
    "priority": Field("int", may_be_null=False, least=-INT64 - 1, most=INT64), "request_id": Field("str", may_be_null=False),
    "return_token_ids": Field("bool"), "truncate_prompt_tokens": Field("int", least=-1, most=INT64),
    "truncation_side": Field("str"), "use_beam_search": Field("bool", may_be_null=False),
    "skip_special_tokens": Field("bool", may_be_null=False), "add_special_tokens": Field("bool", may_be_null=False),
    "cache_salt": Field("str"),
}  # fmt: skip


class SamplingParams(NamedTuple):
    """How an answer is wanted."""

    n: int
    max_tokens: int | None  # The most tokens, as it was asked for; None for as many as fit
    min_tokens: int
    ignores_end: bool
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    keeps_stop: bool
    seed: int
    priority: int
    streams: bool
    tells_usage: bool
    tells_usage_always: bool  # With every event of a stream
    returns_ids: bool
    logprobs: int | None
    prompt_logprobs: int | None


def sampling_params(
    good: dict[str, Any], max_tokens: int | None, logprobs: int | None, *, forces_usage: bool
) -> SamplingParams:
    """Sampling parameters from checked fields."""
    check_format(good.get("response_format"))
    asked = good.get("stream_options") or {}
    for name in ("include_usage", "continuous_usage_stats"):
        if asked.get(name) is not None:
            value, wrong = value_of(Field("bool"), asked[name], ("body", "stream_options", name))
            if wrong:
                raise refusal(wrong)
            asked = {**asked, name: value}
    tells = forces_usage or bool(asked.get("include_usage"))
    return SamplingParams(
        n=good.get("n", 1),
        max_tokens=max_tokens,
        min_tokens=good.get("min_tokens", 0),
        ignores_end=good.get("ignore_eos", False),
        stop=tuple(good.get("stop") or ()),
        stop_ids=frozenset(good.get("stop_token_ids") or ()),
        keeps_stop=good.get("include_stop_str_in_output", False),
        seed=good.get("seed") or 0,
        priority=max(-PRIORITY, min(PRIORITY, good.get("priority", 0))),
        streams=bool(good.get("stream")),
        tells_usage=tells,
        tells_usage_always=forces_usage or (tells and bool(asked.get("continuous_usage_stats"))),
        returns_ids=bool(good.get("return_token_ids")),
        logprobs=logprobs,
        prompt_logprobs=good.get("prompt_logprobs", logprobs if good.get("echo") else None),
    )


def check_format(asked: dict[str, Any] | None) -> None:
    """A form for the answer that vLLM knows; it tries three shapes, and each complains."""
    if asked is None or asked.get("type") in FORMATS:
        return
    kind, at = asked.get("type"), ("body", "response_format")
    if kind == "structural_tag":
        return
    plain, tag = (
        problem("literal_error", (*at, "type"), f"Input should be {expected}", kind, expected=expected)
        for expected in ("'text', 'json_object' or 'json_schema'", "'structural_tag'")
    )
    lacking = [problem("missing", (*at, name), "Field required", asked) for name in ("format", "structures", "triggers")]
    raise refusal([plain, tag, lacking[0], tag, *lacking[1:]])


def check_before(body: dict[str, Any], logprobs_name: str) -> None:
    """Checks that vLLM makes before it looks at types."""
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if salt is not None and (len(salt) > MOST_SALT or set(salt) & set("@/\\\0")):
        raise invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.", "cache_salt"
        )
    asked = body.get("response_format")
    if isinstance(asked, dict) and asked.get("type") == "json_schema" and asked.get("json_schema") is None:
        raise invalid(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )
    if body.get("stream_options") and not body.get("stream"):
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    for name in ("prompt_logprobs", logprobs_name):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise invalid(f"`{name}` must be an integer.", name, value)
    asked = body.get("prompt_logprobs")
    if asked is not None:
        if body.get("stream") and (asked > 0 or asked == -1):
            raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if asked < 0 and asked != -1:
            raise invalid("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", asked)
    asked = body.get(logprobs_name)
    if asked is not None and asked < 0 and asked != -1:
        raise invalid(f"`{logprobs_name}` must be a positive value or -1.", logprobs_name, asked)


def check_bounds(good: dict[str, Any], wish: SamplingParams, most: int, vocabulary: int) -> None:
    """Checks that vLLM makes once it knows the prompt; `most` is how many tokens it may produce."""
    biased = _biased(good.get("logit_bias") or {})
    if wish.n < 1:
        raise invalid(f"n must be at least 1, got {wish.n}.")
    if wish.n > MOST_SEQUENCES:
        raise invalid(
            f"n must be at most {MOST_SEQUENCES}, got {wish.n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable."
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = good.get(name, 0.0)
        if not -2.0 <= value <= 2.0:
            raise invalid(f"{name} must be in [-2, 2], got {value}.")
    value = good.get("repetition_penalty", 1.0)
    if not math.isfinite(value):
        raise invalid(f"repetition_penalty must be a finite number, got {value}.")
    if value <= 0.0:
        raise invalid(f"repetition_penalty must be greater than zero, got {value}.")
    _check_temperature(good)
    if most < 1:
        raise invalid(f"max_tokens must be at least 1, got {most}.", "max_tokens", most)
    if wish.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {wish.min_tokens}.")
    if wish.min_tokens > most:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={most}, got {wish.min_tokens}.")
    if any(not text for text in wish.stop):
        raise invalid("stop cannot contain an empty string.")
    _check_tokens("stop_token_ids", good.get("stop_token_ids") or (), vocabulary)
    _check_tokens("logit_bias", biased, vocabulary)
    asked = wish.logprobs if wish.logprobs is not None else 0
    if asked > MOST_LOGPROBS:
        raise invalid(
            f"Requested sample logprobs of {asked}, which is greater than max allowed: {MOST_LOGPROBS}", "logprobs", asked
        )


def check_count(prompts: int, wish: SamplingParams) -> None:
    """As many answers to one request as vLLM allows to one prompt; for many prompts with many each it has no bound."""
    if prompts > 1 and 1 <= wish.n <= MOST_SEQUENCES < prompts * wish.n:
        raise invalid(f"{prompts} prompts with n={wish.n} are {prompts * wish.n} answers; at most {MOST_SEQUENCES} are made.")


def _biased(bias: dict[str, float]) -> list[int]:
    names = list(bias)
    wrong = [name for name in names if not _is_whole(name)]
    if wrong:
        raise invalid(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}", "logit_bias", wrong
        )
    return [int(name) for name in names]


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _check_tokens(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise invalid(
            f"token_id(s) {outside} in {name} contain out-of-vocab token ids. Vocabulary size: {vocabulary}", name, outside
        )


def _check_temperature(good: dict[str, Any]) -> None:
    value = good.get("temperature", 1.0)
    if not math.isfinite(value):
        raise invalid(f"temperature must be a finite number, got {value}.", "temperature", value)
    if value < 0.0:
        raise invalid(f"temperature must be non-negative, got {value}.", "temperature", value)
    if value > 2.0:
        raise invalid(f"temperature must be in [0, 2], got {value}.", "temperature", value)
    if value < GREEDY_BELOW and good.get("n", 1) > 1:
        raise invalid(f"n must be 1 when using greedy sampling, got {good['n']}.")
    value = good.get("top_p", 1.0)
    if not 0.0 < value <= 1.0:
        raise invalid(f"top_p must be in (0, 1], got {value}.", "top_p", value)
    value = good.get("top_k", 0)
    if value < -1:
        raise invalid(f"top_k must be 0 (disable), or at least 1, got {value}.")
    value = good.get("min_p", 0.0)
    if not 0.0 <= value <= 1.0:
        raise invalid(f"min_p must be in [0, 1], got {value}.")


def seed_of(prompt: Ids, wish: SamplingParams, choice: int) -> int:
    """The seed of an answer: the same prompt gets the same answer."""
    return (zlib.crc32(prompt.tobytes()) + wish.seed + 0x9E3779B1 * choice) & 0x7FFFFFFF


def length_of(wish: SamplingParams, most: int, seed: int) -> tuple[int, str]:
    """How many tokens an answer has, and why it ends."""
    if wish.ignores_end or (wish.max_tokens is not None and most <= SHORT):
        return most, "length"
    drawn = np.random.Generator(np.random.PCG64(seed)).lognormal(math.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD)
    wanted = max(1, wish.min_tokens, round(drawn))
    return (wanted, "stop") if wanted < most else (most, "length")


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
        """The text that is new after so many tokens, ready for JSON."""
        seen = self._ends[tokens - 1] if tokens else 0
        end = min(len(self._whole), seen if is_over else max(self._told, seen - self._hold))
        new, self._told = self._whole[self._told : end], max(self._told, end)
        return new.encode()


class Generation:
    """The choices of one request, in the order in which they are answered."""

    def __init__(self, service: Service, name: str, prompts: Sequence[Prompt], wish: SamplingParams) -> None:
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
        """Take back the rest of the request."""
        if self._watch is not None:
            self._watch.cancel()
        self.service.give_up(self.choices)

    def prompt_of(self, choice: Choice) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[choice.index // self.wish.n]

    def usage(self) -> dict[str, Any]:
        """All the tokens of it, as far as they were told."""
        told = sum(choice.sent for choice in self.choices)
        return usage(sum(len(prompt.ids) for prompt in self.prompts), told)

    def cached(self) -> dict[str, Any] | None:
        """Tokens found in the prefix cache, where the server shows them."""
        if not self.service.options.has_prompt_tokens_details:
            return None
        last = self.choices[0].request
        return {"cached_tokens": 0 if last is None else last.cached_tokens}


def usage(prompt: int, output: int) -> dict[str, Any]:
    """Token counts in vLLM's order."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def usage_event(found: Generation, top: dict[str, Any]) -> bytes:
    """The last event of a stream, where it is asked for: the usage of all choices."""
    if not found.wish.tells_usage:
        return b""
    details = found.cached()
    told = found.usage() if details is None else {**found.usage(), "prompt_tokens_details": details}
    return event_of({**top, "choices": [], "usage": told, "system_fingerprint": found.service.fingerprint})


def full_usage(generation: Generation) -> dict[str, Any]:
    """The usage of an answer that is no stream."""
    cached = generation.cached()
    details = None if cached is None else {**cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {**generation.usage(), "prompt_tokens_details": details, "completion_tokens_details": None}


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
    """The request's id: from its header, its body, or by chance."""
    named = next((bytes(value).decode("latin-1") for name, value in headers if bytes(name).lower() == b"x-request-id"), None)
    return f"{prefix}-{named or (given if isinstance(given, str) else uuid.uuid4().hex[:16])}"


def priority_of(headers: Iterable[tuple[bytes, bytes]], given: int) -> int:
    """How urgent a request is: by its header, else by its body."""
    named = next((bytes(value).decode("latin-1") for name, value in headers if bytes(name).lower() == b"x-vllm-priority"), "")
    try:
        return max(-PRIORITY, min(PRIORITY, int(named)))
    except ValueError:
        return given


def _finish(choice: Choice) -> str | None:
    return None if choice.request is None else choice.request.finish


def _has_news(choice: Choice) -> bool:
    request = choice.request
    return request is not None and (request.produced > choice.sent or request.finish is not None)


async def _listen(receive: Receive, waiter: Waiter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    waiter.is_gone = True
    waiter.wake()


def _ask(prompt: Prompt, wish: SamplingParams, choice: Choice) -> RequestSpec:
    seed = seed_of(prompt.ids, wish, choice.index % wish.n)
    output, reason = length_of(wish, prompt.most, seed)
    if wish.stop or wish.stop_ids:
        output, reason = _cut_at_stop(choice, wish, seed, output, reason)
    return RequestSpec(
        prompt=prompt.ids, output=output, seed=seed, reason=reason, max_tokens=prompt.most, priority=wish.priority, n=wish.n
    )


def _cut_at_stop(choice: Choice, wish: SamplingParams, seed: int, output: int, reason: str) -> tuple[int, str]:
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

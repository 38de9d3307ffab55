"""Clients that notice a lost, repeated or wrong token.

Their options are mixed: greedy and seeded, chats and completions, log-probabilities, stop strings, structured output, two
answers at once.
An answer is checked alone (`mistakes`) and against the same request on an undisturbed server (`differences`).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from lab.engine.clients import ask as send
from lab.gpu.load import picture

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WORDS = ("the ship may be loaded down to this line and not one inch further so said the old man who had seen many of them go "
         "down in winter seas and never come back again to the port they left").split()  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"sea": {"enum": ["north", "south"]}, "depth": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["sea", "depth"],
    "additionalProperties": False,
}
REGEX = "[a-z]{4,9}-[0-9]{6,12}"
LOGPROB_SLACK = 2e-3  # float32, and a batch of another size


@dataclass(frozen=True)
class Ask:
    """One request; `kind` says what is special about it."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def is_sampled(self) -> bool:
        """Whether chance decides: its tokens are equal only as long as its generator is."""
        return bool(self.body.get("temperature"))


@dataclass
class Choice:
    """One answer of a request, put together from its pieces."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_logprobs: Any = None


@dataclass
class Answer:
    """All that came back; `error` is empty where nothing went wrong."""

    ask: Ask
    status: int = 0
    error: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    is_done: bool = False

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each choice."""
        return [self.choices[number].token_ids for number in sorted(self.choices)]


# Requests


def text_of(dice: random.Random, words: int) -> str:
    """So many words."""
    return " ".join(dice.choices(WORDS, k=words))


def mixed_asks(count: int, seed: int, model: str = "tiny", *, longest: int = 48) -> list[Ask]:
    """So many requests with options that take turns; the same ones for the same seed."""
    dice = random.Random(seed)
    kinds = (_plain, _chat, _logprobs, _prompt_logprobs, _stop, _schema, _two, _seeded, _plain, _long, _regex, _chat_logprobs)
    asks = []
    for number in range(count):
        ask = kinds[number % len(kinds)](dice, longest)
        common = {"model": model, "return_token_ids": True, **ask.body}
        common.setdefault("temperature", 0)
        if common.setdefault("stream", True):
            common["stream_options"] = {"include_usage": True}
        asks.append(Ask(ask.kind, ask.path, common))
    return asks


def _plain(dice: random.Random, longest: int) -> Ask:
    body = {"prompt": text_of(dice, dice.randint(3, 60)), "max_tokens": dice.randint(4, longest), "ignore_eos": True}
    return Ask("plain", COMPLETIONS, body)


def _long(dice: random.Random, longest: int) -> Ask:
    body = {"prompt": text_of(dice, dice.randint(150, 250)), "max_tokens": dice.randint(4, longest), "ignore_eos": True}
    return Ask("long", COMPLETIONS, body)


def _chat(dice: random.Random, longest: int) -> Ask:
    message = {"role": "user", "content": text_of(dice, dice.randint(3, 40))}
    return Ask("chat", CHATS, {"messages": [message], "max_tokens": dice.randint(4, longest), "ignore_eos": True})


def _chat_logprobs(dice: random.Random, longest: int) -> Ask:
    chat = _chat(dice, longest)
    return Ask("chat logprobs", CHATS, {**chat.body, "logprobs": True, "top_logprobs": 2})


def _logprobs(dice: random.Random, longest: int) -> Ask:
    return Ask("logprobs", COMPLETIONS, {**_plain(dice, longest).body, "logprobs": 3})


def _prompt_logprobs(dice: random.Random, longest: int) -> Ask:
    body = {"prompt": text_of(dice, dice.randint(20, 90)), "max_tokens": dice.randint(2, longest), "prompt_logprobs": 2}
    return Ask("prompt logprobs", COMPLETIONS, {**body, "ignore_eos": True, "stream": False})


def _stop(dice: random.Random, longest: int) -> Ask:
    return Ask("stop", COMPLETIONS, {**_plain(dice, longest).body, "max_tokens": 2 * longest, "stop": ["e", "qu"]})


def _schema(dice: random.Random, longest: int) -> Ask:
    form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA}}
    body = {"prompt": text_of(dice, 12), "max_tokens": 2 * longest, "response_format": form}
    return Ask("schema", COMPLETIONS, body)


def _regex(dice: random.Random, longest: int) -> Ask:
    body = {"prompt": text_of(dice, 8), "max_tokens": 2 * longest, "structured_outputs": {"regex": REGEX}}
    return Ask("regex", COMPLETIONS, body)


def _two(dice: random.Random, longest: int) -> Ask:
    body = {**_plain(dice, longest).body, "n": 2, "temperature": 0.8, "seed": dice.randrange(1 << 30)}
    return Ask("two", COMPLETIONS, body)


def _seeded(dice: random.Random, longest: int) -> Ask:
    body = {**_plain(dice, longest).body, "temperature": 1.0, "top_p": 0.95, "seed": dice.randrange(1 << 30)}
    return Ask("seeded", COMPLETIONS, body)


def with_adapters(asks: Sequence[Ask], names: Sequence[str]) -> list[Ask]:
    """Each of these requests once with each adapter."""
    return [Ask(f"{ask.kind} of {name}", ask.path, {**ask.body, "model": name}) for ask in asks for name in names]


def picture_asks(count: int, model: str = "tiny") -> list[Ask]:
    """Chats about so many pictures, no two of them equal."""
    asks = []
    for number in range(count):
        image = {"type": "image_url", "image_url": {"url": picture(28 + number)}}
        message = {"role": "user", "content": [image, {"type": "text", "text": f"ship {number}"}]}
        body = {"model": model, "messages": [message], "max_tokens": 8 + number % 17, "ignore_eos": True, "temperature": 0}
        body |= {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        asks.append(Ask("picture", CHATS, body))
    return asks


# Answers


async def ask_one(port: int, ask: Ask, request_id: str = "") -> Answer:
    """Send one request and read its answer to the end, whatever it is."""
    answer = Answer(ask)
    try:
        told = await send(port, ask.path, ask.body, {"X-Request-Id": request_id} if request_id else None)
    except (OSError, TimeoutError) as error:
        answer.error = repr(error)
        return answer
    answer.status = told.status
    if told.status != 200 or not told.is_whole:
        answer.error = told.body.decode(errors="replace")[-400:] or "no answer"
    elif ask.body["stream"]:
        _read_stream(answer, told.body)
    else:
        _take(answer, json.loads(told.body))
        answer.is_done = True
    return answer


async def ask_all(port: int, asks: Sequence[Ask], *, at_once: int = 32) -> list[Answer]:
    """Send all of them, so many at a time; answers in the order of the requests."""
    gate = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        async with gate:
            return await ask_one(port, ask)

    return list(await asyncio.gather(*(one(ask) for ask in asks)))


def _read_stream(answer: Answer, body: bytes) -> None:
    for line in body.decode().split("\n"):
        if line == "data: [DONE]":
            answer.is_done = True
        elif line.startswith("data: "):
            piece = json.loads(line.removeprefix("data: "))
            if "error" in piece:
                answer.error = json.dumps(piece["error"])
            _take(answer, piece)


def _take(answer: Answer, piece: Mapping[str, Any]) -> None:
    answer.usage = piece.get("usage") or answer.usage
    for told in piece.get("choices", ()):
        choice = answer.choices.setdefault(told["index"], Choice())
        message = told.get("delta") or told.get("message") or {}
        choice.text += told.get("text") or message.get("content") or ""
        choice.token_ids += told.get("token_ids") or ()
        logprobs = told.get("logprobs") or {}
        choice.logprobs += logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or ()]
        choice.prompt_logprobs = told.get("prompt_logprobs") or choice.prompt_logprobs
        if told.get("finish_reason"):
            assert choice.finish_reason is None, "a choice ended twice"
            choice.finish_reason, choice.stop_reason = told["finish_reason"], told.get("stop_reason")


def mistakes(answer: Answer) -> list[str]:
    """What is wrong with an answer, seen by itself."""
    if answer.error or answer.status != 200 or not answer.is_done:
        return [f"{answer.ask.kind}: {answer.status} {answer.error or 'the stream broke off'}"]
    body, found = answer.ask.body, []
    if len(answer.choices) != body.get("n", 1):
        found.append(f"{len(answer.choices)} choices")
    tokens = sum(len(each) for each in answer.tokens)
    if answer.usage is None or answer.usage["completion_tokens"] != tokens:
        found.append(f"usage {answer.usage} for {tokens} tokens")
    for choice in answer.choices.values():
        found += _choice_mistakes(answer.ask.kind, body, choice)
    return [f"{answer.ask.kind}: {each}" for each in found]


def _choice_mistakes(kind: str, body: Mapping[str, Any], choice: Choice) -> list[str]:
    found = []
    kind = kind.partition(" of ")[0]  # whichever adapter
    count, most = len(choice.token_ids), body["max_tokens"]
    if choice.finish_reason == "length" and count != most:
        found.append(f"{count} of {most} tokens")
    if choice.finish_reason != "length" and kind not in ("stop", "schema", "regex"):
        found.append(f"ended with {choice.finish_reason}")
    if body.get("logprobs") and len(choice.logprobs) != count:
        found.append(f"{len(choice.logprobs)} log-probabilities for {count} tokens")
    if body.get("prompt_logprobs") and not choice.prompt_logprobs:
        found.append("no log-probabilities of the prompt")
    if choice.finish_reason == "stop":
        if kind == "stop" and (choice.stop_reason not in body["stop"] or any(each in choice.text for each in body["stop"])):
            found.append(f"stopped by {choice.stop_reason!r} with {choice.text!r}")
        if kind == "regex" and not re.fullmatch(REGEX, choice.text):
            found.append(f"{choice.text!r} does not match")
        if kind == "schema" and set(json.loads(choice.text)) != {"sea", "depth"}:
            found.append(f"{choice.text!r} is of another schema")
    return found


def differences(answer: Answer, undisturbed: Answer) -> list[str]:
    """Where an answer differs from the undisturbed one; a list of sentences, empty where nowhere."""
    found = []
    for number in sorted(set(answer.choices) | set(undisturbed.choices)):
        one, other = answer.choices.get(number), undisturbed.choices.get(number)
        if one is None or other is None:
            found.append(f"choice {number} is missing")
            continue
        if one.token_ids != other.token_ids:
            pairs = enumerate(zip_longest(one.token_ids, other.token_ids))
            where = next(place for place, (mine, theirs) in pairs if mine != theirs)
            found.append(f"token {where} of {len(other.token_ids)} and on: {one.token_ids[where:][:4]}, "
                         f"not {other.token_ids[where:][:4]}")  # fmt: skip
            continue
        if (one.text, one.finish_reason, one.stop_reason) != (other.text, other.finish_reason, other.stop_reason):
            found.append(f"{one.text!r} {one.finish_reason}, not {other.text!r} {other.finish_reason}")
        if any(abs(mine - theirs) > LOGPROB_SLACK for mine, theirs in zip(one.logprobs, other.logprobs, strict=False)):
            found.append("other log-probabilities")
        if not _same_prompt_logprobs(one.prompt_logprobs, other.prompt_logprobs):
            found.append("other log-probabilities of the prompt")
    if answer.usage != undisturbed.usage:
        found.append(f"usage {answer.usage}, not {undisturbed.usage}")
    return [f"{answer.ask.kind}: {each}" for each in found]


def _same_prompt_logprobs(mine: Any, theirs: Any) -> bool:
    if not mine or not theirs:
        return bool(mine) == bool(theirs)
    if len(mine) != len(theirs):
        return False
    for one, other in zip(mine, theirs, strict=True):
        if (one is None) != (other is None):
            return False
        shared = set(one or ()) & set(other or ())
        if one is not None and not shared:
            return False
        if any(abs(one[token]["logprob"] - other[token]["logprob"]) > LOGPROB_SLACK for token in shared):
            return False
    return True

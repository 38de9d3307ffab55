"""POST /v1/completions: what it takes and answers, streamed or whole."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from plimsoll.inside.answers import Receive, Scope, Send
from plimsoll.standin.request import RESERVED, decode, encode, piece
from plimsoll.standin.serve import fields, generation
from plimsoll.standin.serve.fields import (
    DONE,
    Field,
    JsonAnswer,
    Refused,
    begin_stream,
    dumped,
    end_stream,
    event_of,
    invalid,
    part,
    stopped,
    too_long,
    too_many_letters,
)
from plimsoll.standin.serve.generation import Generation, Prompt
from plimsoll.standin.serve.service import Choice, Service

# Log probabilities in vLLM's shapes. No model is behind them: they are drawn from the token, the same each time.

STRIDE = 389  # between the tokens that are named beside the drawn one


def _ranked(token: int, count: int) -> list[tuple[int, float]]:
    """The drawn token first, then as many others, each less likely."""
    first = -0.05 - (token * 7919 % 1000) / 1000
    return [((token + place * STRIDE) % RESERVED if place else token, first - 0.75 * place) for place in range(max(1, count))]


def of_completion(ids: Sequence[int], count: int, offset: int, *, is_beginning: bool = False) -> dict[str, Any]:
    """As /v1/completions shows them; `offset` is where in the text the first token begins.

    The very beginning of a prompt follows from nothing: it has none.
    """
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for place, token in enumerate(ids):
        text, ranked = piece(token), _ranked(token, count)
        is_first = is_beginning and place == 0
        found["text_offset"].append(offset)
        found["token_logprobs"].append(None if is_first else ranked[0][1])
        found["tokens"].append(text)
        found["top_logprobs"].append(None if is_first else {piece(other): value for other, value in ranked})
        offset += len(text)
    return found


def of_prompt(ids: Sequence[int], count: int) -> list[dict[str, Any] | None]:
    """Log probabilities of a prompt's tokens; None for the first."""
    shown: list[dict[str, Any] | None] = [None]
    for token in ids[1:]:
        ranked = _ranked(token, count)
        shown.append(
            {
                str(other): {"logprob": value, "rank": place + 1, "decoded_token": piece(other)}
                for place, (other, value) in enumerate(ranked)
            }
        )
    return shown


def of_chat(ids: Sequence[int], count: int) -> dict[str, Any]:
    """Log probabilities as /v1/chat/completions shows them."""
    return {"content": [{**_one(token, ranked[0][1]), "top_logprobs": [_one(*other) for other in ranked[:count]]}
                        for token in ids for ranked in (_ranked(token, count),)]}  # fmt: skip


def _one(token: int, value: float) -> dict[str, Any]:
    text = piece(token)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


# Texts to token ids without making others wait: what is long is taken apart in a thread, piece by piece.

LONG = 256 * 1024  # letters; so many take some 50 ms
PIECE = 16 * 1024  # a thread holds the interpreter for as long as one of these takes
_BLANK = re.compile(r"\s")


async def encoded(text: str) -> list[int]:
    """The text's tokens."""
    return encode(text) if len(text) <= LONG else await asyncio.to_thread(encoded_in_pieces, text)


async def words_of(ids: list[int]) -> list[str]:
    """The text of each token."""
    return [piece(one) for one in ids] if len(ids) <= LONG else await asyncio.to_thread(lambda: [piece(one) for one in ids])


def encoded_in_pieces(text: str, size: int = PIECE) -> list[int]:
    """The same tokens: every white letter begins one, so a text may be cut before it."""
    ids: list[int] = []
    begin = 0
    while begin < len(text):
        blank = _BLANK.search(text, begin + size)
        end = len(text) if blank is None else blank.start()
        ids += encode(text[begin:end])
        begin = end
    return ids


FIELDS = {
    **generation.FIELDS,
    "prompt": Field("prompt"),
    "echo": Field("bool"),
    "logprobs": Field("int"),
    "n": Field("int", may_be_null=False),
    "suffix": Field("str"),
}
USUAL_TOKENS = 16
LONGEST_PIECE = 9  # letters of a token, with the blank before it
MOST_PROMPTS = 1024  # VLLM_MAX_COMPLETION_PROMPTS
PLAIN_END = b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'


async def create(service: Service, scope: Scope, body: dict[str, Any], receive: Receive, send: Send) -> JsonAnswer | None:
    """Answer it: None where the answer was streamed."""
    _check_before(body)
    good = fields.check(FIELDS, body)
    service.check_model(good.get("model"))
    asked = good.get("max_tokens", USUAL_TOKENS)
    wish = generation.sampling_params(good, asked, good.get("logprobs"), forces_usage=service.options.forces_usage)
    wish = wish._replace(priority=generation.priority_of(scope["headers"], wish.priority))
    if wish.streams and good.get("use_beam_search"):
        raise Refused(400, "Streaming is not currently supported with beam search", "BadRequestError")
    service.admit(wish.n)
    _check_suffix(good)
    each = _each(good["prompt"])
    if service.is_stopping and any(isinstance(one, str) for one in each):
        raise stopped()  # its tokeniser ends first
    generation.check_count(len(each), wish)
    prompts = [await _prompt(service, one, asked, good) for one in each]
    is_echo_only = bool(good.get("echo")) and asked == 0
    if is_echo_only:
        prompts = [prompt._replace(most=1) for prompt in prompts]
    for prompt in prompts:
        generation.check_bounds(good, wish, prompt.most, service.engine.config.sizes.vocab)
    name = generation.request_name("cmpl", scope["headers"], good.get("request_id"))
    found = Generation(service, name, prompts, wish)
    try:
        await found.begin(receive)
        echo = "only" if is_echo_only else "first" if good.get("echo") else ""
        if wish.streams:
            await _stream(found, send, echo)
            return None
        await found.end()
        return JsonAnswer(200, _whole(found, echo))
    finally:
        found.close()


def _check_before(body: dict[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not all(type(one) is int for one in prompt) and len(prompt) > MOST_PROMPTS:
        raise invalid(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MOST_PROMPTS}. To increase this limit, "
            "set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    if prompt is None or prompt == "":
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    generation.check_before(body, "logprobs")


def _check_suffix(good: dict[str, Any]) -> None:
    if "suffix" in good:
        says = (
            "suffix is only supported for models with FIM completion rendering"
            if isinstance(good["prompt"], str)
            else "suffix requires text prompt input for FIM completion rendering"
        )
        raise Refused(400, says, "BadRequestError", "suffix")


def _each(prompt: Any) -> list[Any]:
    if not prompt:
        raise Refused(400, "You must pass at least one prompt", "BadRequestError")
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        return [prompt]
    return list(prompt)


async def _prompt(service: Service, prompt: str | list[int], asked: int, good: dict[str, Any]) -> Prompt:
    limit = service.engine.config.max_model_len
    if asked > limit:
        raise invalid(
            f"max_tokens={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens.",
            "max_tokens",
            asked,
        )
    ids = prompt if isinstance(prompt, list) else await ids_of(prompt, good, limit)
    ids = truncated(ids, good, limit)
    return prompt_of(service, ids, prompt if isinstance(prompt, str) else None, asked)


async def ids_of(text: str, good: dict[str, Any], limit: int) -> list[int]:
    """A text's tokens; one that cannot fit is refused before it is taken apart."""
    if len(text) > limit * LONGEST_PIECE and good.get("truncate_prompt_tokens") is None:
        raise too_many_letters(len(text), limit, LONGEST_PIECE)
    await asyncio.sleep(0)  # there may be a thousand of them
    return await encoded(text)


def truncated(ids: list[int], good: dict[str, Any], limit: int) -> list[int]:
    """The wanted part of a prompt; -1 leaves room for one token of an answer."""
    wanted = good.get("truncate_prompt_tokens")
    if wanted is None:
        return ids
    if wanted > limit:
        raise invalid(
            f"truncate_prompt_tokens={wanted} cannot be greater than max_model_len = {limit}. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
            wanted,
        )
    kept = limit - 1 if wanted < 0 else wanted
    if good.get("truncation_side") == "left":
        return ids[max(0, len(ids) - kept) :]
    return ids[:kept]


def prompt_of(service: Service, ids: list[int], text: str | None, asked: int | None) -> Prompt:
    """A prompt that fits, with the room it leaves."""
    config = service.engine.config
    if len(ids) > config.max_model_len:
        raise too_long(len(ids), config.max_model_len, is_text=text is not None)
    if not ids:
        raise Refused(400, "The decoder prompt cannot be empty", "BadRequestError")
    vocabulary = config.sizes.vocab
    if text is None and max(ids) >= vocabulary:
        raise Refused(400, f"Token id {max(ids)} is out of vocabulary", "BadRequestError")
    room = config.max_model_len - len(ids)
    most = room if asked is None else min(room, asked)
    return Prompt(np.array(ids, dtype=np.int64), text if text is not None else decode(ids), most)


def _whole(found: Generation, echo: str) -> dict[str, Any]:
    choices = [_choice(found, choice, echo) for choice in found.choices]
    return {
        "id": found.name,
        "object": "text_completion",
        "created": found.created,
        "model": found.service.names[0],
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": found.service.fingerprint,
        "usage": generation.full_usage(found),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(found: Generation, choice: Choice, echo: str) -> dict[str, Any]:
    ids, text = generation.tell(choice)
    prompt, wish = found.prompt_of(choice), found.wish
    said = text.decode()
    if echo:
        said = prompt.text if echo == "only" else prompt.text + said
    return {
        "index": choice.index,
        "text": said,
        "logprobs": _logprobs(found, choice, ids, echo, 0),
        "finish_reason": generation.finish_of(choice),
        "stop_reason": generation.stop_of(choice),
        "token_ids": ids if wish.returns_ids else None,
        "prompt_logprobs": prompt_logprobs(found, prompt),
        "prompt_token_ids": prompt.ids.tolist() if wish.returns_ids else None,
        "routed_experts": None,
    }


def _logprobs(found: Generation, choice: Choice, ids: list[int], echo: str, offset: int) -> dict[str, Any] | None:
    """Of the tokens that are shown: with the prompt's, where it is shown, too."""
    count = found.wish.logprobs
    if count is None:
        return None
    prompt = found.prompt_of(choice).ids.tolist() if echo else []
    return of_completion([*prompt, *([] if echo == "only" else ids)], count, offset, is_beginning=bool(echo))


def prompt_logprobs(found: Generation, prompt: Prompt) -> list[dict[str, Any] | None] | None:
    """The prompt's log probabilities, where they are wanted."""
    count = found.wish.prompt_logprobs
    return None if count is None else of_prompt(prompt.ids.tolist(), count)


class _Events:
    """What the events of one stream are made of; the usual one is put together from three pieces of bytes."""

    def __init__(self, found: Generation, echo: str) -> None:
        wish = found.wish
        self._found = found
        self._echo = echo
        self._is_plain = not (echo or wish.tells_usage_always or wish.returns_ids or wish.logprobs is not None)
        self.top: dict[str, Any] = {
            "id": found.name, "object": "text_completion", "created": found.created, "model": found.service.names[0],
        }  # fmt: skip
        head = b"data: " + dumped(self.top)[:-1] + b',"choices":[{"index":'
        self._heads = [b'%s%d,"text":"' % (head, choice.index) for choice in found.choices]
        self._offsets = [0] * len(found.choices)

    def of(self, choice: Choice) -> bytes:
        """The next event of a choice."""
        is_first = choice.sent == 0
        ids, text = generation.tell(choice)
        if choice.sent == 0 and not self._echo:
            return b""  # ended before it began: vLLM sends nothing of it
        if self._is_plain and not choice.is_over:
            return self._heads[choice.index] + text + PLAIN_END
        found, wish, prompt = self._found, self._found.wish, self._found.prompt_of(choice)
        said = text.decode()
        if self._echo and is_first:
            said = prompt.text if self._echo == "only" else prompt.text + said
        elif self._echo == "only":
            said = ""
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += len(said)
        event: dict[str, Any] = {**self.top, "choices": [{
            "index": choice.index,
            "text": said,
            "logprobs": _logprobs(found, choice, ids, self._echo if is_first else "", offset),
            "finish_reason": generation.finish_of(choice),
            "stop_reason": generation.stop_of(choice) if choice.is_over else None,
            "prompt_token_ids": prompt.ids.tolist() if is_first and (wish.returns_ids or self._echo) else None,
            "token_ids": ids if wish.returns_ids else None,
        }]}  # fmt: skip
        if wish.tells_usage_always:
            event["usage"] = generation.usage(choice.prompt_len, choice.sent)
        if choice.is_over and not wish.tells_usage:
            event["system_fingerprint"] = found.service.fingerprint
        return event_of(event)


async def _stream(found: Generation, send: Send, echo: str) -> None:
    events = _Events(found, echo)
    await begin_stream(send)
    try:
        while news := await found.news():
            for choice in news:
                generation.raise_if_failed(found.service, choice)
            await send(part(b"".join([events.of(choice) for choice in news])))
        tail = generation.usage_event(found, events.top)
    except Refused as error:
        tail = error.event()
    await end_stream(send, tail + DONE)

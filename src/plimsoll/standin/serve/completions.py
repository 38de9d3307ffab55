"""POST /v1/completions and /v1/chat/completions: their requests and answers, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from plimsoll.standin.request import RESERVED, piece
from plimsoll.standin.serve import protocol
from plimsoll.standin.serve.generation import MOST_SEQUENCES, Generation, event_of, prompt_of, tell
from plimsoll.standin.serve.protocol import ChatRequest, CompletionRequest, HttpRefusal
from plimsoll.standin.serve.service import Choice, Service

ROLE = "assistant"
STRIDE = 389  # between the drawn token and the others in its log probabilities


# Log probabilities in vLLM's shapes. There is no model: they are computed from the token, the same each time.


def _ranked(token: int, count: int) -> list[tuple[int, float]]:
    """Returns `count` tokens with their log probabilities, at least one: the drawn token, then others, each less likely."""
    first = -0.05 - (token * 7919 % 1000) / 1000
    return [((token + place * STRIDE) % RESERVED if place else token, first - 0.75 * place) for place in range(max(1, count))]


def _prompt_logprobs(generation: Generation, ids: list[int]) -> list[dict[str, Any] | None] | None:
    """Returns the log probabilities of a prompt's tokens, None for the first; None where they are not wanted."""
    count = generation.prompt_logprobs
    if count is None:
        return None
    return [None] + [
        {
            str(other): {"logprob": value, "rank": place + 1, "decoded_token": piece(other)}
            for place, (other, value) in enumerate(_ranked(token, count))
        }
        for token in ids[1:]
    ]


class Completion(Generation):
    """An answer of /v1/completions. `echo` is "first" where it begins with the prompt, "only" where the prompt is all."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    text_key = b'"text":"'
    plain_end = b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'

    def __init__(self, http: Request, asked: CompletionRequest) -> None:
        count = asked.logprobs
        super().__init__(
            http, asked, n=asked.n, max_tokens=asked.max_tokens, logprobs=count, prompt_logprobs=count if asked.echo else None
        )
        self.echo = "" if not asked.echo else "only" if asked.max_tokens == 0 else "first"
        self._offsets: dict[int, int] = {}  # for each choice, how much of its text was sent

    @property
    def is_plain(self) -> bool:
        return not self.echo and super().is_plain

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        ids, text = tell(choice)
        prompt, returns_ids = self.prompt_of(choice), self.asked.return_token_ids
        return {
            "index": choice.index,
            "text": self._said(choice, text.decode(), is_first=True),
            "logprobs": self._logprobs(choice, ids, 0, is_first=True),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            "token_ids": ids if returns_ids else None,
            "prompt_logprobs": _prompt_logprobs(self, prompt.ids.tolist()),
            "prompt_token_ids": prompt.ids.tolist() if returns_ids else None,
            "routed_experts": None,
        }

    def event(self, choice: Choice, ids: list[int], text: str, *, is_first: bool) -> dict[str, Any]:
        if choice.sent == 0 and not self.echo:
            return {}
        returns_ids, offset = self.asked.return_token_ids, self._offsets.get(choice.index, 0)
        said = self._said(choice, text, is_first=is_first)
        self._offsets[choice.index] = offset + len(said)
        shows_prompt = is_first and (returns_ids or self.echo)
        return {
            "index": choice.index,
            "text": said,
            "logprobs": self._logprobs(choice, ids, offset, is_first=is_first),
            "finish_reason": choice.finish if choice.is_over else None,
            "stop_reason": choice.stop_reason if choice.is_over else None,
            "prompt_token_ids": self.prompt_of(choice).ids.tolist() if shows_prompt else None,
            "token_ids": ids if returns_ids else None,
        }

    def _said(self, choice: Choice, text: str, *, is_first: bool) -> str:
        text = "" if self.echo == "only" else text
        return self.prompt_of(choice).text + text if self.echo and is_first else text

    def _logprobs(self, choice: Choice, ids: list[int], offset: int, *, is_first: bool) -> dict[str, Any] | None:
        """Returns the log probabilities of the shown tokens, an echoed prompt's too; they begin at `offset` in the text."""
        if self.logprobs is None:
            return None
        echoes = bool(self.echo) and is_first
        prompt: list[int] = self.prompt_of(choice).ids.tolist() if echoes else []
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for place, token in enumerate([*prompt, *([] if echoes and self.echo == "only" else ids)]):
            text, ranked = piece(token), _ranked(token, self.logprobs)
            has_none = echoes and place == 0  # nothing precedes a prompt's first token
            columns["text_offset"].append(offset)
            columns["token_logprobs"].append(None if has_none else ranked[0][1])
            columns["tokens"].append(text)
            columns["top_logprobs"].append(None if has_none else {piece(other): value for other, value in ranked})
            offset += len(text)
        return columns


class ChatCompletion(Generation):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_key = b'"delta":{"content":"'
    plain_end = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    def __init__(self, http: Request, asked: ChatRequest, max_tokens: int | None) -> None:
        super().__init__(
            http, asked, n=asked.n, max_tokens=max_tokens, logprobs=asked.top_logprobs if asked.logprobs else None,
            prompt_logprobs=asked.top_logprobs if asked.echo else None,
        )  # fmt: skip

    def about_prompt(self) -> dict[str, Any]:
        ids = self.prompts[0].ids.tolist()
        shown = ids if self.asked.return_token_ids else None
        return {"prompt_logprobs": _prompt_logprobs(self, ids), "prompt_token_ids": shown, "prompt_text": None}

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        ids, text = tell(choice)
        return {
            "index": choice.index,
            "message": {
                "role": ROLE, "content": text.decode(), "refusal": None, "annotations": None, "audio": None,
                "function_call": None, "reasoning": None,
            },
            "logprobs": self._logprobs(ids),
            "finish_reason": choice.finish or "stop",
            "stop_reason": choice.stop_reason,
            "token_ids": ids if self.asked.return_token_ids else None,
            "routed_experts": None,
        }  # fmt: skip

    def first_events(self) -> bytes:
        events = b""
        for choice in self.choices:
            delta = {"index": choice.index, "delta": {"role": ROLE, "content": ""}, "logprobs": None, "finish_reason": None}
            usage = {"usage": self.usage_of(choice)} if self.tells_usage_always else {}
            ids = self.prompts[0].ids.tolist() if self.asked.return_token_ids else None
            events += event_of(
                {**self.top(self.chunk_kind), "choices": [delta], **usage, "prompt_token_ids": ids, "prompt_text": None}
            )
        return events

    def usage_of(self, choice: Choice) -> dict[str, Any]:
        return {**super().usage_of(choice), "completion_tokens_details": None}

    def event(self, choice: Choice, ids: list[int], text: str, *, is_first: bool) -> dict[str, Any]:
        del is_first
        if choice.sent == 0:
            return {}
        return {
            "index": choice.index,
            "delta": {"content": text},
            "logprobs": self._logprobs(ids),
            "finish_reason": choice.finish if choice.is_over else None,
            **({"stop_reason": choice.stop_reason} if choice.is_over else {}),
            "token_ids": ids if self.asked.return_token_ids else None,
        }

    def _logprobs(self, ids: Sequence[int]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = []
        for token in ids:
            shown = [
                {"token": piece(other), "logprob": value, "bytes": list(piece(other).encode())}
                for other, value in _ranked(token, self.logprobs)
            ]
            content.append({**shown[0], "top_logprobs": shown[: self.logprobs]})
        return {"content": content}


async def invoke(service: Service, request: Request) -> Response:
    """Answers POST /invocations, which SageMaker calls: a chat where the body has messages, else a completion."""
    body = await protocol.json_body(request)
    return await (create_chat_completion if "messages" in body else create_completion)(service, request, body)


async def create_completion(service: Service, request: Request, body: dict[str, Any] | None = None) -> Response:
    asked = protocol.checked(CompletionRequest.model_validate, await protocol.json_body(request) if body is None else body)
    service.check_model(asked.model)
    if asked.stream and asked.use_beam_search:
        raise HttpRefusal(400, "Streaming is not currently supported with beam search")
    service.admit(asked.n)
    prompt = asked.prompt
    if asked.suffix is not None:
        is_text = isinstance(prompt, str)
        need = "is only supported for models with" if is_text else "requires text prompt input for"
        raise HttpRefusal(400, f"suffix {need} FIM completion rendering", param="suffix")
    if not prompt:
        raise HttpRefusal(400, "You must pass at least one prompt")
    each: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    if service.is_stopping and any(isinstance(one, str) for one in each):
        raise RuntimeError(protocol.STOPPED)  # its tokeniser ends first
    if len(each) > 1 and 1 <= asked.n <= MOST_SEQUENCES < len(each) * asked.n:  # vLLM itself has no bound
        count = len(each) * asked.n
        raise protocol.invalid(f"{len(each)} prompts with n={asked.n} are {count} answers; at most {MOST_SEQUENCES} are made.")
    prompts = [await prompt_of(service, asked, one, asked.max_tokens) for one in each]
    generation = Completion(request, asked)
    if generation.echo == "only":
        prompts = [replace(prompt, most=1) for prompt in prompts]
    return await generation.answer(prompts)


async def create_chat_completion(service: Service, request: Request, body: dict[str, Any] | None = None) -> Response:
    body = await protocol.json_body(request) if body is None else body
    if body.get("tools") and body.get("tool_choice", "auto") == "auto" and not service.options.has_tools:
        raise HttpRefusal(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    asked = protocol.checked(ChatRequest.model_validate, body)
    service.check_model(asked.model)
    service.admit(asked.n)
    if service.is_stopping:
        raise RuntimeError(protocol.STOPPED)  # its tokeniser ends first
    name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(asked, name)
    text = chat_text(asked.messages, adds_prompt=asked.add_generation_prompt)
    return await ChatCompletion(request, asked, max_tokens).answer([await prompt_of(service, asked, text, max_tokens, name)])


def chat_text(messages: Sequence[dict[str, Any]], *, adds_prompt: bool) -> str:
    """Returns the messages as one text, by a template of our own: the next turn's text begins with this one's."""
    if not messages:
        raise HttpRefusal(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    text = "".join(f"<|{message['role']}|>\n{_content(message.get('content'))}\n" for message in messages)
    return f"{text}<|{ROLE}|>\n" if adds_prompt else text


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        problem = {"type": "string_type", "loc": ("body", "messages"), "msg": "Input should be a valid string"}
        raise protocol.refusal([{**problem, "input": content}])
    texts: list[str] = []
    for one in content:
        kind = one.get("type") if isinstance(one, dict) else None
        if isinstance(one, str):
            texts.append(one)
        elif kind in ("text", "input_text", "refusal", "thinking"):
            texts.append(str(one.get("text", "")))
        elif kind in ("image_url", "input_audio", "audio_url", "video_url"):
            item = str(kind).removesuffix("_url").removeprefix("input_")
            raise HttpRefusal(400, f"At most 0 {item}(s) may be provided in one prompt.")
        else:
            raise HttpRefusal(400, f"Unknown part type: {kind}")
    return "\n".join(texts)

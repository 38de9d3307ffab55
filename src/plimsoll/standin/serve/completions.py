"""POST /v1/completions and /v1/chat/completions: their requests and answers, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from plimsoll.standin.serve import protocol
from plimsoll.standin.serve.generation import MOST_SEQUENCES, Generation, event_of, prompt_of, tell
from plimsoll.standin.serve.protocol import ChatMessage, ChatRequest, CompletionRequest, HttpRefusal
from plimsoll.standin.serve.service import Choice, Service

ROLE = "assistant"


class Completion(Generation):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    text_key = b'"text":"'
    plain_end = b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = tell(choice)
        return {
            "index": choice.index, "text": text.decode(), "logprobs": None, "finish_reason": choice.finish, "stop_reason": None,
            "token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None,
        }  # fmt: skip

    def event(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish if choice.is_over else None,
            "stop_reason": None, "prompt_token_ids": None, "token_ids": None,
        }  # fmt: skip


class ChatCompletion(Generation):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_key = b'"delta":{"content":"'
    plain_end = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
    about_prompt: ClassVar = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = tell(choice)
        return {
            "index": choice.index,
            "message": {
                "role": ROLE, "content": text.decode(), "refusal": None, "annotations": None, "audio": None,
                "function_call": None, "reasoning": None,
            },
            "logprobs": None, "finish_reason": choice.finish or "stop", "stop_reason": None, "token_ids": None,
            "routed_experts": None,
        }  # fmt: skip

    def first_events(self) -> bytes:
        events = b""
        for choice in self.choices:
            delta = {"index": choice.index, "delta": {"role": ROLE, "content": ""}, "logprobs": None, "finish_reason": None}
            usage = {"usage": self.usage_of(choice)} if self.tells_usage_always else {}
            nothing = {"prompt_token_ids": None, "prompt_text": None}
            events += event_of({**self.top(self.chunk_kind), "choices": [delta], **usage, **nothing})
        return events

    def usage_of(self, choice: Choice) -> dict[str, Any]:
        return {**super().usage_of(choice), "completion_tokens_details": None}

    def event(self, choice: Choice, text: str) -> dict[str, Any]:
        end = {"finish_reason": choice.finish, "stop_reason": None} if choice.is_over else {"finish_reason": None}
        return {"index": choice.index, "delta": {"content": text}, "logprobs": None, **end, "token_ids": None}


async def create_completion(service: Service, request: Request) -> Response:
    asked = protocol.checked(CompletionRequest.model_validate, await protocol.json_body(request))
    service.check_model(asked.model)
    service.admit(asked.n)
    prompt = asked.prompt
    if not prompt:
        raise HttpRefusal(400, "You must pass at least one prompt")
    each: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    if service.is_stopping and any(isinstance(one, str) for one in each):
        raise RuntimeError(protocol.STOPPED)  # its tokeniser ends first
    if len(each) > 1 and 1 <= asked.n <= MOST_SEQUENCES < len(each) * asked.n:  # vLLM itself has no bound
        count = len(each) * asked.n
        raise protocol.invalid(f"{len(each)} prompts with n={asked.n} are {count} answers; at most {MOST_SEQUENCES} are made.")
    prompts = [await prompt_of(service, one, asked.max_tokens) for one in each]
    return await Completion(request, asked, asked.n, asked.max_tokens).answer(prompts)


async def create_chat_completion(service: Service, request: Request) -> Response:
    asked = protocol.checked(ChatRequest.model_validate, await protocol.json_body(request))
    service.check_model(asked.model)
    service.admit(asked.n)
    if service.is_stopping:
        raise RuntimeError(protocol.STOPPED)  # its tokeniser ends first
    name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(asked, name)
    text = chat_text(asked.messages, adds_prompt=asked.add_generation_prompt)
    prompts = [await prompt_of(service, text, max_tokens, name)]
    return await ChatCompletion(request, asked, asked.n, max_tokens).answer(prompts)


def chat_text(messages: Sequence[ChatMessage], *, adds_prompt: bool) -> str:
    """Returns the messages as one text, by a template of our own: the next turn's text begins with this one's."""
    if not messages:
        raise HttpRefusal(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    text = "".join(f"<|{message.role}|>\n{_content(message.content)}\n" for message in messages)
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

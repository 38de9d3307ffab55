"""POST /v1/chat/completions: what it takes and answers, streamed or whole."""

from __future__ import annotations

from typing import Any

from plimsoll.inside.answers import Receive, Scope, Send
from plimsoll.standin.serve import completions, fields, generation
from plimsoll.standin.serve.completions import ids_of, prompt_logprobs, prompt_of, truncated
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
)
from plimsoll.standin.serve.generation import Generation
from plimsoll.standin.serve.service import Choice, Service

FIELDS = {
    **generation.FIELDS,
    "messages": Field("list", may_be_null=False),
    "logprobs": Field("bool"),
    "top_logprobs": Field("int"),
    "max_completion_tokens": Field("int"),
    "n": Field("int"),
    "tools": Field("list"),
    "echo": Field("bool", may_be_null=False),
    "add_generation_prompt": Field("bool", may_be_null=False),
    "continue_final_message": Field("bool", may_be_null=False),
}
# As the kinds of messages are called there, and what each must have.
KINDS = (
    ("ChatCompletionDeveloperMessageParam", ("role",)),
    ("ChatCompletionSystemMessageParam", ("role",)),
    ("ChatCompletionUserMessageParam", ("role",)),
    ("ChatCompletionAssistantMessageParam", ("role",)),
    ("ChatCompletionToolMessageParam", ("role", "tool_call_id")),
    ("ChatCompletionFunctionMessageParam", ("name", "role")),
    ("CustomChatCompletionMessageParam", ("role",)),
    ("Message", ("author", "role")),
)
ROLE = "assistant"
PLAIN_END = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


async def create(service: Service, scope: Scope, body: dict[str, Any], receive: Receive, send: Send) -> JsonAnswer | None:
    """Answer it: None where the answer was streamed."""
    _check_before(body, has_tools=service.options.has_tools)
    good = fields.check(FIELDS, body, needed=("messages",))
    service.check_model(good.get("model"))
    asked = good.get("max_completion_tokens", good.get("max_tokens"))
    top = good.get("top_logprobs", 0) if good.get("logprobs") else None
    wish = generation.sampling_params(good, asked, top, forces_usage=service.options.forces_usage)
    wish = wish._replace(priority=generation.priority_of(scope["headers"], wish.priority))
    if good.get("echo") and "prompt_logprobs" not in good:
        wish = wish._replace(prompt_logprobs=good.get("top_logprobs", 0))
    service.admit(wish.n)
    if service.is_stopping:
        raise stopped()  # its tokeniser ends first
    text = chat_text(good["messages"], adds_prompt=good.get("add_generation_prompt", True))
    limit = service.engine.config.max_model_len
    if asked is not None and asked > limit:
        named = "max_completion_tokens" if "max_completion_tokens" in good else "max_tokens"
        raise invalid(
            f"{named}={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens.", named, asked
        )
    prompt = prompt_of(service, truncated(await ids_of(text, good, limit), good, limit), text, asked)
    generation.check_bounds(good, wish, prompt.most, service.engine.config.sizes.vocab)
    found = Generation(service, generation.request_name("chatcmpl", scope["headers"], good.get("request_id")), [prompt], wish)
    try:
        await found.begin(receive)
        if wish.streams:
            await _stream(found, send)
            return None
        await found.end()
        return JsonAnswer(200, _whole(found))
    finally:
        found.close()


def _check_before(body: dict[str, Any], *, has_tools: bool) -> None:
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise invalid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if body.get("tools") == []:
        raise invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if body.get("tool_choice") not in (None, "none") and not body.get("tools"):
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    generation.check_before(body, "top_logprobs")
    if body.get("tools") and body.get("tool_choice", "auto") == "auto" and not has_tools:
        says = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        raise Refused(400, says, "BadRequestError")
    top = body.get("top_logprobs")
    if top is not None and (top == -1 or top > 0) and not body.get("logprobs"):
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")


def chat_text(messages: list[Any], *, adds_prompt: bool) -> str:
    """The messages as one text, by a template of our own: the next turn's text begins with the last one's."""
    wrong = [trouble for place, one in enumerate(messages) for trouble in _message_problems(place, one)]
    if wrong:
        raise fields.refusal(wrong)
    if not messages:
        says = "Cannot apply chat template to an empty conversation. Provide at least one message."
        raise Refused(400, says, "BadRequestError")
    said = "".join(f"<|{message['role']}|>\n{_content(message)}\n" for message in messages)
    return f"{said}<|{ROLE}|>\n" if adds_prompt else said


def _message_problems(place: int, message: Any) -> list[fields.Problem]:
    """A message of no kind: every kind there is says what it lacks."""
    at = ("body", "messages", place)
    if not isinstance(message, dict):
        return [fields.problem("dict_type", (*at, kind), "Input should be a valid dictionary", message) for kind, _ in KINDS]
    if "role" in message:
        return []
    return [
        fields.problem("missing", (*at, kind, name), "Field required", message)
        for kind, names in KINDS
        for name in names
        if name not in message
    ]


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise fields.refusal([fields.problem("string_type", ("body", "messages"), "Input should be a valid string", content)])
    texts: list[str] = []
    for one in content:
        kind = one.get("type") if isinstance(one, dict) else None
        if isinstance(one, str):
            texts.append(one)
        elif kind in ("text", "input_text", "refusal", "thinking"):
            texts.append(str(one.get("text", "")))
        elif kind in ("image_url", "input_audio", "audio_url", "video_url"):
            item = str(kind).removesuffix("_url").removeprefix("input_")
            raise Refused(400, f"At most 0 {item}(s) may be provided in one prompt.", "BadRequestError")
        else:
            raise Refused(400, f"Unknown part type: {kind}", "BadRequestError")
    return "\n".join(texts)


def _whole(found: Generation) -> dict[str, Any]:
    choices = [_choice(found, choice) for choice in found.choices]
    return {
        "id": found.name,
        "object": "chat.completion",
        "created": found.created,
        "model": found.service.names[0],
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": found.service.fingerprint,
        "usage": generation.full_usage(found),
        "prompt_logprobs": prompt_logprobs(found, found.prompts[0]),
        "prompt_token_ids": found.prompts[0].ids.tolist() if found.wish.returns_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(found: Generation, choice: Choice) -> dict[str, Any]:
    ids, text = generation.tell(choice)
    wish = found.wish
    return {
        "index": choice.index,
        "message": {
            "role": ROLE, "content": text.decode(), "refusal": None, "annotations": None, "audio": None, "function_call": None,
            "reasoning": None,
        },
        "logprobs": None if wish.logprobs is None else completions.of_chat(ids, wish.logprobs),
        "finish_reason": generation.finish_of(choice) or "stop",
        "stop_reason": generation.stop_of(choice),
        "token_ids": ids if wish.returns_ids else None,
        "routed_experts": None,
    }  # fmt: skip


class _Events:
    """What the events of one stream are made of; the usual one is put together from three pieces of bytes."""

    def __init__(self, found: Generation) -> None:
        wish = found.wish
        self._found = found
        self._is_plain = not (wish.tells_usage_always or wish.returns_ids or wish.logprobs is not None)
        self.top: dict[str, Any] = {
            "id": found.name, "object": "chat.completion.chunk", "created": found.created, "model": found.service.names[0],
        }  # fmt: skip
        head = b"data: " + dumped(self.top)[:-1] + b',"choices":[{"index":'
        self._heads = [b'%s%d,"delta":{"content":"' % (head, choice.index) for choice in found.choices]

    def first(self) -> bytes:
        """The role of the speaker, for every choice."""
        wish, prompt = self._found.wish, self._found.prompts[0]
        events: list[bytes] = []
        for choice in self._found.choices:
            delta = {"index": choice.index, "delta": {"role": ROLE, "content": ""}, "logprobs": None, "finish_reason": None}
            event: dict[str, Any] = {**self.top, "choices": [delta]}
            if wish.tells_usage_always:
                event["usage"] = {**generation.usage(choice.prompt_len, 0), "completion_tokens_details": None}
            event["prompt_token_ids"] = prompt.ids.tolist() if wish.returns_ids else None
            event["prompt_text"] = None
            events.append(event_of(event))
        return b"".join(events)

    def of(self, choice: Choice) -> bytes:
        """The next event of a choice."""
        ids, text = generation.tell(choice)
        if choice.sent == 0:
            return b""  # ended before it began: vLLM sends nothing of it
        if self._is_plain and not choice.is_over:
            return self._heads[choice.index] + text + PLAIN_END
        found, wish = self._found, self._found.wish
        delta: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": text.decode()},
            "logprobs": None if wish.logprobs is None else completions.of_chat(ids, wish.logprobs),
            "finish_reason": generation.finish_of(choice),
        }
        if choice.is_over:
            delta["stop_reason"] = generation.stop_of(choice)
        delta["token_ids"] = ids if wish.returns_ids else None
        event: dict[str, Any] = {**self.top, "choices": [delta]}
        if wish.tells_usage_always:
            event["usage"] = {**generation.usage(choice.prompt_len, choice.sent), "completion_tokens_details": None}
        if choice.is_over and not wish.tells_usage:
            event["system_fingerprint"] = found.service.fingerprint
        return event_of(event)


async def _stream(found: Generation, send: Send) -> None:
    events = _Events(found)
    await begin_stream(send)
    before = b""
    try:
        is_first = True
        while news := await found.news():
            for choice in news:
                generation.raise_if_failed(found.service, choice)
            before, is_first = (events.first() if is_first else b""), False
            await send(part(before + b"".join([events.of(choice) for choice in news])))
        tail = generation.usage_event(found, events.top)
    except Refused as error:
        tail = error.event()
    await end_stream(send, tail + DONE)

"""vLLM's ways of saying no: the shape of its errors, and the texts that clients know."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
STOPPED = "cannot schedule new futures after shutdown"
QUEUE_FULL = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
TOKENS_FULL = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """As vLLM answers it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def event(self) -> bytes:
        """As it stands in a stream that has begun: written by another hand in vLLM, with blanks."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


class Detail(Exception):
    """What the framework beneath vLLM answers itself: no such path, not that method."""

    def __init__(self, status: int, headers: tuple[tuple[bytes, bytes], ...] = (), says: str = "") -> None:
        super().__init__(says or HTTPStatus(status).phrase)
        self.status = status
        self.headers = headers


def invalid(message: str, param: str | None = None, value: object = None) -> Refused:
    """400: a value that vLLM itself refuses; it names the parameter and the value behind its message."""
    extras = [f"parameter={param}"] if param is not None else []
    extras += [f"value={value}"] if value is not None else []
    return Refused(400, f"{message} ({', '.join(extras)})" if extras else message, "BadRequestError", param)


def plain(status: int, message: str) -> Refused:
    """An error that is known by its status alone."""
    return Refused(status, message, HTTPStatus(status).phrase)


def no_model(name: object, served: tuple[str, ...]) -> Refused:
    """404: it serves other models."""
    message = f"The model `{name}` does not exist. Valid aliases: {', '.join(served)}."
    return Refused(404, message, "NotFoundError", "model")


def dead() -> Refused:
    """500: the engine has died."""
    return Refused(500, DEAD, "InternalServerError")


def stopped() -> Refused:
    """500: it is told to end, and finishes what it has."""
    return Refused(500, STOPPED, "InternalServerError")


def too_many_letters(letters: int, limit: int, each: int) -> Refused:
    """400: so long a text that it need not be taken apart to know that it is too long."""
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {letters} characters (more than "
        f"{limit * each} characters, which is the upper bound for {limit} input tokens). "
        "Please reduce the length of the input prompt.",
        "input_text",
        letters,
    )


def too_long(tokens: int, limit: int, *, is_text: bool) -> Refused:
    """400: the prompt alone is longer than the model allows. Of a text vLLM counts no further than the limit and one more."""
    tokens = limit + 1 if is_text else tokens
    said = f"at least {tokens}" if tokens == limit + 1 else str(tokens)
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {said} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        tokens,
    )

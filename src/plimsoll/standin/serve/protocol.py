"""The request bodies, as pydantic models like those behind vLLM's API, and the refusals.

The fields are vLLM's, as far as the stand-in uses them; others are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
STOPPED = "cannot schedule new futures after shutdown"
MOST_SHOWN = 10  # problems in one answer
MOST_INPUT = 200  # letters of a sent value
MOST_ERROR = 1000
MOST_PROMPTS = 1024  # VLLM_MAX_COMPLETION_PROMPTS
INT64 = 2**63 - 1
T = TypeVar("T")


class HttpRefusal(Exception):
    """A refused request, which is answered with an error in vLLM's shape."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid(message: str, param: str | None = None, value: object = None) -> HttpRefusal:
    """Returns a 400 for a value that vLLM itself refuses; the message ends with the parameter and the value."""
    extras = [f"parameter={param}"] if param is not None else []
    extras += [f"value={value}"] if value is not None else []
    return HttpRefusal(400, f"{message} ({', '.join(extras)})" if extras else message, param=param)


def plain(status: int, message: str) -> HttpRefusal:
    """Returns an error whose type is the phrase of its status."""
    return HttpRefusal(status, message, HTTPStatus(status).phrase)


def dead() -> HttpRefusal:
    return HttpRefusal(500, DEAD, "InternalServerError")


def dumped(value: Any) -> bytes:
    """Returns JSON without blanks and without escaped letters; a lone surrogate becomes a `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumped(content)


async def answer_refusal(request: Request, refused: Exception) -> Response:
    """Answers an HttpRefusal; one for a dead engine calls `on_death`, since vLLM notices the death by such a request."""
    assert isinstance(refused, HttpRefusal)
    if str(refused) == DEAD:
        request.app.state.service.on_death()
    return Json(refused.body, refused.status)


async def answer_framework(_request: Request, error: Exception) -> Response:
    """Answers an unknown path or method as the framework beneath vLLM does."""
    assert isinstance(error, HTTPException)
    return Json({"detail": error.detail}, error.status_code, headers=error.headers)


async def answer_mistake(_request: Request, error: Exception) -> Response:
    """Answers any other exception with 500, from outside all other layers."""
    return Json(HttpRefusal(500, str(error), "InternalServerError").body, 500)


# Checking: pydantic's problems in vLLM's words.

# Parts of pydantic's locations that name a kind of value and no field; any part with a bracket is one, too.
KINDS_OF_VALUES = frozenset(("str", "int", "bool"))


def checked(validate: Callable[..., T], value: object, where: str = "body") -> T:
    """Returns the validated value. Raises HttpRefusal with all problems."""
    try:
        return validate(value, from_attributes=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise refusal([{**problem, "loc": (where, *problem["loc"])} for problem in problems]) from None


def refusal(problems: list[dict[str, Any]]) -> HttpRefusal:
    """Returns a 400 with the problems, ten at most."""
    label = "error" if len(problems) == 1 else "errors"
    shown = []
    for problem in problems[:MOST_SHOWN]:
        place = ".".join(part for part in map(str, problem["loc"]) if "[" not in part and part not in KINDS_OF_VALUES)
        value = problem["input"]
        is_collection = isinstance(value, list | dict)
        sent = f"<{type(value).__name__} of {len(value)} items>" if is_collection else _cut(str(value), MOST_INPUT)
        shown.append({**problem, "loc": place, "input": sent})
    lines = [_cut(str(problem), MOST_ERROR) for problem in shown]
    if len(problems) > MOST_SHOWN:
        lines.append(f"...and {len(problems) - MOST_SHOWN} more {label}")
    message = "\n  ".join([f"{len(problems)} validation {label}:", *lines])
    return HttpRefusal(400, message, "Bad Request", shown[0]["loc"])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "...[truncated]"


async def json_body(request: Request) -> dict[str, Any]:
    body = await request.body()
    if request.headers.get("content-type", "").split(";", 1)[0].lower() != "application/json":
        raise plain(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    try:
        content = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise refusal([{**problem, "ctx": {"error": error.msg}}]) from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, thousands of brackets
        raise HTTPException(400, "There was an error parsing the body") from None
    if content is None:
        raise refusal([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    if not isinstance(content, dict):
        says = "Input should be a valid dictionary or object to extract fields from"
        raise refusal([{"type": "model_attributes_type", "loc": ("body",), "msg": says, "input": content}])
    return content


# The models.


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


# What only a model could answer: a client that asks for it is told so.
NOT_THERE = ("logprobs", "prompt_logprobs", "echo")


class GenerationRequest(BaseModel):
    """The fields that both endpoints share; each endpoint has its own `n` and `max_tokens`."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = Field(0, ge=-INT64 - 1, le=INT64)
    request_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_before(cls, body: Any) -> Any:
        """Makes the checks that come before those of types."""
        if absent := [name for name in NOT_THERE if body.get(name)]:
            raise invalid("A stand-in has no model: it gives neither log probabilities nor the prompt back.", absent[0])
        if body.get("stream_options") and not body.get("stream"):
            raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
        return body


class CompletionRequest(GenerationRequest):
    prompt: list[Annotated[int, Field(ge=0)]] | list[list[Annotated[int, Field(ge=0)]]] | str | list[str] | None = None
    max_tokens: int | None = 16
    n: int = 1

    @model_validator(mode="before")
    @classmethod
    def check_prompt(cls, body: Any) -> Any:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not all(type(one) is int for one in prompt) and len(prompt) > MOST_PROMPTS:
            raise invalid(
                f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MOST_PROMPTS}. To increase this "
                "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
                "prompt",
            )
        if prompt is None or prompt == "":
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return body


class ChatMessage(BaseModel):
    role: str
    content: Any = None


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: Annotated[int, BeforeValidator(lambda value: 1 if value is None else value)] = 1
    add_generation_prompt: bool = True

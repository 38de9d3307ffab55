"""The request bodies, as pydantic models like those behind vLLM's API, and the refusals.

The fields and the order of their checks are vLLM's, as far as the stand-in uses them; others are ignored, as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, GetPydanticSchema, ValidationError, model_validator
from pydantic_core import core_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
STOPPED = "cannot schedule new futures after shutdown"
MOST_SHOWN = 10  # problems in one answer
MOST_INPUT = 200  # letters of a sent value
MOST_ERROR = 1000
MOST_PROMPTS = 1024  # VLLM_MAX_COMPLETION_PROMPTS
MOST_SALT = 128
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
KINDS_OF_VALUES = frozenset(
    "str int bool ResponseFormat StructuralTag LegacyStructuralTag TokenizeTextRequest TokenizeChatRequest".split()
)


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


async def json_object(request: Request, complaint: str | None) -> dict[str, Any]:
    """Returns the body of a request to an endpoint that vLLM checks by hand; `complaint`: of one that is not JSON."""
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise plain(400, complaint or f"JSON decode error: {error}") from None
    if not isinstance(content, dict):
        raise plain(400, "Request body must be a JSON object")
    return content


# The models.


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]


class StructuralTag(BaseModel):
    type: Literal["structural_tag"]
    format: Any


class LegacyStructuralTag(BaseModel):
    type: Literal["structural_tag"]
    structures: list[Any]
    triggers: list[str]


class GenerationRequest(BaseModel):
    """The fields that both endpoints share; each endpoint has its own `n` and `max_tokens`."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    response_format: ResponseFormat | StructuralTag | LegacyStructuralTag | None = None
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None  # VLLM_MAX_STOP_STRINGS
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    priority: int = Field(0, ge=-INT64 - 1, le=INT64)
    request_id: str | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest):
    prompt: list[Annotated[int, Field(ge=0)]] | list[list[Annotated[int, Field(ge=0)]]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    suffix: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_before(cls, body: Any) -> Any:
        """Makes the checks that vLLM makes before it looks at types."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not all(type(one) is int for one in prompt) and len(prompt) > MOST_PROMPTS:
            raise invalid(
                f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MOST_PROMPTS}. To increase this "
                "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
                "prompt",
            )
        if prompt is None or prompt == "":
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        _check_before(body, "logprobs")
        return body


# vLLM's names for the kinds of messages, and the fields that each must have. A message of any other role is a Custom one.
Message = Annotated[
    dict[str, Any],
    GetPydanticSchema(
        lambda _source, _handler: core_schema.union_schema(
            [
                (
                    core_schema.typed_dict_schema(
                        {name: core_schema.typed_dict_field(core_schema.any_schema(), required=True) for name in names.split()},
                        extra_behavior="allow",
                    ),
                    kind,
                )
                for kind, names in (
                    ("ChatCompletionDeveloperMessageParam", "role"),
                    ("ChatCompletionSystemMessageParam", "role"),
                    ("ChatCompletionUserMessageParam", "role"),
                    ("ChatCompletionAssistantMessageParam", "role"),
                    ("ChatCompletionToolMessageParam", "role tool_call_id"),
                    ("ChatCompletionFunctionMessageParam", "name role"),
                    ("CustomChatCompletionMessageParam", "role"),
                    ("Message", "author role"),
                )
            ],
            mode="left_to_right",
        )
    ),
]


class ChatRequest(GenerationRequest):
    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: Annotated[int, BeforeValidator(lambda value: 1 if value is None else value)] = 1
    tools: list[Any] | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="before")
    @classmethod
    def check_before(cls, body: Any) -> Any:
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise invalid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if body.get("tools") == []:
            raise invalid(
                "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
            )
        if body.get("tool_choice") not in (None, "none") and not body.get("tools"):
            raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        _check_before(body, "top_logprobs")
        top = body.get("top_logprobs")
        if top is not None and (top == -1 or top > 0) and not body.get("logprobs"):
            raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        return body


def _check_before(body: dict[str, Any], logprobs_name: str) -> None:
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
        if value is None:
            continue
        if name == "prompt_logprobs" and body.get("stream") and (value > 0 or value == -1):
            raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if value < 0 and value != -1:
            raise invalid(f"`{name}` must be a positive value or -1.", name, value)


class TokenizeTextRequest(BaseModel):
    model: str | None = None
    prompt: str
    return_token_strs: bool | None = False


class TokenizeChatRequest(BaseModel):
    model: str | None = None
    messages: list[Message]
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT64)]]

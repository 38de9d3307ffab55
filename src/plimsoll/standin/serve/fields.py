"""The fields of a body, checked as the models behind vLLM's API check them; what is wrong is said in the same words.

Each problem is a dict as pydantic makes one. A string that reads as a number is a number, as there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from plimsoll.inside.answers import Headers, Message, Send

# vLLM's ways of saying no: the shape of its errors, and the texts that clients know.

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
        """The error body that vLLM sends."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def event(self) -> bytes:
        """The error inside a stream that has begun, which vLLM writes with blanks."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


class Detail(Exception):
    """An answer of the framework beneath vLLM: no such path, not that method."""

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


# What an API server was told by its flags and its environment, beside what its engine is.


class Options(NamedTuple):
    """Options of one server, named as the flags are."""

    host: str = ""
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    shutdown_timeout_s: float = 0.0
    middleware: tuple[str, ...] = ()
    root_path: str = ""
    is_dev_mode: bool = False  # VLLM_SERVER_DEV_MODE
    has_load_tracking: bool = False
    has_prompt_tokens_details: bool = False
    forces_usage: bool = False
    has_tools: bool = False  # --enable-auto-tool-choice with a parser: calls are allowed, and this model never makes one
    has_sleep_mode: bool = True  # --enable-sleep-mode: without it an engine that sleeps keeps its memory
    token: str = ""  # PLIMSOLL_TOKEN: opens /standin/

    @property
    def address(self) -> str:
        """The URL it listens at, as its log prints it."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


# How answers leave: JSON as vLLM's framework writes it, and streams of events.

DONE = b"data: [DONE]\n\n"
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
NO_VARY = (b"vary", b"")
VARY = (b"vary", b"Origin")  # every answer has it: vLLM lets a browser in by its origin


class JsonAnswer(NamedTuple):
    """A whole JSON answer."""

    status: int
    body: Any
    headers: Headers = ()


def dumped(value: Any) -> bytes:
    """JSON without blanks and with letters as they are; a lone surrogate becomes a `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event_of(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + dumped(value) + b"\n\n"


async def send_json(send: Send, answer: JsonAnswer) -> None:
    """Send a JSON answer."""
    await send_bytes(send, answer.status, dumped(answer.body), b"application/json", answer.headers)


async def send_bytes(send: Send, status: int, body: bytes, kind: bytes = b"", headers: Headers = ()) -> None:
    """Send a whole body; `kind` is its content type, none for an empty one."""
    found: list[tuple[bytes, bytes]] = [(b"content-length", str(len(body)).encode())]
    if kind:
        found.append((b"content-type", kind))
    own = () if any(name == VARY[0] for name, _ in headers) else (VARY,)
    headers = tuple(one for one in headers if one != NO_VARY)
    await send({"type": "http.response.start", "status": status, "headers": [*found, *headers, *own]})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send) -> None:
    """200, before the first token is there."""
    await send({"type": "http.response.start", "status": 200, "headers": [EVENTS, VARY]})


def part(body: bytes) -> Message:
    """One part of a stream."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def end_stream(send: Send, body: bytes) -> None:
    """The last part; the empty one behind it is what ends a stream in vLLM's framework, too."""
    await send(part(body))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


MOST_SHOWN = 10
MOST_INPUT = 200
MOST_ERROR = 1000
MOST_STOPS = 4  # VLLM_MAX_STOP_STRINGS
INT64 = 2**63 - 1
TOO_LARGE = "Unable to parse input string as an integer, exceeded maximum size"
TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "y": True, "t": True}
TRUTHS |= {"false": False, "0": False, "no": False, "off": False, "n": False, "f": False}


class Field(NamedTuple):
    """Type and bounds of a value."""

    kind: str  # one of _KINDS
    may_be_null: bool = True
    least: int | None = None
    most: int | None = None


ID = Field("int", least=0)
Problem = dict[str, Any]


def problem(kind: str, loc: tuple[str | int, ...], says: str, value: object, **more: object) -> Problem:
    """A problem as pydantic words it."""
    found: Problem = {"type": kind, "loc": ".".join(map(str, loc)), "msg": says, "input": _shown(value)}
    return {**found, "ctx": more} if more else found


def refusal(problems: list[Problem]) -> Refused:
    """400 with all of them, ten at most, as vLLM words it."""
    count = len(problems)
    label = "error" if count == 1 else "errors"
    lines = [_cut(str(one), MOST_ERROR) for one in problems[:MOST_SHOWN]]
    if count > MOST_SHOWN:
        lines.append(f"...and {count - MOST_SHOWN} more {label}")
    message = f"{count} validation {label}:\n" + "\n".join(f"  {line}" for line in lines)
    return Refused(400, message, "Bad Request", str(problems[0]["loc"]))


def object_of(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object in a body."""
    if content_type.split(";", 1)[0].lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(400, message, "Bad Request")
    try:
        found = json.loads(body) if body else None
    except UnicodeDecodeError:
        raise Detail(400, says="There was an error parsing the body") from None
    except (ValueError, RecursionError) as error:
        place = getattr(error, "pos", 0)
        why = getattr(error, "msg", str(error))
        wrong: Problem = {"type": "json_invalid", "loc": f"body.{place}", "msg": "JSON decode error", "input": _shown({})}
        raise refusal([{**wrong, "ctx": {"error": why}}]) from None
    if found is None:
        raise refusal([problem("missing", ("body",), "Field required", None)])
    if not isinstance(found, dict):
        says = "Input should be a valid dictionary or object to extract fields from"
        raise refusal([problem("model_attributes_type", ("body",), says, found)])
    return found


def check(fields: Mapping[str, Field], body: dict[str, Any], needed: Iterable[str] = ()) -> dict[str, Any]:
    """The fields that are known, each of its type; Refused with everything that is wrong."""
    problems: list[Problem] = []
    good: dict[str, Any] = {}
    missing = [name for name in needed if name not in body]
    problems += [problem("missing", ("body", name), "Field required", body) for name in missing]
    for name, field in fields.items():
        if name not in body:
            continue
        value = body[name]
        if value is None and field.may_be_null:
            continue
        checked, wrong = value_of(field, value, ("body", name))
        problems += wrong
        good[name] = checked
    if problems:
        raise refusal(problems)
    return good


def value_of(field: Field, value: Any, loc: tuple[str | int, ...]) -> tuple[Any, list[Problem]]:
    """The value as its type, and what is wrong with it."""
    checked, wrong = _KINDS[field.kind](value, loc)
    if not wrong and field.least is not None and checked < field.least:
        says = f"Input should be greater than or equal to {field.least}"
        wrong = [problem("greater_than_equal", loc, says, value, ge=field.least)]
    if not wrong and field.most is not None and checked > field.most:
        says = f"Input should be less than or equal to {field.most}"
        wrong = [problem("less_than_equal", loc, says, value, le=field.most)]
    return checked, wrong


Checked = tuple[Any, list[Problem]]


def _int(value: Any, loc: tuple[str | int, ...]) -> Checked:
    if isinstance(value, bool | int):
        return int(value), []
    if isinstance(value, float):
        if value.is_integer() and abs(value) > INT64:
            return None, [problem("int_parsing_size", loc, TOO_LARGE, value)]
        if value.is_integer():
            return int(value), []
        says = "Input should be a valid integer, got a number with a fractional part"
        return None, [problem("int_from_float", loc, says, value)]
    if isinstance(value, str):
        try:
            return int(value.strip()), []
        except ValueError:
            says = "Input should be a valid integer, unable to parse string as an integer"
            return None, [problem("int_parsing", loc, says, value)]
    return None, [problem("int_type", loc, "Input should be a valid integer", value)]


def _float(value: Any, loc: tuple[str | int, ...]) -> Checked:
    if isinstance(value, bool | int | float):
        with contextlib.suppress(OverflowError):  # a number of hundreds of digits
            return float(value), []
    elif isinstance(value, str):
        try:
            return float(value), []
        except ValueError:
            says = "Input should be a valid number, unable to parse string as a number"
            return None, [problem("float_parsing", loc, says, value)]
    return None, [problem("float_type", loc, "Input should be a valid number", value)]


def _bool(value: Any, loc: tuple[str | int, ...]) -> Checked:
    if isinstance(value, bool):
        return value, []
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value), []
    if isinstance(value, str | int | float):
        if isinstance(value, str) and value.lower() in TRUTHS:
            return TRUTHS[value.lower()], []
        return None, [problem("bool_parsing", loc, "Input should be a valid boolean, unable to interpret input", value)]
    return None, [problem("bool_type", loc, "Input should be a valid boolean", value)]


def _instance(kind: type, name: str, noun: str) -> Callable[[Any, tuple[str | int, ...]], Checked]:
    def checked(value: Any, loc: tuple[str | int, ...]) -> Checked:
        if isinstance(value, kind):
            return value, []
        return None, [problem(f"{name}_type", loc, f"Input should be a valid {noun}", value)]

    return checked


_str, _list, _dict = (
    _instance(*row) for row in ((str, "string", "string"), (list, "list", "list"), (dict, "dict", "dictionary"))
)


def _floats(value: Any, loc: tuple[str | int, ...]) -> Checked:
    found, wrong = _dict(value, loc)
    if wrong:
        return None, wrong
    each = {name: _float(one, (*loc, name)) for name, one in found.items()}
    return {name: one for name, (one, _) in each.items()}, [trouble for _, troubles in each.values() for trouble in troubles]


def _items(field: Field) -> Callable[[Any, tuple[str | int, ...]], Checked]:
    def checked(value: Any, loc: tuple[str | int, ...]) -> Checked:
        found, wrong = _list(value, loc)
        if wrong:
            return None, wrong
        each = [value_of(field, item, (*loc, place)) for place, item in enumerate(found)]
        return [item for item, _ in each], [trouble for _, troubles in each for trouble in troubles]

    return checked


def _strs(value: Any, loc: tuple[str | int, ...]) -> Checked:
    """Text, or a list of texts: both ways are tried, and both complain."""
    if isinstance(value, str):
        return [value], []
    wrong = _str(value, loc)[1]
    if not isinstance(value, list):
        return None, wrong + _list(value, loc)[1]
    each = [_str(one, (*loc, place))[1] for place, one in enumerate(value)]
    inner = [trouble for troubles in each for trouble in troubles]
    if len(value) > MOST_STOPS and not inner:
        says = f"List should have at most {MOST_STOPS} items after validation, not {len(value)}"
        limits = {"field_type": "List", "max_length": MOST_STOPS, "actual_length": len(value)}
        inner = [problem("too_long", loc, says, value, **limits)]
    return value, wrong + inner if inner else []


def _prompt(value: Any, loc: tuple[str | int, ...]) -> Checked:
    if isinstance(value, str) or (isinstance(value, list) and _is_prompt_list(value)):
        return value, []
    if isinstance(value, list):
        flat = [one for place, item in enumerate(value) for one in value_of(ID, item, (*loc, place))[1]]
        nested = [one for place, item in enumerate(value) for one in _list(item, (*loc, place))[1]]
        texts = [one for place, item in enumerate(value) for one in _str(item, (*loc, place))[1]]
        return None, flat + nested + _str(value, loc)[1] + texts
    return None, _list(value, loc)[1] * 2 + _str(value, loc)[1] + _list(value, loc)[1]


def _is_prompt_list(value: list[Any]) -> bool:
    if all(type(one) is int and one >= 0 for one in value) or all(isinstance(one, str) for one in value):
        return True
    return all(isinstance(one, list) and all(type(token) is int and token >= 0 for token in one) for one in value)


_KINDS = {
    "int": _int, "float": _float, "bool": _bool, "str": _str, "list": _list, "dict": _dict, "ints": _items(Field("int")),
    "ids": _items(Field("int", least=0, most=INT64)),
    "strs": _strs, "prompt": _prompt, "floats": _floats,
}  # fmt: skip


def _shown(value: object) -> object:
    if isinstance(value, str):
        return _cut(value, MOST_INPUT)
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return _cut(str(value), MOST_INPUT)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "...[truncated]"

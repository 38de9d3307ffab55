"""The parameters that completions and chat have in common: their types, their bounds, and how long an answer becomes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from plimsoll.standin.request import Ids
from plimsoll.standin.serve.fields import INT64, Field, Problem, invalid, problem, refusal, value_of

MOST_SEQUENCES = 16_384  # VLLM_MAX_N_SEQUENCES
MOST_LOGPROBS = 20
MOST_SALT = 128
GREEDY_BELOW = 1e-5  # of the temperature
PRIORITY = 2**31 - 1  # the scheduler's own numbers; who comes with larger ones is first or last all the same
SHORT = 64  # who asks for so few tokens gets them all: models seldom end so early
MEAN_LENGTH, SPREAD = 200.0, 0.8  # of answers that end by themselves: log-normal

FORMATS = ("text", "json_object", "json_schema")
FIELDS = {
    "model": Field("str"),
    "frequency_penalty": Field("float"),
    "presence_penalty": Field("float"),
    "repetition_penalty": Field("float"),
    "temperature": Field("float"),
    "top_p": Field("float"),
    "top_k": Field("int"),
    "min_p": Field("float"),
    "logit_bias": Field("floats"),
    "max_tokens": Field("int"),
    "seed": Field("int", least=-INT64 - 1, most=INT64),
    "stop": Field("strs"),
    "stop_token_ids": Field("ints"),
    "include_stop_str_in_output": Field("bool", may_be_null=False),
    "ignore_eos": Field("bool", may_be_null=False),
    "min_tokens": Field("int", may_be_null=False),
    "stream": Field("bool"),
    "stream_options": Field("dict"),
    "prompt_logprobs": Field("int"),
    "response_format": Field("dict"),
    "user": Field("str"),
    "priority": Field("int", may_be_null=False, least=-INT64 - 1, most=INT64),
    "request_id": Field("str", may_be_null=False),
    "return_token_ids": Field("bool"),
    "truncate_prompt_tokens": Field("int", least=-1, most=INT64),
    "truncation_side": Field("str"),
    "use_beam_search": Field("bool", may_be_null=False),
    "skip_special_tokens": Field("bool", may_be_null=False),
    "add_special_tokens": Field("bool", may_be_null=False),
    "cache_salt": Field("str"),
}


class Wish(NamedTuple):
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


def wish_of(good: dict[str, Any], max_tokens: int | None, logprobs: int | None, *, forces_usage: bool) -> Wish:
    """From fields that have been checked."""
    check_format(good.get("response_format"))
    asked = good.get("stream_options") or {}
    for name in ("include_usage", "continuous_usage_stats"):
        if asked.get(name) is not None:
            value, wrong = value_of(Field("bool"), asked[name], ("body", "stream_options", name))
            if wrong:
                raise refusal(wrong)
            asked = {**asked, name: value}
    tells = forces_usage or bool(asked.get("include_usage"))
    return Wish(
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
    plain = "'text', 'json_object' or 'json_schema'"
    tag = "'structural_tag'"
    wrong = [_literal(plain, at, kind), _literal(tag, at, kind), _missing("format", at, asked), _literal(tag, at, kind)]
    raise refusal([*wrong, _missing("structures", at, asked), _missing("triggers", at, asked)])


def _literal(expected: str, at: tuple[str, ...], kind: object) -> Problem:
    return problem("literal_error", (*at, "type"), f"Input should be {expected}", kind, expected=expected)


def _missing(name: str, at: tuple[str, ...], asked: dict[str, Any]) -> Problem:
    return problem("missing", (*at, name), "Field required", asked)


def check_before(body: dict[str, Any], logprobs_name: str) -> None:
    """What vLLM checks before it looks at types."""
    _check_salt(body.get("cache_salt"))
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


def _check_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MOST_SALT or set(salt) & set("@/\\\0"):
        raise invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.", "cache_salt"
        )


def check_bounds(good: dict[str, Any], wish: Wish, most: int, vocabulary: int) -> None:
    """What vLLM checks of the parameters once it knows the prompt; `most` is how many tokens it may produce."""
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


def check_count(prompts: int, wish: Wish) -> None:
    """As many answers to one request as vLLM allows to one prompt; for many prompts with many each it has no bound."""
    if prompts > 1 and 1 <= wish.n <= MOST_SEQUENCES < prompts * wish.n:
        raise invalid(f"{prompts} prompts with n={wish.n} are {prompts * wish.n} answers; at most {MOST_SEQUENCES} are made.")


def _biased(bias: dict[str, float]) -> list[int]:
    """The tokens that are to be more or less likely."""
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


def seed_of(prompt: Ids, wish: Wish, choice: int) -> int:
    """What an answer is drawn from: the same prompt gets the same answer."""
    return (zlib.crc32(prompt.tobytes()) + wish.seed + 0x9E3779B1 * choice) & 0x7FFFFFFF


def length_of(wish: Wish, most: int, seed: int) -> tuple[int, str]:
    """How many tokens an answer has, and why it ends."""
    if wish.ignores_end or (wish.max_tokens is not None and most <= SHORT):
        return most, "length"
    drawn = np.random.Generator(np.random.PCG64(seed)).lognormal(math.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD)
    wanted = max(1, wish.min_tokens, round(drawn))
    return (wanted, "stop") if wanted < most else (most, "length")

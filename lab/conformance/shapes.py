"""The shape of a JSON value: its keys, the kinds of its values, and the values themselves where they are facts of a server."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

# Keys whose values no two runs share: ids, times, and all that a model draws. Of these the kind alone counts.
FREE = frozenset({
    "id", "created", "text", "content", "tokens", "token", "token_logprobs", "top_logprobs", "text_offset", "bytes", "logprob",
    "system_fingerprint", "date", "content-length", "x-request-id",
})  # fmt: skip
ANY = "*"  # among the free keys: no value counts, only the keys do
KIND = "kind: "  # what a recording has in place of a large free value begins so
LARGE = 400  # characters of a free value above which a recording keeps its kind alone


def is_answer(value: dict[str, Any]) -> bool:
    """Whether a part of a recording is one answer, as `client.see` gives it."""
    return isinstance(value.get("status"), int) and ("whole" in value or "error" in value)


def kind(value: Any) -> str:
    """The kind of a value in words; of a list also the kinds in it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return value.removeprefix(KIND) if value.startswith(KIND) else "text"
    if isinstance(value, dict):
        return "object"
    return f"list of {' or '.join(sorted({kind(one) for one in value})) or 'nothing'}"


def shape(value: Any, free: Collection[str] = ()) -> Any:
    """The same with every free value replaced by its kind in angle brackets."""
    if isinstance(value, dict):
        return {key: f"<{kind(one)}>" if _is_free(key, one, free) else shape(one, free) for key, one in value.items()}
    if isinstance(value, list):
        return (
            f"<{kind(value)}>"
            if ANY in free and not any(isinstance(one, dict) for one in value)
            else [shape(one, free) for one in value]
        )
    return f"<{kind(value)}>" if ANY in free else value


def _is_free(key: str, value: Any, free: Collection[str]) -> bool:
    if key in free:
        return True
    # A chat's log probabilities are a list of objects under `content`, whose keys count.
    has_own_keys = isinstance(value, list) and any(isinstance(one, dict) and "token" in one for one in value)
    return key in FREE and not has_own_keys and not isinstance(value, dict)


def event_shape(event: Any, free: Collection[str] = ()) -> Any:
    """The shape of one event of a stream; how many tokens one has is a matter of speed, so usage amid a stream is free."""
    is_amid = isinstance(event, dict) and event.get("choices")
    return _once(shape(event, {*free, "usage", "alike"} if is_amid else free))


def _once(value: Any) -> Any:
    """The same, but of equal things in a row one: a chunk may hold one token or several."""
    if isinstance(value, dict):
        return {key: _once(one) for key, one in value.items()}
    return [one for one, _ in itertools.groupby(map(_once, value))] if isinstance(value, list) else value


def folded(events: list[Any], free: Collection[str] = ()) -> list[Any]:
    """The events of a stream; of a run of events of one shape the first alone, with `alike`: how many there were."""
    found = []
    for _, run in itertools.groupby(events, key=lambda event: event_shape(event, free)):
        first, *others = run
        found.append(first if not others else {**first, "alike": 1 + len(others)} if isinstance(first, dict) else first)
    return found

"""What two recordings disagree on, apart from what no two runs share and from what is allowed, each with its reason."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from lab.conformance.shapes import event_shape, is_answer, shape


class Difference(NamedTuple):
    """One place at which the recordings disagree; `None` stands for "is not there" too."""

    where: str
    real: Any
    standin: Any

    def __str__(self) -> str:
        return f"{self.where}: real {_short(self.real)}, stand-in {_short(self.standin)}"


class Allowed(NamedTuple):
    """Differences that are accepted: a place as a shell pattern, and why."""

    where: str
    reason: str


class Near(NamedTuple):
    """Numbers that need not be equal: how far apart they may be, and why."""

    where: str
    share: float  # of the larger one
    plus: float
    reason: str


class Either(NamedTuple):
    """Values that a race decides: any of these will do, and why."""

    where: str
    values: tuple[Any, ...]
    reason: str


# Accepted differences between vLLM 0.32.0's CPU build and the stand-in.
_HAS_A_CARD = "the stand-in has a card and the CPU build has none: this is what a worker on a GPU says, held against an H200"
_NO_PROCESSES = "the stand-in is one process: there are no workers with ancestors, torch or a sampler to time"
ALLOWED: tuple[Allowed, ...] = (
    Allowed("main/*/workers/0/allocator", _HAS_A_CARD),
    Allowed("main/*/workers/0/device_memory", _HAS_A_CARD),
    Allowed("main/*/workers/0/budget/*", _HAS_A_CARD),
    Allowed("main/*/workers/0/reasons/*", _HAS_A_CARD),
    Allowed("main/gate/compact/json/workers/0/*", _HAS_A_CARD),
    Allowed("main/metrics/families/plimsoll_torch_*", _HAS_A_CARD),
    Allowed("main/metrics/families/plimsoll_device_*", _HAS_A_CARD),
    Allowed("main/*/workers/0/ancestors", _NO_PROCESSES),
    Allowed("main/*/workers/0/torch", _NO_PROCESSES),
    Allowed("main/*/workers/0/sample_us", _NO_PROCESSES),
    Allowed("main/requests/GET /docs/*", "the stand-in has no page of documentation"),
    Allowed("main/metrics/families/http_*/handler", "/docs, which the stand-in has not, is a handler of its own"),
    Allowed("main/metrics/families/vllm:sleep_mode_*", "how long sleeping and waking take is not imitated, and not shown"),
)

NEAR = (
    Near("small/held/vllm:iteration_tokens_total*", 0.0, 1.0, "one step of 1,836 more; why is not known"),
    Near("*/seconds", 0.0, 30.0, "how long an end takes is the machine's affair"),
    Near("main/counters/n=3/vllm:iteration_tokens_total_[bc]*", 0.5, 3.0, "its parts may begin in one step or in two"),
    Near("main/counters/two prompts/vllm:iteration_tokens_total_[bc]*", 0.5, 4.0, "the two may begin in one step or in two"),
    Near("small/at once/*", 0.5, 4.0, "six clients at once arrive in any order, and over several steps"),
)

EITHER = (
    Either(
        "main/sigterm/ends/*",
        ("abort", "error 500", "cut", "no answer"),
        "the engine core is killed at once: after its last words, or before and the API server notices, or does not and hangs",
    ),
)

MISSING = "(not there)"
SAID = "said"  # the last words of a start that failed: kept to be read, not compared


def differences(real: Any, standin: Any) -> list[Difference]:
    """Everything the two disagree on."""
    return list(_differences("", comparable(real), comparable(standin)))


def beyond(found: Sequence[Difference], allowed: Sequence[Allowed] = ALLOWED) -> list[Difference]:
    """Those that nothing allows."""
    return [one for one in found if not any(fnmatch.fnmatchcase(one.where, rule.where) for rule in allowed)]


def unused(found: Sequence[Difference], allowed: Sequence[Allowed] = ALLOWED) -> list[Allowed]:
    """The rules that allow nothing any more."""
    return [rule for rule in allowed if not any(fnmatch.fnmatchcase(one.where, rule.where) for one in found)]


def comparable(value: Any, free: Collection[str] = ()) -> Any:
    """A recording with everything that no two runs share replaced by its kind."""
    if isinstance(value, dict):
        if is_answer(value):
            return _comparable_answer(value)
        return {key: comparable(one, free) for key, one in value.items() if key != SAID}
    if isinstance(value, list):
        return [comparable(one, free) for one in value]
    return value


def _comparable_answer(seen: dict[str, Any]) -> dict[str, Any]:
    free = seen.get("free", ())
    found = {key: shape(value, free if key == "json" else ()) for key, value in seen.items() if key not in ("events", "free")}
    if "page" in free:
        found["page"] = "<text>"
    if "events" in seen:
        found["events"] = streams(seen["events"], free)
    return found


def streams(events: Sequence[Any], free: Collection[str] = ()) -> dict[str, list[Any]]:
    """The events of each choice apart, for choices come in any order; a run of one shape counts once, as do empty deltas."""
    found: dict[str, list[Any]] = {}
    for event in events:
        of = _choice(event)
        own = event_shape(event, free)
        if isinstance(own, dict):
            own.pop("alike", None)
        lane = found.setdefault(of, [])
        if not lane or lane[-1] != own:
            lane.append(own)
    whole = {of: _in_two(lane) for of, lane in found.items()}
    return {"order": [of for of, _ in itertools.groupby(_order(events))], **whole}


def _in_two(lane: list[Any]) -> list[Any]:
    """On a late machine one event has all the tokens of a short stream: it stands for one that goes on and one that ends."""
    last = lane[-1]
    choices = last.get("choices") if isinstance(last, dict) else None
    if not choices or not choices[0].get("finish_reason"):
        return lane
    going_on = {**last, "choices": [{**choices[0], "finish_reason": None}, *choices[1:]]}
    return lane if going_on in lane else [*lane[:-1], going_on, last]


def _order(events: Sequence[Any]) -> list[str]:
    return ["choice" if _choice(event).startswith("choice") else "rest" for event in events]


def _choice(event: Any) -> str:
    choices = event.get("choices") if isinstance(event, dict) else None
    return f"choice {choices[0].get('index')}" if choices else "rest"


def _differences(where: str, real: Any, standin: Any) -> Iterator[Difference]:
    if isinstance(real, dict) and isinstance(standin, dict):
        for key in dict.fromkeys([*real, *standin]):
            place = f"{where}/{key}" if where else str(key)
            if key in real and key in standin and not _is_race(place, real[key], standin[key]):
                yield from _differences(place, real[key], standin[key])
            elif (key in real) != (key in standin) and _is_far(place, real.get(key, 0), standin.get(key, 0)):
                yield Difference(place, real.get(key, MISSING), standin.get(key, MISSING))
    elif _has_parts(real) and _has_parts(standin) and len(real) == len(standin):
        for index, (one, other) in enumerate(zip(real, standin, strict=True)):
            yield from _differences(f"{where}/{index}", one, other)
    elif real != standin and _is_far(where, real, standin):
        yield Difference(where, real, standin)


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, dict | list) for one in value)


def _is_race(where: str, real: Any, standin: Any) -> bool:
    """Whether both are what a race may lead to; where a key begins with `maybe`, one list may lack what the other has."""
    if where.rpartition("/")[2].startswith("maybe "):
        return set(real) <= set(standin) or set(standin) <= set(real)
    return any({real, standin} <= set(rule.values) for rule in EITHER if fnmatch.fnmatchcase(where, rule.where))


def _is_far(where: str, real: Any, standin: Any) -> bool:
    """Whether the values differ by more than the first rule for this place lets them."""
    if not (_is_number(real) and _is_number(standin)):
        return True
    for rule in NEAR:
        if fnmatch.fnmatchcase(where, rule.where):
            return bool(abs(real - standin) > rule.share * max(abs(real), abs(standin)) + rule.plus)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

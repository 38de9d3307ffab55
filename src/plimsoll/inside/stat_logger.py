"""The stat logger that vLLM loads by its entry point; the only module of ours that imports vLLM when it is imported."""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.listener import Listener
from plimsoll.inside.pulse import PULSE, Pulse
from plimsoll.inside.recorder import ON_REQUEST, RECORDER, Recorder, Seen, from_state

# vLLM's stat loggers are not told a request's priority, the tokens of its prompt, nor that a client gave it up. So, only while
# requests are recorded, three methods of vLLM's output processor are wrapped. Each calls vLLM's own with what it
# was given and returns what that returns. A release whose methods look otherwise is left alone, and that is said once.

_IS_WRAPPED = "plimsoll_wrapped"
_EXPECTED = {
    "add_request": ("self", "request"),
    "_update_stats_from_finished": ("self", "req_state", "finish_reason", "iteration_stats"),
    "abort_requests": ("self", "request_ids"),
}


def watch_requests(recorder: Recorder = RECORDER, pulse: Pulse = PULSE, processor: Any = None) -> bool:
    """Wrap the output processor, if requests are recorded and it looks as expected; whether it is wrapped then."""
    if not recorder.is_on:
        return False
    try:
        if processor is None:
            processor = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
        if hasattr(processor, _IS_WRAPPED):
            return True
        for name, expected in _EXPECTED.items():
            found = tuple(inspect.signature(getattr(processor, name)).parameters)
            if found[: len(expected)] != expected:
                raise TypeError(name)
        processor.add_request = _seen_first(processor.add_request, recorder)
        processor._update_stats_from_finished = _handed_on(processor._update_stats_from_finished)  # noqa: SLF001
        processor.abort_requests = _told_of_aborts(processor.abort_requests, recorder, pulse)
        setattr(processor, _IS_WRAPPED, True)
    except Exception:
        FAULTS.say(
            "watching requests",
            "this vLLM's output processor looks unlike those known: recorded without priorities, hashes and given-up requests",
        )
        return False
    return True


def _seen_first(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        result = original(self, request, *rest, **named)
        try:
            state = self.request_states.get(request.request_id)
            if state is not None and not hasattr(state, ON_REQUEST):
                setattr(state, ON_REQUEST, what_is_seen(request, wants_prefixes=recorder.wants_prefixes))
        except Exception as error:
            FAULTS.note("seeing a request come", error)
        return result

    return add_request


def _handed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, req_state: Any, finish_reason: Any, iteration_stats: Any = None, *rest: Any, **named: Any) -> Any:
        # A release that passes more than is known here gets it through: what is refused here would end its engine.
        result = original(self, req_state, finish_reason, iteration_stats, *rest, **named)
        try:
            seen = getattr(req_state, ON_REQUEST, None)
            if seen is not None and iteration_stats is not None and iteration_stats.finished_requests:
                first_s = getattr(req_state.stats, "first_token_latency", None)
                setattr(iteration_stats.finished_requests[-1], ON_REQUEST, seen._replace(first_token_s=first_s))
        except Exception as error:
            FAULTS.note("seeing a request end", error)
        return result

    return update


def _told_of_aborts(original: Callable[..., Any], recorder: Recorder, pulse: Pulse) -> Callable[..., Any]:
    inner: set[int] = set()  # processors that are at it: a parent request aborts its children by the same method

    @functools.wraps(original)
    def abort_requests(self: Any, *rest: Any, **named: Any) -> Any:
        if id(self) in inner:
            return original(self, *rest, **named)
        before: dict[str, Any] = {}
        try:
            before = dict(self.request_states)
        except Exception as error:
            FAULTS.note("seeing requests given up", error)
        inner.add(id(self))
        try:
            gone = original(self, *rest, **named)
        finally:
            inner.discard(id(self))
        try:
            _note_aborts([before[one] for one in gone if one in before], recorder, pulse)
        except Exception as error:
            FAULTS.note("seeing requests given up", error)
        return gone

    return abort_requests


def _note_aborts(states: list[Any], recorder: Recorder, pulse: Pulse) -> None:
    for state in states:
        request = from_state(state, time.time())
        if request is not None:
            pulse.note_finished(request.prompt_tokens, None)
            recorder.note_finished(request)


def what_is_seen(request: Any, *, wants_prefixes: bool) -> Seen:
    """What a request says when it comes: its priority, and the tokens with all else that vLLM's prefix cache tells apart."""
    priority = getattr(request, "priority", None)
    token_ids = request.prompt_token_ids if wants_prefixes else None
    marks = _marks(request)
    if token_ids is None or getattr(request, "prompt_embeds", None) is not None or marks is None:
        return Seen(priority if type(priority) is int else None, None, "", ())
    adapter = request.lora_request
    seed = f"{'' if adapter is None else adapter.lora_name}\0{getattr(request, 'cache_salt', None) or ''}"
    return Seen(priority if type(priority) is int else None, token_ids, seed, marks)


def _marks(request: Any) -> tuple[tuple[int, str], ...] | None:
    """Where pictures and sounds stand in the prompt and what they are; None if that cannot be told."""
    features = getattr(request, "mm_features", None)
    if features:
        return tuple((one.mm_position.offset, str(one.identifier)) for one in features)
    # Up to 0.10 in three lists, with hashes only where the prefix cache is on.
    if getattr(request, "mm_inputs", None) or getattr(request, "mm_kwargs", None):
        hashes, places = getattr(request, "mm_hashes", None), getattr(request, "mm_placeholders", None)
        if not hashes or not places or len(hashes) != len(places):
            return None
        return tuple((place.offset, str(one)) for place, one in zip(places, hashes, strict=True))
    return ()


_LOGGERS: Any = importlib.import_module("vllm.v1.metrics.loggers")
# vLLM tells a logger of one engine nothing of sleep: its adapter does not hand that on. One for all engines hears it.
_BASE: Any = getattr(_LOGGERS, "AggregateStatLoggerBase", _LOGGERS.StatLoggerBase)


class StatLogger(Listener, _BASE):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Tells the pulse and the recorder what vLLM says at each step."""

    def __init__(self, vllm_config: Any = None, engine_index: Any = 0, **named: Any) -> None:
        # `engine_index` is a number, or with vLLM's base for all engines a list of them.
        self.vllm_config = vllm_config
        self.engine_indexes = named.get("engine_indexes", engine_index)
        self.listen(engine_index if isinstance(engine_index, int) else 0)
        watch_requests()


# A method that a later vLLM asks every logger to have must not keep a server from starting: it is not there, and that is all.
StatLogger.__abstractmethods__ = frozenset()

"""Hears each step of the engine from vLLM and tells the pulse and the recorder; nothing that it meets stops vLLM.

What vLLM calls a stat logger is a class with a base of vLLM's; that one is in stat_logger.py, this is all of it that
needs no vLLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.pulse import PULSE, Pulse
from plimsoll.inside.recorder import ON_REQUEST, RECORDER, Recorder, Seen, from_state, from_stats


class Listener:
    """A stat logger of any release: what they pass differs, so all is taken and what is known is used."""

    def listen(self, engine: int, pulse: Pulse = PULSE, recorder: Recorder = RECORDER) -> None:
        """Begin; `engine` is who speaks where vLLM does not say it."""
        self._engine = engine
        self._pulse = pulse
        self._recorder = recorder
        pulse.is_fed = True

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *rest: Any, **named: Any) -> None:
        """One step. Up to 0.9 there is no more than these two; then the engine comes third; from 0.11.1 on by its name."""
        try:
            engine = named.get("engine_idx")
            if engine is None:
                engine = next((value for value in rest if type(value) is int), self._engine)
            self._record(scheduler_stats, iteration_stats, engine)
        except Exception as error:
            FAULTS.note("hearing a step", error)

    def record_sleep_state(self, *state: Any, **named: Any) -> None:
        """Asleep or awake. The base class calls the first argument `is_awake`; what vLLM passes is 1 for asleep."""
        try:
            values = (*state, *named.values())
            self._pulse.note_sleep(bool(values[0]), int(values[1]) if len(values) > 1 else 0)
        except Exception as error:
            FAULTS.note("hearing of sleep", error)

    def record_admission_rejection(self, *reason: Any, **named: Any) -> None:
        """Nothing to do: vLLM counts these itself."""

    def log_engine_initialized(self) -> None:
        """Nothing to do."""

    def log(self) -> None:
        """Nothing to do: there is no line of ours in the log."""

    def _record(self, scheduler: Any, iteration: Any, engine: int) -> None:
        if scheduler is None and iteration is None:
            return  # a message between processes, no step
        now = time.monotonic()
        running = waiting = kv_usage = None
        if scheduler is not None:
            running = scheduler.num_running_reqs
            waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
            kv_usage = getattr(scheduler, "kv_cache_usage", None)
            if kv_usage is None:
                kv_usage = getattr(scheduler, "gpu_cache_usage", None)  # its name up to 0.9.0
        if iteration is None:
            self._pulse.note_step(running, waiting, kv_usage, 0, 0, now, engine)
            return
        prompt, generation = iteration.num_prompt_tokens, iteration.num_generation_tokens
        self._pulse.note_step(running, waiting, kv_usage, prompt, generation, now, engine)
        for stats in iteration.finished_requests:
            request = from_stats(stats, iteration.iteration_timestamp, engine)
            self._pulse.note_finished(request.prompt_tokens, None if request.is_cut_off else request.output_tokens)
            self._recorder.note_finished(request)


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
            parameters = tuple(inspect.signature(getattr(processor, name)).parameters)
            if parameters[: len(expected)] != expected:
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
                setattr(iteration_stats.finished_requests[-1], ON_REQUEST, replace(seen, first_token_s=first_s))
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
            for name in gone:
                request = from_state(before[name], time.time()) if name in before else None
                if request is not None:
                    pulse.note_finished(request.prompt_tokens, None)
                    recorder.note_finished(request)
        except Exception as error:
            FAULTS.note("seeing requests given up", error)
        return gone

    return abort_requests


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
        return tuple((feature.mm_position.offset, str(feature.identifier)) for feature in features)
    # Up to 0.10 in three lists, with hashes only where the prefix cache is on.
    if getattr(request, "mm_inputs", None) or getattr(request, "mm_kwargs", None):
        hashes, places = getattr(request, "mm_hashes", None), getattr(request, "mm_placeholders", None)
        if not hashes or not places or len(hashes) != len(places):
            return None
        return tuple((place.offset, str(feature)) for place, feature in zip(places, hashes, strict=True))
    return ()

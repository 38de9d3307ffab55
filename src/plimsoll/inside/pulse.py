"""The engine's load and speed, as its steps report them to the API server: running, waiting, tokens per second, step length.

The pulse itself reads no clock and nothing else: the listener feeds it, the gate reads it, both in one event loop. A step costs
a few additions and an exponential, whatever came before. The listener is the part of a vLLM stat logger that needs no vLLM
(the class with a base of vLLM's is in stat_logger.py); no error in it stops vLLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.recorder import ON_REQUEST, RECORDER, Recorder, Seen, from_state, from_stats

RATE_WINDOW_S = 20.0  # busy time after which a step counts for 1/e of a new one
RATE_NEEDS_S = 1.0  # busy time before a rate is given at all
GAP_LIMIT_S = 10.0  # a longer gap between two steps counts as this much busy time: a pause is not work
PARTIAL_GAP_S = 1.0  # the limit where other API servers get steps that this one does not; a longer gap may be idleness
# A paused engine looks like one very long step. Remembered in full, it would excuse a stuck engine for hours.
STEP_LIMIT_S = 600.0
STEP_MEMORY_S = 1800.0  # the longest step is remembered for at least so long, and at most twice as long
REQUESTS_REMEMBERED = 200


@dataclass(slots=True)
class _Engine:
    """The last figures of one engine core."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    last_step: float | None = None

    def is_busy(self) -> bool:
        # A step without the scheduler's figures came with tokens, so something ran.
        return self.last_step is not None and (self.running is None or self.running > 0 or bool(self.waiting))


@dataclass(slots=True)
class _Rate:
    """Tokens and the busy time they took; older ones fade."""

    tokens: float = 0.0
    busy_s: float = 0.0

    def add(self, tokens: int, busy_s: float) -> None:
        kept = math.exp(-busy_s / RATE_WINDOW_S)
        self.tokens = self.tokens * kept + tokens
        self.busy_s = self.busy_s * kept + busy_s


@dataclass(slots=True)
class _Mean:
    """The mean of about the last 200 numbers; of all while there are fewer, 0 for none."""

    value: float = 0.0
    seen: int = 0

    def add(self, number: float) -> None:
        self.seen += 1
        self.value += (number - self.value) / min(self.seen, REQUESTS_REMEMBERED)


class Pulse:
    """The engine's figures at this moment; with several engine cores their sum, and the fullest one's KV usage.

    With several API servers vLLM reports to each of them only the steps with output for it, and the scheduler's figures to
    one of them at a time. Then `is_partial` is true once that was seen; `steps`, the rates and the means are this server's
    share; and `running` and `waiting` are those of `figures_at`, which may be long ago: the server with the latest report
    knows best. They may stay at 1 after the last request if another server got the last report.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.running: int | None = None
        self.waiting: int | None = None
        self.kv_usage: float | None = None
        self.last_step: float | None = None
        self.figures_at: float | None = None
        self.is_partial = False
        self.sleep_level: int | None = None
        self.finished = 0
        self.is_fed = False
        self._engines: dict[int, _Engine] = {}
        self._is_busy = False
        self._full = _Rate()
        self.prompt_tokens = _Mean()  # of requests that finished
        self.output_tokens = _Mean()  # of requests that were not cut off
        self._longest_s = 0.0
        self._longest_before_s = 0.0
        self._longest_since: float | None = None

    @property
    def longest_step_s(self) -> float:
        """The longest time between two steps of one engine that had work all along, in the last half hour to hour.

        The first step after idling does not count: its beginning is not known.
        """
        return max(self._longest_s, self._longest_before_s)

    def note_step(
        self,
        running: int | None,
        waiting: int | None,
        kv_usage: float | None,
        prompt_tokens: int,
        generation_tokens: int,
        now: float,
        engine: int = 0,
    ) -> None:
        """Notes one step of one engine, with its figures afterwards; None for a figure that the step did not report."""
        state = self._engines.setdefault(engine, _Engine())
        # Neither the tokens nor the time of the first step after idling count: its beginning is not known.
        busy_s = self._open_s(now)
        if busy_s > 0 and self.waiting:
            self._full.add(prompt_tokens + generation_tokens, busy_s)
        if state.last_step is not None and state.is_busy():
            length_s = now - state.last_step
            if not (self.is_partial and length_s > PARTIAL_GAP_S):
                if self._longest_since is None or now - self._longest_since > STEP_MEMORY_S:
                    self._longest_before_s, self._longest_s, self._longest_since = self._longest_s, 0.0, now
                self._longest_s = max(self._longest_s, min(length_s, STEP_LIMIT_S))
        state.last_step = now
        if running is not None:
            state.running, state.waiting, state.kv_usage = running, waiting, kv_usage
            self.figures_at = now
        elif prompt_tokens or generation_tokens:
            self.is_partial = True
        self._is_busy = any(core.is_busy() for core in self._engines.values())
        known = [core for core in self._engines.values() if core.running is not None]
        if known:
            self.running = sum(core.running or 0 for core in known)
            self.waiting = sum(core.waiting or 0 for core in known)
            self.kv_usage = max((core.kv_usage for core in known if core.kv_usage is not None), default=None)
        self.steps += 1
        self.last_step = now

    def note_finished(self, prompt_tokens: int, output_tokens: int | None) -> None:
        """Notes an ended request; None for the output of one that was cut off, whose length is only a lower bound."""
        self.finished += 1
        self.prompt_tokens.add(prompt_tokens)
        if output_tokens is not None:
            self.output_tokens.add(output_tokens)

    def note_sleep(self, is_asleep: bool, level: int) -> None:  # noqa: FBT001 - the name says it
        """Notes that the engine went to sleep or woke up; the time asleep is no step."""
        self.sleep_level = level if is_asleep else None
        self._is_busy = False
        for state in self._engines.values():
            state.last_step = None

    def full_tokens_per_s(self, now: float) -> float | None:
        """Returns prompt and output tokens per second over the recent time in which requests had to wait: the speed of a full
        engine. None until there was a second of such time.

        One lone request shows how fast one is served, not how fast twenty would be. Prompt tokens found in the prefix cache
        count like all others: it is not known which prompts of a queue will be found there.
        """
        open_s = self._open_s(now) if self.waiting else 0.0
        return self._full.tokens / (self._full.busy_s + open_s) if self._full.busy_s >= RATE_NEEDS_S else None

    def _open_s(self, now: float) -> float:
        """Returns the busy time since the last step: with it a stuck engine gets slower by the second."""
        if self.last_step is None or not self._is_busy:
            return 0.0
        gap_s = max(now - self.last_step, 0.0)
        if self.is_partial and gap_s > PARTIAL_GAP_S:
            return 0.0
        return min(gap_s, GAP_LIMIT_S)


PULSE = Pulse()  # one for each process


class Listener:
    """A stat logger for any release: their arguments differ, so it takes all and uses those it knows."""

    def listen(self, engine: int, pulse: Pulse = PULSE, recorder: Recorder = RECORDER) -> None:
        """Begins to listen; `engine` is the engine's number where vLLM does not pass it."""
        self._engine = engine
        self._pulse = pulse
        self._recorder = recorder
        pulse.is_fed = True

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *rest: Any, **named: Any) -> None:
        """Notes one step. Up to 0.9 vLLM passes only these two; later the engine's number third, from 0.11.1 on by name."""
        if scheduler_stats is None and iteration_stats is None:
            return  # a message between processes, no step
        with FAULTS.noting("hearing a step"):
            engine = named.get("engine_idx")
            if engine is None:
                engine = next((value for value in rest if type(value) is int), self._engine)
            now, iteration = time.monotonic(), iteration_stats
            running = waiting = kv_usage = None
            if scheduler_stats is not None:
                running = scheduler_stats.num_running_reqs
                waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
                kv_usage = getattr(scheduler_stats, "kv_cache_usage", None)
                if kv_usage is None:
                    kv_usage = getattr(scheduler_stats, "gpu_cache_usage", None)  # its name up to 0.9.0
            prompt, generation = getattr(iteration, "num_prompt_tokens", 0), getattr(iteration, "num_generation_tokens", 0)
            self._pulse.note_step(running, waiting, kv_usage, prompt, generation, now, engine)
            for stats in () if iteration is None else iteration.finished_requests:
                request = from_stats(stats, iteration.iteration_timestamp, engine)
                self._pulse.note_finished(request.prompt_tokens, None if request.is_cut_off else request.output_tokens)
                self._recorder.note_finished(request)

    def record_sleep_state(self, *state: Any, **named: Any) -> None:
        """Notes asleep or awake. The base class calls the first argument `is_awake`, but vLLM passes 1 for asleep."""
        with FAULTS.noting("hearing of sleep"):
            values = (*state, *named.values())
            self._pulse.note_sleep(bool(values[0]), int(values[1]) if len(values) > 1 else 0)

    def record_admission_rejection(self, *reason: Any, **named: Any) -> None:
        """Does nothing: vLLM counts these itself."""

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM calls it on every logger."""

    def log(self) -> None:
        """Does nothing: we add no line to the log."""


# vLLM's stat loggers get neither a request's priority nor its prompt's tokens, nor do they see a client give up. So, only while
# requests are recorded, three methods of vLLM's output processor are wrapped. Each calls vLLM's own with the same arguments and
# returns its result. A release whose methods differ is left alone, and the log says so once.

_IS_WRAPPED = "plimsoll_wrapped"
_EXPECTED = {
    "add_request": ("self", "request"),
    "_update_stats_from_finished": ("self", "req_state", "finish_reason", "iteration_stats"),
    "abort_requests": ("self", "request_ids"),
}


def watch_requests(recorder: Recorder = RECORDER, pulse: Pulse = PULSE, processor: Any = None) -> bool:
    """Wraps the output processor if requests are recorded and it looks as expected; True if it is wrapped afterwards."""
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
        _wrap(processor, recorder, pulse)
        setattr(processor, _IS_WRAPPED, True)
    except Exception:
        FAULTS.say(
            "watching requests",
            "this vLLM's output processor looks unlike those known: recorded without priorities, hashes and given-up requests",
        )
        return False
    return True


def _wrap(processor: Any, recorder: Recorder, pulse: Pulse) -> None:
    own_add, own_abort = processor.add_request, processor.abort_requests
    own_update = processor._update_stats_from_finished  # noqa: SLF001
    inner: set[int] = set()  # processors that abort: a parent request aborts its children by the same method

    @functools.wraps(own_add)
    def add_request(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        result = own_add(self, request, *rest, **named)
        with FAULTS.noting("seeing a request come"):
            state = self.request_states.get(request.request_id)
            if state is not None and not hasattr(state, ON_REQUEST):
                setattr(state, ON_REQUEST, what_is_seen(request, wants_prefixes=recorder.wants_prefixes))
        return result

    @functools.wraps(own_update)
    def update(self: Any, req_state: Any, finish_reason: Any, iteration_stats: Any = None, *rest: Any, **named: Any) -> Any:
        # Arguments of a newer release are passed through: to refuse them here would end its engine.
        result = own_update(self, req_state, finish_reason, iteration_stats, *rest, **named)
        with FAULTS.noting("seeing a request end"):
            seen = getattr(req_state, ON_REQUEST, None)
            if seen is not None and iteration_stats is not None and iteration_stats.finished_requests:
                first_s = getattr(req_state.stats, "first_token_latency", None)
                setattr(iteration_stats.finished_requests[-1], ON_REQUEST, replace(seen, first_token_s=first_s))
        return result

    @functools.wraps(own_abort)
    def abort_requests(self: Any, *rest: Any, **named: Any) -> Any:
        if id(self) in inner:
            return own_abort(self, *rest, **named)
        before: dict[str, Any] = {}
        with FAULTS.noting("seeing requests given up"):
            before = dict(self.request_states)
        inner.add(id(self))
        try:
            gone = own_abort(self, *rest, **named)
        finally:
            inner.discard(id(self))
        with FAULTS.noting("seeing requests given up"):
            for name in gone:
                request = from_state(before[name], time.time()) if name in before else None
                if request is not None:
                    pulse.note_finished(request.prompt_tokens, None)
                    recorder.note_finished(request)
        return gone

    processor.add_request, processor.abort_requests = add_request, abort_requests
    processor._update_stats_from_finished = update  # noqa: SLF001


def what_is_seen(request: Any, *, wants_prefixes: bool) -> Seen:
    """Returns a new request's priority, and its tokens with everything else that distinguishes it in vLLM's prefix cache."""
    priority = getattr(request, "priority", None)
    if type(priority) is not int:
        priority = None
    token_ids, marks = request.prompt_token_ids if wants_prefixes else None, _marks(request)
    if token_ids is None or getattr(request, "prompt_embeds", None) is not None or marks is None:
        return Seen(priority, None, "", ())
    adapter = request.lora_request
    seed = f"{'' if adapter is None else adapter.lora_name}\0{getattr(request, 'cache_salt', None) or ''}"
    return Seen(priority, token_ids, seed, marks)


def _marks(request: Any) -> tuple[tuple[int, str], ...] | None:
    """Returns the place and the hash of each picture and sound in the prompt; None if they cannot be read."""
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

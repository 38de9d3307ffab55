"""Hears each step of the engine from vLLM and tells the pulse and the recorder; nothing that it meets stops vLLM.

What vLLM calls a stat logger is a class with a base of vLLM's; that one is in stat_logger.py, this is all of it that
needs no vLLM.
"""

from __future__ import annotations

import time
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.pulse import PULSE, Pulse
from plimsoll.inside.recorder import RECORDER, Recorder, from_stats


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
                engine = next((one for one in rest if type(one) is int), self._engine)
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

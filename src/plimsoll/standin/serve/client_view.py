"""What a middleware finds as `app.state.engine_client`: vLLM's engine client, as far as the gate looks at it and calls it.

The gate's code is the same around vLLM and around a stand-in; so the names here are vLLM's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from plimsoll.inside.core import Alone
from plimsoll.inside.engine_view import canary_fails
from plimsoll.inside.listener import Listener
from plimsoll.inside.pulse import Pulse
from plimsoll.inside.recorder import ON_REQUEST, RECORDER, Seen, from_stats
from plimsoll.standin.engine import Steps
from plimsoll.standin.faults import NS
from plimsoll.standin.request import Ask, Request
from plimsoll.standin.serve.service import Choice, Service, Waiter

one_token = functools.partial(canary_fails, params=())  # the gate's own test; a stand-in needs no parameters of vLLM's


class ClientView:
    """The engine client of one server."""

    def __init__(self, service: Service, *, has_probe: bool = True) -> None:
        settings, limits = service.engine.config.settings, service.options
        self._service = service
        self._has_probe = has_probe
        self.output_processor = SimpleNamespace(request_states=service.states)
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=settings.max_num_seqs,
                max_num_queued_reqs=limits.max_num_queued_reqs,
                max_num_queued_tokens=limits.max_num_queued_tokens,
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            shutdown_timeout=limits.shutdown_timeout_s,
        )
        self._listener = Listener()
        self.pulse = Pulse()
        self._listener.listen(0, self.pulse)
        self.logger_manager = SimpleNamespace(stat_loggers=[self._listener], engine_indexes=[0])
        service.engine.on_steps = self._hear
        service.on_sleep = self._listener.record_sleep_state
        service.on_give_up = self._hear_of_leaving

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._service.engine.is_dead

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run it in every worker: those calls of the probe that a stand-in can make."""
        del timeout, args, kwargs
        if method == "plimsoll_snapshot":
            refused = "a stand-in has no torch to take a memory snapshot of"
            return [{"pid": rank + 1, "rank": rank, "refused": refused} for rank in range(self._service.engine.config.workers)]
        if method != "plimsoll_compact":
            raise NotImplementedError(f"a stand-in has no workers that could run {method}")
        found = self._service.engine.compact(self._service.driver.now_ns())
        self._service.driver.plan()
        return found

    async def generate(self, prompt: dict[str, Any], params: object, request_id: str) -> AsyncIterator[int]:
        """The first token of an answer to these token ids: all that the gate's test request wants."""
        del params
        service, waiter = self._service, Waiter()
        ids = np.array(prompt["prompt_token_ids"], dtype=np.int64)
        choice = Choice(request_id, 0, len(ids), waiter, service)
        service.submit(choice, Ask(ids, 1))
        try:
            await waiter.wait()
            if choice.request is not None and choice.request.finish == "error":
                raise RuntimeError("the engine is dead")
            yield 0
        finally:
            service.give_up([choice])

    def shutdown(self, timeout: float | None = None) -> None:
        """Take nothing new. What is there ends now, or without a timeout of 0 by itself."""
        service = self._service
        service.is_stopping = True
        if not timeout:
            service.abort(list(service.states.values()))

    def alone(self, registry: Any) -> Alone:
        """What a gate around this server has for itself."""
        return Alone(self.pulse, self._figures, registry)

    def _figures(self) -> list[dict[str, Any]]:
        service = self._service
        return service.engine.worker_figures(service.driver.now_ns()) if self._has_probe else []

    def _hear(self, steps: Steps) -> None:
        """One step, or a few, in the shape in which vLLM tells its stat loggers."""
        figures, speed = self._service.engine.figures, self._service.driver.speed
        scheduler = SimpleNamespace(
            num_running_reqs=figures.running,
            num_waiting_reqs=figures.waiting,
            num_skipped_waiting_reqs=figures.waiting_deferred,
            kv_cache_usage=figures.kv_usage,
        )
        iteration = SimpleNamespace(
            iteration_timestamp=time.time(),
            num_prompt_tokens=steps.prompt_tokens,
            num_generation_tokens=steps.generated,
            finished_requests=[_finished(request, speed) for request in steps.ended],
        )
        self._listener.record(scheduler, iteration, engine_idx=0)

    def _hear_of_leaving(self, request: Request) -> None:
        """A request whose client has gone: vLLM's own loggers are not told, the gate's hooks tell it there."""
        self.pulse.note_finished(len(request.ask.prompt), None)
        if RECORDER.is_on:
            now_ns, speed = self._service.driver.now_ns(), self._service.driver.speed
            RECORDER.note_finished(from_stats(_finished(request, speed, now_ns), time.time(), 0))


def _finished(request: Request, speed: float, now_ns: int | None = None) -> SimpleNamespace:
    """vLLM's figures of a request that has ended; times as a client saw them, not as the engine counts them."""
    end = request.finished_ns if now_ns is None else now_ns

    def since(moment: int) -> float:
        return (end - moment) / NS / speed if moment >= 0 else float("nan")

    return SimpleNamespace(
        **{
            "finish_reason": request.finish,
            "e2e_latency": since(request.arrival_ns),
            "num_prompt_tokens": len(request.ask.prompt),
            "num_generation_tokens": request.produced,
            "num_cached_tokens": request.cached_tokens,
            "num_preemptions": request.preemptions,
            "max_tokens_param": request.ask.max_tokens,
            "inference_time": since(request.scheduled_ns),
            "decode_time": since(request.first_ns),
            ON_REQUEST: Seen(request.ask.priority, _ids(request), "", ()),
        }
    )


def _ids(request: Request) -> list[int] | None:
    found: list[int] | None = request.ask.prompt.tolist() if RECORDER.wants_prefixes else None
    return found

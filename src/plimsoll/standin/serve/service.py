"""One server without its routes: its engine's time, its unfinished answers, and the engine client that the gate sees."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from plimsoll.inside.engine_view import canary_fails
from plimsoll.inside.gate_control import Alone, note_engine_request
from plimsoll.inside.knobs import HEADROOM, LONG_PREFILL, MAX_SEQS, MAX_TOKENS, Knobs, Values
from plimsoll.inside.pulse import Listener, Pulse
from plimsoll.inside.recorder import ON_REQUEST, RECORDER, Seen, from_stats
from plimsoll.standin.config import ServerFlags
from plimsoll.standin.engine import EngineDead, StandinEngine
from plimsoll.standin.faults import NS
from plimsoll.standin.request import EngineRequest, RequestSpec
from plimsoll.standin.serve.protocol import HttpRefusal, dead, plain

LOG = logging.getLogger("vllm.standin")
SHORTEST_PAUSE_S = 0.0005  # between two turns: the event loop has other work, even with time scaled a thousandfold
LONGEST_PAUSE_S = 3600.0
QUEUE_FULL = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
TOKENS_FULL = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
WOKEN_AT_ONCE = 64  # then others have a turn: a step may wake a thousand streams, and a scrape should not wait for all


def _nothing(*_told: object) -> None: ...


class Driver:
    """Runs one engine in real or scaled time. `clock` counts real ns; the engine's time begins at 0 with `start`."""

    def __init__(self, engine: StandinEngine, clock: Callable[[], int], speed: float = 1.0) -> None:
        self.engine = engine
        self.speed = speed
        self.on_turn: Callable[[], None] = _nothing  # called after every turn
        self._clock = clock
        self._origin_ns: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._to_wake: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def start(self) -> None:
        """Begins the engine's time; from here on faults happen when they are due."""
        if self._origin_ns is None:
            self._origin_ns = self._clock()
        self.plan()

    @property
    def is_idle(self) -> bool:
        return self._timer is None

    def now_ns(self) -> int:
        if self._origin_ns is None:
            return 0
        # Never before the engine's own time: rounding may put a moment later for which a turn was already made.
        return max(self.engine.now_ns, int((self._clock() - self._origin_ns) * self.speed))

    def submit(self, spec: RequestSpec, wake: Callable[[], None]) -> EngineRequest:
        request = self.engine.submit(spec, self.now_ns(), wake)
        self.plan()
        return request

    def abort(self, request: EngineRequest, *, is_told: bool = False) -> None:
        self.engine.abort(request, self.now_ns(), is_told=is_told)
        self.plan()

    def turn(self) -> None:
        self._timer = None
        try:
            self.engine.advance(self.now_ns())
        except Exception as error:  # the stand-in's own bug: without another turn all clients would wait for ever
            says = "a mistake of the stand-in's own"
            died_of = " ".join(f"{type(error).__name__}: {error}".split())
            LOG.error("plimsoll: %s; its engine ends: %s", says, died_of)
            self.engine.die(f"{says}: {died_of}")
            self.engine.advance(self.engine.now_ns)  # a dead engine only wakes its waiting requests
        self.on_turn()
        self.plan()

    def wake_soon(self, wake: Callable[[], None]) -> None:
        """Calls `wake` in one of the next turns of the loop, in the order of these calls."""
        self._to_wake.append(wake)
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_AT_ONCE, len(self._to_wake))):
            self._to_wake.popleft()()
        self._is_waking = bool(self._to_wake)
        if self._is_waking:
            asyncio.get_running_loop().call_soon(self._wake_some)

    def plan(self) -> None:
        """Sets the timer anew; call it after every change that may move the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_stopped or self._origin_ns is None:
            return
        if (due_ns := self.engine.next_ns()) is not None:
            pause_s = (due_ns - self.now_ns()) / NS / self.speed
            pause_s = min(max(pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            self._timer = asyncio.get_running_loop().call_later(pause_s, self.turn)

    def stop(self) -> None:
        self._is_stopped = True
        self.plan()


@dataclass(slots=True, eq=False)
class Choice:
    """One unfinished answer: a request of the engine. The gate reads these like vLLM's own."""

    name: str
    index: int
    prompt_len: int
    _hear: Waiter
    _service: Service
    key: str = ""  # its key among the engine's requests: clients may use a name twice
    request: EngineRequest | None = None
    sent: int = 0  # tokens that were sent to the client
    is_over: bool = False  # True once its end was sent
    is_streamed: bool = True  # False: its client gets nothing before its end

    @property
    def finish(self) -> str | None:
        return None if self.request is None else self.request.finish

    @property
    def has_news(self) -> bool:
        request = self.request
        return request is not None and not self.is_over and (request.produced > self.sent or request.finish is not None)

    @property
    def is_prefilling(self) -> bool:
        return self.request is None or self.request.produced == 0

    def wake(self) -> None:
        if self.request is not None and self.request.finish is not None:
            self._service.states.pop(self.key, None)
        elif not self.is_streamed:
            return
        self._service.driver.wake_soon(self._hear.set)


class Waiter(asyncio.Event):
    """The event that the one coroutine of a client's request waits for; any number of calls wake it once."""

    is_gone = False  # the client

    def leave(self) -> None:
        self.is_gone = True
        self.set()

    async def news(self) -> None:
        await self.wait()
        self.clear()


class Service:
    """The state that all endpoints of one server share."""

    def __init__(self, driver: Driver, options: ServerFlags) -> None:
        self.engine = engine = driver.engine
        self.driver = driver
        self.options = options
        self.states: dict[str, Choice] = {}
        self._handed_in = 0
        self.is_stopping = False
        self.woken: set[str] = set()  # the parts of a sleeping engine that are awake
        self.on_death: Callable[[], None] = _nothing  # a client has met a dead engine
        self.on_give_up: Callable[[EngineRequest], None] = _nothing  # a client has gone
        self.on_sleep: Callable[[int | None], None] = _nothing  # at a level, or awake
        self.names = engine.config.served_names
        self.fingerprint = f"vllm-{engine.config.release}-{engine.config.seed & 0xFFFFFFFF:08x}"

    def check_model(self, name: object) -> None:
        """Raises a 404 for a model that it does not serve; a request without a name takes any model."""
        if name and name not in self.names:
            message = f"The model `{name}` does not exist. Valid aliases: {', '.join(self.names)}."
            raise HttpRefusal(404, message, "NotFoundError", "model")

    def admit(self, count: int) -> None:
        """Raises the refusals that come before an answer begins: the engine is dead, or the queue is full."""
        if self.engine.is_dead:
            raise dead()
        limits, rejected = self.options, self.engine.figures.rejected
        if limits.max_num_queued_reqs is not None and len(self.states) + count > limits.max_num_queued_reqs:
            rejected["max_num_queued_reqs"] += 1
            raise plain(503, QUEUE_FULL)
        queued = sum(choice.prompt_len for choice in self.states.values() if choice.is_prefilling)  # without a token yet
        if limits.max_num_queued_tokens is not None and queued >= limits.max_num_queued_tokens:
            rejected["max_num_queued_tokens"] += 1
            raise plain(503, TOKENS_FULL)

    def submit(self, choice: Choice, spec: RequestSpec) -> None:
        """Submits a choice to the engine; while the server stops, ends it at once instead."""
        if self.is_stopping:
            choice.request = EngineRequest(spec, self.driver.now_ns(), choice.wake)
            choice.request.finish = "abort"
            return choice.wake()
        try:
            choice.request = self.driver.submit(spec, choice.wake)
            spec = choice.request.spec
            most = "" if spec.max_tokens is None else f", max_tokens {spec.max_tokens}"
            note_engine_request(choice.request, f"prompt {len(spec.prompt)}{most}")
        except EngineDead:
            raise dead() from None
        self._handed_in += 1
        choice.key = f"{choice.name}-{self._handed_in:x}"
        self.states[choice.key] = choice
        return None

    def give_up(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self.states.pop(choice.key, None)
            if choice.request is not None and choice.request.finish is None:
                self.driver.abort(choice.request)
                self.on_give_up(choice.request)

    def abort(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            if choice.request is not None and choice.request.finish is None:
                self.driver.abort(choice.request, is_told=True)


one_token = functools.partial(canary_fails, params=())  # the gate's canary request; a stand-in needs no vLLM parameters


class StandinScheduler:
    """The scheduler of a stand-in, as the gate's knobs turn it."""

    def __init__(self, service: Service) -> None:
        self._run, self._settings = service.engine.run, service.engine.config.settings
        settings = self._settings
        self.start: dict[str, float] = {
            MAX_SEQS: settings.max_num_seqs, MAX_TOKENS: settings.max_num_batched_tokens, HEADROOM: settings.watermark,
            LONG_PREFILL: settings.long_prefill_token_threshold,
        }  # fmt: skip
        self.why_not = {} if settings.chunked_prefill else dict.fromkeys((MAX_TOKENS, LONG_PREFILL), "no chunked prefill")
        self.tokens_each, self.smallest, self.prompt_piece = 1, 1, 0

    def running(self) -> int:
        return self._run.running

    def apply(self, values: Values) -> None:
        self._run.turn(
            self._settings.turned(
                max_num_seqs=int(values[MAX_SEQS]), max_num_batched_tokens=int(values[MAX_TOKENS]), watermark=values[HEADROOM],
                long_prefill_token_threshold=int(values[LONG_PREFILL]),
            )
        )  # fmt: skip


class ClientView:
    def __init__(self, service: Service) -> None:
        settings, limits = service.engine.config.settings, service.options
        self._service = service
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
        self._knobs = Knobs(StandinScheduler(service))
        self._listener = Listener()
        self.pulse = Pulse()
        self._listener.listen(0, self.pulse)
        self.logger_manager = SimpleNamespace(stat_loggers=[self._listener], engine_indexes=[0])

        async def turn_knobs(_method: str, order: str) -> str:
            self._knobs.before_step()
            return self._knobs.answer(order)

        def hear_of_leaving(request: EngineRequest) -> None:
            """Notes a request whose client has gone; in vLLM the gate's hooks do so, since its loggers do not hear of it."""
            self.pulse.note_finished(len(request.spec.prompt), None)
            if RECORDER.is_on:
                now_ns, speed = service.driver.now_ns(), service.driver.speed
                RECORDER.note_finished(from_stats(_finished(request, speed, now_ns), time.time(), 0))

        self.engine_core = SimpleNamespace(call_utility_async=turn_knobs)
        service.engine.on_steps = self._hear
        service.on_sleep = lambda level: self._listener.record_sleep_state(level is not None, level or 0)
        service.on_give_up = hear_of_leaving

    @property
    def errored(self) -> bool:
        return self._service.engine.is_dead

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Runs one of the probe's methods in every worker, as far as a stand-in can."""
        del timeout, args, kwargs
        if method == "plimsoll_snapshot":
            refused = "a stand-in has no torch to take a memory snapshot of"
            return [{"pid": rank + 1, "rank": rank, "refused": refused} for rank in range(self._service.engine.config.workers)]
        if method != "plimsoll_compact":
            raise NotImplementedError(f"a stand-in has no workers that could run {method}")
        results = self._service.engine.compact(self._service.driver.now_ns())
        self._service.driver.plan()
        return results

    async def generate(self, prompt: dict[str, Any], params: object, request_id: str) -> AsyncIterator[int]:
        """Yields once, at the first token of an answer to these token ids: the gate's canary request needs no more."""
        del params
        service, waiter = self._service, Waiter()
        ids = np.array(prompt["prompt_token_ids"], dtype=np.int64)
        choice = Choice(request_id, 0, len(ids), waiter, service)
        service.submit(choice, RequestSpec(ids, 1))
        try:
            await waiter.news()
            if choice.finish == "error":
                raise RuntimeError("the engine is dead")
            yield 0
        finally:
            service.give_up([choice])

    def shutdown(self, timeout: float | None = None) -> None:
        """Takes no new requests; without a timeout aborts the present ones, else lets them end by themselves."""
        service = self._service
        service.is_stopping = True
        if not timeout:
            service.abort(list(service.states.values()))

    def alone(self, registry: Any) -> Alone:
        """Returns the objects of this server that its gate uses instead of its process's."""
        engine, driver, has_probe = self._service.engine, self._service.driver, self._service.options.has_probe
        return Alone(
            self.pulse,
            lambda: engine.worker_figures(driver.now_ns()) if has_probe else [],
            registry,
            lambda requests: all(request.scheduled_ns < 0 for request in requests),
        )

    def _hear(self, ended: Sequence[EngineRequest], prompt_tokens: int, generated: int) -> None:
        """Passes one step, or a few, to the stat logger in vLLM's form."""
        figures, speed = self._service.engine.figures, self._service.driver.speed
        self._knobs.after_step(prompt_tokens + generated)
        self._knobs.before_step()
        scheduler = SimpleNamespace(
            num_running_reqs=figures.running,
            num_waiting_reqs=figures.waiting,
            kv_cache_usage=figures.kv_usage,
        )
        iteration = SimpleNamespace(
            iteration_timestamp=time.time(),
            num_prompt_tokens=prompt_tokens,
            num_generation_tokens=generated,
            finished_requests=[_finished(request, speed) for request in ended],
        )
        self._listener.record(scheduler, iteration, engine_idx=0)


def _finished(request: EngineRequest, speed: float, now_ns: int | None = None) -> SimpleNamespace:
    """Returns vLLM's figures of an ended request; times are those that a client saw, not the engine's own."""
    end = request.finished_ns if now_ns is None else now_ns
    ids: list[int] | None = request.spec.prompt.tolist() if RECORDER.wants_prefixes else None

    def since(moment: int) -> float:
        return (end - moment) / NS / speed if moment >= 0 else float("nan")

    return SimpleNamespace(
        finish_reason=request.finish,
        e2e_latency=since(request.arrival_ns),
        num_prompt_tokens=len(request.spec.prompt),
        num_generation_tokens=request.produced,
        num_cached_tokens=request.cached_tokens,
        num_preemptions=request.preemptions,
        max_tokens_param=request.spec.max_tokens,
        inference_time=since(request.scheduled_ns),
        decode_time=since(request.first_ns),
        **{ON_REQUEST: Seen(request.spec.priority, ids, "", ())},
    )

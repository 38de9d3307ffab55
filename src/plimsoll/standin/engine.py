"""One engine core without a GPU: vLLM's scheduler and block pool from `simulate`, the memory of `plan`, and faults.

Nothing here has a clock: every call passes the time, in ns since the engine's start. `advance` does all work that is due, and
wakes the requests that got tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.inside.figures import empty_figures
from plimsoll.simulate import layout as at
from plimsoll.simulate import open_loop as loop
from plimsoll.simulate.open_run import NO_IDS, OpenRun
from plimsoll.simulate.replay import FOREVER
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import Integers
from plimsoll.standin.faults import NS, Fault, FaultSchedule
from plimsoll.standin.memory import DeviceModel, MemorySizes, OutOfMemory
from plimsoll.standin.request import EngineRequest, Figures, RequestSpec, content_ids
from plimsoll.vllm.versions import Behaviour


def count_end(figures: Figures, run: OpenRun, request: EngineRequest, row: int | None, now_ns: int) -> None:
    """Counts an ended request at the moment that vLLM does; `row` is its row in the run, None if it never got there."""
    assert request.finish is not None, "it has ended"
    shown = figures.histograms
    request.finished_ns = now_ns
    figures.success[request.finish] += 1
    shown["e2e"].observe((now_ns - request.arrival_ns) / NS)
    shown["prompt"].observe(len(request.spec.prompt))
    shown["output"].observe(request.produced)
    # These are counted once for all answers to a prompt: with the last of them.
    family, longest = request.spec.family, request.produced
    if family is not None:
        family.left -= 1
        family.longest = longest = max(family.longest, longest)
    if family is None or family.left <= 0:
        shown["max_output"].observe(longest)
        shown["params_n"].observe(request.spec.n)
    if request.spec.max_tokens is not None:
        shown["params_max_tokens"].observe(request.spec.max_tokens)
    shown["prefill_kv_computed"].observe(len(request.spec.prompt) - request.cached_tokens)
    if row is not None:
        request.scheduled_ns = int(run.state.stamps[row, at.FIRST_SCHED])
        request.preemptions = int(run.state.requests[row, at.PREEMPTIONS])
    # A request that was never scheduled has spent all of its time in the queue.
    scheduled_ns = request.scheduled_ns if request.scheduled_ns >= 0 else now_ns
    first_ns = request.first_ns if request.first_ns >= 0 else now_ns
    shown["queue"].observe(max(0, scheduled_ns - request.arrival_ns) / NS)
    shown["prefill"].observe(max(0, first_ns - scheduled_ns) / NS)
    shown["inference"].observe(max(0, now_ns - scheduled_ns) / NS)
    shown["decode"].observe((now_ns - first_ns) / NS)
    shown["tpot"].observe((now_ns - first_ns) / NS / (request.produced - 1) if request.produced > 1 else 0.0)
    shown["request_preemptions"].observe(request.preemptions)


def show_step(figures: Figures, run: OpenRun) -> None:
    """Copies the figures of the run after a step: gauges, counters and the two histograms of the inner loop."""
    sums = run.tally.sums
    figures.running, figures.waiting, figures.kv_usage = run.running, run.waiting, run.kv_usage
    figures.steps = int(sums[loop.OUTPUT_STEPS])
    figures.preemptions = int(sums[loop.PREEMPTIONS_TOLD])
    figures.prompt_tokens, figures.generation_tokens = int(sums[loop.PROMPT_TOKENS]), int(sums[loop.GENERATED])
    figures.prefix_queries, figures.prefix_hits = run.count(at.QUERIES), run.count(at.HITS)
    steps, gaps = figures.histograms["step_tokens"], figures.histograms["inter_token"]
    steps.counts, steps.total = run.tally.step_counts.tolist(), float(sums[loop.STEP_TOKENS])
    gaps.counts, gaps.total = run.tally.gap_counts.tolist(), float(sums[loop.GAP_NS]) / NS


# The effects of faults on an engine: it hangs, grows, has a neighbour or too much work. Each effect ends with its fault.

KILLED = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."  # the effect of a full host
KEPT_UP = ("growth", "host-growth", "preemption-storm", "neighbour")


class FaultEffects:
    def __init__(self, engine: StandinEngine) -> None:
        self._engine = engine
        self.is_hung = False
        self._neighbour = 0  # bytes that the neighbour holds
        self._storm: list[EngineRequest] = []
        self._grown_until_ns = 0

    def is_changing(self, now_ns: int) -> bool:
        """True if a fault that grows or is kept up is on, so that the engine must look again and again."""
        return any(self._engine.faults.active(kind, now_ns) for kind in KEPT_UP)

    def suffer(self, now_ns: int) -> None:
        engine, run, memory = self._engine, self._engine.run, self._engine.memory
        since_ns, self._grown_until_ns = self._grown_until_ns, now_ns
        if not engine.faults and not engine.stands_still and not self._neighbour and not run.is_frozen:
            return
        # Requests that arrive later do not count yet.
        is_idle = run.next_end_ns is None and run.running == 0 and run.waiting == 0
        self.is_hung = engine.faults.active("idle-hang", now_ns) is not None and (self.is_hung or is_idle)
        stands_still = engine.stands_still or self.is_hung or engine.faults.active("wedge", now_ns) is not None
        if stands_still and not run.is_frozen:
            run.freeze(now_ns)
        elif not stands_still and run.is_frozen:
            run.thaw(now_ns)
        # Another process takes as much of its wanted memory as is free, and the rest as it becomes free.
        neighbour = engine.faults.active("neighbour", now_ns)
        wanted = 0 if neighbour is None else int(neighbour.value)
        more = min(wanted - self._neighbour, memory.free)  # or less, where it wants less than it has
        if memory.take_neighbour(more):
            self._neighbour += more
        # Growth counts from the last look, or from the fault's onset if that came later.
        for kind in ("growth", "host-growth"):
            fault = engine.faults.active(kind, now_ns)
            size = 0 if fault is None else int(fault.value * (now_ns - max(since_ns, fault.at_s * NS)) / NS)
            if size > 0 and kind == "growth" and (trouble := memory.grow(size)) is not None:
                engine.die(trouble)
            if size > 0 and kind == "host-growth" and not memory.grow_host(size):
                engine.die(KILLED)
        storm = engine.faults.active("preemption-storm", now_ns)
        if storm is None:
            for request in self._storm:
                engine.abort(request, now_ns)
            self._storm = []
        elif not engine.is_paused and not engine.is_dead:
            self._keep_up_storm(storm, now_ns)

    def _keep_up_storm(self, fault: Fault, now_ns: int) -> None:
        """Keeps up as many requests of its own as may run at once: short when admitted, then too long for all to stay."""
        config, settings = self._engine.config, self._engine.config.settings
        block, pool = settings.block_size, (settings.num_blocks - 1) * settings.block_size
        wanted = int(fault.value) or max(4, min(settings.max_num_seqs, pool // (2 * block)))
        prompt = max(1, min(pool // (2 * wanted), config.max_model_len // 8))
        output = max(2, min(6 * prompt + block, config.max_model_len - prompt, pool - prompt - block))
        for one in range(max(0, wanted - len(self._engine.requests))):
            seed = now_ns + 31 * one
            spec = RequestSpec(np.full(prompt, 1000 + seed % 30_000, dtype=np.int64), output, seed=seed)
            self._storm.append(self._engine.submit(spec, now_ns))
        self._storm = [request for request in self._storm if request.finish is None]


COMPACTION_NS = 2_200_000  # the median of 20 on an H200
PIECE_NS = NS  # how often growth is looked at
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


@dataclass(frozen=True, slots=True)
class StandinConfig:
    """One engine, from the plan of its launch."""

    release: str
    model: str
    served_names: tuple[str, ...]
    max_model_len: int
    settings: EngineLimits
    step_time: StepTime
    sizes: MemorySizes
    edges: Mapping[str, Sequence[float]]  # The histograms' upper bounds; see config.edges_of
    cache_labels: Mapping[str, str]
    workers: int = 1
    seed: int = 0


class EngineDead(Exception):
    """The engine is dead and takes no requests."""


class StandinEngine:
    def __init__(self, config: StandinConfig, faults: Sequence[Fault] = (), *, wants_tokens: bool = True) -> None:
        """Without `wants_tokens` no request is woken between its first and last token: a day goes by ten times as fast."""
        self.config = config
        self.figures = Figures(config.edges)
        self.memory = DeviceModel(config.sizes)
        self.faults = FaultSchedule(faults)
        self.now_ns = 0
        self.death: str | None = None
        self.died_of_logits = False
        self.is_paused = False
        self.sleep_level: int | None = None
        self.requests: dict[int, EngineRequest] = {}
        # Called with the steps since the last call: the ended requests, and the tokens of new prompts and of answers
        self.on_steps: Callable[[Sequence[EngineRequest], int, int], None] | None = None
        self.run = OpenRun(
            config.settings,
            config.step_time,
            step_edges=[min(int(edge), FOREVER) for edge in config.edges.get("step_tokens", ())],
            gap_edges=[round(edge * NS) for edge in config.edges.get("inter_token", ())],
            wants_tokens=wants_tokens,
        )
        self.run.tally.sums[loop.COUNTS_CACHED] = not Behaviour.COMPUTED_STEP_TOKENS.is_in(config.release)
        self._held: list[EngineRequest] = []  # that came while it was paused: vLLM's scheduler does not see them either
        self._woken: dict[int, EngineRequest] = {}
        self.stands_still = False  # paused in the mode `keep`
        self._troubles = FaultEffects(self)
        self._shown_steps = 0
        self._owes_a_step = False

    @property
    def is_dead(self) -> bool:
        return self.death is not None

    # Requests

    def submit(self, spec: RequestSpec, now_ns: int, wake: Callable[[], None] = lambda: None) -> EngineRequest:
        """Returns a new request; it may arrive later than now, but not later than one submitted after it."""
        if self.death is not None:
            raise EngineDead(self.death)
        request = EngineRequest(spec, now_ns, wake)
        if self.is_paused:
            self._held.append(request)
        else:
            self.admit(request, now_ns)
        return request

    def admit(self, request: EngineRequest, now_ns: int) -> None:
        """Gives a request to the scheduler, which treats it as arriving now."""
        spec, block = request.spec, self.run.prefix_block
        ids = NO_IDS
        if self.config.settings.prefix_caching and spec.shared != 0:
            # The answer is known beforehand, and so is its content: the next turn's prompt may hold it.
            tokens = np.concatenate((spec.prompt, request.output_ids)) if spec.shared is None else spec.prompt[: spec.shared]
            ids = content_ids(tokens, block)
        request.number = self.run.submit(
            len(spec.prompt), spec.output, now_ns, priority=spec.priority, ids=ids, ids_tokens=len(ids) * block
        )
        self.requests[request.number] = request

    def abort(self, request: EngineRequest, now_ns: int, *, is_told: bool = False) -> None:
        """Aborts a request. vLLM counts it only if its client is told of it (`is_told`), not if the client has gone."""
        if request.finish is not None:
            return
        request.finish = "abort"
        row = None
        if request in self._held:
            self._held.remove(request)
        elif self.requests.pop(request.number, None) is not None:
            row = self.run.row_of(request.number)
            self.run.abort(request.number, now_ns)
            self._owes_a_step = True  # vLLM makes an empty step to tell its workers
        if is_told:
            count_end(self.figures, self.run, request, row, now_ns)
            request.wake()

    # Time

    def next_ns(self) -> int | None:
        """Returns when the next event is due; None where none is before a request, a resume or the end of a fault."""
        if self.death is not None:
            return None
        moments = [self.run.next_ns, self.faults.next_change_ns(self.now_ns)]
        if self._troubles.is_changing(self.now_ns):
            moments.append(self.now_ns + PIECE_NS)
        if self._owes_a_step and not self.run.is_frozen:
            moments.append(self.now_ns)
        return min((moment for moment in moments if moment is not None), default=None)

    def advance(self, now_ns: int) -> None:
        while self.death is None:
            self._troubles.suffer(self.now_ns)
            change = self.faults.next_change_ns(self.now_ns)
            moment = now_ns if change is None else min(change, now_ns)
            if self._troubles.is_changing(self.now_ns):
                moment = min(self.now_ns + PIECE_NS, moment)
            moment = self._go(moment)
            self.now_ns = max(self.now_ns, moment)
            if moment >= now_ns:
                break
        if self.death is None:
            self._troubles.suffer(now_ns)
        woken, self._woken = self._woken, {}
        for request in woken.values():
            request.wake()

    def _go(self, until_ns: int) -> int:
        """Makes steps up to this moment, one by one where memory could run out on the way; returns how far it came."""
        if self.faults.active("idle-hang", self.now_ns) is not None and not self._troubles.is_hung:
            # It hangs at the first idle moment: none may be skipped.
            until_ns = min(until_ns, max(self.run.next_ns or until_ns, self.now_ns))
        while self.death is None and not (self.memory.is_safe() and self.faults.active("oom", self.now_ns) is None):
            moment = self.run.next_ns
            if self.run.next_end_ns is None and moment is not None and moment <= until_ns:
                # A step begins and does not end yet: take its memory now.
                self._read(self.run.until(max(moment, self.run.count(at.NOW))))
                self._take_memory()
            elif moment is not None and moment <= until_ns:
                self._read(self.run.until(moment, 1))
                self._read(self.run.until(moment))
                self._take_memory()
            else:
                break
        else:
            if self.death is None:
                self._read(self.run.until(until_ns))
                self._take_memory()
        ended_steps = int(self.run.tally.sums[loop.ENDED_STEPS])
        if ended_steps != self._shown_steps or self._owes_a_step:  # else the gauges keep their values
            self._shown_steps = ended_steps
            if not self.run.is_frozen:
                self._owes_a_step = False
                show_step(self.figures, self.run)
        return until_ns

    def _take_memory(self) -> None:
        """Takes the memory of the steps that began since the last look; the engine dies where there is too little."""
        sums = self.run.tally.sums
        tokens, sequences = int(sums[loop.MOST_TOKENS]), self.run.running
        if tokens == 0:
            return
        sums[loop.MOST_TOKENS] = 0
        trouble = self.memory.step(tokens, sequences)
        if trouble is None and self.faults.active("oom", self.now_ns) is not None:
            trouble = self.memory.refusal(tokens, sequences)
        if trouble is not None:
            self.die(trouble)

    def die(self, trouble: OutOfMemory | str) -> None:
        self.death = trouble if isinstance(trouble, str) else trouble.message
        self.died_of_logits = not isinstance(trouble, str) and trouble.is_logits
        for number, request in self.requests.items():
            row = self.run.row_of(number)
            request.scheduled_ns = -1 if row is None else int(self.run.state.stamps[row, at.FIRST_SCHED])
        for request in (*self.requests.values(), *self._held):
            request.finish = "error"
            self._woken[id(request)] = request
        self.requests.clear()
        self._held.clear()

    def _read(self, pieces: Iterator[Integers]) -> None:
        figures = self.figures
        for events in pieces:
            ended: list[EngineRequest] = []
            prompt_tokens = generated = 0
            for kind, row, number, when in events.tolist():
                request = self.requests[number]
                if kind == loop.DONE:
                    request.finish = request.spec.reason
                    request.produced = int(self.run.state.requests[row, at.PRODUCED])
                    self._woken[id(request)] = request
                    del self.requests[number]
                    count_end(figures, self.run, request, row, when)
                    ended.append(request)
                    continue
                generated += 1
                request.produced += 1
                if kind == loop.FIRST:  # the prompt is done, and counts as a whole
                    request.first_ns = when
                    request.cached_tokens = int(self.run.state.requests[row, at.CACHED])
                    figures.prompt_cached += request.cached_tokens
                    figures.prompt_computed += len(request.spec.prompt) - request.cached_tokens
                    figures.histograms["ttft"].observe((when - request.arrival_ns) / NS)
                    prompt_tokens += len(request.spec.prompt)
                self._woken[id(request)] = request
            if self.on_steps is not None:
                show_step(figures, self.run)
                self.on_steps(ended, prompt_tokens, generated)

    # Operator's actions

    def pause(self, mode: str, now_ns: int) -> None:
        """Holds back new requests. Present ones end (`abort`), go on to their end (`wait`) or freeze (`keep`)."""
        self.is_paused = True
        if mode == "abort":
            for request in list(self.requests.values()):
                self.abort(request, now_ns, is_told=True)
        self.stands_still = mode == "keep"
        self._troubles.suffer(now_ns)

    def resume(self, now_ns: int) -> None:
        self.is_paused = self.stands_still = False
        self._troubles.suffer(now_ns)
        held, self._held = self._held, []
        for request in held:
            self.admit(request, now_ns)

    def sleep(self, level: int, mode: str, now_ns: int) -> None:
        self.pause(mode, now_ns)
        self.sleep_level = level
        self.figures.sleep_state = SLEEP_STATES[min(level, 2)]
        if level > 0:
            self.memory.sleep(level)

    def wake_up(self, now_ns: int) -> None:
        level, self.sleep_level = self.sleep_level, None
        self.figures.sleep_state = SLEEP_STATES[0]
        if level and (trouble := self.memory.wake_up()) is not None:
            self.die(trouble)
            return
        self.resume(now_ns)

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets the cache's content; `reset_running` preempts the requests that hold a part of it."""
        if reset_running:
            self.run.preempt_all()
        return self.run.reset_prefix_cache()

    def compact(self, now_ns: int) -> list[dict[str, Any]]:
        """Gives torch's free segments back to the device, between two steps; returns each worker's answer."""
        self.advance(now_ns)
        self.run.delay(COMPACTION_NS)
        answer = self.memory.compact()
        return [{"pid": worker + 1, "rank": worker, "at": now_ns / NS, **answer} for worker in range(self.config.workers)]

    def worker_figures(self, now_ns: int) -> list[dict[str, Any]]:
        """Returns the last record of each worker's probe; all workers hold the same memory."""
        groups = self.memory.figures()
        beat_ns = now_ns if self.death is None else self.now_ns  # a dead worker writes no more
        plain = {
            "started": 0, "beat": beat_ns / NS, "at": beat_ns / NS, "every_s": 1.0, "phase": "serving", "engine": 0,
            "vllm": self.config.release, "device": "cuda:0", "samples": now_ns // NS,
        }  # fmt: skip
        state = {"age_s": (now_ns - beat_ns) / NS, "alive": self.death is None}
        ranks = range(self.config.workers)
        return [
            {**empty_figures(), **plain, **groups, **state, "pid": rank + 1, "rank": rank, "local_rank": rank} for rank in ranks
        ]

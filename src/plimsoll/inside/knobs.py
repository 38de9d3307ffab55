"""Knobs of vLLM's scheduler that turn between two steps, without a restart.

The value in force is the strictest of three: the start-up flag, containment (survive) and a lease. Setting a lease needs the
token; it ends by itself in the engine core, and its end removes nothing but the lease. An order reaches the engine core as a
utility call, which vLLM answers between two steps. No value goes beyond what was allocated and captured at the start.

    engine core   `Knobs` keeps the lease and turns the scheduler before each step; its report is a small file
    API server    `KnobClient` sends orders, reads the report, and turns the bounds of the queue, which live there
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from plimsoll.inside import schedule_ring
from plimsoll.inside.answers import AskRefused
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.figures import NUMBER, read_reports, write_report
from plimsoll.inside.places import may_hold_core, run_folder
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.survive import support

MAX_SEQS, MAX_TOKENS = "max-num-seqs", "max-num-batched-tokens"
HEADROOM, LONG_PREFILL = "kv-headroom", "long-prefill-token-threshold"
QUEUED_REQS, QUEUED_TOKENS = "max-num-queued-reqs", "max-num-queued-tokens"
SCHEDULER_KNOBS = (MAX_SEQS, MAX_TOKENS, HEADROOM, LONG_PREFILL)
QUEUE_KNOBS = (QUEUED_REQS, QUEUED_TOKENS)
KNOBS = (*SCHEDULER_KNOBS, *QUEUE_KNOBS)
MOST_HEADROOM = 0.95
LONGEST_LEASE_S = 7 * 86_400.0
CALL = "plimsoll_knobs"  # the utility call's name, a method of the engine core
KEPT = "plimsoll_knobs_kept"  # where an engine core keeps its knobs
SCHEMA = "plimsoll.knobs/1"
_MAYBE = (None, int, float)
_SHAPE = {
    "schema": SCHEMA, "epoch": NUMBER, "until": NUMBER, "orders": NUMBER,
    "knobs": {knob: {"start": _MAYBE, "containment": _MAYBE, "lease": _MAYBE} for knob in KNOBS},
}  # fmt: skip
Values = Mapping[str, float]


def strictest(knob: str, *values: float | None) -> float | None:
    """Returns the strictest of these values of one knob; None where there is none. For LONG_PREFILL 0 means no bound."""
    known = [value for value in values if value is not None]
    if knob == LONG_PREFILL:
        return min((value for value in known if value), default=0 if known else None)
    return (max if knob == HEADROOM else min)(known, default=None)


class KnobScheduler(Protocol):
    """The scheduler that the knobs turn."""

    start: dict[str, float]
    why_not: dict[str, str]  # the reason for each knob that cannot be turned here
    tokens_each: int  # one plus the speculative tokens
    smallest: int  # a step of fewer tokens makes no progress
    prompt_piece: int  # the smallest piece of a prompt, which a step needs beside the decoding requests; 0: any size

    def running(self) -> int:
        """Returns the number of running requests."""

    def apply(self, values: Values) -> None:
        """Turns those of SCHEDULER_KNOBS that can be turned to these values."""


class Knobs:
    """The lease and the bounds of one scheduler. Only the thread that makes the steps uses it."""

    def __init__(self, scheduler: KnobScheduler, tell: Callable[[dict[str, Any]], None] = lambda _report: None) -> None:
        self.start = dict(scheduler.start)
        self.contained: dict[str, float] = {}
        self.leased: dict[str, float] = {}  # set by an order, until `until` on the monotonic clock of this machine
        self.epoch, self.until = 0, 0.0
        self._scheduler = scheduler
        self._tell = tell
        self._orders = self._steps = self._largest_step = self._most_running = self._most_needed = 0
        self._is_plain = True  # nothing is turned: a step need not look
        tell(self.report())

    # Values in force

    def in_force(self, now: float) -> dict[str, float]:
        """Returns the strictest of start-up, containment and lease; a leased MAX_TOKENS never falls below the running need."""
        leased, found = self.leased if now < self.until else {}, {}
        for knob, start in self.start.items():
            wanted = leased.get(knob)
            if knob == MAX_TOKENS and wanted is not None:
                wanted = max(wanted, self._needed())
            value = strictest(knob, start, self.contained.get(knob), wanted)
            assert value is not None
            found[knob] = value
        return found

    def _needed(self) -> int:
        return self._scheduler.running() * self._scheduler.tokens_each + self._scheduler.prompt_piece

    def before_step(self) -> None:
        """Turns the scheduler to the values in force now; called before each step."""
        if self._is_plain:
            return
        now = time.monotonic()
        if self.leased and now >= self.until:
            self.leased, self.until = {}, 0.0
            LOG.info("plimsoll: knobs: the lease has ended")
            self._settle()
            return
        self._scheduler.apply(self.in_force(now))

    def after_step(self, tokens: int) -> None:
        """Notes a planned step: these counts show that an order is carried out."""
        self._steps += 1
        self._largest_step = max(self._largest_step, tokens)
        self._most_running = max(self._most_running, self._scheduler.running())
        self._most_needed = max(self._most_needed, self._needed())

    def _settle(self) -> None:
        self._is_plain = not self.leased and not self.contained
        self._scheduler.apply(self.in_force(time.monotonic()))
        self._steps = self._largest_step = self._most_running = self._most_needed = 0
        self._tell(self.report())

    def contain(self, tokens: int, sequences: int) -> None:
        """Sets containment's bounds; bounds as large as at the start end it."""
        bounds: dict[str, float] = {MAX_TOKENS: tokens, MAX_SEQS: sequences}
        contained = {knob: value for knob, value in bounds.items() if value < self.start[knob]}
        if contained != self.contained:
            self.contained = contained
            self._settle()

    # Orders

    def answer(self, text: str) -> str:
        """Returns the answer to one order, both as JSON text: {} only asks, else `epoch`, `lease_s` and `values`."""
        try:
            order = json.loads(text)
            if order:
                self._take(order)
            # The steps since the last order, which prove that it is carried out.
            live = {
                "turned_to": self.in_force(time.monotonic()), "running": self._scheduler.running(), "steps": self._steps,
                "largest_step": self._largest_step, "most_running": self._most_running, "most_needed": self._most_needed,
            }  # fmt: skip
            return json.dumps({**self.report(), **live})
        except AskRefused as refusal:
            return json.dumps({"refused": str(refusal), "epoch": self.epoch})

    def _take(self, order: dict[str, Any]) -> None:
        """Replaces the lease by the order's values, all of them or none; an order without values ends it."""
        epoch = self.epoch if order.get("epoch") is None else int(order["epoch"])
        if epoch < self.epoch:
            raise AskRefused(f"epoch {epoch} is older than {self.epoch}: another one has taken over")
        values = {knob: self._checked(knob, value) for knob, value in order["values"].items()}
        until = time.monotonic() + min(float(order["lease_s"]), LONGEST_LEASE_S) if values else 0.0
        self.epoch, self.until, self.leased = epoch, until, values
        self._orders += 1
        shown = " ".join(f"{knob}={value}" for knob, value in values.items()) or "none"
        LOG.info("plimsoll: knobs: %s, for %.0f s, epoch %d", shown, until and until - time.monotonic(), epoch)
        self._settle()

    def _checked(self, knob: str, value: float) -> float:
        if (why := self._scheduler.why_not.get(knob)) is not None:
            raise AskRefused(f"{knob} cannot be turned here: {why}", 409)
        if knob in QUEUE_KNOBS:
            return value
        if knob == HEADROOM:
            lowest, most = self.start[knob], MOST_HEADROOM
            words = f"from {lowest:g}, as at the start, to {most}"
        else:
            most = self.start[knob] or self.start[MAX_TOKENS]
            lowest = min(most, self._scheduler.smallest if knob in (MAX_TOKENS, LONG_PREFILL) else 1)
            words = f"from {lowest:.0f} to {most:.0f}, which is what this engine was started with"
        if not lowest <= value <= most:
            raise AskRefused(f"{knob}: {words}")
        return value

    # Reporting

    def report(self) -> dict[str, Any]:
        """Returns each knob's start-up, containment and leased value; the reader works out the value in force."""
        knobs = {
            knob: {
                "start": self.start.get(knob), "containment": self.contained.get(knob), "lease": self.leased.get(knob),
                "why_not": self._scheduler.why_not.get(knob, ""),
            }
            for knob in KNOBS
        }  # fmt: skip
        return {"epoch": self.epoch, "until": self.until, "orders": self._orders, "knobs": knobs}


# In the engine core


class VllmScheduler:
    """vLLM's own scheduler."""

    def __init__(self, core: Any) -> None:
        scheduler, config = core.scheduler, core.vllm_config
        self._scheduler = scheduler
        self._limits: Any = getattr(config, "scheduler_config", None)
        self._manager: Any = getattr(scheduler, "kv_cache_manager", None)
        # Before 0.31 one bound is both: how many are admitted, and how many may run.
        self._admission = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        self.start: dict[str, float] = {
            MAX_SEQS: getattr(scheduler, self._admission),
            MAX_TOKENS: scheduler.max_num_scheduled_tokens,
            HEADROOM: float(getattr(self._limits, "watermark", 0.0)),
            LONG_PREFILL: int(getattr(self._limits, "long_prefill_token_threshold", 0)),
        }
        self._watermark_blocks = getattr(self._manager, "watermark_blocks", 0)
        self._blocks = getattr(getattr(scheduler, "kv_cache_config", None), "num_blocks", 0)
        self.tokens_each = 1 + getattr(scheduler, "num_spec_tokens", 0)
        ahead = getattr(scheduler, "num_prefill_lookahead", 0)  # no chunk may end within so many tokens of its prompt's end
        self.prompt_piece = max(support.state_block(core), ahead and 1 + ahead)
        self.smallest = int(min(self.start[MAX_TOKENS], max(self.tokens_each, self.prompt_piece)))
        self.why_not = self._reasons(config)

    def _reasons(self, config: Any) -> dict[str, str]:
        parallel = getattr(config, "parallel_config", None)
        if getattr(parallel, "data_parallel_size", 1) > 1:
            why = "never tried with data parallel engines, which step together; run one server for each replica instead"
            return dict.fromkeys(SCHEDULER_KNOBS, why)
        if type(self._scheduler).__module__ not in schedule_ring.OWN_SCHEDULERS:
            name = type(self._scheduler).__name__
            return dict.fromkeys(SCHEDULER_KNOBS, f"never tried with the scheduler {name}")
        reasons = {}
        if not hasattr(self._manager, "watermark_blocks") or not self._blocks:
            reasons[HEADROOM] = "this vLLM keeps no blocks free at admission"
        is_multimodal = getattr(getattr(config, "model_config", None), "is_multimodal_model", False)
        if not getattr(self._limits, "enable_chunked_prefill", False):
            reasons |= dict.fromkeys((MAX_TOKENS, LONG_PREFILL), "without chunked prefill a prompt must fit into one step")
        elif is_multimodal and getattr(self._limits, "disable_chunked_mm_input", False):
            reasons |= dict.fromkeys((MAX_TOKENS, LONG_PREFILL), "this model's pictures must not be cut")
        elif getattr(self._limits, "long_prefill_token_threshold_adaptive", False):
            reasons[LONG_PREFILL] = "vLLM turns it itself (--long-prefill-token-threshold-adaptive)"
        return reasons

    def running(self) -> int:
        """Returns the number of running requests."""
        return len(self._scheduler.running)

    def apply(self, values: Values) -> None:
        """Sets the values that the next call of schedule() reads."""
        scheduler, sequences = self._scheduler, int(values[MAX_SEQS])
        if self._admission == "max_num_running_reqs":
            sequences = max(sequences, len(scheduler.running))  # vLLM asserts that no more run
        setattr(scheduler, self._admission, sequences)
        scheduler.max_num_scheduled_tokens = int(values[MAX_TOKENS])
        if HEADROOM not in self.why_not:
            share = values[HEADROOM]
            blocks = self._watermark_blocks if share == self.start[HEADROOM] else int(share * self._blocks)
            self._manager.watermark_blocks = blocks
        if LONG_PREFILL not in self.why_not:
            self._limits.long_prefill_token_threshold = int(values[LONG_PREFILL])


def knobs_of(core: Any) -> Knobs:
    """Returns the knobs of this engine core, made at the first call: before anything is turned."""
    found: Knobs | None = getattr(core, KEPT, None)
    if found is None:
        folder = run_folder(InsideSettings().folder)

        def tell(report: dict[str, Any]) -> None:
            with FAULTS.noting("telling of the knobs"):
                if folder is not None:
                    write_report(folder, "knobs", SCHEMA, report)

        found = Knobs(VllmScheduler(core), tell)
        setattr(core, KEPT, found)
        follow_steps(core.scheduler, found)
    return found


def follow_steps(scheduler: Any, knobs: Knobs) -> None:
    own = scheduler.schedule

    @functools.wraps(own)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        with FAULTS.noting("turning a knob"):
            knobs.before_step()
        plan = own(*args, **kwargs)
        with FAULTS.noting("following a step"):
            knobs.after_step(plan.total_num_scheduled_tokens)
        return plan

    scheduler.schedule = schedule


def install() -> None:
    """Gives every engine core of this process the utility call; a second call does nothing. Never raises."""
    with FAULTS.noting("adding the knobs"):
        if may_hold_core():
            install_into(importlib.import_module(schedule_ring.CORE))


def install_into(module: Any) -> None:
    """Adds the call to vLLM's engine core, and makes each core report its knobs when its loop begins."""
    if hasattr(module.EngineCore, CALL):
        return

    def reporting(own: Any) -> Any:
        @functools.wraps(own)
        def run_busy_loop(self: Any) -> Any:
            with FAULTS.noting("adding the knobs"):
                knobs_of(self)
            return own(self)

        return run_busy_loop

    setattr(module.EngineCore, CALL, lambda core, order: knobs_of(core).answer(order))
    for kind in ("EngineCoreProc", "DPEngineCoreProc"):
        owner = getattr(module, kind, None)
        if owner is not None and "run_busy_loop" in vars(owner):
            owner.run_busy_loop = reporting(owner.run_busy_loop)


# In the API server


class KnobClient:
    """The API server's end of the knobs: sends orders to the engine cores, and keeps the bounds of the queue."""

    def __init__(self, folder: str | None, key: int) -> None:
        self._folder, self._key = folder, key
        self._queue_start: dict[str, int | None] = {}  # empty until an engine client is known
        self._told: dict[str, Any] | None = None  # the newest report where there is no folder

    async def call(self, client: Any, order: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        """Returns the engine core's answer to an order. Raises AskRefused where there is none, or the core refuses.

        After a timeout the call itself goes on: an order that was sent is carried out between the next two steps.
        """
        core = getattr(client, "engine_core", None)
        send = getattr(core, "call_utility_async", None)
        if send is None:
            raise AskRefused("this vLLM's engine client has no utility calls", 501)
        if self._folder is not None and not self._reports():
            raise AskRefused("the engine core has not reported knobs: is the plugin plimsoll_probe loaded (VLLM_PLUGINS)?", 501)
        task = asyncio.ensure_future(send(CALL, json.dumps(dict(order))))
        done, _ = await asyncio.wait({task}, timeout=patience_s)
        if not done:
            task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody asks for it any more
            raise AskRefused("the engine has made no step meanwhile; an order that was sent is carried out after it", 504)
        try:
            answer: dict[str, Any] = json.loads(task.result())
        except Exception as problem:  # the engine died, or vLLM ends
            raise AskRefused(f"the engine did not take the order: {type(problem).__name__}", 502) from None
        if "refused" in answer:
            raise AskRefused(answer["refused"], 409)
        self._told = answer
        self.turn_queue(client)
        return answer

    def report(self) -> dict[str, Any] | None:
        """Returns the engine cores' newest report, the one whose order came last; None where there is none."""
        reports = self._reports() if self._folder is not None else [self._told] if self._told else []
        return max(reports, key=lambda report: (report["epoch"], report["orders"]), default=None)

    def words(self, client: Any, report: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns every knob with its three sources and the value in force now."""
        report, now = report or self.report(), time.monotonic()
        starts = self._queue_starts(client)
        knobs: dict[str, dict[str, Any]] = {}
        for knob in KNOBS:
            told = {} if report is None else report["knobs"][knob]
            start = starts[knob] if knob in starts else told.get("start")
            leased = told.get("lease") if report is not None and now < report["until"] else None
            why_not = self._why_not(client, knob) or told.get("why_not", "")
            knobs[knob] = {
                "in_force": strictest(knob, start, told.get("containment"), leased),
                "start": start, "containment": told.get("containment"), "lease": leased,
                "why_not": why_not if report is not None else "no engine core has reported",
            }  # fmt: skip
        left_s = 0.0 if report is None else max(0.0, report["until"] - now)
        return {"epoch": 0 if report is None else report["epoch"], "lease_left_s": round(left_s, 3), "knobs": knobs}

    def check_queue(self, client: Any, values: Values) -> None:
        """Raises AskRefused for a bound of the queue that cannot be turned, or is looser than the start-up flag."""
        for knob, start in self._queue_starts(client).items():
            if knob in values and (why := self._why_not(client, knob)):
                raise AskRefused(f"{knob} cannot be turned here: {why}", 409)
            if knob in values and start is not None and values[knob] > start:
                raise AskRefused(f"{knob}: from 1 to {start}, which is what this server was started with", 409)

    def turn_queue(self, client: Any) -> None:
        """Turns this API server's own bounds; called with each order and once a second."""
        limits = getattr(client, "scheduler_config", None)
        report, now = self.report(), time.monotonic()
        for knob, start in self._queue_starts(client).items():
            if self._why_not(client, knob):
                continue
            leased = None if report is None or now >= report["until"] else report["knobs"][knob]["lease"]
            value, name = strictest(knob, start, leased), knob.replace("-", "_")
            if getattr(limits, name) != value:
                setattr(limits, name, None if value is None else int(value))

    def _queue_starts(self, client: Any) -> dict[str, int | None]:
        limits = getattr(client, "scheduler_config", None)
        if not self._queue_start and limits is not None:
            self._queue_start = {knob: getattr(limits, knob.replace("-", "_"), None) for knob in QUEUE_KNOBS}
        return self._queue_start or dict.fromkeys(QUEUE_KNOBS)

    def _why_not(self, client: Any, knob: str) -> str:
        if knob not in QUEUE_KNOBS:
            return ""
        limits = getattr(client, "scheduler_config", None)
        if not hasattr(client, "check_admission") or not hasattr(limits, knob.replace("-", "_")):
            return "this vLLM bounds no queue; POST /plimsoll/shed does"
        has_fellows = self._key != os.getpid() and getattr(client, "admission_stats", None) is None
        return "several API servers count together only where the flag is set at the start" if has_fellows else ""

    def _reports(self) -> list[dict[str, Any]]:
        assert self._folder is not None
        return read_reports(self._folder, "knobs", "what the knobs tell", _SHAPE, self._key)

"""In the engine core: a step that ran out of device memory is dropped, and its requests are computed again in smaller steps.

A healthy step pays for one `try` and nothing else. After a failure:

    1. the step's contents are read from the error's frames, which are then emptied: they hold tensors
    2. steps in flight are dropped; the worker forgets them and gives memory back
    3. every running request is preempted in its place; the prefix cache is emptied, because vLLM registers a block
       before the forward pass has written it, and a later hit would read unwritten memory
    4. the next steps are smaller (sizes.py), until calm and memory let them grow again

Requests keep their tokens: none is sent twice, and none is left out. After an error in this code containment gives up: vLLM
then dies as it would have, with a line that says why.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.knobs import MAX_SEQS, MAX_TOKENS, knobs_of
from plimsoll.inside.places import run_folder
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.survive import failures, report, support, worker
from plimsoll.inside.survive.failures import StepFailure
from plimsoll.inside.survive.sizes import Limits, OutOfMemoryStep, Sizes

ARMED: list[Any] = []  # the armed cores of this process
STEPS = ("step", "step_with_batch_queue")
TELLING = "telling of containment"
LOOK_S = 1.0  # how often a shrunken engine is looked at
ROOM_BYTES = 64 * 2**20  # the least additional free memory that counts as "memory has come back"

Step = Callable[[], tuple[Any, bool]]


class CannotContain(Exception):
    """A failure that cannot be contained; the text is the reason."""


class Containment:
    """The containment of one engine core; `step` takes the place of its step function."""

    def __init__(self, core: Any, adapter: support.Adapter, settings: InsideSettings) -> None:
        self.core = core
        self.adapter = adapter
        self._own: Step = own_step(core)
        scheduler = core.scheduler
        self._knobs = knobs_of(core)
        bounds = self._knobs.start
        start = Limits(int(bounds[MAX_TOKENS]), int(bounds[MAX_SEQS]), scheduler.max_num_encoder_input_tokens)
        self.sizes = Sizes(start, 1 + scheduler.num_spec_tokens, support.state_block(core), settings.survive_storm)
        self._applied = start
        self._folder = run_folder(settings.folder)
        self._told = {**report.unknown(""), "armed": True, "aborted_requests": []}
        self._free_at_failure: int | None = None
        self._room_needed = ROOM_BYTES
        self._failed_at = 0.0
        self._still: set[str] = set()  # requests that have not sent a token since the failure
        self._looked_at = 0.0
        self._has_told_storm = False

    def step(self) -> tuple[Any, bool]:
        """Makes one step of vLLM's own, contained. A healthy engine pays for no more than this."""
        try:
            return self._own()
        except Exception as error:
            return self._contain(error)

    def _watched_step(self) -> tuple[Any, bool]:
        """Makes one step of an engine that had a failure lately, and watches its streams go on and its steps grow."""
        try:
            outputs, executed = self._own()
        except Exception as error:
            return self._contain(error)
        with FAULTS.noting("watching an engine after a contained failure"):
            self._watch(outputs)
        return outputs, executed

    # A failure

    def _contain(self, error: Exception) -> tuple[Any, bool]:
        failure = failures.identify(error)
        if failure is None:
            raise error
        try:
            return self._recover(failure, error), False
        except CannotContain as problem:
            reason = str(problem)
        except Exception as own:
            reason = f"cannot contain this failure: {type(own).__name__}: {str(own)[:200]}"
        LOG.error("plimsoll: survive: %s; vLLM ends as it would without plimsoll", reason)
        raise error

    def _recover(self, failure: StepFailure, error: Exception) -> dict[int, Any]:
        """Drops the failed step; returns the outputs that must still be sent: an aborted request's, the previous step's."""
        now = time.monotonic()
        core, scheduler = self.core, self.core.scheduler
        plan = failures.local_of(error, STEPS, "scheduler_output")
        # If a step's sampling waited for the previous step's tokens, it fails after that step's outputs were made.
        outputs = failures.local_of(error, STEPS, "engine_core_outputs") or {}
        if outputs:
            plan = failures.local_of(error, STEPS, "deferred_scheduler_output") or plan
        if plan is None:
            raise CannotContain("cannot contain this failure: the step that failed is not known")
        running = {request.request_id for request in scheduler.running}
        if any(request.num_computed_tokens and name not in running for name, request in scheduler.requests.items()):
            raise CannotContain("cannot contain this failure: a request that does not run holds blocks (a streaming session?)")
        failures.release_frames(error)
        if core.batch_queue is not None:
            core.batch_queue.clear()
        fresh = tuple(request.request_id for request in scheduler.requests.values() if request.num_output_tokens == 0)
        answers = core.model_executor.collective_rpc(worker.forget_step, args=(fresh,))  # never with a timeout
        answer = answers[0]
        if answer["site"] != "unknown":  # a worker in its own process knows better than the call that brought its error
            failure = StepFailure(answer["site"], failure.asked_bytes, failure.free_bytes)
        recomputed = sum(request.num_computed_tokens for request in scheduler.running)
        preempted = len(scheduler.running)
        self._preempt_all(set(answer["known"]))
        inputs = getattr(plan, "scheduled_encoder_inputs", None) or {}
        items = [(request_id, number) for request_id, numbers in inputs.items() for number in numbers]
        sizes = [_item_tokens(scheduler.requests.get(request_id), number) for request_id, number in items]
        step = OutOfMemoryStep(
            tokens=int(plan.total_num_scheduled_tokens),
            requests=tuple(plan.num_scheduled_tokens),
            site=failure.site,
            encoder_requests=tuple(request_id for request_id, _ in items),
            largest_item=max(sizes, default=0),
        )
        verdict = self.sizes.fail(step, now)
        if verdict.is_over:
            raise CannotContain(f"gave up after {self.sizes.failures_lately(now)} contained failures in 600 s")
        self._apply(self.sizes.now)
        self._bring_first(verdict.first)
        self._free_at_failure = answer["free"]
        self._room_needed = max(ROOM_BYTES, failure.asked_bytes or 0)
        if not self._still:
            self._failed_at = now
        self._still |= set(step.requests)
        self._looked_at = now
        core.step_fn = self._watched_step
        with FAULTS.noting(TELLING):
            self._tell_failure(step, failure, preempted, recomputed, now)
        if verdict.abort is not None:
            self._abort(verdict.abort, step, failure, outputs)
        self.write()
        time.sleep(verdict.pause_s)
        return outputs

    def _preempt_all(self, known: set[str]) -> None:
        """Preempts every running request in its place, empties the prefix cache, and resets what the lost output would have."""
        core, scheduler, adapter = self.core, self.core.scheduler, self.adapter
        for request in scheduler.requests.values():
            for name in adapter.zero_before:
                setattr(request, name, 0)
        # The steps in flight are over: free the blocks that waited for their end.
        scheduler.processed_step_seq = scheduler.sched_step_seq
        scheduler._drain_deferred_frees()  # noqa: SLF001
        scheduler.reset_prefix_cache(reset_running_requests=True)
        for request in scheduler.requests.values():
            for name in adapter.zero_after:
                setattr(request, name, 0)
            for name in adapter.false_after:
                setattr(request, name, False)
        if getattr(core.vllm_config.model_config, "is_multimodal_model", False):
            # The scheduler believes that the failed step has encoded its pictures.
            scheduler.reset_encoder_cache()
            core.model_executor.reset_encoder_cache()
        # A step that failed early may not have told the worker of new, finished or preempted requests.
        scheduler.finished_req_ids |= known - scheduler.requests.keys()
        if support.runner_of(self.core.vllm_config) == support.SECOND:
            scheduler.reset_preempted_req_ids |= known & scheduler.requests.keys()
            return
        status = importlib.import_module("vllm.v1.request").RequestStatus
        for request_id in scheduler.requests.keys() - known:
            request = scheduler.requests[request_id]
            if request.status == status.PREEMPTED:
                if request.num_output_tokens:
                    raise CannotContain("cannot contain this failure: the worker has lost a request that has sent tokens")
                request.status = status.WAITING  # sent to the worker as a new one

    def _apply(self, limits: Limits) -> None:
        self._applied = limits
        self._knobs.contain(limits.tokens, limits.sequences)
        self.core.scheduler.max_num_encoder_input_tokens = limits.encoder_tokens

    def _bring_first(self, request_id: str | None) -> None:
        """Puts a waiting request before all others; a queue by priority keeps its own order, and then there is no trial."""
        waiting = self.core.scheduler.waiting
        request = None if request_id is None else self.core.scheduler.requests.get(request_id)
        if request is not None and request in waiting:
            waiting.remove_request(request)
            waiting.prepend_request(request)
            if waiting.peek_request() is request:
                return
        if request_id is not None and self.sizes.on_trial == request_id:
            self.sizes.end_trial()
            self._apply(self.sizes.now)

    def _abort(self, request_id: str, step: OutOfMemoryStep, failure: StepFailure, outputs: dict[int, Any]) -> None:
        """Ends one request with an error, and adds the output that tells its API server."""
        engine = importlib.import_module("vllm.v1.engine")
        status = importlib.import_module("vllm.v1.request").RequestStatus
        request = self.core.scheduler.requests.get(request_id)
        if request is None:  # its client has left meanwhile
            return
        why = f"it ran out of device memory alone, in a step of {step.tokens} tokens at {failure.site}{_bracket(failure)}"
        self.core.scheduler.finish_requests([request_id], status.FINISHED_ERROR)
        self._still.discard(request_id)
        self._told["aborted"] += 1
        kept = [*self._told["aborted_requests"], {"id": request_id, "why": why}]
        self._told["aborted_requests"] = kept[-report.ABORTED_KEPT :]
        LOG.error("plimsoll: survive: aborted request %s: %s", request_id, why)
        output = engine.EngineCoreOutput(request_id, [], finish_reason=engine.FinishReason.ERROR)
        if request.client_index in outputs:
            outputs[request.client_index].outputs.append(output)
        else:
            outputs[request.client_index] = engine.EngineCoreOutputs(outputs=[output])

    def _kind_of(self, step: OutOfMemoryStep) -> str:
        """Returns what is special about the step's requests: pictures, prompt_logprobs, adapter or empty; never their text."""
        if step.encoder_requests:
            return "pictures"
        requests = [self.core.scheduler.requests.get(request_id) for request_id in step.requests]
        params = [getattr(request, "sampling_params", None) for request in requests]
        if any(getattr(one, "prompt_logprobs", None) is not None for one in params):
            return "prompt_logprobs"
        return "adapter" if any(getattr(one, "lora_request", None) is not None for one in requests) else ""

    # Afterwards

    def _watch(self, outputs: Any) -> None:
        for one in outputs.values() if outputs else ():
            sent = [output.request_id for output in one.outputs]
            self._still.difference_update(sent)
            self.sizes.progress(sent)
        if self.sizes.now is not self._applied:
            self._apply(self.sizes.now)
        now = time.monotonic()
        if self._still and now - self._looked_at >= LOOK_S:
            self._still &= self.core.scheduler.requests.keys()  # clients that left
        if not self._still and self._failed_at:
            self._told["stalled_s"] = round(self._told["stalled_s"] + now - self._failed_at, 3)
            self._failed_at = 0.0
            self.write()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if self.sizes.wants_to_grow(now):
            # Room: so much more memory is free than at the failure that the failed allocation would fit; None where unknown.
            has_room: bool | None = None
            if self._free_at_failure is not None:
                free = self.core.model_executor.collective_rpc(worker.available)[0]["free"]
                has_room = None if free is None else bool(free >= self._free_at_failure + self._room_needed)
            if self.sizes.grow(now, has_room=has_room):
                self._apply(self.sizes.now)
                grown = (self.sizes.now.tokens, self.sizes.now.sequences)
                LOG.info("plimsoll: survive: growing back: steps of at most %d tokens and %d sequences", *grown)
        self.sizes.keep_only(self.core.scheduler.requests.keys())
        self._keep_items_possible()
        self.write()
        if self.sizes.is_whole and self.sizes.is_calm(now) and not self._still and not self.sizes.failures_lately(now):
            self.core.step_fn = self.step

    def _keep_items_possible(self) -> None:
        """Keeps the encoder's bound at least as large as the largest picture, which would wait for ever otherwise."""
        scheduler = self.core.scheduler
        if scheduler.max_num_encoder_input_tokens == self.sizes.start.encoder_tokens:
            return
        bound = self.sizes.now.encoder_tokens
        for request in scheduler.requests.values():
            for number in range(len(getattr(request, "mm_features", None) or ())):
                bound = max(bound, _item_tokens(request, number))
        scheduler.max_num_encoder_input_tokens = min(self.sizes.start.encoder_tokens, bound)

    # Reporting

    def _tell_failure(self, step: OutOfMemoryStep, failure: StepFailure, preempted: int, recomputed: int, now: float) -> None:
        report, limits = self._told, self.sizes.now
        report["contained"] += 1
        report["recomputed_tokens"] += recomputed
        report["last"] = {
            "at": round(time.time(), 3), "site": failure.site, "tokens": step.tokens, "requests": len(step.requests),
            "asked_bytes": failure.asked_bytes, "free_bytes": failure.free_bytes,
            "kind": self._kind_of(step),
        }  # fmt: skip
        LOG.warning(
            "plimsoll: survive: contained failure %d: a step of %d tokens in %d requests ran out of device memory at %s%s; "
            "%d requests preempted, %d tokens to recompute; steps of at most %d tokens and %d sequences from here",
            report["contained"], step.tokens, len(step.requests), failure.site, _bracket(failure), preempted, recomputed,
            limits.tokens, limits.sequences,
        )  # fmt: skip
        is_storm, lately = self.sizes.is_storm(now), self.sizes.failures_lately(now)
        if is_storm and not self._has_told_storm:
            words = "plimsoll: survive: storm: %d contained failures in 600 s; this server should be drained and restarted"
            LOG.error(words, lately)
        self._has_told_storm = is_storm

    def write(self) -> None:
        """Brings the report up to date; if the folder cannot be written, only the report is lost."""
        limits, start, now = self.sizes.now, self.sizes.start, time.monotonic()
        self._told |= {
            "tokens_per_step": {"now": limits.tokens, "start": start.tokens},
            "sequences": {"now": limits.sequences, "start": start.sequences},
            "limping": self.sizes.is_limping(now),
            "storm": self.sizes.is_storm(now),
        }
        with FAULTS.noting(TELLING):
            report.write(self._folder, self._told)


def own_step(core: Any) -> Step:
    """Returns this core's step function without the part that arms it; another plugin's wrapper stays."""
    function: Any = getattr(core.step_fn, "__func__", None)
    step: Step = function.__wrapped__.__get__(core) if getattr(function, "is_plimsoll", False) else core.step_fn
    return step


def surface_early(executor: Any) -> None:
    """Makes a sampling step that has already failed raise at once, as vLLM does for the forward pass.

    Else the failure stays in its future under asynchronous scheduling, and the next step runs on tokens that nobody sampled.
    """
    own = executor.sample_tokens

    def sample_tokens(grammar_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002 - as vLLM calls it
        answer = own(grammar_output, non_block=non_block)
        if non_block and answer.done():
            answer.result()
        return answer

    executor.sample_tokens = sample_tokens


def arm(core: Any, settings: InsideSettings, version: str) -> str:
    """Arms containment in a new engine core; returns the reason where it does not, else empty."""
    core.step_fn = own_step(core)
    why = support.refusal(core, version, unproven=settings.survive == "unproven")
    if why is not None:
        LOG.warning("plimsoll: survive: not armed: %s", why)
        report.write(run_folder(settings.folder), {**report.unknown(why), "armed": False, "aborted_requests": []})
        return why
    release = support.release_of(version)
    assert release is not None
    containment = Containment(core, support.ADAPTERS[release], settings)
    containment.write()
    if core.batch_queue is not None:
        surface_early(core.model_executor)
    scheduling = "asynchronous" if core.batch_queue is not None else "synchronous"
    runner = support.runner_of(core.vllm_config)
    LOG.info("plimsoll: survive: armed (vLLM %s, %s runner, %s scheduling)", version, runner, scheduling)
    core.step_fn = containment.step
    ARMED.append(core)
    return ""


def _item_tokens(request: Any, number: int) -> int:
    """Returns the encoder tokens of one picture, video or sound of a request; 0 where they cannot be read."""
    features = getattr(request, "mm_features", None) or ()
    if request is None or number >= len(features):
        return 0
    return int(request.get_num_encoder_embeds(number))


def _bracket(failure: StepFailure) -> str:
    asked = None if failure.asked_bytes is None else f"asked for {failure.asked_bytes / 2**30:.2f} GiB"
    free = None if failure.free_bytes is None else f"{failure.free_bytes / 2**30:.2f} GiB free"
    sizes = ", ".join(part for part in (asked, free) if part is not None)
    return f" ({sizes})" if sizes else ""

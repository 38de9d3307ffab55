"""vLLM's own EngineCore, scheduler and block pool over a worker of ours, armed and failing at random: async_core.py MODEL ...

Run by the engine's own Python; JSON lines in on stdin, one for each scenario, and JSON lines out:

    {"seed": 7, "asynchronous": true, "runner": "first", "blocks": 60, "share": 0.1, ...}      see Scenario
    {"ok": true, "steps": 310, "raised": {"forward": 2, ...}, "contained": 5, "preempted": 3, "requests": 24, ...}

or {"ok": false, "error": "..."} with the traceback. The CPU build of vLLM forces synchronous scheduling; here the engine core
runs with asynchronous scheduling and its queue of two batches all the same, because nothing is computed on a device.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TextIO

from lab.survive.async_worker import FIRST_TOKEN, SITES, VOCABULARY, Faults, Worker, next_token

MOST_STEPS = 20_000
MODEL_LEN = 352
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
REGEX = "[a-z]{3,8}-[0-9]{4,10}"
CONTAIN, KNOBS = "plimsoll.inside.survive.contain", "plimsoll.inside.knobs"


@dataclass
class Scenario:
    """One engine from its first request to its last."""

    seed: int = 0
    asynchronous: bool = True
    runner: str = "first"
    late: bool = False
    """A failed forward pass shows when its future is asked, as with several processes, not when it is sent."""
    blocks: int = 400
    batched_tokens: int = 256
    sequences: int = 16
    prefix_caching: bool = True
    requests: int = 24
    longest_prompt: int = 150
    longest_output: int = 40
    structured: int = 0
    """Every so many-th request has structured output; 0 for none."""
    aborts: float = 0.0
    """The share of requests whose client leaves."""
    share: float = 0.1
    """The share of steps that fail."""
    pause: int = 8
    """Steps that do not fail after those that did: enough for a prompt, or its request has no luck and is aborted."""
    planned: dict[str, str] = field(default_factory=dict)
    """Single steps that fail, by their number, and where."""
    sites: tuple[str, ...] = SITES
    calm_s: float = 12.0
    """The longest time between two steps, on a clock of its own."""
    turns: float = 0.0
    """The share of steps before which the knobs are turned."""
    is_old_admission: bool = False
    """One bound for who is admitted and how many may run, as before 0.31."""
    sabotage: str = ""
    """What is broken on purpose, to show that it is noticed: a name of SABOTAGE."""


class Clock:
    """Stands in for the module `time` in containment: steps take as long as the scenario says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds that only the scenario moves."""
        return self.now

    def time(self) -> float:
        """The same."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move on at once."""
        self.now += seconds


class Engine:
    """vLLM's engine core for one scenario."""

    def __init__(self, model: str, scenario: Scenario) -> None:
        self.scenario = scenario
        self.dice = random.Random(scenario.seed)
        planned = {int(step): site for step, site in scenario.planned.items()}
        self.faults = Faults(scenario.share, random.Random(scenario.seed + 1), scenario.sites, planned, scenario.pause)
        self.clock = Clock()
        self.forgotten = 0
        self.sent: list[Any] = []
        self.core = self._core(self._config(model))
        for module in (CONTAIN, KNOBS):
            importlib.import_module(module).time = self.clock  # type: ignore[attr-defined]
        self.orders = 0
        if scenario.turns:
            self._follow_knobs()

    def _follow_knobs(self) -> None:
        """Hold each step against what is in force."""
        knobs: Any = importlib.import_module(KNOBS)
        scheduler = self.core.scheduler
        if self.scenario.is_old_admission:
            kind: Any = type(scheduler)
            same = property(lambda self: self.max_num_running_reqs, lambda _self, _value: None)
            scheduler.__class__ = type(kind.__name__, (kind,), {"max_num_active_reqs": same, "__module__": kind.__module__})
        self.knobs = knobs.knobs_of(self.core)
        if self.scenario.is_old_admission:
            self.knobs._scheduler._admission = "max_num_running_reqs"  # noqa: SLF001
        own = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            before, bounds = {request.request_id for request in scheduler.running}, self.knobs.in_force(self.clock.now)
            plan = own(*args, **kwargs)
            assert plan.total_num_scheduled_tokens <= bounds[knobs.MAX_TOKENS]
            if {request.request_id for request in scheduler.running} - before:
                assert len(scheduler.running) <= bounds[knobs.MAX_SEQS], "admitted beyond the bound"
            return plan

        scheduler.schedule = schedule

    def turn(self) -> None:
        """Give an order with one to four knobs, or end the lease; it takes hold at once and says what the rule says."""
        knobs, dice, start = importlib.import_module(KNOBS), self.dice, self.knobs.start
        values = {
            "max-num-seqs": dice.randint(1, int(start["max-num-seqs"])),
            "max-num-batched-tokens": dice.randint(1, int(start["max-num-batched-tokens"])),
            "kv-headroom": round(dice.uniform(0.0, 0.6), 3),
            "long-prefill-token-threshold": dice.randint(1, 64),
        }
        wanted = {name: values[name] for name in dice.sample(list(values), dice.randint(0, 4))}
        self.orders += 1
        order = {"epoch": self.orders, "lease_s": dice.uniform(0.1, 4 * self.scenario.calm_s), "values": wanted}
        told = json.loads(self.core.plimsoll_knobs(json.dumps(order)))
        assert "refused" not in told, told
        running = len(self.core.scheduler.running)
        for name, value in start.items():
            leased = wanted.get(name)
            if leased is not None and name == "max-num-batched-tokens":
                leased = max(leased, running)
            bound = knobs.strictest(name, value, self.knobs.contained.get(name), leased)
            assert told["turned_to"][name] == bound, f"{name}: {told['turned_to'][name]}, not {bound}"

    def _config(self, model: str) -> Any:
        scenario = self.scenario
        importlib.import_module("vllm.envs").disable_envs_cache()
        os.environ.pop(RUNNER, None)
        arguments: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        config = arguments(
            model=model, load_format="dummy", dtype="float32", max_model_len=MODEL_LEN, enforce_eager=True,
            max_num_batched_tokens=scenario.batched_tokens, max_num_seqs=scenario.sequences, block_size=32,
            enable_prefix_caching=scenario.prefix_caching, num_gpu_blocks_override=scenario.blocks,
        ).create_engine_config()  # fmt: skip
        # What the CPU platform forces, and what only a GPU would choose.
        config.scheduler_config.async_scheduling = scenario.asynchronous
        config.cache_config.block_size = 16
        config.cache_config.num_gpu_blocks_override = scenario.blocks
        os.environ[RUNNER] = str(int(scenario.runner == "second"))
        return config

    def _core(self, config: Any) -> Any:
        engine = self
        uniproc: Any = importlib.import_module("vllm.v1.executor.uniproc_executor").UniProcExecutor

        class Executor(uniproc):  # type: ignore[misc]
            """vLLM's executor of one process over the worker without a model."""

            def _init_executor(self) -> None:
                is_second = engine.scenario.runner == "second"
                self.driver_worker = Worker(self.vllm_config, engine.faults, is_second=is_second)

            def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
                if callable(method):
                    engine.forgotten += method.__name__ == "forget_step"
                return super().collective_rpc(method, *args, **kwargs)

            def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
                if not (engine.scenario.late and non_block):
                    return super().execute_model(scheduler_output, non_block)
                return self.collective_rpc("execute_model", args=(scheduler_output,), non_block=True, single_value=True)

        module: Any = importlib.import_module("vllm.v1.engine.core")
        module.freeze_gc_heap = gc.freeze  # without the collection before it: a third of a second for each of many engines
        core = module.EngineCore(config, Executor, log_stats=True)
        assert (core.batch_queue is not None) == self.scenario.asynchronous
        return core

    # Requests

    def prompt(self, number: int) -> list[int]:
        """A prompt; some begin as another does, so that the prefix cache has something to give."""
        own = random.Random(self.scenario.seed * 1000 + number)
        length = own.randint(1, self.scenario.longest_prompt)
        shared = random.Random(own.choice((1, 2, 3)) if own.random() < 0.6 else number + 100)
        head = [shared.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)]
        tail = [own.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(own.randint(1, 8))]
        return (head + tail)[-self.scenario.longest_prompt :] if own.random() < 0.1 else head + tail

    def add(self, number: int) -> tuple[str, list[int], int, bool]:
        """Send one request; its id, its prompt, the tokens it may have and whether a grammar rules them."""
        sampling: Any = importlib.import_module("vllm.sampling_params")
        made: Any = importlib.import_module("vllm.v1.engine").EngineCoreRequest
        prompt, name = self.prompt(number), f"request-{number}"
        most = random.Random(self.scenario.seed * 77 + number).randint(1, self.scenario.longest_output)
        is_structured = self.scenario.structured > 0 and number % self.scenario.structured == 0
        params = sampling.SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=not is_structured)
        if is_structured:
            params.structured_outputs = sampling.StructuredOutputsParams(regex=REGEX)
            params.structured_outputs._backend = "xgrammar"  # noqa: SLF001 - what vLLM's front end fills in
        wire = made(
            request_id=name, prompt_token_ids=list(prompt), mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=self.clock.now, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        request, wave = self.core.preprocess_add_request(wire)
        self.core.add_request(request, wave)
        self.sent.append(request)
        return name, prompt, most, is_structured

    def has_work(self) -> bool:
        """Whether the busy loop of vLLM would step."""
        return bool(self.core.batch_queue) or self.core.scheduler.has_requests()

    def step(self) -> dict[str, tuple[list[int], str | None]]:
        """One step as vLLM's loop makes it: the new tokens of each request, and its end."""
        self.clock.now += self.dice.uniform(0.0, self.scenario.calm_s)
        forgotten = self.forgotten
        if self.scenario.sabotage and self.faults.step == 1:
            SABOTAGE[self.scenario.sabotage](self.core)  # the first step has armed it
        if self.scenario.turns and self.dice.random() < self.scenario.turns:
            self.turn()
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        self.check_counters(is_contained=self.forgotten > forgotten)
        found = {}
        for one in (outputs or {}).values():
            for output in one.outputs:
                assert output.request_id not in found, f"{output.request_id} twice in one step"
                end = output.finish_reason
                found[output.request_id] = (list(output.new_token_ids), None if end is None else str(end))
        return found

    # What must hold

    def check_counters(self, *, is_contained: bool) -> None:
        """Tokens in flight are those of the steps in the queue; after a contained failure there are none."""
        in_flight: Counter[str] = Counter()
        for _future, planned, _executed in self.core.batch_queue or ():
            in_flight.update(planned.num_scheduled_tokens)
        if is_contained:
            assert not in_flight, "steps are left in the queue"
            assert not self.core.scheduler.running, "requests are left running"
        for name, request in self.core.scheduler.requests.items():
            assert request.num_in_flight_tokens == in_flight[name], (
                f"{name}: {request.num_in_flight_tokens} tokens in flight, the queue has {in_flight[name]}"
            )
            assert 0 <= request.num_stale_output_tokens <= request.num_in_flight_tokens
            assert 0 <= request.num_output_placeholders <= len(self.core.batch_queue or ()) + 1
            if is_contained:
                assert request.num_output_placeholders == 0
                assert not request.drop_stale_output

    def check_accounts(self) -> None:
        """Nothing is left: no request, no block that is held, nothing that the worker still knows."""
        scheduler = self.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        held = [block.block_id for block in pool.blocks if block.ref_cnt != 0 and not block.is_null]
        assert not held, f"blocks that nobody uses are held: {held}"
        assert pool.get_num_free_blocks() == self.scenario.blocks - 1, f"{pool.get_num_free_blocks()} blocks are free"
        assert not scheduler.requests, f"requests are left: {list(scheduler.requests)}"
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        assert not scheduler.deferred_frees
        known = list(self.core.model_executor.driver_worker.model_runner.requests)
        assert not known, f"the worker still knows {known}"


def _keep_cache(core: Any) -> None:
    core.scheduler.kv_cache_manager.reset_prefix_cache = lambda: True


def _keep_counters(core: Any) -> None:
    containment = core.step_fn.__self__
    containment.adapter = replace(containment.adapter, zero_before=(), zero_after=(), false_after=())


def _keep_queue(core: Any) -> None:
    class Queue(deque):  # type: ignore[type-arg]
        """A queue that cannot be cleared."""

        def clear(self) -> None:
            """Does nothing."""

    core.batch_queue = Queue(core.batch_queue, maxlen=core.batch_queue.maxlen)


def _ignore_worker(core: Any) -> None:
    containment = core.step_fn.__self__
    preempt_all = containment._preempt_all  # noqa: SLF001
    containment._preempt_all = lambda _known: preempt_all(set(core.scheduler.requests))  # noqa: SLF001


def _disarm(core: Any) -> None:
    own = type(core).step if core.batch_queue is None else type(core).step_with_batch_queue
    core.step_fn = inspect.unwrap(own).__get__(core)


SABOTAGE: dict[str, Callable[[Any], None]] = {
    "disarmed": _disarm,  # vLLM as it is
    "cache kept": _keep_cache,  # blocks stay in the prefix cache that no forward pass has written
    "counters kept": _keep_counters,  # of tokens that are in flight no more
    "queue kept": _keep_queue,
    "worker not asked": _ignore_worker,  # which requests it knows
}


def expected_tokens(prompt: list[int], most: int) -> list[int]:
    """What a request without a grammar is answered."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most:
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def play(model: str, scenario: Scenario) -> dict[str, Any]:
    """Send every request, step until nothing is left, and hold each answer against what it must be."""
    engine = Engine(model, scenario)
    try:
        got, asked, left = serve(engine)
        engine.check_accounts()
        if scenario.turns:
            engine.knobs.answer(json.dumps({"lease_s": 1.0, "values": {}}))
            assert engine.knobs.in_force(engine.clock.now) == {**engine.knobs.start, **engine.knobs.contained}
        wrong = []
        for name, (prompt, most, is_structured) in asked.items():
            tokens, end = got[name]
            if is_structured:
                continue
            wanted = expected_tokens(prompt, most)
            is_right = tokens == wanted[: len(tokens)] if name in left else (tokens == wanted and end == "length")
            if not is_right:
                wrong.append(f"{name}: {tokens} {end}, not {wanted}")
        assert not wrong, f"{len(wrong)} answers are wrong: {wrong[:2]}"
        scheduler = engine.core.scheduler
        return {
            "ok": True, "steps": engine.faults.step, "raised": dict(Counter(engine.faults.raised)),
            "contained": engine.forgotten, "requests": len(asked), "left": len(left),
            "preemptions": sum(request.num_preemptions for request in engine.sent),
            "tokens": {name: tokens for name, (tokens, _end) in got.items() if asked[name][2] and name not in left},
            "turns": engine.orders,
            "limits": [scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs],
        }  # fmt: skip
    finally:
        engine.core.structured_output_manager.clear_backend()  # all that holds something; a whole shutdown takes half a second


Asked = dict[str, tuple[list[int], int, bool]]
Got = dict[str, tuple[list[int], str | None]]


def serve(engine: Engine) -> tuple[Got, Asked, set[str]]:
    """All answers, all requests, and those whose client left."""
    scenario, dice = engine.scenario, engine.dice
    got: Got = {}
    asked: Asked = {}
    left: set[str] = set()
    for _ in range(MOST_STEPS):
        while len(asked) < scenario.requests and (dice.random() < 0.3 or not engine.has_work()):
            name, prompt, most, is_structured = engine.add(len(asked))
            asked[name], got[name] = (prompt, most, is_structured), ([], None)
        if not engine.has_work():
            assert len(asked) == scenario.requests
            return got, asked, left
        if scenario.aborts and dice.random() < scenario.aborts:
            name = dice.choice(list(asked))
            if got[name][1] is None:
                left.add(name)
                engine.core.aborts_queue.put([name])  # as vLLM's loop does: it is told twice
                if dice.random() < 0.5:
                    engine.core.abort_requests([name])
        for name, (tokens, end) in engine.step().items():
            assert name in asked, f"{name} was never asked for"
            assert got[name][1] is None, f"{name} goes on after its end"
            got[name] = (got[name][0] + tokens, end)
    raise AssertionError(f"not done after {MOST_STEPS} steps: {[name for name, (_, end) in got.items() if end is None]}")


def private_stdout() -> TextIO:
    """The pipe to whoever asks; from now on everything else that prints to stdout reaches stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def main() -> None:
    """Answer scenarios until the input ends."""
    pipe, names = private_stdout(), {each.name for each in fields(Scenario)}
    for line in sys.stdin:
        asked = json.loads(line)
        assert set(asked) <= names, f"no such setting: {set(asked) - names}"
        try:
            answer = play(sys.argv[1], Scenario(**asked))
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-6000:]}
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()


if __name__ == "__main__":
    main()

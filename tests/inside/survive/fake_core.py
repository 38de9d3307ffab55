"""An engine core with the names of vLLM's own, as containment meets it: a scheduler, an executor, requests."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.10 GiB is free."
)


class OutOfMemoryError(RuntimeError):
    """As torch's: known by its name."""


class Request:
    """A request of 0.32, with the counters that a dropped step leaves behind."""

    def __init__(self, request_id: str, tokens: int = 100) -> None:
        self.request_id = request_id
        self.client_index = 0
        self.status = "WAITING"
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_prompt_tokens = tokens
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.num_output_placeholders = 0
        self.drop_stale_output = False
        self.mm_features: list[Any] = []
        self.sampling_params = SimpleNamespace(prompt_logprobs=None)
        self.lora_request = None


class Queue(deque[Request]):
    def remove_request(self, request: Request) -> None:
        self.remove(request)

    def prepend_request(self, request: Request) -> None:
        self.appendleft(request)

    def peek_request(self) -> Request:
        return self[0]


class Scheduler:
    """As much of vLLM's as a preemption of everything touches."""

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting = Queue()
        self.requests: dict[str, Request] = {}
        self.max_num_scheduled_tokens = 1024
        self.max_num_running_reqs = self.max_num_active_reqs = 8
        self.max_num_encoder_input_tokens = 512
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        self.sched_step_seq = self.processed_step_seq = 0
        self.num_spec_tokens = 0
        self.connector = self.ec_connector = None
        self.encoder_cache_manager = None
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=())
        self.cache: set[str] = set()
        self.encoder_resets = 0

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Any:
        while self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.popleft()
            request.status = "RUNNING"
            self.running.append(request)
        budget, planned = self.max_num_scheduled_tokens, {}
        for request in self.running:
            left = request.num_prompt_tokens + request.num_output_tokens - request.num_computed_tokens
            planned[request.request_id] = tokens = min(left, budget)
            budget -= tokens
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            self.cache.add(request.request_id)
        self.sched_step_seq += 1
        planned = {name: tokens for name, tokens in planned.items() if tokens > 0}
        return SimpleNamespace(
            num_scheduled_tokens=planned, total_num_scheduled_tokens=sum(planned.values()), scheduled_encoder_inputs={}
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        assert reset_running_requests
        assert not reset_connector
        while self.running:
            request = self.running.pop()
            assert request.num_in_flight_tokens == 0
            request.status, request.num_computed_tokens = "PREEMPTED", 0
            request.num_stale_output_tokens = 7
            request.drop_stale_output = True
            self.waiting.appendleft(request)
        self.cache.clear()
        return True

    def reset_encoder_cache(self) -> None:
        self.encoder_resets += 1

    def finish_requests(self, request_ids: list[str], finished_status: str) -> None:
        for request_id in request_ids:
            request = self.requests.pop(request_id)
            request.status = finished_status
            self.waiting.remove(request)

    def _drain_deferred_frees(self) -> None:
        assert self.processed_step_seq == self.sched_step_seq


Scheduler.__module__ = "vllm.v1.core.sched.scheduler"


class UniProcExecutor:
    """A worker in the same process: it is asked by function, and knows requests."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.free: int | None = None
        self.calls: list[str] = []

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Nothing is sampled here."""

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        del args
        self.calls.append(method.__name__)
        return [{"known": sorted(self.known), "site": "forward", "free": self.free}]


class EngineCore:
    """Steps that schedule, fail where `fail` says so, and else send one token a request that is done with its prompt."""

    def __init__(self, fail: Callable[[Any], BaseException | None] = lambda _plan: None) -> None:
        self.scheduler = Scheduler()
        self.model_executor = UniProcExecutor()
        self.batch_queue: Any = None
        self.fail = fail
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
            model_config=SimpleNamespace(is_multimodal_model=False, enforce_eager=True, runner_type="generate"),
            speculative_config=None,
            lora_config=None,
            use_v2_model_runner=False,
        )
        self.step_fn: Any = self.step

    def add_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> tuple[Any, bool]:
        scheduler_output = self.scheduler.schedule()
        self.model_executor.known |= scheduler_output.num_scheduled_tokens.keys()
        if (error := self.fail(scheduler_output)) is not None:
            raise error
        sent = []
        for name in scheduler_output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            request.num_in_flight_tokens = 0
            if request.num_computed_tokens == request.num_prompt_tokens + request.num_output_tokens:
                request.num_output_tokens += 1
                sent.append(SimpleNamespace(request_id=name))
        return {0: SimpleNamespace(outputs=sent)}, True


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few names of vLLM that aborting a request needs."""
    status = SimpleNamespace(PREEMPTED="PREEMPTED", WAITING="WAITING", FINISHED_ERROR="FINISHED_ERROR")
    reason = SimpleNamespace(ERROR="error")

    def output(request_id: str, new_token_ids: list[int], finish_reason: str) -> Any:
        return SimpleNamespace(request_id=request_id, new_token_ids=new_token_ids, finish_reason=finish_reason)

    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True)
    modules: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": platform},
        "vllm": {"__version__": "0.32.0"},
        "vllm.v1": {},
        "vllm.v1.request": {"RequestStatus": status},
        "vllm.v1.engine": {"EngineCoreOutput": output, "EngineCoreOutputs": SimpleNamespace, "FinishReason": reason},
    }
    for name, parts in modules.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)

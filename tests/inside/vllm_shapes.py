"""Objects with the fields of vLLM's own, as its releases have them: read from the sources, holding nothing of them."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any


def finished(**changed: Any) -> SimpleNamespace:
    """`FinishedRequestStats` of 0.32.0: 20 tokens after 100, scheduled half a second after it came, over in two."""
    return SimpleNamespace(
        **{
            "finish_reason": "length",
            "e2e_latency": 2.0,
            "num_prompt_tokens": 100,
            "num_preemptions": 1,
            "num_generation_tokens": 20,
            "max_tokens_param": 20,
            "inference_time": 1.5,
            "decode_time": 1.0,
            "num_cached_tokens": 64,
            **changed,
        }
    )


def iteration(*requests: Any, at: float = 1_700_000_000.0, prompt: int = 0, generation: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        iteration_timestamp=at, num_prompt_tokens=prompt, num_generation_tokens=generation, finished_requests=list(requests)
    )


def scheduler(running: int, waiting: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, **more)


def request_stats(**changed: Any) -> SimpleNamespace:
    """`RequestStateStats`: came at a time of the wall clock, scheduled at 50.0 of the engine's, first token at 50.4."""
    return SimpleNamespace(
        **{
            "num_generation_tokens": 9,
            "num_preemptions": 0,
            "arrival_time": 1_700_000_000.0,
            "scheduled_ts": 50.0,
            "first_token_ts": 50.4,
            "first_token_latency": 1.0,
            **changed,
        }
    )


class RequestState:
    """What vLLM's output processor keeps of a request while it runs."""

    def __init__(self, request: Any) -> None:
        self.request_id = request.request_id
        self.prompt_len = len(getattr(request, "prompt_token_ids", None) or ())
        self.max_tokens_param = 50
        self.num_cached_tokens = 0
        self.stats: Any = request_stats()


def request(name: str, ids: list[int] | None = None, **more: Any) -> SimpleNamespace:
    known = {"mm_features": None, "lora_request": None, "cache_salt": None, "prompt_embeds": None, "priority": 0}
    return SimpleNamespace(request_id=name, prompt_token_ids=ids, **{**known, **more})


def output_processor() -> Any:
    """A new class like `OutputProcessor` of 0.32.0, to be wrapped without a trace in other tests."""

    class OutputProcessor:
        def __init__(self) -> None:
            self.request_states: dict[str, RequestState] = {}
            self.parent_requests: dict[str, list[str]] = {}
            self.fails = False

        def add_request(
            self, request: Any, prompt: str | None, parent_req: Any = None, request_index: int = 0, queue: Any = None
        ) -> str:
            del prompt, request_index, queue
            if self.fails:
                raise RuntimeError("vLLM's own")
            self.request_states[request.request_id] = RequestState(request)
            if parent_req is not None:
                self.parent_requests.setdefault(parent_req.request_id, []).append(request.request_id)
            return "added"

        def _finish_request(self, req_state: Any) -> None:
            del self.request_states[req_state.request_id]

        def _update_stats_from_finished(self, req_state: Any, finish_reason: Any, iteration_stats: Any) -> None:
            del self.request_states[req_state.request_id]
            if iteration_stats is not None:
                iteration_stats.finished_requests.append(finished(finish_reason=finish_reason))

        def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
            gone: list[str] = []
            for one in request_ids:
                if self.request_states.pop(one, None) is not None:
                    gone.append(one)
                elif children := self.parent_requests.pop(one, None):
                    gone.extend(self.abort_requests(children, internal))
            return gone

    return OutputProcessor

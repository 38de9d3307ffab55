"""What a worker takes back of a failed step."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.survive import worker
from plimsoll.inside.survive.failures import NOTE, StepFailure


def request(prompt_logprobs: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(prompt_logprobs=prompt_logprobs), in_progress_prompt_logprobs_cpu="half done"
    )


class Adapters:
    """The adapters of a worker, one of them half copied."""

    def __init__(self) -> None:
        self._active_adapters = {1: None, 2: None}
        self._last_mapping: Any = "old"

    def deactivate_adapter(self, adapter: int) -> None:
        del self._active_adapters[adapter]


def first_runner() -> Any:
    """The first runner after a step that failed behind the sampler."""
    return SimpleNamespace(
        execute_model_state="left over",
        requests={"a": request(), "b": request(3), "c": request(-1), "d": request(2)},
        num_prompt_logprobs={"d": 2},
        input_batch=SimpleNamespace(
            prev_sampled_token_ids="old",
            prev_req_id_to_index={"a": 0},
            vocab_size=2048,
            sampled_token_ids_cpu="old",
            async_copy_ready_event="old",
        ),
        _draft_token_ids="old",
        lora_manager=SimpleNamespace(_adapter_manager=Adapters()),
    )


def wrapped(runner: Any, device: str = "cpu") -> Any:
    return SimpleNamespace(worker=SimpleNamespace(model_runner=runner, device=SimpleNamespace(type=device, index=0)))


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of torch as giving memory back needs."""
    calls: list[str] = []
    cuda = SimpleNamespace(
        synchronize=lambda _device: calls.append("synchronize"), empty_cache=lambda: calls.append("empty_cache"),
        mem_get_info=lambda _device: (1000, 5000), memory_reserved=lambda _device: 700, memory_allocated=lambda _device: 400,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, calls=calls))
    return sys.modules["torch"]


def test_the_first_runner_forgets_what_dropped_steps_did_to_its_requests() -> None:
    """Sampled tokens of a dropped step, and log-probabilities of a prompt whose output never arrived."""
    runner = first_runner()
    NOTE.last = StepFailure("logits")
    answer = worker.forget_step(wrapped(runner), ("a", "b", "c", "gone"))
    assert answer == {"known": ["a", "b", "c", "d"], "site": "logits", "free": None}
    assert runner.execute_model_state is None
    assert runner.input_batch.prev_sampled_token_ids is None
    assert runner.input_batch.prev_req_id_to_index is None
    assert runner.input_batch.sampled_token_ids_cpu is None  # with it vLLM asserts that the line above is not None
    assert runner.input_batch.async_copy_ready_event is None
    assert runner._draft_token_ids is None
    assert runner.num_prompt_logprobs == {"b": 3, "c": 2048, "d": 2}
    assert runner.requests["b"].in_progress_prompt_logprobs_cpu is None
    assert runner.requests["d"].in_progress_prompt_logprobs_cpu == "half done"
    assert NOTE.last == StepFailure()


def test_a_half_copied_adapter_is_copied_again() -> None:
    """vLLM marks it as loaded before; a runner of another form is an error that ends the engine as it would have."""
    runner = first_runner()
    worker.forget_step(wrapped(runner), ())
    manager = runner.lora_manager._adapter_manager
    assert manager._active_adapters == {}
    assert manager._last_mapping is None
    with pytest.raises(AttributeError):
        worker.forget_step(wrapped(SimpleNamespace(requests={})), ("a",))


def test_the_second_runner_takes_every_request_anew() -> None:
    """Only what it knows is asked; it keeps nothing over a preemption."""

    class GPUModelRunner:
        req_states = SimpleNamespace(req_id_to_index={"a": 3})
        execute_model_state: Any = "left over"

    GPUModelRunner.__module__ = worker.SECOND_RUNNER
    runner = GPUModelRunner()
    assert worker.forget_step(wrapped(runner), ("a",))["known"] == ["a"]
    assert runner.execute_model_state is None


def test_memory_goes_back_to_the_device_when_it_is_idle(torch: Any) -> None:
    """Waited for first; what torch holds and nobody uses counts as free."""
    assert worker.forget_step(wrapped(first_runner(), "cuda"), ())["free"] == 1300
    assert torch.calls == ["synchronize", "empty_cache"]
    assert worker.available(wrapped(first_runner())) == {"free": None}

"""The worker's part after a step ran out of memory: it forgets the step, gives memory back and reports to the engine core.

Called by the engine core through the executor, between two steps, in the worker's own thread. An error here is not
caught: the engine core then gives up, and vLLM dies as it would have.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from plimsoll.inside.memory import asleep_or_allocating
from plimsoll.inside.survive.failures import NOTE, StepFailure

_DRAFTS = ("_draft_token_ids", "_draft_token_req_ids", "_draft_probs", "_draft_prob_req_ids", "valid_sampled_token_count_gpu")
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"


def forget_step(worker: Any, fresh: tuple[str, ...]) -> dict[str, Any]:
    """Undoes what the failed step left behind; `fresh`: requests that have sent no token yet.

    Returns the place of the failure (if this is a process of its own), the requests this worker knows, and the free memory.
    """
    worker = getattr(worker, "worker", worker)  # vLLM wraps it
    runner = worker.model_runner
    runner.execute_model_state = None
    # The second runner takes every resumed request as a new one.
    if any(kind.__module__ == SECOND_RUNNER for kind in type(runner).__mro__):
        known = list(runner.req_states.req_id_to_index)
    else:
        known = list(runner.requests)
        _forget_first(runner, fresh)
    # Every adapter leaves its slot: vLLM marks one as loaded before it has copied it, and never copies it again.
    manager = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
    if manager is not None:
        for adapter in list(manager._active_adapters):  # noqa: SLF001
            manager.deactivate_adapter(adapter)
        manager._last_mapping = None  # noqa: SLF001
    noted, NOTE.last = NOTE.last, StepFailure()
    gc.collect()
    torch = sys.modules["torch"]
    if getattr(worker.device, "type", None) == "cuda":
        torch.cuda.synchronize(worker.device)
        if asleep_or_allocating() is None:
            torch.cuda.empty_cache()
    return {"known": known, "site": noted.site, **available(worker)}


def _forget_first(runner: Any, fresh: tuple[str, ...]) -> None:
    """Undoes the dropped steps' changes to requests in the first runner, which keeps requests over a preemption."""
    batch = runner.input_batch
    # A dropped step's tokens: they would get into the next step's input, or into its penalties.
    batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
    batch.sampled_token_ids_cpu = batch.async_copy_ready_event = None
    for name in _DRAFTS:
        if hasattr(runner, name):
            setattr(runner, name, None)
    for request_id in fresh:
        request = runner.requests.get(request_id)
        wanted = getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None)
        if request is None or wanted is None:
            continue
        # The prompt's log-probabilities may have been finished in a step whose output never arrived.
        runner.num_prompt_logprobs[request_id] = batch.vocab_size if wanted == -1 else wanted
        request.in_progress_prompt_logprobs_cpu = None


def available(worker: Any) -> dict[str, Any]:
    """Returns the bytes that a step could use: the device's free ones, and those that torch holds unused; None without CUDA."""
    worker = getattr(worker, "worker", worker)
    torch = sys.modules["torch"]
    if getattr(worker.device, "type", None) != "cuda":
        return {"free": None}
    free, _total = torch.cuda.mem_get_info(worker.device)
    unused = torch.cuda.memory_reserved(worker.device) - torch.cuda.memory_allocated(worker.device)
    return {"free": int(free) + max(0, int(unused))}

"""vLLM's own InputBatch after a contained failure, with a request that has a penalty: run by the engine's Python.

Under asynchronous scheduling the first runner fills the last sampled tokens into the penalties of the next step. It asserts
that it knows which requests they belong to. Prints "fine" when what `forget_step` leaves behind passes.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from plimsoll.inside.survive import worker


def main() -> None:
    """Leave what the last good step leaves, forget the failed one, and take the next step's first look."""
    torch: Any = importlib.import_module("torch")
    batches: Any = importlib.import_module("vllm.v1.worker.gpu_input_batch")
    batch = batches.InputBatch.__new__(batches.InputBatch)
    batch._req_ids, batch.vocab_size = ["a"], 100  # noqa: SLF001 - as vLLM makes it
    batch.sampling_metadata = SimpleNamespace(output_token_ids=[[5, 7]])
    batch.prev_req_id_to_index, batch.prev_sampled_token_ids = {"a": 0}, torch.tensor([[7]])
    batch.sampled_token_ids_cpu = torch.tensor([[7]])
    batch.async_copy_ready_event = SimpleNamespace(synchronize=lambda: None)
    runner = SimpleNamespace(input_batch=batch, requests={}, num_prompt_logprobs={}, execute_model_state=None)
    worker.forget_step(SimpleNamespace(model_runner=runner, device=torch.device("cpu")), ())
    batch.update_async_output_token_ids()
    print("fine")


if __name__ == "__main__":
    main()

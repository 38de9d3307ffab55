"""What one real start of vLLM said of its memory, per GPU and of the rank that rules; None where nothing was said."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.units import GIB

# vLLM prints GiB with two decimals: what it means lies half a hundredth to either side.
PRINTED_TOLERANCE = GIB // 200


class Measured(NamedTuple):
    """Numbers alone: no path, name or argument of the user's is kept. Sizes in bytes."""

    release: str | None = None
    total_bytes: int | None = None  # of the card, as vLLM sees it
    free_bytes: int | None = None  # at vLLM's snapshot
    utilization: float | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None  # printed up to 0.26
    consumed_bytes: int | None = None  # weights and non-torch together, printed from 0.27
    activation_bytes: int | None = None  # without the graphs, also where vLLM prints them in one figure
    graphs_estimated_bytes: int | None = None
    graphs_actual_bytes: int | None = None
    graphs_subtracted: bool | None = None  # whether the estimate was taken off the cache
    kv_bytes: int | None = None  # "Available KV cache memory"; negative when nothing was left
    kv_tokens: int | None = None
    blocks: int | None = None
    max_concurrency: float | None = None
    ranks: int | None = None  # workers that spoke of their memory
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    planned_kv_bytes: int | None = None  # of vLLM's startup plan: less the graphs and 150 MiB than what was available

    @property
    def has_memory(self) -> bool:
        """Whether there is anything to learn from."""
        return any(figure is not None for figure in (self.weights_bytes, self.kv_bytes, self.planned_kv_bytes, self.blocks))

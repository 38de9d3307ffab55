"""All that the metrics page of one engine shows, as numbers. Its scheduler and its memory put them there, and nobody else."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

# What each histogram is of. `max_output` is the longest of the n answers to one request.
HISTOGRAMS = tuple(
    "ttft inter_token tpot e2e queue inference prefill decode prompt output max_output params_max_tokens params_n step_tokens "
    "request_preemptions prefill_kv_computed".split()
)
ENDS = ("stop", "length", "abort", "error", "repetition")
VALVES = ("max_num_queued_reqs", "max_num_queued_tokens")


class Histogram:
    """How many of what was observed fell under each edge."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One more; a value on an edge belongs to the bucket that ends there."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)


class Figures:
    """One engine's. Gauges are as of the last step, as vLLM's are."""

    def __init__(self, edges: Mapping[str, Sequence[float]]) -> None:
        self.running = self.waiting = self.waiting_deferred = 0
        self.kv_usage = 0.0
        self.steps = self.preemptions = self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = self.prompt_computed = self.prompt_cached = 0
        self.success = dict.fromkeys(ENDS, 0)
        self.rejected = dict.fromkeys(VALVES, 0)
        self.sleep_state = "awake"
        self.histograms = {name: Histogram(edges.get(name, ())) for name in HISTOGRAMS}

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "histograms"}
        counts = {name: histogram.count for name, histogram in self.histograms.items()}
        return f"Figures({', '.join(f'{name}={value!r}' for name, value in shown.items())}, histograms={counts})"

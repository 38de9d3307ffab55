"""One reading of one engine at one moment; what was absent stays absent, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Unknown:
    """A figure that could not be had."""

    reason: str

    def __bool__(self) -> bool:
        raise TypeError(f"unknown ({self.reason}) is neither true nor false; test with isinstance")


Reading = float | Unknown


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look at one engine showed. Counters are totals since the engine's start; ratios run from 0 to 1."""

    engine: str
    at_s: float
    figures: Mapping[str, float] = field(default_factory=dict)  # by our own names, see engine/metrics.py
    missing: Mapping[str, str] = field(default_factory=dict)  # figure to the reason why it is not there
    vllm: str | None = None  # the version the engine reports
    health: int | None = None  # the HTTP status of /health; None if it did not answer
    started_at_s: float | None = None

    def reading(self, figure: str) -> Reading:
        """The figure, or Unknown with the reason."""
        if figure in self.figures:
            return self.figures[figure]
        return Unknown(self.missing.get(figure, "not on the page"))

    def restarted_since(self, earlier: Observation) -> bool | None:
        """Whether the engine started anew in between; None if nothing tells."""
        if self.started_at_s is not None and earlier.started_at_s is not None:
            return self.started_at_s > earlier.started_at_s
        totals = [f for f in self.figures if f in earlier.figures and f in _COUNTERS]
        # Only a fall is knowledge: an engine that restarted and caught up, or was idle before and after, shows none.
        return True if any(self.figures[f] < earlier.figures[f] for f in totals) else None


# Figures that never fall while the same engine runs.
_COUNTERS = frozenset({"preemptions", "prompt_tokens", "generation_tokens", "success", "prefix_queries", "prefix_hits"})

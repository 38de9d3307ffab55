"""Two ways of serving, compared in pairs: turn by turn, so that a slow minute of the machine hits both, and with a bound.

pairs = alternate(5, with_it, without_it)          # with, without, without, with, with, ...
loss = loss_of([(a.tokens_per_s, b.tokens_per_s) for a, b in pairs])
loss.upper                                         # with 95 % confidence it costs no more than this share
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from lab import streams
from lab.streams import Shape, Streams

T = TypeVar("T")

# Student's t that 95 % stay below, for 1, 2, 3, ... degrees of freedom; for more than the table holds, the last one, which
# is a little too large and so never flatters.
T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
RAMP_S = 1.0  # of each run, before anything is counted: the first prompts all come at once


class Loss(NamedTuple):
    """How much less one way delivers than the other, as a share; negative where it delivers more."""

    ratios: tuple[float, ...]
    mean: float
    spread: float
    """The standard deviation over the pairs."""
    upper: float | None
    """The mean is below this with 95 % confidence; None for fewer than two pairs."""

    def __str__(self) -> str:
        bound = "unknown" if self.upper is None else f"{self.upper:.2%}"
        return f"loss {self.mean:.2%} over {len(self.ratios)} pairs, upper bound (95 %) {bound}, spread {self.spread:.2%}"


def t95(degrees: int) -> float:
    """The one-sided 95 % quantile of Student's t."""
    assert degrees >= 1, "a bound needs two pairs"
    return T95[min(degrees, len(T95)) - 1]


def upper_bound(values: Sequence[float]) -> float | None:
    """What the mean of these stays below with 95 % confidence, if they are spread as usual."""
    if len(values) < 2:
        return None
    return statistics.fmean(values) + t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def loss_of(pairs: Sequence[tuple[float, float]]) -> Loss:
    """The loss from pairs of (with, without), each a rate."""
    assert pairs, "no pair, no loss"
    ratios = tuple(one / other for one, other in pairs)
    losses = [1 - ratio for ratio in ratios]
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return Loss(ratios, statistics.fmean(losses), spread, upper_bound(losses))


def alternate(pairs: int, one: Callable[[int], T], other: Callable[[int], T]) -> list[tuple[T, T]]:
    """Run both for each pair, and change which of them is first from pair to pair; each is handed the pair's number."""
    found = []
    for number in range(pairs):
        if number % 2 == 0:
            first = one(number)
            found.append((first, other(number)))
        else:
            second = other(number)
            found.append((one(number), second))
    return found


def serve_for(port: int, model: str, shape: Shape, seconds: float, seed: int = 0) -> dict[str, Any]:
    """One run of closed-loop streams; what was delivered in it, after the ramp."""
    with Streams(port, model, shape, RAMP_S + seconds, seed) as run:
        answers = run.finish()
        return streams.summary(answers, run.begin + RAMP_S, run.begin + RAMP_S + seconds)


def compared(runs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What pairs of runs say: the loss of tokens a second with its bound, and what the latencies were."""
    loss = loss_of([(one["tokens_per_s"], other["tokens_per_s"]) for one, other in runs])
    found: dict[str, Any] = {"pairs": len(runs), **loss._asdict(), "in_words": str(loss)}
    for name in ("gap_p50_ms", "gap_p99_ms", "first_token_p50_ms", "first_token_p99_ms"):
        known = [(one[name], other[name]) for one, other in runs if one[name] is not None and other[name] is not None]
        more = [one - other for one, other in known]
        found[name] = {
            "with": statistics.fmean(one for one, _ in known) if known else None,
            "without": statistics.fmean(other for _, other in known) if known else None,
            "more": statistics.fmean(more) if more else None,
            "more_upper": upper_bound(more),
        }
    found["failed"] = sum(run["failed"] for pair in runs for run in pair)
    return found

"""How much an answer hangs on step times that nobody measured.

By the data sheet alone replays of four measured runs ended between 34 % too early and 18 % too late (docs/step-time.md). So the
settings that might be chosen are replayed with steps that much slower and that much faster, and what is best in any of
the three is a range, not a recommendation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.simulate.settings import StepTime
from plimsoll.tune.goodput import Score
from plimsoll.tune.options import Option
from plimsoll.tune.search import Tried
from plimsoll.tune.space import Candidate
from plimsoll.tune.work import Job, RunAll, Traffic

SLOWER, FASTER = 1.5, 0.85
CONTENDERS = 8
FEWEST_CONTENDERS = 3
SETTINGS_A_CONTENDER = 60
"""Of a smaller space fewer are doubted, so that doubt takes no more than its part of the whole effort."""
AS_GOOD = 0.01


class Clock(NamedTuple):
    """The contenders, with steps so many times as long."""

    factor: float
    scores: tuple[tuple[Candidate, Score], ...]

    @property
    def best(self) -> float:
        """The most that any of them reached."""
        return max((score.goodput for _, score in self.scores), default=0.0)

    @property
    def good(self) -> tuple[Candidate, ...]:
        """Those within one per cent of it."""
        return tuple(candidate for candidate, score in self.scores if score.goodput >= self.best * (1 - AS_GOOD))


class Doubt(NamedTuple):
    """What is best if steps take longer, or shorter, than the data sheet says."""

    clocks: tuple[Clock, ...]
    ranges: dict[str, tuple[float, float]]
    """For each flag the lowest and the highest value that is best in any of them."""
    steady: bool
    """Whether the chosen setting is as good as any, whichever it is."""


def how_many(safe: int) -> int:
    """Contenders in a space with so many safe settings."""
    return min(CONTENDERS, max(FEWEST_CONTENDERS, safe // SETTINGS_A_CONTENDER))


def contenders(tried: Sequence[Tried], chosen: Candidate, most: int = CONTENDERS) -> list[Tried]:
    """The chosen one, and the best of each value of the two flags that matter most, best first."""
    found = {one.option.candidate: one for one in tried if one.option.candidate == chosen}
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        seen: set[int] = set()
        for one in tried:
            value = getattr(one.option.candidate, name)
            if value not in seen:
                seen.add(value)
                found[one.option.candidate] = one
    ranked = sorted(found.values(), key=lambda one: (one.option.candidate != chosen, -one.score.goodput))
    return ranked[:most]


def stretched(times: StepTime, factor: float) -> StepTime:
    """Every part of a step so many times as long."""
    table = None if times.by_tokens is None else np.rint(times.by_tokens * factor).astype(np.int64)
    base, token, seq, context = (round(factor * part) for part in (times.base_ns, times.token_ns, times.seq_ns, times.ctx_ps))
    return StepTime(base, token, seq, context, table)


def doubt(traffic: Traffic, asked: Sequence[Tried], chosen: Candidate, job_of: Callable[[Option], Job], run: RunAll) -> Doubt:
    """Replay the contenders with slower and with faster steps."""
    clocks = [Clock(1.0, tuple((one.option.candidate, one.score) for one in asked))]
    for factor in (FASTER, SLOWER):
        jobs = [job_of(one.option) for one in asked]
        jobs = [job._replace(step_time=stretched(job.step_time, factor)) for job in jobs]
        results = dict(run(traffic, jobs))
        scores = [(one.option.candidate, results[place]) for place, one in enumerate(asked)]
        clocks.append(Clock(factor, tuple((candidate, result) for candidate, result in scores if isinstance(result, Score))))
    good = {candidate for clock in clocks for candidate in clock.good if clock.best > 0} or {chosen}
    return Doubt(
        tuple(clocks),
        {name: (min(values), max(values)) for name, values in _by_flag(good).items()},
        all(chosen in clock.good for clock in clocks),
    )


def _by_flag(candidates: set[Candidate]) -> dict[str, list[float]]:
    return {name: [getattr(one, name) for one in candidates] for name in Candidate._fields}

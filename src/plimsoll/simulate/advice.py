"""Advises a knob's setting that would have kept more requests within a promise, by replaying what an engine has just served.

The clock is fitted to the run itself. Its replay must agree with what happened, and the gain must be larger than the clock's
error: else there is no advice, but a reason. This module sets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate.fit import fit
from plimsoll.simulate.replay import Replay, replay
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import ABSENT, Flags, Floats, Integers, MeasuredRun

FEWEST_REQUESTS = 20
MOST_APART = 0.1  # the share of requests that the replay of what happened may judge differently in sum
LEAST_GAIN = 0.05  # of the requests
SHARES = (0.06, 0.09, 0.12, 0.18, 0.25, 0.375, 0.5, 0.75)  # the values to try, as shares of the start-up flag
KNOBS = {"max-num-seqs": "max_num_seqs", "max-num-batched-tokens": "max_num_batched_tokens"}  # the first of equals is advised


@dataclass(frozen=True, slots=True)
class Promise:
    """The seconds within which the first token comes, and each further one after the one before."""

    ttft_s: float
    tpot_s: float

    def kept(self, first_s: Floats, each_s: Floats) -> Flags:
        """Returns for each request whether both were kept; NaN counts as not kept."""
        return np.asarray((first_s <= self.ttft_s) & (each_s <= self.tpot_s), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class KnobAdvice:
    """A setting and the number of requests it would have kept within the promise; `why_not` where there is no advice."""

    requests: int = 0
    measured: int = 0  # requests within the promise, as it happened
    replayed: int = 0  # the same by the replay of what happened
    knob: str = ""
    value: int = 0
    kept: int = 0  # requests within the promise with that setting
    clock: str = ""  # how well the clock fits, as a sentence
    why_not: str = ""
    tried: tuple[tuple[str, int, int], ...] = ()  # each knob and value tried, and the requests it would have kept

    def sentence(self) -> str:
        """The advice in words."""
        if self.why_not:
            return f"no advice: {self.why_not}"
        kept = f"{self.kept} of {self.requests} requests instead of {self.measured} within the promise"
        return f"with {self.knob} {self.value}, {kept}"


def advise(measured: MeasuredRun, settings: EngineLimits, promise: Promise, knobs: Sequence[str] = tuple(KNOBS)) -> KnobAdvice:
    """The best setting of one of these knobs for this very traffic."""
    size, ended = measured.trace.size, int((measured.finish_ns != ABSENT).sum())
    if ended < FEWEST_REQUESTS:
        return KnobAdvice(size, why_not=f"{ended} requests that ended are too few: {FEWEST_REQUESTS} at least")

    def kept_by(run: MeasuredRun | Replay, arrival_ns: Integers) -> int:
        seconds = _seconds(arrival_ns, run.first_token_ns, run.finish_ns, run.trace.output)
        return int(promise.kept(*seconds).sum())

    def kept_with(clock: StepTime, **turned: int) -> int:
        run = replay(measured.trace, settings.turned(**turned), clock)
        return kept_by(run, run.arrival_ns)

    happened = kept_by(measured, measured.trace.arrival_ns)
    try:
        found = fit(measured, settings)
        clock = found.step_time
        again = kept_with(clock)
    except BadInput as error:
        return KnobAdvice(size, happened, why_not=str(error))
    base = KnobAdvice(size, happened, again, clock=found.sentence)
    if found.error.is_poor or abs(again - happened) > MOST_APART * size:
        why = f"the replay of what happened keeps {again} of {size} within the promise, it was {happened}; {found.sentence}"
        return replace(base, why_not=why)
    # A step has at least a token for each sequence: a lower value of the knob changes nothing.
    lowest = {"max-num-seqs": 1, "max-num-batched-tokens": settings.max_num_seqs}
    tried = []
    for knob in knobs:
        name = KNOBS[knob]
        most: int = getattr(settings, name)
        values = {max(lowest[knob], round(share * most)) for share in SHARES}
        tried += [(knob, value, kept_with(clock, **{name: value})) for value in sorted(values) if value < most]
    if not tried:
        return replace(base, why_not="there is no smaller setting")
    knob, value, kept = max(tried, key=lambda row: (row[2], row[0] == "max-num-seqs", row[1]))
    # The error of the clock's means, at least 2 %: no clock is better than that.
    means = (found.error.mean_ttft, found.error.mean_tpot, found.error.mean_e2e)
    error_share = max(0.02, *(abs(mean) for mean in means if mean is not None))
    others = [clock.scaled(1 + sign * error_share) for sign in (-1, 1)]
    gain = min(kept - max(again, happened), *(kept_with(other, **{KNOBS[knob]: value}) - kept_with(other) for other in others))
    if gain < max(1.0, LEAST_GAIN * size, abs(again - happened)):
        best = f"{knob} {value} would keep {kept} of {size}"
        why = f"no setting keeps clearly more: {best}, the replay of what happened {again}"
        return replace(base, why_not=why, tried=tuple(tried))
    return replace(base, knob=knob, value=value, kept=kept, tried=tuple(tried))


def _seconds(arrival: Integers, first: Integers, finish: Integers, output: Integers) -> tuple[Floats, Floats]:
    """Returns each request's seconds to its first token, and from token to token; NaN where a stamp is missing."""
    has_first, has_both = first != ABSENT, (first != ABSENT) & (finish != ABSENT)
    to_first = np.where(has_first, (first - arrival) / 1e9, np.nan)
    between = np.where(has_both, (finish - first) / 1e9 / np.maximum(output - 1, 1), np.nan)
    return to_first, np.where(has_both & (output < 2), 0.0, between)

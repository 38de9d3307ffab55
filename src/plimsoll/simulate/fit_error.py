"""How far a replay is from a measured run, over the requests whose outcome was stamped in a stretch of time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plimsoll.domain.measured_run import ABSENT, MeasuredRun
from plimsoll.domain.trace import Flags, Floats, Integers
from plimsoll.simulate.result import NEVER, Replay

POOR, POOR_FIRST = 0.2, 0.5
"""A first token may be further off: with little to do it comes within a few steps, and whether it catches one is chance."""


class FitError(NamedTuple):
    """Relative errors, 0.05 is 5 %; None where no request had both stamps."""

    requests: int
    """With a stamp that counted."""
    ttft: float | None
    """Of a single request: the mean of absolute errors over the measured mean."""
    tpot: float | None
    e2e: float | None
    mean_ttft: float | None
    """Of the mean, with its sign: above 0 the replay is slower."""
    mean_tpot: float | None
    mean_e2e: float | None

    @property
    def is_poor(self) -> bool:
        """Whether the replay is so far from the run that its server or its traffic was another one."""
        first = max(abs(one or 0.0) for one in (self.ttft, self.mean_ttft))
        return first > POOR_FIRST or any(abs(one or 0.0) > POOR for one in (self.tpot, self.e2e, self.mean_tpot, self.mean_e2e))


def error_of(measured: MeasuredRun, replay: Replay, *, from_ns: int | None = None, until_ns: int | None = None) -> FitError:
    """The error over what was stamped from `from_ns` on and until `until_ns`."""
    arrival = measured.trace.arrival_ns
    first = _inside(measured.first_token_ns, from_ns, until_ns) & (replay.first_token_ns != NEVER)
    finish = _inside(measured.finish_ns, from_ns, until_ns) & (replay.finish_ns != NEVER)
    several = finish & (measured.first_token_ns != ABSENT) & (replay.first_token_ns != NEVER) & (measured.trace.output > 1)
    further = np.maximum(1, measured.trace.output - 1)
    ttft = _compare(first, measured.first_token_ns - arrival, replay.first_token_ns - replay.arrival_ns)
    tpot = _compare(
        several,
        (measured.finish_ns - measured.first_token_ns) / further,
        (replay.finish_ns - replay.first_token_ns) / further,
    )
    e2e = _compare(finish, measured.finish_ns - arrival, replay.finish_ns - replay.arrival_ns)
    return FitError(int((first | finish).sum()), ttft[0], tpot[0], e2e[0], ttft[1], tpot[1], e2e[1])


def duration_error(measured: MeasuredRun, replay: Replay) -> float:
    """Of the time of the last token, with its sign."""
    return float(replay.finish_ns.max() / measured.finish_ns.max() - 1)


def _inside(stamps: Integers, from_ns: int | None, until_ns: int | None) -> Flags:
    inside = stamps != ABSENT
    if from_ns is not None:
        inside &= stamps > from_ns
    if until_ns is not None:
        inside &= stamps <= until_ns
    return inside


def _compare(which: Flags, measured: Floats | Integers, replayed: Floats | Integers) -> tuple[float | None, float | None]:
    if not which.any():
        return None, None
    mean = float(measured[which].mean())
    if mean <= 0:
        return None, None
    single = float(np.abs(replayed[which] - measured[which]).mean()) / mean
    return single, float(replayed[which].mean()) / mean - 1

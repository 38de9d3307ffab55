"""Parts of a measured run, to fit to one of them and to compare with another."""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.replay import Replay
from plimsoll.simulate.trace import ABSENT, MeasuredRun, RunSeries


def before(measured: MeasuredRun, until_ns: int) -> MeasuredRun:
    """The run as it was known at `until_ns`: later stamps are absent, later rows of the series are gone."""
    series = measured.series
    if series is not None:
        keep = series.at_s * 1e9 <= until_ns
        series = RunSeries._make(column[keep] for column in series)
    scheduled, first, finish = (np.where(stamps <= until_ns, stamps, ABSENT) for stamps in measured[1:4])
    cached = np.where(scheduled != ABSENT, measured.cached_tokens, ABSENT)
    return MeasuredRun(measured.trace, scheduled, first, finish, cached, series)


def only_first(measured: MeasuredRun, requests: int) -> MeasuredRun:
    """The run with the stamps of its first requests alone; what the engine said of itself, it said of all, so it goes too."""
    late = np.arange(measured.trace.size) >= requests
    return MeasuredRun._make((measured.trace, *(np.where(late, ABSENT, column) for column in measured[1:5]), None))


def duration_error(measured: MeasuredRun, replay: Replay) -> float:
    """Of the time of the last token, with its sign."""
    return float(replay.finish_ns.max() / measured.finish_ns.max() - 1)

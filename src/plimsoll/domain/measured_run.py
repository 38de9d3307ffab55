"""A run that was measured on a real engine: its traffic, and when each request was scheduled, answered and done."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from plimsoll.domain.trace import Integers, Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ABSENT = -1
"""A stamp that the run does not have."""


class RunSeries(NamedTuple):
    """What the engine said of itself, a row a second."""

    at_s: npt.NDArray[np.float64]
    prompt_tokens_per_s: npt.NDArray[np.float64]
    output_tokens_per_s: npt.NDArray[np.float64]
    running: Integers
    waiting: Integers
    kv_used_ratio: npt.NDArray[np.float64]
    """From 0 to 1."""


class Measured(NamedTuple):
    """Stamps have the trace's order and its zero, in ns; ABSENT where the run has none."""

    trace: Trace
    scheduled_ns: Integers
    first_token_ns: Integers
    finish_ns: Integers
    cached_tokens: Integers
    """Prompt tokens found in the prefix cache; ABSENT where the run does not say."""
    series: RunSeries | None = None

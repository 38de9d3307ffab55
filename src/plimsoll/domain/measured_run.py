"""A run that was measured on a real engine: its traffic, and when each request was scheduled, answered and done."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.trace import Floats, Integers, Trace

ABSENT = -1
"""A stamp that the run does not have."""


class RunSeries(NamedTuple):
    """What the engine said of itself, a row a second."""

    at_s: Floats
    prompt_tokens_per_s: Floats
    output_tokens_per_s: Floats
    running: Integers
    waiting: Integers
    kv_used_ratio: Floats
    """From 0 to 1."""


class MeasuredRun(NamedTuple):
    """Stamps have the trace's order and its zero, in ns; ABSENT where the run has none."""

    trace: Trace
    scheduled_ns: Integers
    first_token_ns: Integers
    finish_ns: Integers
    cached_tokens: Integers
    """Prompt tokens found in the prefix cache; ABSENT where the run does not say."""
    series: RunSeries | None = None

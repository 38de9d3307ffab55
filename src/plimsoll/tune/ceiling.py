"""What no run of a setting can beat, from the pool and the step times alone: a bound that costs no replay.

Three things take time whatever the scheduler does: requests arrive when they arrive; each further token needs a place in some
step, of which there are `max_num_seqs`; and each of those steps holds the whole request in the cache, which has so many tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plimsoll.simulate.settings import Settings
from plimsoll.tune.work import Job, Traffic


class Demand(NamedTuple):
    """What the requests that can be served at all ask for."""

    requests: int
    span_s: float
    tokens: int
    """To be computed at least: prompts, if none is shared, and all but the last token of each answer."""
    output_tokens: int
    token_steps: float
    """Tokens in the cache, added up over the steps in which they must be there; 0 if prompts are shared."""


def demand(traffic: Traffic, max_model_len: int) -> Demand:
    """Of requests that are not too long; a cache that is hit could save anything, so shared prompts count nothing."""
    trace = traffic.trace
    fits = trace.prompt + trace.output <= max_model_len
    prompt, output = trace.prompt[fits].astype(np.float64), trace.output[fits].astype(np.float64)
    is_shared = trace.shares_content
    steps = output - 1
    return Demand(
        requests=int(np.count_nonzero(fits)),
        span_s=traffic.span_s,
        tokens=int(steps.sum() + (0 if is_shared else prompt.sum())),
        output_tokens=int(output.sum()),
        token_steps=0.0 if is_shared else float((steps * (prompt + steps / 2)).sum()),
    )


def ceiling(asked: Demand, job: Job) -> float:
    """Requests a second that this setting cannot exceed."""
    seconds = max(asked.span_s, *_busy_seconds(asked, job))
    return asked.requests / seconds if seconds > 0 else float("inf")


def _busy_seconds(asked: Demand, job: Job) -> tuple[float, float, float]:
    settings, times = job.settings, job.step_time
    table = times.table(settings.max_num_batched_tokens)[: settings.max_num_batched_tokens + 1].astype(np.float64)
    count = np.arange(1, len(table), dtype=np.float64)
    most = min(settings.max_num_seqs, len(table) - 1)
    a_token = float((table[1:] / count).min())
    a_decoded = float((table[1 : most + 1] / count[:most]).min()) + times.seq_ns
    steps = asked.token_steps / max(1, _tokens_held(settings))
    # A step reads the context of those in it: that part is the same for any order of work.
    context = asked.token_steps * times.ctx_ps / 1e3
    fewest = float(table[1:].min())
    return (
        (asked.tokens * a_token + context) / 1e9,
        ((asked.output_tokens - asked.requests) * a_decoded + context) / 1e9,
        (steps * fewest + context) / 1e9,
    )


def _tokens_held(settings: Settings) -> int:
    return (settings.num_blocks - 1) * settings.block_size if not settings.groups else 2**62

"""The numbers a fit looks for, and how they become a step time.

    values   0 base  1 token  2 request  3 context  4 step up | 5 experts' share        | 6 front
             each over what it was at the start                  of the base, 0 to 0.95    in steps, -1 to 1

The front is not part of a step: engines stamp an arrival when they look for one, between two steps, or after work of their own.
In a replay a request comes at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.trace import Floats, Integers, Trace
from plimsoll.simulate.fit_search import Bounds
from plimsoll.simulate.graphs import graph_sizes, padded, step_table
from plimsoll.simulate.replay import replay
from plimsoll.simulate.result import STEP_COLUMNS, Replay
from plimsoll.simulate.roofline import Experts
from plimsoll.simulate.settings import Settings, StepTime

GUESS = StepTime(12_000_000, 40_000, 10_000, 60_000)
"""Where a search begins if nobody knows better."""
STEP_UP = 0.3
"""What a step beyond the largest graph costs more, as a share of the base, before anything is known."""
EXPERTS_SHARE = 0.5
"""Of the base, what reading all experts takes, before anything is known."""
CONTEXT, UP, SHARE, FRONT = 3, 4, 5, 6
BOUNDS = Bounds(np.array([0.02, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), np.array([50.0, 50.0, 50.0, 50.0, 50.0, 0.95, 1.0]))


class Model(NamedTuple):
    """What is given beforehand."""

    start: StepTime
    settings: Settings
    sizes: tuple[int, ...]
    experts: Experts | None

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """Those of the start."""
        return self.start.base_ns, self.start.token_ns, self.start.seq_ns, self.start.ctx_ps

    def values(self, scale: float = 1.0, token_scale: float | None = None) -> Floats:
        """The start, slower or faster as a whole, or apart from its cost of a token."""
        share = EXPERTS_SHARE if self.experts else 0.0
        return np.array([scale, scale if token_scale is None else token_scale, scale, scale, scale * STEP_UP, share, 0.0])

    def step_time(self, values: Floats) -> StepTime:
        """What a step takes with these numbers."""
        base, token, seq, ctx = (float(one) for one in values[:UP] * np.array(self.constants))
        most = self.settings.max_num_batched_tokens
        table = step_table(base, token, most, self.sizes, values[UP] * self.start.base_ns)
        if self.experts is not None:
            unread = 1 - self.experts.hit(padded(self.sizes, most).astype(np.float64))
            table = table - np.rint(base * values[SHARE] * unread).astype(np.int64)
        return StepTime(round(base), round(token), round(seq), round(ctx), table)


def make_model(start: StepTime | None, settings: Settings, sizes: Sequence[int] | None, experts: Experts | None) -> Model:
    """With vLLM's own choice of graphs where none is named."""
    return Model(start or GUESS, settings, graph_sizes(settings.max_num_seqs) if sizes is None else tuple(sizes), experts)


def replayed(trace: Trace, settings: Settings, step_time: StepTime) -> tuple[Replay, Integers]:
    """A run and its step rows."""
    steps: list[Integers] = []
    done = replay(trace, settings, step_time, on_steps=lambda rows: steps.append(rows.copy()))
    return done, np.concatenate(steps) if steps else np.zeros((0, len(STEP_COLUMNS)), dtype=np.int64)

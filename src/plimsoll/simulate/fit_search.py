"""Least squares without derivatives, inside bounds: damped Gauss-Newton steps from a few starts, the best one wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.trace import Floats

NUDGE = 0.06
"""For slopes, as a share of what a number was at the start: large enough to see through the steps of a scheduler."""
MOST_STEPS = 25
MOST_TRIES = 6
"""For one step, each shorter than the one before."""
FURTHEST = 1.0
ENOUGH = 1e-3
"""A step that gains less, as a share of what is left, is the last."""
TYPICAL = 0.03
"""A kind of deviation that cannot be made smaller than this counts as it is."""
MOST_WEIGHT = 3.0

Off = Callable[[Floats], list[Floats]]


class Bounds(NamedTuple):
    """What the numbers may be."""

    low: Floats
    high: Floats

    def inside(self, values: Floats) -> Floats:
        """The nearest allowed ones."""
        return np.clip(values, self.low, self.high)


class Found(NamedTuple):
    """The numbers that fit best, what is left of the deviation (squared and summed), and how often it was asked for."""

    values: Floats
    left: float
    rounds: int


def search(off: Off, starts: Sequence[Floats], bounds: Bounds, trust: Floats, descents: int = 2) -> Found:
    """Make the deviations small, from the most promising starts; `trust` pulls each number towards the first start's.

    `off` gives them in kinds. At first all kinds weigh the same; then each by how well it can be matched at all.
    """
    rounds = 0

    def weighted(weights: Sequence[float]) -> Callable[[Floats], Floats]:
        def parts_at(values: Floats) -> Floats:
            nonlocal rounds
            rounds += 1
            kinds = [weight * kind / np.sqrt(len(kind)) for weight, kind in zip(weights, off(values), strict=True)]
            return np.concatenate((*kinds, trust * (values - starts[0])))

        return parts_at

    alike = weighted([1.0] * len(off(starts[0])))
    left = [_squared(alike(values)) for values in starts]
    ended = [_descend(alike, starts[place], bounds) for place in np.argsort(left, kind="stable")[:descents]]
    values, _ = min(ended, key=lambda one: one[1])
    remaining = [float(np.sqrt(np.mean(kind**2))) for kind in off(values)]
    weights = [float(np.clip(TYPICAL / one, 1 / MOST_WEIGHT, MOST_WEIGHT)) if one else MOST_WEIGHT for one in remaining]
    best = _descend(weighted(weights), values, bounds)
    return Found(*best, rounds + 2)


def _descend(parts_at: Callable[[Floats], Floats], values: Floats, bounds: Bounds) -> tuple[Floats, float]:
    parts = parts_at(values)
    left, damping = _squared(parts), 1e-2
    for _ in range(MOST_STEPS):
        slopes = _slopes(parts_at, values, bounds)
        normal, pull = slopes.T @ slopes, slopes.T @ parts
        for _ in range(MOST_TRIES):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -pull)
            tried = bounds.inside(values + np.clip(move, -FURTHEST, FURTHEST))
            tried_parts = parts_at(tried)
            if _squared(tried_parts) < left:
                break
            damping *= 4
        else:
            break
        gain = 1 - _squared(tried_parts) / left
        values, parts, left, damping = tried, tried_parts, _squared(tried_parts), max(damping / 8, 1e-5)
        if gain < ENOUGH:
            break
    return values, left


def _slopes(parts_at: Callable[[Floats], Floats], values: Floats, bounds: Bounds) -> Floats:
    columns = []
    for nudge in NUDGE * np.eye(len(values)):
        above, below = bounds.inside(values + nudge), bounds.inside(values - nudge)
        columns.append((parts_at(above) - parts_at(below)) / (above - below).sum())
    return np.column_stack(columns)


def _squared(parts: Floats) -> float:
    return float(parts @ parts)

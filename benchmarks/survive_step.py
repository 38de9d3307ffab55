"""What containment costs a step that does not fail: `python -m benchmarks.survive_step`.

A bare step function and the same one contained, in turns. The step itself does nothing, so that the difference is all there
is to see; the share is that of a step of one millisecond, shorter than any of a served model.
"""

from __future__ import annotations

import statistics
import timeit

from plimsoll.inside.survive.contain import Containment

CALLS = 200_000
PAIRS = 9
STEP_NS = 1_000_000
MOST_SHARE = 0.01


class Engine:
    """An engine whose steps cost nothing."""

    def step(self) -> tuple[None, bool]:
        """Do nothing."""
        return None, False


def main() -> int:
    """Print both, and fail where containment costs more than it may."""
    bare = Engine().step
    contained = object.__new__(Containment)
    contained._own = bare  # armed without an engine around it
    pairs = [(_ns(bare), _ns(contained.step)) for _ in range(PAIRS)]
    costs = sorted(armed - plain for plain, armed in pairs)
    middle = statistics.median(costs)
    share = middle / STEP_NS
    print(f"a step: {statistics.median(plain for plain, _ in pairs):.0f} ns bare, {middle:.0f} ns more with containment")
    print(f"({PAIRS} pairs, {costs[0]:.0f} to {costs[-1]:.0f} ns); {share:.4%} of a step of 1 ms, {MOST_SHARE:.0%} allowed")
    return int(share > MOST_SHARE)


def _ns(step: object) -> float:
    assert callable(step)
    return timeit.timeit(step, number=CALLS) / CALLS * 1e9


if __name__ == "__main__":
    raise SystemExit(main())

"""Small runs in which much happens: hits, evictions, preemptions. As a program it prints what came of them."""

from __future__ import annotations

import json

import numpy as np

from plimsoll.simulate.replay import Replay, replay
from plimsoll.simulate.settings import CacheGroup, EngineLimits, StepTime
from plimsoll.simulate.trace import Integers, Trace, make_trace

MS = 1_000_000
_PLAIN = EngineLimits(num_blocks=30, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200)
BUSY_SETTINGS = {
    "plain": _PLAIN,
    "async": _PLAIN._replace(async_scheduling=True),
    "priority": _PLAIN._replace(policy="priority"),
    "hybrid": _PLAIN._replace(
        num_blocks=60, groups=(CacheGroup("full", 16), CacheGroup("sliding", 16, 40), CacheGroup("mamba", 16))
    ),
}
REQUEST_ARRAYS = (
    "arrival_ns", "first_sched_ns", "first_token_ns", "finish_ns", "produced", "preemptions", "cached_tokens", "is_rejected",
    "usage_ns",
)  # fmt: skip


def busy_trace(count: int = 60) -> Trace:
    """Sixty requests within 0.3 s that share their beginnings."""
    dice = np.random.default_rng(5)
    ids = [[1, 2, int(one)] for one in dice.integers(0, 4, count)]
    return make_trace(
        "busy", np.sort(dice.integers(0, 300 * MS, count)), dice.integers(20, 60, count), dice.integers(1, 40, count),
        dice.integers(0, 3, count), ids, 16,
    )  # fmt: skip


def stepped(trace: Trace, settings: EngineLimits, step_time: StepTime) -> tuple[Replay, Integers]:
    """A run, and all of its step rows."""
    pieces: list[Integers] = []
    run = replay(trace, settings, step_time, on_steps=lambda rows: pieces.append(rows.copy()))
    return run, np.concatenate(pieces)


def busy_run(name: str) -> tuple[Replay, Integers]:
    """One of them, and all of its step rows."""
    return stepped(busy_trace(), BUSY_SETTINGS[name], StepTime())


def told(name: str) -> dict[str, object]:
    """All that came of it, as plain values."""
    run, rows = busy_run(name)
    arrays = {column: getattr(run, column).tolist() for column in REQUEST_ARRAYS}
    return {"totals": list(run.totals), "steps": rows.tolist(), **arrays}


if __name__ == "__main__":
    print(json.dumps({name: told(name) for name in BUSY_SETTINGS}))

"""The ledger as a bar: its parts add up to the card, whatever the workers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.daemon.engine_look import read_workers
from plimsoll.guard.judge.look import CardState, Look, Reach, WorkerMemory
from plimsoll.guard.page.engine import NO_FIGURES, NO_LINE, NO_PARTS, card_bar, ledgers, worker_bar

GIB = 2**30
WHOLE = WorkerMemory(
    "0/0", 1.0, allocated=20 * GIB, reserved=22 * GIB, releasable=1.5 * GIB, unreleasable=0.5 * GIB, device_total=24 * GIB,
    device_free=1 * GIB, by_others=0.25 * GIB, requested=22 * GIB, weights=15 * GIB, kv_cache=4 * GIB, activation_peak=GIB,
    graphs=0.5 * GIB,
)  # fmt: skip


def parts(worker: WorkerMemory, usage: float | None = 0.25) -> dict[str, float]:
    bar = worker_bar(worker, usage)
    assert bar is not None
    return {one["part"]: one["bytes"] / GIB for one in bar["parts"]}


def test_a_worker_that_tells_everything() -> None:
    """Weights, graphs, activation, KV used and free, releasable, unreleasable, outside torch, others, slack: in this order."""
    assert parts(WHOLE) == {
        "weights": 15, "graphs": 0.5, "activation": 0.5, "kv_used": 1, "kv_free": 3, "releasable": 1.5, "unreleasable": 0.5,
        "outside": 0.75, "others": 0.25, "slack": 1,
    }  # fmt: skip
    bar = worker_bar(WHOLE, 0.25)
    assert bar is not None
    assert (bar["line"], bar["notes"]) == (22 * GIB, [])


def test_an_h200_as_it_was_recorded() -> None:
    """Every part is where nvidia-smi and torch had it, and they add up to the card."""
    memory = Path(__file__).parents[2] / "captures" / "vllm-0.25.1-h200-inside" / "memory.json"
    (worker,) = read_workers(json.loads(memory.read_text(encoding="utf-8")))
    found = {part: round(size, 2) for part, size in parts(worker, 0.0).items()}
    assert found == {
        "weights": 15.0, "graphs": 0.0, "activation": 0.16, "kv_used": 0.0, "kv_free": 48.0, "releasable": 2.32,
        "unreleasable": 0.08, "outside": 1.33, "others": 0.01, "slack": 73.5,
    }  # fmt: skip


def test_what_is_not_told_is_not_made_up() -> None:
    """Without the start's figures live memory is one part, without usage the cache is one; each says why."""
    bare = WHOLE._replace(weights=None, requested=None)
    assert parts(bare)["live"] == 20
    assert "weights" not in parts(bare)
    bar = worker_bar(bare, 0.5)
    assert bar is not None
    assert bar["notes"] == [NO_PARTS, NO_LINE]
    assert bar["line"] is None
    assert parts(WHOLE, None)["kv"] == 4
    assert "graphs" not in parts(WHOLE._replace(graphs=None))
    assert "others" not in parts(WHOLE._replace(by_others=None))
    assert worker_bar(WHOLE._replace(device_free=None), 0.5) is None


SIZE = st.none() | st.floats(0, 2e12)


@given(
    st.builds(
        WorkerMemory, st.just("0"), st.just(1.0), SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE,
        SIZE, SIZE, SIZE,
    ),
    st.none() | st.floats(allow_nan=True),
)  # fmt: skip
def test_the_bar_always_adds_up_to_the_card(worker: WorkerMemory, usage: float | None) -> None:
    """Also where figures of different moments contradict each other: no part is below nothing, and the sum is the card."""
    bar = worker_bar(worker, usage)
    if bar is None:
        return
    sizes = [one["bytes"] for one in bar["parts"]]
    assert sum(sizes) == bar["total"]
    assert min(sizes) >= 0
    assert bar["line"] is None or 0 < bar["line"] <= bar["total"]


def test_the_driver_alone_tells_less() -> None:
    """What the engine holds, what others hold, and what is free."""
    bar = card_bar(CardState("GPU 0", total=24 * GIB, free=4 * GIB, by_engine=18 * GIB))
    assert bar is not None
    assert [(one["part"], one["bytes"] // GIB) for one in bar["parts"]] == [("engine", 18), ("others", 2), ("slack", 4)]


@pytest.mark.parametrize("look", [None, Look(0.0, 0.0, Reach.ANSWERS)])
def test_without_figures_it_says_how_to_get_them(look: Look | None) -> None:
    """No bar, and one sentence."""
    found = ledgers(look)
    assert found["bars"] == []
    assert found["why"] == (NO_FIGURES if look is not None else "unknown: not looked at yet")


def test_the_tightest_card_comes_first() -> None:
    """Of several workers the one with the least slack."""
    tight = WHOLE._replace(rank="0/1", device_free=0.5 * GIB)
    found = ledgers(Look(0.0, 0.0, Reach.ANSWERS, workers=(WHOLE, tight)))
    assert [bar["name"] for bar in found["bars"]] == ["worker 0/1", "worker 0/0"]

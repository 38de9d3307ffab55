"""Runs to report on: those recorded from vLLM's own scheduler, and small ones made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.simulate.replay import NEVER, STEP_COLUMNS, Replay, Totals
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import Integers, make_trace

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "golden"
NO_GOLDEN = "the recorded runs are not beside the repository"
AT = {name: place for place, name in enumerate(STEP_COLUMNS)}


def golden_summary(name: str) -> dict[str, Any]:
    """What the recorded run said of itself."""
    return dict(json.loads((GOLDEN / f"{name}.json").read_text()))


def golden_steps(name: str) -> Integers:
    with gzip.open(GOLDEN / f"{name}_steps.csv.gz", "rt") as lines:
        return np.loadtxt(lines, delimiter=",", skiprows=1, dtype=np.int64)


def hand_made(
    requests: list[list[int]],
    steps: list[list[int]],
    settings: EngineLimits | None = None,
    name: str = "hand made",
    rejected: int = 0,
) -> Replay:
    """A small run; steps are (t_start, t_end, running, waiting, tokens, preempted, used, waste), in ns."""
    settings = settings or EngineLimits(num_blocks=11)
    rows = np.array(requests, dtype=np.int64).reshape(-1, 9)
    _, arrival, sched, first, finish, prompt, output, preempted, cached = rows.T
    made = step_rows(steps)
    column = {name: made[:, place] for name, place in AT.items()}
    length, used = column["t_end_ns"] - column["t_start_ns"], column["used_blocks"]
    usage = np.zeros(settings.num_blocks, dtype=np.int64)
    np.add.at(usage, used, length)
    totals = Totals(
        requests=len(rows) + rejected,
        finished=int((finish != NEVER).sum()),
        rejected=rejected,
        steps=len(made),
        end_ns=int(column["t_end_ns"].max(initial=0)),
        busy_ns=int(length.sum()),
        scheduled_tokens=int(column["sched_tokens"].sum()),
        preemptions=int(column["preempted"].sum()),
        preempted_requests=int((preempted > 0).sum()),
        recomputed_tokens=10,
        query_tokens=100 * len(rows),
        hit_tokens=25 * len(rows),
        resumed_query_tokens=40,
        resumed_hit_tokens=30,
        peak_blocks=int(used.max(initial=0)),
        peak_running=int(column["running"].max(initial=0)),
        peak_waiting=int(column["waiting"].max(initial=0)),
        used_block_ns=int((used * length).sum()),
        waste_slot_ns=int((column["waste_slots"] * length).sum()),
    )
    return Replay(
        make_trace(name, arrival, prompt, output), settings, StepTime(), totals, arrival, sched, first, finish, output,
        preempted, cached, np.zeros(len(rows), dtype=np.bool_), usage, 1.5,
    )  # fmt: skip


def step_rows(steps: list[list[int]]) -> Integers:
    """Rows of STEP_COLUMNS from (t_start, t_end, running, waiting, tokens, preempted, used, waste); 10 of 100 looked up hit."""
    rows = np.zeros((len(steps), len(STEP_COLUMNS)), dtype=np.int64)
    short = "t_start_ns t_end_ns running waiting sched_tokens preempted used_blocks waste_slots".split()
    numbers = np.arange(len(steps))
    if steps:
        rows[:, [AT[column] for column in short]] = steps
    rows[:, AT["step"]], rows[:, AT["hit_tokens_cum"]], rows[:, AT["query_tokens_cum"]] = (
        numbers,
        10 * numbers + 10,
        100 * numbers + 100,
    )
    return rows

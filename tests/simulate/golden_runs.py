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


def golden_replay(name: str) -> Replay:
    """The recorded run as a Replay; the sums that rows cannot give are taken from its own summary."""
    said, steps = golden_summary(name), golden_steps(name)
    with gzip.open(GOLDEN / f"{name}_req.csv.gz", "rt") as lines:
        requests = np.loadtxt(lines, delimiter=",", skiprows=1, dtype=np.int64)
    config = said["config"]
    settings = EngineLimits(**{key: config[key] for key in (*EngineLimits._fields[:5], "async_scheduling")})
    step_time = StepTime(*(config[key] for key in ("base_ns", "token_ns", "seq_ns", "ctx_ps")))
    return replay_of(said["trace"], settings, step_time, requests, steps, said)


def replay_of(
    name: str, settings: EngineLimits, step_time: StepTime, requests: Integers, steps: Integers, said: dict[str, Any]
) -> Replay:
    """A Replay of request rows and step rows; `said` has what they cannot tell."""
    length = steps[:, AT["t_end_ns"]] - steps[:, AT["t_start_ns"]]
    used = steps[:, AT["used_blocks"]]
    usage = np.zeros(settings.num_blocks, dtype=np.int64)
    np.add.at(usage, used, length)
    resumed, resumed_hit = said["preempted_query_tokens"], said["preempted_hit_tokens"]
    totals = Totals(
        requests=said["requests"],
        finished=int((requests[:, 4] != NEVER).sum()),
        rejected=said["rejected"],
        steps=len(steps),
        end_ns=int(steps[:, AT["t_end_ns"]].max(initial=0)),
        busy_ns=int(length.sum()),
        scheduled_tokens=int(steps[:, AT["sched_tokens"]].sum()),
        preemptions=int(steps[:, AT["preempted"]].sum()),
        preempted_requests=int((requests[:, 7] > 0).sum()),
        recomputed_tokens=resumed - resumed_hit,
        query_tokens=said["prefix_query_tokens"],
        hit_tokens=said["prefix_hit_tokens"],
        resumed_query_tokens=resumed,
        resumed_hit_tokens=resumed_hit,
        peak_blocks=int(used.max(initial=0)),
        peak_running=int(steps[:, AT["running"]].max(initial=0)),
        peak_waiting=int(steps[:, AT["waiting"]].max(initial=0)),
        used_block_ns=int((used * length).sum()),
        waste_slot_ns=int((steps[:, AT["waste_slots"]] * length).sum()),
    )
    _, arrival, sched, first, finish, prompt, output, preempted, cached = requests.T
    trace = make_trace(name, arrival, prompt, output)
    rejected = np.zeros(len(requests), dtype=np.bool_)
    return Replay(
        trace, settings, step_time, totals, arrival, sched, first, finish, output, preempted, cached, rejected, usage, 1.5
    )


def hand_made(
    requests: list[list[int]],
    steps: list[list[int]],
    settings: EngineLimits | None = None,
    name: str = "hand made",
    rejected: int = 0,
) -> Replay:
    """A small run; steps are (t_start, t_end, running, waiting, tokens, preempted, used, waste), in ns."""
    said = {
        "requests": len(requests) + rejected, "rejected": rejected, "prefix_query_tokens": 100 * len(requests),
        "prefix_hit_tokens": 25 * len(requests), "preempted_query_tokens": 40, "preempted_hit_tokens": 30,
    }  # fmt: skip
    rows = np.array(requests, dtype=np.int64).reshape(-1, 9)
    return replay_of(name, settings or EngineLimits(num_blocks=11), StepTime(), rows, step_rows(steps), said)


def step_rows(steps: list[list[int]]) -> Integers:
    """Rows of STEP_COLUMNS from (t_start, t_end, running, waiting, tokens, preempted, used, waste); 10 of 100 looked up hit."""
    rows = np.zeros((len(steps), len(STEP_COLUMNS)), dtype=np.int64)
    short = "t_start_ns t_end_ns running waiting sched_tokens preempted used_blocks waste_slots".split()
    for number, step in enumerate(steps):
        rows[number, [AT[column] for column in short]] = step
        rows[number, AT["step"]] = number
    rows[:, AT["hit_tokens_cum"]] = 10 * np.arange(1, len(steps) + 1)
    rows[:, AT["query_tokens_cum"]] = 100 * np.arange(1, len(steps) + 1)
    return rows

"""The replay against runs recorded from vLLM's own scheduler: every row, every column, every sum."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from plimsoll.simulate.replay import REQUEST_COLUMNS, STEP_COLUMNS, Replay, replay
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.summary import summarise
from plimsoll.simulate.trace import Integers, Trace
from plimsoll.simulate.trace_files import read_trace
from tests.simulate.golden_runs import GOLDEN, NO_GOLDEN, golden_steps, golden_summary

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=NO_GOLDEN)
TRACES = GOLDEN.parents[1] / "data" / "traces"
PREFIX_BLOCKS = {"sharegpt_300_hashed.jsonl.gz": 16}


class Run(NamedTuple):
    replay: Replay
    steps: Integers


def _matrix() -> dict[str, Any]:
    return dict(json.loads((GOLDEN / "zero_arrival_matrix.json").read_text()))


@cache
def _trace(name: str, requests: int) -> Trace:
    return read_trace(str(TRACES / name), limit=requests, prefix_block=PREFIX_BLOCKS.get(name, 512))


def _run(said: dict[str, Any]) -> Run:
    """The run that the recorded one describes."""
    config = said["config"]
    settings = EngineLimits(
        **{key: config[key] for key in (*EngineLimits._fields[:5], "async_scheduling", "watermark")},
        prefix_caching=not config["no_prefix_caching"],
        reserve_full_isl=not config["no_reserve_full_isl"],
    )
    step_time = StepTime(*(config[key] for key in ("base_ns", "token_ns", "seq_ns", "ctx_ps")))
    steps: list[Integers] = []
    trace = _trace(said["trace"], said["requests"])
    run = replay(trace, settings, step_time, config["speedup"], on_steps=lambda rows: steps.append(rows.copy()))
    return Run(run, np.concatenate(steps))


def _request_rows(run: Replay) -> Integers:
    columns = (
        np.arange(run.trace.size), run.arrival_ns, run.first_sched_ns, run.first_token_ns, run.finish_ns, run.trace.prompt,
        run.produced, run.preemptions, run.cached_tokens,
    )  # fmt: skip
    return np.stack(columns, axis=1)[~run.is_rejected]


def _first_difference(names: list[str], real: Integers, ours: Integers) -> str | None:
    """The first row that differs, in words; None if none does."""
    both = min(len(real), len(ours))
    rows = np.nonzero((real[:both] != ours[:both]).any(axis=1))[0]
    if len(rows):
        row = int(rows[0])
        differs = [name for at, name in enumerate(names) if real[row, at] != ours[row, at]]
        return f"row {row}, {differs}: vLLM {real[row].tolist()}, replay {ours[row].tolist()}"
    return None if len(real) == len(ours) else f"vLLM has {len(real)} rows, the replay {len(ours)}"


def _assert_sums(said: dict[str, Any], run: Replay) -> None:
    """All that the recorded run printed of itself, but how long it took to run."""
    totals, got = run.totals, summarise(run)
    for key in ("requests", "finished", "rejected", "steps", "scheduled_tokens", "preemptions", "preempted_requests",
                "peak_running", "peak_waiting"):  # fmt: skip
        assert getattr(totals, key) == getattr(got, key) == said[key], key
    assert totals.query_tokens == said["prefix_query_tokens"]
    assert totals.hit_tokens == said["prefix_hit_tokens"]
    assert totals.resumed_query_tokens == said["preempted_query_tokens"]
    assert totals.resumed_hit_tokens == said["preempted_hit_tokens"]
    assert (got.sim_seconds, got.busy_seconds) == (said["sim_seconds"], said["busy_seconds"])
    assert got.prefix.hit_rate == said["prefix_hit_rate"]
    assert got.kv_usage.peak == said["kv_usage_peak"]
    assert got.kv_usage.mean == pytest.approx(said["kv_usage_mean"], rel=1e-12)
    assert got.waste.mean_percent == pytest.approx(100 * said["waste_slot_fraction"], rel=1e-12)
    for key, latency in (("ttft_ms", got.ttft), ("tpot_ms", got.tpot), ("e2e_ms", got.e2e), ("queue_ms", got.queue)):
        found = [1000 * (value or 0.0) for value in (latency.p50, latency.p90, latency.p99)]
        assert found == pytest.approx([said[key][p] for p in ("50", "90", "99")], rel=1e-12), key


@pytest.mark.parametrize("name", ["A", "B", "B_async", "B2", "C", "R", "Z"])
def test_every_row_is_vllm_s(name: str) -> None:
    """Step rows, request rows and sums of two thousand real requests are those of vLLM's scheduler, to the nanosecond."""
    said = golden_summary(name)
    run = _run(said)
    assert _first_difference(STEP_COLUMNS, golden_steps(name), run.steps) is None
    with gzip.open(GOLDEN / f"{name}_req.csv.gz", "rt") as lines:
        requests = np.loadtxt(lines, delimiter=",", skiprows=1, dtype=np.int64)
    assert _first_difference(REQUEST_COLUMNS, requests, _request_rows(run.replay)) is None
    _assert_sums(said, run.replay)


def test_the_matrix_is_the_one_that_was_recorded_and_a_wrong_row_is_noticed() -> None:
    """No recorded configuration is left out; one block more, and the comparison says where they part."""
    assert len(_matrix()) == 7
    said = golden_summary("B2")
    said["config"]["num_blocks"] += 1
    found = _first_difference(STEP_COLUMNS, golden_steps("B2"), _run(said).steps)
    assert found is not None
    assert "vLLM" in found


@pytest.mark.parametrize("name", ["B_nopc", "Zn", *range(7)])
def test_decisions_alone_are_vllm_s(name: str | int) -> None:
    """Without prefix caching, without room for the whole prompt at admission, with all arrivals at once, for other sizes."""
    said = golden_summary(name) if isinstance(name, str) else list(_matrix().values())[name]
    _assert_sums(said, _run(said).replay)

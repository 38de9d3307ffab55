"""The replay against random cases recorded from vLLM's own scheduler: needs neither vLLM nor anything beside the repository."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from plimsoll.simulate.replay import NEVER, replay
from plimsoll.simulate.settings import CacheGroup, EncoderLimits, EngineLimits, Speculation, StepTime
from plimsoll.simulate.trace import Integers, Trace, make_trace
from tests.each import each

RECORDED = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-scheduler" / "cases.jsonl.gz"
"""Made by `python -m lab.engine.record_scheduler`."""
CASES: list[dict[str, Any]] = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]


def recorded_case(case: dict[str, Any]) -> tuple[Trace, EngineLimits, StepTime]:
    """The traffic and the engine of a recorded case."""
    asked = case["requests"]
    names = ("arrival_ns", "prompt", "output", "priority", "ids")
    arrivals, prompts, outputs, priorities, ids = ([one[name] for one in asked] for name in names)
    adapters, images = ([one.get(name, none) for one in asked] for name, none in (("adapter", 0), ("images", ())))
    trace = make_trace("recorded", arrivals, prompts, outputs, priorities, ids, case["prefix_block"], adapters, images)
    said = {**case["settings"], "groups": tuple(CacheGroup(**group) for group in case["settings"]["groups"])}
    if "speculation" in said:
        said["speculation"] = Speculation(**said["speculation"])
    if "encoder" in said:
        said["encoder"] = EncoderLimits(**said["encoder"])
    return trace, EngineLimits(**said), StepTime(**case["step_time"])


def _replayed(case: dict[str, Any]) -> tuple[list[list[int]], list[list[int | None]]]:
    steps: list[list[int]] = []

    def note(rows: Integers) -> None:
        steps.extend(rows.tolist())

    trace, settings, step_time = recorded_case(case)
    run = replay(trace, settings, step_time, on_steps=note)
    columns = (
        run.arrival_ns, run.first_sched_ns, run.first_token_ns, run.finish_ns, trace.prompt, run.produced, run.preemptions,
        run.cached_tokens,
    )  # fmt: skip
    rows = zip(zip(*columns, strict=True), run.is_rejected, strict=True)
    requests = [[n, *(None if value == NEVER else int(value) for value in row)] for n, (row, out) in enumerate(rows) if not out]
    return steps, requests


@each("number", range(len(CASES)))
def test_every_row_is_vllms(number: int) -> None:
    """Each step and each request, to the last column."""
    steps, requests = _replayed(CASES[number]["case"])
    assert steps == CASES[number]["steps"]
    assert requests == CASES[number]["requests"]


def test_the_recorded_cases_are_of_all_kinds() -> None:
    """One kind of layer and several, with preemptions and prefix hits, both policies, one and two steps under way, and drafts,
    adapters, pictures and limits of the queue."""
    settings = [one["case"]["settings"] for one in CASES]
    assert {one["policy"] for one in settings} == {"fcfs", "priority"}
    assert {one["async_scheduling"] for one in settings} == {True, False}
    assert {"speculation", "max_loras", "encoder", "max_num_queued_reqs", "max_num_queued_tokens"} <= {
        name for one in settings for name in one
    }
    assert {group["kind"] for one in settings for group in one["groups"]} == {"full", "sliding", "mamba"}
    assert sum(any(row[9] for row in one["steps"]) for one in CASES) >= 5
    assert sum(one["steps"][-1][14] > 0 for one in CASES if one["steps"]) >= 5

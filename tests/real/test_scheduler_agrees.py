"""Our replay against vLLM 0.32's own scheduler, step by step and request by request."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.engine.scheduler import SchedulerProcess
from lab.engine.scheduler_cases import MOST_STEPS, Asked, Case, random_case, turned_at_random, with_more
from plimsoll.errors import BadInput
from plimsoll.simulate.replay import NEVER, REQUEST_COLUMNS, STEP_COLUMNS, replay
from plimsoll.simulate.settings import CacheGroup, EngineLimits, StepTime
from plimsoll.simulate.trace import Integers
from tests.real.conftest import need_vllm

CASES = int(os.environ.get("PLIMSOLL_SCHEDULER_CASES", "800"))
TURNED = 300
MORE = int(os.environ.get("PLIMSOLL_MORE_CASES", "400"))
SHARED = Path(__file__).resolve().parents[2].parent / "shared"

Row = Sequence[int | None]


class Rows(NamedTuple):
    """All that is compared of a run."""

    steps: Sequence[Row]
    requests: Sequence[Row]


@pytest.fixture(scope="module")
def scheduler() -> Iterator[SchedulerProcess]:
    """The real scheduler, imported once."""
    need_vllm()
    with SchedulerProcess() as process:
        yield process


class EndlessError(Exception):
    """The replay has more steps than any case that ends."""


def theirs(answer: dict[str, Any]) -> Rows:
    """What vLLM did; of a case without end its first steps."""
    if not answer["ok"] and answer["error"] == "endless":
        return Rows(answer["steps"], [])
    assert answer["ok"], f"{answer['error']}: {answer['message']}"
    return Rows(answer["steps"], answer["requests"])


def ours(case: Case) -> Rows:
    """What our replay does with the same case; of a case without end its first steps."""
    steps: list[Row] = []

    def note(rows: Integers) -> None:
        steps.extend(rows.tolist())
        if len(steps) > MOST_STEPS:
            raise EndlessError

    try:
        run = replay(case.trace(), case.settings, case.step_time, on_steps=note, turns=case.turned())
    except EndlessError:
        return Rows(steps[:MOST_STEPS], [])
    columns = (
        run.arrival_ns, run.first_sched_ns, run.first_token_ns, run.finish_ns, run.trace.prompt, run.produced,
        run.preemptions, run.cached_tokens,
    )  # fmt: skip
    requests: list[Row] = []
    for number, (row, is_served) in enumerate(zip(zip(*columns, strict=True), ~run.is_rejected, strict=True)):
        if is_served:
            requests.append([number, *(None if value == NEVER else int(value) for value in row)])
    return Rows(steps, requests)


def difference(real: Rows, replayed: Rows) -> str | None:
    """The first row that differs and its first column that does, in words; None if nothing does."""
    for kind, names, left, right in (
        ("step", STEP_COLUMNS, real.steps, replayed.steps),
        ("request", REQUEST_COLUMNS, real.requests, replayed.requests),
    ):
        for number, (one, other) in enumerate(zip(left, right, strict=False)):
            for name, a, b in zip(names, one, other, strict=True):
                if a != b:
                    return f"{kind} row {number}, {name}: vLLM {a}, replay {b}\nvLLM   {list(one)}\nreplay {list(other)}"
        if len(left) != len(right):
            return f"{kind}s: vLLM has {len(left)}, the replay {len(right)}"
    return None


def is_another(answer: dict[str, Any], case: Case) -> bool:
    """Whether this case's steps are not those of the answer; one that can never end is another, too."""
    try:
        return difference(theirs(answer), ours(case)) is not None
    except BadInput:
        return True


def drops_across_sizes(settings: EngineLimits) -> bool:
    """Whether a drafter drops a hit's last block where caches have blocks of several sizes: a hit may differ there."""
    speculation = settings.speculation
    return speculation is not None and speculation.drops_block and len({group.block_size for group in settings.groups}) > 1


def kind_of(case: Case) -> str:
    """Which kinds of groups it has."""
    return "+".join(sorted({group.kind for group in case.settings.groups})) or "one full"


def test_random_cases_agree(scheduler: SchedulerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Hundreds of traces on engines of every kind, new in each run, are scheduled as vLLM does it, to the last column."""
    seed = int(os.environ.get("PLIMSOLL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    assert CASES >= 200 or not os.environ.get("CI"), "fewer cases than are promised"
    with capsys.disabled():  # the seed is of use in the log of a run that passed, too
        print(f"\n{CASES} cases, PLIMSOLL_SEED={seed}")
    dice = random.Random(seed)
    seen: Counter[str] = Counter()
    for number in range(CASES):
        case = random_case(dice)
        answer = scheduler.run(case.as_json())
        found = difference(theirs(answer), ours(case))
        assert found is None, (
            f"PLIMSOLL_SEED={seed}, case {number} of {kind_of(case)}: {found}\n{case.settings}\n{case.step_time}"
        )
        seen[kind_of(case)] += 1
        seen["endless"] += not answer["ok"]
        seen["steps"] += answer["summary"]["steps"]
        seen["preempting"] += answer["summary"]["preemptions"] > 0
        seen["hitting"] += answer["summary"]["prefix_hit_tokens"] > 0
        seen["refusing"] += answer["summary"]["rejected"] > 0
        seen["by priority"] += case.settings.policy == "priority"
    print(f"{CASES} cases: {dict(seen)}")
    # The dice must not have drawn only harmless cases.
    for what in ("preempting", "hitting", "by priority", "refusing"):
        assert seen[what] >= CASES // 12, what
    assert seen["endless"] <= CASES // 50
    assert {"one full", "sliding", "full+sliding", "full+mamba"} <= set(seen)


def test_drafts_adapters_and_queue_limits_agree(scheduler: SchedulerProcess) -> None:
    """With speculative decoding, LoRA slots and queue limits the replay makes vLLM's steps, and refuses whom vLLM refuses."""
    seed = int(os.environ.get("PLIMSOLL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    dice, seen, broken, odd = random.Random(seed), Counter[str](), list[str](), list[str]()
    for number in range(MORE):
        case = with_more(random_case(dice), dice)
        settings, answer = case.settings, scheduler.run(case.as_json())
        is_assertion = answer.get("error") == "AssertionError" and "/vllm/v1/core/" in answer["message"]
        if is_assertion or answer.get("error") == "deadlock":
            broken.append(f"case {number}: {answer['message']}")  # vLLM itself ends or stands still: nothing to compare
            continue
        found = difference(theirs(answer), ours(case))
        if found is not None and drops_across_sizes(settings):
            odd.append(f"case {number}: {found}")
            continue
        assert found is None, f"PLIMSOLL_SEED={seed}, case {number} of {kind_of(case)}: {found}\n{settings}"
        seen["steps"] += answer["summary"]["steps"]
        seen["drafting"] += settings.speculation is not None
        seen["dropping"] += settings.speculation is not None and settings.speculation.drops_block
        seen["with adapters"] += settings.max_loras is not None
        seen["with pictures"] += settings.encoder is not None
        seen["refusing"] += len(answer["requests"]) + answer["summary"]["rejected"] < len(case.requests)
        seen["preempting"] += answer["summary"]["preemptions"] > 0
        # Each of the three decides: without it the steps are others.
        for name in ("speculation", "max_loras", "max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(settings, name) is not None:
                plain = case._replace(settings=settings.turned(**{name: None}))
                seen[f"changed by {name}"] += is_another(answer, plain)
        if settings.encoder is not None:
            plain = case._replace(requests=tuple(asked._replace(images=()) for asked in case.requests))
            seen["changed by pictures"] += is_another(answer, plain)
    print(f"{MORE} cases, PLIMSOLL_SEED={seed}: {dict(seen)}; vLLM ended or stood still: {broken}; known to differ: {odd}")
    assert len(broken) <= MORE // 25, broken
    assert len(odd) <= MORE // 100, odd
    assert min(seen.values()) > MORE // 40, seen


def test_knobs_turned_at_the_same_steps_agree(scheduler: SchedulerProcess) -> None:
    """With plimsoll.inside's knobs turned at random on vLLM's scheduler, a replay with the same turns makes the same steps."""
    dice, seen = random.Random(11), Counter[str]()
    for number in range(TURNED):
        case = turned_at_random(random_case(dice), dice)
        answer = scheduler.run(case.as_json())
        found = difference(theirs(answer), ours(case))
        assert found is None, f"case {number} of {kind_of(case)}: {found}\n{case.settings}\n{case.turns}"
        plain = ours(case._replace(turns=()))
        seen["steps"] += answer["summary"]["steps"]
        seen["turns"] += sum(step <= answer["summary"]["steps"] for step, _ in case.turns)
        seen["preempting"] += answer["summary"]["preemptions"] > 0
        seen["different"] += difference(theirs(answer), plain) is not None
    print(f"{TURNED} cases: {dict(seen)}")
    assert seen["different"] > TURNED // 2, "the turns changed nothing"
    assert seen["preempting"] > TURNED // 12


def test_a_wrong_replay_is_caught(scheduler: SchedulerProcess) -> None:
    """A replay with one setting changed differs from vLLM in many cases; a request that never fits is an answer."""
    dice = random.Random(7)
    caught: Counter[str] = Counter()
    for _ in range(40):
        case = random_case(dice)
        if case.settings.groups:
            continue
        real = theirs(scheduler.run(case.as_json()))
        settings = case.settings
        wrong = {
            "block size": settings._replace(block_size=2 * settings.block_size),
            "one block more": settings._replace(num_blocks=settings.num_blocks + 1),
            "async": settings._replace(async_scheduling=not settings.async_scheduling),
            "prefix caching": settings._replace(prefix_caching=not settings.prefix_caching),
        }
        for name, changed in wrong.items():
            caught[name] += difference(real, ours(case._replace(settings=changed))) is not None
    assert min(caught[name] for name in ("block size", "one block more", "async", "prefix caching")) >= 3, caught
    # Where vLLM would wait for ever the driver says so and goes on to the next case.
    groups = (CacheGroup("full", 16), CacheGroup("sliding", 16, 64))
    settings = EngineLimits(num_blocks=9, max_num_batched_tokens=64, max_model_len=512, groups=groups)
    stuck = Case((Asked(0, 100, 4),), 16, settings, StepTime())
    answer = scheduler.run(stuck.as_json())
    assert (answer["ok"], answer["error"]) == (False, "deadlock")
    assert scheduler.run(stuck._replace(settings=settings._replace(num_blocks=33)).as_json())["ok"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not beside the repository")
def test_the_driver_is_the_published_one(scheduler: SchedulerProcess) -> None:
    """Three hundred real conversations give the step and request rows that were recorded with the reference driver."""
    with gzip.open(SHARED / "data" / "traces" / "sharegpt_300_hashed.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    lines.sort(key=lambda line: round(line["timestamp"] * 1_000_000))
    first, *_ = stamps = [round(line["timestamp"] * 1_000_000) for line in lines]
    requests = tuple(
        Asked(stamp - first, line["input_length"], max(1, line["output_length"]), 0, tuple(line["hash_ids"]))
        for stamp, line in zip(stamps, lines, strict=True)
    )
    settings = EngineLimits(num_blocks=2588, max_model_len=32768, async_scheduling=True)
    case = Case(requests, 16, settings, StepTime(17_000_000, 100_000, 20_000, 140_000))
    golden = Rows(recorded("R_steps.csv.gz"), recorded("R_req.csv.gz"))
    assert difference(golden, theirs(scheduler.run(case.as_json()))) is None


def recorded(name: str) -> list[Row]:
    """The rows of one recorded file."""
    with gzip.open(SHARED / "oracle" / "golden" / name, "rt", encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines)
        return [[int(value) if value else None for value in line] for line in lines]

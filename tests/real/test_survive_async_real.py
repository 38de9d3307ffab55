"""Containment in vLLM's own EngineCore, with asynchronous scheduling and two batches in flight, over a worker without a model.

The CPU build forces synchronous scheduling, so no server here runs what a GPU's does; scheduler, block pool, prefix cache and
step functions are vLLM's own all the same. See lab/survive/async_core.py for what is checked in every step.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.engine.install import engine_home
from lab.engine.server import clean_environment
from lab.survive.async_worker import SITES
from lab.survive.scenarios import play_scenarios, random_scenarios, without_faults
from lab.survive.server import ROOT
from tests.each import each
from tests.real.conftest import need_vllm
from tests.real.small_farm import ran

pytestmark = pytest.mark.once
RANDOM = 40
RANDOM_SOAK = 1500
QUEUE, SABOTAGE = yaml.safe_load(Path(__file__).with_name("survive_async.yaml").read_text(encoding="utf-8")).values()
BUSY = {"seed": 4, "requests": 16, "share": 0.0}


def queue_scenarios() -> dict[str, dict[str, Any]]:
    """Each of the queue with both runners, errors raised at once and later, and with synchronous scheduling."""
    found = {}
    for name, planned in QUEUE.items():
        for runner in ("first", "second"):
            for late in (False, True):
                found[f"{name}, {runner} runner, {'late' if late else 'at once'}"] = {
                    **BUSY, "planned": planned, "runner": runner, "late": late,
                }  # fmt: skip
        found[f"{name}, synchronous"] = {**BUSY, "planned": planned, "asynchronous": False}
    return found


def structured_scenarios() -> list[dict[str, Any]]:
    """Every second request has structured output; both ways of scheduling."""
    common = {"seed": 9, "structured": 2, "share": 0.15, "pause": 3, "sites": SITES[1:]}
    return [common, {**common, "asynchronous": False}, {**common, "runner": "second", "late": True}]


Played = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Every scenario of this file and what became of it; they share one process."""
    need_vllm()
    asked: dict[str, dict[str, Any]] = {f"random {each['seed']}": each for each in random_scenarios(RANDOM, 1)}
    asked |= {f"queue: {name}": each for name, each in queue_scenarios().items()}
    for number, scenario in enumerate(structured_scenarios()):
        asked |= {f"grammar {number}": scenario, f"undisturbed {number}": without_faults(scenario)}
    harmful = {"seed": 3, "share": 0.3, "pause": 3, "requests": 40, "sites": ["early", "forward"]}
    asked |= {f"sabotage: {name}": {**harmful, "sabotage": name} for name in SABOTAGE}
    answers = play_scenarios(asked.values(), tmp_path_factory.mktemp("core"))
    return {name: (asked[name], answer) for name, answer in zip(asked, answers, strict=True)}


def failures(played: Played, start: str) -> list[str]:
    """The scenarios that failed, with their settings and their tracebacks."""
    return [
        f"{name}: {asked}\n{answer.get('trace') or answer.get('error')}"
        for name, (asked, answer) in played.items()
        if name.startswith(start) and not answer["ok"]
    ]


def check_random(answers: list[dict[str, Any]], least: int) -> str:
    """What the scenarios held, together; fails where they were too tame to prove anything."""
    raised: Counter[str] = Counter()
    for answer in answers:
        raised.update(answer["raised"])
    contained = sum(answer["contained"] for answer in answers)
    assert set(raised) == set(SITES)
    assert contained >= least
    assert sum(answer["preemptions"] for answer in answers) > contained
    assert sum(answer["left"] for answer in answers) > 0
    return f"{len(answers)} engines, {sum(answer['steps'] for answer in answers)} steps, {contained} contained, {dict(raised)}"


def test_random_failures_lose_no_token_and_no_block(played: Played, record_property: Any) -> None:
    """Both runners, both ways of scheduling, few blocks, leaving clients: every token right, every account whole."""
    assert not failures(played, "random")
    answers = [answer for name, (_, answer) in played.items() if name.startswith("random")]
    record_property("figures", check_random(answers, 400))


def test_either_batch_in_the_queue_may_fail_or_both_and_structured_output_goes_on_where_it_was(played: Played) -> None:
    """Whichever fails, and however late, each request gets its tokens; a grammar's are those of an undisturbed engine."""
    assert not failures(played, "queue")
    for name, (asked, answer) in played.items():
        if name.startswith("queue"):
            assert answer["contained"] >= 1, name
            assert sum(answer["raised"].values()) == len(asked["planned"]), name
    assert not failures(played, "grammar")
    assert not failures(played, "undisturbed")
    for number, _ in enumerate(structured_scenarios()):
        disturbed, undisturbed = played[f"grammar {number}"][1], played[f"undisturbed {number}"][1]
        assert disturbed["contained"] >= 5
        assert len(undisturbed["tokens"]) == 12
        assert disturbed["tokens"] == undisturbed["tokens"]


@each(("name", "says"), SABOTAGE.items())
def test_what_is_left_out_of_containment_is_noticed(played: Played, name: str, says: str) -> None:
    """With one part of containment taken out, the same checks fail."""
    answer = played[f"sabotage: {name}"][1]
    assert not answer["ok"]
    assert says in answer["error"]


@pytest.mark.soak
def test_thousands_of_random_failures(tmp_path: Path, record_property: Any) -> None:
    """The same as above, for half an hour."""
    need_vllm()
    scenarios = random_scenarios(RANDOM_SOAK, 2)
    answers = play_scenarios(scenarios, tmp_path, limit_s=5400)
    wrong = [(asked, answer) for asked, answer in zip(scenarios, answers, strict=True) if not answer["ok"]]
    assert not wrong, wrong[:2]
    record_property("figures", check_random(answers, 10_000))


def test_a_penalty_survives_the_step_after_a_failure() -> None:
    """vLLM's own batch fills sampled tokens into penalties; what is forgotten of them is forgotten whole."""
    need_vllm()
    env = {**clean_environment(), "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = ran(str(engine_home() / "bin" / "python"), "-m", "lab.survive.penalties", env=env, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr[-2000:]

"""One line of the fleet, and one engine's sections: the state in a word, and unknown where nothing is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.findings import Code, Finding, Severity
from plimsoll.guard.act.steps import Step, open_action
from plimsoll.guard.api.actions import RunningAction
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.tracker import Grade
from plimsoll.guard.page.engine import (
    ChartSeries,
    EngineControl,
    EngineState,
    blocks,
    id_of,
    journal,
    ladder,
    row,
    sections,
)
from plimsoll.render.guard import Clock, EngineView
from plimsoll.unknown import Condition, Status, Unknown

ANSWERS = Look(
    10.0, 1_000.0, Reach.ANSWERS, figures={"kv_cache_usage": 0.5}, config={"num_gpu_blocks": "101", "block_size": "16"}
)
CLOCK = Clock(20.0, 1_010.0)


def view(look: Look | None = ANSWERS, *kinds: str, findings: tuple[Finding, ...] = (), **more: Any) -> EngineView:
    """An engine of which these conditions hold."""
    held = tuple(Condition(kind, Status.TRUE, "Why", "because", 5.0) for kind in kinds)
    found = EngineView("a", "http://a", look, 1.0, 0.1, 3, {}, held, findings, 0.0)
    return found._replace(**more)


def test_nothing_is_known_of_one_that_was_not_looked_at() -> None:
    """Every figure is None, which the page shows as unknown; no nought is made up."""
    found = row(EngineState(view(None)))
    assert (found["state"], found["says"]) == ("unknown", "not looked at yet")
    assert [found[name] for name in ("kv", "running", "waiting", "in_flight", "twice", "model", "vllm")] == [None] * 7
    assert all(
        one["value"] is None and one["why"].startswith("unknown") for one in sections(EngineState(view(None)), CLOCK)["figures"]
    )


DEAD = Finding(Code.ENGINE_DEAD, Severity.CRITICAL, 0.9, "it is dead", "because", (), (), ())


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (view(), "well"),
        (view(ANSWERS, "dead", findings=(DEAD,)), "critical"),
        (view(ANSWERS, "my-own-rule"), "warning"),
        (view(ANSWERS, needs="it is held"), "person"),
        (view(ANSWERS._replace(reach=Reach.REFUSED), unreachable_since_s=4.0), "gone"),
        (view(ANSWERS._replace(reach=Reach.SILENT)), "unknown"),
    ],
)  # fmt: skip
def test_the_state_in_a_word(seen: EngineView, state: str) -> None:
    """A person before all, then what is critical, then silence, warnings, and one lost look is only unknown."""
    assert row(EngineState(seen))["state"] == state


def test_the_ladder_shows_what_is_called_for_done_and_off() -> None:
    """The rung that the worst condition calls for, the step of what is under way, and what is switched off."""
    run = open_action("x1", "a", Grade.RESTART, "dead", is_broken=False)._replace(step=Step.DRAIN)
    facts = EngineState(
        view(ANSWERS, "dead", "storm"), guarding=EngineControl(True, False, ("compact",), RunningAction(run, None))
    )
    found = {one["rung"]: one for one in ladder(facts)["rungs"]}
    assert [name for name, one in found.items() if one["here"]] == ["restart"]
    assert found["restart"]["doing"] == "drain"
    assert found["advice"]["because"] == ["storm"]
    assert [name for name, one in found.items() if one["off"]] == ["compact"]
    assert [one["off"] for one in ladder(EngineState(view()))["rungs"]] == [False, True, True, True]


def test_the_pool_of_blocks() -> None:
    """The first block is never given out; the most of the last half hour is kept beside what is used now."""
    assert blocks(ANSWERS, ChartSeries((1.0,), {"kv": (0.75,)})) == {
        "total": 100,
        "used": 50,
        "most": 75,
        "size": 16,
        "why": "",
    }
    assert blocks(None, ChartSeries())["used"] is None
    assert blocks(ANSWERS._replace(config={"num_gpu_blocks": "-4"}), ChartSeries())["total"] is None


def test_sections_are_json_and_steady() -> None:
    """The same state a second later is the same section: only what changes is sent."""
    facts = EngineState(view(ANSWERS, "dead", findings=(DEAD,)), {"waiting": 3.0, "twice": Unknown("too early")})
    now, later = sections(facts, CLOCK), sections(facts, Clock(21.0, 1_011.0))
    json.dumps(now, allow_nan=False)
    assert now == later


def test_an_id_stands_for_a_name() -> None:
    """Whatever the name holds it can stand in an address, and two names have two."""
    ids = {id_of(name) for name in ("a", "b", "/", "\ud800", "n" * 10_000)}
    assert len(ids) == 5
    assert all(one[0] == "~" and one[1:].isalnum() and len(one) == 21 for one in ids)


def test_the_journal_in_sentences() -> None:
    """An engine's entries and those that mean everybody; what only guard needs is left out, and texts are cut."""
    plain = {
        "number": 1,
        "at": 1.0,
        "engine": "a",
        "action": "x",
        "step": "drain",
        "fields": {"says": "<b>" * 1_000, "done": True},
    }
    rows = [{**plain, "kind": kind} for kind in ("intent", "outcome")] + [{**plain, "kind": "outcome", "engine": "b"}]
    found = journal(rows, "a")
    assert len(found) == 1
    text = json.dumps(found[0])
    assert "drain: <b><b>" in text
    assert len(text) < 1_500

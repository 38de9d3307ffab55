"""One engine on the page: its line, its sections, its memory as a bar; texts are short, printable and without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.contained import LastFailure, Survival
from plimsoll.findings import Code, Finding, Severity
from plimsoll.guard.act.steps import Step, open_action
from plimsoll.guard.daemon.engine_look import read_workers
from plimsoll.guard.judge.look import CardState, GateState, Look, Reach, WorkerMemory
from plimsoll.guard.judge.tracker import Grade
from plimsoll.guard.page import engine as page
from plimsoll.render.guard import Clock, EngineView
from plimsoll.unknown import Condition, Status, Unknown
from tests.each import sure

ANY = st.text(st.characters(exclude_categories=()), max_size=2_000)  # with lone surrogates, controls and marks


@given(ANY)
def test_any_text_is_short_and_printable(text: str) -> None:
    """No control, no mark that turns letters around, no surrogate, and at most 300 letters."""
    found = page.shown(text)
    assert len(found) <= page.LONGEST
    assert found.isprintable()
    found.encode("utf-8")


def test_a_text_is_shown_as_text_and_what_is_too_long_is_cut() -> None:
    """Marks by their number, markup as it is, no key, no megabyte: it ends with the sign that there was more."""
    assert page.shown("a\u202eb\u200fc\nd") == "a[U+202E]b[U+200F]c d"
    assert page.shown("<script>alert(1)</script>") == "<script>alert(1)</script>"
    assert "sk-abcdefghijklmnopqrstuvwxyz123456" not in page.shown("key sk-abcdefghijklmnopqrstuvwxyz123456 was refused")
    found = page.shown("long " * 200_000)
    assert (found[:9], found[-1], len(found) <= page.LONGEST) == ("long long", page.MORE, True)
    assert page.shown("\n" * 1_000_000 + "x") == page.MORE


NESTED: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ANY, inner, max_size=5),
    max_leaves=20,
)


def texts_in(value: object) -> list[str]:
    """Every text of plain data, names too."""
    if isinstance(value, dict):
        return [text for name, inner in value.items() for text in (name, *texts_in(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in texts_in(inner)]
    return [value] if isinstance(value, str) else []


@given(NESTED)
def test_so_is_every_text_in_plain_data(value: object) -> None:
    """Names and values at any depth; and what comes out is JSON that every browser reads."""
    found = page.tidy(value)
    assert all(text.isprintable() and len(text) <= page.LONGEST for text in texts_in(found))
    json.dumps(found, allow_nan=False)


GIB = 2**30
WHOLE = WorkerMemory(
    "0/0", 1.0, allocated=20 * GIB, reserved=22 * GIB, releasable=1.5 * GIB, unreleasable=0.5 * GIB, device_total=24 * GIB,
    device_free=1 * GIB, by_others=0.25 * GIB, requested=22 * GIB, weights=15 * GIB, kv_cache=4 * GIB, activation_peak=GIB,
    graphs=0.5 * GIB,
)  # fmt: skip


def bar_of(worker: WorkerMemory, usage: float | None = 0.25) -> dict[str, Any]:
    return sure(page.worker_bar(worker, usage))


def parts(worker: WorkerMemory, usage: float | None = 0.25) -> dict[str, float]:
    return {one["part"]: one["bytes"] / GIB for one in bar_of(worker, usage)["parts"]}


def test_a_bar_has_every_part_that_is_told_and_makes_nothing_up() -> None:
    """In order, and adding up to a real card; without the start's figures live memory is one part, and each gap says why."""
    assert parts(WHOLE) == {
        "weights": 15, "graphs": 0.5, "activation": 0.5, "kv_used": 1, "kv_free": 3, "releasable": 1.5, "unreleasable": 0.5,
        "outside": 0.75, "others": 0.25, "slack": 1,
    }  # fmt: skip
    assert (bar_of(WHOLE)["line"], bar_of(WHOLE)["notes"]) == (22 * GIB, [])
    memory = Path(__file__).parents[2] / "captures" / "vllm-0.25.1-h200-inside" / "memory.json"
    (worker,) = read_workers(json.loads(memory.read_text(encoding="utf-8")))
    found = {part: round(size, 2) for part, size in parts(worker, 0.0).items()}
    assert found == {
        "weights": 15.0, "graphs": 0.0, "activation": 0.16, "kv_used": 0.0, "kv_free": 48.0, "releasable": 2.32,
        "unreleasable": 0.08, "outside": 1.33, "others": 0.01, "slack": 73.5,
    }  # fmt: skip
    bare = WHOLE._replace(weights=None, requested=None)
    assert parts(bare)["live"] == 20
    assert "weights" not in parts(bare)
    assert (bar_of(bare)["notes"], bar_of(bare)["line"]) == ([page.NO_PARTS, page.NO_LINE], None)
    assert parts(WHOLE, None)["kv"] == 4
    assert "graphs" not in parts(WHOLE._replace(graphs=None))
    assert "others" not in parts(WHOLE._replace(by_others=None))
    assert page.worker_bar(WHOLE._replace(device_free=None), 0.5) is None


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
    bar = page.worker_bar(worker, usage)
    if bar is None:
        return
    sizes = [one["bytes"] for one in bar["parts"]]
    assert sum(sizes) == bar["total"]
    assert min(sizes) >= 0
    assert bar["line"] is None or 0 < bar["line"] <= bar["total"]


def test_the_driver_alone_tells_less_nothing_says_how_to_get_more_and_the_tightest_comes_first() -> None:
    """What the engine and others hold and what is free; no bar and one sentence; the one with the least slack is first."""
    bar = sure(page.card_bar(CardState("GPU 0", total=24 * GIB, free=4 * GIB, by_engine=18 * GIB)))
    assert [(one["part"], one["bytes"] // GIB) for one in bar["parts"]] == [("engine", 18), ("others", 2), ("slack", 4)]
    for look, why in ((None, "unknown: not looked at yet"), (Look(0.0, 0.0, Reach.ANSWERS), page.NO_FIGURES)):
        assert page.ledgers(look) == {"bars": [], "why": why, "left_out": 0}
    tight = WHOLE._replace(rank="0/1", device_free=0.5 * GIB)
    found = page.ledgers(Look(0.0, 0.0, Reach.ANSWERS, workers=(WHOLE, tight)))
    assert [bar["name"] for bar in found["bars"]] == ["worker 0/1", "worker 0/0"]


LAST_FAILURE = LastFailure(12.0, "logits", 8192.0, 48.0, 2.0 * 2**30, None, "prompt_logprobs")
SURVIVED = Survival(
    armed=True, contained=3.0, aborted=0.0, recomputed_tokens=190_000.0, stalled_s=1.7, last=LAST_FAILURE, tokens_now=1024.0,
    tokens_start=8192.0, limping=False, storm=False,
)  # fmt: skip


def survived(survival: Survival | None) -> Look:
    """A look at an engine whose gate says this."""
    return Look(
        10.0, 1_000.0, Reach.ANSWERS, gate=GateState(ready=True, reason="", in_flight=0, engine_requests=0, survival=survival)
    )


def test_the_card_shows_the_count_the_cost_and_the_newest_and_nothing_that_is_not_told() -> None:
    """Figures by name, the newest with its moment and shape; off, or never failed: neither; a reason is cut like any text."""
    card = page.survival_of(survived(SURVIVED))
    assert card["says"] == page.ARMED
    assert {one["name"]: one["value"] for one in card["figures"]} == {
        "contained": 3, "aborted": 0, "recomputed_tokens": 190_000, "stalled_s": 1.7, "tokens_now": 1024, "tokens_start": 8192,
    }  # fmt: skip
    assert card["last"]["at"] == 988
    assert "at logits, a request that wants prompt_logprobs (asked for 2.0 GiB)" in card["last"]["says"]
    card = page.survival_of(survived(Survival()))
    assert (card["figures"], card["last"]) == ([], None)
    card = page.survival_of(survived(SURVIVED._replace(contained=0.0, aborted=None)))
    values = {one["name"]: (one["value"], one["why"]) for one in card["figures"]}
    assert (card["last"], values["aborted"]) == (None, (None, "unknown"))
    says = page.survival_of(survived(Survival(armed=False, why="x\u202ey\n" + "z" * 900)))["says"]
    assert ("\u202e" not in says, len(says) <= page.LONGEST) == (True, True)


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (None, page.NO_SURVIVAL), (Look(1.0, 1.0, Reach.ANSWERS), page.NO_SURVIVAL), (survived(None), page.TOO_OLD),
        (survived(Survival(why="PLIMSOLL_SURVIVE is not set")), f"off, {page.OFF}: PLIMSOLL_SURVIVE is not set"),
        (survived(Survival(armed=False, why="a KV connector is set")), f"not armed, {page.OFF}: a KV connector is set"),
        (survived(SURVIVED._replace(limping=True)), page.LIMPS),
        (survived(SURVIVED._replace(limping=True, storm=True)), page.STORM),
    ],
)  # fmt: skip
def test_the_state_in_a_sentence(seen: Look | None, says: str) -> None:
    """Unknown, off, not armed with its reason, armed, limping, or a storm."""
    assert page.survival_of(seen)["says"] == says


ANSWERS = Look(
    10.0, 1_000.0, Reach.ANSWERS, figures={"kv_cache_usage": 0.5}, config={"num_gpu_blocks": "101", "block_size": "16"}
)
CLOCK = Clock(20.0, 1_010.0)


def view(look: Look | None = ANSWERS, *kinds: str, findings: tuple[Finding, ...] = (), **more: Any) -> EngineView:
    """An engine of which these conditions hold."""
    held = tuple(Condition(kind, Status.TRUE, "Why", "because", 5.0) for kind in kinds)
    return EngineView("a", "http://a", look, 1.0, 0.1, 3, {}, held, findings, 0.0)._replace(**more)


def test_nothing_is_known_of_one_that_was_not_looked_at() -> None:
    """Every figure is None, which the page shows as unknown; no nought is made up."""
    found = page.row(page.EngineState(view(None)))
    assert (found["state"], found["says"]) == ("unknown", "not looked at yet")
    assert [found[name] for name in ("kv", "running", "waiting", "in_flight", "twice", "model", "vllm")] == [None] * 7
    assert all(
        one["value"] is None and one["why"].startswith("unknown")
        for one in page.sections(page.EngineState(view(None)), CLOCK)["figures"]
    )


DEAD = Finding(Code.ENGINE_DEAD, Severity.CRITICAL, 0.9, "it is dead", "because", (), (), ())


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (view(), "well"),
        (view(ANSWERS, "dead", findings=(DEAD,)), "critical"),
        (view(ANSWERS, needs="it is held"), "person"),
        (view(ANSWERS._replace(reach=Reach.REFUSED), unreachable_since_s=4.0), "gone"),
        (view(ANSWERS._replace(reach=Reach.SILENT)), "unknown"),
    ],
)  # fmt: skip
def test_the_state_in_a_word(seen: EngineView, state: str) -> None:
    """A person before all, then what is critical, then silence, warnings, and one lost look is only unknown."""
    assert page.row(page.EngineState(seen))["state"] == state


def test_the_ladder_the_pool_of_blocks_and_that_sections_are_steady() -> None:
    """What is called for, done and off; the most of the last half hour; the same state a second later is the same section."""
    run = open_action("x1", "a", Grade.RESTART, "dead", is_broken=False)._replace(step=Step.DRAIN)
    facts = page.EngineState(view(ANSWERS, "dead", "storm"), guarding=page.EngineControl(True, False, ("compact",), run))
    found = {one["rung"]: one for one in page.ladder(facts)["rungs"]}
    assert [name for name, one in found.items() if one["here"]] == ["restart"]
    assert (found["restart"]["doing"], found["advice"]["because"]) == ("drain", ["storm"])
    assert [name for name, one in found.items() if one["off"]] == ["compact"]
    assert [one["off"] for one in page.ladder(page.EngineState(view()))["rungs"]] == [False, True, True, True]
    wanted = {"total": 100, "used": 50, "most": 75, "size": 16, "why": ""}
    assert page.blocks(ANSWERS, {"t": (1.0,), "kv": (0.75,)}) == wanted
    assert page.blocks(None, {})["used"] is None
    assert page.blocks(ANSWERS._replace(config={"num_gpu_blocks": "-4"}), {})["total"] is None
    facts = page.EngineState(view(ANSWERS, "dead", findings=(DEAD,)), {"waiting": 3.0, "twice": Unknown("too early")})
    now, later = page.sections(facts, CLOCK), page.sections(facts, Clock(21.0, 1_011.0))
    json.dumps(now, allow_nan=False)
    assert now == later
    text = "max-num-seqs=24 for 2 h; guardctl set a --clear ends it"
    assert page.sections(page.EngineState(view(ANSWERS, note=text)), CLOCK)["head"]["note"] == text
    assert "Not available" not in (Path(page.__file__).parent / "static" / "engine.js").read_text(encoding="utf-8")


def test_an_id_stands_for_a_name_and_the_journal_is_in_sentences() -> None:
    """Two names have two, whatever they hold; what only guard needs is left out of an engine's entries, and texts are cut."""
    ids = {page.id_of(name) for name in ("a", "b", "/", "\ud800", "n" * 10_000)}
    assert len(ids) == 5
    assert all(one[0] == "~" and one[1:].isalnum() and len(one) == 21 for one in ids)
    fields = {"says": "<b>" * 1_000, "done": True}
    plain = {"number": 1, "at": 1.0, "engine": "a", "action": "x", "step": "drain", "fields": fields}
    rows = [{**plain, "kind": kind} for kind in ("intent", "outcome")] + [{**plain, "kind": "outcome", "engine": "b"}]
    (found,) = page.journal(rows, "a")
    assert "drain: <b><b>" in json.dumps(found)
    assert len(json.dumps(found)) < 1_500

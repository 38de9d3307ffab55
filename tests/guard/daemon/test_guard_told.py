"""What guard says of one engine, from look to look: each change once, and nothing twice."""

from __future__ import annotations

from plimsoll.guard.api.api import metrics_page
from plimsoll.guard.daemon.observer import EventReporter, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import Canary, Reach
from plimsoll.render.guard import Event, EventKind, alert, line_json, sentence, status_line
from plimsoll.unknown import Status
from tests.guard.daemon.test_guard_loop import POLICY, Scripted, condition, look, well


def test_an_engine_that_does_not_answer_is_one_sentence() -> None:
    """However many conditions become unknown with it, after three looks; one that misses a look or two is no news."""
    teller = EventReporter("e")

    def messages(number: int, reach: Reach = Reach.ANSWERS, status: Status = Status.FALSE, **more: object) -> list[str]:
        return [told.message for told in teller.report(look(number, reach, **more), [condition(status)], None)]

    assert messages(0, vllm="0.32.0") == ["answers, vLLM 0.32.0"]
    assert [messages(n, Reach.SILENT, Status.UNKNOWN) for n in (1, 2)] == [[], []]
    assert messages(3) == []
    said = [(n, text) for n in range(4, 13) for text in messages(n, Reach.SILENT, Status.UNKNOWN, why="slow")]
    assert said == [(6, "unreachable (slow); no metrics")]
    assert messages(14) == ["answers again after 10 s"]
    teller = EventReporter("e")
    said = [(n, text) for n in range(5) for text in messages(n, Reach.REFUSED, why="nobody")]
    assert said == [(0, "unreachable: connection refused; no metrics")]
    assert messages(9) == ["answers"], "for the first time"


def test_an_engine_that_never_answers_is_said_to_be_such_after_a_minute() -> None:
    """Once, beside the first sentence; it counts as unreachable from the first look on, and after an answer it is over."""
    one = WatchedEngine(EngineConfig("e", "http://x:1"), POLICY, Scripted(well), 0.0)
    said = [told for n in range(200) for told in one.take(look(n, Reach.REFUSED, why="nobody listens there"))]
    assert [(told.unix_s - 1e9, told.what) for told in said] == [(0, EventKind.UNREACHABLE), (60, EventKind.UNREACHABLE)]
    assert said[1].message.startswith("no answer since guard started: still starting, never started")
    view = one.view(200.0)
    assert (view.unreachable_since_s, view.has_answered) == (0.0, False)
    assert status_line([view]) == "1 engine, 1 unreachable (1 never reached); no other problem known"
    page = metrics_page([view], version="x", started_unix_s=0.0, notifications={}, told=0, mistakes={})
    assert 'plimsoll_guard_unreachable{engine="e"} 1.0' in page
    assert [told.message for told in one.take(look(201))] == ["answers"]
    assert (one.view(202.0).unreachable_since_s, one.view(202.0).has_answered) == (None, True)
    assert [told for n in range(300, 500) for told in one.take(look(n, Reach.REFUSED))][1:] == []


def test_what_the_gate_does_not_tell_is_said_after_three_looks_and_when_it_is_mended() -> None:
    """A gate that misses a look is no news; another reason is the same trouble, and it is no alert."""
    teller = EventReporter("e")
    notes = ["", "late", "", "late", "late", "no token", "no token", "late", "", ""]
    said = [told for number, note in enumerate(notes) for told in teller.report(look(number), [], None, {"gate": note})]
    assert [(told.unix_s - 1e9, told.what) for told in said[1:]] == [(5, EventKind.TROUBLE), (8, EventKind.MENDED)]
    assert sentence(said[1]) == "e: no token; no gate figures"
    assert alert(said[1], starts_unix_s=1e9, lasts_s=60.0) is None
    assert teller.notes == {}


def test_a_canary_that_the_engine_does_not_take_is_said() -> None:
    """A model that is not served, or an endpoint that is not there, shows nothing of a hang; a busy server is no news."""

    def said(status: int, why: str) -> list[str]:
        one = WatchedEngine(EngineConfig("e", "http://x:1"), POLICY, Scripted(well), 0.0)
        looks = [look(number)._replace(canary=Canary(float(number), None, why=why, status=status)) for number in range(5)]
        return [told.message for each in looks for told in one.take(each) if told.what is EventKind.TROUBLE]

    assert said(429, "the engine is too busy for it (429)") == []
    (text,) = said(404, "the engine does not serve a model named 'm'")
    assert text.startswith("canary requests prove nothing: the engine does not serve a model named 'm'; without")


def test_a_condition_begins_is_in_doubt_and_is_over_once() -> None:
    """From true to unknown and back is the same trouble; its end is said with how long it lasted."""
    teller = EventReporter("e")
    teller.report(look(0), [], None)
    steps = [Status.TRUE, Status.UNKNOWN, Status.TRUE, Status.UNKNOWN, Status.FALSE, Status.UNKNOWN, Status.TRUE]
    said = [told for number, status in enumerate(steps) for told in teller.report(look(number), [condition(status)], None)]
    assert [told.what for told in said] == [
        EventKind.BEGINS,
        EventKind.UNKNOWN,
        EventKind.UNKNOWN,
        EventKind.OVER,
        EventKind.BEGINS,
    ]
    assert sentence(said[0]) == "e: the engine is dead (engine.dead): it is so"
    assert sentence(said[1]) == "e: engine.dead was active and is now unknown: it is so"
    assert sentence(said[3]) == "e: recovered: engine.dead cleared after 4 s: it is so"


def test_what_an_engine_sends_does_not_reach_the_terminal() -> None:
    """Control characters, secrets and endless texts are cleaned before they are said."""
    nasty = "\x1b[2J token=hf_abcdefghijklmnopqrstuvwxyz " + "x" * 10_000
    told = Event(1.0, "e\x1b[2J", EventKind.BEGINS, nasty, condition(Status.TRUE, nasty), None)
    for text in (sentence(told), line_json(told)):
        assert "\x1b" not in text
        assert "hf_abcdef" not in text
        assert len(text) < 1_500


def test_an_engine_that_leaves_closes_what_held() -> None:
    """Whoever was told that it began is told that nobody watches it any more."""
    teller = EventReporter("e")
    teller.report(look(0), [condition(Status.TRUE)], None)
    said = teller.leave(2e9, 60.0, [condition(Status.TRUE), condition(Status.FALSE, kind="storm")])
    assert [told.what for told in said] == [EventKind.OVER, EventKind.UNLISTED]
    over = alert(said[0], starts_unix_s=1e9, lasts_s=60.0)
    assert over is not None
    assert over["endsAt"] == "2033-05-18T03:33:20.000Z"
    assert alert(said[1], starts_unix_s=1e9, lasts_s=60.0) is None


def test_a_condition_that_becomes_a_graver_one_is_no_recovery() -> None:
    """Its end names the graver one, and no alert is resolved; where none took its place it is."""
    teller = EventReporter("e")
    begun = teller.report(look(0), [condition(Status.TRUE, kind="stalled")], None)
    assert [event.what for event in begun][-1] is EventKind.BEGINS
    worse = teller.report(look(5), [condition(Status.TRUE, kind="wedged")], None)
    over = teller.report(look(40), [condition(Status.FALSE, kind="stalled")], None)
    assert [(event.what, event.became) for event in over] == [(EventKind.OVER, "wedged")]
    assert sentence(over[0]) == "e: engine.stalled became engine.wedged"
    assert worse
    plain = teller.report(look(60), [condition(Status.FALSE, kind="wedged")], None)
    assert [event.became for event in plain] == [""]

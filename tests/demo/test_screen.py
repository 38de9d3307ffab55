"""From guard's own words to lines for a reader: times, wrapped lines, and what went wrong in red."""

from __future__ import annotations

from plimsoll.demo.screen import DECIDED, DID, ENDED, QUIET, SAW, STEPS, Screen, StoryLine, of_change, of_entry
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, SEEN, Entry
from plimsoll.guard.act.steps import Step
from plimsoll.render import terminal
from plimsoll.render.terminal import BAD, NAME, WIDTH, Report
from tests.each import each

BEGINS = {
    "at": 12.5, "engine": "b", "what": "begins", "kind": "saturated", "code": "engine.saturated",
    "sentence": "b: more requests come than it can serve (engine.saturated): expected wait 7 s and the queue grows",
}  # fmt: skip


def entry(kind: str, step: str = "", **fields: object) -> Entry:
    """One line of a journal."""
    return Entry(7, 20.0, kind, "c", "ab12", step, fields)


def test_what_guard_printed_is_told_where_its_journal_does_not_tell_it() -> None:
    """A condition by its reason and its code, a person who is needed, and nothing twice: what guard did is in its journal."""
    assert of_change(BEGINS) == StoryLine(12.5, SAW, "b", "expected wait 7 s and the queue grows (engine.saturated)")
    assert of_change({**BEGINS, "sentence": "b: something else"}) == StoryLine(12.5, SAW, "b", "something else")
    assert of_change({**BEGINS, "what": "over", "sentence": "b: it is over"}) == StoryLine(12.5, SAW, "b", "it is over")
    held = of_change({**BEGINS, "what": "needs-a-person", "sentence": "b: restart is held"})
    assert held == StoryLine(12.5, ENDED, "b", "restart is held")
    for what in ("acted", "reached", "unreachable", "unknown", "trouble"):
        assert of_change({**BEGINS, "what": what}) is None


@each(
    ("line", "how", "text"),
    [
        (entry(OPENED, grade="restart", why="it hangs"), DECIDED, "to restart"),
        (entry(OUTCOME, "stop", done=True, says="stopped: it ended"), DID, "stopped it: it ended"),
        (entry(CLOSED, end="done", grade="restart"), ENDED, "restart: done and confirmed"),
        (entry(CLOSED, end="paused", grade="shed"), ENDED, "shed: paused"),  # of a later version: under its own name
        *((entry(OUTCOME, step, done=False, says="x"), DID, f"{step} (not done): x") for step in QUIET),
        *((entry(OUTCOME, step, done=True, says="x"), "", "") for step in QUIET),  # a lock that was taken is no news
        (entry(INTENT, "stop"), "", ""),  # its outcome follows
        (entry(SEEN, started=1.0), "", ""),
    ],
)
def test_an_action_is_told_from_its_beginning_to_its_end(line: Entry, how: str, text: str) -> None:
    """Opened is a decision, an outcome a deed, closed an end, each with guard's own words; what only keeps order is quiet."""
    assert of_entry(line) == (StoryLine(20.0, how, "c", text) if how else None)
    assert {str(step) for step in Step} <= {*STEPS, *QUIET}


def printed(line: StoryLine) -> Report:
    """What the screen makes of one line."""
    shown: list[Report] = []
    Screen(shown.append, 100.0).guard(line)
    (report,) = shown
    return report


def test_guards_words_have_the_time_since_the_beginning_and_an_end_not_done_stands_out() -> None:
    """Guard's own time; long words are wrapped under their beginning; other ends have the colour of guard's words."""
    assert str(printed(StoryLine(112.34, SAW, "b", "the queue grows"))) == "   12.3 s  guard saw  b  the queue grows"
    rows = str(printed(StoryLine(101.0, DID, "a", "word " * 60))).splitlines()
    assert len(rows) > 1
    assert max(map(len, rows)) <= WIDTH
    assert all(row.startswith(" " * 20) for row in rows[1:])
    styles = []
    for text in ("restart: held", "restart: done and confirmed"):
        (line,) = printed(StoryLine(101.0, ENDED, "a", text))
        assert isinstance(line, terminal.Line)
        styles.append(line.style)
    assert styles == [BAD, NAME]

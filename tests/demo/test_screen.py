"""What the demo prints of guard: times, wrapped lines, and what went wrong in red."""

from __future__ import annotations

from plimsoll.demo.screen import DID, ENDED, SAW, Screen, StoryLine
from plimsoll.render import terminal
from plimsoll.render.terminal import BAD, NAME, WIDTH, Report


def printed(line: StoryLine) -> Report:
    """What the screen makes of one line."""
    shown: list[Report] = []
    Screen(shown.append, 100.0).guard(line)
    (report,) = shown
    return report


def test_guards_words_have_the_time_since_the_beginning() -> None:
    """Guard's own time; long words are wrapped under their beginning."""
    assert str(printed(StoryLine(112.34, SAW, "b", "the queue grows"))) == "   12.3 s  guard saw  b  the queue grows"
    rows = str(printed(StoryLine(101.0, DID, "a", "word " * 60))).splitlines()
    assert len(rows) > 1
    assert max(map(len, rows)) <= WIDTH
    assert all(row.startswith(" " * 20) for row in rows[1:])


def test_an_end_that_is_not_done_stands_out() -> None:
    """The others have the colour of guard's words."""
    styles = []
    for text in ("restart: held", "restart: done and confirmed"):
        (line,) = printed(StoryLine(101.0, ENDED, "a", text))
        assert isinstance(line, terminal.Line)
        styles.append(line.style)
    assert styles == [BAD, NAME]

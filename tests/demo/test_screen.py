"""What is printed: times, wrapped lines, and colour only where it is wanted."""

from __future__ import annotations

import pytest

from plimsoll.demo.screen import DID, ENDED, SAW, WIDTH, Line, Screen, wants_colour


@pytest.mark.parametrize(
    ("environ", "is_terminal", "wants"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(environ: dict[str, str], *, is_terminal: bool, wants: bool) -> None:
    """NO_COLOR is heeded, and a pipe gets none."""
    assert wants_colour(environ, is_terminal=is_terminal) is wants


def printed(line: Line, *, is_coloured: bool = False) -> list[str]:
    """What the screen makes of one line."""
    shown: list[str] = []
    Screen(shown.append, is_coloured=is_coloured, began=100.0).guard(line)
    return shown


def test_guards_words_have_the_time_since_the_beginning() -> None:
    """Guard's own time, not that of the printing."""
    assert printed(Line(112.34, SAW, "b", "the queue grows")) == ["   12.3 s  guard saw  b  the queue grows"]


def test_long_words_are_wrapped_under_their_beginning() -> None:
    """No line is wider than the page."""
    rows = printed(Line(101.0, DID, "a", "word " * 60))
    assert len(rows) > 1
    assert max(map(len, rows)) <= WIDTH
    assert all(row.startswith(" " * 20) for row in rows[1:])


def test_only_a_coloured_screen_has_escapes() -> None:
    """And an end that is not done stands out."""
    assert "\x1b" not in "".join(printed(Line(101.0, ENDED, "a", "restart: held")))
    assert printed(Line(101.0, ENDED, "a", "restart: held"), is_coloured=True)[0].endswith("\x1b[0m")

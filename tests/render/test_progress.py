"""The bar that a long run draws on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from plimsoll.render import terminal as progress


class Terminal(io.StringIO):
    """Text that was written, and whether a person would see it."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def screen(text: str) -> str:
    """What one line of a terminal shows after this was written to it."""
    shown: list[str] = []
    at = 0
    for character in text:
        if character == "\r":
            at = 0
            continue
        shown[at : at + 1] = [character]
        at += 1
    return "".join(shown).rstrip()


def standard_error(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True, after_s: float = 0.0) -> Terminal:
    """Standard error from here on; not a fixture, because pytest puts its own back between the two."""
    made = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(progress, "AFTER_S", after_s)
    return made


def test_the_bar_grows_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much is done of how much, and leaves an empty line behind."""
    terminal = standard_error(monkeypatch)
    with progress.bar("replaying", "requests") as draw:
        draw(0, 4000)
        draw(1000, 4000)
        early = screen(terminal.getvalue())
        draw(3000, 4000)
        late = screen(terminal.getvalue())
        draw(4000, 4000)
        full = screen(terminal.getvalue())
    assert early.startswith("replaying [")
    assert "1,000 of 4,000 requests" in early
    assert "s left" in early
    assert early.count("#") < late.count("#") < full.count("#") == progress.WIDTH
    assert "left" not in full
    assert screen(terminal.getvalue()) == ""
    assert "\n" not in terminal.getvalue()


def test_the_line_is_clean_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle leaves no half bar before the message."""
    terminal = standard_error(monkeypatch)

    def interrupted() -> None:
        with progress.bar("replaying", "requests") as draw:
            draw(1, 2)
            assert screen(terminal.getvalue()) != ""
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen(terminal.getvalue()) == ""


@pytest.mark.parametrize(("done", "total"), [(0, 0), (0, 10), (10, 10), (0, 10**12), (10**12, 10**12)])
def test_nothing_and_very_much(done: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No work and huge work are drawn too, on one line."""
    terminal = standard_error(monkeypatch)
    with progress.bar("replaying", "requests") as draw:
        draw(done, total)
        assert f"{done:,} of {total:,}".startswith(screen(terminal.getvalue()).partition("] ")[2].partition(" req")[0])
        assert len(screen(terminal.getvalue())) < 100
    assert screen(terminal.getvalue()) == ""


def test_nothing_in_a_file_or_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody looks, nothing is drawn."""
    made = standard_error(monkeypatch, is_terminal=False)
    with progress.bar("replaying", "requests") as draw:
        draw(1, 2)
    assert made.getvalue() == ""


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that flashes helps nobody."""
    made = standard_error(monkeypatch, after_s=60.0)
    with progress.bar("replaying", "requests") as draw:
        draw(1, 2)
    assert made.getvalue() == ""

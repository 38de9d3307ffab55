"""What is drawn on a terminal and what is piped: width, colour, hostile text, progress."""

from __future__ import annotations

import io
import re
import sys

import pytest

from plimsoll.render import terminal
from plimsoll.render.terminal import BAD, WIDTH, Line, Report, Table, Whole, drawn


class Terminal(io.StringIO):
    """Text that was written, and whether a person would see it."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        """As it was told."""
        return self.is_terminal


LONG = "a long sentence " * 20
REPORT = Report(
    [Line(f"  bad: {LONG}", 8, BAD, 6), "", Table("lrw", [["name", "1,000", LONG], ["b", "2", ""]], ["what", "n", "why"])]
)


@pytest.mark.parametrize("columns", [40, 80, 140, 400])
def test_a_report_fits_the_screen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are broken at blanks under where their words began; no more than 140 columns are used."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = re.sub(r"\x1b\[[\d;]*m", "", drawn(REPORT, Terminal())).splitlines()
    assert min(columns, 140) - 20 < max(map(len, lines)) <= min(columns, 140)
    assert lines[0].startswith("  bad: a long")
    assert lines[1].startswith(" " * 8 + "long" if columns == 40 else " " * 8)
    assert lines[0].split() + lines[1].split() == ["bad:", *LONG.split()][: len(lines[0].split() + lines[1].split())]


@pytest.mark.parametrize(
    ("name", "value", "is_terminal", "is_coloured"),
    [
        ("TERM", "xterm", True, True), ("TERM", "xterm", False, False), ("NO_COLOR", "1", True, False),
        ("TERM", "dumb", True, False),
    ],
)  # fmt: skip
def test_colour_is_for_terminals_that_want_it(
    name: str, value: str, *, is_terminal: bool, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR is heeded, and a pipe gets none."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    text = drawn(REPORT, Terminal(is_terminal=is_terminal))
    assert ("\x1b" in text) is is_coloured
    assert is_terminal or max(map(len, text.splitlines())) <= WIDTH
    assert not any(line.endswith(" ") for line in str(REPORT).splitlines())


def test_hostile_text_is_text_and_what_is_to_be_copied_stays_whole() -> None:
    """No markup, link or escape of a log is obeyed; a command or a long word is never broken."""
    hostile = "[bold red]x[/] [link=http://evil]y[/link] :smile: \x1b[2J\x07\r\x9b"
    for part in (Line(hostile), Whole(hostile), hostile, Table("w", [[hostile]], [hostile], repeated=0)):
        text = drawn(Report([part]))
        assert text.count("[bold red]x[/] [link=http://evil]y[/link] :smile: ?[2J???") == (2 if isinstance(part, Table) else 1)
    word = "x" * 300
    assert str(Report([Whole(LONG.strip())])) == LONG.strip()
    assert str(Report([Line(f"see {word} there", 4)])).splitlines() == ["see", f"    {word}", "    there"]


def test_columns_that_find_no_room_go_on_below() -> None:
    """The first column stands beside each part, and no cell is lost."""
    rows = [[f"row{number}", *(f"{number}.{column}" for column in range(40))] for number in range(3)]
    text = str(Report([Table("lr", rows, ["", *map(str, range(40))])]))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("row2") > 1
    assert all(cell in text.split() for row in rows for cell in row)


def test_progress_says_how_much_is_done_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is gone at the end, also after an interruption."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(terminal, "AFTER_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")

    def interrupted() -> None:
        with terminal.bar("replaying [x]", "requests") as draw:
            draw(0, 4000)
            draw(1000, 4000)
            draw(3000, 4000)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", made.getvalue())
    assert "replaying [x]" in plain
    assert "1000/4000 requests" in plain
    assert re.search(r"3000/4000 requests +\d:\d\d:\d\d", plain)
    assert made.getvalue().rstrip("\r\n").endswith("\x1b[2K")


@pytest.mark.parametrize(("is_terminal", "after_s"), [(False, 0.0), (True, 60.0)])
def test_no_progress_where_nobody_looks_or_waits(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, after_s: float) -> None:
    """In a file or a pipe, and for what is quick."""
    made = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(terminal, "AFTER_S", after_s)
    with terminal.bar("replaying", "requests") as draw:
        draw(1, 2)
    assert made.getvalue() == ""

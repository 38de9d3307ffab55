"""Lines to standard output: in order, and never in the way of the watching."""

from __future__ import annotations

import os
import time
from pathlib import Path

from plimsoll.guard.daemon.run import MOST_WAITING, LineWriter


def test_lines_come_out_in_order(tmp_path: Path) -> None:
    """All of them, each on its own line."""
    path = tmp_path / "out"
    with path.open("wb") as file:
        out = LineWriter(file.fileno())
        for number in range(1_000):
            out.say(str(number))
        out.close()
    assert path.read_text(encoding="utf-8").split() == [str(number) for number in range(1_000)]


def test_a_reader_that_stands_still_holds_nothing_up() -> None:
    """What cannot be written is counted and dropped, and the end does not wait for it."""
    reading, writing = os.pipe()
    out = LineWriter(writing)
    begun = time.monotonic()
    for _ in range(3 * MOST_WAITING):
        out.say("x" * 100)
    assert out.dropped > MOST_WAITING
    assert out.trouble == "its reader does not read"
    out.close(0.1)
    assert time.monotonic() - begun < 5.0
    os.close(reading)
    for _ in range(500):
        if out.is_gone:
            break
        time.sleep(0.01)
    assert out.is_gone, "whoever read has gone"
    os.close(writing)


def test_a_full_disk_is_no_end() -> None:
    """The watching goes on, and the trouble is known."""
    with Path("/dev/full").open("wb") as full:
        out = LineWriter(full.fileno())
        out.say("x")
        out.say("y")
        out.close()
    assert (out.trouble, out.dropped, out.is_gone) == ("No space left on device", 2, False)


def test_a_reader_that_reads_again_ends_the_trouble() -> None:
    """Once what waited is on its way, no line is lost any more, and the trouble is over; what was lost stays counted."""
    reading, writing = os.pipe()
    out = LineWriter(writing)
    while not out.dropped:
        out.say("x" * 100)
    assert out.trouble
    end = time.monotonic() + 20
    while out.trouble and time.monotonic() < end:
        os.read(reading, 65_536)
    assert (out.trouble, out.dropped) == ("", 1)
    os.close(reading)
    os.close(writing)

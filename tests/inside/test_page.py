"""Numbers that processes share: no half-written set is ever read, and the lock is a real one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from plimsoll.inside.shared import LONGEST_WAIT_S, SharedPage
from tests.inside.gate_processes import PAIR, half_way, writer

SPAWN = multiprocessing.get_context("spawn")


def test_numbers_are_kept_and_start_at_nothing(tmp_path: Path) -> None:
    """Negative and large ones too; a second look at the file sees them; nobody else may read it."""
    page = SharedPage(PAIR, str(tmp_path / "a.page"))
    assert [page[name] for name in PAIR] == [0, 0, 0]
    page["first"], page["second"] = -(2**62), 2**62
    assert page.add("third", 5) == 5
    other = SharedPage(PAIR, page.path, makes=False)
    assert other.together(PAIR) == [-(2**62), 2**62, 5]
    assert (tmp_path / "a.page").stat().st_mode & 0o777 == 0o600


def test_a_reader_never_sees_a_change_half_done(tmp_path: Path) -> None:
    """Also when the writer loses its turn in the middle of it."""
    path = str(tmp_path / "a.page")
    page, (here, there) = SharedPage(PAIR, path), SPAWN.Pipe()
    process = SPAWN.Process(target=writer, args=(path, 1.0, there))
    process.start()
    seen: set[int] = set()
    while not here.poll():
        first, second, third = page.together(PAIR)
        assert (second, third) == (-first, first * 7)
        seen.add(first)
    assert here.recv() >= 50
    assert len(seen) > 1
    process.join()


def test_a_writer_that_was_killed_half_way_blocks_nobody(tmp_path: Path) -> None:
    """Its lock goes with it, and the next change makes the page whole."""
    path = str(tmp_path / "a.page")
    page, (here, there) = SharedPage(PAIR, path), SPAWN.Pipe()
    page["first"] = 5
    assert page.together(PAIR) == [5, 0, 0]
    process = SPAWN.Process(target=half_way, args=(path, there))
    process.start()
    assert here.recv() == "inside"
    began = time.monotonic()
    assert page.together(PAIR) == [5, 0, 0], "what was there before"
    assert SharedPage(PAIR, path).together(PAIR) == [0, 0, 0], "one who never saw a whole set has none"
    assert time.monotonic() - began < LONGEST_WAIT_S + 20, "a writer that is stopped must not stop its readers"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert page.together(PAIR)[0] == 99
    with page.changing():
        page["first"] = 1
        assert page.together(PAIR)[0] == 1, "who is inside reads without waiting"
    assert page.together(PAIR) == [1, 0, 0]


def test_the_lock_survives_an_exception(tmp_path: Path) -> None:
    """What raises inside lets go, and readers go on; a page without a file is this process's own, the same in all else."""
    page = SharedPage(PAIR, str(tmp_path / "a.page"))
    with pytest.raises(KeyError), page.changing():
        raise KeyError
    other = SharedPage(PAIR, page.path)
    with other.changing():
        other["first"] = 4
    assert page.together(("first",)) == [4]
    page = SharedPage(PAIR)
    with page.changing():
        page["second"] = 3
    assert page.together(PAIR) == [0, 3, 0]
    page.close()
    with pytest.raises(ValueError, match="released"):
        page["second"]


def test_what_is_no_page_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    """A link, a pipe, a folder, nothing at all, a file that is not finished: an OSError, no open file, none made."""
    (tmp_path / "real").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_bytes(b"")
    gc.collect()  # pages of other tests that are still open must not close in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("link", "pipe", "folder", "nothing", "short"):
        with pytest.raises(OSError):  # noqa: PT011 - whichever the kernel has for it
            SharedPage(PAIR, str(tmp_path / name), makes=False)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not (tmp_path / "nothing").exists()


def test_a_writer_that_was_stopped_inside_does_not_stop_the_next_one(tmp_path: Path) -> None:
    """Whoever wants to write runs in a server's event loop: after a moment it gives up with an error."""
    path = str(tmp_path / "a.page")
    page, inside = SharedPage(PAIR, path), SharedPage(PAIR, path)
    with inside.changing():
        for patience_s in (0.0, 0.05):
            began = time.monotonic()
            with pytest.raises(TimeoutError), page.changing(patience_s):
                raise AssertionError
            assert patience_s <= time.monotonic() - began < 5
    with page.changing(patience_s=0.0):
        page["first"] = 2
    assert inside.together(("first",)) == [2]

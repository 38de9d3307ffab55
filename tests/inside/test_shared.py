"""What several API servers share: counts add up, the dead are left out, one drain for all."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.admission import Drain
from plimsoll.inside.places import start_ticks
from plimsoll.inside.shared import LONGEST_WAIT_S, Shared, SharedPage
from tests.fakes import eventually
from tests.inside.gate_processes import PAIR, api_server, half_way, writer

SPAWN = multiprocessing.get_context("spawn")


def _started(target: Any, *args: Any) -> tuple[Any, Any]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, there), daemon=True)
    process.start()
    return process, here


def test_counts_of_several_processes_add_up_and_the_dead_are_left_out(tmp_path: Path) -> None:
    """One killed and one ended in order both go; the lowest of those that live speaks for all."""
    folder, key = str(tmp_path), os.getpid()
    own = Shared(folder, key, fellows_expected=True)
    own.own["in_flight"] = 1
    (first, to_first), (second, to_second) = _started(api_server, folder, key, 10), _started(api_server, folder, key, 100)
    pids = {to_first.recv(), to_second.recv(), os.getpid()}
    own.pages(look=True)
    assert own.total("in_flight") == 111
    assert own.latest("in_flight") == 100
    to_second.send("total")
    total, second_is_first = to_second.recv()
    assert total == 111
    assert second_is_first == (second.pid == min(pids))
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    own.pages(look=True)
    assert own.total("in_flight") == 101
    to_second.send("close")
    second.join()
    assert own.pages(look=True) == [own.own]
    assert own.is_first
    own.close()
    assert not list(tmp_path.glob(f"*{os.getpid()}-{os.getpid()}.page"))


numbers = st.floats(0, 1e6)


@given(
    drain=st.builds(
        Drain, st.integers(0, 2**62), st.floats(1, 1e6), numbers, numbers, numbers, st.booleans(), st.integers(0, 3600)
    )
)
def test_a_drain_comes_back_as_it_was_written(drain: Drain) -> None:
    """To the nanosecond."""
    shared = Shared(None, os.getpid(), fellows_expected=False)
    with shared.common.changing():
        shared.set_drain(drain)
        inside = shared.drain()
    found = shared.drain()
    assert inside == found
    assert (found.epoch, found.is_refusing, found.retry_after_s) == (drain.epoch, drain.is_refusing, drain.retry_after_s)
    for one, other in zip(found[1:5], drain[1:5], strict=True):
        assert abs(one - other) < 1e-6


def test_pages_and_reports_of_servers_that_are_gone_are_swept_and_others_stay(tmp_path: Path) -> None:
    """Also when the number was given to another process; what is not ours is left alone."""
    process = SPAWN.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    me, ticks = os.getpid(), start_ticks(os.getpid())
    gone = [
        f"gate-{process.pid}-5.page", f"api-{me}-{ticks + 1}-77.page", f"api-{process.pid}-5-6.page",
        f"worker-{process.pid}-5.json",
    ]  # fmt: skip
    kept = [
        f"gate-{os.getppid()}-{start_ticks(os.getppid())}.page", "notes.page", "gate-x-y.page", "worker-1.json",
        "gate-1.page",
    ]  # fmt: skip
    for name in gone + kept:
        (tmp_path / name).write_bytes(b"")
    Shared(str(tmp_path), me, fellows_expected=False).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left.isdisjoint(gone)
    assert left >= set(kept)


def test_rubbish_in_the_folder_is_no_fellow(tmp_path: Path) -> None:
    """A half-made page, a pipe and a link are passed over, again and again, and nothing is left open."""
    shared = Shared(str(tmp_path), os.getpid(), fellows_expected=True)
    stem = f"api-{os.getpid()}-{start_ticks(os.getpid())}-"
    (tmp_path / f"{stem}1.page").write_bytes(b"")
    os.mkfifo(tmp_path / f"{stem}2.page")
    (tmp_path / f"{stem}3.page").symlink_to("/dev/zero")
    (tmp_path / f"{stem}4.page").mkdir()
    shared.pages(look=True)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        assert shared.pages(look=True) == [shared.own]
    assert shared.is_first
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_page_that_was_just_made_does_not_take_the_word(tmp_path: Path) -> None:
    """Whole but not signed yet: it counts nothing and is not first."""
    shared = Shared(str(tmp_path), os.getpid(), fellows_expected=True)
    name = f"api-{os.getpid()}-{start_ticks(os.getpid())}-999999.page"
    (tmp_path / name).write_bytes(b"\0" * 4096)
    assert len(shared.pages(look=True)) == 2
    assert shared.is_first
    (tmp_path / name).unlink()
    eventually(lambda: shared.pages(look=True) == [shared.own])


# Numbers that processes share: no half-written set is ever read, and the lock is a real one.
def test_numbers_are_kept_and_start_at_nothing(tmp_path: Path) -> None:
    """Negative and large ones too; a second look at the file sees them; nobody else may read it."""
    page = SharedPage(PAIR, str(tmp_path / "a.page"))
    assert [page[name] for name in PAIR] == [0, 0, 0]
    page["first"], page["second"] = -(2**62), 2**62
    assert page.add("third", 5) == 5
    assert SharedPage(PAIR, page.path, makes=False).together(PAIR) == [-(2**62), 2**62, 5]
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
            assert patience_s <= time.monotonic() - began < 60
    with page.changing(patience_s=0.0):
        page["first"] = 2
    assert inside.together(("first",)) == [2]

"""Processes: from a table of them, from the real /proc and from a made-up one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.guard.daemon.host import tree
from plimsoll.hardware.processes import Process, boot_mark, family, marks, parse_stat, read_process, read_processes

TAIL = " ".join(["0"] * 14)


def table(*processes: Process) -> dict[int, Process]:
    return {process.pid: process for process in processes}


def process(pid: int, parent: int, session: int, state: str = "S", start: int | None = None) -> Process:
    """One that started when its number says, unless told."""
    return Process(pid, parent, session, state, pid * 10 if start is None else start)


def test_a_line_of_proc() -> None:
    """Fields are counted from the last bracket: a process may call itself anything."""
    text = f"123 (evil) S 7 1) R 45 123 99 0 -1 {TAIL} 777 1 2 3"
    fields = text.rpartition(")")[2].split()
    assert parse_stat(text) == Process(123, 45, 99, "R", int(fields[19]))


@given(st.text(max_size=200))
@example("1 (a) S").via("too short")
@example(f"1 (a) S x 2 3 {TAIL} 5 5 5").via("a word for a number")
@example(f"1 (a) SS 1 2 3 {TAIL} 5 5").via("a state of two letters")
def test_what_is_no_line_of_proc(text: str) -> None:
    """None, never an exception."""
    assert parse_stat(text) is None


def test_children_and_sessions_belong_to_it() -> None:
    """Also when their leader is gone; not a zombie, guard itself, pid 1, or a number that is somebody else's now."""
    all_of_it = table(
        process(100, 1, 100), process(101, 100, 100), process(102, 101, 102), process(103, 1, 102),  # an orphan of 102
        process(200, 1, 200), process(201, 200, 200),
    )  # fmt: skip
    assert [one.pid for one in family(all_of_it, [(100, 1000)])] == [100, 101, 102, 103]
    orphans = table(process(101, 1, 100), process(50, 1, 50))
    assert [one.pid for one in family(orphans, [], [(100, 1000)])] == [101]
    assert family({**orphans, 100: process(100, 1, 100, start=9999)}, [(100, 1000)], [(100, 1000)]) == []
    some = table(process(1, 0, 1), process(100, 1, 100), process(101, 100, 100, "Z"), process(102, 100, 100))
    assert [one.pid for one in family(some, [(100, 1000), (1, 10)], [(1, 10)], spare={102})] == [100]
    assert marks(some.values()) == {(1, 10), (100, 1000), (101, 1010), (102, 1020)}


def test_this_process_and_its_child_and_a_proc_that_is_odd(tmp_path: Path) -> None:
    """Both are there, related as they are, one that is gone is not; of what is no /proc nothing is read or raised."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        table = read_processes()
        assert table[os.getpid()].is_alive
        assert (table[child.pid].parent, table[child.pid].session) == (os.getpid(), child.pid)
        child.kill()
    assert read_process(child.pid) is None
    assert read_processes(tmp_path / "none") == {}
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "stat").write_bytes(b"\xff\x00 nonsense")
    assert read_processes(tmp_path) == {}
    assert boot_mark(tmp_path) == ""


def test_all_that_a_process_started() -> None:
    """Children and theirs, nobody else; numbers that changed hands while they were read do not lead in a circle."""
    parents = {10: 1, 11: 10, 12: 11, 20: 1, 31: 32, 32: 31}
    table = {pid: Process(pid, parent, pid, "S", 5) for pid, parent in parents.items()}
    assert sorted(tree(table, 10)) == [10, 11, 12]
    assert tree(table, 99) == (99,)
    assert set(tree(table, 31)) == {31, 32}

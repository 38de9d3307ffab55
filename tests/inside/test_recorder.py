"""The recorder: never in the way, never out of bounds, nothing lost at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.inside import recorder as recorder_module
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.recorder import QUEUE_REQUESTS, QUEUE_TOKENS, Finished, Recorder, Seen, iter_hashes
from plimsoll.inside.settings import InsideSettings

ONE = Finished(1_700_000_000.0, 1_700_000_001.0, 40, 5, "stop", engine=0)


def recorder(folder: Path, **more: str) -> Recorder:
    """One that writes there, with these settings."""
    return Recorder(InsideSettings({"PLIMSOLL_RECORD": str(folder), "PLIMSOLL_DIR": str(folder / "run"), **more}))


def rows(folder: Path) -> list[dict[str, Any]]:
    """All lines that were written."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_nothing_is_recorded_unless_a_folder_is_named() -> None:
    """Being installed starts no thread and opens no file."""
    off = Recorder(InsideSettings({}))
    off.note_finished(ONE)
    off.close()
    assert off._thread is None
    assert off.state() == {
        "is_on": False, "folder": None, "file": None, "written": 0, "waiting": 0, "dropped": 0, "prefixes": False,
    }  # fmt: skip
    assert recorder_module.RECORDER.is_on is False


def test_each_request_is_a_line_within_a_second(tmp_path: Path) -> None:
    """In the order they finished, without waiting for the end."""
    one = recorder(tmp_path)
    for number in range(100):
        one.note_finished(replace(ONE, prompt_tokens=number))
    deadline_s = time.monotonic() + 5
    while len(rows(tmp_path)) < 100 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [row["prompt_tokens"] for row in rows(tmp_path)] == list(range(100))
    one.note_finished(ONE)
    one.close()
    assert len(rows(tmp_path)) == 101
    assert (one.state()["written"], one.state()["waiting"], one.state()["dropped"]) == (101, 0, 0)


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    """While the writer cannot write, requests wait up to a bound; the event loop is never held up."""
    (tmp_path / "file").write_bytes(b"")
    one = recorder(tmp_path / "file")
    one.note_finished(ONE)
    time.sleep(0.2)  # the writer has failed once and rests
    began_s = time.monotonic()
    for _ in range(QUEUE_REQUESTS + 50):
        one.note_finished(ONE)
    assert time.monotonic() - began_s < 30
    assert one.dropped == 50
    assert FAULTS.counts["writing the recording"] >= 1
    one.close(limit_s=10)


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    """A folder that is not there yet, as a volume that is mounted late: nothing is lost, nothing is there twice."""
    blocker = tmp_path / "late"
    blocker.write_bytes(b"")
    one = recorder(blocker)
    for number in range(5):
        one.note_finished(replace(ONE, prompt_tokens=number))
    time.sleep(0.2)
    blocker.unlink()
    one.close(limit_s=10)
    assert [row["prompt_tokens"] for row in rows(blocker)] == list(range(5))


def test_a_request_that_makes_no_line_does_not_stop_the_others(tmp_path: Path) -> None:
    """A clock out of range is counted and left out."""
    one = recorder(tmp_path)
    one.note_finished(replace(ONE, arrival=float("nan")))
    one.note_finished(ONE)
    one.close(limit_s=10)
    assert len(rows(tmp_path)) == 1
    assert one.dropped == 1


def test_hashes_are_there_only_when_asked_for(tmp_path: Path) -> None:
    """With them the line names their block size; the tokens themselves are never in it."""
    seen = Seen(7, list(range(40)), "seed", ())
    for folder, asked in ((tmp_path / "with", "1"), (tmp_path / "without", "")):
        one = recorder(folder, PLIMSOLL_RECORD_PREFIXES=asked, PLIMSOLL_RECORD_SALT="salt")
        one.note_finished(replace(ONE, seen=seen))
        one.close(limit_s=10)
    (row,) = rows(tmp_path / "with")
    assert (row["prefix_block"], row["priority"]) == (16, 7)
    assert row["prefix_hashes"] == list(iter_hashes(list(range(40)), b"salt", seed="seed"))
    (row,) = rows(tmp_path / "without")
    assert not {"prefix_block", "prefix_hashes", "token_ids"} & set(row)
    assert row["priority"] == 7


def test_prompts_that_wait_for_their_hashes_are_bounded(tmp_path: Path) -> None:
    """Beyond it a request is recorded without hashes rather than held in memory."""
    (tmp_path / "file").write_bytes(b"")
    one = recorder(tmp_path / "file", PLIMSOLL_RECORD_PREFIXES="1")
    one.note_finished(ONE)
    time.sleep(0.2)
    for _ in range(20):
        one.note_finished(replace(ONE, seen=Seen(0, range(QUEUE_TOKENS // 10), "", ())))
    held = sum(request.seen is not None and request.seen.token_ids is not None for request in one._queue)
    assert 10 <= held <= 12
    one._queue.clear()
    one.close(limit_s=10)


def test_prompts_that_were_hashed_make_room_for_others(tmp_path: Path) -> None:
    """The bound is on what waits, not on what has ever come."""
    one = recorder(tmp_path, PLIMSOLL_RECORD_PREFIXES="1")
    ids = range(QUEUE_TOKENS // 2 + 1000)
    for number in range(3):
        one.note_finished(replace(ONE, seen=Seen(0, ids, "", ())))
        deadline_s = time.monotonic() + 30
        while one.written <= number and time.monotonic() < deadline_s:
            time.sleep(0.01)
    one.close()
    assert [len(row["prefix_hashes"]) for row in rows(tmp_path)] == [len(ids) // 16] * 3


def test_prompts_that_make_no_line_make_room_too(tmp_path: Path) -> None:
    """A request whose clock is out of range gives back what it held of the bound: the next one has its hashes."""
    one = recorder(tmp_path, PLIMSOLL_RECORD_PREFIXES="1")
    broken = replace(ONE, arrival=float("nan"), seen=Seen(0, range(QUEUE_TOKENS), "", ()))
    for request in (broken, broken, replace(ONE, seen=Seen(0, range(32), "", ()))):
        one.note_finished(request)
        deadline_s = time.monotonic() + 30
        while one._queue and time.monotonic() < deadline_s:
            time.sleep(0.01)
    one.close(limit_s=10)
    (row,) = rows(tmp_path)
    assert (one.dropped, len(row["prefix_hashes"])) == (2, 2)


def test_a_long_prompt_lets_other_threads_have_their_turn(tmp_path: Path) -> None:
    """While a million tokens are hashed this thread is never held up for long: the event loop lives in one like it."""
    one = recorder(tmp_path, PLIMSOLL_RECORD_PREFIXES="1")
    one.note_finished(replace(ONE, seen=Seen(0, list(range(1_000_000)), "", ())))
    longest_s, before_s = 0.0, time.monotonic()
    while one.written == 0 and time.monotonic() - before_s < 30:
        at_s = time.monotonic()
        time.sleep(0.001)
        longest_s = max(longest_s, time.monotonic() - at_s)
    one.close()
    assert one.written == 1
    assert longest_s < 0.25


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """It has neither its parent's thread nor its lines, and each line is there once."""
    code = (
        "import os, sys\n"
        "from plimsoll.inside.recorder import Recorder\n"
        "from plimsoll.inside.settings import InsideSettings\n"
        "from plimsoll.inside.recorder import Finished\n"
        "one = Recorder(InsideSettings({'PLIMSOLL_RECORD': sys.argv[1]}))\n"
        "def note(n): one.note_finished(Finished(1.7e9, 1.7e9, n, 1, 'stop'))\n"
        "note(1)\n"
        "pid = os.fork()\n"
        "note(2 if pid else 3)\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=30)
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert sorted(row["prompt_tokens"] for row in rows(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_process_that_ends_writes_what_is_left(how: str, tmp_path: Path) -> None:
    """Also one that multiprocessing started, as it does several API servers; a forked one ends without atexit."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, time\n"
        "from plimsoll.inside.recorder import Finished\n"
        "def work(n):\n"
        "    from plimsoll.inside.recorder import RECORDER\n"
        "    RECORDER.note_finished(Finished(1.7e9, 1.7e9, n, 1, 'stop'))\n"
        "    time.sleep(0.2)  # written; the writer rests\n"
        "    RECORDER.note_finished(Finished(1.7e9, 1.7e9, n + 10, 1, 'stop'))\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context('{how}').Process(target=work, args=(2,))\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
        "    work(1)\n"
    )
    env = {**os.environ, "PLIMSOLL_RECORD": str(tmp_path / "record")}
    subprocess.run([sys.executable, str(program)], check=True, timeout=60, env=env)
    assert sorted(row["prompt_tokens"] for row in rows(tmp_path / "record")) == [1, 2, 11, 12]

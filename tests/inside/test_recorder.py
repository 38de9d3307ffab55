"""The recorder: never in the way, never out of bounds, nothing lost at the end."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside import recorder as recorder_module
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.recorder import (
    ON_REQUEST,
    QUEUE_REQUESTS,
    QUEUE_TOKENS,
    Finished,
    Recorder,
    RecordFiles,
    Seen,
    as_row,
    from_state,
    from_stats,
    iter_hashes,
)
from plimsoll.inside.settings import InsideSettings
from plimsoll.simulate.trace_files import SHAPES, json_columns
from tests.fakes import eventually
from tests.inside.vllm_shapes import RequestState, finished, request, request_stats

ONE = Finished(1_700_000_000.0, 1_700_000_001.0, 40, 5, "stop", engine=0)


def recorder(folder: Path, **more: str) -> Recorder:
    return Recorder(InsideSettings({"PLIMSOLL_RECORD": str(folder), "PLIMSOLL_DIR": str(folder / "run"), **more}))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_nothing_is_recorded_unless_a_folder_is_named() -> None:
    """Being installed starts no thread and opens no file."""
    off = Recorder(InsideSettings({}))
    off.note_finished(ONE)
    off.close()
    assert off._thread is None
    assert (off.is_on, off.written, off.dropped, off.wants_prefixes) == (False, 0, 0, False)
    assert recorder_module.RECORDER.is_on is False


def test_each_request_is_a_line_within_a_second(tmp_path: Path) -> None:
    """In the order they finished, without waiting for the end."""
    one = recorder(tmp_path)
    for number in range(100):
        one.note_finished(replace(ONE, prompt_tokens=number))
    eventually(lambda: len(rows(tmp_path)) >= 100, 5)
    assert [row["prompt_tokens"] for row in rows(tmp_path)] == list(range(100))
    one.note_finished(ONE)
    one.close()
    assert len(rows(tmp_path)) == 101
    assert (one.written, len(one._queue), one.dropped) == (101, 0, 0)


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
    assert 10 <= sum(each.seen is not None and each.seen.token_ids is not None for each in one._queue) <= 12
    one._queue.clear()
    one.close(limit_s=10)


def test_prompts_that_make_no_line_make_room_too(tmp_path: Path) -> None:
    """A request whose clock is out of range gives back what it held of the bound: the next one has its hashes."""
    one = recorder(tmp_path, PLIMSOLL_RECORD_PREFIXES="1")
    broken = replace(ONE, arrival=float("nan"), seen=Seen(0, range(QUEUE_TOKENS), "", ()))
    for each in (broken, broken, replace(ONE, seen=Seen(0, range(32), "", ()))):
        one.note_finished(each)
        eventually(lambda: not one._queue, 30)
    one.close(limit_s=10)
    (row,) = rows(tmp_path)
    assert (one.dropped, len(row["prefix_hashes"])) == (2, 2)


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_process_that_ends_writes_what_is_left(how: str, tmp_path: Path) -> None:
    """Also one that multiprocessing started, without atexit where it forks: with neither its parent's thread nor its lines."""
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
        "    work(1)\n"
        f"    child = multiprocessing.get_context('{how}').Process(target=work, args=(2,))\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
        "    work(3)\n"
    )
    env = {**os.environ, "PLIMSOLL_RECORD": str(tmp_path / "record")}
    subprocess.run([sys.executable, str(program)], check=True, timeout=60, env=env)
    assert sorted(row["prompt_tokens"] for row in rows(tmp_path / "record")) == [1, 2, 3, 11, 12, 13]
    assert len(list((tmp_path / "record").glob("*.jsonl"))) == 2


# The files of a recording: private, whole, bounded.

LINE = b"x" * 99 + b"\n"
STARTED = 1_700_000_000.0
STEM = f"requests-20231114T221320Z-{os.getpid()}"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_full_file_is_followed_by_the_next_and_the_oldest_go(tmp_path: Path) -> None:
    """No file is larger than its bound, no more are kept than were asked for, and folder and files are this user's alone."""
    folder = tmp_path / "new"
    files = RecordFiles(str(folder), 250, 3, STARTED)
    for _ in range(11):
        files.append(LINE)
    files.close()
    assert names(folder) == [f"{STEM}-0004.jsonl", f"{STEM}-0005.jsonl", f"{STEM}-0006.jsonl"]
    assert [file.stat().st_size for file in sorted(folder.iterdir())] == [200, 200, 100]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_only_files_named_like_ours_are_removed(tmp_path: Path) -> None:
    """An operator's own files in that folder stay, old as they may be; so does a link with a name like ours."""
    (tmp_path / "target").write_bytes(b"keep me")
    for name in ("requests.jsonl", "requests-2023.jsonl", "notes.txt", "requests-20200101T000000Z-1.jsonl.gz"):
        (tmp_path / name).write_bytes(b"keep me")
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "requests-20200101T000000Z-3.jsonl"
    link.symlink_to(tmp_path / "target")
    os.utime(link, (0, 0), follow_symlinks=False)
    old = tmp_path / "requests-20200101T000000Z-1.jsonl"
    old.write_bytes(LINE)
    os.utime(old, (1, 1))
    files = RecordFiles(str(tmp_path), 1000, 1, STARTED)
    files.append(LINE)
    files.close()
    assert not old.exists()
    assert len(names(tmp_path)) == 7


def test_no_file_is_written_over_and_none_without_a_name_is_written_to(tmp_path: Path) -> None:
    """A container starts with the same number each time; who cleans up by hand loses nothing; what another writes is left."""
    other, first = tmp_path / "requests-20231114T221320Z-1.jsonl", tmp_path / f"{STEM}.jsonl"
    for path in (other, first):
        path.write_bytes(LINE)
    files = RecordFiles(str(tmp_path), 1000, 8, STARTED)
    files.append(LINE)
    assert (first.read_bytes(), Path(files.path).name) == (LINE, f"{STEM}-0002.jsonl")
    Path(files.path).unlink()
    files.append(LINE)
    files.close()
    assert names(tmp_path) == [other.name, f"{STEM}-0003.jsonl", first.name]
    files = RecordFiles(str(tmp_path), 1000, 1, STARTED)
    files.append(LINE)
    files.close()
    assert names(tmp_path) == [other.name, f"{STEM}-0002.jsonl"]


def test_what_a_full_disk_cuts_off_is_taken_back(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: no half a line stays, and lines can follow later."""
    code = (
        "import resource, signal, sys\n"
        "from plimsoll.inside.recorder import RecordFiles\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "files = RecordFiles(sys.argv[1], 10_000, 8, 1.7e9)\n"
        "files.append(b'a' * 99 + b'\\n')\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))\n"
        "try:\n"
        "    files.append(b'b' * 99 + b'\\n')\n"
        "except OSError:\n"
        "    print('failed')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "files.append(b'c' * 99 + b'\\n')\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "failed\n"
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == b"a" * 99 + b"\n" + b"c" * 99 + b"\n"


# From vLLM's figures to a line of a recording: what was measured, in order, and no more.

AT = 1_700_000_000.0
ANY = st.floats() | st.floats(-10, 10)


def row(one: Finished | None) -> dict[str, object]:
    assert one is not None
    return as_row(one)


def test_a_finished_request_has_its_times_on_the_wall_clock() -> None:
    """Counted back from when its last output came; a lag of the API server's does not come before the first token: the engine
    took 1.5 s, all of it was there after 2 s, and the first token after 0.6 s."""
    assert row(from_stats(finished(), AT, 3)) == {
        "schema": "plimsoll.request/1", "arrival": AT - 2.0, "prompt_tokens": 100, "output_tokens": 20,
        "finish_reason": "length", "cached_tokens": 64, "preemptions": 1, "max_tokens": 20, "engine": 3,
        "scheduled": AT - 1.5, "first_token": AT - 1.0, "finished": AT,
    }  # fmt: skip
    said = row(from_stats(finished(**{ON_REQUEST: Seen(None, None, "", (), first_token_s=0.6)}), AT, 0))
    assert (said["first_token"], said["finished"]) == (AT - 1.4, AT)
    assert said["scheduled"] == pytest.approx(AT - 1.9)


def test_what_was_not_measured_is_left_out() -> None:
    """Cached tokens before 0.13, preemptions before 0.30, all but the two ends of a request that was never scheduled."""
    old = finished(max_tokens_param=None)
    del old.num_cached_tokens, old.num_preemptions
    assert not {"cached_tokens", "preemptions", "max_tokens", "priority"} & set(row(from_stats(old, AT, 0)))
    never = finished(finish_reason="abort", num_generation_tokens=0, inference_time=300_000.0, decode_time=0.0)
    said = row(from_stats(never, AT, 0))
    assert not {"scheduled", "first_token", "cached_tokens"} & set(said)
    assert (said["arrival"], said["finished"]) == (AT - 2.0, AT)


def test_a_request_that_was_given_up_says_what_was_measured_until_then() -> None:
    """In its middle the first token on the API server's clock; while it waited only its ends; without an arrival no line."""
    said = row(from_state(RequestState(request("a", [1] * 30)), AT + 3.0))
    assert (said["arrival"], said["first_token"], said["finished"]) == (AT, AT + 1.0, AT + 3.0)
    assert said["scheduled"] == pytest.approx(AT + 0.6)
    assert (said["prompt_tokens"], said["output_tokens"], said["finish_reason"]) == (30, 9, "abort")
    state = RequestState(request("a", [1] * 30))
    state.stats = request_stats(num_generation_tokens=0, scheduled_ts=0.0, first_token_ts=0.0, first_token_latency=0.0)
    assert set(row(from_state(state, AT + 3.0))) == {
        "schema", "arrival", "prompt_tokens", "output_tokens", "finish_reason", "max_tokens", "finished",
    }  # fmt: skip
    state = RequestState(request("a", [1]))
    state.stats = None
    assert from_state(state, AT) is None


@given(ANY, ANY, ANY, st.integers(-5, 2**40) | st.none(), st.integers(-5, 2**40), ANY | st.none())
def test_any_figures_make_a_line_that_the_reader_accepts_or_none(
    e2e: float, inference: float, decode: float, prompt: int | None, output: int, first: float | None
) -> None:
    """Times that contradict each other are moved or left out, never written out of order."""
    stats = finished(
        e2e_latency=e2e,
        inference_time=inference,
        decode_time=decode,
        num_prompt_tokens=prompt,
        num_generation_tokens=output,
        **{ON_REQUEST: Seen(None, None, "", (), first)},
    )
    try:
        line = json.dumps(as_row(from_stats(stats, AT, 0)), allow_nan=False)
    except ValueError:
        assert not e2e < 1e9
        return
    json_columns(SHAPES[0], [line], 0)


# Hashes of a prompt's blocks: what begins alike looks alike, and nothing else does.

IDS = st.lists(st.integers(-1, 300_000), max_size=200)


def _hashes(*arguments: Any, **named: Any) -> list[str]:
    return list(iter_hashes(*arguments, **named))


@given(IDS, IDS, st.integers(1, 20))
def test_two_prompts_share_hashes_exactly_as_far_as_their_blocks_are_equal(one: list[int], two: list[int], block: int) -> None:
    """Sixteen hex digits for each full block; from the first block that differs on, all hashes differ."""
    two = one[: len(one) // 2] + two
    first, second = _hashes(one, b"salt", block), _hashes(two, b"salt", block)
    assert len(first) == len(one) // block
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in first)
    for at, (left, right) in enumerate(zip(first, second, strict=False)):
        assert (left == right) == (one[: (at + 1) * block] == two[: (at + 1) * block])


def test_what_the_cache_does_not_share_has_other_hashes() -> None:
    """Another salt, adapter or picture from its block on; without the key no hash follows from the one before it."""
    assert not set(_hashes(list(range(64)), b"a")) & set(_hashes(list(range(64)), b"b"))
    ids = list(range(32))
    whole = _hashes(ids, b"key one")
    assert whole[1] not in _hashes([*ids[16:]], bytes.fromhex(whole[0]))
    ids = list(range(32))
    assert not set(_hashes(ids, b"k", seed="adapter")) & set(_hashes(ids, b"k"))
    ids = [7] * 64
    cat, dog, none = (_hashes(ids, b"k", marks=marks) for marks in (((20, "cat"),), ((20, "dog"),), ()))
    assert cat[0] == dog[0] == none[0]
    assert len({cat[1], dog[1], none[1]}) == 3
    assert not set(cat[1:]) & set(dog[1:])

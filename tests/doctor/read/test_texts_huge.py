"""Huge and packed texts: the end, the start and what is telling in between, with exact numbers, in bounded memory."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from plimsoll.doctor.read import text
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.log_text import LONGEST, Log
from plimsoll.errors import BadInput, TimedOut
from plimsoll.net import inputs

PERIODIC = "INFO 11-15 08:00:00 [loggers.py:1] Avg prompt throughput: 1.0 tokens/s"


def written(path: Path, lines: Iterator[str] | list[str]) -> list[str]:
    """The lines, written to this path."""
    kept = list(lines)
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return kept


def quiet(count: int) -> list[str]:
    """Lines that say nothing, of 120 bytes."""
    return [f"request {n:09d} ".ljust(119, ".") for n in range(count)]


def assert_numbers_are_right(log: Log, lines: list[str]) -> None:
    """Every line that was kept has the number it has in the file, and the gaps add up."""
    for line in log.lines:
        assert line.number is not None
        assert line.text in lines[line.number - 1]
    left_out = sum(count for _, count in log.skipped)
    assert left_out + len({line.number for line in log.lines}) == len(lines)
    for index, count in log.skipped:
        before = log.lines[index - 1].number or 0
        assert log.lines[index].number == before + count + 1


def test_what_is_kept_of_a_huge_file(tmp_path: Path) -> None:
    """Start, end, the lines around a failure in the middle, and a sample of the periodic lines."""
    lines = quiet(300_000)
    lines[150_000] = "torch.OutOfMemoryError: CUDA out of memory."
    for at in range(60_000, 240_000, 10):
        lines[at + 3] = PERIODIC
    written(tmp_path / "a.log", lines)
    log = read_log(str(tmp_path / "a.log"))
    assert_numbers_are_right(log, lines)
    numbers = {line.number for line in log.lines}
    assert {1, 2, 10_000, 299_999, 300_000} <= numbers
    assert set(range(150_001 - 115, 150_001 + 55)) <= numbers, "the lines before and after a failure are kept with it"
    sampled = [line.number or 0 for line in log.lines if "Avg prompt throughput" in line.text]
    inside = [number for number in sampled if 60_000 < number < 240_000]
    assert 500 < len(sampled) <= 2_600
    assert max(b - a for a, b in pairwise(inside)) < 3_000, "the sample is even"
    assert len(log.lines) < 80_000
    assert log.size_bytes == (tmp_path / "a.log").stat().st_size


def test_a_storm_keeps_its_first_and_last_places(tmp_path: Path) -> None:
    """A file of errors costs no more than one without: the first and the last of the middle, not all."""
    lines = [f"ERROR 11-15 08:00:00 [a.py:1] {n:09d} ".ljust(119, ".") for n in range(300_000)]
    lines[100_000] = "NVRM: Xid (PCI:0000:01:00): 79, rare among the errors"
    written(tmp_path / "a.log", lines)
    log = read_log(str(tmp_path / "a.log"))
    assert_numbers_are_right(log, lines)
    assert 100_001 in {line.number for line in log.lines}
    assert len(log.lines) < 70_000


def test_places_across_the_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that lies across two blocks is found wherever the border falls, and its number is right."""
    for name in ("HEAD_BYTES", "BYTES_BEFORE", "BYTES_AFTER", "BLOCK_BYTES", "TAIL_BYTES", "WHOLE_BYTES"):
        monkeypatch.setattr(text, name, 8 << 10 if name == "WHOLE_BYTES" else 1 << 10)
    for at in range(100, 250):
        lines = [f"{n:04d}".ljust(37, ".") for n in range(400)]
        lines[at] = "x" * (at % 41) + " Segmentation fault"
        written(tmp_path / "a.log", lines)
        log = read_log(str(tmp_path / "a.log"))
        assert_numbers_are_right(log, lines)
        assert at + 1 in {line.number for line in log.lines}


@pytest.mark.parametrize("how", ["gzip", "members", "pipe", "utf-16", "short lines"])
def test_streams_are_sifted_alike(tmp_path: Path, how: str) -> None:
    """A packed or piped text of any length keeps its start, end and failures, with the same numbers."""
    lines = ["x"] * 400_000 if how == "short lines" else quiet(120_000)
    at = len(lines) // 2
    lines[at] = "RuntimeError: died unexpectedly"
    data = ("\n".join(lines) + "\n").encode()
    path = tmp_path / "a"
    if how == "pipe":
        os.mkfifo(path)
        thread = threading.Thread(target=lambda: path.write_bytes(data))
        thread.start()
        log = read_log(str(path))
        thread.join()
    else:
        half = len(data) // 2
        packed = {
            "gzip": lambda: gzip.compress(data, 1),
            "members": lambda: gzip.compress(data[:half], 1) + gzip.compress(data[half:], 1) + b"\0" * 512,
            "utf-16": lambda: data.decode().encode("utf-16"),
            "short lines": lambda: data,
        }
        path.write_bytes(packed[how]())
        log = read_log(str(path))
    assert_numbers_are_right(log, lines)
    assert {1, at + 1, len(lines)} <= {line.number for line in log.lines}
    assert log.skipped


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (os.urandom(100_000), "not text"),
        (b"\0" * 100_000, "not text"),
        (b"\x7fELF\x02\x01\x01" + bytes(range(32)) * 100, "not text"),
        (gzip.compress(b"\0" * 100_000), "not text"),
        (gzip.compress(os.urandom(100_000)), "not text"),
        (b"BZh91AY" + os.urandom(100), "bzip2"),
        (b"PK\x03\x04" + os.urandom(100), "zip"),
        (gzip.compress(gzip.compress(gzip.compress(gzip.compress(b"deep")))), "unpack it first"),
        (b"a.log".ljust(257, b"\0") + b"ustar\x0000" + b"\0" * 500, "tar archive"),
    ],
    ids="random zeros program packed-zeros packed-random bzip2 zip packed-often tar".split(),
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    """Bytes that nobody logged are named as such."""
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(BadInput, match=says) as refused:
        read_log(str(tmp_path / "a"))
    assert "\n" not in str(refused.value)


def test_huge_files_that_are_no_text_are_refused_without_reading_them(tmp_path: Path) -> None:
    """A sparse file of 5 GB and random bytes are known by a look at a few places; one with text at its end is read."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(BadInput, match="not text"):
        read_log(str(path))
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"after log rotation\nRuntimeError: x\n")
    assert [(line.number, line.text) for line in read_log(str(path)).lines] == [
        (1, "after log rotation"),
        (2, "RuntimeError: x"),
    ]
    (tmp_path / "random").write_bytes(os.urandom(9 << 20))
    with pytest.raises(BadInput, match="not text"):
        read_log(str(tmp_path / "random"))


def test_time_running_out_in_the_middle_keeps_the_ends(tmp_path: Path) -> None:
    """The tail was read first: it is there, without numbers, and the gap says that its size is not known."""
    lines = written(tmp_path / "a.log", quiet(300_000))
    ticks = iter(range(1000))
    log = read_log(str(tmp_path / "a.log"), deadline=5, clock=lambda: float(next(ticks)))
    assert log.lines[0].number == 1
    assert (log.lines[-1].number, log.lines[-1].text) == (None, lines[-1])
    assert log.skipped[-1][1] == 0


def test_little_that_unpacks_to_much_stops_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed data is cut by time and by size as it unpacks, not when all of it is unpacked."""
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a line\n" * 6_000_000, 1))
    ticks = iter(range(1000))
    log = read_log(str(path), deadline=9, clock=lambda: float(next(ticks)))
    assert log.skipped[-1] == (len(log.lines), 0)
    assert (log.lines[-1].number or 0) < 3_000_000
    monkeypatch.setattr(inputs, "UNPACKED_MAX_BYTES", 2 << 20)
    log = read_log(str(path))
    assert log.skipped[-1] == (len(log.lines), 0)
    assert (log.lines[-1].number or 0) < 600_000


def test_a_pipe_that_never_ends_gives_what_came(tmp_path: Path) -> None:
    """At the deadline reading stops: with lines they are used, without any it timed out."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(TimedOut, match="nothing came in time"):
        read_log(str(fifo), deadline=time.monotonic() + 0.2)
    with os.fdopen(os.open(fifo, os.O_RDWR), "wb", buffering=0) as out:
        out.write(b"one\ntwo\n")
        log = read_log(str(fifo), deadline=time.monotonic() + 0.3)
    assert [line.text for line in log.lines] == ["one", "two"]
    assert log.skipped == ((2, 0),)
    assert log.size_bytes is None
    thread = threading.Thread(target=lambda: fifo.write_bytes(b"three\n"))
    thread.start()
    assert [line.text for line in read_log(str(fifo), deadline=time.monotonic() + 20).lines] == ["three"]
    thread.join()


@pytest.mark.parametrize("size", [1 << 20, 12 << 20])
def test_one_endless_line_is_one_line(tmp_path: Path, size: int) -> None:
    """Without a single line end nothing is read twice under another number."""
    (tmp_path / "a.log").write_bytes(b"a" * size)
    log = read_log(str(tmp_path / "a.log"))
    assert {line.number for line in log.lines} == {1}
    assert all(len(line.text) <= LONGEST for line in log.lines)


@pytest.mark.parametrize("name", ["missing", ".", "socket\0name", "/dev/zero"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    """A missing file, a folder, an impossible name and a device are refused and never opened."""
    with pytest.raises(BadInput) as refused:
        read_log(str(tmp_path / name))
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process its own peak")
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Reading 120 MB of hostile lines in a process of its own stays under 150 MB."""
    path = tmp_path / "a.log"
    block = (b"ERROR " + b"x" * 90 + b"\n") * 5_000 + b"\n" * 20_000 + "█".encode() * 20_000 + b"\n"
    with path.open("wb") as file:
        for _ in range(120_000_000 // len(block)):
            file.write(block)
    code = (
        "import sys; from plimsoll.doctor.read.text import read_log; log = read_log(sys.argv[1]);"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], len(log.lines))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    peak_kb, count = map(int, done.stdout.split())
    assert peak_kb < 150 << 10
    assert count > 1_000

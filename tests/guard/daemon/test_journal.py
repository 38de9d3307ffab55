"""The journal on a real disk: cut anywhere, changed anywhere, killed anywhere, full, shared; what it says stays true."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.journal_entry import BEGUN, CLOSED, INTENT, OPENED, SWITCH
from plimsoll.guard.daemon.journal import (
    ABSENT,
    DAMAGED,
    OLD_KEPT,
    TORN,
    UNREADABLE,
    Journal,
    JournalBusy,
    JournalFailed,
    beside,
    read_history,
    read_journal,
)

WRITER = """
import sys
from pathlib import Path
from plimsoll.guard.daemon.journal import Journal
with Journal(Path(sys.argv[1]), rotate_bytes=int(sys.argv[2])) as journal:
    for number in range(int(sys.argv[3])):
        journal.append("intent", engine="e", action=f"a{number % 7}", step="drain", fields={"count": number})
        print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where it lies, in a folder that is not there yet."""
    return tmp_path / "state" / "journal"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A journal of six lines."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    with Journal(path, clock=lambda: 1_700_000_000.0) as journal:
        for number in range(5):
            journal.append(INTENT, engine="http://a", action="x", step="drain", fields={"epoch": number, "says": "é\n"})
    return path.read_bytes()


def starts(data: bytes) -> Iterator[int]:
    """Where its lines end."""
    at = 0
    for line in data.splitlines(keepends=True):
        at += len(line)
        yield at


def _open(journal: Journal) -> list[str]:
    """Actions of which something is kept, but not their end."""
    kept = journal.kept()
    closed = {entry.action for entry in kept if entry.kind == CLOSED}
    return list(dict.fromkeys(entry.action for entry in kept if entry.action and entry.action not in closed))


def test_it_is_written_and_read(path: Path) -> None:
    """What was appended is there after the next opening, in order, in a file that only its owner may read."""
    with Journal(path) as journal:
        first = journal.append(OPENED, engine="http://u:pw12345@h", action="x", fields={"token": "hf_0123456789abcdefghij"})
        assert first.engine == "http://[redacted]@h"
        journal.append(SWITCH, step="pause", fields={"on": True})
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with Journal(path) as journal:
        journal.append(CLOSED, action="x")
        assert journal.wrong == ()
        assert [entry.kind for entry in journal.kept()] == [OPENED, SWITCH, CLOSED]
    found = read_journal(path)
    assert not found.wrong
    assert [entry.kind for entry in found.entries] == [BEGUN, OPENED, SWITCH, CLOSED]
    assert [entry.number for entry in found.entries] == [1, 2, 3, 4]
    assert abs(found.entries[-1].at - time.time()) < 60
    assert b"hf_0123" not in path.read_bytes()
    assert b"pw12345" not in path.read_bytes()


def test_cut_at_every_byte(sample: bytes, tmp_path: Path) -> None:
    """Every whole line before the cut is read, and nothing else; the next guard goes on after it and keeps what it cut off."""
    whole = read_of(sample, tmp_path / "whole")
    ends = list(starts(sample))
    for cut in range(len(sample) + 1):
        path = tmp_path / f"{cut}" / "journal"
        path.parent.mkdir()
        path.write_bytes(sample[:cut])
        lines = sum(end <= cut for end in ends)
        is_torn = cut not in (0, *ends)
        found = read_journal(path)
        assert found.entries == whole[:lines]
        assert [wrong.kind for wrong in found.wrong] == ([TORN] if is_torn else [])
        if cut % 7 and cut not in ends:
            continue  # opening for writing costs some writes to the disk: not for each
        with Journal(path) as journal:
            journal.append("note")
            assert [wrong.kind for wrong in journal.wrong] == ([TORN] if is_torn else [])
        after = read_journal(path)
        assert not after.wrong
        assert after.entries[:lines] == whole[:lines]
        assert [entry.kind for entry in after.entries[lines:]] == (["note"] if lines else [BEGUN, "note"])
        assert (
            b"".join(one.read_bytes() for one in beside(path, "torn")) == sample[max([0, *(e for e in ends if e <= cut)]) : cut]
        )


def read_of(data: bytes, path: Path) -> tuple[object, ...]:
    """The entries of these bytes."""
    path.write_bytes(data)
    return read_journal(path).entries


@given(data=st.data())
def test_any_flipped_byte_is_noticed(data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Entries before the damaged line hold, none after it is believed, and something is said to be wrong."""
    at = data.draw(st.integers(0, len(sample) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda value: value != sample[at]))
    folder = tmp_path_factory.mktemp("flip")
    whole = read_of(sample, folder / "whole")
    found_entries = read_of(sample[:at] + bytes([other]) + sample[at + 1 :], folder / "journal")
    lines = sum(end <= at for end in starts(sample))
    assert found_entries == whole[:lines]
    assert [wrong.kind for wrong in read_journal(folder / "journal").wrong] in ([DAMAGED], [TORN])


def test_damage_in_the_middle(sample: bytes, path: Path) -> None:
    """The damaged file stays as it is under another name; the new one begins with what was read before, and numbers go on."""
    path.parent.mkdir()
    third = list(starts(sample))[2]
    damaged = sample[: third + 20] + b"?" + sample[third + 21 :]
    path.write_bytes(damaged)
    with Journal(path) as journal:
        assert [wrong.kind for wrong in journal.wrong] == [DAMAGED]
        assert "line 4" in journal.wrong[0].message
        assert _open(journal) == ["x"]
        journal.append("note")
    assert [one.read_bytes() for one in beside(path, "damaged")] == [damaged]
    found = read_journal(path)
    assert not found.wrong
    assert [(entry.number, entry.was, entry.kind) for entry in found.entries] == [
        (7, 0, BEGUN), (8, 2, INTENT), (9, 3, INTENT), (10, 0, "note"),
    ]  # fmt: skip
    path.write_bytes(damaged)
    Journal(path).close()
    assert len(beside(path, "damaged")) == 2


def test_a_second_writer_is_refused(path: Path) -> None:
    """In this process or another: one guard writes a journal, and reading it is open to all."""
    with Journal(path) as journal:
        with pytest.raises(JournalBusy, match="another guard"):
            Journal(path)
        other = subprocess.run(
            [sys.executable, "-c", WRITER, path, "99999", "1"], capture_output=True, text=True, timeout=60, check=False
        )
        assert "JournalBusy" in other.stderr
        journal.append("note")
    assert len(read_journal(path).entries) == 2
    Journal(path).close()


@pytest.mark.parametrize("rotate_bytes", [1 << 20, 4_000])
def test_killed_in_the_middle_of_a_thousand_appends(path: Path, rotate_bytes: int) -> None:
    """kill -9 at any moment, also while files change: every entry that was confirmed is there, and the file is whole."""
    for round_number in range(4):
        before = {entry.first_number for entry in read_history(path, 10**6).entries}
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(rotate_bytes), "1000"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(10 + 37 * round_number):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        confirmed = 10 + 37 * round_number + len([line for line in process.stdout if line.endswith("\n")])
        process.wait()
        assert confirmed < 1000
        with Journal(path) as journal:
            assert {wrong.kind for wrong in journal.wrong} <= {TORN}
        found = read_history(path, 10**6)
        assert not found.wrong
        written = [entry for entry in found.entries if entry.kind == INTENT and entry.first_number not in before]
        if not beside(path, "old") or len(beside(path, "old")) < OLD_KEPT:
            assert confirmed <= len(written) <= confirmed + 1
            assert [entry.fields["count"] for entry in written] == list(range(len(written)))
        numbers = [entry.number for entry in found.entries]
        assert numbers == sorted(set(numbers))


def test_a_full_file_makes_room_for_the_next(path: Path) -> None:
    """Open actions and switches come over, the closed do not weigh the new file down, and only so many old files stay."""
    now = [1_700_000_000.0]
    with Journal(path, rotate_bytes=4_000, clock=lambda: now[0]) as journal:
        journal.append(SWITCH, step="pause", fields={"on": True})
        journal.append(OPENED, action="open")
        for number in range(400):
            now[0] += 6_000.0
            journal.append(OPENED, action=f"a{number}")
            journal.append(CLOSED, action=f"a{number}")
        assert _open(journal) == ["open"]
        kept = journal.kept()
    assert len(beside(path, "old")) == OLD_KEPT
    with Journal(path) as journal:
        assert journal.wrong == ()
        again = journal.kept()
        assert [(entry.kind, entry.action) for entry in again][:2] == [(SWITCH, ""), (OPENED, "open")]
    assert {entry.action for entry in kept if entry.kind == CLOSED} == {f"a{number}" for number in range(371, 400)}
    found = read_history(path, 200)
    assert [entry.number for entry in found.entries] == list(
        dict.fromkeys(entry.number for entry in found.entries if not entry.was)
    )
    assert len(found.entries) == 200


def test_no_room_for_the_next_file(path: Path) -> None:
    """The old one still takes entries, and says why it grows."""
    with Journal(path, rotate_bytes=2_000) as journal:
        path.with_name("journal.new").mkdir()
        for _ in range(100):
            journal.append("note", fields={"text": "some words that take room"})
        assert "cannot start the next file" in journal.trouble
    assert len(read_journal(path).entries) == 101


FULL = """
import resource, sys
from pathlib import Path
from plimsoll.guard.daemon.journal import Journal, JournalFailed
journal = Journal(Path(sys.argv[1]))
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, resource.RLIM_INFINITY))
done = 0
try:
    while done < 1000:
        journal.append("note", fields={"number": done})
        done += 1
except JournalFailed as problem:
    print(done, "|", problem)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(journal.append("note").number)
"""


def test_a_full_disk(path: Path) -> None:
    """One clear error, the lines before it are whole, and when there is room again it goes on."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    process = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=60, check=True)
    done, _, says = process.stdout.splitlines()[0].partition(" | ")
    assert 3 < int(done) < 100
    assert "cannot be written" in says
    assert str(path) in says
    found = read_journal(path)
    assert not found.wrong
    assert len(found.entries) == int(done) + 2
    assert process.stdout.splitlines()[1] == str(int(done) + 2)


class Blind(Journal):
    """Does not look whether the file is still its own, so that a test can put a device in its place."""

    def _check(self) -> None:
        if self._broken:
            super()._check()


def test_a_device_that_is_full(tmp_path: Path) -> None:
    """What the system answers for a device without room becomes one error."""
    with Blind(tmp_path / "journal") as journal:
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, journal._file)
        os.close(full)
        with pytest.raises(JournalFailed, match="No space left on device"):
            journal.append("note")


def test_a_disk_that_does_not_confirm(tmp_path: Path) -> None:
    """What is taken but not brought to the disk fails, and so does all that follows, until the journal is opened anew."""
    with Blind(tmp_path / "journal") as journal:
        reading, writing = os.pipe()  # takes what is written, and knows no fsync
        os.dup2(writing, journal._file)
        for _ in range(2):
            with pytest.raises(JournalFailed, match="not written to disk"):
                journal.append("note")
        os.close(reading)
        os.close(writing)
    with Journal(tmp_path / "journal") as journal:
        journal.append("note")


def test_several_threads(path: Path) -> None:
    """Entries from several threads come one after the other."""
    with Journal(path) as journal:
        threads = [threading.Thread(target=lambda: [journal.append("note") for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_journal(path)
    assert not found.wrong
    assert len(found.entries) == 401


def test_ended_while_files_change(path: Path) -> None:
    """Half a next file, or one that was whole and not yet in its place: the one at its place holds, and goes on."""
    with Journal(path) as journal:
        journal.append(OPENED, action="x")
    whole = path.read_bytes()
    for draft in (b"", whole[:40], whole):
        path.with_name("journal.new").write_bytes(draft)
        (path.with_name("journal.old-1")).unlink(missing_ok=True)
        os.link(path, path.with_name("journal.old-1"))
        with Journal(path, rotate_bytes=1) as journal:
            assert journal.wrong == ()
            assert _open(journal) == ["x"]
            journal.append("note")  # the file is full now
        assert not path.with_name("journal.new").exists()
        assert not read_journal(path).wrong
        numbers = [entry.number for entry in read_history(path, 1000).entries]
        assert numbers == sorted(set(numbers))


def test_a_file_that_was_moved_away_or_written_by_others(path: Path) -> None:
    """Nothing is written into a file that nobody will find again: a clear error instead."""
    with Journal(path) as journal:
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(JournalFailed, match="the file is gone"):
            journal.append("note")
    with Journal(path) as journal:
        with path.open("ab") as file:
            file.write(b"hello\n")
        with pytest.raises(JournalFailed, match="another process has written"):
            journal.append("note")
        with pytest.raises(JournalFailed, match="another process has written"):
            journal.append("note")


def test_a_closed_one(path: Path) -> None:
    """It says so, and closing it twice does no harm."""
    journal = Journal(path)
    journal.close()
    journal.close()
    with pytest.raises(JournalFailed, match="it is closed"):
        journal.append("note")


def test_what_is_no_file(path: Path) -> None:
    """A link, a pipe or a folder at its place is refused, and reading them says so without waiting."""
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(JournalFailed, match="not a regular file"):
        Journal(path)
    assert [wrong.kind for wrong in read_journal(path).wrong] == [UNREADABLE]
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(JournalFailed):
        Journal(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalFailed):
        Journal(path)
    assert [wrong.kind for wrong in read_journal(path).wrong] == [UNREADABLE]
    assert [wrong.kind for wrong in read_journal(path.with_name("none")).wrong] == [ABSENT]


@given(st.binary(max_size=2_000))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """What is no journal is said to be none."""
    path = tmp_path_factory.mktemp("bytes") / "journal"
    path.write_bytes(data)
    found = read_journal(path)
    assert found.entries == ()
    assert len(found.wrong) == bool(data)


def test_a_line_without_end(path: Path) -> None:
    """Neither many megabytes of nothing nor a line as long are held in memory or believed."""
    path.parent.mkdir()
    Journal(path).close()
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + (8 << 20))  # as a power cut may leave it: zeros
    assert [wrong.kind for wrong in read_journal(path).wrong] == [TORN]
    with path.open("ab") as file:
        file.write(b"\n{}\n")
    assert [wrong.kind for wrong in read_journal(path).wrong] == [DAMAGED]

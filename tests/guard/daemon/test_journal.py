"""The journal on a real disk: cut anywhere, changed anywhere, killed anywhere, full, shared; what it says stays true."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.journal_entry import BEGUN, CLOSED, INTENT, OPENED, SWITCH, Entry
from plimsoll.guard.daemon import journal as disk
from plimsoll.guard.daemon.journal import ABSENT, DAMAGED, PRUNE_EVERY, Journal, JournalBusy, JournalFailed, read_journal

OF_0_1 = Path(__file__).parents[2] / "captures" / "guard-journal-0.1" / "guard.journal"
WRITER = """
import sys
from pathlib import Path
from plimsoll.guard.daemon.journal import Journal
with Journal(Path(sys.argv[1]), most=int(sys.argv[2])) as journal:
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
    """A journal of 61 entries, several pages long."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    with Journal(path, clock=lambda: 1_700_000_000.0) as journal:
        for number in range(60):
            journal.append(INTENT, engine="http://a", action="x", step="drain", fields={"epoch": number, "says": "é\n" * 50})
    return path.read_bytes()


def names(path: Path, kind: str) -> list[str]:
    """The files of this kind beside a journal."""
    return sorted(one.name for one in path.parent.glob(f"{path.name}.{kind}-*"))


def numbers(entries: Sequence[Entry]) -> list[int]:
    return [entry.number for entry in entries]


def test_it_is_written_and_read(path: Path) -> None:
    """What was appended is there after the next opening, in order, in a file that only its owner may read."""
    with Journal(path) as journal:
        first = journal.append(OPENED, engine="http://u:pw12345@h", action="x", fields={"token": "hf_0123456789abcdefghij"})
        assert first.engine == "http://[redacted]@h"
        journal.append(SWITCH, step="pause", fields={"on": True})
        assert {one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}
        assert numbers(read_journal(path).entries) == [1, 2, 3], "it is read while it is written"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with Journal(path) as journal:
        journal.append(CLOSED, action="x")
        assert journal.wrong == ()
        assert [entry.kind for entry in journal.kept()] == [OPENED, SWITCH, CLOSED]
    assert sorted(one.name for one in path.parent.iterdir()) == ["journal", "journal.lock"], "one plain file when it is closed"
    found = read_journal(path)
    assert not found.wrong
    assert [entry.kind for entry in found.entries] == [BEGUN, OPENED, SWITCH, CLOSED]
    assert numbers(found.entries) == [1, 2, 3, 4]
    assert numbers(read_journal(path, 2).entries) == [3, 4]
    assert abs(found.entries[-1].at - time.time()) < 60
    assert b"hf_0123" not in path.read_bytes()
    assert b"pw12345" not in path.read_bytes()


def test_cut_at_any_byte(sample: bytes, tmp_path: Path) -> None:
    """The entries before the cut are read, and that some are missing is told; the next guard begins with them."""
    path = tmp_path / "journal"
    path.write_bytes(sample)
    whole = read_journal(path).entries
    for cut in [1, 50, 99, 100, 4096, len(sample) - 4096, len(sample) - 2, *range(7, len(sample), 509)]:
        path.write_bytes(sample[:cut])
        found = read_journal(path)
        assert found.entries == whole[: len(found.entries)], cut
        assert [wrong.kind for wrong in found.wrong] == [DAMAGED] or found.entries == whole, cut
        with Journal(path) as journal:
            assert journal.wrong == found.wrong
            journal.append("note")
        after = read_journal(path)
        assert not after.wrong
        assert after.entries[: len(found.entries)] == found.entries
    path.write_bytes(sample + b"\n")
    with Journal(path) as journal:
        assert (journal.wrong, journal.append("note").number) == ((), 62), "one byte more is no damage"


@given(data=st.data())
def test_a_flipped_byte_is_noticed_or_no_change(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Entries are read as they were written, up to the damage, or it is told that they are not all."""
    path = tmp_path_factory.mktemp("flip") / "journal"
    path.write_bytes(sample)
    whole = read_journal(path).entries
    at = data.draw(st.integers(0, len(sample) - 1))
    path.write_bytes(sample[:at] + bytes([data.draw(st.integers(1, 255)) ^ sample[at]]) + sample[at + 1 :])
    found = read_journal(path)
    assert numbers(found.entries) == sorted(set(numbers(found.entries)))
    assert all(entry == whole[entry.number - 1] for entry in found.entries)
    assert [wrong.kind for wrong in found.wrong] == [DAMAGED] or len(found.entries) == len(whole)


def test_damage_in_the_middle(sample: bytes, path: Path) -> None:
    """The damaged file stays as it is under another name; the new one begins with what was read before, and numbers go on."""
    path.parent.mkdir()
    damaged = sample.replace(b'"epoch":30,', b'"epoch":31,')
    path.write_bytes(damaged)
    with Journal(path) as journal:
        assert [wrong.kind for wrong in journal.wrong] == [DAMAGED]
        assert "entry 32: its checksum is not right" in journal.wrong[0].message
    assert [(path.parent / name).read_bytes() for name in names(path, "damaged")] == [damaged]
    with Journal(path) as journal:
        assert [wrong.kind for wrong in journal.wrong] == [DAMAGED], "until somebody has taken note of it"
        journal.append(SWITCH, step="pause", fields={"on": True})
    with Journal(path) as journal:
        assert journal.wrong == ()
    found = read_journal(path)
    assert numbers(found.entries) == list(range(1, 34))
    assert [entry.kind for entry in found.entries[30:]] == [INTENT, BEGUN, SWITCH]
    path.write_bytes(damaged)
    Journal(path).close()
    assert names(path, "damaged") == ["journal.damaged-1", "journal.damaged-2"]


def test_killed_while_a_damaged_file_is_replaced(sample: bytes, tmp_path: Path) -> None:
    """Before and after each rename: the next guard has what was readable, and knows of the damage."""
    for left in range(5):
        path = tmp_path / str(left) / "journal"
        path.parent.mkdir()
        path.write_bytes(sample.replace(b'"epoch":30,', b'"epoch":31,'))
        shutil.copy(path, damaged := path.with_name("journal.damaged-1"))
        Journal(path).close()
        damaged.with_name("journal.damaged-2").rename(damaged) if left else damaged.unlink()
        new, log = path.with_name("journal.new"), path.with_name("journal-wal")
        if left < 3:
            path.rename(new)
            log.write_bytes(b"of the damaged file")
        if left == 0:
            new.write_bytes(new.read_bytes()[:5000])
        if left < 2:
            shutil.copy(damaged if left else path.with_name("journal.damaged-2"), path)
        if left == 3:
            new.write_bytes(b"")
        with Journal(path) as journal:
            assert [wrong.kind for wrong in journal.wrong] == [DAMAGED], left
            assert numbers(read_journal(path).entries) == list(range(1, 33)), left
        assert not new.exists()


def test_a_journal_of_0_1_is_carried_over_and_read_as_far_as_it_is_whole(path: Path) -> None:
    """Once, under the numbers first written, the file kept beside; only a last line that was cut off is no damage."""
    path.parent.mkdir()
    shutil.copy(OF_0_1, path)
    before = read_journal(path)
    assert not before.wrong
    assert numbers(before.entries) == [2, 3, 4, 5, 6, 14, 15, 16]
    for _ in range(2):
        with Journal(path) as journal:
            assert journal.wrong == ()
        found = read_journal(path)
        assert found.entries[:-1] == before.entries
        assert (found.entries[-1].kind, found.entries[-1].number) == (BEGUN, 17)
    assert [(path.parent / name).read_bytes() for name in names(path, "jsonl")] == [OF_0_1.read_bytes()]
    data, path = OF_0_1.read_bytes(), path.with_name("cut")
    whole = read_journal(OF_0_1).entries
    for cut in range(data.index(b"\n"), len(data), 3):
        path.write_bytes(data[:cut])
        lines = data[:cut].count(b"\n")
        assert read_journal(path)[:2] == (whole[: max(0, lines - 1)], ()), cut
        path.write_bytes(data[: cut - 1] + bytes([data[cut - 1] ^ 1]) + data[cut:])
        found = read_journal(path)
        assert [wrong.kind for wrong in found.wrong] == [DAMAGED], cut
        assert found.entries == whole[: max(0, data[: cut - 1].count(b"\n") - 1)], cut
    path.write_bytes(data + bytes(8 << 20))  # as a power cut may leave it
    assert read_journal(path).wrong == ()
    path.write_bytes(data + bytes(8 << 20) + b"\n{}\n")
    assert [wrong.kind for wrong in read_journal(path).wrong] == [DAMAGED]


@pytest.mark.real
@pytest.mark.parametrize("most", [1 << 20, 10])
def test_killed_in_the_middle_of_many_appends(path: Path, most: int) -> None:
    """kill -9 at any moment, also while old entries are deleted: every confirmed entry is there, and the file is whole."""
    path.parent.mkdir()
    disk._write_rows(path, [Entry(number, 0.0, "note") for number in range(1, PRUNE_EVERY - 100)])
    for round_number in range(6):
        before = read_journal(path).entries[-1].number
        process = subprocess.Popen([sys.executable, "-c", WRITER, path, str(most), "2000"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(10 + 37 * round_number):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        confirmed = 10 + 37 * round_number + len([line for line in process.stdout if line.endswith("\n")])
        process.wait()
        assert confirmed < 2000
        found = read_journal(path)
        assert not found.wrong
        with Journal(path) as journal:
            assert journal.wrong == ()
        written = [entry.fields["count"] for entry in found.entries if entry.number > before]
        assert written[-1] in (confirmed - 1, confirmed)
        assert written == list(range(written[0], written[-1] + 1))
        assert written[0] == 0 or most == 10
    assert (len(read_journal(path).entries) < PRUNE_EVERY) == (most == 10)


def test_old_entries_make_room(path: Path) -> None:
    """Open actions and switches stay whatever their age; of the rest only the newest."""
    now = [1_700_000_000.0]
    with Journal(path, most=500, clock=lambda: now[0]) as journal:
        journal.append(SWITCH, step="pause", fields={"on": True})
        journal.append(OPENED, action="open")
        for number in range(PRUNE_EVERY):
            now[0] += 6_000.0
            journal.append(OPENED, action=f"a{number}")
            journal.append(CLOSED, action=f"a{number}")
        kept = journal.kept()
    assert numbers(kept)[:2] == [2, 3]
    assert {entry.action for entry in kept if entry.kind == CLOSED} == {f"a{number}" for number in range(971, 1000)}
    found = numbers(read_journal(path).entries)
    assert found == [2, 3, *range(2 * PRUNE_EVERY - 499, 2 * PRUNE_EVERY + 4)]
    assert numbers(read_journal(path, 200).entries) == found[-200:]
    with Journal(path, clock=lambda: now[0]) as journal:
        assert journal.kept() == kept


FULL = """
import resource, sys
from pathlib import Path
from plimsoll.guard.daemon.journal import Journal, JournalFailed
journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
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
    """Wherever the room ends: one clear error, the entries before it are whole, and when there is room again it goes on."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    for room in (0, 100, 20_000, 20_001, 23_000, 33_333, 40_960, 65_536):
        shutil.rmtree(path.parent, ignore_errors=True)
        process = subprocess.run(
            [sys.executable, "-c", FULL, path, str(room)], capture_output=True, text=True, timeout=60, check=True
        )
        done, _, says = process.stdout.splitlines()[0].partition(" | ")
        assert int(done) < 100
        assert "cannot be written" in says
        assert str(path) in says
        found = read_journal(path)
        assert not found.wrong
        assert len(found.entries) == int(done) + 2, room
        assert process.stdout.splitlines()[1] == str(int(done) + 2)


def test_a_second_writer_is_refused_and_so_is_a_file_that_was_moved_away_or_written_by_others(path: Path) -> None:
    """One guard writes a journal, its threads in turn, and all may read it; nothing goes where nobody finds it."""
    with Journal(path) as journal:
        with pytest.raises(JournalBusy, match="another guard"):
            Journal(path)
        command = [sys.executable, "-c", WRITER, str(path), "99999", "1"]
        assert "JournalBusy" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
        threads = [threading.Thread(target=lambda: [journal.append("note") for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_journal(path)
    assert not found.wrong
    assert len(found.entries) == 401
    shutil.rmtree(path.parent)
    for moved in (path, path.with_name("journal-wal")):
        with Journal(path) as journal:
            journal.append("note")
            moved.rename(path.with_name("elsewhere"))
            for _ in range(2):
                with pytest.raises(JournalFailed, match="the file is gone"):
                    journal.append("note")
        shutil.rmtree(path.parent)
    with Journal(path) as journal:
        with sqlite3.connect(path) as another:
            another.execute("INSERT INTO entry VALUES (2, 0, '', '', '', '', '', '')")
        for _ in range(2):
            with pytest.raises(JournalFailed, match="another process has written"):
                journal.append("note")
        another.close()


def test_what_is_no_journal_is_refused(path: Path) -> None:
    """A link, a pipe or a folder at its place, and one that was closed; reading says so without waiting."""
    journal = Journal(path)
    journal.close()
    journal.close()
    with pytest.raises(JournalFailed, match="it is closed"):
        journal.append("note")
    path.unlink()
    for make, says in ((os.mkfifo, "not a regular file"), (lambda path: path.symlink_to("/etc/passwd"), ""), (Path.mkdir, "")):
        make(path)
        with pytest.raises(JournalFailed, match=says or None):
            Journal(path)
        if not path.is_symlink():
            assert [wrong.kind for wrong in read_journal(path).wrong] == [disk.UNREADABLE]
        path.rmdir() if path.is_dir() else path.unlink()
    assert [wrong.kind for wrong in read_journal(path.with_name("none")).wrong] == [ABSENT]
    with sqlite3.connect(path) as other:  # somebody else's database is damage: it is kept aside
        other.execute("CREATE TABLE entry (x)")
        other.execute("INSERT INTO entry VALUES (1)")
    other.close()
    with Journal(path) as journal:
        assert [wrong.kind for wrong in journal.wrong] == [DAMAGED]
    assert names(path, "damaged") == ["journal.damaged-1"]


@given(st.binary(max_size=2_000).filter(lambda data: not data.startswith(b"{")))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """What is no journal is said to be none."""
    path = tmp_path_factory.mktemp("bytes") / "journal"
    path.write_bytes(data)
    found = read_journal(path)
    assert found.entries == ()
    assert len(found.wrong) == bool(data)


def test_a_damaged_or_lost_file_is_mended_from_memory_and_another_in_its_place_is_left_alone(path: Path) -> None:
    """Guard knows what it wrote, so nothing is lost; which of two files counts only a person knows."""
    for harm in ("a byte", "lost", "nothing"):
        with Journal(path) as journal:
            journal.append("switch", step="pause", fields={"on": True})
            before = numbers(journal.kept())
            if harm == "a byte":
                path.write_bytes(path.read_bytes()[:-1] + b"x")
            elif harm == "lost":
                path.unlink()
            journal.mend()
            assert numbers(journal.kept()) == before
            journal.append("note", fields={"harm": harm})
        contents = read_journal(path)
        assert (contents.wrong, contents.entries[-1].fields) == ((), {"harm": harm})
    with Journal(path) as journal:
        journal.append("note", fields={"x": 1})
        path.rename(path.with_name("aside"))
        path.write_text("somebody's")
        with pytest.raises(JournalFailed, match="another file is in its place"):
            journal.mend()
        assert path.read_text() == "somebody's"

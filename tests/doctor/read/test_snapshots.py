"""Snapshots of torch's memory: what torch writes is read, all else is refused in one line, and nothing is ever run."""

from __future__ import annotations

import atexit
import gzip
import io
import multiprocessing
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read import snapshots
from plimsoll.doctor.read.snapshots import limit_resources, parse_snapshot, read_snapshot
from plimsoll.doctor.rules.snapshot_facts import FREE, LIVE, PENDING, Snapshot, StackFrame
from plimsoll.errors import BadInput, TooLarge
from tests.doctor.snapshot_maker import serving, split
from tests.each import each

VALID = pickle.dumps(split().tree())
SMALL = pickle.dumps(
    {"segments": [{"device": 0, "address": 4096, "total_size": 1024, "stream": 0, "segment_type": "small",
                   "segment_pool_id": (0, 3), "is_expandable": True, "frames": [],
                   "blocks": [{"size": 512, "state": "active_pending_free", "requested_size": 500,
                               "frames": [{"filename": "/a.py", "line": 3, "name": "f"}]},
                              {"size": 512, "state": "inactive", "requested_size": 0, "frames": []}]}],
     "device_traces": [[], [{"action": "oom", "size": 7, "device_free": 5, "stream": 0, "time_us": 9,
                             "frames": [{"filename": "/b.py", "line": 4, "name": "g"}] * 2}]],
     "allocator_settings": {"expandable_segments": True, "odd": [1]}}
)  # fmt: skip


def _read(data: bytes) -> Snapshot:
    return parse_snapshot(io.BytesIO(data), "s.pickle")


@cache
def _limited() -> ProcessPoolExecutor:
    """A process with the limits of the one that reads snapshots, kept for many: a new one each would take minutes."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=limit_resources, initargs=(1 << 30, 600))
    atexit.register(pool.shutdown)
    return pool


def _outcomes_here(files: Sequence[bytes]) -> list[Snapshot | str]:
    found: list[Snapshot | str] = []
    for data in files:
        try:
            found.append(_read(data))
        except BadInput as error:
            found.append(str(error))
        except MemoryError:
            found.append("s.pickle: would take more memory")
    return found


def _outcomes(files: Sequence[bytes]) -> list[Snapshot | str]:
    """What comes of hostile bytes, each: a snapshot or one line; any other error is the test's."""
    found = _limited().submit(_outcomes_here, files).result(timeout=300)
    lines = [one for one in found if isinstance(one, str)]
    assert all("\n" not in line and line.startswith("s.pickle") for line in lines)
    return found


def _refused(data: bytes) -> str:
    (outcome,) = _outcomes([data])
    assert isinstance(outcome, str)
    return outcome


class _Evil:
    """Unpickled by Python, this would make a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_what_torch_writes_is_read() -> None:
    """Every field arrives; frames and equal stacks are kept once."""
    snapshot = _read(SMALL)
    (segment,) = snapshot.segments
    assert (segment.device, segment.address, segment.size, segment.pool) == (0, 4096, 1024, (0, 3))
    assert segment.is_small
    assert segment.is_expandable
    assert [block.state for block in segment.blocks] == [PENDING, FREE]
    assert [block.address for block in segment.blocks] == [4096, 4608]
    assert snapshot.stack_of(segment.blocks[0].stack) == (StackFrame("/a.py", 3, "f"),)
    (failure,) = snapshot.failures
    assert (failure.device, failure.size, failure.device_free, failure.events_after) == (1, 7, 5, 0)
    assert snapshot.stack_of(failure.stack) == (StackFrame("/b.py", 4, "g"),) * 2


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_could_use_reads_the_same(protocol: int) -> None:
    """Protocols 2 to 5, and the same tree each time."""
    assert _read(pickle.dumps(split().tree(), protocol)) == _read(VALID)


def test_the_plain_list_of_segments_and_a_snapshot_of_torch_2_0_are_read() -> None:
    """Blocks had a history instead of frames, and segments no pool."""
    tree = serving().tree()
    assert _read(pickle.dumps(tree["segments"])).segments == _read(pickle.dumps(tree)).segments
    block = {"size": 512, "state": "active_allocated",
             "history": [{"addr": 1, "real_size": 400, "frames": [{"filename": "x.py", "line": 1, "name": "f"}]}]}  # fmt: skip
    old = {"segments": [{"device": 0, "address": 1, "total_size": 1024, "stream": 0, "segment_type": "large",
                         "blocks": [block, {"size": 512, "state": "inactive"}]}], "device_traces": []}  # fmt: skip
    snapshot = _read(pickle.dumps(old))
    first = snapshot.segments[0].blocks[0]
    assert (first.state, snapshot.stack_of(first.stack)[0].name) == (LIVE, "f")


def test_a_packed_snapshot_is_read(tmp_path: Path) -> None:
    """gzip and zstd, by their first bytes; cut or spoilt, both are refused."""
    for packed in (gzip.compress(SMALL), zstandard.compress(SMALL)):
        (tmp_path / "s").write_bytes(packed)
        assert read_snapshot(tmp_path / "s") == _read(SMALL)
        _refused(packed[:-20])
        _refused(packed[:4] + b"junk" * 10)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """Wherever in the tree it hides."""
    mark = tmp_path / "ran"
    evil = _Evil(mark)
    tree = serving().tree()
    for hidden in (
        evil,
        [evil],
        {"segments": evil},
        {**tree, "x": evil},
        {"segments": [{"blocks": [{"frames": [evil]}]}]},
        (evil,),
    ):
        message = _refused(pickle.dumps(hidden, protocol))
        if protocol >= 2:
            assert "refused" in message
    assert not mark.exists()


@each(
    "code",
    [
        b"\x80\x04cos\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x04]]R.", b"\x80\x04}}b.",
        b"\x80\x04(cos\nsystem\no.", b"\x80\x04(ios\nsystem\n.", b"\x80\x04]]\x81.", b"\x80\x04]]}\x92.", b"\x80\x02\x82\x01.",
        b"\x80\x02\x83\x01\x00.", b"\x80\x02\x84\x01\x00\x00\x00.", b"\x80\x04Pabc\n.", b"\x80\x04]Q.", b"\x80\x05\x97.",
        b"\x80\x05\x98.",
    ],
)  # fmt: skip
def test_every_opcode_that_could_reach_code_is_refused(code: bytes) -> None:
    """The line says that it was refused and that nothing was run."""
    assert "Nothing was run" in _refused(code)


DAMAGED = [
    b"", b"\x80", b"\x80\x04", b"\x80\x04.", b"\x80\x09].", b"\x80\x04\x95" + b"\xff" * 8 + b"].",
    b"\x80\x04\x8d" + b"\xff" * 8, b"\x80\x04\x8d" + struct.pack("<Q", 3 << 30) + b"ab", b"\x80\x04X\xff\xff\xff\x7fab",
    b"\x80\x04B\xff\xff\xff\xffab", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62), b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
    b"\x80\x04\x8b\xff\xff\xff\x7f", b"\x80\x04]r\xff\xff\xff\xff.", b"\x80\x04]r\xff\xff\xff\x0f.", b"\x80\x04K\x01\x94.",
    b"\x80\x04j\xff\xff\xff\xff.", b"\x80\x04h\x00.", b"\x80\x04u.", b"\x80\x04e.", b"\x80\x04a.", b"\x80\x04s.",
    b"\x80\x04\x85.", b"\x80\x04\x94.", b"\x80\x04(.", b"\x80\x04}K\x01K\x02s.", b"\x80\x04}(K\x01u.",
    b"\x80\x04K\x01(K\x02e.", b"\x80\x04N.", b"\x80\x04}.", b"\x80\x04).", b"PK\x03\x04zip", b"hello", b"(lp0\n.",
    b"\x80\x04" + b"(" * 1_000, b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".", b"\x80\x04]\x94h\x00a.",
    b"\x80\x04I" + b"9" * 5_000 + b"\n.", b"\x80\x04L" + b"9" * 100_000 + b"L\n.",
]  # fmt: skip


def test_damaged_and_hostile_pickles_are_refused_in_one_line() -> None:
    """Lengths that lie, a memo of gigabytes, empty stacks, endless nesting, a list that holds itself, huge numbers."""
    read = [code for code, outcome in zip(DAMAGED, _outcomes(DAMAGED), strict=True) if not isinstance(outcome, str)]
    assert read == []


def test_what_follows_the_end_is_not_read() -> None:
    """Nor what is left on the unpickler's stack."""
    for code in (b"\x80\x04].extra" * 2 + b"R", b"\x80\x04]].", b"\x80\x04](K\x01e](e."):
        assert _read(code).segments == ()


NESTED_NAME = b"\x80\x04})" + b"\x85" * 3_000_000 + b"K\x01s."  # a name whose hash descends three million levels
DOUBLED_NAME = b"\x80\x04})" + b"2\x86" * 100 + b"K\x01s."  # one whose hash visits 2 to the 100 items


def test_bombs_end_with_the_process_that_reads_them(tmp_path: Path) -> None:
    """Of memory, plain and packed, of time and of the C stack: one line, and the caller lives."""
    path = tmp_path / "s.pickle"
    for piece in (b"]", b"}", b"]\x94", b"K\x01\x85"):
        path.write_bytes(b"\x80\x04](" + piece * 3_000_000 + b"e.")
        with pytest.raises(TooLarge, match="would take more than 200 MiB"):
            read_snapshot(path, memory_max=200 << 20)
    path.write_bytes(gzip.compress(b"\x80\x04](" + b"]" * 50_000_000, 1))
    with pytest.raises(TooLarge, match="would take more than 200 MiB"):
        read_snapshot(path, memory_max=200 << 20)
    path.write_bytes(DOUBLED_NAME)
    with pytest.raises(TooLarge, match="not read within 1 s"):
        read_snapshot(path, timeout_s=1)
    path.write_bytes(NESTED_NAME)
    with pytest.raises(BadInput, match="Nothing was run"):
        read_snapshot(path)


def test_nothing_of_the_folder_one_stands_in_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file called pickle.py beside the snapshot is not run."""
    (tmp_path / "pickle.py").write_text("raise SystemExit('ran')")
    (tmp_path / "s.pickle").write_bytes(SMALL)
    monkeypatch.chdir(tmp_path)
    assert read_snapshot("s.pickle") == _read(SMALL)


def test_shared_references_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same segment a thousand times, each with the same long list: counted, not followed for ever."""
    monkeypatch.setattr(snapshots, "_BLOCKS_MAX", 10_000)
    block = {"size": 512, "state": "inactive"}
    segment = {"address": 0, "total_size": 512 * 5000, "segment_type": "large", "blocks": [block] * 5000}
    with pytest.raises(TooLarge):
        _read(pickle.dumps([segment] * 1000))
    laughs: object = "ha"
    for _ in range(100):
        laughs = [laughs] * 10
    assert _read(pickle.dumps({"segments": [], "device_traces": [], "laughs": laughs})).segments == ()
    trace: list[object] = [None] * 100_000
    assert _read(pickle.dumps({"segments": [], "device_traces": [trace] * 1_000_000})).events == 100_000


def test_a_tree_that_holds_itself_is_refused_or_read() -> None:
    """Nothing is followed deeper than a snapshot goes."""
    tree: dict[str, object] = {"device_traces": []}
    tree["segments"] = [tree]
    _refused(pickle.dumps(tree))
    looped: list[object] = []
    looped.append(looped)
    _refused(pickle.dumps(looped))
    assert _read(pickle.dumps({"segments": [], "more": looped})).segments == ()


def _damaged() -> Iterator[object]:
    """The small tree with one field replaced by each of many wrong values."""
    wrong: tuple[object, ...] = (None, -1, 1 << 70, 1.5, True, "x", b"x", [], {}, (), [None], {"a": 1}, [[]])
    fields: dict[tuple[str | int, ...], str] = {
        (): "segments device_traces allocator_settings",
        ("segments", 0): "device address total_size stream segment_type segment_pool_id is_expandable frames blocks",
        ("segments", 0, "blocks", 0): "size state frames address history",
        ("segments", 0, "blocks", 0, "frames", 0): "filename line name",
        ("device_traces", 1, 0): "action size device_free stream time_us frames",
    }
    places: list[tuple[str | int, ...]] = [("segments", 0), ("device_traces", 1), ("device_traces", 1, 0)]
    for place in [*places, *((*above, name) for above, names in fields.items() for name in names.split())]:
        for value in wrong:
            tree = pickle.loads(SMALL)
            inner = tree
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = value
            yield tree


def test_a_wrong_type_in_any_field_is_read_or_refused_in_one_line() -> None:
    """Never another error."""
    _outcomes([pickle.dumps(tree) for tree in _damaged()])


def test_a_snapshot_that_is_cut_or_does_not_add_up_is_refused() -> None:
    """Cut anywhere it is not whole; blocks that do not fill their segment are not judged."""
    tree = pickle.loads(SMALL)
    tree["segments"][0]["total_size"] = 4096
    assert "1024 bytes together" in _refused(pickle.dumps(tree))
    assert all(isinstance(outcome, str) for outcome in _outcomes([SMALL[:end] for end in range(len(SMALL))]))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """A folder, a missing file."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput, match=str(path)):
            read_snapshot(path)


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 3))
def test_changed_bytes_never_run_anything_nor_fail_otherwise(changes: list[tuple[int, int]], drop: int) -> None:
    """Random changes of a valid snapshot are read or refused."""
    data = bytearray(SMALL)
    for place, value in changes:
        data[place] = value
    if drop:
        del data[changes[0][0] : changes[0][0] + drop]
    _outcomes([bytes(data)])


@given(st.binary(max_size=60), st.integers(2, 5))
def test_random_opcodes_never_run_anything_nor_fail_otherwise(code: bytes, protocol: int) -> None:
    """Any bytes behind a valid head."""
    _outcomes([bytes((0x80, protocol)) + code])


def test_every_single_byte_is_read_or_refused() -> None:
    """Each opcode alone, with nothing and with something on the stack."""
    before = (b"", b"]", b"}\x94", b"](", b"}(\x8c\x01a", b"](K\x01K\x02")
    after = (b"", b".", b"\x00\x00\x00\x00.", b"abc\n.")
    _outcomes([b"\x80\x04" + some + bytes((opcode,)) + end for opcode in range(256) for some in before for end in after])


def test_every_failure_of_a_long_history_is_found() -> None:
    """The last sixteen, in the order they happened."""
    frames = [{"filename": "/a.py", "line": 1, "name": "f"}, {"filename": "/b.py", "line": 2, "name": "g"}]
    trace = [
        {"action": action, "size": number, "time_us": number, "frames": frames}
        for number in range(30)
        for action in ("alloc", "oom")
    ]
    snapshot = _read(pickle.dumps({"segments": [], "device_traces": [trace]}))
    assert [failure.size for failure in snapshot.failures] == list(range(14, 30))
    assert snapshot.events == 60

"""Snapshots of torch's memory: what torch writes is read, all else is refused in one line, and nothing is ever run."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read import snapshot_pickle, snapshots
from plimsoll.doctor.read.snapshots import is_pickle, read_snapshot, read_snapshot_from
from plimsoll.doctor.rules.snapshot_facts import FREE, LIVE, PENDING, Snapshot, StackFrame
from plimsoll.errors import BadInput, TooLarge
from tests.doctor.snapshot_maker import MIB, serving, split

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
    return read_snapshot_from(io.BytesIO(data), "s.pickle")


def _refused(data: bytes) -> str:
    with pytest.raises(BadInput) as caught:
        _read(data)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("s.pickle")
    return message


def _read_or_refused(data: bytes) -> None:
    """Read, or one line; any other error is the test's."""
    try:
        _read(data)
    except BadInput as error:
        message = str(error)
    else:
        return
    assert "\n" not in message


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
    assert segment.blocks[0].requested == 500
    assert snapshot.stack_of(segment.blocks[0].stack) == (StackFrame("/a.py", 3, "f"),)
    (failure,) = snapshot.failures
    assert (failure.device, failure.size, failure.device_free, failure.events_after) == (1, 7, 5, 0)
    assert snapshot.stack_of(failure.stack) == (StackFrame("/b.py", 4, "g"),) * 2


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_could_use_reads_the_same(protocol: int) -> None:
    """Protocols 2 to 5, and the same tree each time."""
    assert _read(pickle.dumps(split().tree(), protocol)) == _read(VALID)


def test_the_plain_list_of_segments_is_read() -> None:
    """torch.cuda.memory_snapshot() gives the list alone."""
    tree = serving().tree()
    assert _read(pickle.dumps(tree["segments"])).segments == _read(pickle.dumps(tree)).segments


def test_a_snapshot_of_torch_2_0_is_read() -> None:
    """Blocks had a history instead of a requested size and frames, and segments no pool."""
    block = {"size": 512, "state": "active_allocated",
             "history": [{"addr": 1, "real_size": 400, "frames": [{"filename": "x.py", "line": 1, "name": "f"}]}]}  # fmt: skip
    old = {"segments": [{"device": 0, "address": 1, "total_size": 1024, "stream": 0, "segment_type": "large",
                         "blocks": [block, {"size": 512, "state": "inactive"}]}], "device_traces": []}  # fmt: skip
    snapshot = _read(pickle.dumps(old))
    first, second = snapshot.segments[0].blocks
    assert (first.requested, first.state, snapshot.stack_of(first.stack)[0].name) == (400, LIVE, "f")
    assert second.requested is None


def test_a_packed_snapshot_is_read(tmp_path: Path) -> None:
    """gzip, by its first bytes."""
    (tmp_path / "s").write_bytes(gzip.compress(SMALL))
    assert read_snapshot(tmp_path / "s") == _read(SMALL)
    _refused(gzip.compress(SMALL)[:-20])
    _refused(b"\x1f\x8b" + b"junk" * 10)


def test_events_that_nobody_asks_for_are_counted_and_dropped() -> None:
    """Only failures are kept, the last ones, with how much happened since."""
    made = serving()
    for _ in range(40):
        made.fail(MIB, 0)
    made.alloc(MIB)
    snapshot = _read(pickle.dumps(made.tree()))
    assert snapshot.events == len(made.events)
    assert len(snapshot.failures) == 16
    assert snapshot.failures[-1].events_after == 1


def test_a_long_stack_and_many_equal_ones_are_read() -> None:
    """A list of more frames than pickle writes at once, shared by all blocks."""
    frames = [{"filename": f"{number}.py", "line": number, "name": "f"} for number in range(2500)]
    blocks = [{"size": 512, "requested_size": 1, "state": "active_allocated", "frames": frames} for _ in range(3000)]
    tree = [{"address": 0, "total_size": 512 * 3000, "segment_type": "large", "blocks": blocks}]
    snapshot = _read(pickle.dumps(tree))
    assert len(snapshot.stacks) == 2
    assert [frame.line for frame in snapshot.stack_of(1)] == [*range(256), *range(2244, 2500)]


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


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x04cos\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x04]]R.", b"\x80\x04}}b.",
        b"\x80\x04(cos\nsystem\no.", b"\x80\x04(ios\nsystem\n.", b"\x80\x04]]\x81.", b"\x80\x04]]}\x92.", b"\x80\x02\x82\x01.",
        b"\x80\x02\x83\x01\x00.", b"\x80\x02\x84\x01\x00\x00\x00.", b"\x80\x04Pabc\n.", b"\x80\x04]Q.", b"\x80\x05\x97.",
        b"\x80\x05\x98.",
    ],
)  # fmt: skip
def test_every_opcode_that_could_reach_code_is_refused_by_name(code: bytes) -> None:
    """The line says that it was refused and that nothing was run."""
    assert "Nothing was run" in _refused(code)


@pytest.mark.parametrize(
    "code",
    [
        b"", b"\x80", b"\x80\x04", b"\x80\x04.", b"\x80\x09].", b"\x80\x04\x95" + b"\xff" * 8 + b"].",
        b"\x80\x04\x8d" + b"\xff" * 8, b"\x80\x04\x8d" + struct.pack("<Q", 3 << 30) + b"ab", b"\x80\x04X\xff\xff\xff\x7fab",
        b"\x80\x04B\xff\xff\xff\xffab", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62),
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f", b"\x80\x04]r\xff\xff\xff\xff.", b"\x80\x04]q\x05.", b"\x80\x04K\x01\x94.",
        b"\x80\x04j\xff\xff\xff\xff.", b"\x80\x04h\x00.", b"\x80\x04u.", b"\x80\x04e.", b"\x80\x04a.", b"\x80\x04s.",
        b"\x80\x04\x85.", b"\x80\x04\x94.", b"\x80\x04(.", b"\x80\x04]].", b"\x80\x04}K\x01K\x02s.", b"\x80\x04}(K\x01u.",
        b"\x80\x04](K\x01e](e.", b"\x80\x04K\x01(K\x02e.", b"\x80\x04N.", b"\x80\x04].extra" * 2 + b"R",
        b"\x80\x04}.", b"\x80\x04).",
        b"\x80\x04" + b"(" * 1_000, b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".", b"PK\x03\x04zip", b"hello",
        b"(lp0\n.", b"\x80\x04]\x94h\x00a.",
    ],
)  # fmt: skip
def test_damaged_and_hostile_pickles_are_refused_in_one_line(code: bytes) -> None:
    """Lengths that lie, memos out of order, empty stacks, endless nesting, a list that holds itself."""
    if code.startswith(b"\x80\x04].extra"):
        assert _read(code).segments == ()  # what follows the end is not read
    else:
        _refused(code)


def test_a_memory_bomb_is_refused_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is counted, whatever it is made of."""
    monkeypatch.setattr(snapshot_pickle, "_MEMORY_MAX", 16 << 20)
    for piece in (b"]", b"}", b")", b"]\x94", b"K\x01\x85", b"J\x01\x02\x03\x04"):
        with pytest.raises(TooLarge):
            _read(b"\x80\x04](" + piece * ((5 << 20) // 2 // len(piece) + 500_000) + b"e.")
    texts = b"".join(b"\x8c\x04" + struct.pack("<I", number) for number in range(400_000))
    with pytest.raises(TooLarge):
        _read(b"\x80\x04](" + texts + b"e.")


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
    places = [
        ("segments",),
        ("segments", 0),
        ("device_traces",),
        ("device_traces", 1),
        ("device_traces", 1, 0),
        ("allocator_settings",),
    ]
    places += [
        ("segments", 0, name)
        for name in (
            "device",
            "address",
            "total_size",
            "stream",
            "segment_type",
            "segment_pool_id",
            "is_expandable",
            "frames",
            "blocks",
        )
    ]
    places += [
        ("segments", 0, "blocks", 0, name) for name in ("size", "state", "requested_size", "frames", "address", "history")
    ]
    places += [("segments", 0, "blocks", 0, "frames", 0, name) for name in ("filename", "line", "name")]
    places += [("device_traces", 1, 0, name) for name in ("action", "size", "device_free", "stream", "time_us", "frames")]
    for place in places:
        for value in wrong:
            tree = pickle.loads(SMALL)
            inner = tree
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = value
            yield tree


def test_a_wrong_type_in_any_field_is_read_or_refused_in_one_line() -> None:
    """Never another error."""
    for tree in _damaged():
        _read_or_refused(pickle.dumps(tree))


def test_blocks_that_do_not_fill_their_segment_are_refused() -> None:
    """What does not add up is not judged."""
    tree = pickle.loads(SMALL)
    tree["segments"][0]["total_size"] = 4096
    assert "1024 bytes together" in _refused(pickle.dumps(tree))


def test_every_cut_of_a_snapshot_is_refused() -> None:
    """Cut anywhere, it is not whole."""
    for end in range(len(SMALL)):
        _refused(SMALL[:end])


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """A folder, a missing file."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput, match=str(path)):
            read_snapshot(path)


def test_a_pickle_is_told_by_its_first_bytes() -> None:
    """Protocol 2 to 5, as torch writes."""
    assert is_pickle(VALID[:64])
    assert not is_pickle(b"INFO 05-20")
    assert not is_pickle(b"\x80")


def test_a_wide_snapshot_crosses_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in small bites, the result is the same: no opcode is lost at an edge."""
    whole = _read(VALID)
    for chunk in (301, 512, 1000):
        monkeypatch.setattr("plimsoll.doctor.read.snapshot_pickle.CHUNK", chunk)
        monkeypatch.setattr("plimsoll.doctor.read.snapshot_pickle.ReadWindow.moved.__defaults__", (chunk,))
        assert _read(VALID) == whole


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 3))
def test_changed_bytes_never_run_anything_nor_fail_otherwise(changes: list[tuple[int, int]], drop: int) -> None:
    """Random changes of a valid snapshot are read or refused."""
    data = bytearray(SMALL)
    for place, value in changes:
        data[place] = value
    if drop:
        del data[changes[0][0] : changes[0][0] + drop]
    _read_or_refused(bytes(data))


@given(st.binary(max_size=60), st.integers(2, 5))
def test_random_opcodes_never_run_anything_nor_fail_otherwise(code: bytes, protocol: int) -> None:
    """Any bytes behind a valid head."""
    _read_or_refused(bytes((0x80, protocol)) + code)


def test_every_single_byte_is_read_or_refused() -> None:
    """Each opcode alone, with nothing and with something on the stack."""
    for opcode in range(256):
        for before in (b"", b"]", b"}\x94", b"](", b"}(\x8c\x01a", b"](K\x01K\x02"):
            for after in (b"", b".", b"\x00\x00\x00\x00.", b"abc\n."):
                _read_or_refused(b"\x80\x04" + before + bytes((opcode,)) + after)

"""Events and lists of frames that are taken in one step: the same comes out as when every opcode is read by itself."""

from __future__ import annotations

import gzip
import io
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read import snapshots
from plimsoll.doctor.read.snapshot_pickle import PickleReader
from plimsoll.doctor.read.snapshots import read_snapshot_from
from plimsoll.doctor.rules.snapshot_facts import Snapshot
from plimsoll.errors import BadInput

SEGMENT = {"device": 0, "address": 4096, "total_size": 512, "stream": 0, "segment_type": "small",
           "blocks": [{"size": 512, "state": "inactive", "requested_size": 0, "frames": []}]}  # fmt: skip
CAPTURED = sorted((Path(__file__).parents[2] / "captures").glob("*/snapshots/*.pickle.gz"))


class _OneByOne(PickleReader):
    """Reads every opcode by itself: neither lists of frames nor events of a known shape are taken in one step."""

    def _stack_at(self, _at: int, _stack: list[object]) -> int:
        return 0

    def _events(self, at: int, _stack: list[object]) -> int:
        return at


def _outcome(data: bytes, reader: type[PickleReader], monkeypatch: pytest.MonkeyPatch) -> object:
    """What comes out: the snapshot, or the line that refuses it."""
    monkeypatch.setattr(snapshots, "PickleReader", reader)
    try:
        return _read(data)
    except BadInput as error:
        return str(error)


def _history(events: int = 60) -> bytes:
    """A snapshot whose events come with stacks of their own, shared ones and none, as torch writes them."""
    frames = [{"filename": f"/f{number}.py", "line": number, "name": "f"} for number in range(300)]
    trace: list[object] = []
    for number in range(events):
        stack = [frames[(number * 7 + place) % 300] for place in range(2 + number % 5)]
        for action, shown in (("alloc", stack), ("free_requested", [*stack[1:], frames[3]]), ("free_completed", stack),
                              ("segment_map", [])):  # fmt: skip
            trace.append({"action": action, "addr": (1 << 46) + number, "size": 5 << (number % 30), "stream": 0,
                          "time_us": 1_700_000_000_000_000 + number, "compile_context": "".join(["N/", "A"]),
                          "frames": shown})  # fmt: skip
    trace.append({"action": "oom", "size": 9, "device_free": 3, "stream": 0, "time_us": 1, "frames": frames[:5]})
    return pickle.dumps({"segments": [SEGMENT], "device_traces": [trace], "again": trace[:3]}, 4)


HISTORY = _history()


def _read(data: bytes) -> Snapshot:
    return read_snapshot_from(io.BytesIO(data), "s.pickle")


def test_events_of_a_known_shape_are_taken_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first of a kind few are read opcode by opcode: what makes a long history cheap."""
    taken = []
    events = PickleReader._events

    def counted(self: PickleReader, at: int, stack: list[object]) -> int:
        before = len(stack)
        end = events(self, at, stack)
        taken.append(len(stack) - before)
        return end

    monkeypatch.setattr(PickleReader, "_events", counted)
    data = _history(600)
    assert _read(data).events == 2401
    assert sum(taken) > 600  # a stack that was never met is read one by one, and the next equal one is not


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: path.name)
def test_a_real_snapshot_reads_the_same_one_by_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that are taken at once change nothing of what comes out."""
    data = gzip.decompress(path.read_bytes())
    fast = _outcome(data, PickleReader, monkeypatch)
    assert isinstance(fast, Snapshot)
    assert fast == _outcome(data, _OneByOne, monkeypatch)


@given(
    st.lists(st.tuples(st.integers(0, len(HISTORY) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(HISTORY) - 1),
    st.integers(0, 5),
)
def test_a_damaged_history_ends_the_same_one_by_one(
    monkeypatch: pytest.MonkeyPatch, changes: list[tuple[int, int]], place: int, drop: int
) -> None:
    """With any bytes changed or lost, both ways give the same snapshot or the same line."""
    data = bytearray(HISTORY)
    for at, value in changes:
        data[at] = value
    del data[place : place + drop]
    assert _outcome(bytes(data), PickleReader, monkeypatch) == _outcome(bytes(data), _OneByOne, monkeypatch)


def test_a_history_crosses_the_window_in_small_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event or a list of frames that is cut by the window's edge is read one by one."""
    whole = _read(HISTORY)
    for chunk in (301, 512, 1000, 4096):
        monkeypatch.setattr("plimsoll.doctor.read.snapshot_pickle.CHUNK", chunk)
        monkeypatch.setattr("plimsoll.doctor.read.snapshot_pickle.ReadWindow.moved.__defaults__", (chunk,))
        assert _read(HISTORY) == whole


def test_a_failure_is_never_taken_for_an_event_of_a_known_shape() -> None:
    """However often the same failure comes, each is seen."""
    frames = [{"filename": "/a.py", "line": 1, "name": "f"}, {"filename": "/b.py", "line": 2, "name": "g"}]
    trace = [
        {"action": action, "size": number, "time_us": number, "frames": frames}
        for number in range(30)
        for action in ("alloc", "oom")
    ]
    snapshot = _read(pickle.dumps({"segments": [], "device_traces": [trace]}))
    assert [failure.size for failure in snapshot.failures] == list(range(14, 30))
    assert snapshot.events == 60


def test_ever_new_kinds_of_events_do_not_cost_ever_new_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes the shape with each event is read without patterns after a while."""
    trace = [{"action": "alloc", "context": f"text {number}", "frames": []} for number in range(3000)]
    data = pickle.dumps({"segments": [], "device_traces": [trace]})
    made = []
    compiled = re.compile

    def counted(pattern: bytes, flags: re.RegexFlag) -> re.Pattern[bytes]:
        made.append(pattern)
        return compiled(pattern, flags)

    monkeypatch.setattr("plimsoll.doctor.read.snapshot_pickle.re.compile", counted)
    assert _read(data).events == 3000
    assert len(made) <= 200

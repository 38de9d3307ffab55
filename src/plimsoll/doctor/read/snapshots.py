"""Reads what torch.cuda.memory._dump_snapshot writes, and a pickled torch.cuda.memory_snapshot(): never runs any of it."""

from __future__ import annotations

import gzip
import importlib
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from plimsoll.doctor.read.snapshot_pickle import ByteSource, FrameId, PickleReader, StackId
from plimsoll.doctor.rules.snapshot_facts import (
    DEFAULT_POOL,
    FREE,
    LIVE,
    NO_STACK,
    PENDING,
    Block,
    FailedRequest,
    Segment,
    Snapshot,
    StackFrame,
)
from plimsoll.errors import BadInput, TooLarge

_SEGMENTS_MAX = 1_000_000
_BLOCKS_MAX = 2_000_000
_FRAMES_KEPT = 512
_FAILURES_KEPT = 16
_TOO_BIG = 1 << 64
_STATES = {
    "active_allocated": LIVE,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # as torch's own description spells it
    "inactive": FREE,
}
_Table = dict[str, object]


def is_pickle(head: bytes) -> bool:
    """True if a file that begins like this may be a snapshot: pickle with its protocol in front, as torch writes it."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_snapshot(path: Path | str) -> Snapshot:
    """The snapshot in a file, plain or packed; BadInput in one line for anything else."""
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path}: not a file")
        with path.open("rb") as file:
            return read_snapshot_from(file, str(path))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None


def read_snapshot_from(file: BinaryIO, name: str) -> Snapshot:
    """The snapshot in an open file that can go back to its start; `name` is what errors call it."""
    head = file.read(4)
    file.seek(0)
    try:
        reader = PickleReader(_unpacked(file, head, name), name)
        return _Converter(reader).snapshot(reader.read())
    except (EOFError, zlib.error, OSError) as error:
        raise BadInput(f"{name}: cannot be read: {error}") from None


def _unpacked(file: BinaryIO, head: bytes, name: str) -> ByteSource:
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    if head == b"\x28\xb5\x2f\xfd":
        return _of_zstd(file, name)
    if head == b"PK\x03\x04":
        raise BadInput(f"{name}: a zip archive, perhaps of torch.save; wanted is what torch.cuda.memory._dump_snapshot writes")
    if not is_pickle(head):
        raise BadInput(f"{name}: not a memory snapshot: it does not begin as a pickle of protocol 2 to 5 does")
    return file


def _of_zstd(file: BinaryIO, name: str) -> ByteSource:
    for module, opener in (("compression.zstd", "ZstdFile"), ("zstandard", "open")):
        try:
            opened = getattr(importlib.import_module(module), opener)(file)
        except ImportError:
            continue
        return _Zstd(cast("ByteSource", opened), name)
    raise BadInput(f"{name}: packed with zstd, which needs Python 3.14 or the zstandard package; or unpack it first (zstd -d)")


class _Zstd:
    """Reads through a package whose errors share no base with anybody's."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self.source, self.name = source, name

    def read(self, size: int, /) -> bytes:
        try:
            return self.source.read(size)
        except Exception as error:
            raise BadInput(f"{self.name}: damaged zstd: {type(error).__name__}") from None


class _Converter:
    """The tree into tables. It walks three levels and no more, so what refers to itself is followed nowhere."""

    def __init__(self, reader: PickleReader) -> None:
        self.reader = reader
        self.where = reader.name
        self.blocks = 0
        self.lists: dict[int, StackId] = {}  # by identity: a long list that many share is looked at once
        self.stack_places: dict[StackId, int] = {}
        self.stacks: list[tuple[int, ...]] = [()]  # only what blocks and failures refer to is kept
        self.frame_places: dict[int, int] = {}
        self.frames: list[StackFrame] = []

    def snapshot(self, root: object) -> Snapshot:
        """The whole, checked; refused where it does not add up."""
        tree = root if isinstance(root, dict) else {"segments": root}
        listed = tree.get("segments")
        if not isinstance(listed, list):
            raise BadInput(f"{self.where}: plain data, but not a memory snapshot: no list of segments")
        if len(listed) > _SEGMENTS_MAX:
            raise TooLarge(f"{self.where}: more than {_SEGMENTS_MAX} segments")
        segments = []
        for number, each in enumerate(listed):
            self.where = f"{self.reader.name}: segment {number}"
            segments.append(self.segment(self.table(each)))
        self.where = self.reader.name
        failures, events = self.failures(tree.get("device_traces"))
        segments.sort(key=lambda segment: (segment.device, segment.address))
        return Snapshot(tuple(segments), tuple(self.frames), tuple(self.stacks), failures, events)

    def bad(self, what: str) -> BadInput:
        return BadInput(f"{self.where}: {what}")

    def table(self, value: object) -> _Table:
        """A dict, whose names are text since the reader takes no others."""
        if not isinstance(value, dict):
            raise self.bad("not a table")
        return value

    def number(self, table: _Table, name: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number within what an address may be."""
        value = table.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _TOO_BIG:
            raise self.bad(f"{name} is not a whole number of {least} or more")
        return value

    def segment(self, table: _Table) -> Segment:
        """One segment, whose blocks must fill it."""
        kind, listed = table.get("segment_type", "large"), table.get("blocks")
        if kind not in ("small", "large"):
            raise self.bad("segment_type is neither small nor large")
        if not isinstance(listed, list):
            raise self.bad("no list of blocks")
        self.blocks += len(listed)
        if self.blocks > _BLOCKS_MAX:
            raise TooLarge(f"{self.where}: more than {_BLOCKS_MAX} blocks")
        size, address = self.number(table, "total_size"), self.number(table, "address")
        blocks, at = [], address
        for each in listed:
            block = self.block(self.table(each), at)
            blocks.append(block)
            at += block.size
        if at - address != size:
            raise self.bad(f"its blocks have {at - address} bytes together, the segment {size}")
        return Segment(
            device=self.number(table, "device", 0), address=address, size=size,
            stream=self.number(table, "stream", 0, least=-_TOO_BIG), is_small=kind == "small",
            pool=self.pool(table.get("segment_pool_id", DEFAULT_POOL)), is_expandable=table.get("is_expandable") is True,
            blocks=tuple(blocks),
        )  # fmt: skip

    def pool(self, value: object) -> tuple[int, int]:
        if isinstance(value, tuple | list) and len(value) == 2:
            first, second = value
            if type(first) is int and type(second) is int:
                return first, second
        raise self.bad("segment_pool_id is not a pair of numbers")

    def block(self, table: _Table, address: int) -> Block:
        """One block; before torch 2.1 its size as asked for and its stack are in its history, newest first."""
        state = table.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise self.bad("a block in no known state")
        history = table.get("history")
        newest = self.table(history[0]) if isinstance(history, list) and history else {}
        size = self.number(table, "size")
        requested = None
        if "requested_size" in table:
            requested = self.number(table, "requested_size")
        elif "real_size" in newest:
            requested = self.number(newest, "real_size")
        stack = self.stack(table["frames"] if "frames" in table else newest.get("frames"))
        return Block(address, size, requested, _STATES[state], stack)

    def stack(self, value: object) -> int:
        """The reader has made an id of nearly every stack; those of one frame and of very many are still lists."""
        if isinstance(value, list) and value:
            value = self.listed_stack(value)
        if value is None or value == []:
            return NO_STACK
        if not isinstance(value, StackId):
            raise self.bad("frames is not a list")
        place = self.stack_places.get(value)
        if place is None:
            place = self.stack_places[value] = len(self.stacks)
            self.stacks.append(tuple(self.frame(frame) for frame in self.reader.frames_of(value)))
        return place

    def listed_stack(self, value: list[object]) -> StackId:
        """A stack that is still a list; of an endless one the two ends."""
        known = self.lists.get(id(value))
        if known is None:
            kept = value if len(value) <= _FRAMES_KEPT else [*value[: _FRAMES_KEPT // 2], *value[-_FRAMES_KEPT // 2 :]]
            if any(not isinstance(frame, FrameId) for frame in kept):
                raise self.bad("frames holds something that is no frame")
            known = self.lists[id(value)] = self.reader.stack_id(kept)
        return known

    def frame(self, frame: int) -> int:
        place = self.frame_places.get(frame)
        if place is None:
            place = self.frame_places[frame] = len(self.frames)
            self.frames.append(self.reader.frames[frame])
        return place

    def failures(self, traces: object) -> tuple[tuple[FailedRequest, ...], int]:
        """The last failed requests of all devices, and how many events were recorded."""
        if traces is None:
            return (), 0
        if not isinstance(traces, list) or any(not isinstance(trace, list) for trace in traces):
            raise self.bad("device_traces is not a list of lists")
        found, events, seen = [], 0, set()
        for device, trace in enumerate(traces[:1024]):
            if id(trace) in seen:
                continue
            seen.add(id(trace))
            events += len(trace)
            places = [place for place, event in enumerate(trace) if event is not None]
            for place in places[-_FAILURES_KEPT:]:
                event = self.table(trace[place])
                if event.get("action") == "oom":
                    found.append(self.failure(event, device, len(trace) - 1 - place))
        found.sort(key=lambda failure: failure.time_us or 0)
        return tuple(found[-_FAILURES_KEPT:]), events

    def failure(self, event: _Table, device: int, after: int) -> FailedRequest:
        """One failed request; what is absent is unknown."""
        free, stream, time = (
            self.number(event, name, least=-_TOO_BIG) if name in event else None
            for name in ("device_free", "stream", "time_us")
        )
        return FailedRequest(device, self.number(event, "size"), free, stream, time, self.stack(event.get("frames")), after)

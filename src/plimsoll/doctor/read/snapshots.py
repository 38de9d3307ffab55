"""Reads what torch.cuda.memory._dump_snapshot writes, and a pickled torch.cuda.memory_snapshot(): never runs any of it.

A pickle can name any function, and a small one can ask for all memory and all time. So a process of its own reads it, with
limits on both, by an unpickler that looks up no name; what comes back is numbers and text, checked against their types.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import resource
import stat
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import NoReturn

import msgspec

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
from plimsoll.net.inputs import BLOCK_BYTES, InputKind, kind_of, unpacked
from plimsoll.redaction import printable

MEMORY_MAX = 8 << 30  # of the process that reads: it needs about four times the size of the file
TIME_MAX_S = 300.0
_SEGMENTS_MAX = 1_000_000
_BLOCKS_MAX = 2_000_000
_FRAMES_KEPT = 512
_NAME_KEPT = 300  # characters of a file's or function's name
_FAILURES_KEPT = 16
_TOO_BIG = 1 << 63
_STATES = {
    "active_allocated": LIVE,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # as torch's own description spells it
    "inactive": FREE,
}
_BAD_INPUT, _TOO_LARGE = 2, 4  # exit codes of the process that reads
_Table = dict[object, object]


def read_snapshot(path: Path | str, *, timeout_s: float = TIME_MAX_S, memory_max: int = MEMORY_MAX) -> Snapshot:
    """The snapshot in a file, plain or packed; BadInput in one line for anything else."""
    path = Path(path)
    most = min(memory_max, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    # -P: no module is taken from the folder that the user happens to be in.
    command = [sys.executable, "-P", "-m", "plimsoll.doctor.read.snapshots", str(path), str(most), str(int(timeout_s) + 1)]
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path}: not a file")
        with path.open("rb") as file:
            done = subprocess.run(command, stdin=file, capture_output=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise TooLarge(f"{path}: not read within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if done.returncode == 0:
        return msgspec.msgpack.decode(done.stdout, type=Snapshot)
    said = printable(done.stderr.decode("utf-8", "replace").strip())
    if done.returncode == _TOO_LARGE:
        raise TooLarge(said)
    raise BadInput(said if done.returncode == _BAD_INPUT else f"{path}: refused: its reader was ended. Nothing was run")


def limit_resources(memory_max: int, seconds: int) -> None:
    """Bound what this process may take, for good; where memory runs out all the same, it goes first."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    bounds = {resource.RLIMIT_AS: memory_max, resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for what, most in bounds.items():
        resource.setrlimit(what, (most, most))


def _main() -> None:
    """Read the file on standard input; write its snapshot, or one line to standard error."""
    name, memory_max, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    limit_resources(memory_max, seconds)
    gc.disable()  # the tree is made once and taken apart never
    try:
        answer, code = msgspec.msgpack.encode(parse_snapshot(io.FileIO(0, closefd=False), name)), 0
    except MemoryError:
        answer, code = f"{name}: would take more than {memory_max >> 20:,} MiB of memory to read".encode(), _TOO_LARGE
    except BadInput as error:
        answer, code = str(error).encode("utf-8", "replace"), _TOO_LARGE if isinstance(error, TooLarge) else _BAD_INPUT
    with contextlib.suppress(BrokenPipeError), io.FileIO(2 if code else 1, "wb") as out:
        left = memoryview(answer)
        while left:
            left = left[out.write(left) :]
    os._exit(code)


class _PlainUnpickler(pickle.Unpickler):
    """Containers, numbers and text: whatever names something outside the file is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, _: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside the file")


def parse_snapshot(raw: io.RawIOBase | io.BytesIO, name: str) -> Snapshot:
    """The snapshot in a stream; in a process with limits, unless the stream is trusted."""
    try:
        packed = io.BufferedReader(raw, BLOCK_BYTES)
        if packed.peek(4).startswith(b"PK\x03\x04"):
            wanted = "wanted is what torch.cuda.memory._dump_snapshot writes"
            raise BadInput(f"{name}: a zip archive, perhaps of torch.save; {wanted}")
        file = unpacked(name, packed)
        if kind_of(file.peek(2)[:2]) is not InputKind.SNAPSHOT:
            raise BadInput(f"{name}: not a memory snapshot: it does not begin as a pickle of protocol 2 to 5 does")
        return _Converter(name).snapshot(_PlainUnpickler(file).load())
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # a pickle that is damaged or hostile may raise anything
        why = printable(f"{type(error).__name__}: {error}")[:200]
        raise BadInput(f"{name}: refused: not a whole pickle of plain data ({why}). Nothing was run") from None


class _Converter:
    """The tree into tables. It walks three levels and no more, so what refers to itself is followed nowhere."""

    def __init__(self, name: str) -> None:
        self.name = self.where = name
        self.blocks = 0
        self.frames: dict[StackFrame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {(): NO_STACK}
        self.places: dict[int, int] = {}  # of frames and stacks, by identity: what many share is looked at once

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
            self.where = f"{self.name}: segment {number}"
            segments.append(self.segment(self.table(each)))
        self.where = self.name
        failures, events = self.failures(tree.get("device_traces"))
        segments.sort(key=lambda segment: (segment.device, segment.address))
        return Snapshot(tuple(segments), tuple(self.frames), tuple(self.stacks), failures, events)

    def bad(self, what: str) -> BadInput:
        return BadInput(f"{self.where}: {what}")

    def table(self, value: object) -> _Table:
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
        pool = table.get("segment_pool_id", DEFAULT_POOL)
        numbers = pool if isinstance(pool, tuple | list) and len(pool) == 2 else ()
        if not numbers or not all(type(number) is int and abs(number) < _TOO_BIG for number in numbers):
            raise self.bad("segment_pool_id is not a pair of numbers")
        return Segment(
            device=self.number(table, "device", 0), address=address, size=size,
            stream=self.number(table, "stream", 0, least=-_TOO_BIG), is_small=kind == "small",
            pool=(numbers[0], numbers[1]), is_expandable=table.get("is_expandable") is True,
            blocks=tuple(blocks),
        )  # fmt: skip

    def block(self, table: _Table, address: int) -> Block:
        """One block; before torch 2.1 its stack is in its history, newest first."""
        state = table.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise self.bad("a block in no known state")
        history = table.get("history")
        newest = self.table(history[0]) if isinstance(history, list) and history else {}
        stack = self.stack(table["frames"] if "frames" in table else newest.get("frames"))
        return Block(address, self.number(table, "size"), _STATES[state], stack)

    def stack(self, value: object) -> int:
        """The place of a list of frames among the stacks; of an endless one the two ends are kept."""
        if value is None or value == []:
            return NO_STACK
        if not isinstance(value, list):
            raise self.bad("frames is not a list")
        place = self.places.get(id(value))
        if place is None:
            kept = value if len(value) <= _FRAMES_KEPT else [*value[: _FRAMES_KEPT // 2], *value[-_FRAMES_KEPT // 2 :]]
            place = self.stacks.setdefault(tuple(map(self.frame, kept)), len(self.stacks))
            self.places[id(value)] = place
        return place

    def frame(self, value: object) -> int:
        """The place of a frame among all that were met."""
        place = self.places.get(id(value))
        if place is None:
            table = self.table(value)
            filename, name = table.get("filename"), table.get("name")
            if not isinstance(filename, str) or not isinstance(name, str):
                raise self.bad("a frame of a stack without a file or a name")
            line = self.number(table, "line", least=-_TOO_BIG)
            # Without halves of letters, which a file's name may hold and UTF-8 may not.
            shown = [text.encode("utf-8", "replace").decode() for text in (filename[-_NAME_KEPT:], name[:_NAME_KEPT])]
            frame = StackFrame(shown[0], line, shown[1])
            place = self.places[id(value)] = self.frames.setdefault(frame, len(self.frames))
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
            failed = (
                (event, after)
                for after, event in enumerate(reversed(trace))
                if isinstance(event, dict) and event.get("action") == "oom"
            )
            for event, after in list(islice(failed, _FAILURES_KEPT))[::-1]:
                free, stream, time = (  # what is absent is unknown
                    self.number(event, name, least=-_TOO_BIG) if name in event else None
                    for name in ("device_free", "stream", "time_us")
                )
                size, stack = self.number(event, "size"), self.stack(event.get("frames"))
                found.append(FailedRequest(device, size, free, stream, time, stack, after))
        found.sort(key=lambda failure: failure.time_us or 0)
        return tuple(found[-_FAILURES_KEPT:]), events


if __name__ == "__main__":
    _main()

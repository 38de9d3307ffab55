"""What reading and judging a large snapshot of torch's memory costs, beside Python's own unpickler on the same file.

    python -m benchmarks.doctor_speed_snapshot [--size MB]

The snapshot is written in a temporary folder in the shape a real server's has: blocks and frames first, then the recorded
events, two of three with a list of frames of their own. Each reader runs in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SIZE_MB = 200
PEAK_PROMISED_MB = 2000.0
MIB = 1 << 20
FRAMES, STACKS, SEGMENTS, BLOCKS = 1200, 2000, 100, 200
KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "frames")
ACTIONS = ("alloc", "free_requested", "free_completed")

PEAK = """
def peak_mb():
    try:
        return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
    except OSError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)
"""
OURS = f"""
import json, sys, time
{PEAK}
from plimsoll.doctor.rules.snapshot import judge_snapshot
from plimsoll.doctor.read.snapshots import read_snapshot
begin = time.process_time()
snapshot = read_snapshot(sys.argv[1])
read = time.process_time() - begin
judge_snapshot(snapshot, "snapshot")
import resource
child = resource.getrusage(resource.RUSAGE_CHILDREN)
cost, peak = child.ru_utime + child.ru_stime, max(peak_mb(), child.ru_maxrss / 1024)
seconds = time.process_time() - begin + cost
print(json.dumps({{"seconds": seconds, "read": read + cost, "peak_mb": peak, "events": snapshot.events}}))
"""
THEIRS = f"""
import json, pickle, sys, time
{PEAK}
class Strict(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError("refused")
begin = time.process_time()
with open(sys.argv[1], "rb") as file:
    tree = Strict(file).load()
seconds, events = time.process_time() - begin, len(tree["device_traces"][0])
print(json.dumps({{"seconds": seconds, "peak_mb": peak_mb(), "events": events}}))
"""


class SnapshotCost(NamedTuple):
    """One measurement; seconds are of the processor."""

    size_mb: float
    events: int
    seconds: float  # read and judged
    read_seconds: float
    peak_mb: float
    unpickler_seconds: float
    unpickler_peak_mb: float

    @property
    def times_unpickler(self) -> float:
        """Ours against Python's; information, no promise."""
        return self.seconds / self.unpickler_seconds


def _head(chance: random.Random) -> dict[str, object]:
    """Frames, stacks and segments, and every word that an event needs."""
    frames = [
        {"name": f"step_{number % 97}", "filename": f"/usr/lib/vllm/v1/worker/part_{number % 131}.py", "line": number}
        for number in range(FRAMES)
    ]
    stacks = [[frames[chance.randrange(FRAMES)] for _ in range(chance.randrange(20, 50))] for _ in range(STACKS)]
    segments: list[dict[str, object]] = []
    for place in range(SEGMENTS):
        address = 0x7F0000000000 + place * BLOCKS * 2 * MIB
        blocks = [
            {"address": address + number * 2 * MIB, "size": 2 * MIB, "requested_size": 2 * MIB - 100,
             "state": "active_allocated" if number % 3 else "inactive",
             "frames": stacks[chance.randrange(STACKS)] if number % 3 else []}
            for number in range(BLOCKS)
        ]  # fmt: skip
        segments.append({"device": 0, "address": address, "total_size": BLOCKS * 2 * MIB, "stream": 0, "segment_type": "large",
                         "segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks})  # fmt: skip
    return {"segments": segments, "words": [*KEYS, *ACTIONS, ""], "allocator_settings": {"expandable_segments": False},
            "frames": frames, "stacks": stacks}  # fmt: skip


def _get(place: int) -> bytes:
    return b"h" + bytes((place,)) if place < 256 else b"j" + struct.pack("<I", place)


def _number(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes((value,))
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes((len(digits),)) + digits


def _events(refs: dict[str, bytes], stacks: list[bytes], place: int, chance: random.Random) -> Iterator[bytes]:
    """An allocation with its stack, then its two frees, which share one stack; `place` is the next in pickle's memo."""
    time = 1_794_734_327_178_029
    while True:
        address, size = 0x7F0000000000 + chance.randrange(1 << 36) * 512, chance.randrange(1, 1 << 26)
        shared = b""
        for action in ACTIONS:
            time += 3
            if action == "free_completed":
                frames, made = shared, 2
            else:
                frames, made = b"]\x94(" + stacks[chance.randrange(len(stacks))] + b"e", 3
                shared = _get(place + 2)
            values = (
                refs[action],
                _number(address),
                _number(size),
                _number(0),
                _number(time),
                b"\x8c\x03N/A\x94",
                refs[""],
                frames,
            )
            yield b"}\x94(" + b"".join(refs[key] + value for key, value in zip(KEYS, values, strict=True)) + b"u"
            place += made


def write_snapshot(path: Path, size_bytes: int) -> int:
    """Write a snapshot of this size without holding it; returns the number of its events."""
    chance = random.Random(7)
    tree = _head(chance)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 4)
    pickler.dump(tree)
    memo = {id(value): place for place, value in pickler.memo.copy().values()}
    words, frames, stacks = tree["words"], tree["frames"], tree["stacks"]
    assert isinstance(words, list)
    assert isinstance(frames, list)
    assert isinstance(stacks, list)
    refs = {word: _get(memo[id(word)]) for word in words}
    packed = [b"".join(_get(memo[id(frame)]) for frame in stack) for stack in stacks]
    written = events = 0
    with path.open("wb") as out:
        # The tree is on the stack; one more pair makes it a whole snapshot. pickle fills lists in batches of 1,000.
        written += out.write(stream.getvalue()[:-1] + b"\x8c\x0ddevice_traces](](")
        for event in _events(refs, packed, len(memo), chance):
            written += out.write(event)
            events += 1
            if events % 1000 == 0:
                if written >= size_bytes:
                    break
                out.write(b"e(")
        out.write(b"ees.")
    return events


def _run(script: str, path: Path, events: int) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True, env=environment)
    said: dict[str, float] = json.loads(done.stdout)
    assert said["events"] == events, f"{events} events were written, {said['events']} read"
    return said


def measure_snapshot(size_mb: int = SIZE_MB) -> SnapshotCost:
    """Write a snapshot of this size, read and judge it in a fresh process, and let Python's unpickler read it in another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        events = write_snapshot(path, size_mb * 1_000_000)
        ours, theirs = _run(OURS, path, events), _run(THEIRS, path, events)
        size = path.stat().st_size / 1_000_000
    return SnapshotCost(
        size, events, ours["seconds"], ours["read"], ours["peak_mb"], theirs["seconds"], theirs["peak_mb"]
    )  # fmt: skip


def main() -> None:
    """Print the figures; exit 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE_MB, metavar="MB", help="size of the snapshot")
    cost = measure_snapshot(parser.parse_args().size)
    print(f"{cost.size_mb:.0f} MB, {cost.events:,} events: read and judged in {cost.seconds:.1f} s of the processor "
          f"({cost.read_seconds:.1f} s to read), {cost.peak_mb:.0f} MB at most (promised {PEAK_PROMISED_MB:.0f})")  # fmt: skip
    print(f"Python's unpickler: {cost.unpickler_seconds:.1f} s, {cost.unpickler_peak_mb:.0f} MB; "
          f"ours takes {cost.times_unpickler:.1f} times as long")  # fmt: skip
    if cost.peak_mb > PEAK_PROMISED_MB:
        raise SystemExit("promise broken: peak memory of reading a snapshot")


if __name__ == "__main__":
    main()

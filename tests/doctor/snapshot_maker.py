"""A small model of torch's caching allocator, to make snapshots whose right answer is known."""

from __future__ import annotations

import pickle
from pathlib import Path

from plimsoll.doctor.read.snapshots import read_snapshot
from plimsoll.doctor.rules.snapshot_facts import Snapshot

MIB, GIB = 1 << 20, 1 << 30
VLLM = "/usr/lib/python3/dist-packages/vllm/"
Stack = tuple[tuple[str, int, str], ...]  # innermost first

WEIGHTS: Stack = (
    (VLLM + "model_executor/layers/linear.py", 210, "create_weights"),
    (VLLM + "model_executor/model_loader/utils.py", 55, "initialize_model"),
    (VLLM + "v1/worker/gpu_model_runner.py", 4200, "load_model"),
)
KV: Stack = (
    (VLLM + "v1/worker/gpu_model_runner.py", 7107, "_allocate_kv_cache_tensors"),
    (VLLM + "v1/worker/gpu_model_runner.py", 7300, "initialize_kv_cache"),
)
FORWARD: Stack = (
    (VLLM + "model_executor/layers/activation.py", 88, "forward_cuda"),
    (VLLM + "model_executor/models/llama.py", 120, "forward"),
    (VLLM + "v1/worker/gpu_model_runner.py", 3600, "execute_model"),
)
LOGPROBS: Stack = (
    (VLLM + "v1/sample/sampler.py", 240, "compute_logprobs"),
    (VLLM + "v1/worker/gpu_model_runner.py", 4000, "_get_prompt_logprobs_dict"),
    (VLLM + "v1/worker/gpu_model_runner.py", 3600, "execute_model"),
)
CAPTURE: Stack = (
    (VLLM + "compilation/cuda_graph.py", 210, "__call__"),
    (VLLM + "v1/worker/gpu_model_runner.py", 6500, "capture_model"),
)


class Allocator:
    """Takes segments, cuts them, joins neighbours again, and dumps what torch would."""

    def __init__(self, *, is_expandable: bool = False, with_stacks: bool = True) -> None:
        self.is_expandable = is_expandable
        self.with_stacks = with_stacks
        self.segments: list[dict[str, object]] = []
        self.blocks: list[list[dict[str, object]]] = []
        self.events: list[dict[str, object]] = []
        self.frames: dict[tuple[str, int, str], dict[str, object]] = {}
        self.lists: dict[Stack, list[dict[str, object]]] = {}
        self.next_address = 0x7F0000000000

    def stack(self, stack: Stack) -> list[dict[str, object]]:
        """The frames of a stack as torch writes them: the same dicts, the same list, each time."""
        if not self.with_stacks:
            return []
        if stack not in self.lists:
            for filename, line, name in stack:
                self.frames.setdefault((filename, line, name), {"name": name, "filename": filename, "line": line})
            self.lists[stack] = [self.frames[frame] for frame in stack]
        return self.lists[stack]

    def alloc(self, size: int, stack: Stack = (), pool: tuple[int, int] = (0, 0), stream: int = 0) -> int:
        """Give memory as torch does: best fit among free blocks of the pool, else a new segment."""
        rounded = max(512, -(-size // 512) * 512)
        is_small = rounded <= MIB
        kind = "small" if is_small else "large"
        fitting = [
            (int(str(block["size"])), place, number)
            for place, segment in enumerate(self.segments)
            if (segment["segment_pool_id"], segment["segment_type"], segment["stream"]) == (pool, kind, stream)
            for number, block in enumerate(self.blocks[place])
            if block["state"] == "inactive" and int(str(block["size"])) >= rounded
        ]
        place, number = min(fitting)[1:] if fitting else self._more(rounded, kind, pool, stream)
        return self._take(place, number, rounded, size, stack)

    def _more(self, size: int, kind: str, pool: tuple[int, int], stream: int) -> tuple[int, int]:
        """A new segment; where segments are expandable, more pages at the end of the one there is."""
        page = 2 * MIB if kind == "small" else 20 * MIB
        if self.is_expandable:
            for place, segment in enumerate(self.segments):
                if (segment["segment_pool_id"], segment["segment_type"], segment["stream"]) == (pool, kind, stream):
                    return place, self._grow(place, size, page)
            total = -(-size // page) * page
        elif kind == "small" or size < 10 * MIB:
            total = page
        else:
            total = -(-size // (2 * MIB)) * 2 * MIB
        segment = {
            "device": 0, "address": self.next_address, "total_size": total, "allocated_size": 0, "active_size": 0,
            "requested_size": 0, "stream": stream, "segment_type": kind, "segment_pool_id": pool,
            "is_expandable": self.is_expandable, "frames": [],
        }  # fmt: skip
        self.segments.append(segment)
        self.blocks.append([self._block(self.next_address, total)])
        self.next_address += (1 << 40) if self.is_expandable else total + 64 * MIB
        return len(self.segments) - 1, 0

    def _grow(self, place: int, size: int, page: int) -> int:
        row, total = self.blocks[place], int(str(self.segments[place]["total_size"]))
        free = int(str(row[-1]["size"])) if row[-1]["state"] == "inactive" else 0
        added = -(-(size - free) // page) * page
        row.append(self._block(int(str(self.segments[place]["address"])) + total, added))
        self.segments[place]["total_size"] = total + added
        self._join(row, len(row) - 1)
        return len(row) - 1

    @staticmethod
    def _block(address: int, size: int) -> dict[str, object]:
        return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}

    def _take(self, place: int, number: int, rounded: int, size: int, stack: Stack) -> int:
        block = self.blocks[place][number]
        have, address = int(str(block["size"])), int(str(block["address"]))
        is_small = self.segments[place]["segment_type"] == "small"
        if have - rounded >= (512 if is_small or self.is_expandable else MIB):
            block["size"] = rounded
            self.blocks[place].insert(number + 1, self._block(address + rounded, have - rounded))
        block.update(state="active_allocated", requested_size=size, frames=self.stack(stack))
        self._event("alloc", address, rounded, stack)
        return address

    def free(self, address: int) -> None:
        """Give it back; free neighbours become one."""
        for row in self.blocks:
            for number, block in enumerate(row):
                if block["address"] == address and block["state"] != "inactive":
                    self._event("free_completed", address, int(str(block["size"])), ())
                    block.update(state="inactive", requested_size=0, frames=[])
                    self._join(row, number + 1)
                    self._join(row, number)
                    return
        raise AssertionError(f"nothing at {address:x}")

    @staticmethod
    def _join(row: list[dict[str, object]], number: int) -> None:
        if 0 < number < len(row) and row[number]["state"] == row[number - 1]["state"] == "inactive":
            row[number - 1]["size"] = int(str(row[number - 1]["size"])) + int(str(row[number]["size"]))
            del row[number]

    def _event(self, action: str, address: int, size: int, stack: Stack) -> None:
        time = 1_700_000_000_000_000 + len(self.events)
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": self.stack(stack)}
        self.events.append(event)

    def fail(self, size: int, device_free: int, stack: Stack = FORWARD) -> None:
        """Record that a request failed."""
        self._event("oom", 0, size, stack)
        del self.events[-1]["addr"]
        self.events[-1]["device_free"] = device_free

    def tree(self) -> dict[str, object]:
        for segment, blocks in zip(self.segments, self.blocks, strict=True):
            live = [block for block in blocks if block["state"] == "active_allocated"]
            segment["blocks"] = blocks
            segment["allocated_size"] = segment["active_size"] = sum(int(str(block["size"])) for block in live)
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": self.is_expandable}
        return {
            "segments": self.segments, "device_traces": [self.events if self.with_stacks else []],
            "allocator_settings": settings, "external_annotations": [],
        }  # fmt: skip

    def snapshot(self, folder: Path, name: str = "snapshot.pickle") -> Snapshot:
        path = folder / name
        path.write_bytes(pickle.dumps(self.tree()))
        return read_snapshot(path)


def serving(*, is_expandable: bool = False, with_stacks: bool = True, layers: int = 16) -> Allocator:
    """A healthy server: weights layer by layer, one KV cache, a graph pool, free segments left by prompts."""
    made = Allocator(is_expandable=is_expandable, with_stacks=with_stacks)
    made.alloc(1050 * MIB, WEIGHTS)
    for _ in range(layers):
        made.alloc(48 * MIB, WEIGHTS)
        made.alloc(32 * MIB, WEIGHTS)
        made.alloc(224 * MIB, WEIGHTS)
        made.alloc(8192, WEIGHTS)
    made.alloc(20 * GIB, KV)
    for size in (2, 8, 30):
        made.alloc(size * MIB, CAPTURE, pool=(0, 1))
    prompts = [made.alloc(size * MIB, FORWARD) for size in (400, 250, 120)]
    for address in prompts:
        made.free(address)
    return made


def split(**options: bool) -> Allocator:
    """Gaps of 200 MiB between live pieces of 100 MiB, 2,400 MiB together; a request of 512 MiB fails."""
    made = serving(**options)
    made.segments, made.blocks = _without_free_segments(made)
    rests = []
    for _ in range(12):
        made.free(made.alloc(300 * MIB, FORWARD))
        made.alloc(100 * MIB, LOGPROBS)
        rests.append(made.alloc(200 * MIB, FORWARD))
    for address in rests:
        made.free(address)
    made.fail(512 * MIB, 150 * MIB)
    return made


def pinned(**options: bool) -> Allocator:
    """Two segments of 500 MiB, each held by one small block of 1.5 MiB; a request of 600 MiB fails."""
    made = serving(**options)
    made.segments, made.blocks = _without_free_segments(made)
    first, second = made.alloc(500 * MIB, FORWARD), made.alloc(500 * MIB, FORWARD)
    for address in (first, second):
        made.free(address)
        made.alloc(3 * MIB // 2, LOGPROBS)
        if address == first:  # take the rest, so that the next small one lands in the other segment
            rest = made.alloc(498 * MIB, FORWARD)
    made.free(rest)
    made.fail(600 * MIB, 20 * MIB)
    return made


def _without_free_segments(made: Allocator) -> tuple[list[dict[str, object]], list[list[dict[str, object]]]]:
    """What torch does before it fails."""
    kept = [(segment, row) for segment, row in zip(made.segments, made.blocks, strict=True)
            if any(block["state"] != "inactive" for block in row)]  # fmt: skip
    return [segment for segment, _ in kept], [row for _, row in kept]

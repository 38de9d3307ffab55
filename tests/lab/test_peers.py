"""The other simulators and the comparison with them, without installing anything."""

from __future__ import annotations

import json
from typing import Any

from lab.peers import dynosim
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace import Trace, make_trace


def told_of(trace: Trace) -> list[dict[str, Any]]:
    """What DynoSim is told of each request."""
    return [json.loads(line) for line in dynosim.trace_lines(trace)]


def test_dynosim_is_told_lengths_times_shared_ids_and_usable_blocks() -> None:
    """An id for every 512 tokens, those of the trace kept; vLLM's 1,025 blocks are 1,024 that can be used."""
    shared = make_trace("shared", [0, 0, 0], [1024, 600, 600], [1, 1, 1], ids=[[7, 8], [7, 9], []])
    assert [row["hash_ids"] for row in told_of(shared)] == [[7, 8], [7, 9], [10, 11]]
    rows = told_of(make_trace("three", [0, 1_500_000_001, 3_661_000_000_000], [513, 512, 7], [3, 1, 9]))
    assert [row["hash_ids"] for row in rows] == [[0, 1], [2], [3]]
    assert [row["timestamp"] for row in rows] == [0, 1500.000001, 3_661_000]
    assert [(row["input_length"], row["output_length"]) for row in rows] == [(513, 3), (512, 1), (7, 9)]
    told = dynosim.engine_arguments(EngineLimits(num_blocks=1025, block_size=32))
    assert (told["num_gpu_blocks"], told["block_size"]) == (1024, 32)

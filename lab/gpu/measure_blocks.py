"""Does it matter where a request's blocks lie, and how large they are? One attention kernel, every layout, on a real GPU.

    python3 -m lab.gpu.measure_blocks [--out FILE] [--repeats 30]

On a host with vLLM and a GPU that has FlashAttention 3. A decode step reads each request's keys and values through its block
table; the same reads are timed with tables that are contiguous, shuffled over the whole pool, and interleaved (as requests
that grow together leave them). Each layout is timed turn by turn with the others, so that a slow moment hits all, and the
fastest, the median and the slowest time are kept. `copy` is what a plain copy of as many bytes reaches in the same run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # of a Llama-3.1-8B
SHAPES = ((64, 8192), (256, 2048), (8, 65536))  # requests and tokens of each: 2.1 GB of keys and values
BLOCK_SIZES = (16, 32, 64, 128, 256)
LAYOUTS = ("contiguous", "interleaved", "shuffled")


def table(layout: str, requests: int, blocks: int, seed: int = 0) -> list[list[int]]:
    """For each request the places of its blocks in the pool; every place is used once."""
    if layout == "interleaved":
        return [[request + requests * number for number in range(blocks)] for request in range(requests)]
    places = list(range(requests * blocks))
    if layout == "shuffled":
        random.Random(seed).shuffle(places)
    return [places[request * blocks : (request + 1) * blocks] for request in range(requests)]


def _copy_gb_per_s(torch: Any, size: int, repeats: int) -> float:
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [_timed(torch, lambda: target.copy_(source)) for _ in range(repeats)]
    return size / min(times) / 1e6  # read and written


def _timed(torch: Any, do: Any) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    do()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measure(requests: int, length: int, block_size: int, repeats: int) -> dict[str, Any]:
    """One shape and block size: milliseconds of every layout."""
    torch, attention = importlib.import_module("torch"), importlib.import_module("vllm.vllm_flash_attn")
    blocks = length // block_size
    pool = torch.empty((2, requests * blocks, block_size, KV_HEADS, HEAD_SIZE), dtype=torch.bfloat16, device="cuda").normal_()
    query = torch.empty((requests, HEADS, HEAD_SIZE), dtype=torch.bfloat16, device="cuda").normal_()
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)
    tables = {name: torch.tensor(table(name, requests, blocks), dtype=torch.int32, device="cuda") for name in LAYOUTS}

    def step(name: str) -> None:
        attention.flash_attn_varlen_func(
            query, pool[0], pool[1], max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=length, seqused_k=lengths,
            softmax_scale=HEAD_SIZE**-0.5, causal=True, block_table=tables[name], out=out, fa_version=3,
        )  # fmt: skip

    times: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for turn in range(repeats + 3):
        for name in LAYOUTS if turn % 2 == 0 else LAYOUTS[::-1]:
            took = _timed(torch, functools.partial(step, name))
            if turn >= 3:
                times[name].append(took)
    size = pool.numel() * 2
    found = {
        name: {
            "least_ms": min(row),
            "median_ms": statistics.median(row),
            "most_ms": max(row),
            "gb_per_s": size / statistics.median(row) / 1e6,
        }
        for name, row in times.items()
    }
    shape = {"requests": requests, "tokens_each": length, "block_size": block_size, "bytes": size, "repeats": repeats}
    return {**shape, "layouts": found, "copy_gb_per_s": _copy_gb_per_s(torch, size, 10)}


def main(arguments: list[str]) -> int:
    """Measure everything and write it down."""
    parser = argparse.ArgumentParser(description="Time a decode's attention for every block size and layout.")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "block-layouts.json")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args(arguments)
    rows = []
    for requests, length in SHAPES:
        for block_size in BLOCK_SIZES:
            rows.append(measure(requests, length, block_size, options.repeats))
            medians = {name: round(row["median_ms"], 4) for name, row in rows[-1]["layouts"].items()}
            print(f"{requests} x {length}, blocks of {block_size}: {medians}", flush=True)
            options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

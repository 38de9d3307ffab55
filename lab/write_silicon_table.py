"""Reduces public tables of measured kernels to the small one that the step clock ships with, silicon.json.

    pip download --no-deps aisimulate==0.13.0.dev202610270000000085      # Apache-2.0, NVIDIA; unzip it into FOLDER
    python -m lab.write_silicon_table FOLDER                             # needs pyarrow

What is kept of a kernel is its time over the ideal one: the slower of its operations at the card's dense rate and its bytes at
the card's bandwidth, both by the data sheet. A ratio changes slowly with the shape, so that a coarse grid is enough, and it
carries over to another card of the same generation, whose own data sheet it is multiplied with.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from plimsoll.hardware.cards import gpu_named

SOURCE = "aisimulate 0.13.0.dev202610270000000085, aisimulate_core/systems/data (NVIDIA, Apache-2.0): measured by its authors"
TABLE = Path(__file__).resolve().parents[1] / "src" / "plimsoll" / "simulate" / "data" / "silicon.json"
# Folder, release of vLLM, our card, and the card whose data sheet stands for it where its own gives no rates.
SYSTEMS = (
    ("h200_sxm", "0.25.0", "H200 SXM 141GB", ""),
    ("h100_sxm", "0.25.0", "H100 SXM 80GB", ""),
    ("b200_sxm", "0.25.0", "B200", ""),
    ("rtx_pro_6000_server", "0.24.0", "RTX PRO 6000 Blackwell Server", "RTX PRO 6000 Blackwell Workstation"),
    ("l40s", "0.24.0", "L40S", ""),
    ("a100_sxm", "0.14.0", "A100 SXM 80GB", ""),
)
TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COLUMNS = (512, 1024, 2048, 4096, 8192, 16384, 51200)
INNER = (512, 1024, 2048, 4096, 8192, 16384)
TYPES = {"bfloat16": 2.0, "fp8": 1.0}
MOE_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Hidden size, width of an expert, experts of a token, experts.
MOE_SHAPES = ((2048, 768, 8, 128), (4096, 1536, 8, 128), (4096, 14336, 2, 8), (7168, 2048, 8, 256), (2880, 2880, 4, 32))
SKEW = "power_law_1.01"
PREFILL_LENGTHS = (2048, 4096, 8192)
DECODE_BYTES = 4e9
DECODE_BATCH = 512
LONG_BYTES, CACHE_BYTES = 256e6, 64e6
SMALLEST_MESSAGE = 4096
GRAPH_BYTES_MAX = 8 << 20  # what vLLM's own all-reduce takes; longer messages are NCCL's

Row = Mapping[str, Any]


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a table, and none where there is no such file."""
    if path.is_file():
        yield from importlib.import_module("pyarrow.parquet").read_table(path).to_pylist()


def ideal_s(operations: float, moved: float, flops: float, bandwidth: float) -> float:
    """The slower of computing and moving, by the data sheet."""
    return max(operations / flops, moved / bandwidth)


def gemm(rows: Sequence[Row], kind: str, flops: float, bandwidth: float) -> list[list[list[float]]]:
    """Ratios by tokens, columns and inner size."""
    size, best = TYPES[kind], dict[tuple[int, int, int], float]()
    for row in rows:
        if row["gemm_dtype"] == kind:
            key = (row["m"], row["n"], row["k"])
            best[key] = min(row["latency"] / 1e3, best.get(key, math.inf))

    def ratio(m: int, n: int, k: int) -> float | None:
        took = best.get((m, n, k))
        ideal = ideal_s(2.0 * m * n * k, size * (n * k + m * k) + 2.0 * m * n, flops, bandwidth)
        return None if took is None else float(f"{took / ideal:.3g}")

    def near(m: int, n: int, k: int) -> float:
        """The ratio, or that of the nearest shape of as many tokens that was measured."""
        shapes = sorted(
            itertools.product(COLUMNS, INNER), key=lambda one: abs(math.log(one[0] / n)) + abs(math.log(one[1] / k))
        )
        tried = (
            (ratio(tokens, *shape)) for tokens in sorted(TOKENS, key=lambda one: abs(math.log(one / m))) for shape in shapes
        )
        return next(found for found in tried if found is not None)

    return [[[near(m, n, k) for k in INNER] for n in COLUMNS] for m in TOKENS]


def prefill(rows: Sequence[Row], flops: float) -> list[list[float]]:
    """[query heads, head size, ratio of one long prompt], the median over numbers of KV heads and lengths."""
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        if (
            row["batch_size"] == 1
            and row["isl"] in PREFILL_LENGTHS
            and row.get("window_size", 0) <= 0
            and row["kv_cache_dtype"] == "bfloat16"
        ):
            operations = (
                2.0 * row["num_heads"] * row["head_dim"] * row["isl"] ** 2
            )  # half of the square, two products of two operations
            ratios[row["num_heads"], row["head_dim"]].append(row["latency"] / 1e3 * flops / operations)
    return [[heads, size, float(f"{median(found):.3g}")] for (heads, size), found in sorted(ratios.items())]


def decode(rows: Sequence[Row], bandwidth: float) -> list[list[float]]:
    """[query heads, KV heads, head size, bytes of an element, microseconds, of each request, ratio of the bytes read]."""
    seen: dict[tuple[int, int, int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows:
        size = 1 if row["kv_cache_dtype"] == "fp8" else 2
        read = 2.0 * size * row["batch_size"] * (row["step"] + 1) * row["num_key_value_heads"] * row["head_dim"]
        if read <= DECODE_BYTES and row["step"] >= 63 and row["batch_size"] <= DECODE_BATCH and row.get("window_size", 0) <= 0:
            key = (row["num_heads"], row["num_key_value_heads"], row["head_dim"], size)
            seen[key].append((row["batch_size"], read, row["latency"] * 1e3))
    found = []
    for key, points in sorted(seen.items()):
        batch, read, took = np.array(points).T
        ideal = read / bandwidth * 1e6
        # What fits into the card's own cache is read faster than any server ever reads it: the slope is that of long reads.
        long, real = read >= LONG_BYTES, read >= CACHE_BYTES
        if long.sum() < 2:
            continue
        _, ratio = np.linalg.lstsq(np.column_stack((1 / took, ideal / took))[long], np.ones(int(long.sum())), rcond=None)[0]
        rest = np.column_stack((1 / took, batch / took))[real]
        fixed, each = np.linalg.lstsq(rest, (1 - ratio * ideal / took)[real], rcond=None)[0]
        found.append([*key, *(float(f"{max(0.0, value):.3g}") for value in (fixed, each, ratio))])
    return found


def all_reduce(folder: Path, *, has_nvlink: bool) -> dict[str, list[list[float]]]:
    """For each number of cards: [bytes of the message, microseconds]. The tables count elements of two bytes.

    Links over PCIe differ by machine, by a factor of two between two releases of the table: the slower one is kept.
    """
    best: dict[int, dict[int, float]] = defaultdict(dict)
    for path in sorted(folder.glob("comm/vllm/*/custom_allreduce_perf.parquet"), key=lambda found: _release(found.parent.name)):
        for row in rows_of(path):  # a later release replaces an earlier one
            is_long = has_nvlink and 2 * row["message_size"] > GRAPH_BYTES_MAX
            if is_long or "eager" in str(row.get("backend") or row["kernel_source"]):
                continue
            known, took = best[row["num_gpus"]], row["latency"] * 1e3
            before = 0.0 if has_nvlink else known.get(2 * row["message_size"], 0.0)
            known[2 * row["message_size"]] = max(before, took)
    for path in sorted(folder.glob("comm/nccl/*/nccl_perf.parquet"), key=lambda found: _release(found.parent.name)):
        for row in rows_of(path):
            if row["op_name"] == "all_reduce" and row["nccl_dtype"] == "half" and 2 * row["message_size"] > GRAPH_BYTES_MAX:
                known, took = best[row["num_gpus"]], row["latency"] * 1e3
                known[2 * row["message_size"]] = max(took, 0.0 if has_nvlink else known.get(2 * row["message_size"], 0.0))
    return {
        str(cards): [[size, float(f"{took:.3g}")] for size, took in sorted(found.items()) if size >= SMALLEST_MESSAGE]
        for cards, found in sorted(best.items())
    }


def _release(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def experts(rows: Sequence[Row], kind: str, flops: float, bandwidth: float) -> list[list[Any]]:
    """[hidden, width, of a token, experts, ratios by tokens]; the ideal reads the experts that the tokens reach."""
    found = []
    for hidden, width, chosen, count in MOE_SHAPES:
        best: dict[int, float] = {}
        for row in rows:
            shape = (row["hidden_size"], row["inter_size"], row["topk"], row["num_experts"])
            alone = row["moe_tp_size"] == 1 and row["moe_ep_size"] == 1 and row["distribution"] == SKEW
            if alone and row["moe_dtype"] == kind and shape == (hidden, width, chosen, count):
                best[row["num_tokens"]] = min(row["latency"] / 1e3, best.get(row["num_tokens"], math.inf))
        ratios = []
        for tokens in MOE_TOKENS:
            reached = count * (1 - (1 - chosen / count) ** tokens)
            moved = TYPES[kind] * 3.0 * hidden * width * reached
            ideal = ideal_s(6.0 * tokens * chosen * hidden * width, moved, flops, bandwidth)
            ratios.append(float(f"{best[tokens] / ideal:.3g}") if tokens in best else None)
        if all(ratio is not None for ratio in ratios):
            found.append([hidden, width, chosen, count, ratios])
    return found


def card_table(folder: Path, release: str, name: str, sheet: str) -> dict[str, Any]:
    """All that is kept of one card."""
    card = gpu_named(sheet or name)
    assert card.bandwidth_bytes_per_s, name
    assert card.bf16_flops, name
    bandwidth = float(gpu_named(name).bandwidth_bytes_per_s or card.bandwidth_bytes_per_s)
    rates = {"bfloat16": float(card.bf16_flops), "fp8": float(card.fp8_flops or 0)}
    products = list(rows_of(folder / "gemm" / "vllm" / release / "gemm_perf.parquet"))
    mixtures = list(rows_of(folder / "moe" / "vllm" / release / "moe_perf.parquet"))
    attention = folder / "attention" / "vllm" / release
    has_nvlink = "SXM" in name or name.startswith("B")
    kinds = [kind for kind in TYPES if rates[kind] and any(row["gemm_dtype"] == kind for row in products)]
    return {
        "vllm": release,
        "nvlink": has_nvlink,
        "bandwidth": bandwidth,
        "flops": {kind: rates[kind] for kind in kinds},
        "gemm": {kind: gemm(products, kind, rates[kind], bandwidth) for kind in kinds},
        "prefill": prefill(list(rows_of(attention / "context_attention_perf.parquet")), rates["bfloat16"]),
        "decode": decode(list(rows_of(attention / "generation_attention_perf.parquet")), bandwidth),
        "all_reduce": all_reduce(folder, has_nvlink=has_nvlink),
        "experts": {kind: experts(mixtures, kind, rates[kind], bandwidth) for kind in kinds},
    }


def main(words: Sequence[str]) -> None:
    """Write the table."""
    root = Path(words[0]) / "aisimulate_core" / "systems" / "data"
    body = {
        "source": SOURCE,
        "tokens": TOKENS,
        "columns": COLUMNS,
        "inner": INNER,
        "moe_tokens": MOE_TOKENS,
        "cards": {name: card_table(root / folder, release, name, sheet) for folder, release, name, sheet in SYSTEMS},
    }
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(body, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{TABLE.name}: {TABLE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

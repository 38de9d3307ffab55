"""Print docs/gpus.md from the table of cards: `python -m lab.write_gpu_docs`."""

from __future__ import annotations

from pathlib import Path

from plimsoll.hardware.cards import AMBIGUOUS, GPUS, Gpu
from plimsoll.units import GIB

PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"

_INTRODUCTION = """\
# The cards plimsoll knows

<!-- Printed from src/plimsoll/hardware/data/gpus.json by `python -m lab.write_gpu_docs`; change the table, not this. -->

`--gpu` takes a card's name, its nvidia-smi name or any other name below; case, spaces, dashes and the words NVIDIA,
AMD, GeForce, Tesla and Instinct do not matter. For a card that is not here or a MIG slice, give the memory in GiB.

**Memory** is the total that vLLM sees on Linux, in GiB; `--gpu-memory-utilization` is a share of that, not of the size
on the box. A figure with `~` is estimated from a card of the same kind, because no public log that names the card and
prints its total was found. **Band** is what drivers and ECC may make of it. **Rates** are dense, with 32-bit
accumulation; `-` means that the card cannot do it or that no source says. Windows and WSL show nearly the whole box;
these figures are not theirs. "id N" stands for a public log or page; the number only tells one from another.
"""


def page() -> str:
    """The whole page, as it must stand in docs/."""
    parts = [_INTRODUCTION, _cards(), _ambiguous(), _evidence()]
    return "\n".join(parts)


def _cards() -> str:
    rows = [
        "| Card | Box GB | Memory GiB | Band GiB | Kind | GB/s | BF16 TFLOPS | FP8 TFLOPS | Arch | Also called |",
        "|---|---:|---:|---:|---|---:|---:|---:|---|---|",
    ]
    rows += [f"| {' | '.join(_cells(gpu))} |" for gpu in GPUS]
    return "\n".join(rows) + "\n"


def _cells(gpu: Gpu) -> list[str]:
    kind = f"{gpu.memory_kind}, unified" if gpu.unified_memory else gpu.memory_kind
    return [
        gpu.name,
        str(gpu.box_gb),
        f"{'' if gpu.memory_is_measured else '~'}{_gib(gpu.total_bytes)}",
        f"{_gib(gpu.total_low_bytes)} to {_gib(gpu.total_high_bytes)}",
        kind,
        _rate(gpu.bandwidth_bytes_per_s, 10**9),
        _rate(gpu.bf16_flops, 10**12),
        _rate(gpu.fp8_flops, 10**12),
        gpu.arch,
        ", ".join(gpu.aliases),
    ]


def _ambiguous() -> str:
    rows = ["## Names that plimsoll asks about", "", "| Name | Why | Say instead |", "|---|---|---|"]
    rows += [f"| {', '.join(unclear.names)} | {unclear.because} | {', '.join(unclear.candidates)} |" for unclear in AMBIGUOUS]
    return "\n".join(rows) + "\n"


def _evidence() -> str:
    rows = ["## Where the figures come from", ""]
    for gpu in GPUS:
        starts = f"{gpu.memory_starts} start{'s' if gpu.memory_starts > 1 else ''}: " if gpu.memory_is_measured else ""
        note = f" Note: {gpu.note}." if gpu.note else ""
        rows.append(f"- **{gpu.name}.** Memory: {starts}{gpu.memory_evidence}. Rates: {'; '.join(gpu.sources)}.{note}")
    return "\n".join(rows) + "\n"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def _rate(per_s: int | None, unit: int) -> str:
    return "-" if per_s is None else f"{per_s / unit:,.1f}".removesuffix(".0")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

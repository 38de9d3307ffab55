"""Graphics cards as vLLM sees them: their memory, its bandwidth, and how fast the card computes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from os.path import dirname, join
from typing import Any, NamedTuple

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.units import GIB

# Makers' and brands' words that people leave out; what is left names the card.
_FILLER = frozenset({"nvidia", "amd", "geforce", "tesla", "instinct", "corporation"})
# "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "h100 mig"
_OTHER_DEVICES = r"tpu|inf[12]\b|trn[12]|inferentia|trainium|gaudi|\bhpu|intel|\barc\b|ascend|910b|apple|\bm[1-5]\b"
_MIG_SUFFIX = r"(?i)[\s-]*\bmig\b(?P<profile>[\s-]*\d+g\.\d+gb\S*)?\s*$"


class Vendor(StrEnum):
    """The maker of the chip, which decides the build of vLLM that runs on it."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


@dataclass(frozen=True)
class Gpu:
    """One card. A rate that no source states, or that the hardware does not have, is None; no rate is guessed.

    `total_bytes` is the total of cudaMemGetInfo on Linux (hipMemGetInfo on AMD), which vLLM multiplies by
    --gpu-memory-utilization. It is less than the size on the box, and a driver or ECC moves it: `total_low_bytes` and
    `total_high_bytes` bound what was seen (measured) or what is likely (estimated).
    """

    name: str
    vendor: Vendor
    box_gb: int  # the size the maker prints
    total_bytes: int
    total_low_bytes: int
    total_high_bytes: int
    memory_is_measured: bool
    memory_starts: int  # public logs, or rows of our table of starts, that print the total; 0 where it is estimated
    memory_evidence: str
    memory_kind: str
    unified_memory: bool  # the operating system hands out the same memory to ordinary processes
    bandwidth_bytes_per_s: int | None
    bf16_flops: int | None  # dense, 32-bit accumulation
    fp8_flops: int | None  # dense, 32-bit accumulation
    compute_capability: tuple[int, int] | None  # None on AMD
    arch: str  # "sm_90", "gfx942"
    aliases: tuple[str, ...]
    sources: tuple[str, ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert self.total_low_bytes <= self.total_bytes <= self.total_high_bytes, f"{self.name}: total outside its band"
        assert self.memory_is_measured == (self.memory_starts > 0), f"{self.name}: measured means that starts back it"

    def __str__(self) -> str:
        return f"{self.name} ({self.total_bytes / GIB:.2f} GiB)"


@dataclass(frozen=True)
class Ambiguous:
    """Names that fit more than one card, so that we ask instead of choosing."""

    names: tuple[str, ...]
    candidates: tuple[str, ...]  # names of cards in the table
    because: str


def gpu_names() -> list[str]:
    return [gpu.name for gpu in GPUS]


def gpu_named(name: str, total_bytes: int | None = None) -> Gpu:
    """The card that people call `name`: its own name, nvidia-smi's or rocm-smi's, a short one, or a cloud's machine type.

    Where editions of different sizes carry the name, `total_bytes` picks the nearest; without it the user is asked.
    """
    machine = name.strip().lower().removeprefix("ml.")  # SageMaker's name for an EC2 type
    of_machine = next((card for pattern, card in INSTANCES if re.fullmatch(pattern, machine)), name)
    gpu = _by_key().get(_key(of_machine)) or _by_words().get(_words(of_machine))
    if gpu is not None:
        return gpu
    shown = " ".join(name.split())[:60]  # a message is one line
    if slice_ := re.search(_MIG_SUFFIX, shown):
        whole = _by_key().get(_key(shown[: slice_.start()]))
        of_what = f"of {whole.name}" if whole else "of a card"
        raise BadInput(f'"{shown}" is a MIG slice {of_what}, not a whole card: give the size of the slice in GiB')
    unclear = _ambiguous_by_key().get(_key(name))
    if unclear is not None and total_bytes is not None:
        return min(map(gpu_named, unclear.candidates), key=lambda gpu: abs(gpu.total_bytes - total_bytes))
    if unclear is not None:
        either = " or ".join(filter(None, (", ".join(unclear.candidates[:-1]), unclear.candidates[-1])))
        raise BadInput(f'"{shown}" does not say which card: {unclear.because}; say {either}')
    # `8xH100`, `H100 x 8`: the command gives the number of cards.
    several = re.fullmatch(r"(?P<n>\d{1,3}) ?[xX*] ?(?P<card>.+)|(?P<card2>.+?) ?[xX*] ?(?P<n2>\d{1,3})", shown)
    if several is not None:
        card, number = several["card"] or several["card2"], several["n"] or several["n2"]
        if _key(card) in _by_key() or _key(card) in _ambiguous_by_key():
            how_many = f"how many is what the command asks for (-tp {number})"
            raise BadInput(f'"{shown}" is {number} cards: say --gpu {card}; {how_many}')
    if other := re.search(_OTHER_DEVICES, machine):
        raise BadInput(f'"{shown}" is no NVIDIA or AMD card ({other[0]}): plan knows what vLLM takes on those alone')
    nearest = ", ".join(nearest_names(name))
    raise BadInput(f'no GPU called "{shown}" is known; nearest: {nearest}; or give its memory: --gpu-memory-gib')


def nearest_names(name: str, n: int = 3) -> list[str]:
    """The `n` cards whose names or aliases look most like `name`, the likeliest first."""
    from difflib import SequenceMatcher  # only a misspelt name needs it

    wanted, gpus = _key(name), reversed(_by_key().items())
    near = sorted(((SequenceMatcher(None, wanted, key).ratio(), gpu.name) for key, gpu in gpus), key=lambda pair: pair[0])
    return list(dict.fromkeys(known for _, known in reversed(near)))[:n]


def _key(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in _FILLER)


def _words(name: str) -> frozenset[str]:
    """The words of a name in any order: "H100-80GB-SXM5" and "H100 SXM 80GB" are one."""
    words = re.sub(r"[^a-z0-9]+", " ", re.sub(r"\bsxm\d\b", "sxm", name.lower())).split()
    return frozenset(words) - _FILLER - {"gpu", "edition", "generation"}


@cache
def _by_words() -> dict[frozenset[str], Gpu]:
    return {_words(spelling): gpu for gpu in reversed(GPUS) for spelling in (gpu.name, *gpu.aliases)}


@cache
def _by_key() -> dict[str, Gpu]:
    return {_key(spelling): gpu for gpu in GPUS for spelling in (gpu.name, *gpu.aliases)}


@cache
def _ambiguous_by_key() -> dict[str, Ambiguous]:
    return {_key(spelling): unclear for unclear in AMBIGUOUS for spelling in unclear.names}


# data/gpus.json has the cards people serve language models on, with each figure's source; docs/gpus.md is made from it.
#
# Memory is the total that a Linux process is given, not the size on the box. Three things move it:
# - the driver: NVIDIA's recent ones keep 0.06 to 0.2 GiB more for themselves (RTX 4090: 23.65, now 23.52);
# - ECC on GDDR6 cards takes 1/16 (RTX A6000 47.43 without, 44.43 with); HBM carries its own, GDDR7 too;
# - Windows and WSL report nearly the whole card (RTX 3060: 12.0 against 11.63), so readings from there are left out.
# A measured figure is from the newest driver found, with ECC as delivered; the band holds every Linux reading found, and a
# little more where there are few.
# "id N" stands for a public log or page; the number only tells one from another.
#
# Rates are dense: makers' sheets often print twice as much, for 2:4 sparse weights, which vLLM does not use. GeForce
# cards accumulate in 32 bits at half the rate of 16 bits, and vLLM accumulates in 32: those are the figures here.
#
# An alias that could also mean another card is a choice: `chosen` says why it is not among the ambiguous names.


def _gpu(
    name: str, aliases: Sequence[str], box: int, band: Sequence[float], starts: int, seen: str, kind: str, gbps: float | None,
    bf16: float | None, fp8: float | None, arch: str, sources: Sequence[str], gib: float = 0, bytes: int = 0,  # noqa: A002
    unified: bool = False, note: str = "", chosen: str = "",  # noqa: FBT001, FBT002
) -> Gpu:  # fmt: skip
    """A row in the units people write: GiB, GB/s and TFLOPS; `starts` 0 means that the memory is estimated."""
    del chosen
    digits = arch.removeprefix("sm_")
    return Gpu(
        name=name, vendor=Vendor.NVIDIA if arch.startswith("sm_") else Vendor.AMD, box_gb=box,
        total_bytes=bytes or round(gib * GIB), total_low_bytes=round(band[0] * GIB), total_high_bytes=round(band[1] * GIB),
        memory_is_measured=starts > 0, memory_starts=starts, memory_evidence=seen, memory_kind=kind, unified_memory=unified,
        bandwidth_bytes_per_s=None if gbps is None else round(gbps * 10**9),
        bf16_flops=None if bf16 is None else round(bf16 * 10**12),
        fp8_flops=None if fp8 is None else round(fp8 * 10**12),
        compute_capability=(int(digits[:-1]), int(digits[-1])) if digits.isdecimal() else None,
        arch=arch, aliases=tuple(aliases), note=note,
        sources=tuple(_TABLE["sources"].get(source, source) for source in sources),
    )  # fmt: skip


with open(join(dirname(__file__), "data", "gpus.json"), "rb") as _file:
    _TABLE = json.load(_file)
GPUS: tuple[Gpu, ...] = tuple(_gpu(**row) for row in _TABLE["gpus"])
INSTANCES: tuple[tuple[str, str], ...] = tuple(map(tuple, _TABLE["instances"]))  # of clouds, in lower case
AMBIGUOUS: tuple[Ambiguous, ...] = tuple(
    Ambiguous(tuple(row["names"]), tuple(row["candidates"]), row["because"]) for row in _TABLE["ambiguous"]
)


class NvmlCard(NamedTuple):
    """One card of this machine, as NVIDIA's management library sees it: its product name, and the memory that is taken now."""

    name: str
    total_bytes: int  # NVML's figure; vLLM sees a little less
    used_bytes: int


def read_cards(library: Any = None) -> list[NvmlCard]:
    """Every card, in NVML's order; the library is an argument for tests. One line says what is missing."""
    nvml = library
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            raise BadInput("which card? --gpu H100, or `pip install nvidia-ml-py` to read this machine's") from None
        nvml = pynvml
    cards = []
    try:
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
                shown = name.decode() if isinstance(name, bytes) else str(name)
                cards.append(NvmlCard(shown, int(memory.total), int(memory.used)))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise WorldFailed(f"NVML does not answer ({error}); name the card with --gpu") from None
    return cards

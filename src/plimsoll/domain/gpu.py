"""What a graphics card is to vLLM: the memory it sees there, how fast that memory is, how fast the card computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from plimsoll.domain.units import GIB
from plimsoll.errors import BadInput

# Makers' and brands' words that people leave out; what is left names the card.
_FILLER = frozenset({"nvidia", "amd", "geforce", "tesla", "instinct", "corporation"})
# "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "h100 mig"
_MIG_SUFFIX = r"(?i)[\s-]*\bmig\b(?P<profile>[\s-]*\d+g\.\d+gb\S*)?\s*$"


class Vendor(StrEnum):
    """Who makes the chip, and so which build of vLLM runs on it."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


@dataclass(frozen=True)
class Gpu:
    """One card. A rate that no source states, or that the hardware does not have, is None; none is guessed.

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


def gpu_named(name: str) -> Gpu:
    """The card that people call `name`: its own name, nvidia-smi's, a cloud's or a short one, however it is spaced."""
    found = _by_key().get(_key(name))
    if found is not None:
        return found
    shown = " ".join(name.split())[:60]  # a message is one line
    _refuse_mig(shown)
    unclear = _ambiguous_by_key().get(_key(name))
    if unclear is not None:
        raise BadInput(f'"{shown}" does not say which card: {unclear.because}; say {_either(unclear.candidates)}')
    _refuse_several(shown)
    nearest = ", ".join(nearest_names(name))
    raise BadInput(f'no GPU called "{shown}" is known; nearest: {nearest}; or give its memory: --gpu-memory-gib')


def _refuse_several(name: str) -> None:
    """`8xH100`, `H100 x 8`: how many there are is the command's to say."""
    found = re.fullmatch(r"(?P<n>\d{1,3}) ?[xX*] ?(?P<card>.+)|(?P<card2>.+?) ?[xX*] ?(?P<n2>\d{1,3})", name)
    card = found and (found["card"] or found["card2"])
    if card and (_key(card) in _by_key() or _key(card) in _ambiguous_by_key()):
        number = found["n"] or found["n2"] if found else ""
        raise BadInput(f'"{name}" is {number} cards: say --gpu {card}; how many is what the command asks for (-tp {number})')


def nearest_names(name: str, n: int = 3) -> list[str]:
    """The `n` cards whose names or aliases look most like `name`, the likeliest first."""
    from difflib import SequenceMatcher  # imported here: only a misspelt name needs it

    wanted = _key(name)
    likeness: dict[str, float] = {}
    for key, gpu in _by_key().items():
        likeness[gpu.name] = max(likeness.get(gpu.name, 0.0), SequenceMatcher(None, wanted, key).ratio())
    return sorted(likeness, key=lambda known: -likeness[known])[:n]


def _key(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in _FILLER)


@lru_cache(maxsize=1)
def _by_key() -> dict[str, Gpu]:
    from plimsoll.domain.gpu_table import GPUS  # imported here: most commands never look up a card

    return {_key(spelling): gpu for gpu in GPUS for spelling in (gpu.name, *gpu.aliases)}


@lru_cache(maxsize=1)
def _ambiguous_by_key() -> dict[str, Ambiguous]:
    from plimsoll.domain.gpu_table import AMBIGUOUS

    return {_key(spelling): unclear for unclear in AMBIGUOUS for spelling in unclear.names}


def _refuse_mig(name: str) -> None:
    suffix = re.search(_MIG_SUFFIX, name)
    if suffix is None:
        return
    whole = _by_key().get(_key(name[: suffix.start()]))
    of_what = f"of {whole.name}" if whole else "of a card"
    raise BadInput(f'"{name}" is a MIG slice {of_what}, not a whole card: give the size of the slice in GiB')


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

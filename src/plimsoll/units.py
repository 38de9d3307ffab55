"""Reads sizes and counts from text as vLLM and plimsoll do; divides and rounds as torch's allocator does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, NewType

from plimsoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class Estimate:
    """A size in bytes and the band that holds about 90 % of the measurements; exact where low and high are equal."""

    value: int
    low: int
    high: int
    why: str = ""  # where the figure comes from, in a few words

    @classmethod
    def exact(cls, value: int, why: str = "") -> Estimate:
        """A figure that is arithmetic, not a guess."""
        return cls(value, value, value, why)

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


Bytes = NewType("Bytes", int)

KIB = Bytes(2**10)
MIB = Bytes(2**20)
GIB = Bytes(2**30)

_ACCEPTED = "vLLM accepts a plain integer, or one with k, m, g, t (powers of 1000) or K, M, G, T (powers of 1024)"
_SIZE_UNITS = {"": GIB, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
               "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def parse_vllm_integer(text: str) -> int:
    """Read an integer as vLLM 0.32 reads `--max-model-len`: 1k is 1000, 1K is 1024, 25.6k is 25600."""
    text = text.strip()
    scaled = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    try:
        if scaled is None:
            return int(text)  # in all of Python's forms: +5, 1_000
        number, suffix = scaled[1], scaled[2]
        power = 1 + "kmgt".index(suffix.lower())
        scale: int = (1000 if suffix.islower() else 1024) ** power
        if suffix.islower():
            # Through a float and toward zero, as vLLM does: 1.001k is 1000, and large numbers lose their last digits.
            return int(float(number) * scale)
        if "." in number:
            hint = f"a fraction needs a small letter, {number}{suffix.lower()}"
            raise BadInput(f"{shortened(text)}: {hint}; {_ACCEPTED}")
        return int(number) * scale
    except (ValueError, OverflowError):  # int() also refuses more than 4300 digits, and infinity
        raise BadInput(f"{shortened(text)} is not an integer; {_ACCEPTED}") from None


def parse_vllm_integer_or_auto(text: str) -> int:
    """Read the same, where `auto` in any case stands for -1: vLLM chooses."""
    return -1 if text.strip().lower() == "auto" else parse_vllm_integer(text)


def parse_gib(text: str) -> Bytes:
    """Read a size given to plimsoll: a plain number is GiB, and 80GB, 80 GiB, 512MiB are what they say."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s{0,8}([A-Za-z]{0,3})", text.strip())
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BadInput(f"{shortened(text)} is not a size; give GiB as a number (79.2), or 80GB, 80GiB, 512MiB")
    return Bytes(math.floor(float(match[1]) * unit))  # down: a part of a byte is no memory


def format_gib(size: int) -> str:
    """Write a number of bytes for people: 12.3 GiB, small ones in MiB."""
    if size == 0:
        return "0 GiB"
    if abs(size) >= GIB // 10:
        return f"{size / GIB:,.1f} GiB"
    return f"{size / MIB:.1f} MiB" if abs(size) >= MIB // 10 else f"{size:,} B"


class _SizeFormatter(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        return format_gib(value) if spec == "gib" else str(super().format_field(value, spec))


def filled(text: str, values: Mapping[str, Any]) -> str:
    """A text with these values in it; `{name:gib}` stands for a size."""
    return _SizeFormatter().vformat(text, (), values)


def format_count(count: int) -> str:
    return f"{count:,}"


def ceil_div(number: int, divisor: int) -> int:
    """Divides and rounds up: a block that is begun is wholly taken."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    return ceil_div(number, multiple) * multiple


def shortened(text: str) -> str:
    """Returns the user's text, quoted, on one line and cut to 40 letters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


_SEGMENT = 2 * MIB  # torch asks the device for large tensors in steps of this
_LARGE = 10 * MIB
_NOT_SPLIT = MIB  # a remainder up to this size stays with its tensor
_STEP = 512
_NEVER_SPLIT = 20 * MIB  # max_split_size_mb:20, under which vLLM loads from 0.21 on


def allocated_bytes(size: int, *, whole_segments: bool = False) -> int:
    """Returns the bytes that torch's allocator counts for a tensor of this size, alone in its segment where it is large.

    The startups show it to the fourth decimal: Qwen3-8B holds 2 MiB more than its tensors, one for the embedding and one
    for the head, both 1187 MiB; Gemma 3 27B holds 62 MiB more, one per layer. With `whole_segments` the rest of a very large
    tensor's last segment is never given to others: Gemma 3 12B holds 120 MiB more on 0.25.1 for it, Qwen2.5-1.5B 91 MiB.
    """
    if whole_segments and size >= _NEVER_SPLIT:
        return size + -size % _SEGMENT
    if size >= _LARGE and (left := -size % _SEGMENT) <= _NOT_SPLIT:
        return size + left
    return round_up(size, _STEP)

"""Which settings are looked at: four flags, and the values of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from plimsoll.domain.units import parse_vllm_integer
from plimsoll.errors import BadInput

Number = TypeVar("Number", int, float)
MOST_VALUES = 1000
SHARE_STEP = 0.01
"""Between two utilisations of a range."""


class Candidate(NamedTuple):
    """One setting of the flags that decide between cache, requests at once and tokens in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float

    def differences(self, other: Candidate) -> list[str]:
        """The flags in which two differ."""
        return [name for name in self._fields if getattr(self, name) != getattr(other, name)]


FLAGS: Mapping[str, str] = {name: "--" + name.replace("_", "-") for name in Candidate._fields}


def value_text(candidate: Candidate, name: str) -> str:
    """A value as it is typed."""
    value = getattr(candidate, name)
    return f"{value:g}" if isinstance(value, float) else str(value)


class Space(NamedTuple):
    """The values of each flag, in order; every combination that vLLM takes is a candidate."""

    max_num_seqs: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    max_num_batched_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    block_size: tuple[int, ...] = (16, 32, 64)
    gpu_memory_utilization: tuple[float, ...] = (0.80, 0.85, 0.88, 0.90, 0.92, 0.94, 0.95)

    @property
    def candidates(self) -> list[Candidate]:
        """All of them. vLLM refuses a step with fewer tokens than requests may run."""
        return [one for one in map(Candidate._make, itertools.product(*self)) if is_taken(one)]

    def with_values_of(self, candidate: Candidate) -> Space:
        """The same space, in which this candidate lies too."""
        wider = {name: tuple(sorted({*getattr(self, name), value})) for name, value in candidate._asdict().items()}
        return self._replace(**wider)


def is_taken(candidate: Candidate) -> bool:
    """Whether vLLM's own check of its configuration lets it pass."""
    return candidate.max_num_batched_tokens >= candidate.max_num_seqs


def parse_space(words: Mapping[str, str], space: Space | None = None) -> Space:
    """A space from `max_num_seqs=8..64` and the like; flags that are not named keep their values."""
    found = space or Space()
    for name, text in words.items():
        key = name.removeprefix("--").replace("-", "_")
        if key not in Candidate._fields:
            raise BadInput(f"{name!r} is not varied; there is: {', '.join(Candidate._fields)}")
        parsed = parse_shares(text, key) if key == "gpu_memory_utilization" else parse_counts(text, key)
        found = found._replace(**{key: parsed})  # type: ignore[arg-type]
    return found


def parse_counts(text: str, name: str) -> tuple[int, ...]:
    """`64,96,128`, `8k,16k`, or `64..1024`: from one to the other by doubling, the last one always among them."""
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        low = _count(first, name)
        found |= {low} if not dots else set(_doubled(low, _count(last, name), name))
    return _checked(found, name)


def _doubled(low: int, high: int, name: str) -> Iterator[int]:
    if high < low:
        raise BadInput(f"{name}={low}..{high} ends before it begins")
    while low < high:
        yield low
        low *= 2
    yield high


def _count(text: str, name: str) -> int:
    try:
        number = parse_vllm_integer(text)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None
    if not 1 <= number < 2**31 - 1:
        raise BadInput(f"{name} must lie between 1 and {2**31 - 2}, not {text[:40]}")
    return number


def parse_shares(text: str, name: str) -> tuple[float, ...]:
    """`0.85,0.9`, or `0.85..0.95` by hundredths."""
    found: set[float] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        low = _share(first, name)
        high = _share(last, name) if dots else low
        if high < low:
            raise BadInput(f"{name}={part.strip()[:40]} ends before it begins")
        found |= {round(low + step * SHARE_STEP, 6) for step in range(math.floor((high - low) / SHARE_STEP + 1e-6) + 1)} | {
            high
        }
    return _checked(found, name)


def _share(text: str, name: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise BadInput(f"{name} must lie above 0 and at most at 1, not {text[:40]!r}")
    return share


def _checked(found: set[Number], name: str) -> tuple[Number, ...]:
    if len(found) > MOST_VALUES:
        raise BadInput(f"{name} has {len(found)} values; {MOST_VALUES} at most")
    return tuple(sorted(found))

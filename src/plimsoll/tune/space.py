"""The settings to search: four flags, and the values of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from plimsoll.errors import BadInput
from plimsoll.findings import Finding
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings as Launch
from plimsoll.simulate.settings import EngineLimits, planned_settings
from plimsoll.units import parse_vllm_integer

Number = TypeVar("Number", int, float)
MOST_VALUES = 1000
SHARE_STEP = 0.01  # Between two utilisations of a range


class Candidate(NamedTuple):
    """One setting of the flags that decide between cache, requests at once and tokens in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float

    def differences(self, other: Candidate) -> list[str]:
        """The flags in which two candidates differ."""
        return [name for name in self._fields if getattr(self, name) != getattr(other, name)]


FLAGS: Mapping[str, str] = {name: "--" + name.replace("_", "-") for name in Candidate._fields}


def value_text(value: object) -> str:
    """A value as typed in a command."""
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


class Space(NamedTuple):
    """The values of each flag, in order; every combination that vLLM accepts is a candidate."""

    max_num_seqs: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    max_num_batched_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    block_size: tuple[int, ...] = (16, 32, 64)
    gpu_memory_utilization: tuple[float, ...] = (0.80, 0.85, 0.88, 0.90, 0.92, 0.94, 0.95)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates of the space; vLLM refuses a step with fewer tokens than requests at once."""
        return [one for one in map(Candidate._make, itertools.product(*self)) if is_taken(one)]


def is_taken(candidate: Candidate) -> bool:
    """True if the candidate passes vLLM's own check of its configuration."""
    return candidate.max_num_batched_tokens >= candidate.max_num_seqs


def parse_space(words: Mapping[str, str]) -> Space:
    """A space from `max_num_seqs=8..64` and the like; flags that are not named keep their values."""
    found = Space()
    for name, text in words.items():
        key = name.removeprefix("--").replace("-", "_")
        if key not in Candidate._fields:
            raise BadInput(f"{name!r} is not varied; there is: {', '.join(Candidate._fields)}")
        parsed = parse_shares(text, key) if key == "gpu_memory_utilization" else parse_counts(text, key)
        found = found._replace(**{key: parsed})  # type: ignore[arg-type]
    return found


def parse_counts(text: str, name: str, least: int = 1) -> tuple[int, ...]:
    """`64,96,128`, `8k,16k`, or `64..1024`: from one to the other by doubling, the last one always among them."""

    def count(word: str) -> int:
        try:
            number = parse_vllm_integer(word)
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
        if not least <= number < 2**31 - 1:
            raise BadInput(f"{name} must lie between {least} and {2**31 - 2}, not {word[:40]}")
        return number

    def doubled(low: int, high: int) -> Iterator[int]:
        while low < high:
            yield low
            low = max(1, 2 * low)

    return _ranges(text, name, count, doubled)


def parse_shares(text: str, name: str) -> tuple[float, ...]:
    """`0.85,0.9`, or `0.85..0.95` by hundredths."""

    def share(word: str) -> float:
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not 0 < number <= 1:
            raise BadInput(f"{name} must lie above 0 and at most at 1, not {word[:40]!r}")
        return number

    def stepped(low: float, high: float) -> Iterator[float]:
        steps = math.floor((high - low) / SHARE_STEP + 1e-6)
        return (round(low + step * SHARE_STEP, 6) for step in range(steps + 1))

    return _ranges(text, name, share, stepped)


def _ranges(
    text: str, name: str, read: Callable[[str], Number], between: Callable[[Number, Number], Iterable[Number]]
) -> tuple[Number, ...]:
    """The numbers of a list, some of which may be FIRST..LAST, in order."""
    found: set[Number] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        low, high = read(first), read(last if dots else first)
        if high < low:
            raise BadInput(f"{name}={part.strip()[:40]} ends before it begins")
        found.update(between(low, high))
        found.add(high)
    if len(found) > MOST_VALUES:
        raise BadInput(f"{name} has {len(found)} values; {MOST_VALUES} at most")
    return tuple(sorted(found))


# Every candidate with its pool by plan, and plan's findings.

Replan = Callable[[Launch], tuple[Ledger, list[Finding]]]


class Option(NamedTuple):
    """A candidate with its plan."""

    candidate: Candidate
    ledger: Ledger
    findings: tuple[Finding, ...]

    @property
    def is_safe(self) -> bool:
        """True if plan has no findings, not even a warning, and one request also fits at the low end of its band."""
        return self.ledger.fits_at_low_end and not self.findings

    @property
    def why_not(self) -> str:
        """Plan's first finding, in its own words."""
        if self.findings:
            return f"{self.findings[0].code}: {self.findings[0].title}"
        return "one request fits by the estimate, not at its low end" if self.ledger.fits else "one request does not fit"

    @property
    def because(self) -> str:
        """The finding's figures after a colon; empty where it gives none."""
        return f": {self.findings[0].because}" if self.findings and self.findings[0].because else ""

    @property
    def settings(self) -> EngineLimits:
        """The engine's limits for the replay."""
        return planned_settings(self.ledger.settings, self.ledger.kv_plan)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens the cache holds."""
        return self.ledger.kv_plan.tokens


def candidate_of(ledger: Ledger) -> Candidate:
    """The setting that a planned command has."""
    said = ledger.settings
    return Candidate(said.max_num_seqs, said.max_num_batched_tokens, ledger.kv_plan.block_size, said.utilization)


def launch_of(candidate: Candidate, base: Launch, usual_block: int) -> Launch:
    """The command's settings with this candidate in them; a block size that vLLM takes by itself is left out."""
    return replace(
        base,
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        block_size=base.block_size if candidate.block_size == usual_block else candidate.block_size,
        utilization=candidate.gpu_memory_utilization,
    )


def plan_all(candidates: Iterable[Candidate], base: Ledger, replan: Replan) -> list[Option]:
    """Plans each candidate; one that plan cannot describe is left out."""
    usual = base.kv_plan.block_size
    found = []
    for candidate in candidates:
        try:
            ledger, findings = replan(launch_of(candidate, base.settings, usual))
        except BadInput:
            continue
        found.append(Option(candidate, ledger, tuple(findings)))
    return found


def roomiest(options: Sequence[Option]) -> dict[tuple[int, int], Option]:
    """Returns the safe option with the largest cache for each pair of requests at once and tokens in a step.

    With the same two limits a larger cache admits sooner, preempts less and keeps more prefixes. The search begins there, but
    may not end there: it looks at smaller ones, too.
    """

    def room(option: Option) -> tuple[int, int, float]:
        """More tokens first; of equal caches the smaller blocks, then the smaller share of the card."""
        return option.kv_tokens, -option.candidate.block_size, -option.candidate.gpu_memory_utilization

    found: dict[tuple[int, int], Option] = {}
    for option in options:
        key = option.candidate[:2]
        if option.is_safe and (key not in found or room(option) > room(found[key])):
            found[key] = option
    return found

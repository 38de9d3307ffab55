"""One failure with everything that is known around it: what the explanations and the cures are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from plimsoll.doctor.complaints import Complaint
from plimsoll.doctor.explained import setting
from plimsoll.doctor.facts import LogFacts
from plimsoll.doctor.oom_text import OutOfMemory
from plimsoll.domain.finding import Remedy
from plimsoll.domain.units import GIB, MIB, format_gib
from plimsoll.domain.version import Version

if TYPE_CHECKING:  # the planner is slow to load, and a diagnosis without a plan never needs it
    from plimsoll.plan.advise import Advice

DEFAULT_UTILIZATION = ((Version("0.20.0"), 0.92), (Version("0.0"), 0.9))
MARGIN_BYTES = GIB // 4
LEAST_CACHE_BYTES = GIB // 4  # less is no cache to serve from
BY_HAND = "kv_cache_memory_bytes"


EXPANDABLE = Remedy(
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "lets torch use the gaps it holds; from 0.21 refused together with a KV connector",
)


class PlanSays(NamedTuple):
    """What `plan` computes for the very command that failed."""

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    slack_bytes: int | None = None
    total_bytes: int | None = None
    requested_bytes: int | None = None
    vocab_size: int | None = None
    advice: tuple[Advice, ...] = ()


class Case(NamedTuple):
    """The failure, its figures and the plan, any of which may be missing."""

    complaint: Complaint
    facts: LogFacts
    line: str  # the text of the line that names it, with the lines that belong to it
    plan: PlanSays | None = None

    @property
    def oom(self) -> OutOfMemory:
        """The figures of the allocation that failed; empty where there are none."""
        return self.complaint.oom or OutOfMemory()

    @property
    def total(self) -> int | None:
        """The card's memory as vLLM sees it."""
        return self.oom.total or self.facts.measured.total_bytes or (self.plan.total_bytes if self.plan else None)

    @property
    def utilization(self) -> float | None:
        """The share of the card that was asked for; the release's default where none was given."""
        given = self.facts.flags.get("gpu_memory_utilization")
        if given is not None:
            try:
                value = float(given)
            except ValueError:
                return None
            return value if 0 < value <= 1 else None
        if self.facts.measured.utilization is not None:
            return self.facts.measured.utilization
        return default_utilization(self.facts.version)

    def number(self, flag: str) -> int | None:
        """A flag's value where it is a plain number."""
        value = self.facts.flags.get(flag, "")
        return int(value) if value.isdecimal() and len(value) < 16 else None

    @property
    def max_num_seqs(self) -> int | None:
        """As given, or as the log says."""
        return self.number("max_num_seqs") or self.facts.measured.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int | None:
        """As given, or as the log says."""
        return self.number("max_num_batched_tokens") or self.facts.measured.max_num_batched_tokens

    @property
    def parallel(self) -> int:
        """Over how many GPUs each layer was spread."""
        return max(self.number("tensor_parallel_size") or 1, self.facts.measured.tensor_parallel or 1)

    @property
    def missing(self) -> int | None:
        """How much more was needed than was free, where the message states both."""
        if self.oom.tried is None or self.oom.free is None:
            return None
        return max(0, self.oom.tried - self.oom.free)

    def since(self, release: str) -> bool | None:
        """Whether the version that ran is this release or later; None where it is not known."""
        try:
            return None if self.facts.version is None else Version(self.facts.version) >= Version(release)
        except ValueError:
            return None

    def planned(self, flags: Sequence[str]) -> list[Remedy]:
        """What the plan offers of these flags, with the effect it computed."""
        offers = self.plan.advice if self.plan is not None else ()
        return [Remedy(one.words, f"{one.why}: {one.effect}", one.flag, one.value or None)
                for one in offers if one.flag in flags]  # fmt: skip


def default_utilization(version: str | None) -> float | None:
    """What vLLM takes when nothing is said."""
    if version is None:
        return None
    try:
        running = Version(version)
    except ValueError:
        return None
    return next((share for since, share in DEFAULT_UTILIZATION if running >= since), None)


def lower_utilization(case: Case, by_bytes: int) -> str | None:
    """The utilisation that leaves so much more outside vLLM's share, rounded down; None where it cannot be computed."""
    if case.utilization is None or not case.total:
        return None
    value = math.floor((case.utilization - (by_bytes + MARGIN_BYTES) / case.total) * 100) / 100
    return f"{value:.2f}" if value >= 0.1 else None


def more_room(case: Case, needed: int) -> Remedy:
    """A smaller cache by what was missing: by its size where that was set by hand, else by the share of the card."""
    given = case.number(BY_HAND)
    if given is not None:
        why = "a size set by hand is not measured against the peaks beside it"
        return smaller_cache(given, given - needed - MARGIN_BYTES, why)
    share = lower_utilization(case, needed)
    why = "leaves more of the card outside the KV cache; costs that much of it"
    if share is None:
        return Remedy("a lower --gpu-memory-utilization, by 0.02 to 0.05", why, "--gpu-memory-utilization")
    return setting("--gpu-memory-utilization", share, why)


def smaller_cache(given: int, fits: int, why: str) -> Remedy:
    """The cache that fits, beside the one that was set by hand; no number where that leaves hardly any."""
    flag = "--kv-cache-memory-bytes"
    if not LEAST_CACHE_BYTES <= fits < given:
        return Remedy(f"a smaller {flag} than {given}", why, flag)
    return Remedy(f"{flag} {fits}, not {given}", why, flag, str(fits))


def gib(size: int | None) -> str:
    """A size for people, or that it is not known; torch says MiB below one GiB, and so do we."""
    if size is None:
        return "an unknown amount"
    return f"{size / MIB:.0f} MiB" if MIB <= abs(size) < GIB else format_gib(size)


def asked(case: Case) -> str:
    """What was asked for and what there was, in one clause."""
    oom = case.oom
    if oom.tried is None:
        return "the driver refused an allocation and does not say how large"
    text = f"torch asked for {gib(oom.tried)}"
    if oom.free is not None and oom.total is not None:
        text += f", {gib(oom.free)} of {gib(oom.total)} were free"
    if oom.reserved_unallocated and oom.reserved_unallocated >= MIB:
        text += f", {gib(oom.reserved_unallocated)} more were held by torch itself in gaps"
    return text

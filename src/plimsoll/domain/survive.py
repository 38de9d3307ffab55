"""What a server says of the steps that ran out of device memory and did not end it (`survive` in /plimsoll/state)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.domain.units import GIB, MIB, format_count, format_gib

SITES = ("forward", "logits", "sampler", "encoder", "adapter", "drafter", "unknown")
UNKNOWN_SITE = "unknown"
KINDS = ("prompt_logprobs", "pictures", "adapter")
_SPECIAL = {
    "prompt_logprobs": "a request that wants prompt_logprobs", "pictures": "a request with pictures",
    "adapter": "a request with an adapter",
}  # fmt: skip
LONGEST_WHY = 200
MOST = 2**63


class LastFailure(NamedTuple):
    """The newest contained failure; None for what is not told of it."""

    age_s: float | None = None
    site: str = UNKNOWN_SITE
    tokens: float | None = None
    requests: float | None = None
    asked_bytes: float | None = None
    free_bytes: float | None = None
    kind: str = ""  # what is special in the shape of the request that did it: one of KINDS, or nothing


class Survival(NamedTuple):
    """Containment in one server; None for what it does not say, or says in a way that cannot be."""

    armed: bool | None = None
    why: str = ""  # why it is not armed
    contained: float | None = None
    aborted: float | None = None
    recomputed_tokens: float | None = None
    stalled_s: float | None = None
    last: LastFailure | None = None
    tokens_now: float | None = None  # of a step, at most
    tokens_start: float | None = None
    sequences_now: float | None = None
    sequences_start: float | None = None
    limping: bool | None = None
    storm: bool | None = None

    @property
    def is_shrunk(self) -> bool:
        """Whether its steps are known to be smaller than at the start."""
        pairs = ((self.tokens_now, self.tokens_start), (self.sequences_now, self.sequences_start))
        return any(now is not None and start is not None and now < start for now, start in pairs)


def read_survival(found: object) -> Survival | None:
    """The key as it was answered; None where there is none, or where it is no table."""
    if not isinstance(found, Mapping):
        return None
    tokens, sequences = _table(found.get("tokens_per_step")), _table(found.get("sequences"))
    why = found.get("why")
    return Survival(
        armed=_yes_or_no(found.get("armed")),
        why=why[:LONGEST_WHY] if isinstance(why, str) else "",
        contained=_number(found.get("contained")),
        aborted=_number(found.get("aborted")),
        recomputed_tokens=_number(found.get("recomputed_tokens")),
        stalled_s=_number(found.get("stalled_s")),
        last=_last(found.get("last")),
        tokens_now=_number(tokens.get("now")),
        tokens_start=_number(tokens.get("start")),
        sequences_now=_number(sequences.get("now")),
        sequences_start=_number(sequences.get("start")),
        limping=_yes_or_no(found.get("limping")),
        storm=_yes_or_no(found.get("storm")),
    )


def _last(found: object) -> LastFailure | None:
    if not isinstance(found, Mapping):
        return None
    site, kind = found.get("site"), found.get("kind")
    return LastFailure(
        age_s=_number(found.get("age_s")),
        site=site if isinstance(site, str) and site in SITES else UNKNOWN_SITE,
        tokens=_number(found.get("tokens")),
        requests=_number(found.get("requests")),
        asked_bytes=_number(found.get("asked_bytes")),
        free_bytes=_number(found.get("free_bytes")),
        kind=kind if isinstance(kind, str) and kind in KINDS else "",
    )


def _table(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _yes_or_no(found: object) -> bool | None:
    return found if isinstance(found, bool) else None


def _number(found: object) -> float | None:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < MOST:
        return None
    return float(found)


def last_words(last: LastFailure | None) -> str:
    """The shape of the newest failure, without anybody's text: "a step of 8,192 tokens in 48 requests, at forward"."""
    if last is None:
        return ""
    size = f"a step of {format_count(int(last.tokens))} tokens" if last.tokens is not None else "a step"
    size += f" in {last.requests:.0f} requests" if last.requests is not None and last.requests > 1 else ""
    size += f", at {last.site}" if last.site != UNKNOWN_SITE else ""
    size += f", {_SPECIAL[last.kind]}" if last.kind in _SPECIAL else ""
    if last.asked_bytes is not None:
        free = f", {_size(last.free_bytes)} free" if last.free_bytes is not None else ""
        size += f" (asked for {_size(last.asked_bytes)}{free})"
    return size


def cost_words(found: Survival) -> list[str]:
    """What it has cost since the server began: tokens, time, requests, and the size of its steps."""
    parts = []
    if found.recomputed_tokens:
        parts.append(f"{format_count(int(found.recomputed_tokens))} tokens were computed again")
    if found.stalled_s:
        parts.append(f"streams stood still for {found.stalled_s:.1f} s")
    if found.aborted:
        parts.append(f"{found.aborted:.0f} request{' was' if found.aborted == 1 else 's were'} aborted, too large alone")
    if found.is_shrunk and found.tokens_now is not None and found.tokens_start is not None:
        parts.append(f"steps of at most {found.tokens_now:.0f} tokens now, {found.tokens_start:.0f} at the start")
    return parts


def _size(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if MIB <= size < GIB else format_gib(int(size))

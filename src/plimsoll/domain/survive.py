"""What a server says of the steps that ran out of device memory and did not end it (`survive` in /plimsoll/state)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SITES = ("forward", "logits", "sampler", "encoder", "adapter", "drafter", "unknown")
UNKNOWN_SITE = "unknown"
KINDS = ("prompt_logprobs", "pictures", "adapter")
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

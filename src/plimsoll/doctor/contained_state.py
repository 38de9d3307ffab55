"""Contained failures as a server itself counts them: in its gate's state, and on its page of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from plimsoll.doctor.contained_remedies import NOT_REMEDIES, TITLE, contained_remedies
from plimsoll.domain.finding import Code, Evidence, Finding, Remedy, Severity
from plimsoll.domain.metrics_page import Page
from plimsoll.domain.survive import UNKNOWN_SITE, Survival, cost_words, last_words

PREFIX = "plimsoll_survive_"
CONTAINED = f"{PREFIX}contained_total"


def remedies_of(found: Survival | None) -> tuple[Remedy, ...]:
    """What makes it impossible, by the site and the shape of the newest failure."""
    last = None if found is None else found.last
    if found is None or last is None:
        return contained_remedies(UNKNOWN_SITE)
    tokens = int(found.tokens_now) if found.is_shrunk and found.tokens_now is not None else None
    return contained_remedies(last.site, last.kind, tokens=tokens)


def finding_of_state(found: Survival, evidence: tuple[Evidence, ...]) -> Finding | None:
    """runtime.contained for a saved state; None where nothing was contained, or nobody says."""
    if not found.contained and not found.aborted:
        return None
    count = found.contained or 0
    first = f"{count:.0f} step{'' if count == 1 else 's'} ran out of device memory since the server began, and it lives"
    last = last_words(found.last)
    state = ["it limps: far slower than before"] if found.limping else []
    state += ["a storm: it should be drained and restarted"] if found.storm else []
    because = "; ".join([first, *([f"the last: {last}"] if last else []), *cost_words(found), *state])
    return Finding(
        Code.RUNTIME_CONTAINED, Severity.WARNING, 0.95, TITLE, because, evidence, remedies_of(found), NOT_REMEDIES
    )  # fmt: skip


def finding_of_page(page: Page, before: Page | None, source: str) -> Finding | None:
    """runtime.contained for a page that counts contained failures; None where it counts none."""
    now = {name: value for name in _COUNTERS if (value := _total(page, name)) is not None}
    count = now.get("contained_total", 0.0)
    if count < 1:
        return None
    old = None if before is None else _total(before, "contained_total")
    lately = "" if old is None or old > count else f", {count - old:.0f} of them between the two looks"
    found = Survival(
        contained=count, aborted=now.get("aborted_total"), recomputed_tokens=now.get("recomputed_tokens_total"),
        stalled_s=now.get("stalled_seconds_total"), tokens_now=now.get("tokens_per_step"),
        tokens_start=now.get("tokens_per_step_start"), limping=_flag(now, "limping"), storm=_flag(now, "storm"),
    )  # fmt: skip
    shown = page.of(CONTAINED)[0]
    finding = finding_of_state(found, (Evidence(source, f"{CONTAINED} {count:.10g}", shown.line),))
    assert finding is not None, "something was contained"
    return finding._replace(because=finding.because.replace(" since the server began", f" since the server began{lately}", 1))


_COUNTERS = (
    "contained_total", "aborted_total", "recomputed_tokens_total", "stalled_seconds_total", "tokens_per_step",
    "tokens_per_step_start", "limping", "storm",
)  # fmt: skip


def _total(page: Page, name: str) -> float | None:
    value = page.total(PREFIX + name)
    return value if value is not None and 0 <= value < math.inf else None


def _flag(now: Mapping[str, float], name: str) -> bool | None:
    return None if name not in now else now[name] > 0

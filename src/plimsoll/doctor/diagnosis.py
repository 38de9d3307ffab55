"""The answer of `plimsoll doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.domain.finding import Finding


class Diagnosis(NamedTuple):
    """What happened, what shows it, and what to collect where it cannot be told."""

    memory_failure: bool | None  # None: it cannot be told
    findings: tuple[Finding, ...]  # the root cause first
    facts: Mapping[str, object]  # plain values, ready for JSON
    collect_next: tuple[str, ...]

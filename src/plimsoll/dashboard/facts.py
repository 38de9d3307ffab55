"""What the page is made from: one engine as guard sees it now, its last half hour, and what is being done to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.domain.unknown import Reading, Unknown
from plimsoll.report.guard import EngineView, Told

NOT_SEEN = Unknown("not looked at yet")


class Series(NamedTuple):
    """Figures over time, on the wall's clock; None where one was not known."""

    times: Sequence[float] = ()
    values: Mapping[str, Sequence[float | None]] = {}


class Doing(NamedTuple):
    """An action under way."""

    grade: str
    step: str
    is_undoing: bool = False
    since: float | None = None


class Guarding(NamedTuple):
    """What of guard's own doing bears on an engine."""

    is_acting: bool = False
    is_paused: bool = False  # all of it, or this engine
    rungs_off: tuple[str, ...] = ()
    doing: Doing | None = None


class EngineFacts(NamedTuple):
    """One engine."""

    view: EngineView
    readings: Mapping[str, Reading] = {}  # kv_cache_usage, running, waiting, in_flight, expected_wait, twice
    guarding: Guarding = Guarding()
    series: Series = Series()
    changes: Sequence[Told] = ()

    def reading(self, name: str) -> Reading:
        """One figure."""
        return self.readings.get(name, NOT_SEEN)


def id_of(name: str) -> str:
    """What an engine is called in addresses and requests, whatever its name holds."""
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:20]

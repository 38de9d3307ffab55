"""How trends are told: amounts, rates and times in words a tired person reads."""

from __future__ import annotations

from plimsoll.doctor.trend_growth import Forecast, Growth
from plimsoll.domain.units import format_gib


def duration(seconds: float) -> str:
    """40 s, 12 min, 5.5 h, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def rate(grown: Growth) -> str:
    """The slope an hour, with its interval."""
    amounts = [format_gib(round(value * 3600)) for value in (grown.slope, grown.low, grown.high)]
    return f"{amounts[0]} an hour (95 %: {amounts[1]} to {amounts[2]})"


def ahead(coming: Forecast | None, limit: float | None) -> str:
    """When the limit is reached, or that there is no forecast and why."""
    if coming is not None:
        return (
            f"If it goes on, the limit is reached in {duration(coming.likely_s)} "
            f"(95 %: {duration(coming.soonest_s)} to {duration(coming.latest_s)})."
        )
    return (
        "No forecast: the limit is not known."
        if limit is None
        else "No forecast: the limit is too far off, or the slope too vague."
    )

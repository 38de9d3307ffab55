"""Turns the stamps of one file into seconds that can be compared within that file."""

from __future__ import annotations

from functools import lru_cache

_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
_MONTHS = {
    name: at for at, name in enumerate(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1)
}
_NO_YEAR = 1972  # a leap year, for 29 February


@lru_cache(maxsize=512)
def day_of(year: int, month: int, day: int) -> int | None:
    """Days since 1970, or None where there is no such day."""
    if not (1 <= month <= 12 and 1 <= day <= 31 and 1970 <= year <= 2200):
        return None
    leaps = (year - 1) // 4 - (year - 1) // 100 + (year - 1) // 400 - 477
    is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return (year - 1970) * 365 + leaps + _DAYS_BEFORE[month - 1] + (1 if is_leap and month > 2 else 0) + day - 1


class Clock:
    """Reads stamps in the order of the file; a stamp without a year belongs to the year of those before it."""

    def __init__(self) -> None:
        self._year = _NO_YEAR
        self._month = 0

    def seconds(self, stamp: str) -> float | None:
        """Of "11-15 08:00:00", "2025-11-15T08:00:00.123Z", "2025-11-15 08:00:00,123" or "Nov 15 08:00:00"."""
        try:
            return self._seconds(stamp)
        except (ValueError, IndexError):
            return None

    def _seconds(self, stamp: str) -> float | None:
        has_year = stamp[4:5] == "-"
        if has_year:
            year, month, day, rest = int(stamp[:4]), int(stamp[5:7]), int(stamp[8:10]), stamp[11:]
        elif stamp[:1].isalpha():
            year, month, day, rest = self._year, _MONTHS.get(stamp[:3], 0), int(stamp[4:6]), stamp[7:]
        else:
            year, month, day, rest = self._year, int(stamp[:2]), int(stamp[3:5]), stamp[6:]
        if not has_year and self._month - month >= 6:
            year += 1  # December, then January
        days = day_of(year, month, day)
        if days is None:
            return None
        self._year, self._month = year, month
        time, offset = _split_offset(rest)
        hours, minutes, seconds = int(time[:2]), int(time[3:5]), float(time[6:].replace(",", ".") or 0)
        return days * 86400.0 + hours * 3600 + minutes * 60 + seconds - offset


def _split_offset(rest: str) -> tuple[str, int]:
    """The time of day, and by how many seconds it is ahead of UTC."""
    if rest.endswith(("Z", "z")):
        return rest[:-1], 0
    for sign, factor in (("+", 1), ("-", -1)):
        at = rest.find(sign, 8)
        if at > 0:
            digits = rest[at + 1 :].replace(":", "")
            return rest[:at], factor * (int(digits[:2]) * 3600 + int(digits[2:4] or 0) * 60)
    return rest, 0

"""What a scene shows, from what was seen of it: pure arithmetic, the same for every watcher.

Nothing here asks a watcher how well it did. An engine is in service when the balancer sends it work and it makes steps; whether
it hangs is known, because the scene made it hang. The fleet is whole when every engine is in service and no more requests are
under way than usual, those that were told to wait among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lab.article.incidents import VICTIM, Incident


class Seen(NamedTuple):
    """The fleet at one moment; the incident begins at 0, in the article's seconds."""

    at_s: float
    takes_work: Mapping[str, bool]  # by the balancer's word; empty where it gave none
    pids: Mapping[str, int]
    under_way: int
    figures: Mapping[str, tuple[float, int, int, int]] = {}  # KV use, running, waiting, preemptions, where it was asked


class Word(NamedTuple):
    """Something that a watcher said or decided."""

    at_s: float
    engine: str
    what: str  # "notice": it has seen something; "act": it has decided to do something about it
    says: str


def in_service(incident: Incident, seen: Seen, first: Mapping[str, int]) -> dict[str, bool]:
    """Of each engine at this moment."""
    is_hung = incident.fault == "wedge" and seen.at_s >= 0 and seen.pids.get(VICTIM) == first.get(VICTIM)
    return {name: takes and not (is_hung and name == VICTIM) for name, takes in seen.takes_work.items()}


def out_of_service_s(incident: Incident, rows: Sequence[Seen], first: Mapping[str, int]) -> dict[str, float]:
    """How long each engine was out; a stretch between two looks counts as its later one."""
    spent: dict[str, float] = dict.fromkeys(first, 0.0)
    for before, row in pairwise(rows):
        if row.at_s <= 0:
            continue
        for name, is_in in in_service(incident, row, first).items():
            spent[name] += 0.0 if is_in else row.at_s - max(0.0, before.at_s)
    return spent


def fewest_in_service(incident: Incident, rows: Sequence[Seen], first: Mapping[str, int]) -> int:
    """How many engines were in service at the worst moment."""
    counts = [sum(in_service(incident, row, first).values()) for row in rows if row.at_s > 0 and row.takes_work]
    return min(counts, default=len(first))


def whole_again_s(incident: Incident, rows: Sequence[Seen], first: Mapping[str, int]) -> float | None:
    """When the fleet was whole for good: 0 if it always was, None if it is not at the last look."""
    later = [row for row in rows if row.at_s > 0 and row.takes_work]
    broken = [
        place for place, row in enumerate(later)
        if row.under_way > incident.usual or not all(in_service(incident, row, first).values())
    ]  # fmt: skip
    if not broken:
        return 0.0
    return None if broken[-1] == len(later) - 1 else later[broken[-1] + 1].at_s


def restarts(rows: Sequence[Seen], first: Mapping[str, int]) -> dict[str, int]:
    """How often each engine's process was another one than before."""
    found = dict.fromkeys(first, 0)
    last = dict(first)
    for row in rows:
        for name, pid in row.pids.items():
            if pid != last.get(name):
                found[name] += 1
                last[name] = pid
    return found


def first_s(words: Sequence[Word], *what: str) -> float | None:
    """When it first did one of these after the beginning; None for never."""
    return min((one.at_s for one in words if one.what in what and one.at_s >= 0), default=None)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of the sorted values; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def lost_how(lost: Sequence[str]) -> dict[str, int]:
    """How many were lost in which way."""
    return dict(sorted(Counter(lost).items()))


def peaks(rows: Sequence[Seen]) -> dict[str, Any]:
    """The highest figures of any engine, and how long all asked engines together were over 95 % of their cache."""
    figures = [one for row in rows if row.at_s >= 0 for one in row.figures.values()]
    asked = [row for row in rows if row.at_s >= 0 and row.figures]
    full = sum(any(one[0] > 0.95 for one in row.figures.values()) for row in asked)
    return {
        "kv": max((one[0] for one in figures), default=None),
        "running": max((one[1] for one in figures), default=None),
        "waiting": max((one[2] for one in figures), default=None),
        "preemptions": max((one[3] for one in figures), default=None),
        "looks_with_a_full_cache": round(full / len(asked), 3) if asked else None,
    }

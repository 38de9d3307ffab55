"""Which saved pages of metrics are looks at one and the same server, and in which order they were taken.

A page names its server by the moment at which that began: the process's start, or the birth of each counter. Counters only
rise, so they tell the order, whatever the files are called. Where a page names no such moment nothing is concluded: two
replicas of one model look like one server that worked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from plimsoll.doctor.metrics import MetricsVerdict, judge_pages
from plimsoll.domain.finding import Code, Severity
from plimsoll.domain.metrics_page import Page

_STARTED = "process_start_time_seconds"
_USED = "process_cpu_seconds_total"

Identity = frozenset[tuple[str, float]]


def judge_saved(pages: Sequence[Page]) -> Iterator[tuple[Page, MetricsVerdict]]:
    """Each page with its verdict: as a second look wherever an earlier page of the same server is among them."""
    for chain in chains(pages):
        looks = [pages[place] for place in chain]
        if len(looks) == 1:
            yield looks[0], judge_pages(looks[0])
            continue
        later = [judge_pages(first, second, second.source) for first, second in pairwise(looks)]
        yield looks[0], _first(looks, later)
        yield from zip(looks[1:], later, strict=True)


def _first(looks: Sequence[Page], later: Sequence[MetricsVerdict]) -> MetricsVerdict:
    """What only the first look shows: a cache that was full at that moment; of counters the later ones know more."""
    verdict = judge_pages(looks[0])
    pressed = any(one.code.startswith("kv.") and one.severity is not Severity.INFO for two in later for one in two.findings)
    found = () if pressed else tuple(one for one in verdict.findings if one.code is Code.KV_SATURATED)
    note = f"the first of {len(looks)} looks at one server, by the start that they name; the next is {looks[1].source}"
    return MetricsVerdict(found, verdict.facts._replace(notes=(note,)))


def chains(pages: Sequence[Page]) -> list[list[int]]:
    """The places of the pages, those of one server together and the oldest first; a page alone is a chain of one."""
    found: list[list[int]] = []
    of: dict[Identity, list[int]] = {}
    for place, page in enumerate(pages):
        known = of.get(began := _began(page))
        if began and known is not None:
            known.append(place)
            continue
        found.append([place])
        of[began] = found[-1]
    return [part for chain in found for part in _in_order(pages, chain)]


def _began(page: Page) -> Identity:
    """The moments at which what the page shows began; empty where it does not say."""
    shown = {(_STARTED, sample.value) for sample in page.of(_STARTED) if math.isfinite(sample.value)}
    if not shown:
        births = (name for name in page.by_name if name.startswith("vllm:") and name.endswith("_created"))
        shown = {(name, page.by_name[name][0].value) for name in births}
    return frozenset(shown)


def _in_order(pages: Sequence[Page], chain: list[int]) -> list[list[int]]:
    """The chain by its counters; each page by itself where some rose and others fell."""
    totals = {place: _totals(pages[place]) for place in chain}
    ordered = sorted(chain, key=lambda place: (math.fsum(totals[place].values()), pages[place].total(_USED) or 0.0))
    for before, after in pairwise(ordered):
        if any(totals[after].get(name, value) < value for name, value in totals[before].items()):
            return [[place] for place in chain]
    return [ordered]


def _totals(page: Page) -> dict[str, float]:
    """vLLM's own counters, by name."""
    names = (name for name in page.by_name if name.startswith("vllm:") and name.endswith(("_total", "_count")))
    return {name: value for name in names if (value := page.total(name)) is not None}

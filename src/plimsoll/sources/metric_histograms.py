"""Reads the histograms of a saved page of metrics for a fit, which a wrong one would mislead: what makes no sense is refused.

Engines and models of one page are added up. Everything that is not a histogram is passed over.
"""

from __future__ import annotations

import math

from plimsoll.domain.histogram import Histogram
from plimsoll.domain.metrics_page import Labels, Page
from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.metrics_pages import LINE_MAX, PAGE_MAX, is_sample, parse_page
from plimsoll.sources.trace_lines import read_lines

_SHOWN = 60


def looks_like_metrics(path: str) -> bool:
    """Whether the file's first line is one of a page of metrics; a file that cannot be read is not."""
    if path == "-":
        return False
    try:
        first = next((chunk.lines[0] for chunk in read_lines(path) if chunk.lines), b"")
    except BadInput:
        return False
    text = first[:LINE_MAX].decode("utf-8", "replace").lstrip("\ufeff").strip()
    return text.startswith(("# HELP ", "# TYPE ", "# UNIT ")) or is_sample(text)


def read_histograms(path: str) -> tuple[Histogram, ...]:
    """All histograms of the page, in its order; BadInput where a line or one of them makes no sense."""
    data = bytearray()
    for chunk in read_lines(path):
        data += b"\n".join(chunk.lines) + b"\n"
        if len(data) > PAGE_MAX:
            raise TooLarge(f"{path}: too long for a page of metrics")
    page = parse_page(bytes(data), path, None)
    if page.skipped:
        lines = (line.strip() for line in data.decode("utf-8", "replace").lstrip("\ufeff").split("\n"))
        bad = next((line for line in lines if line and not line.startswith("#") and not is_sample(line)), "")
        raise BadInput(f"{path}: not a line of metrics: {bad[:_SHOWN]!r}")
    declared = [name for name, kind in page.types.items() if kind == "histogram"]
    return tuple(_sound(page, name) for name in declared if page.of(f"{name}_bucket") or page.of(f"{name}_sum"))


def _sound(page: Page, name: str) -> Histogram:
    """A page adds up the sums that are numbers: here each label set must have one, or the mean would be another."""
    found = page.histogram(name)
    sums = [sample.value for sample in page.of(f"{name}_sum")]
    sets = {_without_bound(sample.labels) for sample in page.of(f"{name}_bucket")}
    if found is None or len(sums) != len(sets) or not all(map(math.isfinite, sums)):
        wrong = "its buckets do not rise, do not end in +Inf or differ between its label sets, or a sum is not a number"
        raise BadInput(f"{page.source}: the histogram {name[:_SHOWN]} makes no sense: {wrong}")
    return found


def _without_bound(labels: Labels) -> frozenset[tuple[str, str]]:
    return frozenset(one for one in labels.items() if one[0] != "le")

"""Reads the histograms of a page of metrics in Prometheus' text format, as vLLM's /metrics gives it.

    # TYPE vllm:time_to_first_token_seconds histogram
    vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 2.0
    vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.21

Engines and models of one page are added up. Everything that is not a histogram is passed over.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from plimsoll.domain.histogram import Histogram
from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.trace_lines import read_lines

LINES_MAX = 200_000
LINE_MAX = 64 << 10
BUCKETS_MAX = 10_000
"""Of one histogram, over all its label sets."""
_SHOWN = 60
_TYPE = re.compile(r"#\s*TYPE\s+(\S+)\s+histogram\s*\Z")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*\Z", re.ASCII)
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(,|\Z)', re.ASCII)


class _Series(NamedTuple):
    """Of one set of labels."""

    buckets: dict[float, float]
    """Upper bound to how many values are no larger."""
    sums: list[float]


def looks_like_metrics(path: str) -> bool:
    """Whether the file's first line is one of a page of metrics; a file that cannot be read is not."""
    if path == "-":
        return False
    try:
        first = next((chunk.lines[0] for chunk in read_lines(path) if chunk.lines), b"")
    except BadInput:
        return False
    text = first[:LINE_MAX].decode("utf-8", "replace").strip()
    return text.startswith(("# HELP ", "# TYPE ")) or bool(_SAMPLE.match(text))


def read_histograms(path: str) -> tuple[Histogram, ...]:
    """All histograms of the page, by name; one line of BadInput names the first line that is wrong."""
    pages: list[tuple[int, str]] = []
    for chunk in read_lines(path):
        for number, line in zip(chunk.numbers, chunk.lines, strict=True):
            if len(pages) >= LINES_MAX or len(line) > LINE_MAX:
                raise TooLarge(f"{path}, line {number}: too long for a page of metrics")
            try:
                pages.append((number, line.decode("utf-8").strip()))
            except UnicodeDecodeError:
                raise BadInput(f"{path}, line {number}: not UTF-8") from None
    return _parse(path, pages)


def _parse(path: str, lines: list[tuple[int, str]]) -> tuple[Histogram, ...]:
    found: dict[str, dict[tuple[tuple[str, str], ...], _Series]] = {}
    for number, line in lines:
        declared = _TYPE.match(line)
        if declared:
            found.setdefault(declared.group(1), {})
        if line.startswith("#"):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            raise BadInput(f"{path}, line {number}: not a line of metrics: {line[:_SHOWN]!r}")
        name, _, suffix = sample.group(1).rpartition("_")
        if name not in found or suffix not in ("bucket", "sum"):
            continue
        labels = _labels(sample.group(2) or "", f"{path}, line {number}")
        value = _number(sample.group(3), f"{path}, line {number}")
        bound = labels.pop("le", None)
        series = found[name].setdefault(tuple(sorted(labels.items())), _Series({}, []))
        if suffix == "sum":
            series.sums.append(value)
        elif bound is None:
            raise BadInput(f"{path}, line {number}: a bucket of {name[:_SHOWN]} has no bound (le)")
        else:
            series.buckets[_number(bound, f"{path}, line {number}")] = value
            if len(series.buckets) + len(found[name]) > BUCKETS_MAX:
                raise TooLarge(f"{path}, line {number}: more than {BUCKETS_MAX} buckets in {name[:_SHOWN]}")
    return tuple(_added(path, name, list(sets.values())) for name, sets in found.items() if sets)


def _labels(text: str, where: str) -> dict[str, str]:
    inside, labels, at = text[1:-1], {}, 0
    while inside[at:].strip():
        one = _LABEL.match(inside, at)
        if one is None:
            raise BadInput(f"{where}: labels cannot be read: {text[:_SHOWN]!r}")
        labels[one.group(1)] = one.group(2)
        at = one.end()
    return labels


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or "_" in text:
        raise BadInput(f"{where}: not a number: {text[:_SHOWN]!r}")
    return value


def _added(path: str, name: str, sets: list[_Series]) -> Histogram:
    shown = name[:_SHOWN]
    bounds = sorted(sets[0].buckets)
    if not bounds or bounds[-1] != math.inf or any(sorted(one.buckets) != bounds for one in sets):
        raise BadInput(f"{path}: the buckets of {shown} do not end in +Inf, or differ between its label sets")
    cumulative = [math.fsum(one.buckets[bound] for one in sets) for bound in bounds]
    counts = [high - low for low, high in zip([0.0, *cumulative], cumulative, strict=False)]
    total = math.fsum(value for one in sets for value in one.sums)
    if not all(0 <= count < math.inf for count in counts) or not math.isfinite(total):
        raise BadInput(f"{path}: the buckets of {shown} do not rise, or its sum is not a number")
    return Histogram(name, tuple(bounds[:-1]), tuple(counts), total)

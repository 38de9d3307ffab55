"""Prometheus' text format as prometheus_client writes it: numbers, labels, heads, and lines with a place for the number.

A line is made once and filled often, so that a page costs no more than the numbers on it:

    template = value_line("vllm:num_requests_running", {"engine": "0"})      # 'vllm:num_requests_running{engine="0"} %s\\n'
    template % number(12)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from itertools import accumulate

from plimsoll.domain.metrics_page import escaped_label
from plimsoll.standin.figures import Histogram


def number(value: float) -> str:
    """A number as Go would print it: an exponent from a million on, and never without a point or one."""
    if type(value) is int and 0 <= value < 1_000_000:  # most of a page
        return f"{value}.0"
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    whole, _, rest = text.partition(".")
    if value <= 0 or len(whole) <= 6 or not rest:
        return text
    digits = (whole + rest).rstrip("0")
    return f"{digits[0]}.{digits[1:]}".rstrip(".") + f"e+{len(whole) - 1:02d}"


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels by name, in braces; nothing at all where there are none."""
    return "{" + ",".join(f'{name}="{escaped_label(labels[name])}"' for name in sorted(labels)) + "}" if labels else ""


def head(name: str, kind: str, meaning: str) -> str:
    """The two lines before the samples of a metric."""
    plain = meaning.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {plain}\n# TYPE {name} {kind}\n"


def literal(text: str) -> str:
    """Text that stands in a template as it is."""
    return text.replace("%", "%%")


def value_line(name: str, labels: Mapping[str, str]) -> str:
    """A template of one sample."""
    return literal(name + labels_text(labels)) + " %s\n"


def histogram_lines(name: str, labels: Mapping[str, str], edges: tuple[float, ...]) -> str:
    """A template of all samples of a histogram; `histogram_numbers` fills it."""
    bounds = bounds_text(edges)
    buckets = "".join(value_line(f"{name}_bucket", {**labels, "le": bound}) for bound in bounds)
    return buckets + value_line(f"{name}_count", labels) + value_line(f"{name}_sum", labels)


@functools.lru_cache(maxsize=64)
def bounds_text(edges: tuple[float, ...]) -> tuple[str, ...]:
    """The edges and infinity, as they stand in the label `le`."""
    return tuple(number(edge) for edge in (*edges, math.inf))


def histogram_numbers(histogram: Histogram) -> list[str]:
    """How many were no larger than each edge, how many there were, and what they add up to."""
    rising = [number(count) for count in accumulate(histogram.counts)]
    return [*rising, rising[-1], number(histogram.total)]

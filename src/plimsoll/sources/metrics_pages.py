"""Reads pages of metrics, in Prometheus' text format or OpenMetrics: from a file, from bytes, or from a live server.

    # TYPE vllm:num_requests_running gauge
    vllm:num_requests_running{engine="0",model_name="m"} 12.0

A line that cannot be read is passed over and counted: half a page is worth more than none. Exemplars are passed over.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from plimsoll.domain.metrics_page import Labels, Page, Sample, grouped
from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.sources.unpacking import gunzipped

if TYPE_CHECKING:  # urllib takes longer to load than a saved page to read
    from plimsoll.sources.http_get import Address

PAGE_MAX = 32 << 20
SAMPLES_MAX = 500_000
LINE_MAX = 32 << 10
LABELS_MAX = 256
GAP_S = 5.0
"""Between two looks at a live page: long enough for several steps, short enough for someone who waits."""
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]{0,1000}"
_TYPE = re.compile(rf"#[ \t]{{1,9}}TYPE[ \t]{{1,9}}({_NAME})[ \t]{{1,9}}([a-z]{{1,20}})[ \t]{{0,9}}\Z")
_SAMPLE = re.compile(
    rf'({_NAME})(?:[ \t]{{0,9}}\{{((?:[^"{{}}]|"[^"\\]*(?:\\.[^"\\]*)*")*)\}}[ \t]{{0,9}}|[ \t]{{1,9}})([^\s{{}}#]{{1,64}})'
    r"(?:[ \t]{1,9}([-+0-9.eE]{1,32}))?[ \t]{0,9}(?:#.*)?\Z"
)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]{0,200})[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,|\Z)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}


def read_page(path: str, source: str | None = None) -> Page:
    """A saved page, packed or not; `source` is how it is named where the path is only a copy's."""
    from plimsoll.sources.text_bytes import Budget, blocks_of_descriptor, opened, unpacked

    name = source or path
    descriptor, what = opened(path)
    try:
        if not stat.S_ISREG(what.st_mode):
            raise BadInput(f"{name}: not a file")
        data = b""
        for block in unpacked(name, blocks_of_descriptor(descriptor, Budget(None, time.monotonic))):
            data += block
            if len(data) > PAGE_MAX:
                raise TooLarge(f"{name}: more than {PAGE_MAX >> 20} MiB")
    finally:
        os.close(descriptor)
    return parse_page(data, name, None)


def parse_page(data: bytes, source: str, at_s: float | None) -> Page:
    """The page in these bytes; BadInput if not one sample is in them."""
    lines = gunzipped(data, PAGE_MAX, source).decode("utf-8", "replace").lstrip("\ufeff").split("\n")
    seen: dict[str, Labels] = {}
    types: dict[str, str] = {}
    samples: list[Sample] = []
    skipped, in_seconds = 0, False
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line:
            continue
        if line.startswith("#"):
            declared = _TYPE.match(line) if len(line) <= LINE_MAX else None
            if declared and len(types) < SAMPLES_MAX:
                types[declared[1]] = declared[2]
            in_seconds = in_seconds or line == "# EOF"
            continue
        sample = _sample(line, number, seen) if len(line) <= LINE_MAX else None
        if sample is None:
            skipped += 1
        else:
            samples.append(sample)
            if len(samples) > SAMPLES_MAX:
                raise TooLarge(f"{source}, line {number}: more than {SAMPLES_MAX:,} samples")
    if not samples:
        raise BadInput(f"{source}: not a page of metrics: no line of it is a sample")
    if not in_seconds:  # only OpenMetrics stamps in seconds, and only OpenMetrics ends in EOF
        samples = [s._replace(at_s=s.at_s / 1000) if s.at_s is not None else s for s in samples]
    return Page(source, at_s, grouped(samples), types, skipped)


def is_sample(line: str) -> bool:
    """Whether a page of metrics may hold this line as one of its values."""
    return _sample(line, 1, {}) is not None


def page_address(url: str) -> Address:
    """Where the page of a server is: /metrics unless the user named a path."""
    from plimsoll.sources.http_get import address

    where = address(url)
    path = where.url.split("://", 1)[1].partition("?")[0].partition("/")[2]
    return where if path else where.at("/metrics")


def fetch_pages(
    url: str,
    *,
    samples: int = 2,
    gap_s: float = GAP_S,
    timeout_s: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> tuple[Page, ...]:
    """A live page, looked at `samples` times `gap_s` apart; fewer pages if the server stopped answering in between."""
    where = page_address(url)
    pages: list[Page] = []
    for look in range(samples):
        if look:
            sleep(gap_s)
        try:
            pages.append(_fetched(where, timeout_s, clock))
        except WorldFailed:
            if not pages:
                raise
            break
    return tuple(pages)


def fetch_health(url: str, *, timeout_s: float = 5.0) -> int | None:
    """The status of the server's /health: 503 says that its engine is dead; None if it does not answer."""
    from plimsoll.sources import http_get

    try:
        return http_get.get(http_get.address(url).at("/health"), most_bytes=1 << 20, timeout_s=timeout_s).status
    except (WorldFailed, TooLarge):
        return None


def _fetched(where: Address, timeout_s: float, clock: Callable[[], float]) -> Page:
    from plimsoll.sources import http_get

    reply = http_get.get(where, most_bytes=PAGE_MAX, timeout_s=timeout_s)
    if reply.status != 200:
        raise WorldFailed(f"{where.shown}: answers {reply.status}, not a page of metrics")
    return parse_page(reply.body, where.shown, clock())


def _sample(line: str, number: int, seen: dict[str, Labels]) -> Sample | None:
    match = _SAMPLE.match(line)
    if match is None:
        return None
    name, inside, text, stamp = match.groups()
    value, at_s = _number(text), _number(stamp) if stamp else None
    if value is None or (stamp and at_s is None):
        return None
    inside = inside or ""
    labels = seen.get(inside)
    if labels is None:
        read = _labels(inside)
        if read is None:
            return None
        labels = seen[inside] = read
    return Sample(name, labels, value, number, at_s)


def _labels(inside: str) -> Labels | None:
    labels: dict[str, str] = {}
    at = 0
    while at < len(inside.rstrip()):
        one = _LABEL.match(inside, at)
        if one is None or len(labels) >= LABELS_MAX:
            return None
        text = one[2]
        labels[one[1]] = _ESCAPE.sub(lambda m: _ESCAPES.get(m[1], m[0]), text) if "\\" in text else text
        at = one.end()
    return labels


def _number(text: str) -> float | None:
    if "_" in text:  # Python would take 1_000
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return math.nan if math.isnan(value) else value

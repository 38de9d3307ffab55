"""A page of metrics as a server showed it at one moment: every sample with its labels."""

from __future__ import annotations

import io
import math
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.net.address import Address, address
from plimsoll.net.inputs import SAMPLE_BYTES, Budget, Descriptor, is_plain, opened, text_blocks, unpacked


class Histogram(NamedTuple):
    """`counts` has one more than `bounds`, which rise: values from one bound to the next, and last those above all bounds."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float  # the sum of all values

    @property
    def size(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.size if self.size else None


Labels = Mapping[str, str]


class Sample(NamedTuple):
    name: str  # with its ending: _total, _bucket, _sum, _count
    labels: Labels
    value: float  # NaN or infinite if the page has it so
    line: int  # counted from 1
    at_s: float | None = None  # the sample's own time stamp, where it has one


class Page(NamedTuple):
    """All samples of a page in their order."""

    source: str
    at_s: float | None  # when it was read; None for a saved page
    by_name: Mapping[str, tuple[Sample, ...]]
    types: Mapping[str, str]  # family to counter, gauge, histogram, ... as declared
    skipped: int = 0  # lines that could not be read

    @property
    def names(self) -> frozenset[str]:
        """The names of samples and of families, declared or shown by buckets. Computed at every access: keep them."""
        families = (name.removesuffix("_bucket") for name in self.by_name if name.endswith("_bucket"))
        return frozenset(self.by_name).union(self.types, families)

    def of(self, name: str, labels: Labels | None = None) -> tuple[Sample, ...]:
        """Returns the samples of exactly this name whose labels include the given ones."""
        found = self.by_name.get(name, ())
        wanted = labels.items() if labels else ()
        return tuple(s for s in found if all(s.labels.get(key) == value for key, value in wanted)) if wanted else found

    def total(self, name: str, labels: Labels | None = None) -> float | None:
        """Returns the sum of the finite samples of this name; None if there are none."""
        values = [s.value for s in self.of(name, labels) if math.isfinite(s.value)]
        return math.fsum(values) if values else None

    def histogram(self, family: str, labels: Labels | None = None) -> Histogram | None:
        """Returns a histogram over all its label sets that include the given ones; None if it is absent or inconsistent."""
        buckets: dict[float, float] = {}
        sets: dict[tuple[tuple[str, str], ...], set[float]] = {}
        for sample in self.of(f"{family}_bucket", labels):
            bound = _number(sample.labels.get("le", "nan"))
            if bound is None or math.isnan(bound) or not math.isfinite(sample.value):
                return None
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
            key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            sets.setdefault(key, set()).add(bound)
        bounds = sorted(buckets)
        if not bounds or bounds[-1] != math.inf or any(len(shown) != len(bounds) for shown in sets.values()):
            return None
        rising = [buckets[bound] for bound in bounds]
        counts = tuple(high - low for low, high in zip([0.0, *rising], rising, strict=False))
        total = self.total(f"{family}_sum", labels)
        if total is None or any(count < 0 for count in counts):
            return None
        return Histogram(family, tuple(bounds[:-1]), counts, total)


def escaped_label(value: str) -> str:
    """Escapes a label's value as a page writes it between quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# Prometheus' text format or OpenMetrics. An unreadable line is skipped and counted: half a page is worth more than none.
# Exemplars are skipped.
PAGE_MAX = 32 << 20
SAMPLES_MAX = 500_000
LINE_MAX = 32 << 10
LABELS_MAX = 256
GAP_S = 5.0  # between two looks at a live page: long enough for several steps, short enough for someone who waits
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
    """Reads a saved page, packed or not; `source` names it if the path is only a copy's."""
    name = source or path
    descriptor, what = opened(path)
    try:
        if not stat.S_ISREG(what.st_mode):
            raise BadInput(f"{name}: not a file")
        data, budget = bytearray(), Budget()
        for block in text_blocks(name, Descriptor(descriptor, budget), budget):
            data += block
            if len(data) > PAGE_MAX:
                raise TooLarge(f"{name}: more than {PAGE_MAX >> 20} MiB")
    finally:
        os.close(descriptor)
    return parse_page(bytes(data), name, None)


def parse_page(data: bytes, source: str, at_s: float | None) -> Page:
    """Parses the page in these bytes, packed or not; BadInput if they have no sample."""
    if not is_plain(data[:SAMPLE_BYTES]):
        data = unpacked(source, io.BytesIO(data), whole=True).read(PAGE_MAX + 1)
    if len(data) > PAGE_MAX:
        raise TooLarge(f"{source}: more than {PAGE_MAX >> 20} MiB")
    lines = data.decode("utf-8", "replace").lstrip("\ufeff").split("\n")
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
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.at_s is not None and not in_seconds:  # only OpenMetrics stamps in seconds, and only OpenMetrics ends in EOF
            sample = sample._replace(at_s=sample.at_s / 1000)  # noqa: PLW2901
        by_name.setdefault(sample.name, []).append(sample)
    return Page(source, at_s, {name: tuple(found) for name, found in by_name.items()}, types, skipped)


def page_address(url: str) -> Address:
    """Returns the address of a server's page: /metrics unless the user named a path."""
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
    """Fetches a live page `samples` times, `gap_s` apart; returns fewer pages if the server stopped answering."""
    where = page_address(url)
    pages: list[Page] = []
    for look in range(samples):
        if look:
            sleep(gap_s)
        try:
            reply = where.get(most_bytes=PAGE_MAX, timeout_s=timeout_s)
            if reply.status != 200:
                raise WorldFailed(f"{where.shown}: answers {reply.status}, not a page of metrics")
            pages.append(parse_page(reply.body, where.shown, clock()))
        except WorldFailed:
            if not pages:
                raise
            break
    return tuple(pages)


def fetch_health(url: str, *, timeout_s: float = 5.0) -> int | None:
    """Returns the status of the server's /health: 503 means that its engine is dead; None if it does not answer."""
    try:
        return address(url).at("/health").get(most_bytes=1 << 20, timeout_s=timeout_s).status
    except (WorldFailed, TooLarge):
        return None


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

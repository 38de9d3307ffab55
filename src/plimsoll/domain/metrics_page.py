"""A page of metrics as a server showed it at one moment: every sample with its labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from plimsoll.domain.histogram import Histogram

Labels = Mapping[str, str]


class Sample(NamedTuple):
    """One line of the page."""

    name: str  # with its ending: _total, _bucket, _sum, _count
    labels: Labels
    value: float  # may be NaN or infinite: the page said so
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
        """The names of samples and of families, declared or shown by their buckets. Made anew at every call: keep it."""
        families = (name.removesuffix("_bucket") for name in self.by_name if name.endswith("_bucket"))
        return frozenset(self.by_name).union(self.types, families)

    def of(self, name: str, labels: Labels | None = None) -> tuple[Sample, ...]:
        """The samples of this very name whose labels include those asked for."""
        found = self.by_name.get(name, ())
        return tuple(s for s in found if _includes(s.labels, labels)) if labels else found

    def total(self, name: str, labels: Labels | None = None) -> float | None:
        """The sum of the finite samples of this name; None if there are none."""
        values = [s.value for s in self.of(name, labels) if math.isfinite(s.value)]
        return math.fsum(values) if values else None

    def histogram(self, family: str, labels: Labels | None = None) -> Histogram | None:
        """A histogram over all its label sets that include those asked for; None if it is absent or makes no sense."""
        buckets: dict[float, float] = {}
        sets: dict[tuple[tuple[str, str], ...], set[float]] = {}
        for sample in self.of(f"{family}_bucket", labels):
            bound = _bound(sample.labels.get("le"))
            if bound is None or not math.isfinite(sample.value):
                return None
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
            sets.setdefault(_key(sample.labels), set()).add(bound)
        bounds = sorted(buckets)
        if not bounds or bounds[-1] != math.inf or any(len(one) != len(bounds) for one in sets.values()):
            return None
        rising = [buckets[bound] for bound in bounds]
        counts = tuple(high - low for low, high in zip([0.0, *rising], rising, strict=False))
        total = self.total(f"{family}_sum", labels)
        if total is None or any(count < 0 for count in counts):
            return None
        return Histogram(family, tuple(bounds[:-1]), counts, total)


def escaped_label(value: str) -> str:
    """A label's value as a page writes it between its quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def grouped(samples: Iterable[Sample]) -> dict[str, tuple[Sample, ...]]:
    """Samples by name, each name's in their order."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)
    return {name: tuple(of_it) for name, of_it in found.items()}


def _includes(labels: Labels, wanted: Labels) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _bound(text: str | None) -> float | None:
    try:
        bound = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return None if math.isnan(bound) else bound


def _key(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in labels.items() if k != "le"))

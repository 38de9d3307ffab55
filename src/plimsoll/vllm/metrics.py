"""Our names for vLLM's figures, and each release's names for them.

A figure has one name here, whatever vLLM calls it this year. `resolve` looks it up for a release; `on_page` for a page whose
version is unknown, newer than the catalogue or a fork's, by the metrics on it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from plimsoll.vllm import versions
from plimsoll.vllm.versions import Behaviour, Engine


class Unit(StrEnum):
    RATIO = "ratio"  # 0 to 1, also where vLLM's own name says perc
    REQUESTS = "requests"
    TOKENS = "tokens"
    PREEMPTIONS = "preemptions"
    SECONDS = "seconds"
    BLOCKS = "blocks"
    ITEMS = "items"
    STATE = "state"
    INFO = "info"


@dataclass(frozen=True)
class Figure:
    """One figure, and the names it has had, newest first."""

    name: str
    unit: Unit
    meaning: str
    names: tuple[str, ...]
    traps: tuple[str, ...] = ()
    blocks_before: Behaviour | None = None  # until this change the figure counted blocks, not `unit`
    nearest: str | None = None  # a similar metric of another kind, for releases without any of `names`


@dataclass(frozen=True)
class ResolvedMetric:
    figure: Figure
    exposition: str  # the name on the page
    type: str  # gauge, counter, histogram
    labels: tuple[str, ...]
    unit: Unit
    is_exact: bool = True  # False: it is a relative of the figure, of another type or unit; never do sums with it
    # always; conditional (a flag, or an engine that is not the default); hidden (--show-hidden-metrics-for-version)
    shown: str = "always"


def _figure(unit: str, names: Sequence[str], traps: Sequence[str] = (), **more: Any) -> Figure:
    before = Behaviour.PREFIX_TOKENS if more.pop("once_in_blocks", False) else None
    return Figure(unit=Unit(unit), names=tuple(names), traps=tuple(traps), blocks_before=before, **more)


FIGURES: tuple[Figure, ...] = tuple(_figure(**row) for row in versions.table("figures")["figures"])


_BY_NAME: Mapping[str, Figure] = {one.name: one for one in FIGURES}


def figure(name: str) -> Figure:
    return _BY_NAME[name]


def resolve(name: str, engine: Engine) -> ResolvedMetric | None:
    """Returns the metric that carries a figure in a release; None if none does.

    Among several, it prefers the one shown by default, then the newest name. If the figure did not exist yet but a relative
    did (a hit rate instead of hits and queries), it returns the relative, marked `is_exact=False`.
    """
    wanted = figure(name)
    found = [r for n in wanted.names if (r := _in_release(wanted, n, engine.release)) is not None]
    if found:
        return min(found, key=lambda r: r.shown == "hidden")
    relative = _in_release(wanted, wanted.nearest, engine.release) if wanted.nearest is not None else None
    return relative and replace(relative, unit=Unit.RATIO, is_exact=False)


def on_page(name: str, families: Collection[str]) -> str | None:
    """Returns the exposition name of a figure among those on a page; None if it has none of them."""
    return next((one for one in figure(name).names if one in families or one.removesuffix("_total") in families), None)


def _default_engine(release: str) -> str:
    return "V1" if Behaviour.V1_ENGINE.is_in(release) else "V0"


@functools.cache
def metrics_of(release: str) -> Mapping[str, Mapping[str, object]]:
    """Returns every metric a release can export, by exposition name; the default engine takes precedence."""
    found: dict[str, Mapping[str, object]] = {}
    first = _default_engine(release)
    for key, stretches in versions.rows("metrics").items():
        exposition, engine = key.rsplit(" ", 1)
        for plain in stretches:
            if versions.is_within(plain, release) and (exposition not in found or engine == first):
                found[exposition] = {"engine": engine, **plain}
    return found


def _in_release(wanted: Figure, exposition: str, release: str) -> ResolvedMetric | None:
    known = metrics_of(release).get(exposition) or metrics_of(release).get(exposition.removesuffix("_total"))
    if known is None:
        return None
    labels = known.get("labels", ())
    assert isinstance(labels, list | tuple)
    runs = known["engine"] in (_default_engine(release), "any")
    unit = Unit.BLOCKS if wanted.blocks_before and not wanted.blocks_before.is_in(release) else wanted.unit
    shown = str(known["shown"]) if runs else "conditional"
    return ResolvedMetric(wanted, exposition, str(known["type"]), tuple(labels), unit, shown=shown)


def find(name: str, engine: Engine, families: Collection[str]) -> str | None:
    """Returns the metric that carries a figure on this page: by an exactly known version, else by the names on the page."""
    resolved = resolve(name, engine) if engine.is_exact else None
    if resolved is not None and resolved.is_exact:
        spellings = {resolved.exposition, resolved.exposition.removesuffix("_total")}
        if spellings & set(families):
            return resolved.exposition
    return on_page(name, families)


def cache_config_labels(release: str) -> dict[str, str]:
    """Returns the labels of vllm:cache_config_info in a release, in the page's order, with vLLM's defaults; no `engine`."""
    # They are the fields of vLLM's CacheConfig, which every few releases gains or loses some.
    labels = versions.table("figures")["cache_config_labels"]
    return {row["name"]: row["value"] for row in labels if versions.covers(row["first"], row.get("last"), release)}


def releases_with(names: Iterable[str]) -> tuple[str | None, str | None]:
    """Returns the oldest and the newest release that export all of these metrics; None where nothing bounds it."""
    wanted = set(names)
    spans: dict[str, list[tuple[str, str]]] = {}
    for key, stretches in versions.rows("metrics").items():
        name = key.rsplit(" ", 1)[0]
        if name in wanted:
            spans.setdefault(name, []).extend((row["from"], row["to"]) for row in stretches)
    shared = versions.shared_span([versions.whole_span(found) for found in spans.values()]) if spans else None
    if shared is None:
        return None, None
    return shared[0], None if shared[1] == versions.newest() else shared[1]

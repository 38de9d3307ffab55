"""Which release's facts apply to a version that a user typed or a server reported."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from os.path import dirname, join
from typing import Any, NamedTuple

from plimsoll.errors import BadInput

# A vLLM version, as users, wheels and servers spell it.

_FORM = (
    r"v?(?P<release>\d{1,6}(?:\.\d{1,6}){0,3})(?P<pre>\.?(?:rc|a|b)\d+|-rc\d+)?(?P<post>\.post\d+)?(?P<dev>\.?dev\d*)?"
    r"(?:[+-](?P<local>[A-Za-z0-9.\-_]+))?"  # image tags have a dash where wheels have a plus
)


@functools.total_ordering
class Version:
    """Compared by its release numbers alone: `0.9.0.1` is after `0.9.0`; a build tag or post-release changes no flag."""

    __slots__ = ("is_dev", "is_post", "local", "pre", "release", "text")

    def __init__(self, text: str) -> None:
        """Read a version; raises ValueError for what is none."""
        match = re.fullmatch(_FORM, text.strip())
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        numbers = tuple(int(number) for number in match["release"].split("."))
        self.release: tuple[int, ...] = numbers + (0,) * (3 - len(numbers))
        self.text = text.strip().removeprefix("v")
        self.pre: str = match["pre"] or ""
        self.is_dev = match["dev"] is not None
        self.is_post = match["post"] is not None
        self.local: str = match["local"] or ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.release == other.release

    def __lt__(self, other: Version) -> bool:
        return self.release < other.release

    def __hash__(self) -> int:
        return hash(self.release)

    def __repr__(self) -> str:
        return f"Version({self.text!r})"

    def __str__(self) -> str:
        return self.text


# Loads the tables that were read from the wheels, one file at a time and only when asked.

_DATA = join(dirname(__file__), "data")  # not pathlib: it would be the dearest import of `plimsoll flags`


class Span(NamedTuple):
    """A stretch of releases over which a row said the same; both ends were seen in a wheel."""

    first: Version
    last: Version
    facts: Mapping[str, Any]


@functools.cache
def _table(name: str) -> Mapping[str, Any]:
    with open(join(_DATA, f"{name}.json"), "rb") as file:
        loaded: Mapping[str, Any] = json.load(file)
    return loaded


def wheels() -> Mapping[str, str]:
    """Release to the file name of the wheel it was read from, oldest first."""
    found: Mapping[str, str] = _table("releases")["wheels"]
    return found


def rows(name: str) -> Mapping[str, list[dict[str, Any]]]:
    """A whole table, as it stands in its file."""
    found: Mapping[str, list[dict[str, Any]]] = _table(name)["rows"]
    return found


def spans_of(table: str, key: str) -> tuple[Span, ...]:
    """The stretches of one row, oldest first; empty if no release has it."""
    return tuple(span_from(row) for row in rows(table).get(key, ()))


def span_from(row: Mapping[str, Any]) -> Span:
    """One stretch out of its plain form."""
    facts = {k: v for k, v in row.items() if k not in ("from", "to")}
    return Span(Version(row["from"]), Version(row["to"]), facts)


# Tags of builds of the very same source: CUDA, ROCm, CPU and so on. Any other tag may be a fork.
_BUILD_TAG = r"(cu|cpu|rocm|xpu|tpu|neuron|hpu|gaudi|precompiled|x86_64|aarch64|ubuntu)[\d.a-z_\-]*"
_MOVING_NAMES = ("nightly", "main", "latest", "dev", "head")


class Engine(NamedTuple):
    """A vLLM version and the release we know that stands for it."""

    asked: str
    release: str  # a release that was read; its rows are the facts
    is_exact: bool  # the asked version is that release: what its parser lacks does not exist there
    note: str | None = None

    def __str__(self) -> str:
        return self.release


def newest() -> str:
    """The newest release that was read."""
    return list(wheels())[-1]


def engine_named(text: str | None, said_by: str = "--vllm") -> Engine:
    """The release whose facts apply; a version that was not read says so in its note. `said_by` names the culprit."""
    releases = list(wheels())
    last = len(releases) - 1
    if text is None:
        return Engine(releases[last], releases[last], is_exact=True)
    asked = text.strip()
    if asked.lower() in _MOVING_NAMES:
        return Engine(asked, releases[last], is_exact=False, note=_met_by_newest(asked, releases[last]))
    try:
        version = Version(asked)
    except ValueError:
        raise BadInput(f"{said_by} {asked!r} is not a version such as {releases[last]} or nightly") from None
    known = [Version(r) for r in releases]
    is_build = version.local == "" or re.fullmatch(_BUILD_TAG, version.local.lower()) is not None
    if version.is_dev or (not is_build and re.match(r"g[0-9a-f]{4,}", version.local)):
        return Engine(asked, releases[last], is_exact=False, note=_met_by_newest(asked, releases[last]))
    if version > known[last]:
        note = f"{asked} is newer than the newest known, {releases[last]}"
        return Engine(asked, releases[last], is_exact=False, note=note)
    index = max((i for i, k in enumerate(known) if k <= version), default=0)
    return _known_or_near(asked, version, known, index, is_build=is_build)


def _known_or_near(asked: str, version: Version, known: list[Version], index: int, *, is_build: bool) -> Engine:
    release = known[index].text
    note = None
    is_exact = known[index] == version and is_build and not version.pre and not version.is_post
    if version < known[0]:
        note = f"{asked} is older than the oldest known, {release}"
    elif known[index] != version:
        note = f"{asked} was not read; {release}, the release before it, stands for it"
    elif version.pre:
        note = f"{asked} is a pre-release; {release} stands for it"
    elif version.is_post:
        note = f"{asked} was not read; {release} stands for it, and post-releases seldom change a flag"
    elif not is_build:
        note = f"{asked} may be a fork; {release} stands for it, and what it lacks may exist there"
    elif version.local:
        note = f"{asked} is a build of {release}"
    return Engine(asked, release, is_exact=is_exact, note=note)


def _met_by_newest(asked: str, release: str) -> str:
    return f"{asked} is no release we could read; the newest known, {release}, stands for it"

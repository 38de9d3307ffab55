"""Which release's facts apply to a version that a user typed or a server reported."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.domain.version import Version
from plimsoll.engine import tables
from plimsoll.errors import BadInput

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
    return list(tables.wheels())[-1]


def engine_named(text: str | None, said_by: str = "--vllm") -> Engine:
    """The release whose facts apply; a version that was not read says so in its note. `said_by` names the culprit."""
    releases = list(tables.wheels())
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

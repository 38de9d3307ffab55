"""A vLLM version, as users, wheels and servers spell it."""

from __future__ import annotations

import functools
import re

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

"""Notes on flags that the wheels do not contain: the replacement, the effect on memory, the accepted numbers.

The data is in `data/flag_notes.json`. `rewrite` takes the flag's place in a command; `VALUES` in it means the values of the
old flag. A rewrite is used only where the target release has the new flag; without one the old flag is simply
left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from plimsoll.vllm.versions import is_before, is_within, table
from plimsoll.vllm.versions import rows as rows_of

VALUES = "*"


class Removal(NamedTuple):
    why: str
    instead: str | None = None
    rewrite: Sequence[str] = ()
    value_until: str = ""  # only the part of each value before this is kept
    only: Sequence[str] = ()  # if set, the only values that the new flag takes
    by_value: Mapping[str, Sequence[str]] = {}  # the replacement for each of these values; none for any other


class Implicit(NamedTuple):
    """A switch that is the default, from a release on."""

    since: str
    why: str


class Requirement(NamedTuple):
    """The flag without which another does nothing."""

    flag: str
    since: str | None = None  # the release whose source was read; None: it is so in every release that has both
    is_refused: bool = False  # without it vLLM does not even start


class AnnouncedRemoval(NamedTuple):
    release: str
    instead: str | None = None


class NumberRange(NamedTuple):
    """The numbers that vLLM's configuration accepts for a flag, after its parser has accepted the word."""

    least: float
    most: float = math.inf
    above: bool = False  # the least itself is refused
    below: bool = False  # the most itself is refused
    since: str | None = None  # the release whose source was read; None: it is so in every release
    unless: Sequence[str] = ()  # with these flags the number is unused: the server listens elsewhere, or not at all

    def problem(self, value: str) -> str | None:
        """Returns why the number is refused; None if it is not, or is no number."""
        try:
            number = float(value)
        except ValueError:
            return None
        low = number > self.least if self.above else number >= self.least
        high = number < self.most if self.below else number <= self.most
        if low and high:
            return None
        ends = [f"{'above' if self.above else 'at least'} {self.least:g}"]
        ends += [f"{'below' if self.below else 'at most'} {self.most:g}"] if self.most < math.inf else []
        return f"{value!r} is not {' and '.join(ends)}"


_Note = TypeVar("_Note", Removal, Implicit, Requirement, AnnouncedRemoval, NumberRange)


def _rows(name: str, kind: type[_Note]) -> Mapping[str, _Note]:
    return {flag: kind(**row) for flag, row in table("flag_notes")[name].items()}


# Flags that a release dropped.
GONE = _rows("gone", Removal)
GONE_VARIABLES = _rows("gone_variables", Removal)

# Flags that articles keep repeating and that no release ever had.
FOLKLORE: Mapping[str, str] = table("flag_notes")["folklore"]

# Bare switches whose effect is the default, where the parser's own does not show it: for chunked prefill None means on, and
# until 0.25.1 prefix caching was off for hybrid (Mamba) models, so the switch was not idle for them.
IMPLIED = _rows("implied", Implicit)

# Taken by the parser and used by nothing: 0.32.0 says so itself when the flag is given.
IDLE = _rows("idle", Implicit)

# Flags that act only beside another. LoRA's settings are passed on only where `enable_lora` is set
# (EngineArgs.create_engine_config).
NEEDS = _rows("needs", Requirement)

# The newest release's own deprecation warnings (engine/arg_utils.py, config/model.py).
ANNOUNCED = _rows("announced", AnnouncedRemoval)

# A flag's effect on memory: shown beside changed defaults and used by the planner's advice.
MEMORY: Mapping[str, str] = table("flag_notes")["memory"]

# The limits in vLLM's configuration classes; earlier releases had some of them and were not read for it.
RANGES = _rows("ranges", NumberRange)

# Options whose set of values is open: a plugin can register more names, whatever the release's own parser lists. And those
# that end in -config whose parser takes any JSON; for the others only an object will do.
OPEN_SETS, ANY_JSON = (frozenset(table("flag_notes")[name]) for name in ("open_sets", "any_json"))


@functools.cache
def own_values(flag: str, release: str) -> frozenset[str]:
    """Returns the names that a release itself registers for such an option; empty where they were not read."""
    rows = ((key.partition(" "), spans) for key, spans in rows_of("values").items())
    return frozenset(v for (name, _, v), spans in rows if name == flag and any(is_within(span, release) for span in spans))


_Dated = TypeVar("_Dated", Implicit, Requirement, NumberRange)


def in_force(table: Mapping[str, _Dated], flag: str, release: str) -> _Dated | None:
    """Returns the flag's note in one of these tables; None where there is none, or it begins with a later release."""
    note = table.get(flag)
    return None if note is None or (note.since is not None and is_before(release, note.since)) else note

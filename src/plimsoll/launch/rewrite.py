"""The same intent in words that a release takes; what could not be kept is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from plimsoll.launch.command_line import Argument, CommandLine, in_form_of, out_of_range
from plimsoll.units import shortened
from plimsoll.vllm import flag_notes
from plimsoll.vllm.flags import FlagRow, flags_of
from plimsoll.vllm.versions import Behaviour, Engine

# The words a verdict is made of.


class Status(StrEnum):
    """The status of one flag or variable in a release."""

    OK = "ok"
    DEFAULT_CHANGED = "default-changed"
    DEPRECATED = "deprecated"
    REMOVED = "removed"
    NEVER_EXISTED = "never-existed"
    NO_EFFECT = "no-effect"
    REDUNDANT = "redundant"
    UNKNOWN = "unknown"

    @property
    def is_problem(self) -> bool:
        """True if the command does not do what it says: it is refused, or a part of it is ignored."""
        return self.is_refused or self is Status.NO_EFFECT

    @property
    def is_refused(self) -> bool:
        """True if vLLM exits with an error because of it."""
        return self in (Status.REMOVED, Status.NEVER_EXISTED)


class Item(NamedTuple):
    """The verdict on one flag, variable or entry point."""

    name: str  # as typed, with its dashes
    status: Status
    since: str | None = None  # the release from which this status holds
    instead: str | None = None
    note: str | None = None
    values: tuple[str, ...] = ()


LEFT_OUT = "left out of the rewritten command"

Judged = tuple[Argument, Item]
Variable = tuple[str, str, Item | None]


class Rewritten(NamedTuple):
    """A command that the release takes."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


class _Words:
    """The words of the new command, flag by flag, so that one can be found again."""

    def __init__(self, known: Mapping[str, FlagRow]) -> None:
        self.known = known
        self.flags: list[list[str]] = []
        self.left_out: list[str] = []
        self.to_be_set: list[str] = []  # numbers that vLLM refuses: without them it would take its default, which nobody meant

    def has(self, flag: str) -> bool:
        return any(words[0] == flag for words in self.flags)

    def add_instead(self, gone: flag_notes.Removal | None, values: tuple[str, ...], old: str) -> None:
        """Put what replaces a flag in its place, unless the command has that already or the release lacks it."""
        if gone is None or not gone.rewrite:
            self.left_out.append(old)
            return
        values = tuple(value.split(gone.value_until)[0] for value in values) if gone.value_until else values
        if gone.only and any(value not in gone.only and "$" not in value for value in values):
            self.left_out.append(f"{old} ({gone.rewrite[0]} is not known to take {shortened(' '.join(values))})")
            return
        words = [w for word in gone.rewrite for w in (values if word == flag_notes.VALUES else (word,))]
        flag = words[0].split(".")[0]
        if flag not in self.known and "--" + flag.removeprefix("--no-") not in self.known:
            self.left_out.append(old)
        elif self.has(words[0]):
            self.left_out.append(f"{old} ({words[0]} is given)")
        elif words[0] != flag and self.has(flag):
            self._merge(flag, words, old)
        else:
            self.flags.append(words)

    def _merge(self, flag: str, words: list[str], old: str) -> None:
        """A dotted key beside JSON for the same flag: vLLM would forget the JSON, so the key goes into it."""
        target = next(w for w in self.flags if w[0] == flag)
        try:
            merged = json.loads(target[1])
            inner = merged
            *path, last = words[0].split(".")[1:]
            for key in path:
                inner = inner.setdefault(key, {})
            try:
                inner[last] = json.loads(words[1])
            except ValueError:
                inner[last] = words[1]
        except (ValueError, IndexError, TypeError, AttributeError):
            self.left_out.append(old)
            return
        target[1] = json.dumps(merged)


def rewrite(line: CommandLine, judged: list[Judged], variables: list[Variable], engine: Engine) -> Rewritten:
    """The command with refused flags replaced or left out, redundant ones gone, abbreviations spelled out."""
    verdicts = {id(argument): item for argument, item in judged}
    made = _Words(flags_of(engine.release))
    # Of each switch of the command itself, the last argument that says on or off in a way we can keep.
    switches = [(a.row.name, id(a)) for a in line.arguments if a.row is not None and a.row.kind == "on-off" and not a.source]
    last_switch = {name: key for name, key in switches if _is_kept(verdicts[key])}
    given = line.given
    in_file = {a.row.name for a in line.arguments if a.source and a.row is not None}
    replaced: list[Argument] = []
    for argument in line.arguments:
        if argument.source:
            continue  # it stands in the --config file
        if argument.is_opaque:
            made.flags.append([argument.typed])
            continue
        row, item = argument.row, verdicts[id(argument)]
        if row is not None and row.name == "--model" and argument.values:
            continue  # it is the first word
        if row is not None and row.name in last_switch and last_switch[row.name] != id(argument) and _is_kept(item):
            continue  # the last of several wins
        if row is None and item.status is Status.REMOVED:
            replaced.append(argument)
        elif item.status.is_refused or item.status is Status.NO_EFFECT:
            _mend(argument, item, made, engine.release, given)
        elif item.status is not Status.REDUNDANT or (row is not None and row.name in in_file):
            made.flags.append(spelled(argument))
    for argument in replaced:  # after the rest, so that what the command says itself is seen first
        made.add_instead(flag_notes.GONE.get(argument.spelling), argument.values, argument.typed)
    kept = []
    for name, value, verdict in variables:
        if verdict is not None and verdict.status is Status.NO_EFFECT:
            made.add_instead(flag_notes.GONE_VARIABLES.get(name), (value,), name)
        else:
            kept.append((name, value))
    head = ["vllm", "serve", line.model] if line.model else ["vllm", "serve"]
    if not Behaviour.SERVE_COMMAND.is_in(engine.release):
        head = ["python", "-m", "vllm.entrypoints.openai.api_server", *(["--model", line.model] if line.model else [])]
    said = ((LEFT_OUT, made.left_out), ("still in the rewritten command, and for you to set", made.to_be_set))
    notes = tuple(f"{what}: {', '.join(flags)}" for what, flags in said if flags)
    return Rewritten((*head, *(word for flag in made.flags for word in flag)), tuple(kept), notes)


def _is_kept(item: Item) -> bool:
    """True if the release takes it, or we know the words that say the same."""
    return not item.status.is_refused or item.instead is not None


def _mend(argument: Argument, item: Item, made: _Words, release: str, given: frozenset[str]) -> None:
    """A flag the release knows, given in a way it does not take."""
    row = argument.row
    if argument.spelling == "--config" and argument.has_equals:
        made.flags.append(["--config", *argument.values])  # as two words it has the effect that was meant
    elif row is None or not item.status.is_refused:
        # The value of a flag that nobody knows may be a secret behind a mistyped name.
        made.left_out.append(" ".join([argument.typed, *(argument.values if row is not None else ())]))
    elif item.instead is not None and not row.takes_value:
        made.flags.append([item.instead])
    elif item.instead is not None and (value := in_form_of(row, argument.values)) is not None:
        made.flags.append([row.name, value])
    elif any(out_of_range(row.name, value, release, given) for value in argument.values):
        made.flags.append(spelled(argument))
        made.to_be_set.append(" ".join(spelled(argument)))
    else:
        made.left_out.append(" ".join([argument.typed, *argument.values]))


def spelled(argument: Argument) -> list[str]:
    """The words of one argument, its name in full."""
    name = argument.spelling
    if argument.is_negated:
        name = "--no-" + name.removeprefix("--")
    if argument.path:
        name = f"{name}.{argument.path}"
    # A value that begins with a dash would be read as a flag, except where it was joined or follows a dotted key.
    if argument.has_equals and argument.values and argument.values[0].startswith("-"):
        return [f"{name}={argument.values[0]}"]
    return [name, *argument.values]

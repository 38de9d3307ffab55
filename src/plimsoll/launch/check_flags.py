"""Judges a command against a vLLM version: which flags it takes, which it refuses, which do nothing.

check(launch, engine)        one verdict a flag and variable, and the command rewritten so that the version takes it
check(..., came_from=older)  also what the upgrade changes for this very command
with_branches(checked)       also what the version refuses in other branches of the script
value_problem(argument, ...) why the parser refuses a flag's value, as far as a table can tell
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import (
    RUNTIME_ADDS,
    TEMPLATE_ADDS,
    TWICE,
    Argument,
    CommandLine,
    ConfigFile,
    EntryPoint,
    Launch,
    UnresolvedWords,
    arguments_from_config,
    read_command_line,
    version_in_image,
)
from plimsoll.units import parse_vllm_integer, parse_vllm_integer_or_auto, shortened
from plimsoll.vllm import flag_notes, flags, versions
from plimsoll.vllm.flags import UNKNOWN_DEFAULT, FlagRow, flags_of, history_of, release_after
from plimsoll.vllm.versions import Behaviour, Coverage, Engine, announced_between


class FlagStatus(StrEnum):
    OK = "ok"
    DEFAULT_CHANGED = "default-changed"
    DEPRECATED = "deprecated"
    REMOVED = "removed"
    NEVER_EXISTED = "never-existed"
    REFUSED = "refused"  # the parser takes it, and vLLM does not start with it as it is given
    NO_EFFECT = "no-effect"
    REDUNDANT = "redundant"
    UNKNOWN = "unknown"

    @property
    def is_problem(self) -> bool:
        """True if the command does not have its meant effect: it is refused, or a part of it is ignored."""
        return self.is_refused or self is FlagStatus.NO_EFFECT

    @property
    def is_refused(self) -> bool:
        """True if vLLM exits with an error because of it."""
        return self in (FlagStatus.REMOVED, FlagStatus.NEVER_EXISTED, FlagStatus.REFUSED)


@dataclass(frozen=True, slots=True)
class Item:
    name: str  # as typed, with its dashes
    status: FlagStatus
    since: str | None = None  # the release from which this status holds
    instead: str | None = None
    note: str | None = None
    values: tuple[str, ...] = ()


LEFT_OUT = "left out of the rewritten command"

Judged = tuple[Argument, Item]
Variable = tuple[str, str, Item | None]


class _Words:
    """The words of the new command, flag by flag, so that one can be found again."""

    def __init__(self, known: Mapping[str, FlagRow]) -> None:
        self.known = known
        self.flags: list[list[str]] = []
        self.left_out: list[str] = []
        self.corrected: list[str] = []
        self.to_be_set: list[str] = []  # numbers that vLLM refuses: left out, vLLM would silently take its default

    def has(self, flag: str) -> bool:
        return any(words[0] == flag for words in self.flags)

    def add_instead(self, gone: flag_notes.Removal | None, values: tuple[str, ...], old: str) -> None:
        """Puts a flag's replacement in its place, unless the command has it already or the release lacks it."""
        rewrite = () if gone is None else gone.by_value.get(" ".join(values), gone.rewrite)
        if gone is None or not rewrite:
            self.left_out.append(old)
            return
        values = tuple(value.split(gone.value_until)[0] for value in values) if gone.value_until else values
        if gone.only and any(value not in gone.only and "$" not in value for value in values):
            self.left_out.append(f"{old} ({rewrite[0]} is not known to take {shortened(' '.join(values))})")
            return
        words = [w for word in rewrite for w in (values if word == flag_notes.VALUES else (word,))]
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
        """Merges a dotted key into JSON for the same flag, since vLLM would drop the JSON."""
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


def rewrite(
    line: CommandLine, judged: list[Judged], variables: list[Variable], engine: Engine
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Returns a command that the release takes: words, variables, and notes on flags replaced, left out or spelled out."""
    verdicts = {id(argument): item for argument, item in judged}
    made = _Words(flags_of(engine.release))
    # The last argument of each switch of the command itself that can be kept.
    switches = [(a.row.name, id(a)) for a in line.arguments if a.row is not None and a.row.kind == "on-off" and not a.source]
    last_switch = {name: key for name, key in switches if _is_kept(verdicts[key])}
    given = line.given
    in_file = {a.row.name for a in line.arguments if a.source and a.row is not None}
    replaced: list[Argument] = []
    for argument in line.arguments:
        if argument.source:
            continue  # it is in the --config file
        if argument.is_opaque:
            made.flags.append([argument.typed])
            continue
        row, item = argument.row, verdicts[id(argument)]
        if row is not None and row.name == "--model" and argument.values:
            continue  # it is the first word
        if row is not None and row.name in last_switch and last_switch[row.name] != id(argument) and _is_kept(item):
            continue  # the last of several wins
        if row is None and item.status is FlagStatus.REMOVED:
            replaced.append(argument)
        elif item.status.is_refused or item.status is FlagStatus.NO_EFFECT:
            _mend(argument, item, made, engine.release, given)
        elif item.status is not FlagStatus.REDUNDANT or (row is not None and row.name in in_file):
            made.flags.append(spelled(argument))
    for argument in replaced:  # after the rest, so that the command's own flags come first
        made.add_instead(flag_notes.GONE.get(argument.spelling), argument.values, argument.typed)
    kept = []
    for name, value, verdict in variables:
        if verdict is not None and verdict.status is FlagStatus.NO_EFFECT:
            made.add_instead(flag_notes.GONE_VARIABLES.get(name), (value,), name)
        else:
            kept.append((name, value))
    head = ["vllm", "serve", line.model] if line.model else ["vllm", "serve"]
    if not Behaviour.SERVE_COMMAND.is_in(engine.release):
        head = ["python", "-m", "vllm.entrypoints.openai.api_server", *(["--model", line.model] if line.model else [])]
    changes = (
        ("corrected in the rewritten command", made.corrected),
        (LEFT_OUT, made.left_out),
        ("still in the rewritten command, and for you to set", made.to_be_set),
    )
    notes = tuple(f"{what}: {', '.join(flags)}" for what, flags in changes if flags)
    return (*head, *(word for flag in made.flags for word in flag)), tuple(kept), notes


def _is_kept(item: Item) -> bool:
    """True if the release takes it, or we know an equivalent."""
    return not item.status.is_refused or item.instead is not None


def _mend(argument: Argument, item: Item, made: _Words, release: str, given: frozenset[str]) -> None:
    """Writes a flag as the release takes it: another way to give it, or the name that was meant."""
    row = argument.row
    if argument.spelling == "--config" and argument.has_equals:
        made.flags.append(["--config", *argument.values])  # as two words it has the effect that was meant
    elif (name := corrected(argument, release)) is not None and not made.has(name) and name not in given:
        made.flags.append([name, *argument.values])
        made.corrected.append(f"{argument.typed} to {name}")
    elif row is None or not item.status.is_refused:
        # The value of an unknown flag may be a secret behind a mistyped name.
        made.left_out.append(" ".join([argument.typed, *(argument.values if row is not None else ())]))
    elif item.instead is not None and not row.takes_value:
        made.flags.append([item.instead])
    elif item.instead is not None and (value := in_form_of(row, argument.values)) is not None:
        made.flags.append([row.name, value])
    elif any(out_of_range(row, value, release, given) for value in argument.values):
        made.flags.append(spelled(argument))
        made.to_be_set.append(" ".join(spelled(argument)))
    else:
        made.left_out.append(" ".join([argument.typed, *argument.values]))


def spelled(argument: Argument) -> list[str]:
    """Returns the words of one argument, its name in full."""
    name = argument.spelling
    if argument.is_negated:
        name = "--no-" + name.removeprefix("--")
    if argument.path:
        name = f"{name}.{argument.path}"
    # A value that begins with a dash would be read as a flag, except where it was joined or follows a dotted key.
    if argument.has_equals and argument.values and argument.values[0].startswith("-"):
        return [f"{name}={argument.values[0]}"]
    return [name, *argument.values]


_KEYED_KINDS = ("json", "json-or-text", "other")
_NUMBERS = ("int", "float", "human-int", "human-int-or-auto")


class OtherFlags(NamedTuple):
    """The other flags of a flag's command."""

    given: frozenset[str]
    overruled: frozenset[int] = frozenset()  # arguments whose flag is given again later, by their id()
    is_whole: bool = True  # False: more flags may come from a variable or a file that was not seen


def item_for(
    argument: Argument, status: FlagStatus, since: str | None = None, instead: str | None = None, note: str | None = None
) -> Item:
    """Returns the verdict under the name the user typed, with the file it is in."""
    if argument.source:
        note = f"{note}; from {argument.source}" if note else f"from {argument.source}"
    return Item(argument.typed, status, since, instead, note, argument.values)


def judge(argument: Argument, engine: Engine, entry: EntryPoint, unseen: UnresolvedWords, beside: OtherFlags) -> Item:
    row, release = argument.row, engine.release
    if row is None:
        return _absent(argument, engine)
    item = partial(item_for, argument)
    never = partial(item, FlagStatus.NEVER_EXISTED)
    if argument.path:
        if not Behaviour.DOTTED_KEYS.is_in(release):
            since = Behaviour.DOTTED_KEYS.since
            return never(since, note=f"dotted keys came with {since}; pass JSON instead")
        if row.kind not in _KEYED_KINDS:
            return never(note=f"{row.name} takes no keys")
        return never(note="it needs a value") if argument.lacks_value else item(FlagStatus.OK, history_of(row.name)[0].first)
    if row.name == "--config":
        if argument.has_equals:
            note = "vLLM reads the file only when it is written as two words: --config FILE"
            return item(FlagStatus.NO_EFFECT, row.first, "--config FILE", note)
        if argument.values and not argument.values[0].endswith((".yaml", ".yml")) and "$" not in argument.values[0]:
            return never(note="vLLM reads only .yaml and .yml files")
    if row.name == "--model" and entry is EntryPoint.SERVE and argument.values and not argument.source:
        instead, since = "the model as the first word after `vllm serve`", Behaviour.MODEL_FLAG.since
        if not Behaviour.MODEL_FLAG.is_in(release):
            return never(since, instead, f"`vllm serve` of {engine} wants the model as its first word")
        return item(FlagStatus.DEPRECATED, since, instead)
    if argument.source and argument.is_negated:  # `enable-x: false` in a --config file
        if row.takes_value or row.default is False:
            return item(FlagStatus.REDUNDANT, note="it is the default")
        instead = f"--no-{row.name.removeprefix('--')} on the command line"
        return item(FlagStatus.NO_EFFECT, instead=instead, note="vLLM drops an entry that says false")
    if (problem := value_problem(argument, unseen)) is not None:
        return _bad_value(argument, row, problem)
    if id(argument) not in beside.overruled:  # values that the parser takes and with which vLLM does not start
        seen = (value for value in argument.values if value not in unseen)
        problem = next(filter(None, (out_of_range(row, value, release, beside.given) for value in seen)), None)
        if problem is not None:
            limits = flag_notes.RANGES.get(row.name)
            who = "no release takes" if limits and limits.since is None else f"{release} does not start with"
            return never(note=f"{who} this value: {problem}")
    return _taken(argument, row, engine, beside, unseen)


def _taken(argument: Argument, row: FlagRow, engine: Engine, beside: OtherFlags, unseen: UnresolvedWords) -> Item:
    """Returns the verdict on a flag that the release takes: whether it has an effect."""
    item, release = partial(item_for, argument), engine.release
    announced = flag_notes.ANNOUNCED.get(row.name)
    if (idle := flag_notes.in_force(flag_notes.IDLE, row.name, release)) is not None:
        ahead = f"; {announced.release} removes it, as announced" if announced else ""
        return item(FlagStatus.NO_EFFECT, idle.since, note=f"{idle.why}{ahead}")
    if row.is_deprecated:
        stretch = [r for r in history_of(row.name) if r.is_deprecated]
        note = f"{announced.release} removes it, as announced" if announced else "vLLM means to remove it"
        return item(FlagStatus.DEPRECATED, stretch[0].first, announced.instead if announced else None, note)
    # A switch that sets the default. Values that equal the default are kept: they pin it.
    if not row.takes_value and not argument.values:
        wanted = not argument.is_negated
        implied = flag_notes.in_force(flag_notes.IMPLIED, row.name, release)
        if implied is not None and wanted:
            return item(FlagStatus.REDUNDANT, implied.since, note=implied.why)
        if row.kind == "on-off" and row.default is wanted:
            same = [r for r in history_of(row.name) if r.default is wanted]
            return item(FlagStatus.REDUNDANT, same[0].first if same else None, note="it is the default")
    # A flag that needs another, which the command does not give.
    first = history_of(row.name)[0].first
    needs = flag_notes.in_force(flag_notes.NEEDS, row.name, release)
    if needs is not None and beside.is_whole and needs.flag not in beside.given and not argument.is_negated:
        if needs.is_refused and id(argument) not in beside.overruled:
            return item(FlagStatus.REFUSED, note=f"vLLM does not start with it unless {needs.flag} is given")
        since = first if needs.since is None else None  # earlier releases were not read: it may be older
        instead = f"{needs.flag} beside it, if it was meant to act"
        return item(FlagStatus.NO_EFFECT, since, instead, f"vLLM looks at it only where {needs.flag} is given")
    # A name that is not in vLLM's own list, where a plugin or the model can still make something of it.
    is_open = row.name in flag_notes.OPEN_SETS
    names = (flag_notes.own_values(row.name, release) or row.choices or ()) if is_open else ()
    value = argument.values[0] if argument.values else ""
    if names and engine.is_exact and value not in ("", "None", *names) and value not in unseen:
        others = [release for release in versions.releases() if value in flag_notes.own_values(row.name, release)]
        near = difflib.get_close_matches(value, sorted(names), n=1, cutoff=0.8)
        alternative = f"{row.name} {near[0]}, if that was meant" if near else None
        found = f" ({others[0]} to {others[-1]} have it)" if others else ""
        unless = " or the model's files overrule it" if row.name == "--quantization" else ""
        note = f"not a name of {engine}'s own{found}: it refuses to start, unless a plugin brings the name{unless}"
        return item(FlagStatus.UNKNOWN, None, alternative, note)
    return item(FlagStatus.OK, first)


def _absent(argument: Argument, engine: Engine) -> Item:
    """Returns the verdict on a flag that the release lacks: removed, later, or never existed."""
    never = partial(item_for, argument, FlagStatus.NEVER_EXISTED)
    spelling, short_for = argument.spelling, ""
    if spelling in ("-h", "--help"):
        return item_for(argument, FlagStatus.OK, note="vLLM prints its help and starts nothing")
    if not argument.candidates and not history_of(spelling) and spelling.startswith("--") and len(spelling) > 4:
        begun = [name for name in versions.rows("flags") if name.startswith(spelling)]
        if len(begun) == 1:  # the prefix of an earlier release's flag
            spelling, short_for = begun[0], f"short for {begun[0]}: "
    past = history_of(spelling)
    positive = "--" + spelling.removeprefix("--no-")
    if not past and spelling.startswith("--no-") and history_of(positive):
        past = tuple(row for row in history_of(positive) if row.kind == "on-off")
        if not past:
            return never(note=f"{positive} has no --no- form")
    if not past and argument.candidates:
        shown = ", ".join(argument.candidates[:4]) + (", ..." if len(argument.candidates) > 4 else "")
        return never(note=f"several flags begin like this ({shown}); vLLM refuses it")
    if not past:
        if (folklore := flag_notes.FOLKLORE.get(spelling)) is not None:
            return never(instead=folklore, note="in no release of vLLM")
        if not engine.is_exact:
            note = f"not in {engine}, the release that stands for {engine.asked}"
            return item_for(argument, FlagStatus.UNKNOWN, note=note)
        near = difflib.get_close_matches(spelling, _long_names(engine.release), n=1, cutoff=0.8)
        instead = f"{near[0]}, if that was meant" if near else None
        return never(instead=instead, note="in no release of vLLM; a plugin could add it")
    if past[0].begins_after(engine.release):
        return never(past[0].first, note=f"came with {past[0].first}; {engine} refuses it")
    last = [row for row in past if not row.begins_after(engine.release)][-1]
    gone = flag_notes.GONE.get(spelling) or flag_notes.GONE.get(positive)
    note = f"{short_for}{gone.why if gone else 'vLLM refuses to start'}"
    return item_for(argument, FlagStatus.REMOVED, release_after(last.last), gone.instead if gone else None, note)


def _long_names(release: str) -> dict[str, FlagRow]:
    """Returns every long option string of a release, `--no-` forms included."""
    names = {name: row for name, row in flags_of(release).items() if name.startswith("--")}
    return names | {f"--no-{name[2:]}": row for name, row in names.items() if row.kind == "on-off"}


def corrected(argument: Argument, release: str) -> str | None:
    """Returns the flag that a misspelt one means; None if several are as near, or it does not take the values."""
    spelling = argument.spelling
    if argument.row is not None or argument.candidates or argument.path or history_of(spelling):
        return None
    names = _long_names(release)
    near = difflib.get_close_matches(spelling, names, n=3, cutoff=0.85)
    if not near or not spelling.startswith("--") or spelling in flag_notes.FOLKLORE:
        return None
    row = names[near[0]]
    likeness = [difflib.SequenceMatcher(None, spelling, name).ratio() for name in near]
    if any(ratio > likeness[0] - 0.04 and names[name] is not row for name, ratio in zip(near, likeness, strict=True)):
        return None
    takes_values = row.takes_value and not near[0].startswith("--no-")
    fits = bool(argument.values) == takes_values and not any(row_problem(row, value) for value in argument.values)
    return near[0] if fits else None


def _bad_value(argument: Argument, row: FlagRow, problem: str) -> Item:
    """Returns the verdict on a value that the release refuses and other releases may take."""
    values = argument.values

    def surely_takes(other: FlagRow) -> bool:  # a flag of any text says nothing about one of them
        if other.kind in ("true-false", "bool"):
            return values[0].lower() in ("true", "false")
        if other.kind == "key-value":
            return all(key_values(value) is not None for value in values)
        is_judged = other.choices is not None or other.kind in _NUMBERS
        return other.takes_value and is_judged and not any(row_problem(other, value) for value in values)

    others = [r for r in history_of(row.name) if r is not row and values and surely_takes(r)]
    earlier = [r for r in others if r.ends_before(row)]
    later = [r for r in others if row.ends_before(r)]
    instead = None
    said = values[0].lower() if values and not row.takes_value else ""
    if said == "true":
        instead = row.name
    elif said == "false" and row.kind == "on-off":
        instead = "--no-" + row.name.removeprefix("--")
    elif (earlier or later) and (value := in_form_of(row, values)) is not None:
        instead = f"{row.name} '{value}'" if row.kind == "json" else f"{row.name} {value}"
    elif (earlier or later) and row.name == "--max-model-len" and values[0].strip().lower() == "auto":
        instead = "a number of tokens; without the flag it is the model's own length"
    item = partial(item_for, argument)
    if earlier:
        since = release_after(earlier[-1].last)
        return item(FlagStatus.REMOVED, since, instead, f"the value is no longer taken: {problem}")
    if later:
        note = f"the value came with {later[0].first}: {problem}"
        return item(FlagStatus.NEVER_EXISTED, later[0].first, instead, note)
    return item(FlagStatus.NEVER_EXISTED, instead=instead, note=f"no release takes this value: {problem}")


_DASHES = ("\N{EM DASH}", "\N{EN DASH}", "\N{MINUS SIGN}", "\N{NON-BREAKING HYPHEN}")


@dataclass(frozen=True, slots=True)
class FlagReport:
    launch: Launch
    engine: Engine
    model: str | None
    items: tuple[Item, ...]
    rewritten: tuple[str, ...]  # the words of a command that the version takes
    rewritten_environment: tuple[tuple[str, str], ...]
    line: CommandLine  # the flags that take effect: the rewritten command's and its --config file's
    unseen: UnresolvedWords
    notes: tuple[str, ...] = ()
    came_from: Engine | None = None
    changes: tuple[Behaviour, ...] = ()  # other changes of the upgrade
    config: ConfigFile | None = None  # the file that the command reads more flags from

    @property
    def starts(self) -> bool:
        """True if the version's parser takes the command, as far as we know its flags."""
        return not any(item.status.is_refused for item in self.items)


def check(launch: Launch, engine: Engine, came_from: Engine | None = None, config: ConfigFile | None = None) -> FlagReport:
    """Judges every flag and variable of a launch against one version."""
    unseen = UnresolvedWords(launch.unresolved)
    takes_model = launch.entry is not EntryPoint.API_SERVER
    line = read_command_line(launch.arguments, engine.release, takes_model=takes_model, unseen=unseen)
    line = with_config(line, config, engine)
    # The parser reads and drops arguments whose flag comes again; other flags may come from text that was not seen.
    last = {a.row.name: id(a) for a in line.arguments if a.row is not None and not a.path}
    overruled = frozenset(id(a) for a in line.arguments if a.row is not None and last.get(a.row.name) != id(a))
    is_opaque = any(a.is_opaque for a in line.arguments) or unseen.is_whole(line.model or "")
    is_file_missing = config is not None and config.entries is None
    is_added_to = not {RUNTIME_ADDS, TEMPLATE_ADDS}.isdisjoint(launch.notes)
    beside = OtherFlags(line.given, overruled, not (is_file_missing or is_opaque or launch.otherwise or is_added_to))
    judged = [(a, judge(a, engine, launch.entry, unseen, beside)) for a in line.arguments if not a.is_opaque]
    variables = [(name, value, _judge_variable(name, value, engine)) for name, value in dict(launch.environment).items()]
    items = [item for _, item in judged]
    files = [a for a in line.arguments if a.row is not None and a.row.name == "--config" and not a.source]
    items += [Item(a.typed, FlagStatus.NEVER_EXISTED, note="vLLM takes one --config", values=a.values) for a in files[1:]]
    items += [item for _, _, item in variables if item is not None]
    items += [_stray(word) for word in line.leftovers]
    if TWICE in launch.notes:
        items.append(Item("vllm serve", FlagStatus.NEVER_EXISTED, instead="the arguments alone", note=TWICE))
    if launch.entry is EntryPoint.API_SERVER and Behaviour.API_SERVER_DEPRECATED.is_in(engine.release):
        items.append(Item(launch.entry.value, FlagStatus.DEPRECATED, Behaviour.API_SERVER_DEPRECATED.since, "vllm serve"))
    if came_from is not None:
        items += _changed_defaults(line, launch, came_from, engine)
    words, environment, changes_made = rewrite(line, judged, variables, engine)
    notes = [*(note for note in launch.notes if note != TWICE), *_notes(launch, engine, came_from, line, config), *changes_made]
    to_edit: dict[str, list[str]] = {}  # the command cannot be rewritten around entries of a --config file
    for argument, item in judged:
        if argument.source and item.status.is_problem:
            to_edit.setdefault(argument.source, []).append(argument.typed.lstrip("-"))
    notes += [
        f"edit {file}: {', '.join(names)}; the rewritten command still reads that file" for file, names in to_edit.items()
    ]
    changes = announced_between(came_from.release, engine.release) if came_from is not None else ()
    taken = line
    if any(item.status.is_problem or item.status is FlagStatus.REDUNDANT for item in items):  # mended, or left out
        taken = with_config(read_command_line(words[2:], engine.release, unseen=unseen), config, engine)
    return FlagReport(
        launch, engine, line.model, tuple(items), words, environment, taken, unseen, tuple(notes), came_from, changes, config
    )


def with_branches(checked: FlagReport) -> FlagReport:
    """Adds the flags that the version refuses in the branches of the script that were not taken."""
    seen = {(item.name, item.values) for item in checked.items}
    items = list(checked.items)
    for other in checked.launch.otherwise:
        for item in check(other, checked.engine, config=checked.config).items:
            if item.status.is_refused and (item.name, item.values) not in seen:
                seen.add((item.name, item.values))
                where = "in another branch of the script"
                items.append(replace(item, note=f"{item.note}; {where}" if item.note else where))
    return replace(checked, items=tuple(items))


def with_config(line: CommandLine, config: ConfigFile | None, engine: Engine) -> CommandLine:
    """Returns the line with the file's flags in front, as vLLM inserts them; the command line wins."""
    if config is None or not config.entries:
        return line
    inner = arguments_from_config(config.entries, engine.release, config.name)
    return replace(
        line,
        model=line.model or inner.model,
        arguments=(*inner.arguments, *line.arguments),
        leftovers=(*line.leftovers, *inner.leftovers),
    )


def _stray(word: str) -> Item:
    if word.startswith(_DASHES):
        return Item(word, FlagStatus.NEVER_EXISTED, note="it begins with a long dash, as word processors make them: write --")
    if not word.strip() or "\N{NO-BREAK SPACE}" in word:
        return Item(
            repr(word), FlagStatus.NEVER_EXISTED, note="a blank that is part of a word: a backslash followed by a space?"
        )
    return Item(word, FlagStatus.NEVER_EXISTED, note="belongs to no flag; vLLM refuses it")


def _judge_variable(name: str, value: str, engine: Engine) -> Item | None:
    if not flags.matters(name):
        return None
    if not name.startswith("VLLM_"):
        return Item(name, FlagStatus.OK, note="not vLLM's own; handed through", values=(value,))
    past = versions.spans_of("environment", name)
    if not past:
        return Item(name, FlagStatus.UNKNOWN, note="no release of vLLM reads it; a plugin may", values=(value,))
    first = past[0].first
    if flags.is_read_in(name, engine.release):
        return Item(name, FlagStatus.OK, first, values=(value,))
    if past[0].begins_after(engine.release):
        return Item(name, FlagStatus.NO_EFFECT, first, note=f"came with {first}; {engine} ignores it", values=(value,))
    gone = flag_notes.GONE_VARIABLES.get(name)
    note = gone.why if gone else "the variable is no longer read"
    return Item(name, FlagStatus.NO_EFFECT, release_after(past[-1].last), gone.instead if gone else None, note, (value,))


def _changed_defaults(line: CommandLine, launch: Launch, old: Engine, new: Engine) -> list[Item]:
    """Returns flags and variables that the command does not set and whose default the upgrade changes, memory first."""
    given = {a.row.name for a in line.arguments if a.row is not None} | {"--model"}
    before, after = flags_of(old.release), flags_of(new.release)
    items = []
    for name, row in after.items():
        past = before.get(name)
        if name != row.name or past is None or name in given or UNKNOWN_DEFAULT in (row.default, past.default):
            continue
        if row.default == past.default or (_is_empty(row.default) and _is_empty(past.default)):
            continue
        note = f"not in the command: {_shown(past.default)} in {old}, {_shown(row.default)} in {new}"
        if name in flag_notes.MEMORY:
            note += f"; {flag_notes.MEMORY[name]}"
        same = [r for r in history_of(name) if not r.ends_before(past) and r.default == row.default]
        items.append(Item(name, FlagStatus.DEFAULT_CHANGED, same[0].first if same else None, note=note))
    items.sort(key=lambda item: (item.name not in flag_notes.MEMORY, item.name))
    set_here = dict(launch.environment)
    for name in versions.rows("environment"):
        then, now = flags.default_in(name, old.release), flags.default_in(name, new.release)
        if name.startswith("VLLM_") and name not in set_here and None not in (then, now) and then != now:
            note = f"not set: {_shown(then)} in {old}, {_shown(now)} in {new}"
            items.append(Item(name, FlagStatus.DEFAULT_CHANGED, note=note))
    return items


def _is_empty(default: object) -> bool:
    """True for None and an empty text, list or object, which a parser may write for each other. False is another value."""
    return default is None or default in ("", [], {})


def _shown(default: object) -> str:
    return "unset (vLLM decides)" if default is None else "an empty object" if default == {} else repr(default)


def _notes(launch: Launch, engine: Engine, came_from: Engine | None, line: CommandLine, config: ConfigFile | None) -> list[str]:
    notes = [e.note for e in (engine, came_from) if e is not None and e.note is not None]
    if launch.unresolved:
        shown = ", ".join(UnresolvedWords([name]).markers[0] for name in launch.unresolved if name)
        notes.append(f"set elsewhere and not seen: {shown}")
    tag = version_in_image(launch.image) if launch.image else None
    if tag is not None and tag not in (engine.release, engine.asked.removeprefix("v")):
        notes.append(f"the image says {tag}; --vllm {tag} checks against that")
    if config is not None and config.entries is None:
        notes.append(f"{config.name} (--config) is not at hand; the flags in it were not checked")
    elif line.model is None and config is None:
        notes.append("no model is named")
    return notes


# Values that vLLM's optional types read as "not set".
_NOTHING = ("", "None")
# Numbers such as 80m may be bare in JSON: vLLM expands them before it parses the JSON.
_HUMAN_NUMBER = r"\b\d+(?:\.\d+)?[kKmMgGtT]\b"


def value_problem(argument: Argument, unseen: UnresolvedWords) -> str | None:
    """Returns why the parser refuses the value; None if it takes it or we cannot tell."""
    row = argument.row
    assert row is not None
    if argument.lacks_value:
        return "it needs a value"
    if not row.takes_value:
        return f"it takes no value, not {argument.values[0]!r}" if argument.values else None
    for value in argument.values:
        problem = None if value in unseen or unseen.fills(value) else row_problem(row, value)
        if problem is not None:
            return problem
    return None


def row_problem(row: FlagRow, value: str) -> str | None:
    """Returns why this flag does not take that value; None if it does, or we cannot tell."""
    if row.choices is not None and row.name not in flag_notes.OPEN_SETS and value not in row.choices:
        try:
            is_choice = str(int(value)) in row.choices  # a number may be spelled another way: `016` is 16
        except ValueError:
            is_choice = value in _NOTHING and (row.is_optional or "None" in row.choices)
        if not is_choice:
            return f"{value!r} is none of {', '.join(row.choices)}"
    if value in _NOTHING and row.is_optional:
        return None
    return _wrong_kind(row.kind, value)


def out_of_range(row: FlagRow, value: str, release: str, given: frozenset[str]) -> str | None:
    """Returns why vLLM refuses a value of the right kind; None if it does not, or its source was not read for that."""
    if row.kind == "json" and row.name.endswith("-config") and row.name not in flag_notes.ANY_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            is_read = not Coverage.CONFIG_CHECKS.begins_after(release)
            return f"{value[:60]!r} is no JSON object" if is_read and not isinstance(json.loads(value), dict) else None
    limits = flag_notes.in_force(flag_notes.RANGES, row.name, release)
    return None if limits is None or not given.isdisjoint(limits.unless) else limits.problem(value)


def in_form_of(row: FlagRow, values: tuple[str, ...]) -> str | None:
    """Converts a value from the form of other releases to this flag's: 32k to 32000, image=4 to JSON; None if it cannot."""
    if len(values) != 1:
        return None
    if row.kind == "json":
        pairs = key_values(values[0])
        return json.dumps(pairs) if pairs is not None else None
    try:
        return str(parse_vllm_integer(values[0])) if row.kind == "int" else None
    except BadInput:
        return None


def key_values(value: str) -> dict[str, int] | None:
    """Reads `image=4,video=1`, as --limit-mm-per-prompt took it before JSON; None if it is something else."""
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,18})\s*", item) for item in value.split(",")]
    return {pair[1].lower(): int(pair[2]) for pair in pairs if pair is not None} if all(pairs) else None


def _wrong_kind(kind: str, value: str) -> str | None:
    try:
        match kind:
            case "int":
                int(value)
            case "float":
                float(value)
            case "human-int":
                parse_vllm_integer(value)
            case "human-int-or-auto":
                parse_vllm_integer_or_auto(value)
            case "json":
                for text in (value, re.sub(_HUMAN_NUMBER, "0", value)):
                    with contextlib.suppress(ValueError, RecursionError):
                        json.loads(text)
                        return None
                return f"{value[:60]!r} is not JSON"
    except ValueError:
        return f"{value!r} is not a {'whole number' if kind == 'int' else 'number'}"
    except BadInput as error:
        return str(error)
    return None

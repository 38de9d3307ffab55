"""What a vLLM version makes of a command: which flags it takes, which it refuses, which do nothing.

check(launch, engine)        one verdict a flag and variable, and the command rewritten so that the version takes it
check(..., came_from=older)  also what the upgrade changes for this very command
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from plimsoll.domain.launch import EntryPoint, Launch
from plimsoll.engine import environment, flag_notes
from plimsoll.engine.behaviours import Behaviour, changes_between
from plimsoll.engine.command_line import Argument, CommandLine, arguments_from_config, read_command_line
from plimsoll.engine.flags import UNKNOWN_DEFAULT, FlagRow, flags_of, history_of, is_before, release_after
from plimsoll.engine.values import value_problem
from plimsoll.engine.versions import Engine

# The release that began to print a DeprecationWarning for `python -m vllm.entrypoints.openai.api_server`.
ENTRY_POINT_DEPRECATED = "0.29.0"
# The release that began to ask for the model as the first word after `vllm serve`.
MODEL_FLAG_DEPRECATED = "0.8.3"
# The first release whose parser joined `--config.key value` into JSON.
DOTTED_SINCE = "0.9.0"


class Status(StrEnum):
    """What becomes of one flag or variable."""

    OK = "ok"
    DEFAULT_CHANGED = "default-changed"
    DEPRECATED = "deprecated"
    REMOVED = "removed"
    NEVER_EXISTED = "never-existed"
    BAD_VALUE = "bad-value"
    NO_EFFECT = "no-effect"
    REDUNDANT = "redundant"
    UNKNOWN = "unknown"

    @property
    def is_problem(self) -> bool:
        """Whether the command does not do what it says: it is refused, or a part of it is ignored."""
        return self in (Status.REMOVED, Status.NEVER_EXISTED, Status.BAD_VALUE, Status.NO_EFFECT)

    @property
    def is_refused(self) -> bool:
        """Whether vLLM exits with an error because of it."""
        return self in (Status.REMOVED, Status.NEVER_EXISTED, Status.BAD_VALUE)


class ConfigFile(NamedTuple):
    """The file named by `--config`, and its entries; None if it is not at hand."""

    name: str
    entries: Mapping[str, object] | None


class Item(NamedTuple):
    """The verdict on one flag, variable or entry point."""

    name: str  # as typed, with its dashes
    status: Status
    since: str | None = None  # the release from which this status holds
    instead: str | None = None
    note: str | None = None
    values: tuple[str, ...] = ()


class Checked(NamedTuple):
    """Everything one version says about one launch."""

    launch: Launch
    engine: Engine
    model: str | None
    items: tuple[Item, ...]
    rewritten: tuple[str, ...]  # the words of a command that the version takes
    rewritten_environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    came_from: Engine | None = None
    changes: tuple[Behaviour, ...] = ()  # what else the upgrade changes

    @property
    def starts(self) -> bool:
        """Whether the version's parser takes the command, as far as we know its flags."""
        return not any(item.status.is_refused for item in self.items)


def check(launch: Launch, engine: Engine, came_from: Engine | None = None, config: ConfigFile | None = None) -> Checked:
    """Judge every flag and variable of a launch against one version."""
    line = read_command_line(launch.arguments, engine.release, takes_model=launch.entry is not EntryPoint.API_SERVER)
    line = _with_config(line, config, engine)
    judged = [(argument, _judge(argument, engine, launch.entry)) for argument in line.arguments]
    variables = [(name, value, _judge_variable(name, value, engine)) for name, value in dict(launch.environment).items()]
    items = [item for _, item in judged]
    items += [item for _, _, item in variables if item is not None]
    items += [
        Item(word, Status.NEVER_EXISTED, note="belongs to no flag; vLLM refuses it") for word in line.leftovers
        if not word.startswith("$")
    ]  # fmt: skip
    items += _entry_point(launch, engine)
    if came_from is not None:
        items += _changed_defaults(line, came_from, engine)
    words, kept = _rewrite(line, judged, variables, engine)
    notes = (*launch.notes, *_notes(launch, engine, came_from, line, config))
    changes = changes_between(came_from.release, engine.release) if came_from is not None else ()
    return Checked(launch, engine, line.model, tuple(items), words, kept, notes, came_from, changes)


def _with_config(line: CommandLine, config: ConfigFile | None, engine: Engine) -> CommandLine:
    """The line with the file's flags in front, as vLLM inserts them; the command line wins."""
    if config is None or not config.entries:
        return line
    inner = read_command_line(arguments_from_config(config.entries, engine.release), engine.release)
    arguments = [a._replace(source=config.name) for a in inner.arguments]
    return line._replace(model=line.model or inner.model, arguments=(*arguments, *line.arguments))


def _judge(argument: Argument, engine: Engine, entry: EntryPoint) -> Item:
    row = argument.row
    if row is None:
        return _absent(argument, engine)
    if argument.path and is_before(engine.release, DOTTED_SINCE):
        return _item(
            argument,
            Status.NEVER_EXISTED,
            DOTTED_SINCE,
            note=f"dotted keys came with {DOTTED_SINCE}; pass JSON instead",
        )
    if argument.typed == "--config" and argument.has_equals:
        note = "vLLM reads the file only when it is written as two words: --config FILE"
        return _item(argument, Status.NO_EFFECT, instead="--config FILE", note=note)
    problem = None if argument.path else value_problem(argument)
    if problem is not None:
        return _bad_value(argument, row, problem)
    first = history_of(row.name)[0].first
    if row.is_deprecated:
        stretch = [r for r in history_of(row.name) if r.is_deprecated]
        return _item(argument, Status.DEPRECATED, stretch[0].first, note="vLLM means to remove it")
    if row.name == "--model" and entry is EntryPoint.SERVE and not is_before(engine.release, MODEL_FLAG_DEPRECATED):
        return _item(argument, Status.DEPRECATED, MODEL_FLAG_DEPRECATED, "the model as the first word after `vllm serve`")
    implied = _implied(argument, row, engine)
    return implied if implied is not None else _item(argument, Status.OK, first)


def _item(
    argument: Argument, status: Status, since: str | None = None, instead: str | None = None, note: str | None = None
) -> Item:
    name = argument.typed
    if argument.source:
        note = f"{note}; from {argument.source}" if note else f"from {argument.source}"
    return Item(name, status, since, instead, note, argument.values)


def _absent(argument: Argument, engine: Engine) -> Item:
    """The release has no such flag: was it removed, does it come later, or did it never exist?"""
    past = history_of(argument.spelling) or history_of("--" + argument.spelling.removeprefix("--no-"))
    if argument.candidates and not past:
        shown = ", ".join(argument.candidates[:4]) + (", ..." if len(argument.candidates) > 4 else "")
        return _item(argument, Status.NEVER_EXISTED, note=f"several flags begin like this ({shown}); vLLM refuses it")
    if not past:
        return _unheard_of(argument, engine)
    if is_before(engine.release, past[0].first):
        return _item(argument, Status.NEVER_EXISTED, past[0].first, note=f"came with {past[0].first}; {engine} refuses it")
    last = [row for row in past if not is_before(engine.release, row.first)][-1]
    gone_in = release_after(last.last)
    if argument.spelling.startswith("--no-") and not history_of(argument.spelling):
        return _item(argument, Status.NEVER_EXISTED, note=f"{last.name} has no --no- form")
    gone = flag_notes.GONE.get(argument.spelling)
    return _item(
        argument, Status.REMOVED, gone_in, gone.instead if gone else None, gone.why if gone else "vLLM refuses to start"
    )


def _unheard_of(argument: Argument, engine: Engine) -> Item:
    folklore = flag_notes.FOLKLORE.get(argument.spelling)
    if folklore is not None:
        return _item(argument, Status.NEVER_EXISTED, instead=folklore, note="in no release of vLLM")
    if not engine.is_exact:
        return _item(argument, Status.UNKNOWN, note=f"not in {engine}, the release that stands for {engine.asked}")
    near = _nearest(argument.spelling, flags_of(engine.release))
    return _item(argument, Status.NEVER_EXISTED, instead=near, note="in no release of vLLM; a plugin could add it")


def _nearest(spelling: str, known: Iterable[str]) -> str | None:
    import difflib  # only for a mistyped flag

    found = difflib.get_close_matches(spelling, [k for k in known if k.startswith("--")], n=1, cutoff=0.8)
    return f"{found[0]}, if that was meant" if found else None


def _bad_value(argument: Argument, row: FlagRow, problem: str) -> Item:
    """A value the release refuses: it may have been taken once."""
    earlier = [r for r in history_of(row.name) if is_before(r.last, row.first)]
    once = [r for r in earlier if r.choices and argument.values and argument.values[-1] in r.choices]
    if once and row.choices:
        return _item(argument, Status.REMOVED, release_after(once[-1].last), note=f"the value is no longer taken: {problem}")
    return _item(argument, Status.BAD_VALUE, note=problem)


def _implied(argument: Argument, row: FlagRow, engine: Engine) -> Item | None:
    """A switch that says what is so anyway. Values that equal the default are kept: they pin what matters."""
    if row.takes_value or argument.values:
        return None
    wanted = not argument.is_negated
    implied = flag_notes.IMPLIED.get(row.name)
    if implied is not None and wanted and not is_before(engine.release, implied.since):
        return _item(argument, Status.REDUNDANT, implied.since, note=implied.why)
    if row.kind == "on-off" and row.default is wanted:
        same = [r for r in history_of(row.name) if r.default is wanted]
        return _item(argument, Status.REDUNDANT, same[0].first if same else None, note="it is the default")
    return None


def _judge_variable(name: str, value: str, engine: Engine) -> Item | None:
    if not environment.matters(name):
        return None
    if not name.startswith("VLLM_"):
        return Item(name, Status.OK, note="not vLLM's own; handed through", values=(value,))
    past = environment.variable_history(name)
    if past is None:
        return Item(name, Status.UNKNOWN, note="no release of vLLM reads it; a plugin may", values=(value,))
    if environment.is_read_in(name, engine.release):
        return Item(name, Status.OK, past.first, values=(value,))
    if is_before(engine.release, past.first):
        return Item(name, Status.NO_EFFECT, past.first, note=f"came with {past.first}; {engine} ignores it", values=(value,))
    gone = flag_notes.GONE_VARIABLES.get(name)
    note = gone.why if gone else "the variable is no longer read"
    return Item(name, Status.NO_EFFECT, past.gone_in(), gone.instead if gone else None, note, (value,))


def _entry_point(launch: Launch, engine: Engine) -> list[Item]:
    if launch.entry is not EntryPoint.API_SERVER or is_before(engine.release, ENTRY_POINT_DEPRECATED):
        return []
    return [Item(launch.entry.value, Status.DEPRECATED, ENTRY_POINT_DEPRECATED, "vllm serve")]


def _changed_defaults(line: CommandLine, old: Engine, new: Engine) -> list[Item]:
    """Flags the command leaves alone whose default is another one after the upgrade, memory first."""
    given = {a.row.name for a in line.arguments if a.row is not None}
    before, after = flags_of(old.release), flags_of(new.release)
    items = []
    for name, row in after.items():
        past = before.get(name)
        if name != row.name or past is None or name in given or UNKNOWN_DEFAULT in (row.default, past.default):
            continue
        if row.default == past.default:
            continue
        note = f"not in the command: {_shown(past.default)} in {old}, {_shown(row.default)} in {new}"
        if name in flag_notes.MEMORY:
            note += f"; {flag_notes.MEMORY[name]}"
        same = [r for r in history_of(name) if not is_before(r.first, past.first) and r.default == row.default]
        items.append(Item(name, Status.DEFAULT_CHANGED, same[0].first if same else None, note=note))
    return sorted(items, key=lambda item: (item.name not in flag_notes.MEMORY, item.name))


def _shown(default: object) -> str:
    return "unset" if default is None else "an empty object" if default == {} else repr(default)


def _rewrite(
    line: CommandLine,
    judged: list[tuple[Argument, Item]],
    variables: list[tuple[str, str, Item | None]],
    engine: Engine,
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The same intent in words the release takes."""
    known = flags_of(engine.release)
    model = line.model
    words: list[str] = []
    added: list[str] = []
    for argument, item in judged:
        if argument.source:
            continue  # it stands in the --config file
        if argument.spelling == "--config" and argument.has_equals:
            words += ["--config", *argument.values]  # as two words it has the effect that was meant
        elif argument.row is not None and argument.row.name == "--model" and not item.status.is_refused:
            model = argument.values[0] if argument.values else model
        elif item.status is Status.REMOVED and argument.row is None:
            added += _replacement(flag_notes.GONE.get(argument.spelling), argument.values, known)
        elif not item.status.is_refused and item.status is not Status.REDUNDANT:
            words += _spelled(argument)
    kept = []
    for name, value, verdict in variables:
        if verdict is not None and verdict.status is Status.NO_EFFECT:
            added += _replacement(flag_notes.GONE_VARIABLES.get(name), (value,), known)
        elif verdict is not None:
            kept.append((name, value))
    unread = [word for word in line.leftovers if word.startswith("$")]
    return ("vllm", "serve", *([model] if model else []), *words, *added, *unread), tuple(kept)


def _spelled(argument: Argument) -> list[str]:
    assert argument.row is not None or argument.candidates or argument.spelling
    name = argument.spelling
    if argument.is_negated:
        name = "--no-" + name.removeprefix("--")
    if argument.path:
        name = f"{name}.{argument.path}"
    return [name, *argument.values]


def _replacement(gone: flag_notes.Gone | None, values: tuple[str, ...], known: Iterable[str]) -> list[str]:
    if gone is None or not gone.rewrite:
        return []
    flag = gone.rewrite[0].split(".")[0]
    if flag not in known and "--" + flag.removeprefix("--no-") not in known:
        return []
    words: list[str] = []
    for word in gone.rewrite:
        words += values if word == flag_notes.VALUES else (word,)
    return words


def _notes(launch: Launch, engine: Engine, came_from: Engine | None, line: CommandLine, config: ConfigFile | None) -> list[str]:
    notes = [e.note for e in (engine, came_from) if e is not None and e.note is not None]
    if launch.unresolved:
        names = ", ".join(f"${name}" for name in launch.unresolved)
        notes.append(f"set elsewhere and not seen: {names}")
    if config is not None and config.entries is None:
        notes.append(f"{config.name} (--config) is not at hand; the flags in it were not checked")
    elif line.model is None and config is None:
        notes.append("no model is named")
    return notes

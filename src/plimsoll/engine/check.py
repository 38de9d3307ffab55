"""What a vLLM version makes of a command: which flags it takes, which it refuses, which do nothing.

check(launch, engine)        one verdict a flag and variable, and the command rewritten so that the version takes it
check(..., came_from=older)  also what the upgrade changes for this very command
with_branches(checked)       also what the version refuses in other branches of the script
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.domain.launch import EntryPoint, Launch
from plimsoll.engine import environment, flag_notes, judge_flags, rewrite, tables
from plimsoll.engine.behaviours import Behaviour, changes_between
from plimsoll.engine.command_line import CommandLine, Unseen, arguments_from_config, read_command_line
from plimsoll.engine.flags import UNKNOWN_DEFAULT, flags_of, history_of, is_before
from plimsoll.engine.verdict import Item, Status
from plimsoll.engine.versions import Engine

# The release that began to print a DeprecationWarning for `python -m vllm.entrypoints.openai.api_server`.
ENTRY_POINT_DEPRECATED = "0.29.0"
_DASHES = ("\N{EM DASH}", "\N{EN DASH}", "\N{MINUS SIGN}", "\N{NON-BREAKING HYPHEN}")


class ConfigFile(NamedTuple):
    """The file named by `--config`, and its entries; None if it is not at hand."""

    name: str
    entries: Mapping[str, object] | None


class Checked(NamedTuple):
    """Everything one version says about one launch."""

    launch: Launch
    engine: Engine
    model: str | None
    items: tuple[Item, ...]
    rewritten: tuple[str, ...]  # the words of a command that the version takes
    rewritten_environment: tuple[tuple[str, str], ...]
    unseen: Unseen
    notes: tuple[str, ...] = ()
    came_from: Engine | None = None
    changes: tuple[Behaviour, ...] = ()  # what else the upgrade changes
    config: ConfigFile | None = None  # the file that the command reads more flags from

    @property
    def starts(self) -> bool:
        """Whether the version's parser takes the command, as far as we know its flags."""
        return not any(item.status.is_refused for item in self.items)


def check(launch: Launch, engine: Engine, came_from: Engine | None = None, config: ConfigFile | None = None) -> Checked:
    """Judge every flag and variable of a launch against one version."""
    unseen = Unseen(launch.unresolved)
    takes_model = launch.entry is not EntryPoint.API_SERVER
    line = read_command_line(launch.arguments, engine.release, takes_model=takes_model, unseen=unseen)
    line = with_config(line, config, engine)
    is_whole = _is_whole(line, config, unseen) and not launch.otherwise
    beside = judge_flags.Beside(line.given, _overruled(line), is_whole)
    judged = [(a, judge_flags.judge(a, engine, launch.entry, unseen, beside)) for a in line.arguments if not a.is_opaque]
    variables = [(name, value, _judge_variable(name, value, engine)) for name, value in dict(launch.environment).items()]
    items = [item for _, item in judged]
    items += _twice(line)
    items += [item for _, _, item in variables if item is not None]
    items += [_stray(word) for word in line.leftovers]
    items += _entry_point(launch, engine)
    if came_from is not None:
        items += _changed_defaults(line, launch, came_from, engine)
    made = rewrite.rewrite(line, judged, variables, engine)
    notes = (*launch.notes, *_notes(launch, engine, came_from, line, config), *made.notes, *_config_notes(judged))
    changes = changes_between(came_from.release, engine.release) if came_from is not None else ()
    return Checked(
        launch, engine, line.model, tuple(items), made.words, made.environment, unseen, notes, came_from, changes, config
    )


def with_branches(checked: Checked) -> Checked:
    """The same with the flags that the version refuses in the branches of the script that were not taken."""
    seen = {(item.name, item.values) for item in checked.items}
    items = list(checked.items)
    for other in checked.launch.otherwise:
        for item in check(other, checked.engine, config=checked.config).items:
            if item.status.is_refused and (item.name, item.values) not in seen:
                seen.add((item.name, item.values))
                where = "in another branch of the script"
                items.append(item._replace(note=f"{item.note}; {where}" if item.note else where))
    return checked._replace(items=tuple(items))


def _overruled(line: CommandLine) -> frozenset[int]:
    """The arguments that the parser reads and forgets, since the same flag comes once more."""
    last = {a.row.name: id(a) for a in line.arguments if a.row is not None and not a.path}
    return frozenset(id(a) for a in line.arguments if a.row is not None and last.get(a.row.name) != id(a))


def _is_whole(line: CommandLine, config: ConfigFile | None, unseen: Unseen) -> bool:
    """Whether no flag can come from a file or a variable that was not seen."""
    is_file_missing = config is not None and config.entries is None
    is_opaque = any(a.is_opaque for a in line.arguments) or unseen.is_whole(line.model or "")
    return not is_file_missing and not is_opaque


def with_config(line: CommandLine, config: ConfigFile | None, engine: Engine) -> CommandLine:
    """The line with the file's flags in front, as vLLM inserts them; the command line wins."""
    if config is None or not config.entries:
        return line
    inner = arguments_from_config(config.entries, engine.release, config.name)
    return line._replace(
        model=line.model or inner.model,
        arguments=(*inner.arguments, *line.arguments),
        leftovers=(*line.leftovers, *inner.leftovers),
    )


def _config_notes(judged: list[rewrite.Judged]) -> list[str]:
    """What has to be edited in the file, since the command cannot be rewritten around it."""
    wrong: dict[str, list[str]] = {}
    for argument, item in judged:
        if argument.source and item.status.is_problem:
            wrong.setdefault(argument.source, []).append(argument.typed.lstrip("-"))
    return [f"edit {file}: {', '.join(names)}; the rewritten command still reads that file" for file, names in wrong.items()]


def _twice(line: CommandLine) -> list[Item]:
    """vLLM takes one --config at most."""
    files = [a for a in line.arguments if a.row is not None and a.row.name == "--config" and not a.source]
    return [Item(a.typed, Status.NEVER_EXISTED, note="vLLM takes one --config", values=a.values) for a in files[1:]]


def _stray(word: str) -> Item:
    if word.startswith(_DASHES):
        return Item(word, Status.NEVER_EXISTED, note="it begins with a long dash, as word processors make them: write --")
    if not word.strip() or "\N{NO-BREAK SPACE}" in word:
        return Item(repr(word), Status.NEVER_EXISTED, note="a blank that is part of a word: a backslash followed by a space?")
    return Item(word, Status.NEVER_EXISTED, note="belongs to no flag; vLLM refuses it")


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


def _changed_defaults(line: CommandLine, launch: Launch, old: Engine, new: Engine) -> list[Item]:
    """Flags and variables the command leaves alone whose default is another one after the upgrade, memory first."""
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
        same = [r for r in history_of(name) if not is_before(r.first, past.first) and r.default == row.default]
        items.append(Item(name, Status.DEFAULT_CHANGED, same[0].first if same else None, note=note))
    items.sort(key=lambda item: (item.name not in flag_notes.MEMORY, item.name))
    set_here = dict(launch.environment)
    for name in tables.rows("environment"):
        then, now = environment.default_in(name, old.release), environment.default_in(name, new.release)
        if name.startswith("VLLM_") and name not in set_here and None not in (then, now) and then != now:
            note = f"not set: {_shown(then)} in {old}, {_shown(now)} in {new}"
            items.append(Item(name, Status.DEFAULT_CHANGED, note=note))
    return items


def _is_empty(default: object) -> bool:
    """Unset, an empty text, list or object: a parser may write one for the other. False is a word of its own."""
    return default is None or default in ("", [], {})


def _shown(default: object) -> str:
    return "unset (vLLM decides)" if default is None else "an empty object" if default == {} else repr(default)


def _notes(launch: Launch, engine: Engine, came_from: Engine | None, line: CommandLine, config: ConfigFile | None) -> list[str]:
    notes = [e.note for e in (engine, came_from) if e is not None and e.note is not None]
    if launch.unresolved:
        shown = ", ".join(Unseen([name]).markers[0] for name in launch.unresolved if name)
        notes.append(f"set elsewhere and not seen: {shown}")
    tag = launch.image.rpartition(":")[2] if launch.image and ":" in launch.image.rpartition("/")[2] else ""
    if tag[:1] in ("v", "0") and tag.lstrip("v").split("-")[0] != engine.release:
        notes.append(f"the image says {tag}; --vllm {tag} checks against that")
    if config is not None and config.entries is None:
        notes.append(f"{config.name} (--config) is not at hand; the flags in it were not checked")
    elif line.model is None and config is None:
        notes.append("no model is named")
    return notes

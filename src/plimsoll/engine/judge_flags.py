"""The verdict on one flag of a command."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from plimsoll.domain.launch import EntryPoint
from plimsoll.engine import flag_notes, tables
from plimsoll.engine.command_line import Argument, Unseen
from plimsoll.engine.flags import FlagRow, flags_of, history_of, is_before, release_after
from plimsoll.engine.values import config_problem, in_form_of, key_values, row_problem, value_problem
from plimsoll.engine.verdict import Item, Status
from plimsoll.engine.versions import Engine

# The release that began to take `--model` after `vllm serve`, and to ask for the model as the first word instead.
MODEL_FLAG_TAKEN = "0.8.3"
# The first release whose parser joined `--config.key value` into JSON.
DOTTED_SINCE = "0.9.0"
_KEYED_KINDS = ("json", "json-or-text", "other")
_NUMBERS = ("int", "float", "human-int", "human-int-or-auto")


class Beside(NamedTuple):
    """What stands beside a flag in its command."""

    given: frozenset[str]
    overruled: frozenset[int] = frozenset()  # the arguments behind which the same flag is given again, by their id()
    is_whole: bool = True  # False: more flags may come from a variable or a file that was not seen


def judge(argument: Argument, engine: Engine, entry: EntryPoint, unseen: Unseen, beside: Beside) -> Item:
    """What the release does with the flag."""
    row = argument.row
    if row is None:
        return _absent(argument, engine)
    if argument.path:
        return _dotted(argument, row, engine)
    special = _config(argument, row) if row.name == "--config" else None
    special = special or (_model(argument, engine, entry) if row.name == "--model" else None)
    if special is not None:
        return special
    if argument.source and argument.is_negated:
        return _false_in_a_file(argument, row)
    problem = value_problem(argument, unseen)
    if problem is not None:
        return _bad_value(argument, row, problem)
    problem = config_problem(argument, unseen, engine.release, beside.given)
    if problem is not None and id(argument) not in beside.overruled:
        return item_for(argument, Status.NEVER_EXISTED, note=problem)
    return _taken(argument, row, engine, beside, unseen)


def _taken(argument: Argument, row: FlagRow, engine: Engine, beside: Beside, unseen: Unseen) -> Item:
    """The release takes it: does it do anything?"""
    idle = flag_notes.IDLE.get(row.name)
    if idle is not None and not is_before(engine.release, idle.since):
        return item_for(argument, Status.NO_EFFECT, idle.since, note=idle.why)
    if row.is_deprecated:
        stretch = [r for r in history_of(row.name) if r.is_deprecated]
        return item_for(argument, Status.DEPRECATED, stretch[0].first, note="vLLM means to remove it")
    doubt = _implied(argument, row, engine) or _alone(argument, row, engine, beside) or _unlisted(argument, row, engine, unseen)
    return doubt or item_for(argument, Status.OK, history_of(row.name)[0].first)


def _alone(argument: Argument, row: FlagRow, engine: Engine, beside: Beside) -> Item | None:
    """A flag that acts only beside another, which the command does not give."""
    needs = flag_notes.NEEDS.get(row.name)
    if needs is None or not beside.is_whole or needs.flag in beside.given:
        return None
    if needs.since is not None and is_before(engine.release, needs.since):
        return None
    since = history_of(row.name)[0].first if needs.since is None else None  # earlier releases were not read: it may be older
    instead = f"{needs.flag} beside it, if it was meant to act"
    return item_for(argument, Status.NO_EFFECT, since, instead, f"vLLM looks at it only where {needs.flag} is given")


def _unlisted(argument: Argument, row: FlagRow, engine: Engine, unseen: Unseen) -> Item | None:
    """A name that is not in vLLM's own list, where a plugin or the model can still make something of it."""
    names = flag_notes.OPEN_LISTS.get((row.name, engine.release))
    value = argument.values[0] if argument.values else ""
    if names is None or not engine.is_exact or value in ("", "None", *names) or value in unseen:
        return None
    near = _nearest_of(value, tuple(sorted(names)))
    instead = f"{row.name} {near}, if that was meant" if near else None
    note = (
        f"not a name of {engine}'s own: it refuses to start, unless a plugin brings the name or the model's files overrule it"
    )
    return item_for(argument, Status.UNKNOWN, None, instead, note)


def item_for(
    argument: Argument, status: Status, since: str | None = None, instead: str | None = None, note: str | None = None
) -> Item:
    """The verdict under the name the user typed, with the file it stands in."""
    if argument.source:
        note = f"{note}; from {argument.source}" if note else f"from {argument.source}"
    return Item(argument.typed, status, since, instead, note, argument.values)


def _dotted(argument: Argument, row: FlagRow, engine: Engine) -> Item:
    if is_before(engine.release, DOTTED_SINCE):
        note = f"dotted keys came with {DOTTED_SINCE}; pass JSON instead"
        return item_for(argument, Status.NEVER_EXISTED, DOTTED_SINCE, note=note)
    if row.kind not in _KEYED_KINDS:
        return item_for(argument, Status.NEVER_EXISTED, note=f"{row.name} takes no keys")
    if argument.lacks_value:
        return item_for(argument, Status.NEVER_EXISTED, note="it needs a value")
    return item_for(argument, Status.OK, history_of(row.name)[0].first)


def _config(argument: Argument, row: FlagRow) -> Item | None:
    if argument.has_equals:
        note = "vLLM reads the file only when it is written as two words: --config FILE"
        return item_for(argument, Status.NO_EFFECT, row.first, "--config FILE", note)
    if argument.values and not argument.values[0].endswith((".yaml", ".yml")) and "$" not in argument.values[0]:
        return item_for(argument, Status.NEVER_EXISTED, note="vLLM reads only .yaml and .yml files")
    return None


def _model(argument: Argument, engine: Engine, entry: EntryPoint) -> Item | None:
    if entry is not EntryPoint.SERVE or argument.source or not argument.values:
        return None
    instead = "the model as the first word after `vllm serve`"
    if is_before(engine.release, MODEL_FLAG_TAKEN):
        note = f"`vllm serve` of {engine} wants the model as its first word"
        return item_for(argument, Status.NEVER_EXISTED, MODEL_FLAG_TAKEN, instead, note)
    return item_for(argument, Status.DEPRECATED, MODEL_FLAG_TAKEN, instead)


def _false_in_a_file(argument: Argument, row: FlagRow) -> Item:
    """`enable-x: false` in a --config file: vLLM drops the entry."""
    if row.takes_value or row.default is False:
        return item_for(argument, Status.REDUNDANT, note="it is the default")
    negation = "--no-" + row.name.removeprefix("--")
    note = "vLLM drops an entry that says false"
    return item_for(argument, Status.NO_EFFECT, instead=f"{negation} on the command line", note=note)


def _absent(argument: Argument, engine: Engine) -> Item:
    """The release has no such flag: was it removed, does it come later, or did it never exist?"""
    spelling, short_for = _meant(argument)
    past = history_of(spelling)
    positive = "--" + spelling.removeprefix("--no-")
    if not past and spelling.startswith("--no-") and history_of(positive):
        past = tuple(row for row in history_of(positive) if row.kind == "on-off")
        if not past:
            return item_for(argument, Status.NEVER_EXISTED, note=f"{positive} has no --no- form")
    if not past:
        return _ambiguous(argument) if argument.candidates else _unheard_of(argument, engine)
    if is_before(engine.release, past[0].first):
        note = f"came with {past[0].first}; {engine} refuses it"
        return item_for(argument, Status.NEVER_EXISTED, past[0].first, note=note)
    last = [row for row in past if not is_before(engine.release, row.first)][-1]
    gone = flag_notes.GONE.get(spelling) or flag_notes.GONE.get(positive)
    note = gone.why if gone else "vLLM refuses to start"
    return item_for(argument, Status.REMOVED, release_after(last.last), gone.instead if gone else None, f"{short_for}{note}")


def _meant(argument: Argument) -> tuple[str, str]:
    """The spelling of an earlier release that a prefix stood for, and words that say so."""
    if argument.candidates or history_of(argument.spelling) or not argument.spelling.startswith("--"):
        return argument.spelling, ""
    begun = [name for name in tables.rows("flags") if name.startswith(argument.spelling)]
    if len(begun) == 1 and len(argument.spelling) > 4:
        return begun[0], f"short for {begun[0]}: "
    return argument.spelling, ""


def _ambiguous(argument: Argument) -> Item:
    shown = ", ".join(argument.candidates[:4]) + (", ..." if len(argument.candidates) > 4 else "")
    return item_for(argument, Status.NEVER_EXISTED, note=f"several flags begin like this ({shown}); vLLM refuses it")


def _unheard_of(argument: Argument, engine: Engine) -> Item:
    folklore = flag_notes.FOLKLORE.get(argument.spelling)
    if folklore is not None:
        return item_for(argument, Status.NEVER_EXISTED, instead=folklore, note="in no release of vLLM")
    if not engine.is_exact:
        note = f"not in {engine}, the release that stands for {engine.asked}"
        return item_for(argument, Status.UNKNOWN, note=note)
    near = _nearest(argument.spelling, engine.release)
    instead = f"{near}, if that was meant" if near else None
    return item_for(argument, Status.NEVER_EXISTED, instead=instead, note="in no release of vLLM; a plugin could add it")


@functools.lru_cache(maxsize=64)
def _nearest(spelling: str, release: str) -> str | None:
    return _nearest_of(spelling, [name for name in flags_of(release) if name.startswith("--")])


def _nearest_of(word: str, known: Iterable[str]) -> str | None:
    import difflib  # only for what is mistyped

    found = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return found[0] if found else None


def _bad_value(argument: Argument, row: FlagRow, problem: str) -> Item:
    """A value the release refuses: other releases may take it."""
    others = [r for r in history_of(row.name) if r is not row and argument.values and _takes(r, argument)]
    earlier = [r for r in others if is_before(r.last, row.first)]
    later = [r for r in others if is_before(row.last, r.first)]
    instead = _switch(argument, row)
    if (earlier or later) and instead is None:
        instead = _other_form(argument, row)
    if earlier:
        since = release_after(earlier[-1].last)
        return item_for(argument, Status.REMOVED, since, instead, f"the value is no longer taken: {problem}")
    if later:
        note = f"the value came with {later[0].first}: {problem}"
        return item_for(argument, Status.NEVER_EXISTED, later[0].first, instead, note)
    return item_for(argument, Status.NEVER_EXISTED, instead=instead, note=f"no release takes this value: {problem}")


def _takes(row: FlagRow, argument: Argument) -> bool:
    """Whether it surely takes the values; a flag of any text says nothing about one of them."""
    if row.kind in ("true-false", "bool"):
        return argument.values[0].lower() in ("true", "false")
    if row.kind == "key-value":
        return all(key_values(value) is not None for value in argument.values)
    is_judged = row.choices is not None or row.kind in _NUMBERS
    return row.takes_value and is_judged and not any(row_problem(row, value) for value in argument.values)


def _switch(argument: Argument, row: FlagRow) -> str | None:
    """The switch that says what `--flag true` and `--flag=false` mean; None where there is none."""
    said = argument.values[0].lower() if argument.values and not row.takes_value else ""
    if said == "false" and row.kind == "on-off":
        return "--no-" + row.name.removeprefix("--")
    return row.name if said == "true" else None


def _other_form(argument: Argument, row: FlagRow) -> str | None:
    """The flag with the same value in the form that this release takes."""
    value = in_form_of(row, argument.values)
    if value is not None:
        return f"{row.name} '{value}'" if row.kind == "json" else f"{row.name} {value}"
    if row.name == "--max-model-len" and argument.values[0].strip().lower() == "auto":
        return "a number of tokens; without the flag it is the model's own length"
    return None


def _implied(argument: Argument, row: FlagRow, engine: Engine) -> Item | None:
    """A switch that says what is so anyway. Values that equal the default are kept: they pin what matters."""
    if row.takes_value or argument.values:
        return None
    wanted = not argument.is_negated
    implied = flag_notes.IMPLIED.get(row.name)
    if implied is not None and wanted and not is_before(engine.release, implied.since):
        return item_for(argument, Status.REDUNDANT, implied.since, note=implied.why)
    if row.kind == "on-off" and row.default is wanted:
        same = [r for r in history_of(row.name) if r.default is wanted]
        return item_for(argument, Status.REDUNDANT, same[0].first if same else None, note="it is the default")
    return None

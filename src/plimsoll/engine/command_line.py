"""Reads the arguments of `vllm serve` as vLLM's own parser would.

vLLM's parser is Python's argparse with additions, and users lean on all of it: `--foo_bar`, unique prefixes
(`--gpu-memory-util`), `--no-` forms, `=`, short names (`-tp 4`), dotted JSON (`--compilation-config.mode 3`), `-O3`,
several values after one flag, and a YAML file of flags (`--config`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.engine.flags import FlagRow, flags_of, history_of

_NEGATIVE_NUMBER = r"^-\d+$|^-\d*\.\d+$"  # argparse's own


class Argument(NamedTuple):
    """One flag as it was given, and the row of the parser it meets."""

    typed: str  # the name as typed, with its dashes and without its value
    spelling: str  # the option string it stands for: underscores made dashes, prefix completed
    values: tuple[str, ...] = ()
    row: FlagRow | None = None  # None: this release has no such flag
    is_negated: bool = False  # --no-...
    path: str = ""  # the dotted key, for JSON arguments
    candidates: tuple[str, ...] = ()  # several flags begin like this: argparse refuses
    lacks_value: bool = False
    has_equals: bool = False  # --name=value
    source: str = ""  # the file it came from, if not the command line


class CommandLine(NamedTuple):
    """What the parser makes of the words."""

    model: str | None
    arguments: tuple[Argument, ...]
    leftovers: tuple[str, ...] = ()  # words that belong to nothing; vLLM refuses them

    def value_of(self, name: str) -> str | None:
        """The last value given for a flag, as typed; None if it was not given."""
        found = [a for a in self.arguments if a.row is not None and name in a.row.spellings and not a.path]
        return found[-1].values[-1] if found and found[-1].values else None


def read_command_line(words: Sequence[str], release: str, *, takes_model: bool = True) -> CommandLine:
    """Sort the words into flags, their values and the model, by the rules of that release's parser."""
    known = flags_of(release)
    return _Walk(words, known, takes_model=takes_model).run()


def arguments_from_config(config: Mapping[str, object], release: str) -> list[str]:
    """The words that vLLM makes of a `--config` file's entries."""
    import json

    known = flags_of(release)
    words: list[str] = []
    for key, value in config.items():
        flag = f"--{key}"
        if isinstance(value, bool):
            row = known.get(flag.replace("_", "-"))
            if value:
                words.append(flag)
            elif row is not None and row.kind == "on-off":
                words.append(f"--no-{key}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        else:
            words += [flag, str(value)]
    return words


def _split_optimization(word: str, known: Mapping[str, FlagRow]) -> str:
    """`-O3` and `-O=3` set the optimisation level; until 0.11.2 they were short for the compilation configuration."""
    if not word.startswith("-O") or word == "-O":
        return word
    if word[2] == ".":
        return word if "-O" in known else word.replace("-O", "-cc", 1)
    level = word[3:] if word[2] == "=" else word[2:]
    return f"-O={level}" if "-O" in known else f"--optimization-level={level}"


class _Walk:
    """One pass over the words, left to right."""

    def __init__(self, words: Sequence[str], known: Mapping[str, FlagRow], *, takes_model: bool) -> None:
        self.given = words
        self.words = [_split_optimization(word, known) for word in words]
        self.known = known
        self.takes_model = takes_model
        self.position = 0
        self.model: str | None = None
        self.model_by_flag: str | None = None
        self.arguments: list[Argument] = []
        self.leftovers: list[str] = []

    def run(self) -> CommandLine:
        options_over = False
        while self.position < len(self.words):
            word = self.words[self.position]
            self.position += 1
            if options_over or not self._is_option(word):
                self._positional(word)
            elif word == "--":
                options_over = True
            else:
                self._option(word)
        if self.model_by_flag is not None:
            # vLLM makes `--model X` the positional argument; another one is then a word too many.
            if self.takes_model and self.model is not None:
                self.leftovers.insert(0, self.model)
            self.model = self.model_by_flag
        return CommandLine(self.model, tuple(self.arguments), tuple(self.leftovers))

    def _positional(self, word: str) -> None:
        if self.takes_model and self.model is None:
            self.model = word
        else:
            self.leftovers.append(word)

    def _is_option(self, word: str) -> bool:
        """Argparse's own test of whether a word is a flag."""
        if not word.startswith("-") or len(word) == 1:
            return False
        row, _, candidates = self._resolve(_normal(word.split("=", 1)[0]).split(".", 1)[0])
        if row is not None or candidates:
            return True
        return not re.match(_NEGATIVE_NUMBER, word) and " " not in word

    def _resolve(self, name: str) -> tuple[FlagRow | None, bool, tuple[str, ...]]:
        """The row a name stands for, whether it is its `--no-` form, and the rivals if it is ambiguous."""
        if name in self.known:
            return self.known[name], False, ()
        negated = self.known.get("--" + name.removeprefix("--no-")) if name.startswith("--no-") else None
        if negated is not None and negated.kind == "on-off":
            return negated, True, ()
        begun: dict[str, tuple[FlagRow, bool]] = {}
        for spelling, row in self.known.items():
            if spelling.startswith(name):
                begun[spelling] = (row, False)
            negation = f"--no-{spelling.removeprefix('--')}"  # short names have none
            if row.kind == "on-off" and spelling.startswith("--") and negation.startswith(name):
                begun[negation] = (row, True)
        if len(begun) == 1:
            row, is_negated = next(iter(begun.values()))
            return row, is_negated, ()
        return None, False, tuple(sorted(begun))

    def _option(self, word: str) -> None:
        meant, equals, inline = word.partition("=")
        typed = self.given[self.position - 1].partition("=")[0]
        name, dot, path = _normal(meant).partition(".")
        row, is_negated, candidates = self._resolve(name)
        spelling = row.name if row is not None else name
        argument = Argument(typed, spelling, row=row, is_negated=is_negated, path=path, candidates=candidates)
        if equals:
            # With `=` argparse takes exactly this one value, also where more could follow.
            argument = argument._replace(values=(inline,), has_equals=True)
        elif dot:
            argument = self._with_values(argument, 1)
        elif is_negated:
            pass
        else:
            argument = self._with_values(argument, self._arity(spelling, row))
        if row is not None and row.name == "--model" and not dot and argument.values:
            self.model_by_flag = argument.values[0]
        self.arguments.append(argument)

    def _arity(self, spelling: str, row: FlagRow | None) -> int | str:
        if row is None:
            past = history_of(spelling)
            if not past:
                return "maybe"
            row = past[-1]
        if not row.takes_value:
            return 0
        return 1 if row.nargs is None else row.nargs

    def _with_values(self, argument: Argument, arity: int | str) -> Argument:
        if arity == "maybe":
            # Nobody knows this flag. One word after it is most likely its value, unless it must be the model.
            others = [w for w in self.words[self.position + 1 :] if not self._is_option(w)]
            arity = 0 if self.takes_model and self.model is None and not others else "?"
        limit = {"?": 1, "+": len(self.words), "*": len(self.words)}.get(str(arity), arity)
        taken: list[str] = []
        while len(taken) < int(limit) and self.position < len(self.words):
            word = self.words[self.position]
            if self._is_option(word):
                break
            taken.append(word)
            self.position += 1
        short = (isinstance(arity, int) and len(taken) < arity) or (arity == "+" and not taken)
        return argument._replace(values=tuple(taken), lacks_value=short)


def _normal(name: str) -> str:
    """Dashes for underscores, up to the first dot, as vLLM does."""
    head, dot, path = name.partition(".")
    return head.replace("_", "-") + dot + path if name.startswith("--") else name

"""How a command line is read, against Python's own argparse built from the same table."""

from __future__ import annotations

import argparse
import json
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import TooLarge
from plimsoll.launch.command_line import Argument, CommandLine, UnresolvedWords, arguments_from_config, read_command_line
from plimsoll.vllm.flags import FlagRow, flags_of
from tests.each import each, rows
from tests.launch.test_check import CASES

RELEASE = "0.32.0"


def _read(*words: str, release: str = RELEASE) -> CommandLine:
    return read_command_line(words, release)


def _only(*words: str, release: str = RELEASE) -> Argument:
    (argument,) = _read("model", *words, release=release).arguments
    return argument


@each(("typed", "spelling", "values"), rows(CASES, "spellings"))
def test_the_spellings_users_lean_on(typed: str, spelling: str, values: str) -> None:
    """Every way vLLM's parser lets one write a flag leads to the same flag and value."""
    argument, name = _only(*typed.split()), typed.split()[0].split("=")[0]
    assert argument.row is not None
    assert (argument.row.name, argument.values, argument.typed) == (spelling, tuple(values.split()), name)
    assert (argument.is_negated, argument.path) == (name.startswith("--no-"), name.partition(".")[2])


def test_what_a_release_cannot_place() -> None:
    """A prefix of several flags names its rivals, a value that is missing is said; -O was another flag until 0.11.2."""
    argument = _only("--max-num", "4")
    assert argument.row is None
    assert {"--max-num-seqs", "--max-num-batched-tokens"} <= set(argument.candidates)
    assert [_read("m", "--port", *more).arguments[0].lacks_value for more in ((), ("--enforce-eager",))] == [True, True]
    old = _only("-O3", release="0.11.0")
    assert old.row is not None
    assert old.row.name == "--compilation-config"


@each(("words", "values", "leftovers"), rows(CASES, "models"))
def test_the_model_is_the_first_free_word(words: str, values: str, leftovers: str) -> None:
    """Before, between or after flags: the word that belongs to no flag is the model."""
    line = _read(*words.split())
    assert (line.model, " ".join(line.arguments[0].values), " ".join(line.leftovers)) == ("m", values, leftovers)


def test_a_config_file_becomes_arguments() -> None:
    """YAML values turn into flags as vLLM turns them: switches, lists, objects, plain values; false becomes a negation."""
    config = {"port": "8001", "enforce-eager": True, "enable_prefix_caching": False, "lora-modules": ["a=b", "c=d"],
              "speculative-config": {"model": "x"}}  # fmt: skip
    line = arguments_from_config(config, RELEASE, "c.yaml")
    assert [(a.spelling, a.values, a.is_negated) for a in line.arguments] == [
        ("--port", ("8001",), False),
        ("--enforce-eager", (), False),
        ("--lora-modules", ("a=b", "c=d"), False),
        ("--speculative-config", (json.dumps({"model": "x"}),), False),
        ("--enable-prefix-caching", (), True),
    ]
    assert {a.source for a in line.arguments} == {"c.yaml"}


def test_a_config_file_whose_aliases_multiply_is_refused() -> None:
    """A nested entry that would grow beyond a mebibyte of JSON stops before it does."""
    bomb: object = {"a": "x" * 1000}
    for _ in range(30):
        bomb = {"a": bomb, "b": bomb}
    with pytest.raises(TooLarge):
        arguments_from_config({"hf-overrides": bomb}, RELEASE, "c.yaml")


def test_a_variable_that_may_hold_flags_stays_where_it_stands() -> None:
    """An unassigned variable between flags is neither the model nor a stray word, and keeps its place."""
    line = read_command_line(["m", "$EXTRA", "--port", "$PORT"], RELEASE, unseen=UnresolvedWords(["EXTRA", "PORT"]))
    assert (line.model, line.leftovers) == ("m", ())
    assert [(a.typed, a.is_opaque) for a in line.arguments] == [("$EXTRA", True), ("--port", False)]


def test_many_unknown_flags_take_linear_work() -> None:
    """A line of thousands of flags that nobody knows is read in one pass, with or without a model."""
    words = [word for number in range(3000) for word in (f"--made-up-{number}", "1")]
    assert len(_read("m", *words).arguments) == 3000
    assert len(_read(*words).arguments) == 3000


class _Refusing(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _argparse_from_table(release: str) -> _Refusing:
    parser = _Refusing(prog="vllm", add_help=False)
    parser.add_argument("model_tag", nargs="?")
    for row in {r.name: r for r in flags_of(release).values()}.values():
        names = sorted(row.spellings, key=lambda n: n != row.name)
        if row.kind == "on-off":
            parser.add_argument(*names, action=argparse.BooleanOptionalAction)
        elif row.kind == "switch":
            parser.add_argument(*names, action="store_true")
        else:
            parser.add_argument(*names, nargs=row.nargs)
    return parser


_PARSER = _argparse_from_table(RELEASE)
# --model is left out: vLLM moves it to the front before argparse sees it, and the real parser is asked about that.
_ROWS = sorted(
    {row.name: row for row in flags_of(RELEASE).values() if row.name != "--model"}.values(), key=lambda row: row.name
)
_WORD = st.sampled_from(["1", "0.5", "abc", "-1", "-0.5", "a=b", "x y", "/data/m", "{}"])


@st.composite
def _flag_words(draw: st.DrawFn) -> list[str]:
    row: FlagRow = draw(st.sampled_from(_ROWS))
    name = draw(st.sampled_from(row.spellings))
    shortened, negated, joined = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    if name.startswith("--") and shortened:
        # --model-impl cut short would be --model.
        name = name[: draw(st.integers(min_value=5, max_value=len(name)).filter(lambda cut: name[:cut] != "--model"))]
    if row.kind == "on-off" and negated:
        name = "--no-" + name.removeprefix("--")
    words = draw(st.lists(_WORD, max_size=3))
    if words and joined:
        return [f"{name}={words[0]}", *words[1:]]
    return [name, *words]


@given(st.lists(_flag_words(), max_size=4), st.booleans())
def test_argparse_agrees(groups: list[list[str]], model_first: bool) -> None:
    """Random command lines are taken, refused and read as Python's argparse reads them with the same flags."""
    words = [*(["the-model"] if model_first else []), *(w for group in groups for w in group)]
    try:
        expected: argparse.Namespace | None = _PARSER.parse_args(words)
    except ValueError:
        expected = None
    line = read_command_line(words, RELEASE)
    refused = bool(line.leftovers) or any(_refused(argument) for argument in line.arguments)
    assert refused == (expected is None), (words, line)
    if expected is None:
        return
    assert line.model in (expected.model_tag, expected.model)
    for argument in line.arguments:
        assert argument.row is not None
        if argument.row.takes_value and not argument.row.repeats:
            last = [a for a in line.arguments if a.row is argument.row][-1]
            got = getattr(expected, _dest(argument.row))
            assert got in (list(last.values), last.values[0] if last.values else None)


def _dest(row: FlagRow) -> str:
    action = next(a for a in _PARSER._actions if row.name in a.option_strings)
    return action.dest


def _refused(argument: Argument) -> bool:
    row = argument.row
    if row is None or argument.lacks_value:
        return True
    return bool(argument.values) and not row.takes_value

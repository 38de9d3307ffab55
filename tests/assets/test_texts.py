"""Words as text in each kind of file."""

from __future__ import annotations

import tomllib

import yaml
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.assets.texts import flag_lines, for_compose, for_pod, headed, quoted, yaml_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
KEYS = TEXTS.filter(lambda key: key != "" and not key.startswith("#"))
DATA = st.recursive(
    TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, DATA, min_size=1, max_size=4))
def test_yaml_reads_back_what_was_written(value: dict[str, object]) -> None:
    """Whatever the texts hold: colons, quotes, words that look like numbers, dates or booleans."""
    assert yaml.safe_load(yaml_of(value)) == value


def test_comments_stand_where_they_were_put() -> None:
    """A key that begins with # is a line of its own, also as the first of a list's item."""
    assert yaml_of({"a": [{"# why": None, "b": "1"}], "# end": None}) == 'a:\n  - # why\n    b: "1"\n# end\n'


@given(TEXTS)
def test_toml_reads_back_what_was_written(text: str) -> None:
    """Any text is one string of TOML."""
    assert tomllib.loads(f"a = {quoted(text)}") == {"a": text}


@given(st.text("$(){}aB_ ", max_size=12))
def test_dollars_arrive_in_a_pod(text: str) -> None:
    """The kubelet's own rule: `$$` is one dollar sign, `$(NAME)` a variable, anything else stays."""
    assert _as_the_kubelet(for_pod(text)) == text


def _as_the_kubelet(text: str) -> str:
    made, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            made, at = made + "$", at + 2
        else:
            assert not (text.startswith("$(", at) and ")" in text[at:]), "a variable would be put in"
            made, at = made + text[at], at + 1
    return made


def test_dollars_arrive_in_a_container() -> None:
    """Compose reads two as one."""
    assert for_compose("${A} $5") == "$${A} $$5"


def test_flags_keep_their_values() -> None:
    """A negative number is a value, not a flag."""
    assert flag_lines(["vllm", "serve", "m", "--seed", "-1", "-tp", "2"]) == [
        ["vllm", "serve", "m"],
        ["--seed", "-1"],
        ["-tp", "2"],
    ]


def test_the_lines_on_top_are_comments_of_the_kind_of_file() -> None:
    """Below a #! in a script, with // in polkit's rules, and not in JSON."""
    assert headed("a.sh", "#!/bin/sh\nx\n", ["one"]) == "#!/bin/sh\n# one\nx\n"
    assert headed("a.rules", "x\n", ["one"]) == "// one\n\nx\n"
    assert headed("a.json", "{}", ["one"]) == "{}"

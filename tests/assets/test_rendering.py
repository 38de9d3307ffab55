"""Words as text in each kind of file."""

from __future__ import annotations

import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from plimsoll.assets.rendering import _environment, fill, flag_lines, headed, in_yaml, quoted, render
from plimsoll.assets.settings import AssetSettings

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
AWKWARD = st.sampled_from("on No null 1e3 0x1f 2024-01-01 a:b #a -a .inf a. << ~ =".split())


@given(TEXTS | AWKWARD, TEXTS | AWKWARD)
def test_what_was_written_is_read_back(key: str, value: str) -> None:
    """YAML and TOML, whatever the texts hold: colons, quotes, words that look like numbers, dates or booleans."""
    assert tomllib.loads(f"a = {quoted(value)}") == {"a": value}
    assert yaml.safe_load(f"- {in_yaml(value)}\n- {in_yaml(key)}: {in_yaml(value)}\n") == [value, {key: value}]


def test_data_is_filled_and_a_name_that_nobody_gave_a_value_is_an_error() -> None:
    """No template and no text writes an empty place; Prometheus's braces stay; a false `when` takes its entry away."""
    with pytest.raises(UndefinedError):
        render("prometheus.yml", settings=AssetSettings("0.32.0"), alertmanager="a:1")
    with pytest.raises(UndefinedError):
        fill(["<< no_such_number >>"], {})
    data = [{"a": "{{ $labels.x }} << half >>"}, {"a": "no", "when": "is_there"}, {"a": "yes", "when": "half < 1"}]
    assert fill(data, {"half": 0.5, "is_there": False}) == [{"a": "{{ $labels.x }} 0.5"}, {"a": "yes"}]


@given(st.text("$(){}aB_ ", max_size=12))
def test_dollars_arrive_in_a_pod(text: str) -> None:
    """The kubelet's own rule: `$$` is one dollar sign, `$(NAME)` a variable, anything else stays."""
    assert _as_the_kubelet(_environment().filters["pod"](text)) == text


def _as_the_kubelet(text: str) -> str:
    made, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            made, at = made + "$", at + 2
        else:
            assert not (text.startswith("$(", at) and ")" in text[at:]), "a variable would be put in"
            made, at = made + text[at], at + 1
    return made


def test_small_words() -> None:
    """What Compose and systemd read as one sign is written twice; a negative number is no flag; lines on top suit the file."""
    assert _environment().filters["compose"]("${A} $5") == "$${A} $$5"
    assert _environment().filters["unit"]("50% of a\\b") == "50%% of a/b"
    words = ["vllm", "serve", "m", "--seed", "-1", "-tp", "2"]
    assert flag_lines(words) == [["vllm", "serve", "m"], ["--seed", "-1"], ["-tp", "2"]]
    assert headed("a.sh", "#!/bin/sh\nx\n", ["one"]) == "#!/bin/sh\n# one\nx\n"
    assert headed("a.rules", "x\n", ["one"]) == "// one\n\nx\n"
    assert headed("a.json", "{}", ["one"]) == "{}"

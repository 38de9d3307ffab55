"""Our own options in somebody else's command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.launch.options import split_options


def _split(*words: str) -> object:
    return split_options(words, with_value=("--vllm", "--from"), switches=("--json",))


def test_ours_are_taken_wherever_they_stand_before_the_dashes() -> None:
    """Exact matches win; everything else is handed on in order."""
    split = split_options(
        ["vllm", "--json", "serve", "m", "--vllm=0.6.0", "--port", "1"], with_value=("--vllm",), switches=("--json",)
    )
    assert split.rest == ("vllm", "serve", "m", "--port", "1")
    assert (split.values, split.switches, split.verbatim) == ({"--vllm": "0.6.0"}, frozenset({"--json"}), None)


def test_behind_the_dashes_nothing_is_ours() -> None:
    """Every word after -- is kept, also another --."""
    split = split_options(["--", "--json", "--", "x"], with_value=(), switches=("--json",))
    assert (split.verbatim, split.switches) == (("--json", "--", "x"), frozenset())


def test_an_option_without_its_value_is_named() -> None:
    """The one line says which option."""
    with pytest.raises(BadInput, match="--from needs a value"):
        _split("vllm", "serve", "--from")


@given(st.lists(st.text(max_size=12), max_size=8))
def test_no_word_is_lost(words: list[str]) -> None:
    """Whatever is typed that is not ours comes out again, in order."""
    foreign = [w for w in words if w != "--"]
    split = split_options(foreign, with_value=(), switches=())
    assert list(split.rest) == foreign

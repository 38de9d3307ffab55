"""What `plain_words` promises."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.launch.manifests import plain_words


@given(st.text(alphabet=st.sampled_from("ab \t\n'\"\\$#=é"), max_size=20))
def test_words_are_those_of_shlex(text: str) -> None:
    """Every line is cut as `shlex.split` cuts it, and refused where it refuses."""
    try:
        expected = shlex.split(text)
    except ValueError:
        with pytest.raises(BadInput, match=r"^x: a quote or backslash in the command is never finished$"):
            plain_words(text, "x")
    else:
        assert plain_words(text, "x") == expected


def test_one_long_word_is_one_word() -> None:
    """A word of a megabyte, quoted a thousand times over, comes back whole."""
    assert plain_words("'a'b" * 250_000, "x") == ["ab" * 250_000]

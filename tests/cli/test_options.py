"""Our own options in somebody else's command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cli.flags import FlagsOptions
from plimsoll.cli.main import parse
from plimsoll.errors import BadInput
from plimsoll.launch.options import options_of


def test_ours_are_taken_wherever_they_stand_before_the_dashes() -> None:
    """Exact matches win, everything else is handed on in order; behind the dashes nothing is ours."""
    found = parse(FlagsOptions, ["vllm", "--json", "serve", "m", "--vllm=0.6.0", "-dph", "--port", "1", "--vll", "x"])
    assert found.rest == ("vllm", "serve", "m", "-dph", "--port", "1", "--vll", "x")
    assert (found.vllm, found.json, found.verbatim, found.pid) == ("0.6.0", True, None, None)
    found = parse(FlagsOptions, ["--", "--json", "--help", "--", "x"])
    assert (found.verbatim, found.json) == (("--json", "--help", "--", "x"), False)


def test_what_is_wrong_with_an_option_is_said() -> None:
    """One line says which option and what; the same value twice is no mistake."""
    for words, said in (
        (["serve", "--from"], "--from needs a value"),
        (["--json=1"], "--json takes no value"),
        (["--pid", "x"], "--pid 'x' is not a process id"),
        (["--vllm", "1", "--vllm", "2"], "--vllm is given twice: 1 and 2"),
    ):
        with pytest.raises(BadInput, match=said):
            parse(FlagsOptions, words)
    assert parse(FlagsOptions, ["--vllm", "1", "--vllm=1"]).vllm == "1"


@given(st.lists(st.one_of(st.text(max_size=12), st.from_regex(r"--?[a-z]{1,4}(=[a-z]*)?", fullmatch=True)), max_size=8))
def test_no_word_is_lost(words: list[str]) -> None:
    """Whatever is typed that is not ours comes out again, in order."""
    ours = {"--", "-h", "--help", *(info.name for info in options_of(FlagsOptions).values())}
    foreign = [word for word in words if word.partition("=")[0] not in ours]
    assert list(parse(FlagsOptions, foreign).rest) == foreign

"""How sizes and counts are read and written, with vLLM's own rule restated independently."""

from __future__ import annotations

import contextlib
import math
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.units import (
    ceil_div,
    format_count,
    format_gib,
    parse_gib,
    parse_vllm_integer,
    parse_vllm_integer_or_auto,
    round_up,
)
from tests.each import cases, each


@each(("text", "value"), cases(".", "vllm_reads"))
def test_parse_vllm_integer(text: str, value: int) -> None:
    """Each text gives the number vLLM 0.32 takes it for."""
    assert parse_vllm_integer(text) == value


@each(
    "text",
    ["", " ", "k", "auto", "8GiB", "8GB", "8kb", "1 k", "1.5", ".5k", "1.k", "-1k", "+1k", "1_000k", "1e3", "0x10",
     "nan", "inf", "1kk", "9" * 400 + "k", "9" * 5000, "9" * 5000 + "K", "1\n2"],
)  # fmt: skip
def test_what_vllm_refuses_is_refused(text: str) -> None:
    """What vLLM cannot read is the user's mistake, told in one short line that says what it accepts."""
    with pytest.raises(BadInput, match="vLLM accepts a plain integer") as raised:
        parse_vllm_integer(text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 250


def test_auto_is_left_to_vllm_and_a_refusal_names_the_way_out() -> None:
    """`auto` is -1, another word is none; 25.6G is refused as vLLM refuses it, and the answer names 25.6g."""
    assert [parse_vllm_integer_or_auto(text) for text in ("auto", " AUTO ", "-1", "8k", "8K")] == [-1, -1, -1, 8000, 8192]
    for text, says in (("automatic", "vLLM accepts"), ("25.6G", r"25\.6g")):
        with pytest.raises(BadInput, match=says):
            parse_vllm_integer_or_auto(text)


@given(st.integers(0, 10**15), st.one_of(st.none(), st.integers(0, 999_999)), st.sampled_from("kKmMgGtT"))
@example(8, 2, "k")
def test_suffixes_follow_the_rule(whole: int, fraction: int | None, suffix: str) -> None:
    """Small letters multiply the nearest float by a power of 1000 and cut; capitals multiply whole numbers by 1024s."""
    number = str(whole) if fraction is None else f"{whole}.{fraction}"
    thousands = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    if suffix in thousands:
        nearest = Decimal(float(Decimal(number)))
        assert parse_vllm_integer(number + suffix) == math.trunc(float(nearest) * thousands[suffix])
    elif fraction is None:
        assert parse_vllm_integer(number + suffix) == whole << (10 * (1 + "KMGT".index(suffix)))
    else:
        with pytest.raises(BadInput):
            parse_vllm_integer(number + suffix)


@given(st.text(max_size=30))
def test_any_text_is_an_integer_or_bad_input(text: str) -> None:
    """Without a suffix the answer is Python's own int(), and nothing but BadInput is ever raised."""
    try:
        value = parse_vllm_integer(text)
    except BadInput:
        with pytest.raises(ValueError, match="invalid literal"):
            int(text.strip())
    else:
        assert text.strip()[-1] in "kKmMgGtT" or value == int(text.strip())


OURS: dict[str, int] = dict(cases(".", "sizes"))


@each("text", [*OURS, "", " ", "-1", "nan", "inf", "GiB", "80 furlongs", "80G", "1e3", "1,5", "8 0", "9" * 99])
def test_parse_gib(text: str) -> None:
    """A plain number is GiB, a unit means what it says, a fraction of a byte is cut; all else is refused in one line.

    80G too, which means 80e9 to one reader and 80 GiB to the next.
    """
    with contextlib.nullcontext() if text in OURS else pytest.raises(BadInput, match="is not a size"):
        assert parse_gib(text) == OURS.get(text)


@each(("size", "text"), cases(".", "sizes_shown"))
def test_format_gib(size: int, text: str) -> None:
    """Sizes are written in the unit in which they can be read, counts with their thousands apart."""
    assert format_gib(size) == text
    assert [format_count(n) for n in (0, 999, 327680, -1000)] == ["0", "999", "327,680", "-1,000"]


@given(st.integers(-(2**60), 2**60).filter(bool), st.integers(0, 10**9), st.integers(1, 4096))
def test_only_nothing_is_written_as_zero_and_division_rounds_up(size: int, number: int, divisor: int) -> None:
    """A size that is not zero never looks like zero; so many parts hold a number, and one part less would not."""
    assert float(format_gib(size).split()[0].replace(",", "")) != 0
    parts = ceil_div(number, divisor)
    assert (parts - 1) * divisor < number <= parts * divisor == round_up(number, divisor)

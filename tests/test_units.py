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
    GIB,
    KIB,
    MIB,
    ceil_div,
    format_count,
    format_gib,
    parse_gib,
    parse_vllm_integer,
    parse_vllm_integer_or_auto,
    round_up,
)
from tests.each import each

VLLM = {
    "0": 0, "8192": 8192, "-1": -1, "+5": 5, " 12 ": 12, "1_000": 1000, "007": 7,
    "١٢": 12,  # int() and \d know every script's digits
    "1k": 1000, "1K": 1024, "2m": 2_000_000, "2M": 2 * 2**20, "1g": 10**9, "1G": 2**30, "1t": 10**12, "1T": 2**40,
    " 8k\n": 8000, "25.6k": 25_600, "0.5k": 500,
    "1.0005k": 1000, "1.9999k": 1999,  # toward zero
    "2.01k": 2009,  # 2.01 * 1000 is 2009.999... in floating point, and vLLM cuts
    "4.35m": 4_350_000,
    "9007199254740993k": 9007199254740992000,  # more digits than a float holds
}  # fmt: skip


@each(("text", "value"), VLLM.items())
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


OURS = {
    "80": 80 * GIB, " 80 GiB ": 80 * GIB, "80gib": 80 * GIB, "80GB": 80 * 10**9, "512MiB": 512 * MIB, "1.5TiB": 1536 * GIB,
    "79.2": 85040352460,  # 79.2 * 2**30 is 85040352460.8
    "64 KiB": 64 * KIB, "100b": 100, ".5": GIB // 2, "0": 0,
}  # fmt: skip


@each("text", [*OURS, "", " ", "-1", "nan", "inf", "GiB", "80 furlongs", "80G", "1e3", "1,5", "8 0", "9" * 99])
def test_parse_gib(text: str) -> None:
    """A plain number is GiB, a unit means what it says, a fraction of a byte is cut; all else is refused in one line.

    80G too, which means 80e9 to one reader and 80 GiB to the next.
    """
    with contextlib.nullcontext() if text in OURS else pytest.raises(BadInput, match="is not a size"):
        assert parse_gib(text) == OURS.get(text)


SHOWN = {
    0: "0 GiB", 80 * GIB: "80.0 GiB", 13207024435: "12.3 GiB", -13207024435: "-12.3 GiB", 2000 * GIB: "2,000.0 GiB",
    GIB // 2: "0.5 GiB", 50 * MIB: "50.0 MiB", -50 * MIB: "-50.0 MiB", 1: "1 B", 2048: "2,048 B",
}  # fmt: skip


@each(("size", "text"), SHOWN.items())
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

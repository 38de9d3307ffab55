"""The key `survive` of a gate's state: read by its types, and unknown where they are not what they should be."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.contained import KINDS, LONGEST_WHY, SITES, LastFailure, Survival, read_survival

STATE: dict[str, Any] = {
    "armed": True, "why": "", "contained": 3, "aborted": 0, "recomputed_tokens": 190000, "stalled_s": 1.7,
    "last": {"age_s": 12.1, "site": "forward", "tokens": 8192, "requests": 48, "asked_bytes": 2093796556,
             "free_bytes": None, "kind": ""},
    "tokens_per_step": {"now": 1024, "start": 8192}, "sequences": {"now": 256, "start": 256}, "limping": False, "storm": True,
}  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*STATE, *STATE["last"], "now"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_the_key_as_it_is_answered() -> None:
    """Every field, and None for a size that nobody knows."""
    assert read_survival(STATE) == Survival(
        True, "", 3, 0, 190_000, 1.7, LastFailure(12.1, "forward", 8192, 48, 2_093_796_556, None, ""), 1024, 8192, 256, 256,
        limping=False, storm=True,
    )  # fmt: skip


@pytest.mark.parametrize("found", [None, [], "armed", 1, True])
def test_no_table_is_no_survival(found: object) -> None:
    """An older plimsoll inside has no such key."""
    assert read_survival(found) is None


@given(found=st.dictionaries(st.sampled_from(list(STATE)), ANYTHING))
def test_wrong_types_are_unknown(found: dict[str, object]) -> None:
    """Whatever is answered: numbers that a count can be, words from the known ones, yes and no, or nothing."""
    survival = read_survival(found)
    assert survival is not None
    numbers = [value for name, value in survival._asdict().items() if name not in ("armed", "why", "last", "limping", "storm")]
    numbers += [] if survival.last is None else [value for value in survival.last if not isinstance(value, str)]
    assert all(value is None or (isinstance(value, float) and 0 <= value < math.inf) for value in numbers)
    assert all(value is None or isinstance(value, bool) for value in (survival.armed, survival.limping, survival.storm))
    assert len(survival.why) <= LONGEST_WHY
    assert survival.last is None or (survival.last.site in SITES and survival.last.kind in ("", *KINDS))


@pytest.mark.parametrize(
    ("tokens", "sequences", "is_shrunk"),
    [((1024, 8192), (256, 256), True), ((8192, 8192), (128, 256), True), ((8192, 8192), (256, 256), False),
     ((None, 8192), (1, None), False)],
)  # fmt: skip
def test_steps_are_shrunk_only_where_both_sizes_say_so(
    tokens: tuple[Any, Any], sequences: tuple[Any, Any], is_shrunk: bool
) -> None:
    """Tokens or sequences below their start; what is not known is not smaller."""
    found = Survival(tokens_now=tokens[0], tokens_start=tokens[1], sequences_now=sequences[0], sequences_start=sequences[1])
    assert found.is_shrunk is is_shrunk

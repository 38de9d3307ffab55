"""One test for many values is as strict as a case for each."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.each import each


def test_every_failure_is_named() -> None:
    """All values are tried, also across two lists and in pairs; those that fail are named; an empty list proves nothing."""
    seen = []

    @each("one", [1, 2, 3])
    @each("two", "ab", ids=str.upper)
    def odd(one: int, two: str) -> None:
        seen.append((one, two))
        assert one % 2, f"{one} is even"

    with pytest.raises(AssertionError, match=r"1 of 3 fail:\n2: AssertionError: 2 of 2 fail:\nA: AssertionError: 2 is even"):
        odd()
    assert len(seen) == 6

    @each(("one", "two"), [(1, 1), (2, 3)])
    def equal(one: int, two: int) -> None:
        assert one == two

    with pytest.raises(AssertionError, match=r"1 of 2 fail:\n\(2, 3\): AssertionError"):
        equal()

    @each("one", [])
    def never(one: int) -> None:
        raise KeyError(one)

    with pytest.raises(AssertionError, match="there is no one to try"):
        never()


@each("number", range(3))
def test_fixtures_are_passed_on(number: int, tmp_path: Path) -> None:
    """What the test asks for besides the values comes from pytest."""
    assert tmp_path.is_dir()
    assert number < 3
    assert [*inspect.signature(test_fixtures_are_passed_on).parameters] == ["tmp_path"]

"""Which release stands for a version."""

from __future__ import annotations

import pytest

from plimsoll.errors import BadInput
from plimsoll.vllm import versions
from plimsoll.vllm.versions import Version, engine_named, newest
from tests.each import cases, each


@each(
    ("text", "release", "is_exact", "note"),
    [
        *cases("vllm", "the_release_that_stands_for_a_version"),
        *((text, newest(), False, text) for text in ("0.1.dev5+g1234", "0.33.0.dev12+g0123abc", "nightly", "main")),
        *((text, newest(), False, f"{text} is newer") for text in ("99.0.0", "0.33.0")),
    ],
)
def test_the_release_that_stands_for_a_version(text: str | None, release: str, is_exact: bool, note: str | None) -> None:
    """A release that was read is exact; anything else is met by the nearest, is not called exact, and says so."""
    engine = engine_named(text)
    assert (engine.release, engine.is_exact) == (release, is_exact)
    assert engine.note is None if note is None else note in (engine.note or "")


@each("text", ["", "banana", "0.x", "1" * 40, "0.32.0; rm -rf /"])
def test_what_is_no_version_is_the_users_mistake(text: str) -> None:
    """One line and exit code 2, which names the option that is wrong."""
    with pytest.raises(BadInput, match=r"--from .* is not a version"):
        engine_named(text, "--from")


def test_versions_are_ordered_by_their_numbers_and_no_minor_is_missing() -> None:
    """0.9.0.1 after 0.9.0, 0.10 after 0.9; from 0.6 to 0.32 each names the wheel it was read from."""
    texts = ["0.9.0", "0.9.0.1", "0.9.1", "0.10.0", "0.10.1.1"]
    assert sorted(map(Version.read, reversed(texts))) == list(map(Version.read, texts))
    assert len({Version.read("0.25.1+cu130"), Version.read("0.25.1")}) == 1
    minors = {Version.read(release).release[1] for release in versions.wheels()}
    assert set(range(6, 33)) <= minors
    assert all(wheel.endswith(".whl") for wheel in versions.wheels().values())

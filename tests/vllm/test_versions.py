"""Which release stands for a version."""

from __future__ import annotations

import pytest

from plimsoll.errors import BadInput
from plimsoll.vllm import versions
from plimsoll.vllm.versions import Version, engine_named, newest


def test_without_a_version_the_newest_known_is_meant() -> None:
    """Nothing typed means the newest release that was read, exactly."""
    engine = engine_named(None)
    assert (engine.release, engine.is_exact, engine.note) == (newest(), True, None)


@pytest.mark.parametrize("text", ["0.32.0", "v0.32.0", "0.32", " 0.32.0 "])
def test_a_known_release_stands_for_itself(text: str) -> None:
    """Spellings of one release are that release."""
    engine = engine_named(text)
    assert (engine.release, engine.is_exact) == ("0.32.0", True)


@pytest.mark.parametrize("text", ["0.1.dev5+g1234", "0.33.0.dev12+g0123abc", "nightly", "main", "99.0.0", "0.33.0"])
def test_newer_and_development_builds_are_met_by_the_newest_known(text: str) -> None:
    """What we cannot know is treated as the newest release, is not called exact, and says so."""
    engine = engine_named(text)
    assert (engine.release, engine.is_exact) == (newest(), False)
    assert engine.note is not None
    assert text in engine.note


def test_a_build_of_a_release_is_that_release_and_a_fork_is_not_exact() -> None:
    """0.25.1+cu130 and v0.25.1-cu130 are 0.25.1; a foreign tag may have flags of its own."""
    engine = engine_named("0.25.1+cu130")
    assert (engine.release, engine.is_exact) == ("0.25.1", True)
    assert engine.note == "0.25.1+cu130 is a build of 0.25.1"
    engine = engine_named("0.25.1+acme.3")
    assert (engine.release, engine.is_exact) == ("0.25.1", False)
    assert (engine_named("v0.25.1-cu130").release, engine_named("v0.25.1-cu130").is_exact) == ("0.25.1", True)


def test_a_release_that_was_not_read_falls_back_to_the_one_before() -> None:
    """An unknown patch release is met by its predecessor, with a note."""
    engine = engine_named("0.19.9")
    assert (engine.release, engine.is_exact) == ("0.19.1", False)
    assert engine.note is not None


@pytest.mark.parametrize("text", ["0.32.0rc1", "0.32.0.post1"])
def test_what_was_not_read_is_not_exact(text: str) -> None:
    """A release candidate or a post-release may differ from the release; the note says so."""
    engine = engine_named(text)
    assert (engine.release, engine.is_exact) == ("0.32.0", False)
    assert engine.note is not None


def test_the_option_that_is_wrong_is_named() -> None:
    """A bad --from is not blamed on --vllm."""
    with pytest.raises(BadInput, match="--from 'banana'"):
        engine_named("banana", "--from")


@pytest.mark.parametrize("text", ["", "banana", "0.x", "1" * 40, "0.32.0; rm -rf /"])
def test_what_is_no_version_is_the_users_mistake(text: str) -> None:
    """Anything else is one line and exit code 2."""
    with pytest.raises(BadInput, match="is not a version"):
        engine_named(text)


def test_versions_are_ordered_by_their_numbers_and_no_minor_is_missing() -> None:
    """0.9.0.1 after 0.9.0, 0.10 after 0.9; from 0.6 to 0.32 each names the wheel it was read from."""
    texts = ["0.9.0", "0.9.0.1", "0.9.1", "0.10.0", "0.10.1.1"]
    assert sorted(map(Version, reversed(texts))) == list(map(Version, texts))
    assert Version("0.25.1+cu130") == Version("0.25.1")
    assert len({Version("0.25.1+cu130"), Version("0.25.1")}) == 1
    minors = {Version(release).release[1] for release in versions.wheels()}
    assert set(range(6, 33)) <= minors
    assert all(wheel.endswith(".whl") for wheel in versions.wheels().values())

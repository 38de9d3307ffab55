"""The list of what plimsoll.inside relies on."""

from __future__ import annotations

from plimsoll.vllm import versions
from plimsoll.vllm.extension_points import NEEDS, TESTED, InsidePart, Weight


def test_every_need_says_what_it_is_for_and_what_is_lost() -> None:
    """No entry is half written, and no part would be promised without any need; what is called tested is a release."""
    assert len({need.name for need in NEEDS}) == len(NEEDS)
    for need in NEEDS:
        assert need.purpose
        assert need.lost
        assert not need.lost.endswith(".")
        assert bool(need.ways) != bool(need.forbidden)
        assert need.weights
        assert bool(need.unneeded_without) == bool(need.unneeded_because)
    for part in InsidePart:
        assert any(need.weights.get(part) is Weight.MUST for need in NEEDS)
    assert set(TESTED) <= set(versions.wheels())

"""What the released wheels make of plimsoll.inside."""

from __future__ import annotations

import itertools

import pytest

from plimsoll.vllm import versions
from plimsoll.vllm.extension_points import NEEDS, InsidePart, NeedState, answers_in, stretches, verdicts
from plimsoll.vllm.versions import Behaviour
from tests.each import each


@each("release", versions.wheels())
def test_every_release_has_an_answer_for_every_need(release: str) -> None:
    """The table is whole: a need that was added since must be read from the wheels again."""
    assert [answer.name for answer in answers_in(release)] == [need.name for need in NEEDS]


def test_the_newest_release_takes_everything() -> None:
    """0.32.0 has all that is relied on."""
    assert all(answer.state is NeedState.FOUND for answer in answers_in("0.32.0"))


@pytest.mark.parametrize(
    ("release", "part", "works"),
    [
        ("0.25.1", InsidePart.RECORDER, "yes"),
        ("0.12.0", InsidePart.GATE, "yes"),
        ("0.8.4", InsidePart.GATE, "partly"),  # AsyncLLM.collective_rpc came with 0.8.5
        ("0.8.5", InsidePart.GATE, "yes"),
        ("0.7.3", InsidePart.PROBE, "no"),  # worker extensions came with 0.8.0
    ],
)
def test_verdicts_that_were_seen_by_hand(release: str, part: InsidePart, works: str) -> None:
    """Turning points that a person found in the sources are found by the rules too."""
    assert next(v for v in verdicts(answers_in(release), NEEDS) if v.part is part).works == works


def test_stat_loggers_come_by_entry_point_since_0_11_1() -> None:
    """Earlier releases get the recorder from the gate."""
    notes = {release: next(a.note for a in answers_in(release) if a.name == "stat loggers") for release in ("0.11.0", "0.11.1")}
    assert "by the gate" in notes["0.11.0"]
    assert "entry point" in notes["0.11.1"]


def test_stretches_cover_every_release_once() -> None:
    """From the oldest that is spoken of to the newest, without a gap, and neighbours differ."""
    found = stretches()
    releases = [release for release in versions.wheels() if Behaviour.WORKER_EXTENSIONS.is_in(release)]
    assert found[0].first == releases[0]
    assert found[-1].last == releases[-1]
    for before, after in itertools.pairwise(found):
        assert releases.index(after.first) == releases.index(before.last) + 1
        assert (before.verdicts, before.evidence) != (after.verdicts, after.evidence)

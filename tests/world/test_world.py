"""Guard in a simulated world: a few hundred seeds, deliberate bugs, and what seeds have found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.each import each, times
from tests.world import faults
from tests.world.bugs import BUGS, first_noticed
from tests.world.world import LINES, play, quick_folder

SEEDS = times(150, 1_000)  # `make soak` plays 100,000 beside this
EASY = {"look for idleness once": 60, "never put it back": 40}  # bugs that few seeds notice


@pytest.mark.once
@pytest.mark.timeout(1_200)
def test_no_seed_ends_in_a_violation() -> None:
    """Whatever fails: nothing that serves is stopped, nothing is lost by guard, and what is broken is mended or told."""
    with quick_folder() as folder:
        wrong = [str(story) for seed in range(SEEDS) if (story := play(seed, folder)).wrong]
    assert not wrong, f"{len(wrong)} of {SEEDS} seeds:\n" + "\n\n".join(wrong[:2])


@pytest.mark.timeout(1_200)
@each("name", list(EASY))
def test_a_deliberate_bug_is_noticed(name: str) -> None:
    """With a bug put into guard a seed ends in a violation; `python -m tests.world 0 --count 2000 --bugs` tries all of them."""
    story = first_noticed(name, range(EASY[name]))
    assert story is not None, f"{name}: nothing was noticed in {EASY[name]} seeds"


def test_a_story_is_short_and_the_same_each_time() -> None:
    """A seed tells the same story in every process, whatever order its sets have, and in at most 40 lines."""
    program = "from tests.world.world import play; print(play(7), *play(11).lines, sep=chr(10))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": number, "PYTHONPATH": ":".join(sys.path)}, check=True,
            capture_output=True, text=True, timeout=100,
        ).stdout
        for number in ("1", "2")
    }  # fmt: skip
    assert len(told) == 1
    assert len(str(play(7)).splitlines()) <= LINES


def test_every_fault_is_drawn() -> None:
    """Each kind of fault comes in the first seeds, and there are ten bugs or more."""
    from tests.world.world import World

    drawn = set()
    with quick_folder() as folder:
        for seed in range(SEEDS):
            (folder / str(seed)).mkdir()
            drawn |= {what.partition(", ")[2] for _, what, _ in faults.draw_faults(World(seed, folder / str(seed)))}
    assert drawn == {fault.__name__.replace("_", " ") for fault, weight in faults.FAULTS.items() if weight}
    assert len(BUGS) >= 10

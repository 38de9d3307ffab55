"""Guard in a simulated world: a few hundred seeds, deliberate bugs, and what seeds have found."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.each import each, times
from tests.world.bugs import BUGS, first_noticed
from tests.world.engine import Core
from tests.world.faults import FAULTS, Draw, Fault, draw_faults, scripted
from tests.world.world import LINES, Setting, World, play, quick_folder

SEEDS = times(100, 1_000)  # `make soak` plays 100,000 beside this
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
    drawn = set()
    with quick_folder() as folder:
        for seed in range(300):
            (folder / str(seed)).mkdir()
            drawn |= {what.partition(": ")[2] for _, what, _ in draw_faults(World(seed, folder / str(seed)))}
    assert drawn == set(FAULTS)
    assert len(BUGS) >= 10


# What seeds have found


def told(setting: Setting, *faults: tuple[float, str]) -> str:
    """The story of these faults of the first engine and the first guard; evidence takes its longest."""

    def script(world: World) -> list[Fault]:
        draw = Draw(world, random.Random(1))
        draw.engine, draw.host = world.engines[0], world.hosts[0]
        return [scripted(at_s, name, draw) for at_s, name in faults]

    stories = [play(seed, setting=setting, script=script) for seed in range(5)]  # each has its own times
    assert not any(story.wrong for story in stories), "\n".join(map(str, stories))
    return "\n".join(line for story in stories for line in story.lines)


def test_a_process_that_an_operator_starts_meanwhile_is_not_stopped() -> None:
    """It crashed, and somebody starts it while guard keeps the evidence: what runs then is not what guard came to stop."""
    story = told(Setting(busy=0.0, has_gate=False), (30.0, "crash"), (50.0, "operator starts"))
    assert "a new process is already running: nothing to stop" in story


def test_a_hang_is_told_although_a_step_was_made_while_it_began() -> None:
    """A page that was old until then shows a step of long ago: that is no sign that the engine is merely busy."""
    story = told(Setting(busy=0.0, has_gate=False), (30.0, "old page"), (31.0, "core hangs"))
    assert "canary requests in a row got no answer" in story


def test_a_hang_after_a_long_step_is_told_after_three_times_its_length() -> None:
    """A step of 50 s is shorter than a failure (60 s), so it is the engine's own: no step in 150 s is told, and not 60."""

    def script(world: World) -> list[Fault]:
        engine = world.engines[0]
        long_step = (31.0, "e0: a step of 50 s", lambda: engine.become(Core.CALLS, 50.0))
        return [long_step, (141.0, "e0: it hangs", lambda: engine.become(Core.HANGS))]

    story = play(1, setting=Setting(canary_s=None, has_gate=False, busy=0.3), script=script)
    assert not story.wrong, story
    assert any("no step in 15" in line for line in story.lines), "\n".join(story.lines)

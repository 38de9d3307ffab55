"""Guard in a simulated world: a few seeds, deliberate bugs, and what seeds have found."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from plimsoll.guard.act.journal_entry import OPENED
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.adapters.haproxy import FORCED_DRAIN
from plimsoll.guard.daemon.journal import Journal
from tests.each import each, times
from tests.world.bugs import BUGS, first_noticed
from tests.world.engine import Core
from tests.world.faults import FAULTS, RARE, Draw, Fault, by_guardctl, draw_faults, scripted
from tests.world.surroundings import Link
from tests.world.world import LINES, Setting, World, play, quick_folder

SEEDS = times(30, 1_000)  # `make soak` plays 100,000 beside this
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


def test_a_story_is_short_and_the_same_each_time_and_every_fault_is_drawn() -> None:
    """Whatever order its sets have, in at most 40 lines; each kind of fault comes in the first seeds, and ten bugs or more."""
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
    drawn = set()
    with quick_folder() as folder:
        for seed in range(300):
            (folder / str(seed)).mkdir()
            drawn |= {what.partition(": ")[2] for _, what, _ in draw_faults(World(seed, folder / str(seed)))}
    assert drawn == {*FAULTS, *RARE}
    assert len(BUGS) >= 10


# What seeds have found


ONCE_WRONG: dict[int, str] = yaml.safe_load(Path(__file__).with_name("seeds.yaml").read_text(encoding="utf-8"))


@each("seed", list(ONCE_WRONG))
def test_a_seed_that_once_ended_in_a_violation_ends_well(seed: int) -> None:
    """What was wrong with guard, or with what the world asked of it, stays mended."""
    with quick_folder() as folder:
        story = play(seed, folder)
    assert not story.wrong, f"{ONCE_WRONG[seed]}\n{story}"


def told(setting: Setting, *faults: tuple[float, str]) -> str:
    """The story of these faults of the first engine and the first guard; evidence takes its longest."""

    def script(world: World) -> list[Fault]:
        draw = Draw(world, random.Random(1))
        draw.engine, draw.host = world.engines[0], world.hosts[0]
        return [scripted(at_s, name, draw) for at_s, name in faults]

    stories = [play(seed, setting=setting, script=script) for seed in range(5)]  # each has its own times
    assert not any(story.wrong for story in stories), "\n".join(map(str, stories))
    return "\n".join(line for story in stories for line in story.lines)


def test_a_process_that_an_operator_starts_meanwhile_is_not_stopped_and_a_hang_is_told_after_an_old_page() -> None:
    """What runs then is not what guard came to stop; a step of long ago is no sign that the engine is merely busy."""
    story = told(Setting(busy=0.0, has_gate=False), (30.0, "crash"), (50.0, "operator starts"))
    assert "a new process is already running: nothing to stop" in story
    story = told(Setting(busy=0.0, has_gate=False), (30.0, "old page"), (31.0, "core hangs"))
    assert "canary requests in a row got no answer" in story


def story_of(setting: Setting, *faults: tuple[float, Callable[[World], None]], until_s: float = 300.0) -> str:
    """The story of what is done to the world at these times, and then nothing for a while; it must end well."""

    def script(world: World) -> list[Fault]:
        rows = (*faults, (until_s, lambda world: None))  # noqa: ARG005
        return [(at_s, f"fault {number}", functools.partial(do, world)) for number, (at_s, do) in enumerate(rows)]

    story = play(1, setting=setting, script=script)
    assert not story.wrong, story
    return "\n".join(story.lines)


def test_who_asks_for_a_restart_of_an_unseen_engine_is_told_what_is_lost() -> None:
    """Guard's way to it is cut and no other witness knows: a person's word counts, and the answer says what it costs."""

    def begin(world: World) -> None:
        world.network.links["g0", "e0"] = Link(is_cut=True, rejects=True)
        world.engines[0].take(-1, 400.0)

    def restart(world: World) -> None:
        by_guardctl(Draw(world, random.Random(1)), "restart")

    setting = Setting(engines=1, busy=0.0, balancer="readiness", knows_how=False)
    story = story_of(setting, (40.0, begin), (150.0, restart))
    assert "nothing proves that it serves nobody, and requests there are lost" in story
    assert "e0: process 2 is started by g0" in story


def test_a_hang_after_a_long_step_is_told_after_three_times_its_length() -> None:
    """A step of 50 s is shorter than a failure (60 s), so it is the engine's own: no step in 150 s is told, and not 60."""
    story = story_of(
        Setting(canary_s=None, has_gate=False, busy=0.3),
        (31.0, lambda world: world.engines[0].become(Core.CALLS, 50.0)),
        (141.0, lambda world: world.engines[0].become(Core.HANGS)),
    )
    assert "no step in 15" in story


def test_a_drain_is_undone_when_the_balancer_finds_the_other_one_down() -> None:
    """Guard still reaches the other engine, the balancer does not: the one that leaves is the last that serves."""

    def restart(world: World) -> None:
        draw = Draw(world, random.Random(1))
        draw.engine = world.engines[1]
        by_guardctl(draw, "restart")

    story = story_of(Setting(busy=0.3), (60.0, restart), (86.0, lambda world: world.proxy.cut.add("e0")))
    assert "idle: e0 is out of rotation" in story
    assert "restart undone" in story


def test_an_engine_that_guard_gave_up_on_comes_back_once_it_has_recovered() -> None:
    """Its start took longer than guard waits: when it is well for as long as a probation lasts, it is in rotation again."""

    def slow_start(world: World) -> None:
        world.engines[0].start_s = world.setting.act.start_within_s + 200.0
        world.engines[0].die("crash")

    act = ActPolicy(start_within_s=100.0, start_still_s=60.0, probation_s=30.0)
    troubles: list[str] = []
    warned = (490.0, lambda world: troubles.extend(one.text for one in world.hosts[0].guard._troubles.now()))
    story = story_of(Setting(busy=0.3, act=act), (30.0, slow_start), warned, until_s=500.0)
    assert "restart stuck: needs attention" in story
    assert "e0: back in rotation, since it recovered after guard gave up on it" in story
    assert "e0: no longer needs attention" in story
    assert troubles == ["its last start took 301 s, and guard gives one up after 100 s: set start_within in [act]"]


def test_a_hang_during_an_operators_pause_is_told() -> None:
    """The gate goes on saying that it is paused, and the resume never answers: what waits there is told all the same."""
    faults = (
        (60.0, lambda world: setattr(world.engines[0], "is_paused", True)),
        (90.0, lambda world: world.engines[0].become(Core.HANGS)),
    )
    for has_gate in (True, False):
        story = story_of(Setting(engines=1, busy=0.3, has_gate=has_gate), *faults)
        assert "e0: the engine looks stuck, and nothing has proved it" in story


def test_an_action_of_another_version_is_told_and_what_it_took_out_comes_back() -> None:
    """Guard was killed in a drain and upgraded: the next one does not know those steps, and leaves nobody out for ever."""

    def upgrade(world: World) -> None:
        host = world.hosts[0]
        host.life.is_dead = True
        host.close()
        with Journal(host.folder / "guard.journal", clock=host.wall) as journal:
            fields = {"grade": "restart", "kind": "asked", "steps": ["lock", "cordon", "drain"]}
            journal.append(OPENED, engine="e0", action="old", fields=fields)
        world.proxy.admin["e0"] = FORCED_DRAIN
        host.start()

    story = story_of(Setting(busy=0.3, act=ActPolicy(probation_s=30.0)), (60.0, upgrade))
    assert "needs attention: another version of guard began it, with steps that this one does not know" in story
    assert "e0: back in rotation, since it recovered after guard gave up on it" in story


def test_streams_that_the_balancer_counts_at_their_end_are_no_silence() -> None:
    """Guard is cut off and HAProxy's check times out, while a long answer flows: nobody knows that, and it is told."""

    def cut(world: World) -> None:
        link = world.network.link("g0", "e0")
        link.is_cut = link.rejects = True
        world.proxy.cut.add("e0")
        world.engines[0].take(-1, 400.0)

    setting = Setting(busy=0.0, has_gate=False, knows_how=False, canary_s=None, contstats=False)
    story = story_of(setting, (60.0, cut))
    assert "counts their bytes only at their end (option contstats)" in story


def ahead(seconds: float) -> Callable[[World], None]:
    return lambda world: setattr(world.hosts[0], "ahead_s", seconds)


def crash(world: World) -> None:
    world.engines[0].die("crash")


def test_a_clock_that_jumps_is_told() -> None:
    """Ahead or back, by more than a minute: budgets count by it, so somebody hears of it, and it ends by itself."""
    for jump_s, text in ((7_200.0, "jumped ahead by 2.0 h"), (-1_000.0, "is 16 min behind guard's journal"), (20.0, "")):
        story = story_of(Setting(busy=0.0), (40.0, ahead(jump_s)), until_s=4_000.0 if text else 400.0)
        assert (f"the clock of this machine {text}" in story) is bool(text), story
        assert ("guard can act again" in story) is bool(text)


def test_a_restart_from_a_later_clock_is_told_and_spends_no_later_budget() -> None:
    """It was written while the clock was a year ahead; set right, the next crash is acted on, and the journal's times told."""
    act = ActPolicy(restarts_per_hour=3, backoff_s=30.0, probation_s=20.0)
    faults = (30.0, ahead(3.2e7)), (40.0, crash), (300.0, ahead(0.0)), (500.0, crash)
    story = story_of(Setting(busy=0.0, act=act), *faults, until_s=800.0)
    assert story.count("e0: restart completed") == 2
    assert "the clock of this machine is 370.4 days behind guard's journal" in story


@pytest.mark.real
def test_many_seeds_are_played_on_several_cores() -> None:
    """The command of `make soak` hands seeds to processes of its own and counts them all."""
    command = [sys.executable, "-m", "tests.world", "0", "--count", "60", "--cores", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("60 seeds from 0, 0 violations")

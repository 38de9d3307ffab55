"""The article's sidecar, and the comparison with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lab.article import measure
from lab.article.fleet import WatchedFleet
from lab.article.incidents import INCIDENTS
from lab.article.sidecar import Marks, Reading, Sidecar, World, read_page
from plimsoll.guard.config import read_guard_config
from plimsoll.guard.judge.policy import THRESHOLDS, read_policy
from tests.each import each

CAPTURES = Path(__file__).parents[1] / "captures"
WELL = Reading(0.40, 10, 0)
FULL = Reading(0.96, 10, 0)
QUEUE = Reading(0.40, 10, 21)
BOTH = Reading(0.99, 10, 50)
IDLE = Reading(0.0, 0, 0)


class Machine:
    """An engine whose page is what the test says, and a clock that moves only while the sidecar sleeps."""

    def __init__(self, *pages: Reading | Exception, then: Reading | Exception = WELL) -> None:
        self.pages, self.then = list(pages), then
        self.now_s = 1_000.0
        self.told: list[str] = []
        self.restarted_at_s: list[float] = []

    def read(self) -> Reading:
        """The next page; the last one for ever."""
        page = self.pages.pop(0) if self.pages else self.then
        if isinstance(page, Exception):
            raise page
        return page

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def turned(self, times: int, scale: float = 1.0) -> Machine:
        """After so many turns of a sidecar."""
        restart = lambda: self.restarted_at_s.append(self.now_s)  # noqa: E731
        sidecar = Sidecar(World(self.read, lambda: self.now_s, self.sleep, restart, self.told.append), scale)
        for _ in range(times):
            sidecar.turn()
        return self


def test_three_marks_in_the_window_are_enough_and_an_error_is_none() -> None:
    """Whichever rule they come from; one of 300 s ago does not count, and an engine that does not answer is never restarted."""
    for reading, count in (
        (WELL, 0), (FULL, 1), (QUEUE, 1), (BOTH, 2), (IDLE, 0),
        (Reading(0.95, 10, 20), 0),  # neither is over its bound
        (Reading(0.0, 0, 1), 1),  # one that waits while nobody runs is more than twice as many
    ):  # fmt: skip
        assert reading.marks == count
    marks = Marks()
    assert not marks.see(FULL, 0.0)
    assert not marks.see(QUEUE, 30.0)
    assert marks.see(FULL, 60.0)
    assert Marks().see(BOTH, 0.0) is False
    both = Marks()
    both.see(BOTH, 0.0)
    assert both.see(BOTH, 30.0)
    marks = Marks()
    marks.see(FULL, 0.0)
    marks.see(FULL, 30.0)
    assert not marks.see(FULL, 300.0)
    assert marks.see(FULL, 329.0)
    pages = (FULL, OSError("refused"), ValueError("no page"), FULL, TimeoutError(), FULL)
    assert Machine(*pages).turned(5).told == ["mark", "mark"]
    machine = Machine(*pages).turned(6)
    assert machine.told[2:4] == ["mark", "decided"]
    assert len(machine.restarted_at_s) == 1
    machine = Machine(then=ConnectionRefusedError()).turned(50)
    assert (machine.told, machine.restarted_at_s) == ([], [])


def test_it_looks_every_30_s_waits_60_s_at_most_and_reads_the_page_of_a_real_engine() -> None:
    """Also for an engine that gives no answer; after a restart its marks are forgotten; a scale divides every time alike."""
    for while_it_waits in (FULL, OSError("refused")):
        machine = Machine(FULL, FULL, FULL, then=while_it_waits).turned(3)
        assert (machine.restarted_at_s, machine.told[-2:]) == ([1_120.0], ["not idle", "restarted"])
    assert Machine().turned(4).now_s == 1_120.0
    machine = Machine(FULL, FULL, FULL, WELL, WELL, IDLE, then=WELL).turned(3)
    assert (machine.restarted_at_s, machine.told[-2:]) == ([1_062.0], ["idle", "restarted"])
    assert [len(Machine(then=FULL).turned(times).restarted_at_s) for times in (5, 6)] == [1, 2]
    machine = Machine(then=FULL).turned(3, scale=10.0)
    assert machine.restarted_at_s == [pytest.approx(1_012.0, abs=0.2)]
    assert machine.now_s == pytest.approx(1_015.0, abs=0.2)
    assert read_page((CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt").read_text(encoding="utf-8")) == Reading(0.0, 0.0, 0.0)
    page = 'vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.97\nvllm:num_requests_running{engine="0"} 3.0\n'
    more = 'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\nvllm:num_requests_waiting{engine="0"} 7.0\n'
    assert read_page(page + more) == Reading(0.97, 3.0, 7.0)
    with pytest.raises(ValueError, match="missing"):
        read_page("<html>")  # and so nothing happens


BY_NAME = {one.name: one for one in INCIDENTS}
ALL, WITHOUT_C = {"a": True, "b": True, "c": True}, {"a": True, "b": True, "c": False}
FIRST = {"a": 1, "b": 2, "c": 3}


def seen(at_s: float, takes_work: dict[str, bool] | None = None, c: int = 3, under_way: int = 3) -> measure.Seen:
    """The fleet at a moment, well unless said otherwise."""
    return measure.Seen(at_s, ALL if takes_work is None else takes_work, {**FIRST, "c": c}, under_way)


@each("scale", [1.0, 5.0, 20.0])
def test_guard_has_its_own_defaults_but_for_the_scale(tmp_path: Path, scale: float) -> None:
    """With scale 1 every number is what guard has without a word; with another, that divided by it or the least it takes."""
    fleet = WatchedFleet(tmp_path, "guard", scale, use_haproxy=False)
    path = tmp_path / "plimsoll.toml"
    path.write_text(fleet.config(), encoding="utf-8")
    found = read_guard_config(str(path))
    assert [engine.name for engine in found.engines] == ["a", "b", "c"]
    policy = read_policy(tomllib.loads(fleet.config())["policy"])
    assert policy.every_s == max(1.0, 5.0 / scale)
    for knob in THRESHOLDS:
        expected = max(knob.low, knob.default / scale) if knob.unit == "s" else knob.default
        assert policy.number(knob.kind, knob.name) == pytest.approx(expected), knob


def test_figures_of_a_scene_are_what_the_balancer_and_the_processes_say() -> None:
    """Out of service from the incident on, for good; one that hangs, until its process is another; the rest is unknown."""
    rows = [seen(-5, WITHOUT_C), seen(-1), seen(4), seen(6, WITHOUT_C), seen(8, WITHOUT_C), seen(10, {}), seen(12)]
    assert measure.out_of_service_s(BY_NAME["burst"], rows, FIRST) == {"a": 0.0, "b": 0.0, "c": 4.0}
    assert measure.fewest_in_service(BY_NAME["burst"], rows, FIRST) == 2
    rows = [seen(-1), seen(2), seen(4), seen(6, c=9), seen(8, c=9)]
    assert measure.out_of_service_s(BY_NAME["hang"], rows, FIRST) == {"a": 0.0, "b": 0.0, "c": 4.0}
    assert measure.whole_again_s(BY_NAME["hang"], rows, FIRST) == 6
    assert measure.out_of_service_s(BY_NAME["burst"], rows, FIRST)["c"] == 0.0
    burst = BY_NAME["burst"]
    many = burst.usual + 1
    assert measure.whole_again_s(burst, [seen(1), seen(2)], FIRST) == 0.0
    assert measure.whole_again_s(burst, [seen(1, under_way=many), seen(2), seen(3, WITHOUT_C), seen(4)], FIRST) == 4
    assert measure.whole_again_s(burst, [seen(1), seen(2, under_way=many)], FIRST) is None
    assert measure.restarts([seen(1), seen(2, c=7), seen(3, c=7), seen(4, c=8)], FIRST) == {"a": 0, "b": 0, "c": 2}
    words = [measure.Word(-3, "a", "notice", "x"), measure.Word(9, "a", "act", "restart"), measure.Word(5, "b", "notice", "y")]
    assert measure.first_s(words, "notice", "act") == 5
    assert measure.first_s(words, "act") == 9
    assert measure.first_s(words[:1], "notice") is None
    assert measure.percentile([], 0.99) is None
    assert measure.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert measure.peaks([seen(1)])["kv"] is None
    row = measure.Seen(1, ALL, FIRST, 3, {"a": (0.97, 3, 9, 1), "b": (0.5, 4, 0, 0)})
    assert measure.peaks([row]) == {"kv": 0.97, "running": 4, "waiting": 9, "preemptions": 1, "looks_with_a_full_cache": 1.0}

"""The article's sidecar as it was written anew: it does what the article says, no more and no less."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.article.sidecar import Marks, Reading, Sidecar, World, read_page

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

    def sidecar(self, scale: float = 1.0) -> Sidecar:
        world = World(
            self.read, lambda: self.now_s, self.sleep, lambda: self.restarted_at_s.append(self.now_s), self.told.append
        )
        return Sidecar(world, scale)


@pytest.mark.parametrize(
    ("reading", "marks"),
    [
        (WELL, 0), (FULL, 1), (QUEUE, 1), (BOTH, 2), (IDLE, 0),
        (Reading(0.95, 10, 20), 0),  # neither is over its bound
        (Reading(0.0, 0, 1), 1),  # one that waits while nobody runs is more than twice as many
    ],
)  # fmt: skip
def test_each_of_its_two_rules_is_one_mark(reading: Reading, marks: int) -> None:
    """Over 95 % of the cache is one, more than twice as many waiting as running another."""
    assert reading.marks == marks


def test_three_marks_in_the_window_are_enough() -> None:
    """Whichever rule they come from; a mark of 300 s ago does not count."""
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


def test_on_an_error_nothing_happens() -> None:
    """No mark, no restart; an engine that does not answer is an error at every turn, and never restarted."""
    machine = Machine(FULL, OSError("refused"), ValueError("no page"), FULL, TimeoutError(), FULL)
    sidecar = machine.sidecar()
    for _ in range(5):
        sidecar.turn()
    assert machine.told == ["mark", "mark"]
    sidecar.turn()
    assert machine.told[2:4] == ["mark", "decided"]
    assert len(machine.restarted_at_s) == 1
    machine = Machine(then=ConnectionRefusedError())
    sidecar = machine.sidecar()
    for _ in range(50):
        sidecar.turn()
    assert (machine.told, machine.restarted_at_s) == ([], [])


def test_it_looks_every_30_s_and_waits_for_running_to_be_0() -> None:
    """After a restart its marks are forgotten, so the next one needs three more."""
    machine = Machine()
    sidecar = machine.sidecar()
    for _ in range(4):
        sidecar.turn()
    assert machine.now_s == 1_120.0
    machine = Machine(FULL, FULL, FULL, WELL, WELL, IDLE, then=WELL)
    sidecar = machine.sidecar()
    for _ in range(3):
        sidecar.turn()
    assert machine.restarted_at_s == [1_062.0]
    assert machine.told[-2:] == ["idle", "restarted"]
    machine = Machine(then=FULL)
    sidecar = machine.sidecar()
    for _ in range(5):
        sidecar.turn()
    assert len(machine.restarted_at_s) == 1
    sidecar.turn()
    assert len(machine.restarted_at_s) == 2


@pytest.mark.parametrize("while_it_waits", [FULL, OSError("refused")])
def test_it_waits_60_s_at_most(while_it_waits: Reading | Exception) -> None:
    """Traffic is not stopped, so that is the usual case; an engine that gives no answer is waited for as long."""
    machine = Machine(FULL, FULL, FULL, then=while_it_waits)
    sidecar = machine.sidecar()
    for _ in range(3):
        sidecar.turn()
    assert machine.restarted_at_s == [1_120.0]
    assert machine.told[-2:] == ["not idle", "restarted"]


def test_a_scale_divides_every_time_alike() -> None:
    """So that a scaled run decides as the real one would."""
    machine = Machine(then=FULL)
    sidecar = machine.sidecar(scale=10.0)
    for _ in range(3):
        sidecar.turn()
    assert machine.restarted_at_s == [pytest.approx(1_012.0, abs=0.2)]
    assert machine.now_s == pytest.approx(1_015.0, abs=0.2)


def test_it_reads_the_page_of_a_real_engine() -> None:
    """With the labels and the neighbours of the names as vLLM 0.32.0 prints them."""
    assert read_page((CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt").read_text(encoding="utf-8")) == Reading(0.0, 0.0, 0.0)
    page = 'vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.97\nvllm:num_requests_running{engine="0"} 3.0\n'
    more = 'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\nvllm:num_requests_waiting{engine="0"} 7.0\n'
    assert read_page(page + more) == Reading(0.97, 3.0, 7.0)


@pytest.mark.parametrize("page", ["", "<html>", 'vllm:kv_cache_usage_perc{engine="0"} 0.97\n', "vllm:num_requests_running x\n"])
def test_a_page_without_the_figures_is_an_error(page: str) -> None:
    """And so nothing happens."""
    with pytest.raises(ValueError, match=r"missing|could not convert"):
        read_page(page)

"""Results in a file that only grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.tune import runners
from plimsoll.tune.goodput import Failed, Job, Result, Traffic
from plimsoll.tune.runners import KeptRuns, on_cores, remembering, runner_on

TRAFFIC = Traffic(make_trace("t", [0, 0, 0], [40, 80, 20], [30, 40, 9]))
JOBS = [Job(EngineLimits(max_num_seqs=seats), StepTime()) for seats in (1, 2, 3)]


def test_what_is_kept_comes_back_to_the_digit(tmp_path: Path) -> None:
    """Scores and failures."""
    path = str(tmp_path / "kept")
    results = dict(on_cores(TRAFFIC, JOBS))
    with KeptRuns(path) as kept:
        for place, result in results.items():
            kept.add(f"run {place}", result)
        kept.add("lost", Failed("never ends"))
    with KeptRuns(path) as kept:
        assert kept.results == {**{f"run {place}": one for place, one in results.items()}, "lost": Failed("never ends")}
        assert kept.begun_with == 4


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    """A second call runs nothing, a longer one the rest; another version of the scheduler runs all."""
    path = str(tmp_path / "kept")
    ran: list[int] = []

    def counting(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        ran.append(len(jobs))
        yield from on_cores(traffic, jobs)

    with KeptRuns(path) as kept:
        first = dict(remembering(counting, kept, "1")(TRAFFIC, JOBS[:2]))
    with KeptRuns(path) as kept:
        second = dict(remembering(counting, kept, "1")(TRAFFIC, JOBS))
        dict(remembering(counting, kept, "2")(TRAFFIC, JOBS))
    assert ran == [2, 1, 3]
    assert {place: second[place] for place in first} == first
    assert second == dict(on_cores(TRAFFIC, JOBS))


def test_a_line_that_a_kill_cut_off_is_dropped_and_a_file_too_large_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next result does not grow on to it; what was not read is not taken for half a line: every result stays."""
    path = tmp_path / "kept"
    with KeptRuns(str(path)) as kept:
        kept.add("one", Failed("a"))
        kept.add("two", Failed("b"))
    before = path.read_bytes()
    with monkeypatch.context() as small:
        small.setattr(runners, "BYTES_MAX", len(before) - 9)
        with pytest.raises(BadInput, match="more than"), KeptRuns(str(path)):
            pass
    assert path.read_bytes() == before
    path.write_bytes(before[:-9])
    with KeptRuns(str(path)) as kept:
        assert kept.results == {"one": Failed("a")}
        kept.add("three", Failed("c"))
    with KeptRuns(str(path)) as kept:
        assert list(kept.results) == ["one", "three"]


def test_another_file_is_refused_and_not_touched(tmp_path: Path) -> None:
    """Nobody's notes are taken for results; an unknown place for runs is one line."""
    path = tmp_path / "notes"
    path.write_text("dear diary\n", encoding="utf-8")
    with pytest.raises(BadInput, match="line 1"), KeptRuns(str(path)):
        pass
    assert path.read_text(encoding="utf-8") == "dear diary\n"
    with pytest.raises(WorldFailed), KeptRuns(str(tmp_path / "no" / "such")):
        pass
    assert runner_on(None) is on_cores
    assert runner_on("local") is on_cores
    with pytest.raises(BadInput, match="ray"):
        runner_on("spark://x")

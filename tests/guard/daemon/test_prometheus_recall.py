"""What Prometheus remembers of one engine: only of the process that runs now, added up as guard adds up, never of another."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping

import pytest

from plimsoll.doctor.rules.trend_growth import MetricSeries
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard.config import PrometheusConfig
from plimsoll.guard.daemon import engine_figures as guard_recall
from plimsoll.guard.daemon.engine_figures import (
    STEP_S,
    PrometheusHistory,
    RecordedPast,
    growing_memory,
    matching_past,
    past_from_series,
    read_past,
)
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import Look, Reach, WorkerMemory
from tests.net.page_server import Handler, serving

GIB = float(1 << 30)
START = 10_000.0
TIMES = tuple(START + STEP_S * n for n in range(10))


def series(name: str, values: Mapping[float, float], **labels: str) -> MetricSeries:
    return MetricSeries(name, {"instance": "a:1", "job": "vllm", **labels}, tuple(values), tuple(values.values()))


def level(value: float) -> dict[float, float]:
    return dict.fromkeys(TIMES, value)


def test_workers_are_added_up_and_one_that_is_missing_leaves_a_hole() -> None:
    """held is what is allocated and what cannot be given back, of all workers; host memory is theirs, not the API server's."""
    some = {at: value for at, value in level(3 * GIB).items() if at != TIMES[4]}
    found = past_from_series(
        [
            series("process_start_time_seconds", level(START - 1)),
            series("process_resident_memory_bytes", level(GIB)),
            *(series("plimsoll_torch_allocated_bytes", level(10 * GIB), engine="0", worker=one) for one in "01"),
            series("plimsoll_torch_unreleasable_bytes", level(GIB), engine="0", worker="0"),
            series("plimsoll_torch_unreleasable_bytes", some, engine="0", worker="1"),
            *(series("plimsoll_worker_resident_bytes", level(2 * GIB), engine="0", worker=one) for one in "01"),
            series("vllm:num_requests_running", level(4.0), engine="0", model_name="m"),
            series("vllm:num_requests_running", level(5.0), engine="1", model_name="m"),
        ],
        START - 1,
    )
    assert [at for at, _ in found.points] == list(TIMES)
    assert found.points[0][1] == {"held": 24 * GIB, "host_resident": 4 * GIB, "running": 9.0}
    assert found.points[4][1] == {"host_resident": 4 * GIB, "running": 9.0}


def test_nothing_from_before_the_last_start() -> None:
    """By the process's own start; where the page has none, by a total that fell; where nothing tells, nothing at all."""
    starts = {at: 5_000.0 if n < 6 else TIMES[6] - 1 for n, at in enumerate(TIMES)}
    memory = series("process_resident_memory_bytes", level(GIB))
    found = past_from_series([series("process_start_time_seconds", starts), memory], TIMES[6] - 1)
    assert [at for at, _ in found.points] == list(TIMES[6:])
    assert past_from_series([series("process_start_time_seconds", starts), memory], TIMES[9]).points == ()
    tokens = {at: 100.0 * (n if n < 7 else n - 7) for n, at in enumerate(TIMES)}
    found = past_from_series([series("vllm:generation_tokens_total", tokens), memory], None)
    assert ([at for at, _ in found.points], found.tokens) == (list(TIMES[7:]), 200.0)
    assert past_from_series([memory], None).points == ()
    assert past_from_series([], 1.0) == RecordedPast(())
    twice = [series("process_resident_memory_bytes", level(GIB), job=job) for job in ("a", "b")]
    with pytest.raises(BadInput, match="several series"):  # two jobs that scrape one instance would be added up
        past_from_series([series("process_start_time_seconds", level(1.0)), *twice], 1.0)


def look(**more: object) -> Look:
    """The first answer, an hour after the last point by guard's own clock of 50,000."""
    return Look(50_000.0, TIMES[-1] + 60.0, Reach.ANSWERS, **more)  # type: ignore[arg-type]


def test_what_fits_is_handed_over_on_guards_own_clock() -> None:
    """The ages stay; a figure that is far from what the engine says now is another one, and is left out and said."""
    workers = (WorkerMemory("0/0", 0.0, allocated=10 * GIB, unreleasable=GIB, host_resident=2 * GIB),)
    points = tuple((at, {"held": 11 * GIB, "host_resident": 90 * GIB, "running": 1.0}) for at in TIMES)
    now = growing_memory(look(workers=workers))
    assert now == {"held": 11 * GIB, "host_resident": 2 * GIB}
    kept, why = matching_past(RecordedPast(points), look(workers=workers), now)
    assert kept[-1] == (50_000.0 - 60.0, {"held": 11 * GIB, "running": 1.0})
    assert kept[0][0] == 50_000.0 - 60.0 - 9 * STEP_S
    assert why == "its host_resident differs from the engine's own figure"
    alone = look(figures={"host_resident": 20 * GIB, "generation_tokens": 5.0})
    assert matching_past(RecordedPast(points), alone, growing_memory(alone)) == ([], ""), (
        "all its processes here, one of them there"
    )
    near = look(figures={"host_resident": 80 * GIB, "generation_tokens": 5.0})
    assert len(matching_past(RecordedPast(points, 5.0), near, growing_memory(near))[0]) == len(TIMES)
    assert matching_past(RecordedPast(points, 6.0), near, growing_memory(near)) == ([], ""), (
        "fewer tokens than it had made: another process"
    )


def test_an_engine_without_a_past_is_odd_only_if_it_should_have_one() -> None:
    """Who began a minute ago is not known there yet; who began long ago is called otherwise there."""
    figures = {"host_resident": GIB}
    assert matching_past(RecordedPast(()), look(figures=figures, started_unix_s=TIMES[-1]), figures) == ([], "")
    assert "no series of an engine" in matching_past(RecordedPast(()), look(figures=figures, started_unix_s=1.0), figures)[1]
    assert growing_memory(look()) == {}


def test_a_server_that_fails_is_one_trouble_and_is_not_asked_for_everybody() -> None:
    """One sentence for any number of engines; those who leave are forgotten."""
    asked: list[Mapping[str, str]] = []

    def fail(url: str, match: Mapping[str, str], started: float | None) -> RecordedPast:
        asked.append(match)
        raise WorldFailed(f"{url}: not there {started}")

    async def run() -> PrometheusHistory:
        recaller = PrometheusHistory(PrometheusConfig("http://p:9090", {"job": "vllm"}), fail)
        assert recaller.trouble == ""
        for number in range(50):
            found = look(figures={"host_resident": GIB}, started_unix_s=1.0)
            assert await recaller.fill(EngineConfig(f"e{number}", f"http://e{number}:1"), found) == []
        recaller.close()
        return recaller

    recaller = asyncio.run(run())
    assert asked == [{"job": "vllm", "instance": "e0:1"}]
    assert recaller.label == "prometheus http://p:9090"
    assert recaller.trouble.startswith("http://p:9090: not there 1.0; growth of e0, and of 49 more")
    recaller.keep({"e7"})
    assert "growth of e7 is judged" in recaller.trouble
    recaller.keep(set())
    assert recaller.trouble == ""


def test_a_server_that_never_answers_holds_up_the_first_judgement_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no past, and that is said."""
    monkeypatch.setattr(guard_recall, "WAIT_S", 0.1)
    is_over = threading.Event()

    def wait(url: str, match: Mapping[str, str], started: float | None) -> RecordedPast:
        is_over.wait(20)
        raise WorldFailed(f"{url} {match} {started}")

    async def run() -> PrometheusHistory:
        recaller = PrometheusHistory(PrometheusConfig("http://p:9090"), wait)
        assert await recaller.fill(EngineConfig("e", "http://e:1"), look(figures={"host_resident": GIB})) == []
        is_over.set()
        recaller.close()
        return recaller

    assert "it did not answer within 0.1 s; growth of e is judged" in asyncio.run(run()).trouble


def test_it_asks_for_a_day_in_steps_of_two_minutes() -> None:
    """One question, with the labels of the engine; an answer that is none is one line of trouble."""
    asked: list[str] = []

    def act(ask: Handler) -> None:
        asked.append(ask.path)
        values = {
            "process_start_time_seconds": [[9, "NaN"], [86_400, "86000"]],
            "process_resident_memory_bytes": [[86_400, "1e9"]],
        }
        rows = [{"metric": {"__name__": name, "instance": "a:1"}, "values": row} for name, row in values.items()]
        body = {"status": "success", "data": {"resultType": "matrix", "result": rows}}
        ask.answer(json.dumps(body).encode() if len(asked) == 1 else b"nothing")

    with serving(act) as server:
        ours = {"instance": "a:1", "job": 'x"y'}
        found = read_past(f"http://{server.host}/graph", ours, 86_000.0, clock=lambda: 86_450.0)
        assert found.points == ((86_400.0, {"host_resident": 1e9}),)
        with pytest.raises(WorldFailed):
            read_past(f"http://{server.host}", ours, None)
    assert asked[0].startswith("/api/v1/query_range?query=")
    assert "start=0.000&end=86400.000&step=120" in asked[0]

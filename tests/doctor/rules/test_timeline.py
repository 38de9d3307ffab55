"""A log as a story: lives, how far each came, which telling words were said."""

from __future__ import annotations

from plimsoll.doctor.rules.timeline import MILESTONES, LogTimeline, ServerProgress, read_timeline
from tests.doctor.log_maker import (
    ARGS,
    CAPTURED,
    CAPTURING,
    ENGINE_DEAD,
    LOADED,
    LOADING,
    MEASURED,
    NOT_STARTED,
    OOM,
    REQUEST,
    STARTED,
    VERSION,
    log,
    traceback,
)
from tests.each import each

ENGINE = "(EngineCore pid=2) INFO 11-15 09:00:01 [core.py:1] Initializing a V1 LLM engine (v0.25.1) with config: model='m'"
DUMP = "(EngineCore pid=2) ERROR 11-15 09:10:00 [a.py:1] Dumping input data for V1 LLM engine (v0.25.1) with config: model='m'"
FAILED_START = [VERSION, ARGS, ENGINE, LOADING, *traceback("v1/worker/gpu_worker.py:load_model"), NOT_STARTED]


def timeline(*parts: str | list[str]) -> LogTimeline:
    """The story of these lines."""
    return read_timeline(log(*parts))


@each(
    ("lines", "reached"),
    [
        ([], ServerProgress.UNKNOWN),
        (["hello"], ServerProgress.UNKNOWN),
        ([VERSION], ServerProgress.BEGUN),
        ([VERSION, LOADING], ServerProgress.LOADING),
        ([VERSION, LOADING, LOADED], ServerProgress.LOADED),
        ([VERSION, LOADING, LOADED, MEASURED], ServerProgress.MEASURED),
        ([VERSION, MEASURED, CAPTURING], ServerProgress.CAPTURING),
        ([VERSION, MEASURED, CAPTURED], ServerProgress.CAPTURED),
        (STARTED, ServerProgress.SERVING),
        ([LOADING], ServerProgress.LOADING),
        (["INFO 03-01 10:00:00 [executor_base.py:1] # cuda blocks: 27000, # CPU blocks: 2048"], ServerProgress.MEASURED),
        (["INFO 03-01 10:00:00 model_runner.py:1] Loading model weights took 14.9 GB"], ServerProgress.LOADED),
        ([REQUEST], ServerProgress.SERVING),
    ],
)
def test_milestones_tell_how_far_it_came(lines: list[str], reached: ServerProgress) -> None:
    """The furthest of what was said counts, in the wording of old and new releases."""
    told = timeline(lines)
    assert told.progress_at(len(told.log.lines)) is reached


def test_progress_is_asked_before_a_line() -> None:
    """Where a process has spoken of its own progress, that counts; once anyone serves, all do."""
    told = timeline(STARTED)
    reached = [told.progress_at(at).name for at in (0, 1, 3, 4, 5, 6, 7)]
    assert reached == ["UNKNOWN", "BEGUN", "LOADING", "LOADED", "MEASURED", "CAPTURED", "SERVING"]
    slow = "(Worker_TP1 pid=9) INFO 11-15 09:00:01 [gpu_model_runner.py:1] Starting to load model m..."
    told = timeline(VERSION, LOADING, LOADED, slow)
    assert told.progress_at(4, "Worker_TP1 pid=9") is ServerProgress.LOADING
    assert told.progress_at(4, "EngineCore pid=2") is ServerProgress.LOADED
    assert timeline(STARTED, slow).progress_at(9, "Worker_TP1 pid=9") is ServerProgress.SERVING


def test_code_in_a_traceback_is_no_milestone() -> None:
    """An indented quotation of vLLM's own source proves nothing."""
    assert timeline('    logger.info("Model loading took %.2f GiB", size)').milestones == []


def test_a_restart_in_one_file_is_a_second_life() -> None:
    """Also without an API server; what the first reached is forgotten."""
    told = timeline(FAILED_START, FAILED_START, VERSION, ARGS)
    assert [run.first for run in told.runs] == [0, len(FAILED_START), 2 * len(FAILED_START)]
    assert told.runs[0].end == told.runs[1].first
    assert told.runs[-1].end == len(told.log.lines)
    assert told.progress_at(2 * len(FAILED_START) + 1) is ServerProgress.BEGUN
    once = [ENGINE, LOADING, *traceback("v1/worker/gpu_worker.py:load_model")]
    assert len(timeline(once, once).runs) == 2


def test_one_server_that_introduces_itself_twice_lives_once() -> None:
    """The API server and its engine, two API servers, an engine that dumps its state as it dies."""
    assert len(timeline(VERSION, ARGS, ENGINE, LOADING).runs) == 1
    assert len(timeline(VERSION, VERSION.replace("pid=1", "pid=5"), ARGS, ENGINE).runs) == 1
    told = timeline(STARTED, DUMP, traceback("v1/worker/gpu_model_runner.py:execute_model"), ENGINE_DEAD)
    assert len(told.runs) == 1
    assert told.progress_at(len(told.log.lines)) is ServerProgress.SERVING


def test_work_after_a_line_is_seen() -> None:
    """Requests that were answered later show that the server outlived it; one straggler does not."""
    error = "(EngineCore pid=2) ERROR 11-15 09:05:00 [a.py:1] RuntimeError: one request was bad"
    told = timeline(STARTED, error, [REQUEST] * 3)
    assert told.serves_after(len(STARTED))
    assert not timeline(STARTED, error, REQUEST).serves_after(len(STARTED))
    assert not timeline(STARTED, error, ENGINE_DEAD).serves_after(len(STARTED))


def test_words_count_by_their_level() -> None:
    """An out-of-memory text somewhere within an informational line or a warning is no error.

    A line that is nothing but the exception counts also there: whoever logs another program's output calls all of it so.
    """
    prefix = "(EngineCore pid=2) {} 11-15 09:00:00 [a.py:1] "
    assert timeline(prefix.format("ERROR") + OOM).hits
    assert timeline(prefix.format("INFO") + OOM).hits
    for level in ("INFO", "WARNING", "DEBUG"):
        assert timeline(prefix.format(level) + f"note: {OOM}").hits == []
    assert timeline(prefix.format("WARNING") + OOM).hits
    assert timeline(prefix.format("DEBUG") + OOM).hits == []


def test_a_message_broken_over_lines_is_found_whole() -> None:
    """A terminal of 80 columns broke the telling sentence in two."""
    told = timeline(
        traceback(
            "v1/worker/utils.py:request_memory", error="ValueError: Free memory on device cuda:0 (1.0/79.1 GiB) on", who=""
        ),
        ["startup is less than desired GPU memory", "utilization (0.9, 71.2 GiB)."],
    )
    assert "free-memory-check" in {hit.text.name for hit in told.hits}


def test_milestones_are_told_apart() -> None:
    """No milestone's words hold another's of a different step before it: the first that matches decides."""
    for place, (needle, step) in enumerate(MILESTONES):
        for earlier, other in MILESTONES[:place]:
            assert earlier not in needle or other is step, needle

"""What may be the cause: known texts, allocations that failed and at which step, exceptions nobody has words for."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.root_cause import Symptom, find_symptoms, is_consequence
from plimsoll.doctor.rules.timeline import Hit, LoggedException, read_exceptions, read_timeline
from plimsoll.findings import Code
from tests.doctor.log_maker import (
    ARGS,
    ENGINE_DEAD,
    LOADED,
    LOADING,
    NOT_STARTED,
    OOM,
    REQUEST,
    STARTED,
    VERSION,
    log,
    traceback,
)

STEP = "v1/worker/gpu_model_runner.py:execute_model"


def symptoms(*parts: str | list[str]) -> tuple[list[Symptom], tuple[Hit, ...]]:
    """What these lines complain of, and what of it is noise."""
    timeline = read_timeline(log(*parts))
    return find_symptoms(timeline, timeline.hits, timeline.exceptions)


def raised(error: str, *frames: str, who: str = "(EngineCore pid=2) ") -> LoggedException:
    return read_exceptions(log(traceback(*frames, error=error, who=who)).lines)[0]


@pytest.mark.parametrize(
    "error",
    [
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError",
        "RuntimeError: cannot schedule new futures after shutdown",
        "asyncio.exceptions.CancelledError",
    ],
)
def test_what_only_passes_a_failure_on_is_a_consequence(error: str) -> None:
    """It is never the cause, and no complaint."""
    assert is_consequence(raised(error, STEP))
    assert symptoms(STARTED, traceback(STEP, error=error))[0] == []


def test_an_echo_of_a_workers_error_counts_only_alone() -> None:
    """ "Worker failed with error '...'" repeats what a worker said: it speaks only where the worker's own words are lost."""
    echo = "RuntimeError: Worker failed with error 'the moon is in the wrong place', please check the stack trace above"
    (alone,) = symptoms(STARTED, traceback(STEP, error=echo))[0]
    assert alone.confidence <= 0.5
    beside, _ = symptoms(STARTED, traceback(STEP, who="(Worker_TP0 pid=9) "), traceback(STEP, error=echo))
    assert {one.code for one in beside} == {Code.RUNTIME_FORWARD}


@pytest.mark.parametrize("error", [OOM, "RuntimeError: the moon is in the wrong place", "ValueError: bad"])
def test_what_failed_itself_is_no_consequence(error: str) -> None:
    """An error of its own."""
    assert not is_consequence(raised(error, STEP))


def test_an_unknown_exception_in_the_engine_is_a_complaint() -> None:
    """While loading it is the model's; one request's own failure ends nothing."""
    one, *_ = symptoms(STARTED, traceback(STEP, error="RuntimeError: the moon is in the wrong place"))[0]
    assert (one.code, one.text) == (Code.OTHER_ENGINE_ERROR, None)
    assert one.confidence < 0.7
    lines = traceback("model_executor/model_loader/loader.py:load_weights", error="AssertionError: shape mismatch in layer 3")
    one, *_ = symptoms(VERSION, LOADING, lines)[0]
    assert one.code is Code.OTHER_BAD_MODEL
    lines = traceback(
        "entrypoints/openai/serving_chat.py:create_chat_completion", error="TypeError: no", who="(APIServer pid=1) "
    )
    assert symptoms(STARTED, lines, [REQUEST] * 5)[0] == []


def test_code_that_a_traceback_quotes_is_no_complaint() -> None:
    """The quoted source may hold the very text of another error."""
    lines = traceback(STEP, error="RuntimeError: the moon is in the wrong place")
    lines.insert(-1, '(EngineCore pid=2)     raise ValueError("No available memory for the cache blocks.")')
    assert [one.code for one in symptoms(STARTED, lines)[0]] == [Code.OTHER_ENGINE_ERROR]


def test_the_figures_of_the_allocation_come_along() -> None:
    """What was asked for, what was free, and the step."""
    one, *_ = symptoms(STARTED, traceback(STEP))[0]
    assert one.oom is not None
    assert one.oom.tried == 2 << 30
    assert one.step is not None
    assert one.step.name == "forward"
    assert one.exception is not None


def test_the_step_is_told_by_whoever_knows_it() -> None:
    """The method that vLLM names, the frames of the same error told twice, or that the server never came to serve."""
    method = "(EngineCore pid=2) ERROR 11-15 09:00:04 [a.py:1] Error executing method 'determine_num_available_blocks'."
    one, *_ = symptoms(VERSION, ARGS, LOADING, LOADED, method, f"(EngineCore pid=2) ERROR 11-15 09:00:04 [a.py:1] {OOM}")[0]
    assert one.code is Code.STARTUP_PROFILE_RUN
    worker = traceback("v1/sample/sampler.py:compute_logprobs", who="(Worker_TP0 pid=10) ")
    found, _ = symptoms(STARTED, f"(EngineCore pid=2) {OOM}", worker, ENGINE_DEAD)
    assert {one.code for one in found} == {Code.RUNTIME_LOGITS}
    lines = traceback("v1/worker/gpu_model_runner.py:execute_model")
    one, *_ = symptoms(VERSION, ARGS, LOADING, LOADED, lines, NOT_STARTED)[0]
    assert one.code is Code.STARTUP_PROFILE_RUN
    assert one.confidence <= 0.75


def test_pinned_memory_is_the_hosts() -> None:
    """ "CUDA error: out of memory" from pin_memory is about the host's memory, not the card's."""
    one, *_ = symptoms(
        STARTED, traceback("worker/cache_engine.py:pin_memory", error="RuntimeError: CUDA error: out of memory")
    )[0]
    assert one.code is Code.HOST_OUT_OF_MEMORY


def test_an_error_in_a_warning_is_noise() -> None:
    """An out-of-memory error that a warning printed was overcome: it is named as noise."""
    lines = [f"(EngineCore pid=2) WARNING 11-15 09:00:00 [a.py:1] {line}" for line in traceback(STEP, who="")]
    found, _ = symptoms(STARTED, lines, [REQUEST] * 5)
    assert found == []


def test_complaints_come_in_the_order_of_the_log() -> None:
    """The first is the first."""
    found, _ = symptoms(STARTED, traceback(STEP), traceback("a.py:run_busy_loop", error="KeyError: 'b'"))
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert [found[0].code, found[-1].code] == [Code.RUNTIME_FORWARD, Code.OTHER_ENGINE_ERROR]

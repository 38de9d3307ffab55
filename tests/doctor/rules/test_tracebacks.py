"""Tracebacks put together again from what a log makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from plimsoll.doctor.rules.timeline import MOST_FRAMES, LoggedException, TracebackFrame, read_exceptions
from tests.doctor.log_maker import OOM, log, traceback

PROFILE = ("v1/engine/core.py:run_engine_core", "v1/worker/gpu_worker.py:profile_run")
LOGITS = ("v1/engine/core.py:run_engine_core", "v1/sample/sampler.py:compute_logprobs")


def chain_of(raised: Sequence[LoggedException], position: int) -> list[LoggedException]:
    """An exception with those it came from, the first cause first."""
    chain, seen, at = [raised[position]], {position}, raised[position].cause
    while at is not None and at not in seen:
        seen.add(at)
        chain.append(raised[at])
        at = raised[at].cause
    return chain[::-1]


def found(*parts: str | list[str]) -> list[LoggedException]:
    """What was raised in these lines."""
    return read_exceptions(log(*parts).lines)


def functions(raised: LoggedException) -> list[str]:
    return [frame.function for frame in raised.frames]


def test_a_plain_traceback_is_read_whole() -> None:
    """Its class, its words, its calls in order, its speaker, and its first and last line."""
    (one,) = found("INFO before", traceback(*PROFILE, who=""), "INFO after")
    assert (one.kind, one.name) == ("torch.OutOfMemoryError", "OutOfMemoryError")
    assert one.message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert functions(one) == ["run_engine_core", "profile_run"]
    assert one.frames[0] == TracebackFrame("/opt/vllm/v1/engine/core.py", "run_engine_core")
    assert (one.first, one.at, one.cause, one.in_logging) == (1, 6, None, False)


@pytest.mark.parametrize("seed", range(8))
def test_the_lines_of_two_workers_come_mixed(seed: int) -> None:
    """Each worker's traceback is put together from its own lines, in whatever order the two were written."""
    first = traceback(*PROFILE, who="(Worker_TP0 pid=10) ERROR 11-15 09:00:00 [mp.py:1] ")
    second = traceback(*LOGITS, error="RuntimeError: of the second", who="(Worker_TP1 pid=11) ERROR 11-15 09:00:00 [mp.py:1] ")
    order = [0] * len(first) + [1] * len(second)
    random.Random(seed).shuffle(order)
    queues = [list(first), list(second)]
    by_process = {one.process: one for one in found([queues[which].pop(0) for which in order])}
    assert functions(by_process["Worker_TP0 pid=10"]) == ["run_engine_core", "profile_run"]
    assert functions(by_process["Worker_TP1 pid=11"]) == ["run_engine_core", "compute_logprobs"]
    assert by_process["Worker_TP1 pid=11"].message == "of the second"


def test_a_chain_is_followed_to_its_first_cause() -> None:
    """"The above exception was the direct cause" and "During handling of" both lead back."""  # fmt: skip
    raised = found(
        traceback(*PROFILE, who=""),
        ["", "The above exception was the direct cause of the following exception:", ""],
        traceback("a.py:step", error="RuntimeError: second", who=""),
        ["", "During handling of the above exception, another exception occurred:", ""],
        traceback("b.py:last", error="ValueError: third", who=""),
    )
    assert [one.name for one in raised] == ["OutOfMemoryError", "RuntimeError", "ValueError"]
    assert [one.name for one in chain_of(raised, 2)] == ["OutOfMemoryError", "RuntimeError", "ValueError"]
    assert chain_of(raised, 0) == [raised[0]]


def test_the_chain_of_one_process_is_not_anothers() -> None:
    """A chaining word of one speaker does not tie another's exception to it."""
    raised = found(
        traceback(*PROFILE, who="(Worker_TP0 pid=10) "),
        "(Worker_TP0 pid=10) During handling of the above exception, another exception occurred:",
        traceback("b.py:other", error="ValueError: unrelated", who="(EngineCore pid=2) "),
        traceback("c.py:last", error="RuntimeError: related", who="(Worker_TP0 pid=10) "),
    )
    by_name = {one.name: one for one in raised}
    assert by_name["ValueError"].cause is None
    assert raised[by_name["RuntimeError"].cause or 0].name == "OutOfMemoryError"


PREFIXES = (
    "[rank0]: ",
    "[rank12]: ",
    "| ",
    "(RayWorkerWrapper pid=7) ",
    "(VllmWorker rank=1 pid=8) ERROR 11-15 09:00:00 [a.py:1] ",
)


@pytest.mark.parametrize("who", PREFIXES)
def test_a_prefix_on_every_line_is_no_part_of_it(who: str) -> None:
    """torchrun's rank, a box of an error report, Ray's worker, vLLM's own."""
    (one,) = found(traceback(*LOGITS, who=who))
    assert functions(one) == ["run_engine_core", "compute_logprobs"]
    assert one.name == "OutOfMemoryError"


def test_a_traceback_on_one_line_is_taken_apart() -> None:
    """Flattened by a collector: its calls and its error are found."""
    flat = " ".join(line.strip() for line in traceback(*PROFILE, who=""))
    (one,) = found(f"(EngineCore pid=2) ERROR 11-15 09:00:00 [core.py:1] {flat}")
    assert functions(one) == ["run_engine_core", "profile_run"]
    assert one.kind == "torch.OutOfMemoryError"
    assert one.first == one.at == 0


@pytest.mark.parametrize("quoted", [False, True])
def test_escaped_line_ends_are_undone(quoted: bool) -> None:
    """A traceback inside a string keeps its calls, with its quotes escaped or not."""
    text = "\n".join(traceback(*PROFILE, error="RuntimeError: it broke", who=""))
    line = json.dumps({"stack": text}) if quoted else text.replace("\n", "\\n")
    raised = found(line if quoted else f"ERROR error='{line}")
    assert functions(raised[0]) == ["run_engine_core", "profile_run"]
    assert raised[0].name == "RuntimeError"


def test_a_notebooks_frames_are_read() -> None:
    """IPython writes "File ~/x.py:12, in name(...)" or "/x.py in name(...)"."""
    raised = found(
        "RuntimeError                              Traceback (most recent call last)",
        "File ~/vllm/v1/worker/gpu_worker.py:12, in Worker.load_model(self)",
        "     11 def load_model(self):",
        "---> 12     self.model_runner.load_model()",
        "/opt/vllm/model_executor/model_loader/loader.py in load_weights(self, model)",
        "RuntimeError: it broke",
    )
    assert raised[-1].name == "RuntimeError"
    assert functions(raised[-1]) == ["load_model", "load_weights"]


def test_a_traceback_without_its_head_or_its_end_is_still_one() -> None:
    """The log begins or breaks off in the middle: the calls stay, the kind may be empty."""
    (one,) = found(traceback(*PROFILE, who="")[3:])
    assert functions(one) == ["profile_run"]
    assert one.name == "OutOfMemoryError"
    (one,) = found("INFO before", traceback(*PROFILE, who="")[:-1])
    assert one.kind == one.message == ""
    assert functions(one) == ["run_engine_core", "profile_run"]


def test_calls_that_nothing_followed_are_not_given_to_a_later_error() -> None:
    """A traceback that breaks off, a long silence, then an error of its own: two stories."""
    raised = found(traceback(*PROFILE, who="")[:-1], ["INFO fine"] * 60, traceback("b.py:later", error="ValueError: x", who=""))
    later = next(one for one in raised if one.name == "ValueError")
    assert functions(later) == ["later"]


def test_an_error_while_a_record_was_written_is_marked() -> None:
    """ "--- Logging error ---" and its call stack: never the failure itself, and its stack belongs to no exception."""
    raised = found(
        "--- Logging error ---",
        traceback("logging/__init__.py:emit", who=""),
        "Call stack:",
        '  File "/opt/vllm/v1/engine/core.py", line 5, in run_engine_core',
        "    engine_core.run_busy_loop()",
        "Message: 'Engine core shut down'",
        "Arguments: ()",
        traceback(*LOGITS, error="RuntimeError: the real one", who=""),
    )
    assert [(one.name, one.in_logging) for one in raised] == [("OutOfMemoryError", True), ("RuntimeError", False)]
    assert functions(raised[1]) == ["run_engine_core", "compute_logprobs"]


def test_what_is_raised_while_writing_is_no_failure_of_its_own() -> None:
    """ "Call stack:" right below says so even without the headline; dumping the engine's state is writing too."""
    raised = found(traceback("x.py:f", who=""), "Call stack:", '  File "/opt/vllm/a.py", line 5, in g', "Message: 'x'")
    assert raised[0].in_logging
    (one,) = found(traceback("logging_utils/dump_input.py:_dump_engine_exception", who=""))
    assert one.in_logging


def test_the_first_line_that_is_not_indented_names_the_error() -> None:
    """Whatever libraries call theirs, also where two writers on one terminal took its prefix."""
    lines = traceback(*PROFILE)
    (one,) = found([*lines[:-1], OOM])
    assert functions(one) == ["run_engine_core", "profile_run"]
    assert one.name == "OutOfMemoryError"
    (one,) = found(traceback(*PROFILE, error="triton.compiler.PtxasStopped: code 255"))
    assert one.name == "PtxasStopped"
    assert functions(one) == ["run_engine_core", "profile_run"]


def test_a_message_goes_on_over_several_lines() -> None:
    """Pydantic's, and an error with advice below it: the lines that follow belong to the message."""
    (one,) = found(
        traceback("a.py:f", error="pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", who=""),
        ["  Value error, User-specified max_model_len (65536) is greater", "    For further information visit the page"],
    )
    assert one.name == "ValidationError"
    assert "greater" in one.message


def test_an_error_may_have_no_calls_and_words_that_look_like_one_are_none() -> None:
    """vLLM often prints the last line alone; a class name alone or a quotation is not raised."""
    assert found("ValueError", "    raise ValueError: no", "There was no Error: fine", "KeyError: 'pynvml'") == []
    (one,) = found("(APIServer pid=1) RuntimeError: Engine core initialization failed.")
    assert (one.name, one.frames, one.process) == ("RuntimeError", (), "APIServer pid=1")


@pytest.mark.parametrize(("level", "warned"), [("WARNING", True), ("DEBUG", True), ("ERROR", False)])
def test_an_error_told_by_a_warning_is_marked(level: str, warned: bool) -> None:
    """What a warning prints was overcome."""
    (one,) = found(f"(EngineCore pid=2) {level} 11-15 09:00:00 [a.py:1] ImportError: no module named x")
    assert one.warned is warned


def test_a_thousand_calls_are_bounded() -> None:
    """Endless recursion keeps its first calls and its error."""
    (one,) = found(traceback(*[f"a.py:f{n}" for n in range(1_000)], error="RecursionError: maximum depth", who=""))
    assert len(one.frames) == MOST_FRAMES
    assert one.name == "RecursionError"

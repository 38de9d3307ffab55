"""A log as a story: tracebacks put together again, lives, how far each came, the step that failed, and mere quotations."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.doctor.rules.root_cause import judge
from plimsoll.doctor.rules.timeline import (
    CODES,
    MILESTONES,
    MOST_FRAMES,
    RUNTIME,
    LoggedException,
    LogTimeline,
    TracebackFrame,
    read_exceptions,
    read_timeline,
    step_of_frames,
)
from plimsoll.findings import Code
from plimsoll.render.doctor import as_text
from plimsoll.vllm.failure_texts import STEP_FRAMES
from plimsoll.vllm.versions import spans_of
from tests.doctor.log_maker import ENGINE_DEAD, OOM, REQUEST, STARTED, STEP, log, traceback
from tests.each import each, rows

Lines = str | list[str]
PROFILE = ("v1/engine/core.py:run_engine_core", "v1/worker/gpu_worker.py:profile_run")
LOGITS = ("v1/engine/core.py:run_engine_core", "v1/sample/sampler.py:compute_logprobs")
PLAIN = traceback(*PROFILE, who="")
OF_PROFILE = ["run_engine_core", "profile_run"]
CAUSE, HANDLING = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


def found(*parts: Lines) -> list[LoggedException]:
    """What was raised in these lines."""
    return read_exceptions(log(*parts).lines)


def functions(raised: LoggedException) -> list[str]:
    return [frame.function for frame in raised.frames]


NOTEBOOK = [
    "RuntimeError                              Traceback (most recent call last)",
    "File ~/vllm/v1/worker/gpu_worker.py:12, in Worker.load_model(self)", "     11 def load_model(self):",
    "---> 12     self.model_runner.load_model()",
    "/opt/vllm/model_executor/model_loader/loader.py in load_weights(self, model)",
    "RuntimeError: it broke",
]  # fmt: skip
BROKE = "\n".join(traceback(*PROFILE, error="RuntimeError: it broke", who=""))


@each(("lines", "name", "calls"), [
    *((traceback(*PROFILE, who=who), "OutOfMemoryError", OF_PROFILE) for who in (
        "[rank0]: ", "[rank12]: ", "| ", "(RayWorkerWrapper pid=7) ",
        "(VllmWorker rank=1 pid=8) ERROR 11-15 09:00:00 [a.py:1] ")),
    (["(EngineCore pid=2) ERROR 11-15 09:00:00 [core.py:1] " + " ".join(map(str.strip, PLAIN))], "OutOfMemoryError",
     OF_PROFILE),
    ([json.dumps({"stack": BROKE})], "RuntimeError", OF_PROFILE),
    (["ERROR error='" + BROKE.replace("\n", "\\n")], "RuntimeError", OF_PROFILE),
    (NOTEBOOK, "RuntimeError", ["load_model", "load_weights"]),
    (PLAIN[3:], "OutOfMemoryError", ["profile_run"]),
    (["INFO before", *PLAIN[:-1]], "", OF_PROFILE),
    ([*traceback(*PROFILE)[:-1], OOM], "OutOfMemoryError", OF_PROFILE),
    (traceback(*PROFILE, error="triton.compiler.PtxasStopped: code 255"), "PtxasStopped", OF_PROFILE),
    (["(APIServer pid=1) RuntimeError: Engine core initialization failed."], "RuntimeError", []),
    ([*PLAIN[:-1], *["INFO fine"] * 60, *traceback("b.py:later", error="ValueError: x", who="")], "ValueError", ["later"]),
    (traceback(*[f"a.py:f{n}" for n in range(1_000)], error="RecursionError: maximum depth", who=""), "RecursionError",
     [f"f{n}" for n in range(MOST_FRAMES)]),
])  # fmt: skip
def test_a_traceback_is_one_however_it_was_written(lines: list[str], name: str, calls: list[str]) -> None:
    """Prefixed, flattened, escaped, in a notebook, without its head or its end, its prefix lost, endless: calls and kind."""
    one = found(lines)[-1]
    assert (one.name, functions(one)) == (name, calls)


def test_a_chain_is_followed_in_its_own_process() -> None:
    """Both chaining words lead back; one speaker's does not tie another's exception to it."""
    raised = found(
        PLAIN, ["", CAUSE, ""], traceback("a.py:step", error="RuntimeError: second", who=""), ["", HANDLING, ""],
        traceback("b.py:last", error="ValueError: third", who=""),
    )  # fmt: skip
    assert [(one.name, one.cause) for one in raised] == [("OutOfMemoryError", None), ("RuntimeError", 0), ("ValueError", 1)]
    who = "(Worker_TP0 pid=10) "
    raised = found(
        traceback(*PROFILE, who=who), who + HANDLING, traceback("b.py:other", error="ValueError: unrelated"),
        traceback("c.py:last", error="RuntimeError: related", who=who),
    )  # fmt: skip
    assert {one.name: one.cause for one in raised} == {"OutOfMemoryError": None, "ValueError": None, "RuntimeError": 0}


STACK = ["Call stack:", '  File "/opt/vllm/v1/engine/core.py", line 5, in run_engine_core', "Message: 'x'", "Arguments: ()"]


@each(("lines", "expected"), [
    (["--- Logging error ---", *traceback("logging/__init__.py:emit", who=""), *STACK,
      *traceback(*LOGITS, error="RuntimeError: the real one", who="")], [("OutOfMemoryError", True), ("RuntimeError", False)]),
    ([*traceback("x.py:f", who=""), *STACK], [("OutOfMemoryError", True)]),
    (traceback("logging_utils/dump_input.py:_dump_engine_exception", who=""), [("OutOfMemoryError", True)]),
])  # fmt: skip
def test_an_error_while_a_record_was_written_is_marked(lines: list[str], expected: list[tuple[str, bool]]) -> None:
    """By the headline, by the call stack below, or since the engine's state was being dumped; the stack is no exception's."""
    raised = found(lines)
    assert [(one.name, one.in_logging) for one in raised] == expected
    assert not any("run_engine_core" in functions(one) for one in raised if one.in_logging)


def timeline(*parts: Lines) -> LogTimeline:
    """The story of these lines."""
    return read_timeline(log(*parts))


def test_progress_is_asked_before_a_line_and_milestones_are_told_apart() -> None:
    """No milestone's words hold another's of a different step before it: the first that matches decides."""
    told = timeline(STARTED)
    reached = [told.progress_at(at).name for at in (0, 1, 3, 4, 5, 6, 7)]
    assert reached == ["UNKNOWN", "BEGUN", "LOADING", "LOADED", "MEASURED", "CAPTURED", "SERVING"]
    for place, (needle, step) in enumerate(MILESTONES):
        assert all(earlier not in needle or other is step for earlier, other in MILESTONES[:place]), needle


def test_work_after_a_line_is_seen() -> None:
    """Requests that were answered later show that the server outlived it; one straggler does not."""
    error = "(EngineCore pid=2) ERROR 11-15 09:05:00 [a.py:1] RuntimeError: one request was bad"
    served = [timeline(STARTED, error, after).serves_after(len(STARTED)) for after in ([REQUEST] * 3, REQUEST, ENGINE_DEAD)]
    assert served == [True, False, False]


def test_words_count_by_their_level_and_whole_messages_by_all_their_lines() -> None:
    """Within an informational line or a warning they are no error, unless the line is nothing but the exception."""
    levels = ("ERROR", "INFO", "WARNING", "DEBUG")
    lines = [f"(EngineCore pid=2) {level} 11-15 09:00:00 [a.py:1] {{}}" for level in levels]
    assert [bool(timeline(line.format(OOM)).hits) for line in lines] == [True, True, True, False]
    assert [bool(timeline(line.format(f"note: {OOM}")).hits) for line in lines] == [True, False, False, False]
    broken = "ValueError: Free memory on device cuda:0 (1.0/79.1 GiB) on"
    rest = ["startup is less than desired GPU memory", "utilization (0.9, 71.2 GiB)."]
    told = timeline(traceback("v1/worker/utils.py:request_memory", error=broken, who=""), rest)
    assert "free-memory-check" in {hit.text.name for hit in told.hits}


SITE = "/usr/lib/python3.12/site-packages/"
TORCH = TracebackFrame(f"{SITE}torch/nn/modules/module.py", "_call_impl")
# Files that occur often, and the calls that lead to a step.
SHORT = {
    "core": "v1/engine/core.py", "worker": "v1/worker/gpu_worker.py", "runner": "v1/worker/gpu_model_runner.py",
    "old-engine": "engine/llm_engine.py", "old-worker": "worker/worker.py", "old-runner": "worker/model_runner.py",
    "llama": "model_executor/models/llama.py", "sampler": "v1/sample/sampler.py",
    "START": "core:run_engine_core core:__init__ core:_initialize_kv_caches",
    "SERVE": "core:run_busy_loop core:step runner:execute_model",
    "OLD-START": "old-engine:__init__ old-engine:_initialize_kv_caches",
    "OLD-SERVE": "engine/async_llm_engine.py:engine_step worker/worker_base.py:execute_model",
}  # fmt: skip
TRACEBACKS = rows(Path(__file__).with_name("tracebacks.txt"))


def calls_of(short: str) -> list[tuple[str, str]]:
    """The file and function of each call, short names written out."""
    words = " ".join(SHORT.get(word, word) for word in short.split())
    calls = (word.split(":") for word in words.split())
    return [(SHORT.get(file, file), function) for file, function in calls]


def frames(short: str) -> list[TracebackFrame]:
    """The calls in vLLM's folder, with torch's own in between as in life."""
    return [frame for file, function in calls_of(short) for frame in (TracebackFrame(f"{SITE}vllm/{file}", function), TORCH)]


@each(("name", "calls"), TRACEBACKS)
def test_tracebacks_of_both_engines_name_their_step(name: str, calls: str) -> None:
    """Each step is known by the functions its traceback passes through, whatever they call inside."""
    step = step_of_frames(frames(calls))
    assert step is not None
    assert (step.name, step.code) == (name, CODES[name])
    assert 0.5 < step.confidence <= 0.95
    assert any(spans_of("frames", function) for _, function in calls_of(calls))


def test_every_step_is_tried_and_those_of_serving_are_runtime_codes() -> None:
    """No step goes untested."""
    assert {name for name, _ in STEP_FRAMES} <= {name for name, _ in TRACEBACKS}
    assert {name for name, code in CODES.items() if code.startswith("runtime.")} == set(RUNTIME)


@each(("calls", "name"), [
    ([TracebackFrame(f"{SITE}torch/optim/sgd.py", "step"), TracebackFrame("torch/x.py", "load_model")], None),
    ([*frames("worker:compile_or_warm_up_model"), TracebackFrame(f"{SITE}torch/cuda/graphs.py", "__exit__")], "graph-capture"),
    ([TracebackFrame("vllm/model_executor/layers/linear.py", "__init__"), TORCH], "weights"),
])  # fmt: skip
def test_one_frame_may_tell_and_torchs_own_functions_do_not(calls: list[TracebackFrame], name: str | None) -> None:
    """Torch's context manager and a layer's constructor run at no other time; `step` of an optimiser is not vLLM's."""
    step = step_of_frames(calls)
    assert (step.name if step is not None else None) == name


def test_a_traceback_cut_to_torchs_device_context_hints_at_weights() -> None:
    """Parameters are made under it, and little else."""
    for file, function, step in (("_device.py", "__torch_function__", "weights"), ("_foreach.py", "f", "unknown")):
        frame = f'  File "{SITE}torch/utils/{file}", line 104, in {function}'
        root = judge(timeline(["Traceback (most recent call last):", frame, "    return f()", OOM])).root
        assert root is not None
        assert root.step is not None
        assert root.step.name == step


KNOWN = st.sampled_from([function for _, functions in STEP_FRAMES for function in functions])


@given(st.lists(st.builds(TracebackFrame, st.text(max_size=20), st.one_of(st.text(max_size=20), KNOWN)), max_size=12))
def test_any_frames_give_a_step_or_none(some: list[TracebackFrame]) -> None:
    """Whatever a log pretends, the answer is a known step or that it cannot be told."""
    step = step_of_frames(some)
    assert step is None or (step.name in CODES and 0 < step.confidence < 1)


def test_an_earlier_report_has_no_failure_and_a_log_beside_it_does() -> None:
    """Of a report all is passed over."""
    crash = log(STARTED, traceback(STEP), ENGINE_DEAD, source="failed.log")
    report = log(*str(as_text(diagnose([crash]))).splitlines(), source="report.txt")
    assert diagnose([report]).findings == ()
    both = crash._replace(lines=[*report.lines, *crash.lines])
    assert [one.code for one in diagnose([both]).findings] == [Code.RUNTIME_FORWARD]

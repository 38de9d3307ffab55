"""Failures that people reported, the runs and ranks in a log, advice that can work there, and one command to look next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.doctor_accuracy import of_ours
from benchmarks.doctor_reports import CONFIDENT, judged, of_reports
from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose, look_next
from plimsoll.doctor.rules.facts import facts_of, fitting, role_of
from plimsoll.doctor.rules.out_of_memory import OomFigures, without_siblings
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.findings import Code, Finding, Remedy, Severity
from plimsoll.render.doctor import as_text
from plimsoll.units import GIB
from plimsoll.vllm.flags import flags_of, history_of
from plimsoll.vllm.versions import engine_named
from tests.doctor.case_maker import facts_with
from tests.doctor.labelled import Labelled, diagnosis, labelled
from tests.each import each
from tests.log_bytes import log_of_bytes

ENGINE = "(EngineCore_DP0 pid=9) "
REFUSED = (
    "ValueError: Free memory on device (5.12/79.10 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.19 GiB)."
)


def _diagnosed(*lines: str) -> Diagnosis:
    return diagnose([log_of_bytes("a.log", "\n".join(lines).encode())])


def test_reported_failures_are_named(tmp_path: Path) -> None:
    """At least 95 of 100 are right on memory and 90 on the code; none is confidently wrong on memory."""
    found = judged(list(of_reports(tmp_path)))
    wrong = {one.scored.labelled.name: (one.scored.code, one.scored.memory) for one in found if not one.is_right}
    memory = [one for one in found if not one.scored.memory_is_right]
    assert len(wrong) <= 0.1 * len(found), wrong
    assert len(memory) <= 0.05 * len(found)
    assert not [one for one in memory if one.scored.memory is not None and one.confidence >= CONFIDENT]


def test_a_confidence_means_something(tmp_path: Path) -> None:
    """What is said at 90 % is right at least 85 times of 100, at about 60 % at least 55 times, over reports and captures."""
    found = [one for one in judged([*of_reports(tmp_path), *of_ours()]) if one.scored.code]
    for least, below, promised in ((0.9, 1.01, 0.85), (0.55, 0.75, 0.55)):
        some = [one.is_right for one in found if least <= one.confidence < below]
        assert len(some) >= 20
        assert sum(some) / len(some) >= promised


def test_each_start_in_a_file_has_its_verdict() -> None:
    """Three starts are three verdicts, the last that failed first."""
    start = "INFO 11-15 08:00:00 [api_server.py:1] vLLM API server version 0.10.0"
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    frame = '  File "/vllm/v1/worker/gpu_model_runner.py", line 1, in load_model'
    end = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    port = "OSError: [Errno 98] Address already in use"
    found = _diagnosed(start, REFUSED, end, start, "Traceback (most recent call last):", frame, oom, end, start, port)
    rows = found.facts["runs"]
    assert isinstance(rows, list)
    assert [(row["run"], row["code"]) for row in rows] == [
        (3, "other.port-in-use"), (2, "startup.weights-do-not-fit"), (1, "startup.free-memory-check"),
    ]  # fmt: skip
    assert "Run 2, lines 4 to 8: startup.weights-do-not-fit (memory" in str(as_text(found))


def test_the_rank_that_failed_first_is_named() -> None:
    """Of several workers the one whose error is the cause is named with its rank, and those that followed it."""
    one, two = (
        "(Worker_PP1_TP0 pid=11) ERROR 11-15 08:00:00 [x.py:1] ",
        "(Worker_PP0_TP1 pid=12) ERROR 11-15 08:00:01 [x.py:1] ",
    )
    raised = 'Traceback (most recent call last):|  File "/vllm/v1/worker/gpu_worker.py", line 1, in load_model|RuntimeError: '
    lines = [who + line for who, what in ((one, "broken"), (two, "too")) for line in f"{raised}{what}".split("|")]
    first = _diagnosed(f"{ENGINE}INFO 11-15 08:00:00 [x.py:1] Starting to load model m", *lines).facts["failed_first"]
    assert first == {
        "process": "Worker_PP1_TP0 pid=11", "is": "worker (pipeline stage 1, tensor-parallel rank 0)", "line": 4,
        "after_it": ["worker (pipeline stage 0, tensor-parallel rank 1)"],
    }  # fmt: skip


@each(
    ("process", "role"),
    [
        ("Worker_TP1 pid=7", "worker (tensor-parallel rank 1)"),
        ("Worker_DP2_TP1 pid=7", "worker (data-parallel rank 2, tensor-parallel rank 1)"),
        ("VllmWorker rank=0 pid=1", "worker (rank 0)"),
        ("RayWorkerWrapper pid=1, ip=10.0.0.1", "Ray worker (node 10.0.0.1)"),
        ("EngineCore_DP3 pid=5", "engine core (data-parallel rank 3)"),
        ("APIServer pid=1", "API server"),
        ("LMCacheServer pid=4", "LMCache server"),
        ("WorkerDict pid=5111", "Ray actor"),
        ("rank3", "process (rank 3)"),
    ],
)
def test_processes_are_called_what_they_are(process: str, role: str) -> None:
    """Ranks, stages, nodes, companions and actors of a trainer."""
    assert role_of(process) == role


@each(
    ("processes", "pids", "has_neighbour"),
    [
        (((1, 20), (2, 20)), {1, 2}, False),
        (((901, 20), (902, 20)), {1, 2}, False),
        (((901, 11), (902, 12)), {1, 2}, True),
        (((901, 11), (902, 12)), {1}, True),
    ],
)
def test_sibling_ranks_are_no_neighbours(processes: tuple[tuple[int, int], ...], pids: set[int], has_neighbour: bool) -> None:
    """By their numbers, by holding as much as this rank, or since one card could not hold both; a stranger stays one."""
    own = min(size for _, size in processes)
    oom = OomFigures(2 * GIB, 24 * GIB, GIB, 0, own * GIB, None, 0, None, tuple((pid, size * GIB) for pid, size in processes))
    assert without_siblings(oom, pids).has_neighbour is has_neighbour


def test_the_release_is_inferred_from_where_its_records_stand() -> None:
    """A cut log that prints no version is met by the releases that have its records at these lines."""
    found = _diagnosed(
        f"{ENGINE}ERROR 11-15 08:00:00 [core.py:866] EngineCore failed to start.", f"{ENGINE}ValueError: nothing"
    )
    assert found.facts["vllm"] is None
    assert found.facts["releases"] == ["0.13.0", "0.13.0"]


@each("one", labelled(), ids=lambda one: one.name)
def test_advised_flags_exist_in_that_release_and_change_something(one: Labelled) -> None:
    """For every capture: no flag that the release's parser lacks, and no value that is already in force."""
    found = diagnosis(one.path)
    version, flags = found.facts.get("vllm"), found.facts.get("flags")
    known = flags_of(engine_named(version).release) if isinstance(version, str) else {}
    assert isinstance(flags, dict)
    for remedy in (remedy for finding in found.findings for remedy in finding.remedy):
        for flag in re.findall(r"--[a-z][a-z0-9-]{2,60}", remedy.do) if known else ():
            assert flag in known or not history_of(flag), (flag, remedy.do)
        if remedy.flag and remedy.value:
            assert flags.get(remedy.flag.removeprefix("--").replace("-", "_")) != remedy.value, remedy


@each(
    ("line", "do", "becomes"),
    [
        ("detected platform rocm", "PYTORCH_CUDA_ALLOC_CONF=a", "PYTORCH_HIP_ALLOC_CONF=a"),
        ("detected platform xpu", "PYTORCH_CUDA_ALLOC_CONF=a", None),
        ("detected platform tpu", "--enforce-eager", None),
        ("detected platform tpu", "find the holder with nvidia-smi", "find the holder with tpu-info"),
        ("CUDA_VISIBLE_DEVICES=MIG-12", "--tensor-parallel-size 2", None),
        ("NVIDIA GB10", "--cpu-offload-gb 4", None),
        ("NVIDIA H100", "--cpu-offload-gb 4", "--cpu-offload-gb 4"),
    ],
)
def test_advice_speaks_of_this_machine(line: str, do: str, becomes: str | None) -> None:
    """Other accelerators have other names for the same, or nothing like it."""
    timeline = read_timeline(log_of_bytes("a", line.encode()))
    traits = facts_of(timeline, timeline.runs[0]).traits
    finding = Finding(Code.RUNTIME_FORWARD, Severity.CRITICAL, 0.9, "t", "b", (), (Remedy(do, "why"),), ())
    remedy = fitting(finding, facts_with()._replace(traits=traits)).remedy
    assert [one.do for one in remedy] == ([] if becomes is None else [becomes])


@each(
    ("flag", "version", "is_offered"),
    [
        ("--attention-backend", "0.6.4", False),
        ("--attention-backend", "0.32.0", True),
        ("--kv-cache-memory-bytes", "0.9.0", False),
        ("--swap-space", "0.6.0", True),
        ("--swap-space", None, True),
    ],
)
def test_no_flag_is_offered_that_the_release_lacks(flag: str, version: str | None, is_offered: bool) -> None:
    """By the catalogue of that release; where the release is unknown, it stays."""
    finding = Finding(Code.RUNTIME_FORWARD, Severity.CRITICAL, 0.9, "t", "b", (), (Remedy(f"{flag} 1", "why", flag),), ())
    assert bool(fitting(finding, facts_with(version)).remedy) is is_offered


@pytest.mark.parametrize("code", list(Code))
def test_there_is_a_command_to_look_next(code: Code) -> None:
    """For every finding, one line without a gap that was forgotten."""
    finding = Finding(code, Severity.CRITICAL, 0.9, "t", "b", (), (), ())
    for traits in ([], ["rocm"], ["unified"]):
        command = look_next([finding], {"flags": {"model": "m"}, "traits": traits}, [])
        assert command
        assert not {"{", "\n"} & set(command)


@each(
    ("confidence", "head"), [(0.95, "memory failure: yes"), (0.7, "memory failure: probably"), (0.4, "memory failure: perhaps")]
)
def test_the_headline_claims_no_more_than_the_first_finding(confidence: float, head: str) -> None:
    """Sure, likely, or only possible."""
    finding = Finding(Code.RUNTIME_FORWARD, Severity.CRITICAL, confidence, "t", "b", (), (), ())
    assert str(as_text(Diagnosis(memory_failure=True, findings=(finding,), facts={}, collect_next=()))).startswith(f"{head}\n")


def test_an_unknown_end_quotes_what_there_is() -> None:
    """The last exception with its file and line, where no rule has words for what happened."""
    found = _diagnosed(
        f"{ENGINE}INFO 11-15 08:00:00 [x.py:1] Starting to load model m", "Traceback (most recent call last):",
        '  File "/opt/thing/client.py", line 41, in recv', "ConnectionResetError: [Errno 104] Connection reset by peer",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )  # fmt: skip
    assert found.findings[0].code is Code.ENGINE_DEAD
    assert "ConnectionResetError at client.py:41" in found.findings[0].because


def test_a_probe_that_asks_for_the_wrong_path_is_no_slow_server() -> None:
    """HTTP 404 is an answer: the path is wrong, and more time changes nothing."""
    found = _diagnosed(
        "Restart Count:  6",
        "  Warning  Unhealthy  2m (x3 over 5m)  kubelet  Liveness probe failed: HTTP probe failed with statuscode: 404",
        "  Normal   Killing    2m                kubelet  Container vllm failed liveness probe, will be restarted",
    )  # fmt: skip
    assert found.findings[0].code is Code.OTHER_PROBE
    assert found.findings[0].remedy[0].do.startswith("probe /health")


@each(("started", "is_loop"), [("08:00:00", True), ("02:00:00", False)])
def test_restarts_are_judged_with_their_times(started: str, is_loop: bool) -> None:
    """Three restarts with hours of service between them are no crash loop, and nobody is told to stop the server."""
    found = _diagnosed(
        "Containers:", "  vllm:", "    Last State:     Terminated", "      Reason:       Error", "      Exit Code:    1",
        f"      Started:      Sun, 15 Nov 2026 {started} +0000", "      Finished:     Sun, 15 Nov 2026 08:01:00 +0000",
        "    Restart Count:  3",
    )  # fmt: skip
    assert (Code.ENGINE_CRASH_LOOP in {finding.code for finding in found.findings}) is is_loop


def test_a_text_without_a_word_of_vllm_is_not_left_unsaid() -> None:
    """The exception in which it ends is quoted with file and line, and settles nothing about memory; one it got over is not."""
    lines = ("begin", "Traceback (most recent call last):", '  File "/app/config.py", line 40, in load', "KeyError: 'tp'")
    diagnosis = _diagnosed(*lines)
    (finding,) = diagnosis.findings
    assert (diagnosis.memory_failure, finding.code, finding.confidence) == (None, Code.OTHER_ENGINE_ERROR, 0.3)
    assert "KeyError at /app/config.py:40" in finding.because
    assert not _diagnosed(*lines, "goes on").findings

"""What a log states about its server, before anybody judges."""

from __future__ import annotations

import pytest
from hypothesis import given

from plimsoll.doctor.rules.facts import MOST_PROCESSES, LogFacts, facts_of, oom_facts
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.doctor.rules.root_cause import OomFigures
from plimsoll.doctor.rules.timeline import ServerProgress, read_timeline
from plimsoll.units import GIB
from tests.doctor.pasted_text import pasted, scrambled

DUMP = (
    "Dumping scheduler stats: SchedulerStats(num_running_reqs=12, num_waiting_reqs=3, step_counter=0, current_wave=0, "
    "kv_cache_usage=0.42, prefix_cache_stats=PrefixCacheStats(reset=False, requests=1))"
)
START = """
    INFO 11-15 [api_server.py:1] vLLM API server version 0.15.1
    INFO non-default args: {'model': 'm', 'max_model_len': 8192, 'gpu_memory_utilization': 0.9}
    INFO Initializing a V1 LLM engine (v0.15.1) with config: model='m', max_seq_len=4096, tensor_parallel_size=2, seed=0
    INFO Model loading took 14.99 GiB memory and 3.521 seconds
    INFO Available KV cache memory: 9.50 GiB
    ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.
"""


def facts(log: Log) -> LogFacts:
    """The facts of the log's last life."""
    timeline = read_timeline(log)
    return facts_of(timeline, timeline.runs[-1])


def test_a_start_gives_its_facts() -> None:
    """Version, model, flags, figures, exit code and how far it came; what was asked for rules over what was in force."""
    found = facts(pasted(START))
    assert (found.version, found.model, found.worker_exit_code) == ("0.15.1", "m", -9)
    assert found.flags["max_model_len"] == "8192"
    assert found.flags["tensor_parallel_size"] == "2"
    assert found.measured.kv_bytes == round(9.5 * GIB)
    assert found.progress is ServerProgress.MEASURED


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("vLLM API server version 0.6.3.post1", "0.6.3.post1"),
        ("Initializing a V1 LLM engine (v0.25.1) with config: model='m'", "0.25.1"),
        ("Initializing an LLM engine (v0.5.4) with config: model='m'", "0.5.4"),
        ("   █▄█▀ █     █     █     █  version 0.32.0", "0.32.0"),
        ("vLLM API server version dev", None),
        ("CUDA version 12.4", None),
    ],
)
def test_the_version_is_read_from_every_banner(line: str, version: str | None) -> None:
    """Old and new banners; what is no version is unknown."""
    assert facts(pasted(line)).version == version


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", -9),
        ("Worker VllmWorkerProcess pid 812 died, exit code: -15", -15),
        ("Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", None),
        ("the job died", None),
    ],
)
def test_a_workers_exit_code_is_read_where_it_is_given(line: str, code: int | None) -> None:
    """The newer and the older engine's words."""
    assert facts(pasted(line)).worker_exit_code == code


def test_the_scheduler_at_its_death() -> None:
    """The figures of the dump, and nothing of what is nested in it."""
    assert facts(pasted(DUMP)).scheduler == {
        "num_running_reqs": 12.0, "num_waiting_reqs": 3.0, "step_counter": 0.0, "kv_cache_usage": 0.42,
    }  # fmt: skip
    assert facts(pasted("SchedulerStats(num_running_reqs=1.2.3, num_waiting_reqs=.)")).scheduler == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Config file not found at E=8,N=3584,device_name=NVIDIA_H100_80GB_HBM3.json", "NVIDIA H100 80GB HBM3"),
        ("Using configuration from E=8,device_name=NVIDIA_A100-SXM4-80GB,dtype=fp8_w8a8.json", "NVIDIA A100-SXM4-80GB"),
        ("GPU name: NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("Using device: cuda", None),
    ],
)
def test_the_gpus_name_is_read_where_it_is_one(line: str, name: str | None) -> None:
    """Only what begins like a card's name counts."""
    assert facts(pasted(line)).gpu_name == name


def test_each_process_has_its_own_timeline() -> None:
    """First and last line, how many, how many of them errors, and the last moment known."""
    lines = [
        LogLine(1, "EngineCore pid=2", "INFO", 10.0, "a"),
        LogLine(2, "Worker pid=3", "ERROR", 11.0, "b"),
        LogLine(5, "EngineCore pid=2", "CRITICAL", None, "c"),
    ]
    one, two = facts(Log("x", lines)).processes
    assert (one.process, one.first_line, one.last_line, one.lines, one.errors, one.last_at) == (
        "EngineCore pid=2",
        1,
        5,
        2,
        1,
        10.0,
    )
    assert (two.process, two.lines, two.errors, two.last_at) == ("Worker pid=3", 1, 1, 11.0)


def test_endless_processes_are_cut() -> None:
    """A hostile log cannot fill the report with processes."""
    lines = [LogLine(n, f"p{n}", "", None, "a") for n in range(1, 500)]
    assert len(facts(Log("x", lines)).processes) == MOST_PROCESSES


def test_the_figures_of_an_allocation_are_given_by_name() -> None:
    """Unknown stays null, and others are unknown where this process is."""
    unknown = oom_facts(OomFigures())
    assert unknown.pop("processes") == []
    assert set(unknown.values()) == {None}
    known = oom_facts(OomFigures(1, 10 * GIB, 1, 0, 1, None, 0, 5 * GIB, ((7, 4 * GIB),)))
    assert known["others_bytes"] == 10 * GIB - 1 - 5 * GIB
    assert known["processes"] == [{"pid": 7, "bytes": 4 * GIB}]


@given(scrambled(START, DUMP))
def test_any_log_is_survived(log: Log) -> None:
    """Whatever the lines, facts are found or absent."""
    found = facts(log)
    assert isinstance(found.flags, dict)
    assert found.version is None or found.version[0].isdigit()

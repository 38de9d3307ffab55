"""The class that vLLM loads: it has the base and the shape that a manager of loggers asks for, old or new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# What every release has: a base with three abstract methods.
OLD = """
from abc import ABC, abstractmethod

class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config, engine_index=0): ...
    @abstractmethod
    def record(self, scheduler_stats, iteration_stats): ...
    @abstractmethod
    def log_engine_initialized(self): ...
"""
# From 0.11.1 on: a base for all engines at once, which is told of sleep.
NEW = (
    OLD
    + """
class AggregateStatLoggerBase(StatLoggerBase):
    @abstractmethod
    def __init__(self, vllm_config, engine_indexes): ...
    def record_sleep_state(self, is_awake, level):
        raise AssertionError("ours has its own")
"""
)
PROGRAM = """
import json, sys
from types import SimpleNamespace
from vllm.v1.metrics import loggers
from plimsoll.inside.stat_logger import StatLogger
from plimsoll.inside.pulse import PULSE
from plimsoll.inside.recorder import RECORDER
from plimsoll.inside.faults import FAULTS
stats = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=0, kv_cache_usage=0.5)
if sys.argv[1] == "new":
    assert issubclass(StatLogger, loggers.AggregateStatLoggerBase)
    one = StatLogger(vllm_config=None, engine_indexes=[0, 1])
    one.record(stats, None, mm_cache_stats=None, engine_idx=0)
    one.record(stats, None, mm_cache_stats=None, engine_idx=1)
    one.record_sleep_state(1, 1)
else:
    assert issubclass(StatLogger, loggers.StatLoggerBase)
    for engine in (0, 1):
        StatLogger(None, engine).record(scheduler_stats=stats, iteration_stats=None)
print(json.dumps([PULSE.is_fed, PULSE.running, PULSE.sleep_level, RECORDER.is_on, FAULTS.counts]))
"""


def said(folder: Path, loggers: str, age: str, **env: str) -> list[object]:
    """What the program prints beside a package named vllm that has these loggers and nothing else."""
    package = folder / "vllm" / "v1" / "metrics"
    package.mkdir(parents=True)
    for level in (package, package.parent, package.parent.parent):
        (level / "__init__.py").write_text("")
    (package / "loggers.py").write_text(loggers)
    path = os.pathsep.join((str(folder), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, age], capture_output=True, text=True, check=False, env={"PYTHONPATH": path, **env}
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_it_is_a_logger_for_all_engines_where_vllm_has_such_and_one_for_each_before(tmp_path: Path) -> None:
    """Only the former are told of sleep; requests that cannot be watched are counted, and steps are heard all the same."""
    record = str(tmp_path / "record")
    assert said(tmp_path / "new", NEW, "new") == [True, 4, 1, False, {}]
    assert said(tmp_path / "old", OLD, "old") == [True, 4, None, False, {}]
    assert said(tmp_path / "bare", NEW, "new", PLIMSOLL_RECORD=record) == [True, 4, 1, True, {"watching requests": 1}]

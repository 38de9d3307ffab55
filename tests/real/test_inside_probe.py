"""The probe in a real worker: as the worker extension, and as a plugin beside another extension."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.engine.server import EngineServer
from plimsoll.inside.figures import GROUPS, read_figures
from tests.fakes import eventually
from tests.real.conftest import SOURCE, declare, need_vllm

EXTENSION = """
class Another:
    def somebody_elses(self):
        return self.plimsoll_figures()["rank"]
"""


def figures(server: EngineServer, folder: Path) -> list[dict[str, Any]]:
    """What an API server would read now."""
    return read_figures(str(folder), server.pid, time.monotonic()) if folder.is_dir() else []


def call(server: EngineServer, method: str, **given: str) -> dict[str, Any]:
    """A method of the one worker, through vLLM's own endpoint."""
    reply = server.post("/collective_rpc", {"method": method, "kwargs": given})
    assert reply.status == 200, reply.text
    (result,) = reply.json()["results"]
    return dict(result) if isinstance(result, dict) else {"result": result}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes of the probed server share."""
    return tmp_path_factory.mktemp("probe") / "run"


@pytest.fixture(scope="module")
def probed(folder: Path) -> Iterator[EngineServer]:
    """A server with the probe as its worker extension, which writes before the model is loaded; its last test kills it."""
    need_vllm()
    env = {"PYTHONPATH": SOURCE, "PLIMSOLL_DIR": str(folder), "PLIMSOLL_SAMPLE_S": "0.25", "PLIMSOLL_HISTORY": "100"}
    env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as in production
    with EngineServer(["--worker-extension-cls", "plimsoll.inside.Probe"], env) as server:
        eventually(lambda: figures(server, folder), 600)
        assert figures(server, folder)[0]["phase"] == "starting"
        server.wait_ready()
        yield server


def test_figures_are_the_workers_calls_are_answered_and_samples_cost_little(probed: EngineServer, folder: Path) -> None:
    """One worker, fresh, of the right process and rank, with a reason for what it lacks; a sample takes less than 5 ms."""
    log = probed.log_text()
    assert "Injected <class 'plimsoll.inside.probe.Probe'>" in log
    assert "plimsoll: figures of this worker every 0.25 s" in log
    eventually(lambda: figures(probed, folder)[0]["phase"] == "serving")
    (found,) = figures(probed, folder)
    assert {child.pid: child.name for child in probed.children()}[found["pid"]].startswith("VLLM::Worker")
    assert found["alive"]
    assert found["age_s"] < 5
    assert (found["engine"], found["rank"], found["device"], found["vllm"]) == (0, 0, "cpu", "0.32.0")
    status = Path(f"/proc/{found['pid']}/status").read_text()
    (resident_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert found["host_memory"]["resident"] == pytest.approx(resident_kib * 1024, rel=0.05)
    assert found["budget"]["kv_cache"] == 1 << 30, "VLLM_CPU_KVCACHE_SPACE is one GiB"
    assert found["allocator"] is None
    unknown = {f"budget.{name}" for name in GROUPS["budget"] if found["budget"][name] is None}
    assert unknown | {"allocator", "device_memory"} <= set(found["reasons"])
    assert found["faults"] == {}
    done = call(probed, "plimsoll_compact")
    assert done["resident_before"] > 0 <= done["duration_s"]
    eventually(lambda: figures(probed, folder)[0]["samples"] >= 20 and figures(probed, folder)[0]["last_compact"] == done)
    assert 0 < figures(probed, folder)[0]["sample_us"] < 5000
    assert "CUDA" in call(probed, "plimsoll_snapshot")["refused"]
    assert "CUDA" in call(probed, "plimsoll_snapshot", history="1000")["refused"]
    assert call(probed, "plimsoll_figures")["rank"] == 0


def test_figures_of_a_stopped_worker_grow_old_and_of_a_dead_one_stay(probed: EngineServer, folder: Path) -> None:
    """Stopped: still readable, alive, and older than three seconds. Killed with its engine: readable, and not alive."""
    (found,) = figures(probed, folder)
    os.kill(found["pid"], signal.SIGSTOP)
    try:
        eventually(lambda: figures(probed, folder)[0]["age_s"] > 3)
        assert figures(probed, folder)[0]["alive"]
        assert probed.get("/metrics").status == 200
    finally:
        os.kill(found["pid"], signal.SIGCONT)
    eventually(lambda: figures(probed, folder)[0]["age_s"] < 2)
    assert probed.complete("and on", max_tokens=4).status == 200
    probed.kill_engine_core()
    eventually(lambda: not figures(probed, folder)[0]["alive"])


def test_as_a_plugin_it_works_beside_another_extension(start_engine: Callable[..., EngineServer], tmp_path: Path) -> None:
    """Their method answers and so do ours, the thread runs, and what an earlier worker left is gone."""
    path, run = declare(tmp_path / "site", "plimsoll_probe = plimsoll.inside.plugin:install"), tmp_path / "run"
    (tmp_path / "site" / "another_extension.py").write_text(EXTENSION)
    run.mkdir(mode=0o700)
    (run / "worker-4194303-1.json").write_text("{")
    env = {"PYTHONPATH": path, "PLIMSOLL_DIR": str(run), "PLIMSOLL_PROBE": "plugin", "VLLM_PLUGINS": "plimsoll_probe"}
    server = start_engine("--worker-extension-cls", "another_extension.Another", env=env)
    assert "Injected <class 'another_extension.Another'>" in server.log_text()
    eventually(lambda: [each["phase"] for each in figures(server, run)] == ["serving"])
    assert call(server, "somebody_elses") == {"result": "0"}
    assert call(server, "plimsoll_compact")["resident_before"] > 0
    assert "refused" in call(server, "plimsoll_snapshot", history="5")
    (found,) = figures(server, run)
    assert [path.name for path in run.glob("worker-*.json")] == [f"worker-{found['pid']}-{found['started']}.json"]
    assert found["faults"] == {}

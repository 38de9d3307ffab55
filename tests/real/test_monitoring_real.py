"""The generated monitoring around a real vLLM 0.32.0, and guard's judgement of it: silent while nothing is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.draw_dashboard import drawing
from lab.engine.clients import complete
from lab.engine.server import EngineServer
from lab.write_monitoring_page import CONDITIONAL
from plimsoll.assets.alerts import groups_of, thresholds_of
from plimsoll.assets.monitoring import monitoring_files
from plimsoll.assets.settings import AssetSettings
from plimsoll.guard.judge.policy import GRADES
from tests.assets.test_dashboards import expressions
from tests.assets.watched import metrics_of
from tests.fakes import eventually
from tests.guard.daemon.guards import Guard, guarding
from tests.real.conftest import GATED, GATED_ENV, TOKEN, ready
from tests.real.test_guard_real import doctor
from tests.real.watching import Watching, watching

CLIENTS = 12
# Of an impatient operator, so that a test need not wait as long for a dead engine; all else as it is generated.
OUTAGE_S = 20
CPU_ONLY = ("plimsoll_torch_", "plimsoll_device_")
PICTURES = "PLIMSOLL_PICTURES"
"""A folder: the dashboards of the run are drawn there."""


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    """A pool that is too small for what it is asked, with gate and probe; the test kills it."""
    env = {**GATED_ENV, "PLIMSOLL_WEDGE_S": "600"}  # guard is to find it, not the gate
    with ready(("--num-gpu-blocks-override", "18", "--max-num-seqs", "8", *GATED), env) as server:
        yield server


@pytest.mark.parametrize(
    "idle_s", [pytest.param(25.0, marks=pytest.mark.timeout(600, func_only=True)), pytest.param(600.0, marks=pytest.mark.soak)]
)
def test_silence_then_a_storm_a_stuck_worker_and_a_death(engine: EngineServer, tmp_path: Path, idle_s: float) -> None:
    """Idle, nobody is told or about to be; a storm and a killed engine reach the webhook; every metric and panel has data.

    Guard calls each by its name: recomputed tokens are advice, a stopped worker is stuck and well again when it goes on.
    """
    (tmp_path / "gate.token").write_text(TOKEN, encoding="ascii")
    (tmp_path / "gate.token").chmod(0o600)
    (tmp_path / "plimsoll.toml").write_text(
        f"[api]\nlisten = '127.0.0.1:0'\n[[engine]]\nurl = '{engine.url}'\nname = 'tiny'\ncanary = '5s'\n"
        "token_file = 'gate.token'\n[policy.dead]\nrefused = '10s'\nfor = '3s'\n[policy.wedged]\nstill = '10s'\n"
        "[policy.storm]\nover = '1m'\nfor = '5s'\nshare = 0.02\nleast = 3\n",
        encoding="utf-8",
    )
    with guarding(tmp_path, "--config", str(tmp_path / "plimsoll.toml")) as guard:
        settings = AssetSettings(
            "0.32.0", name="real", targets=(f"127.0.0.1:{engine.port}",), guard_target=f"127.0.0.1:{guard.port}"
        )
        bounds = thresholds_of(settings, outage_s=OUTAGE_S)
        with watching(tmp_path, settings, bounds, guard.token) as watched:
            time.sleep(idle_s)
            assert watched.webhook.got == []
            assert watched.query("ALERTS") == []  # none waits for its time to come, either
            _storm(engine, watched, guard)
            _stuck(engine, guard)
            _died(engine, watched, guard)
            _metrics_are_there(watched, settings)
            _panels_have_data(watched, settings)


def conditions(guard: Guard) -> dict[str, dict[str, Any]]:
    """What guard says of the engine, by kind."""
    return {one["kind"]: one for one in guard.json("/conditions")["conditions"]}


def acting(guard: Guard) -> set[str]:
    """The conditions that hold and could lead to an action."""
    return {kind for kind, one in conditions(guard).items() if one["status"] == "true" and GRADES.get(kind)}


def _storm(engine: EngineServer, watched: Watching, guard: Guard) -> None:
    """More long answers at once than the pool can hold, until somebody is told."""
    is_over = threading.Event()

    async def client(number: int) -> None:
        while not is_over.is_set():
            await complete(engine.port, 900, stream=True, prompt=f"tale {number}")

    async def clients() -> None:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    thread = threading.Thread(target=lambda: asyncio.run(clients()), daemon=True)
    thread.start()
    watched.until("VllmPreemptionStorm", 150.0)
    assert "VllmPreemptionStorm" in watched.firing("/ticket")
    assert "VllmEngineDown" not in watched.firing(), "it serves"
    eventually(lambda: conditions(guard)["storm"]["status"] == "true", 60)
    assert "recomputed" in conditions(guard)["storm"]["message"]
    assert acting(guard) == set(), "a storm alone leads to no action"
    is_over.set()
    thread.join(120)


def _stuck(engine: EngineServer, guard: Guard) -> None:
    """A worker is stopped amid a stream, and goes on."""
    long = threading.Thread(target=lambda: asyncio.run(complete(engine.port, 1900, stream=True)), daemon=True)
    long.start()
    time.sleep(1.0)
    worker = next(child.pid for child in engine.children() if "Worker" in child.name)
    os.kill(worker, signal.SIGSTOP)
    try:
        eventually(lambda: "wedged" in acting(guard), 90)
        assert conditions(guard)["wedged"]["reason"] == "NoStep"
        assert acting(guard) == {"wedged"}
    finally:
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: acting(guard) == set(), 90)
    long.join(120)


def _died(engine: EngineServer, watched: Watching, guard: Guard) -> None:
    """The kernel's killer takes the engine core, or anybody: vLLM ends with exit code 0, and doctor does not blame memory."""
    engine.kill_engine_core()
    watched.until("VllmEngineDown", 90.0)
    assert "VllmEngineDown" in watched.firing("/page")
    eventually(lambda: acting(guard) == {"dead"}, 60)
    code, said = doctor(str(engine.log_path))
    codes = [found["code"] for found in said["findings"]]
    of_the_storm = {"kv.preemption-storm", "kv.saturated"} & set(codes)  # the log may show it, too
    assert (code, said["memory_failure"], codes[0]) == (1, True if of_the_storm else None, "engine.dead")
    assert of_the_storm or any("dmesg" in ask for ask in said["collect_next"])
    said = doctor(str(engine.log_path), "--exit-code", str(engine.wait_exit()))[1]
    assert said["memory_failure"] is (True if of_the_storm else None)


def _metrics_are_there(watched: Watching, settings: AssetSettings) -> None:
    """Each metric of each rule and panel is on a page, or its condition is documented; of vLLM's own none is missing."""
    asked_for: set[str] = set()
    for group in groups_of(settings):
        for expr in [*(record.expr for record in group.records), *(alert.expr for alert in group.alerts)]:
            asked_for |= metrics_of(expr)
    for name, text in monitoring_files(settings).items():
        if name.endswith(".json"):
            asked_for |= {metric for expr in expressions(json.loads(text)) for metric in metrics_of(expr)}
    missing = asked_for - watched.names()
    made_of_them = {name for name in missing if name in ("plimsoll:held:bytes", "plimsoll:device_room:bytes")}
    assert {name for name in missing - made_of_them if not name.startswith(tuple(CONDITIONAL))} == set()
    assert not {name for name in missing if name.startswith("vllm:")}
    seen = {name for name in missing - made_of_them if not name.startswith(CPU_ONLY)}
    assert seen <= {"plimsoll_refused_total", "plimsoll_guard_trouble", "plimsoll_guard_actions_total"}


def _panels_have_data(watched: Watching, settings: AssetSettings) -> None:
    """Each expression of each panel returned something in this run, but for those about a GPU and about what did not happen."""
    absent = (*CPU_ONLY, "plimsoll:held", "plimsoll:device_room", "plimsoll_refused_total")
    for name, text in monitoring_files(settings).items():
        if not name.endswith(".json"):
            continue
        page = json.loads(text)
        for panel in page["panels"]:
            for target in panel.get("targets", ()):
                if not any(start in target["expr"] for start in absent):
                    assert watched.ever(target["expr"]), f"{name}: {panel['title']}: {target['expr']}"
        if folder := os.environ.get(PICTURES):
            picture = drawing(watched.url, page, (watched.began_s, time.time()))
            Path(folder, Path(name).with_suffix(".svg").name).write_text(picture, encoding="utf-8")

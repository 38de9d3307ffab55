"""`plimsoll inside check` and the wheel on the real vLLM 0.32.0; no server is started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lab.engine.install import engine_home
from plimsoll.assets.inside_wheel import make_wheel, write_wheel
from tests.real.conftest import need_vllm
from tests.real.small_farm import ran

# What vLLM itself does with an extension before a worker is made, asked of the classes that it would extend; and what it
# does with plugins.
CONFIRM = """
import importlib, json
from plimsoll.inside import Gate, Probe
homes = {"gpu_worker": "Worker", "cpu_worker": "CPUWorker", "xpu_worker": "XPUWorker", "worker_base": "WorkerBase"}
classes = [getattr(importlib.import_module(f"vllm.v1.worker.{home}"), name) for home, name in homes.items()]
names = [name for name in dir(Probe) if not name.startswith("__")]
from vllm.plugins import load_plugins_by_group
groups = ("vllm.stat_logger_plugins", "vllm.general_plugins")
loaded = {group: load_plugins_by_group(group) for group in groups}
from vllm.v1.metrics.loggers import StatLoggerBase
logger = loaded[groups[0]]["plimsoll"]
made = [type(f"With{c.__name__}", (type("Copy", c.__bases__, dict(c.__dict__)), Probe), {}) for c in classes]
print("answer " + json.dumps({
    "clashes": [f"{c.__name__}.{n}" for c in classes for n in names if hasattr(c, n)],
    "names": names,
    "own_new": [c.__name__ for c in classes if c.__new__ is not object.__new__],
    "reaches_ours": all(c.__new__ is not object.__new__ for c in made),
    "is_class": isinstance(Gate, type),
    "is_logger": isinstance(logger, type) and issubclass(logger, StatLoggerBase),
    "plugins": sorted(name for group in groups for name in loaded[group] if name.startswith("plimsoll")),
}))
"""


def _check(*words: str) -> tuple[int, dict[str, Any]]:
    checked = (sys.executable, "-m", "plimsoll", "inside", "check", "--json", "--python", str(engine_home() / "bin" / "python"))
    done = ran(*checked, "--", *words, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, dict(json.loads(done.stdout))


def test_the_real_engine_takes_everything_which_importing_it_confirms(tmp_path: Path) -> None:
    """All parts and entry points of the wheel; without it exit 1; the real classes have none of our names and no __new__."""
    need_vllm()
    wheel = write_wheel(make_wheel(), str(tmp_path))
    code, body = _check("env", f"PYTHONPATH={wheel}", "vllm", "serve", "m")
    assert code == 0, body
    assert body["stands_for_it"] == "0.32.0"
    assert {part["works"] for part in body["parts"]} == {"yes"}
    assert {need["state"] for need in body["needs"]} == {"found"}
    points = ["plimsoll", "plimsoll_door", "plimsoll_probe", "plimsoll_survive"]
    assert body["package"] == {"visible": True, "entry_points": points}
    code, body = _check("vllm", "serve", "m")
    assert (code, body["package"]["visible"]) == (1, False)
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    environment.pop("VLLM_PLUGINS", None)
    done = ran(str(engine_home() / "bin" / "python"), "-c", CONFIRM, timeout=300, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("answer ")).partition(" ")[2])
    names = answer.pop("names")
    assert names
    assert all(name.startswith("plimsoll_") for name in names)
    assert answer == {
        "clashes": [], "own_new": [], "reaches_ours": True, "is_class": True, "is_logger": True,
        "plugins": ["plimsoll", "plimsoll_door", "plimsoll_probe", "plimsoll_survive"],
    }  # fmt: skip

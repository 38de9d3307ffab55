"""What plimsoll.inside imports: the standard library and itself, so that it loads beside every vLLM since 0.8.0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

INSIDE = Path(__file__).parents[2] / "src" / "plimsoll" / "inside"
NEEDS_VLLM = "plimsoll.inside.stat_logger"  # a subclass of vLLM's; nobody but vLLM or the gate imports it
LOADED = f"""
import importlib, json, pkgutil, sys
before = set(sys.modules)
import plimsoll.inside
package = set(sys.modules) - before
from plimsoll.inside import Gate, Probe
for module in pkgutil.walk_packages(plimsoll.inside.__path__, "plimsoll.inside."):
    if module.name != "{NEEDS_VLLM}":
        importlib.import_module(module.name)
print(json.dumps([sorted(package), sorted(set(sys.modules) - before)]))
"""


def test_every_module_loads_with_the_standard_library_alone() -> None:
    """Without site-packages; `import plimsoll.inside` alone opens no socket, and of ours only top modules come along."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", LOADED], capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": str(INSIDE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    package, everything = json.loads(done.stdout)
    assert not {"socket", "ctypes", "asyncio", "subprocess", "multiprocessing", "ssl"} & set(package)
    ours = {name for name in everything if name.partition(".")[0] == "plimsoll"}
    assert {name for name in ours if not name.startswith("plimsoll.inside")} <= {"plimsoll", "plimsoll.errors"}
    assert {name.partition(".")[0] for name in everything} - {"plimsoll", "__mp_main__"} <= set(sys.stdlib_module_names)

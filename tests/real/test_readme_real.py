"""Commands of the README, docs/inside.md and docs/install.md that need an engine or a package index, as they are typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest

from lab.engine.install import NO_NETWORK, PIP_DETOURS
from lab.page import commands_of
from tests.real.conftest import StartEngine

ROOT = Path(__file__).parents[2]
README, INSIDE, DASHBOARD, INSTALL = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/inside.md", "docs/dashboard.md", "docs/install.md")
)
GUARD = "plimsoll guard --engine http://127.0.0.1:8000"
PAGE = "http://127.0.0.1:9790/"
INSTALLS = ("pip install .", "pip install '.[simulate]'")


@pytest.mark.timeout(300)
def test_the_two_flags_and_guard_work_as_they_are_typed(start_engine: StartEngine, tmp_path: Path) -> None:
    """vLLM starts with both flags and says that it is ready; guard finds it and serves its page where its page says."""
    (typed,) = (command.text for command in commands_of(INSIDE) if command.text.startswith("vllm serve MODEL "))
    assert GUARD.partition("--")[0] in DASHBOARD
    assert PAGE in DASHBOARD
    engine = start_engine(*typed.split()[3:], env={"PYTHONPATH": str(ROOT / "src")}, forks=True)
    assert engine.get("/plimsoll/ready").status == 200
    words = [sys.executable, "-m", *GUARD.replace("8000", str(engine.port)).split()]
    guard = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    )
    try:
        assert guard.stdout is not None
        assert "answers, vLLM 0.32.0" in guard.stdout.readline()
        assert b"<html" in _page()
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(30) == 0
    finally:
        guard.kill()


def _page() -> bytes:
    """What is served there, as soon as it is."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end_s = time.monotonic() + 20
    while True:
        try:
            with opener.open(PAGE, timeout=5) as answer:
                read: bytes = answer.read()
                return read
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)


@pytest.mark.timeout(600)
def test_pip_installs_the_command_and_what_simulate_needs(tmp_path: Path) -> None:
    """`pip install .` brings the command and what it declares, in 120 MB; with [simulate] come numpy and numba, no more."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name not in (*PIP_DETOURS, "PYTHONPATH")} | {"PATH": path}
    brought, size_mb = [], []
    for command in INSTALLS:
        assert f"`{command}`" in README + INSTALL
        ran = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if ran.returncode and NO_NETWORK.search(ran.stderr) and os.environ.get("CI", "").lower() in ("", "0", "false"):
            pytest.skip("pip reaches no package index from here")
        assert ran.returncode == 0, ran.stderr[-2000:]
        listed = subprocess.run(["pip", "list", "--format=freeze"], env=env, capture_output=True, text=True, check=True)
        brought.append({line.partition("==")[0].lower() for line in listed.stdout.splitlines()} - {"pip", "setuptools"})
        size_mb.append(sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert {re.split(r"[>=<]", one)[0] for one in declared} < brought[0]
    assert not brought[0] & {"numpy", "numba", "pydantic", "ray", "torch", "uvicorn", "vllm"}
    assert size_mb[0] < 120
    assert brought[1] == brought[0] | {"numpy", "numba", "llvmlite"}
    said = subprocess.run(["plimsoll", "--help"], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("usage: plimsoll COMMAND")
    assert (home / "bin" / "plimsoll").is_file()

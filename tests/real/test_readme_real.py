"""Commands of the README and of pages that need an engine or a package index, as they are typed; the whole tutorial."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engine.install import NO_NETWORK, PIP_DETOURS
from lab.page import commands_of
from lab.page_world import answers
from tests.fakes import eventually
from tests.real.conftest import StartEngine, need_vllm
from tests.real.small_farm import IN_CI, need, ran

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
        eventually(lambda: answers(PAGE, b"<html"))
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(30) == 0
    finally:
        guard.kill()


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
        done = ran("sh", "-c", command, cwd=ROOT, env=env)
        if done.returncode and NO_NETWORK.search(done.stderr) and not IN_CI:
            pytest.skip("pip reaches no package index from here")
        assert done.returncode == 0, done.stderr[-2000:]
        listed = ran("pip", "list", "--format=freeze", env=env)
        brought.append({line.partition("==")[0].lower() for line in listed.stdout.splitlines()} - {"pip", "setuptools"})
        size_mb.append(sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert {re.split(r"[>=<]", one)[0] for one in declared} < brought[0]
    assert not brought[0] & {"numpy", "numba", "pydantic", "ray", "torch", "uvicorn", "vllm"}
    assert size_mb[0] < 120
    assert brought[1] == brought[0] | {"numpy", "numba", "llvmlite"}
    assert ran("plimsoll", "--help", env=env, cwd=tmp_path).stdout.startswith("usage: plimsoll COMMAND")
    assert (home / "bin" / "plimsoll").is_file()


def test_the_wheel_holds_every_module_template_and_table(tmp_path: Path) -> None:
    """Everything under src/plimsoll that git has, and the pages that `plimsoll doctor --explain` prints."""
    built = ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("plimsoll_line-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    listed = ran("git", "ls-files", "src/plimsoll", "docs/findings", cwd=ROOT).stdout.split()
    there = [path for path in listed if (ROOT / path).is_file()]
    assert {path.removeprefix("src/").replace("docs/findings", "plimsoll/findings") for path in there} - packed == set()
    assert "plimsoll/assets/templates/start.sh.j2" in packed


TUTORIAL = ROOT / "docs" / "tutorial.md"
LIMIT_S = 900.0  # on a machine that has much else to do; alone it is four minutes


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_tutorial_is_true(record_property: Callable[[str, object], None]) -> None:
    """Every command ends as it should and prints what is shown; nothing is left running. Otherwise one line says where."""
    need_vllm()
    need("curl", "curl")
    # A process of its own: should this one be killed, it notices, and ends what it has started.
    words = [sys.executable, "-m", "lab.run_page", str(TUTORIAL)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, times = process.communicate(timeout=LIMIT_S)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert (process.returncode, said) == (0, ""), said + times[-2000:]
    took = [float(seconds) for seconds in re.findall(r":\d+: ([\d.]+) s: ", times)]
    assert len(took) == len(commands_of(TUTORIAL.read_text(encoding="utf-8")))
    record_property("figures", {"commands": len(took), "seconds": round(sum(took)), "longest": max(took)})
    typed = "".join(command.text for command in commands_of(TUTORIAL.read_text(encoding="utf-8")))
    parts = "flags plan tune assets guard guardctl doctor".split()
    assert [part for part in parts if f"plimsoll {part} " not in typed] == [], "it goes through the whole loop"

"""A launch from generated files, a stand-in in the place of vLLM: started by the script, left by the unit, stopped."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lab.engine.server import free_port
from plimsoll.assets.inside_wheel import make_wheel
from plimsoll.assets.launch import launch_files
from tests.assets.plans import MODELS, plan_of, settings_of

TOKEN = "a-token-that-is-long-enough"
SOURCES = str(Path(__file__).parents[2] / "src")


def _ready(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/plimsoll/ready", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_script_starts_it_and_the_unit_takes_it_out_before_the_stop(tmp_path: Path) -> None:
    """`exec` leaves one process; the wheel beside the script holds gate and leave; after SIGTERM it ends with code 0."""
    port = free_port()
    made = settings_of(plan_of("vllm", "serve", MODELS[0], "--max-model-len", "4k", "--port", str(port)))
    wheel = make_wheel()
    (tmp_path / wheel.name).write_bytes(wheel.content)
    (tmp_path / "gate.token").write_text(TOKEN, encoding="utf-8")
    files = {name: text.replace("/etc/plimsoll", str(tmp_path)) for name, text in launch_files(made, ["systemd"]).items()}
    script = tmp_path / "start.sh"
    script.write_text(files["systemd/vllm-start.sh"].replace(made.wheel, wheel.name), encoding="utf-8")
    shim = tmp_path / "vllm"
    shim.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -m plimsoll standin --gpu H100 "$@"\n', encoding="utf-8"
    )  # fmt: skip
    shim.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": SOURCES, "PLIMSOLL_TOKEN_FILE": str(tmp_path / "gate.token")}
    process = subprocess.Popen(["/bin/sh", str(script)], env=environ)
    try:
        end = time.monotonic() + 60
        while _ready(port) != 200:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        command = re.search(r"ExecStop=-(.*)", files["systemd/vllm.service"])
        assert command is not None
        # -S: what is installed beside this Python is not seen, so that the wheel alone must do.
        said = (
            command[1].replace(made.wheel, wheel.name).replace("python3", f"{sys.executable} -S").replace("leave 30", "leave 2")
        )
        left = subprocess.run(shlex.split(said), env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert (left.returncode, left.stdout) == (0, "it refuses new work and is idle\n"), left.stderr
        assert _ready(port) == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(made.timers.stop_s) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("name", ["vllm.service", "plimsoll-guard.service"])
def test_no_unit_names_a_file_that_is_not_made_or_asked_for(name: str) -> None:
    """What lies in /etc/plimsoll is generated, or docs/launch.md says how to make it."""
    made = settings_of(plan_of("vllm", "serve", MODELS[0]))
    files = launch_files(made, ["systemd"])
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    named = set(re.findall(r"/etc/plimsoll/([\w.-]+)", files[f"systemd/{name}"]))
    by_hand = {"gate.token", "guard.token", "guard-read.token", "vllm.env"}
    assert named <= {path.partition("/")[2] for path in files} | by_hand | {made.wheel}
    assert "$f.token" in page
    assert "/etc/plimsoll/vllm.env" in page

"""What is generated to launch a server, in the hands of the programs that will read it; and a stand-in started by it."""

from __future__ import annotations

import http.client
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.engine.server import free_port
from lab.page_world import answers
from plimsoll.assets.inside_wheel import make_wheel
from plimsoll.assets.launch import launch_files
from tests.assets.plans import MODELS, SECRET, plan_of, random_plan, settings_of
from tests.each import cases, each, sure
from tests.fakes import eventually
from tests.net.page_server import serving
from tests.real.small_farm import need, ran
from tests.real.watching import process_of

AWKWARD = (
    ("env", "MY_NOTE=50% of $5 'quoted' # $(date)", "vllm", "serve", MODELS[0], "--api-key", SECRET),
    (
        "vllm", "serve", MODELS[1], "--chat-template", "{{ messages }} it's %h ${HOME} # no comment",
        "--served-model-name", "a b",
    ),
    ("env", "VLLM_USE_RUST_FRONTEND=1", "vllm", "serve", MODELS[0]),
)  # fmt: skip


@each("words", AWKWARD)
def test_systemd_has_nothing_to_say_of_the_units(words: tuple[str, ...], tmp_path: Path) -> None:
    """`systemd-analyze verify` on the server's and guard's unit, with programs that exist; a misspelt setting is named."""
    files = launch_files(settings_of(plan_of(*words)), ["systemd"])
    for name in ("vllm-start.sh", "vllm.env", "gate.token", "guard.token", "guard-read.token"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    paths = []
    for name in ("vllm.service", "plimsoll-guard.service"):
        text = files[f"systemd/{name}"].replace("/etc/plimsoll", str(tmp_path)).replace("/usr/bin/plimsoll", sys.executable)
        paths.append(tmp_path / name)
        paths[-1].write_text(text, encoding="utf-8")
    command = [need("systemd-analyze", "systemd"), "verify", "--man=no", *map(str, paths)]
    done = ran(*command)
    told = [line for line in (done.stdout + done.stderr).splitlines() if str(tmp_path) in line or ".service:" in line]
    assert (done.returncode, told) == (0, [])
    paths[0].write_text(paths[0].read_text(encoding="utf-8").replace("KillMode=", "KillMod="), encoding="utf-8")
    assert "KillMod" in ran(*command).stderr


@each("seed", range(6))
def test_shellcheck_has_nothing_to_say_of_the_script(seed: int, tmp_path: Path) -> None:
    """Whatever the planned command holds."""
    script = tmp_path / "start.sh"
    plan = plan_of(*AWKWARD[seed]) if seed < len(AWKWARD) else random_plan(random.Random(seed))
    script.write_text(launch_files(settings_of(plan), ["systemd"])["systemd/vllm-start.sh"], encoding="utf-8")
    done = ran(need("shellcheck", "shellcheck"), str(script))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real HAProxy with the generated configuration, in front of a server that says yes to everything."""
    folder, port = tmp_path_factory.mktemp("haproxy"), free_port()
    text = launch_files(settings_of(plan_of("vllm", "serve", MODELS[0])), ["systemd"])["systemd/haproxy.cfg"]
    with serving(lambda one: one.answer(b"ok", X_Priority=one.headers.get("X-Plimsoll-Priority", "none"))) as behind:
        for generated, here in (
            ("bind :8080", f"bind 127.0.0.1:{port}"), ("127.0.0.1:8000", behind.host),
            ("/run/haproxy/admin.sock", str(folder / "admin.sock")),
        ):  # fmt: skip
            assert generated in text
            text = text.replace(generated, here)
        (folder / "haproxy.cfg").write_text(text, encoding="utf-8")
        with process_of([need("haproxy", "haproxy"), "-db", "-f", str(folder / "haproxy.cfg")], folder / "log"):
            eventually(lambda: answers(f"http://127.0.0.1:{port}/v1/models"))
            yield port


def _asked(port: int, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("POST", path, skip_accept_encoding=True)  # the path goes out as it is
    for name, value in {"Content-Length": "2", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(b"{}")
    return connection.getresponse()


OPEN, CLOSED = cases("assets", "paths that clients reach and paths that they do not")


def test_clients_reach_what_is_theirs_and_nothing_else(proxy: int) -> None:
    """The OpenAI paths; no drains, figures, adapters and admin endpoints, however spelled, and no priority of theirs."""
    assert {path: _asked(proxy, path).status for path in OPEN} == dict.fromkeys(OPEN, 200)
    assert {path: _asked(proxy, path).status for path in CLOSED} == dict.fromkeys(CLOSED, 404)
    assert _asked(proxy, "/v1/models", X_Plimsoll_Priority="high").headers["X-Priority"] == "none"


TOKEN = "a-token-that-is-long-enough"
SOURCES = str(Path(__file__).parents[2] / "src")


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
    shim.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m plimsoll standin --gpu H100 "$@"\n', encoding="utf-8")
    shim.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": SOURCES, "PLIMSOLL_TOKEN_FILE": str(tmp_path / "gate.token")}
    process, ready = subprocess.Popen(["/bin/sh", str(script)], env=environ), f"http://127.0.0.1:{port}/plimsoll/ready"
    try:
        eventually(lambda: process.poll() is not None or answers(ready), 60)
        assert process.poll() is None
        command = sure(re.search(r"ExecStop=-(.*)", files["systemd/vllm.service"]))
        # -S: what is installed beside this Python is not seen, so that the wheel alone must do.
        said = command[1].replace(made.wheel, wheel.name).replace("leave 30", "leave 2")
        left = ran(*shlex.split(said.replace("python3", f"{sys.executable} -S")), env=environ, timeout=30)
        assert (left.returncode, left.stdout) == (0, "it refuses new work and is idle\n"), left.stderr
        assert process.poll() is None
        assert not answers(ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(made.timers.stop_s) == 0
    finally:
        process.kill()


def test_no_unit_names_a_file_that_is_not_made_or_asked_for() -> None:
    """What lies in /etc/plimsoll is generated, or docs/launch.md says how to make it."""
    made = settings_of(plan_of("vllm", "serve", MODELS[0]))
    files = launch_files(made, ["systemd"])
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    named = set(re.findall(r"/etc/plimsoll/([\w.-]+)", files["systemd/vllm.service"] + files["systemd/plimsoll-guard.service"]))
    by_hand = {"gate.token", "guard.token", "guard-read.token", "vllm.env"}
    assert named <= {path.partition("/")[2] for path in files} | by_hand | {made.wheel}
    assert "$f.token" in page
    assert "/etc/plimsoll/vllm.env" in page

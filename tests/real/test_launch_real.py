"""What is generated to launch a server, in the hands of the programs that will read it."""

from __future__ import annotations

import contextlib
import http.client
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lab.engine.parser import ParserProcess
from lab.engine.server import free_port
from lab.page_world import answers
from plimsoll.assets.launch import WAYS, launch_files
from tests.assets.plans import MODELS, SECRET, plan_of, random_plan, settings_of
from tests.assets.started import started_words
from tests.each import each
from tests.fakes import eventually
from tests.real.small_farm import need

PLANS = 50
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
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [line for line in (ran.stdout + ran.stderr).splitlines() if str(tmp_path) in line or ".service:" in line]
    assert (ran.returncode, told) == (0, [])
    paths[0].write_text(paths[0].read_text(encoding="utf-8").replace("KillMode=", "KillMod="), encoding="utf-8")
    assert "KillMod" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


@each("seed", range(6))
def test_shellcheck_has_nothing_to_say_of_the_script(seed: int, tmp_path: Path) -> None:
    """Whatever the planned command holds."""
    script = tmp_path / "start.sh"
    plan = plan_of(*AWKWARD[seed]) if seed < len(AWKWARD) else random_plan(random.Random(seed))
    script.write_text(launch_files(settings_of(plan), ["systemd"])["systemd/vllm-start.sh"], encoding="utf-8")
    ran = subprocess.run([need("shellcheck", "shellcheck"), str(script)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


class _Says(BaseHTTPRequestHandler):
    """A server that answers everything with 200, whatever is asked for."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # HAProxy's own check hangs up when it has what it wants
            super().handle()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.send_header("X-Priority", self.headers.get("X-Plimsoll-Priority", "none"))
        self.end_headers()
        self.wfile.write(b"ok")

    do_POST = do_GET  # noqa: N815  the name of the one it stands beside

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the one it replaces
        """Say nothing."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real HAProxy with the generated configuration, in front of a server that says yes to everything."""
    folder = tmp_path_factory.mktemp("haproxy")
    behind = ThreadingHTTPServer(("127.0.0.1", 0), _Says)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    made = settings_of(plan_of("vllm", "serve", MODELS[0]))
    port = free_port()
    text = launch_files(made, ["systemd"])["systemd/haproxy.cfg"]
    replaced = {
        "bind :8080": f"bind 127.0.0.1:{port}",
        "127.0.0.1:8000": f"127.0.0.1:{behind.server_port}",
        "/run/haproxy/admin.sock": str(folder / "admin.sock"),
    }
    for generated, here in replaced.items():
        assert generated in text
        text = text.replace(generated, here)
    config = folder / "haproxy.cfg"
    config.write_text(text, encoding="utf-8")
    process = subprocess.Popen([need("haproxy", "haproxy"), "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(f"http://127.0.0.1:{port}/v1/models"))
        yield port
    finally:
        process.terminate()
        process.wait()
        behind.shutdown()


def _asked(port: int, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("POST", path, skip_accept_encoding=True)  # the path goes out as it is
    for name, value in {"Content-Length": "0", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    return connection.getresponse()


OPEN = """
/v1/models /v1/chat/completions /v1/completions?stream=1 /v1/responses /v1/responses/resp_1-a /v1/responses/resp_1/cancel
/v1/embeddings /v1/messages
"""
CLOSED = """
/plimsoll/drain /plimsoll/ready //plimsoll/drain /%70limsoll/drain /v1/../plimsoll/drain /v1/models/../../plimsoll/drain
/v1/models%2f..%2f..%2fplimsoll%2fdrain /metrics /health /sleep /collective_rpc /server_info /v1/load_lora_adapter
/v1/load%5flora_adapter /v1/unload_lora_adapter /V1/LOAD_LORA_ADAPTER /v1/responses/../load_lora_adapter
/v1/responses/a/../../load_lora_adapter / /docs /v1 /v1/models/
"""


def test_clients_reach_what_is_theirs_and_nothing_else(proxy: int) -> None:
    """The OpenAI paths; no drains, figures, adapters and admin endpoints, however spelled, and no priority of theirs."""
    assert {path: _asked(proxy, path).status for path in OPEN.split()} == dict.fromkeys(OPEN.split(), 200)
    assert {path: _asked(proxy, path).status for path in CLOSED.split()} == dict.fromkeys(CLOSED.split(), 404)
    assert _asked(proxy, "/v1/models", X_Plimsoll_Priority="high").headers["X-Priority"] == "none"


def test_the_commands_of_fifty_random_plans_are_taken_by_the_real_parser(parser: ParserProcess, tmp_path: Path) -> None:
    """As a shell, Docker and the kubelet start them; with the gate, the probe and the timer that the files reckon with."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(PLANS):
        made = settings_of(random_plan(dice))
        for way, words in started_words(launch_files(made, WAYS), tmp_path).items():
            assert words[:2] == ["vllm", "serve"]
            answer = parser.parse(words[1:])
            assert answer["ok"], (seed, way, words, answer)
            space = answer["namespace"]
            assert space["shutdown_timeout"] == made.timers.shutdown_s, (seed, way, words)
            assert space["middleware"][-1] == "plimsoll.inside.Gate", (seed, way, words)
            assert space.get("api_key") is None, (seed, way, words)
            assert space.get("port", 8000) == made.command.port if made.command else False, (seed, way, words)

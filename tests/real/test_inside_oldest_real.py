"""plimsoll.inside beside the libraries of vLLM 0.8.0, the oldest release that docs/support.md names, from a package index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.engine.install import NO_NETWORK, PIP_DETOURS
from plimsoll.assets.inside_wheel import make_wheel, write_wheel

# The oldest that its metadata allows (fastapi[standard]>=0.115.0, pydantic>=2.9, prometheus_client>=0.18.0, typing_extensions),
# and for what it leaves open the newest of the day of that release, 2025-03-18.
LIBRARIES = """
    fastapi==0.115.0 starlette==0.37.2 pydantic==2.9.0 prometheus_client==0.18.0 prometheus-fastapi-instrumentator==7.0.0
    uvicorn==0.34.0 h11==0.14.0 httptools==0.6.4 uvloop==0.21.0 aiohttp==3.11.14 msgspec==0.19.0 pyyaml==6.0.2 psutil==7.0.0
""".split()
# Every module is loaded, a gate is served by uvicorn around a FastAPI app, and its endpoints are asked there and at their own.
USE = """
import asyncio, http.client, importlib, json, pkgutil, socket, sys, threading, time

sys.modules["vllm"] = None  # it is not here
import plimsoll.inside
for module in pkgutil.walk_packages(plimsoll.inside.__path__, "plimsoll.inside."):
    if not module.name.endswith(".stat_logger"):  # a subclass of vLLM's own
        importlib.import_module(module.name)
import fastapi, prometheus_client, uvicorn
from plimsoll.inside import Gate
from plimsoll.inside.faults import FAULTS

app = fastapi.FastAPI()
app.mount("/metrics", prometheus_client.make_asgi_app())
app.add_middleware(Gate)

@app.post("/v1/completions")
async def complete(request: fastapi.Request):
    return {"echo": (await request.json())["prompt"]}

place = socket.socket()
place.bind(("127.0.0.1", 0))
port = place.getsockname()[1]
server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
thread.start()
while not server.started:
    time.sleep(0.01)

def ask(method, path, body=None, own=False):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    if own:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(OWN)
    connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()

import os
TOKEN, OWN = os.environ["PLIMSOLL_TOKEN"], os.environ["PLIMSOLL_LISTEN"].removeprefix("unix:")
assert ask("POST", "/v1/completions", '{"prompt": "a"}') == (200, '{"echo":"a"}')
assert ask("GET", "/plimsoll/ready")[0] == 503
while not os.path.exists(OWN):
    time.sleep(0.01)
status, state = ask("GET", "/plimsoll/state", own=True)
assert (status, json.loads(state)["begun"]) == (200, 1), state
assert ask("POST", "/plimsoll/drain", '{"refuse": true}', own=True)[0] == 200
assert ask("POST", "/v1/completions", '{"prompt": "a"}')[0] == 503
page = ask("GET", "/metrics/")[1]
assert "plimsoll_drain_phase 2.0" in page and 'plimsoll_refused_total{why="drain"} 1.0' in page, page
server.should_exit = True
thread.join()
print(json.dumps(FAULTS.counts))
"""


@pytest.mark.timeout(600)
def test_it_loads_and_serves_beside_the_libraries_of_the_oldest_release(tmp_path: Path) -> None:
    """Every module loads; readiness, state, a drain and the metrics work, and no fault of ours is counted."""
    home, wheel = tmp_path / "venv", write_wheel(make_wheel(), str(tmp_path))
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    env = {name: value for name, value in os.environ.items() if name not in (*PIP_DETOURS, "PYTHONPATH")}
    command = [str(home / "bin" / "pip"), "install", "-q", "--no-compile", *LIBRARIES]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ran.returncode and NO_NETWORK.search(ran.stderr) and os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip("pip reaches no package index from here")
    assert ran.returncode == 0, ran.stderr[-2000:]
    env |= {"PYTHONPATH": str(wheel), "PLIMSOLL_TOKEN": "a-token-of-some-length", "PLIMSOLL_DIR": str(tmp_path / "run")}
    env["PLIMSOLL_LISTEN"] = f"unix:{tmp_path}/own.sock"
    python = home / "bin" / "python"
    used = subprocess.run([python, "-c", USE], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert used.returncode == 0, used.stderr[-2000:]
    assert used.stdout.strip() == "{}", used.stdout

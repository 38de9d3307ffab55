"""Real stand-ins and a real guard with its page, as processes, for whoever looks at the page with a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.engine.server import free_port

ACTS, READS, GATE = "a-token-that-may-do-all-of-it", "a-token-that-may-only-look", "a-token-of-the-gates-themselves"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
GATED = ("--middleware", "plimsoll.inside.Gate", "--worker-extension-cls", "plimsoll.inside.Probe", "--shutdown-timeout", "10")
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_CTL = """#!/bin/sh
# start, stop and ask for one stand-in
cd {folder} || exit 1
PLIMSOLL_TOKEN=$(cat gate.token)
export PLIMSOLL_TOKEN PYTHONPATH={path}
case "$1" in
  start) setsid {python} -m plimsoll standin --port {port} {flags} >>{name}.log 2>&1 </dev/null & echo $! >{name}.pid ;;
  stop)
    cat says 2>/dev/null
    kill -TERM "$(cat {name}.pid)"
    for _ in $(seq 300); do kill -0 "$(cat {name}.pid)" 2>/dev/null || exit 0; sleep 0.1; done
    exit 1 ;;
  status) kill -0 "$(cat {name}.pid)" 2>/dev/null && exit 0; exit 3 ;;
esac
"""


class World:
    """What runs, and where."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.engines: dict[str, int] = {}
        self._scripts: dict[str, Path] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []
        self._servers: list[ThreadingHTTPServer] = []
        self._is_over = threading.Event()
        self.environment = {
            **os.environ, "PLIMSOLL_TOKEN": GATE, "XDG_RUNTIME_DIR": str(folder), "STATE_DIRECTORY": str(folder),
            "VLLM_LOG_STATS_INTERVAL": "3600",
        }  # fmt: skip
        folder.chmod(0o700)
        for name, token in (("acts.token", ACTS), ("reads.token", READS), ("gate.token", GATE)):
            (folder / name).write_text(token, encoding="ascii")
            (folder / name).chmod(0o600)

    # Engines

    def engine(self, name: str, *flags: str) -> None:
        """One stand-in with gate and probe, which guard can stop and start."""
        port = self.engines[name] = free_port()
        script = self._scripts[name] = self.folder / f"ctl-{name}"
        words = shlex.join([*GATED, *flags])
        script.write_text(
            _CTL.format(
                folder=self.folder,
                python=sys.executable,
                port=port,
                flags=words,
                name=name,
                path=shlex.quote(os.environ.get("PYTHONPATH", "")),
            ),
            encoding="utf-8",
        )
        script.chmod(0o700)
        subprocess.run([str(script), "start"], env=self.environment, check=True)

    def fleet(self, count: int, first_port: int) -> None:
        """So many in one process, without gates."""
        self._others.append(
            subprocess.Popen(
                [sys.executable, "-m", "plimsoll", "standin", "--fleet", str(count), "--port",
                 str(first_port), "--speed", "0.05", "--fault", "preemption-storm=3"],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        for number in range(count):
            self.engines[f"engine-{number:03}"] = first_port + number

    def odd(self, name: str, like: str, model: str) -> None:
        """One that shows the page of another with a model name of its own, and says that it is that version."""
        source = f"http://127.0.0.1:{self.engines[like]}/metrics"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """The page, or the version."""
                if self.path == "/metrics":
                    with _HTTP.open(source, timeout=10) as answer:
                        text = answer.read().decode()
                    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                    often = -1 if len(escaped) < 10_000 else 4  # more would be a page that guard does not read to its end
                    body = (
                        text.replace(MODEL, escaped, often).replace('cache_dtype="auto"', f'cache_dtype="{escaped}"').encode()
                    )
                else:
                    body = json.dumps({"version": model[:90]}).encode()
                self.send_response(200)
                self.send_header("content-type", "text/plain; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._servers.append(server)
        self.engines[name] = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def wait_ready(self, within_s: float = 90.0) -> None:
        """Until every engine shows its page."""
        end_s = time.monotonic() + within_s
        for name, port in self.engines.items():
            while not answers(f"http://127.0.0.1:{port}/metrics"):
                assert time.monotonic() < end_s, f"{name} does not answer"
                time.sleep(0.2)

    def begin(self, name: str) -> Callable[[], None]:
        """One long request; what ends it, as a client does that hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.engines[name], timeout=30)
        body = {"model": MODEL, "prompt": "word", "max_tokens": 8000, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read(1)

        def hang_up() -> None:
            answer.close()
            connection.close()

        return hang_up

    def running(self, name: str) -> float:
        """How many requests run, by the engine's own page."""
        with _HTTP.open(f"http://127.0.0.1:{self.engines[name]}/metrics", timeout=10) as answer:
            found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None, "the page has no such line"
        return float(found[1])

    def kill(self, name: str) -> None:
        """Ends one as a crash would."""
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def fault(self, name: str, kind: str, **more: object) -> None:
        """Something goes wrong with one."""
        self.post(f"http://127.0.0.1:{self.engines[name]}/standin/faults", GATE, {"kind": kind, **more})

    def load(self, name: str, clients: int, words: int = 400, tokens: int = 300) -> None:
        """So many clients that ask it again and again."""
        url = f"http://127.0.0.1:{self.engines[name]}/v1/completions"
        body = json.dumps({"model": MODEL, "prompt": "word " * words, "max_tokens": tokens}).encode()

        def ask() -> None:
            while not self._is_over.is_set():
                asked = urllib.request.Request(url, body, {"content-type": "application/json"})
                try:
                    with _HTTP.open(asked, timeout=60) as answer:
                        answer.read()
                except OSError:
                    self._is_over.wait(0.5)

        for _ in range(clients):
            threading.Thread(target=ask, daemon=True).start()

    # Guard

    def guard(self, *words: str, every: str = "1s", text: str = "", act: str = "") -> None:
        """Until its API answers. `text`: more of the configuration, where engines stand by themselves; `act`: more of [act]."""
        tables = [f'[policy]\nevery = "{every}"\n', text]
        tables.append(f'[api]\nlisten = "127.0.0.1:{self.port}"\ntoken_file = "acts.token"\nread_token_file = "reads.token"\n')
        tables.append(f'[act]\nprobation = "10s"\nbackoff = "30s"\n{act}' if "--act" in words else "")
        tables += [self._table(name, port) for name, port in self.engines.items()]
        path = self.folder / "plimsoll.toml"
        path.write_text("\n".join(tables), encoding="utf-8")
        with (self.folder / "guard.log").open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "plimsoll", "guard", "--config", str(path), *words],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        end_s = time.monotonic() + 30
        while not answers(f"{self.url}/healthz"):
            assert time.monotonic() < end_s, self.log()
            assert self._guard.poll() is None, self.log()
            time.sleep(0.1)

    def _table(self, name: str, port: int) -> str:
        lines = ["[[engine]]", f"name = {json.dumps(name, ensure_ascii=False)}", f'url = "http://127.0.0.1:{port}"']
        script = self._scripts.get(name)
        if script is not None:
            verbs = {"stop": "stop", "start": "start", "is_running": "status"}
            commands = ", ".join(f"{key} = {json.dumps([str(script), verb])}" for key, verb in verbs.items())
            lines += ['token_file = "gate.token"', 'balancer = "readiness"', f"restart = {{{commands}}}"]
        return "\n".join(lines) + "\n"

    def log(self) -> str:
        """What guard has said."""
        return (self.folder / "guard.log").read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, token: str = ACTS) -> Any:
        """What its API answers."""
        with _HTTP.open(urllib.request.Request(f"{self.url}{path}", headers={"authorization": f"Bearer {token}"})) as answer:
            return json.load(answer)

    def post(self, url: str, token: str, body: object) -> Any:
        """One POST."""
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        with _HTTP.open(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=20) as answer:
            return json.load(answer)

    def close(self) -> None:
        """End all of it."""
        self._is_over.set()
        for server in self._servers:
            server.shutdown()
        running = [one for one in (self._guard, *self._others) if one is not None and one.poll() is None]
        for one in running:
            one.terminate()
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(20)
            if one.poll() is None:
                one.kill()
        for path in self.folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """A place for them, ended whatever happens."""
    found = World(folder)
    try:
        yield found
    finally:
        found.close()


def answers(url: str, holds: bytes = b"") -> bool:
    """Whether somebody there says 200, with this in the body."""
    try:
        with _HTTP.open(url, timeout=5) as answer:
            return answer.status == 200 and holds in answer.read()
    except OSError:
        return False

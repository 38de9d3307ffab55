"""One vLLM server with or without `plimsoll.inside`, on the GPU or on the lab's CPU engine, and the questions put to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lab.gpu.provoke_failures import smi

ROOT = Path(__file__).resolve().parents[2]
TOKEN = secrets.token_hex(16)
INSIDE = ("--worker-extension-cls", "plimsoll.inside.Probe", "--middleware", "plimsoll.inside.Gate")
READY_LIMIT_S = 300.0
STOP_LIMIT_S = 8.0
MIB = 1 << 20
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_PLUGINS": ""}


class Served(Protocol):
    """What both kinds of server can do."""

    port: int
    log_path: Path

    def start(self) -> None:
        """Start it and return at once."""

    def wait_ready(self, timeout_s: float = READY_LIMIT_S) -> None:
        """Return when it serves; raise when it ends or the time is over."""

    def exit_code(self) -> int | None:
        """None while it runs."""

    def stop(self) -> int:
        """End it and all its processes."""


class GpuServer:
    """`vllm serve` by this very Python, with dummy weights."""

    def __init__(self, model: Path, port: int, flags: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.port, self.log_path = port, log_path
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self.command += ["--served-model-name", "m", "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port)]
        self.command += flags
        self._env = {**QUIET, **os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a group of its own but in our session: whoever ends this session ends it too."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, process_group=0
            )

    def wait_ready(self, timeout_s: float = READY_LIMIT_S) -> None:
        """Return when /health answers 200."""
        limit = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None and time.monotonic() < limit:
            if ask(self.port, "GET", "/health")[0] == 200:
                return
            time.sleep(0.3)
        end = self.log_path.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"not ready (exit code {code}):\n{end}")

    def exit_code(self) -> int | None:
        """None while the API server runs."""
        assert self._process is not None, "start() first"
        return self._process.poll()

    def stop(self) -> int:
        """SIGTERM, and soon after SIGKILL to the group."""
        assert self._process is not None, "start() first"
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def inside_env(work: Path, name: str) -> dict[str, str]:
    """What a server with everything of ours is started with: token, recorder, a shared folder of its own."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    return {
        "PYTHONPATH": path,
        "PLIMSOLL_TOKEN": TOKEN,
        "PLIMSOLL_DIR": str(work / f"run-{name}"),
        "PLIMSOLL_RECORD": str(work / f"record-{name}"),
    }


def ask(port: int, method: str, path: str, seconds: float = 30.0, body: object = None) -> tuple[int, Any]:
    """The status and the answer, as JSON where it is; 0 and the reason where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        is_json = "json" in (answer.getheader("content-type") or "")
        return answer.status, json.loads(text) if is_json else text
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, repr(error)
    finally:
        connection.close()


def workers(port: int) -> list[dict[str, Any]]:
    """The figures of every worker; none where the answer is no answer."""
    status, said = ask(port, "GET", "/plimsoll/memory")
    return list(said["workers"]) if status == 200 and isinstance(said, dict) else []


def allocator(port: int) -> dict[str, Any]:
    """What the first worker says of torch's allocator; empty where it has none, as on a CPU."""
    found = workers(port)
    return dict(found[0]["allocator"] or {}) if found else {}


# nvidia-smi


def read_gpu(text: str) -> dict[str, int] | None:
    """Bytes from `nvidia-smi --query-gpu=memory.used,memory.total --format=csv`, of the first GPU; None where it says none."""
    for line in text.splitlines():
        found = re.fullmatch(r"\s*(\d+) MiB,\s*(\d+) MiB\s*", line)
        if found:
            return {"used": int(found[1]) * MIB, "total": int(found[2]) * MIB}
    return None


def read_apps(text: str) -> dict[int, int]:
    """Bytes of each process from `nvidia-smi --query-compute-apps=pid,used_memory --format=csv`."""
    rows = re.findall(r"^\s*(\d+),\s*(\d+) MiB\s*$", text, re.MULTILINE)
    return {int(pid): int(mib) * MIB for pid, mib in rows}


def ask_smi() -> dict[str, Any]:
    """Both questions, with the time at which they were asked."""
    began = time.time()
    gpu = smi("--query-gpu=memory.used,memory.total", "--format=csv")
    apps = smi("--query-compute-apps=pid,used_memory", "--format=csv")
    return {"at": (began + time.time()) / 2, "gpu": gpu, "apps": apps}

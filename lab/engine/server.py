"""Starts, asks, breaks and ends one real vLLM server, and never leaves a process behind.

    with EngineServer(["--num-gpu-blocks-override", "18"]) as server:
        server.wait_ready()
        server.complete("hello", max_tokens=8).json()

The server runs in a session of its own. Beside it stands a keeper: a tiny process that kills that whole session the
moment this one ends, however it ends. (PR_SET_PDEATHSIG would reach the API server alone, and fires when the thread
that started it ends.)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lab.engine.install import engine_home, model_home
from plimsoll.demo.balancer import free_port as free_port  # the one that the whole lab takes

PLUGIN_HOME = Path(__file__).resolve().parent / "oom_on_demand"
PLUGIN = "oom_on_demand"
OOM_FLAG_FILE = "PLIMSOLL_LAB_OOM_FLAG"
FORKING_HOME = Path(__file__).resolve().parent / "forking"

MODEL_NAME = "tiny"
READY_LIMIT_S = 240.0  # 24 s on idle cores, 90 s on busy ones
STOP_LIMIT_S = 60.0
ORPHANS_LIMIT_S = 3.0
KILLED_LIMIT_S = 30.0  # after SIGKILL; what dies gives its memory back first, and on busy cores that takes its time
REQUEST_LIMIT_S = 180.0
TAIL_LINES = 40
NICE = 10
PROC = Path("/proc")
GONE = frozenset("ZX")  # states of a process that has ended

# Reads the number of a session, then waits: when its input ends without a word, it kills that session and removes the
# folder it was told of.
KEEPER = """
import os, shutil, signal, sys
session = int(sys.stdin.readline())
if sys.stdin.readline() == "":
    try: os.killpg(session, signal.SIGKILL)
    except ProcessLookupError: pass
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

# No proxy, whatever the environment says: the server is on this machine.
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def let_others_run(pid: int, nice: int = NICE) -> None:
    """Have a process, and what it starts, make way for whoever watches it: vLLM's processes spin while they wait.

    On two cores a client of its own session got no turn for up to six seconds of a stream (Linux 6.18, sessions scheduled as
    groups); with this, none for 0.13 s at most. A session's weight counts where the kernel groups, the nice value elsewhere.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}", encoding="ascii")


class EngineDiedError(Exception):
    """The server ended, or never became ready; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Reply:
    """What the server answered, whatever the status."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Child:
    """One process of the server other than the API server."""

    pid: int
    name: str


def living(entry: Path, session: int) -> Child | None:
    """The process of this folder of /proc, if it lives and is of this session.

    One that has ended, or is about to (its memory is gone, and its command line with it), lives no more.
    """
    with contextlib.suppress(OSError):
        # After the name in brackets: state, parent, group, session.
        state, _, _, of = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
        title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if int(of) == session and state not in GONE and title:
            return Child(int(entry.name), title)
    return None


class EngineServer:
    """One `vllm serve` of the tiny model with these flags; start it once, stop it as often as you like."""

    def __init__(
        self,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        dev_mode: bool = True,
        oom_on_demand: bool = False,
        forks: bool = False,
        log_path: Path | None = None,
        port: int | None = None,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="plimsoll-engine-")  # gone with this object
        self._oom_flag = Path(self._scratch.name) / "oom"
        self._may_oom = oom_on_demand
        self.log_path = log_path or Path(self._scratch.name) / "vllm.log"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = serve_command(self.port, flags)
        self.env = self._environment(env or {}, dev_mode=dev_mode)
        if forks:
            self.env |= forking(self.env)
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def _environment(self, extra: Mapping[str, str], *, dev_mode: bool) -> dict[str, str]:
        env = {**clean_environment(), "VLLM_SERVER_DEV_MODE": str(int(dev_mode))}
        env["TMPDIR"] = self._scratch.name  # vLLM leaves files behind where it keeps temporary ones
        env |= extra
        if self._may_oom:
            env["VLLM_PLUGINS"] = ",".join(filter(None, (env["VLLM_PLUGINS"], PLUGIN)))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(PLUGIN_HOME))))
            env[OOM_FLAG_FILE] = str(self._oom_flag)
        return env

    # Life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return at once."""
        assert self._process is None, "one EngineServer is one server: make another"
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, self._scratch.name], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, start_new_session=True
            )
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{self._process.pid}\n".encode())
        let_others_run(self._process.pid)

    def wait_ready(self, timeout_s: float = READY_LIMIT_S) -> None:
        """Return when /health answers 200; raise when the server ends or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if (code := self.exit_code()) is not None:
                raise EngineDiedError(f"vLLM ended with exit code {code} before it was ready\n{self.log_tail()}")
            with contextlib.suppress(OSError):
                if self.get("/health", timeout_s=5.0).status == 200:
                    return
            if time.monotonic() > deadline_s:
                raise EngineDiedError(f"vLLM was not ready after {timeout_s:.0f} s\n{self.log_tail()}")
            time.sleep(0.25)

    def wait_exit(self, timeout_s: float = STOP_LIMIT_S) -> int:
        """The exit code of a server that ends on its own; raise when it does not."""
        try:
            return self._started().wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineDiedError(f"vLLM has not ended after {timeout_s:.0f} s\n{self.log_tail()}") from None

    def exit_code(self) -> int | None:
        """The exit code of the API server, or None while it runs."""
        return self._started().poll()

    def stop(self, timeout_s: float = STOP_LIMIT_S) -> int:
        """SIGTERM to the API server alone, after a while SIGKILL to all that is left; the API server's exit code."""
        process = self._started()
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=timeout_s)
        self._kill_session()
        code = process.wait(timeout=10)
        if self._keeper is not None:
            self._keeper.communicate(b"over\n", timeout=10)
            self._keeper = None
        return code

    def _kill_session(self) -> None:
        """Kill whatever the server left running and wait until nothing of it is left."""
        started_s = time.monotonic()
        while self._started().poll() is None or self.children():
            waited_s = time.monotonic() - started_s
            # Python's resource tracker unlinks shared memory after the API server has ended: it gets the time for it.
            if self._started().poll() is None or waited_s > ORPHANS_LIMIT_S:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            assert waited_s < ORPHANS_LIMIT_S + KILLED_LIMIT_S, f"killed and still there: {self.children()}"
            time.sleep(0.05)

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() first"
        return self._process

    # What can be seen

    @property
    def pid(self) -> int:
        """The API server: the process to send signals to, and the number of the session."""
        return self._started().pid

    def children(self) -> list[Child]:
        """Every other living process of the server, orphans included."""
        entries = (entry for entry in PROC.iterdir() if entry.name.isdigit() and int(entry.name) != self.pid)
        return [child for entry in entries if (child := living(entry, self.pid)) is not None]

    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last lines the server has printed."""
        return "\n".join(self.log_text().splitlines()[-TAIL_LINES:])

    # What can be asked

    def get(self, path: str, timeout_s: float = REQUEST_LIMIT_S) -> Reply:
        """GET; an error status is an answer, no connection is an OSError."""
        return self._ask(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = REQUEST_LIMIT_S) -> Reply:
        """POST of a JSON body, or of none; an error status is an answer, no connection is an OSError."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, data=data, headers=headers), timeout_s)

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> Reply:
        try:
            with _HTTP.open(request, timeout=timeout_s) as answer:
                return Reply(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read())

    def metrics(self) -> str:
        """The /metrics page."""
        return self.get("/metrics").text

    def complete(self, prompt: str, max_tokens: int = 16, timeout_s: float = REQUEST_LIMIT_S, **more: Any) -> Reply:
        """One completion; `more` are further fields of the request, as `ignore_eos=True`."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, **more}
        return self.post("/v1/completions", body, timeout_s)

    # What can be broken

    def kill_engine_core(self) -> int:
        """SIGKILL to the engine core, as the kernel's OOM killer sends it; the pid it had."""
        (core,) = (child for child in self.children() if child.name.startswith("VLLM::EngineCore"))
        os.kill(core.pid, signal.SIGKILL)
        return core.pid

    def arm_oom(self) -> None:
        """From now on every engine step fails with torch's out-of-memory error."""
        assert self._may_oom, "start it with oom_on_demand=True"
        self._oom_flag.touch()

    def crash_with_oom(self, timeout_s: float = STOP_LIMIT_S) -> int:
        """Make a step fail, send the request that causes one, and return the exit code the server ends with."""
        self.arm_oom()
        with contextlib.suppress(OSError):  # a 500, or the connection goes with the server
            self.complete("the last words", max_tokens=4, timeout_s=timeout_s)
        return self.wait_exit(timeout_s)


def serve_command(port: int, flags: Sequence[str]) -> list[str]:
    """The command line; a flag given here wins over the lab's own, which come first."""
    command = [str(engine_home() / "bin" / "vllm"), "serve", str(model_home())]
    command += ["--served-model-name", MODEL_NAME]
    command += ["--load-format", "dummy"]  # the model has no weights
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # Left to itself vLLM takes bfloat16, and on a virtual machine whose CPU names AMX without having it the first
    # request then ends the worker with SIGILL. float32 runs everywhere.
    command += ["--dtype", "float32"]
    command += ["--max-model-len", "2048"]
    command += ["--enforce-eager"]  # compiling would cost minutes, and these kernels prove nothing about a GPU's
    return [*command, *flags]


def clean_environment() -> dict[str, str]:
    """Our environment without what would change the engine, and with what a quiet, offline start needs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",  # the model is a folder; a start must not depend on a network
        "VLLM_NO_USAGE_STATS": "1",  # a test is not usage
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is a share of the whole machine's memory
        "VLLM_PLUGINS": "",  # none but those asked for
        "VLLM_CACHE_ROOT": str(engine_home() / "vllm-cache"),  # deleting the engine deletes what it wrote
        "VLLM_CONFIG_ROOT": str(engine_home() / "vllm-config"),
    }


def forking(env: Mapping[str, str]) -> dict[str, str]:
    """What to add so that vLLM's processes fork: a start takes 11 s of a core in place of 25 s.

    For tests of what stands outside. What runs inside vLLM's own processes is tested with "spawn", as in production; so is
    what a killed engine core brings about: a worker that was forked holds the pipe whose end would tell of its death.
    """
    path = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(FORKING_HOME))))
    return {"PYTHONPATH": path, "PLIMSOLL_LAB_FORKS": "1", "OMP_NUM_THREADS": "1"}  # threads of the parent are not forked

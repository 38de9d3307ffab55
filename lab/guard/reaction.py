"""How long guard takes from a fault to its action, by its defaults: a crash, two at once, its own server, three wedges.

    python -m lab.guard.reaction crash both own wedge             any of them; a line each, exit 1 where one is over its bound
    python -m lab.guard.reaction --real crash own wedge call      the same with vLLM's CPU build; `call`: a worker call of 100 s

Each engine has the gate and stands behind a small supervisor (start, stop, status by a file with its process id), and guard is
a process of its own that acts. A core that hangs is a stand-in's fault, or of the real engine a process that is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from lab.engine.server import clean_environment, free_port, living, serve_command

ROOT = Path(__file__).parents[2]
CALL_S = 100.0
NAPPING = "import time\n\n\nclass Nap:\n    def nap(self, seconds):\n        time.sleep(seconds)\n"
NEEDED = ("VLLM_", "HF_", "PYTHON", "PLIMSOLL_")
INSIDE = ("--middleware", "plimsoll.inside.Gate")
TOKEN = "a-token-for-the-reaction-lab"
BOUNDS_S = {"crash": 15.0, "both": 15.0, "own": 2.0, "wedge": 130.0}
SUPERVISOR = """#!/bin/sh
# start, stop or status of one server, by the process id in FOLDER/NAME.pid
file="$1/$2.pid"
{exports}
case "$3" in
start) cd "$1" && setsid sh -c 'echo $$ > "$0"; exec "$@"' "$file" {command} >> "$1/$2.log" 2>&1 < /dev/null & ;;
stop) kill "$(cat "$file")" 2>/dev/null; while kill -0 "$(cat "$file")" 2>/dev/null; do sleep 0.1; done ;;
status) kill -0 "$(cat "$file" 2>/dev/null)" 2>/dev/null && exit 0; exit 3 ;;
esac
"""


class Scene:
    """A folder with engines, their supervisor and one guard."""

    def __init__(self, folder: Path, *, is_real: bool) -> None:
        self.folder, self.ports, self.is_real = folder, {name: free_port() for name in ("a", "b")}, is_real
        self.start_s = 300.0 if is_real else 60.0
        (folder / "napping.py").write_text(NAPPING)
        self.guard: subprocess.Popen[str] | None = None
        (folder / "gate.token").write_text(TOKEN)
        (folder / "gate.token").chmod(0o600)

    def command(self, name: str) -> list[str]:
        if self.is_real:
            return serve_command(self.ports[name], (*INSIDE, "--worker-extension-cls", "napping.Nap"))
        return [sys.executable, "-m", "plimsoll", "standin", "--port", str(self.ports[name]), *INSIDE]

    def engine(self, name: str) -> str:
        script = self.folder / f"supervise-{name}"
        # An engine needs more of its environment than guard passes on to a command: the token of its gate, to begin with.
        prefixes = NEEDED if self.is_real else ("PLIMSOLL_",)
        needed = {key: value for key, value in self.environ().items() if key.startswith(prefixes)}
        exports = "\n".join(f"export {key}={shlex.quote(value)}" for key, value in needed.items())
        script.write_text(SUPERVISOR.format(command=shlex.join(self.command(name)), exports=exports))
        script.chmod(0o755)
        verbs = {verb: json.dumps([str(script), str(self.folder), name, word]) for verb, word in VERBS.items()}
        restart = ", ".join(f"{verb} = {words}" for verb, words in verbs.items())
        return (
            f'[[engine]]\nname = "{name}"\nurl = "http://127.0.0.1:{self.ports[name]}"\ntoken_file = "gate.token"\n'
            f'canary = true\nlog = "{name}.log"\nrestart = {{{restart}}}\n'
        )

    def begin(self, *names: str, is_acting: bool = True) -> None:
        """Starts the engines, and guard once they answer."""
        config = "".join(map(self.engine, names)) + f'[act]\njournal = "{self.folder}/guard.journal"\n'
        (self.folder / "guard.toml").write_text(config)
        for name in names:
            self.supervise(name, "start")
            self.until(lambda name=name: self.answers(name), self.start_s)
        self.start_guard("--config", str(self.folder / "guard.toml"), is_acting=is_acting)
        self.until(lambda: all(f"{name}: answers" in self.said() for name in names), 60.0)
        time.sleep(12.0)

    def start_guard(self, *words: str, is_acting: bool = True) -> None:
        out = (self.folder / "guard.out").open("w")
        command = [sys.executable, "-m", "plimsoll", "guard", *(["--act"] if is_acting else []), "--no-api", *words]
        self.guard = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=self.environ(), cwd=self.folder)

    def environ(self) -> dict[str, str]:
        own = {"PLIMSOLL_TOKEN": TOKEN, "XDG_STATE_HOME": str(self.folder / "state"), "PLIMSOLL_DIR": str(self.folder / "run")}
        if not self.is_real:
            return {**os.environ, **own}
        return {**clean_environment(), "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": f"{ROOT / 'src'}:{self.folder}", **own}

    def supervise(self, name: str, verb: str) -> None:
        subprocess.run(
            [self.folder / f"supervise-{name}", self.folder, name, verb], check=False, env=self.environ(), timeout=60
        )

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def core(self, name: str) -> int:
        """The process of a real engine's core."""
        found = [living(entry, self.pid(name)) for entry in Path("/proc").glob("[0-9]*")]
        return next(child.pid for child in found if child is not None and child.name.startswith("VLLM::EngineCore"))

    def hang(self) -> None:
        if self.is_real:
            os.kill(self.core("a"), signal.SIGSTOP)
        else:
            self.ask("a", "/standin/faults", b'{"kind": "wedge"}')

    def go_on(self) -> None:
        if self.is_real:
            os.kill(self.core("a"), signal.SIGCONT)
        else:
            urllib.request.urlopen(self.request("a", "/standin/faults", method="DELETE"), timeout=5.0).close()

    def answers(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.ask(name, "/health") == 200)
        return False

    def ask(self, name: str, path: str, body: bytes | None = None, limit_s: float = 5.0) -> int:
        with urllib.request.urlopen(self.request(name, path, body), timeout=limit_s) as answer:
            return int(answer.status)

    def request(self, name: str, path: str, body: bytes | None = None, method: str | None = None) -> urllib.request.Request:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        return urllib.request.Request(f"http://127.0.0.1:{self.ports[name]}{path}", body, headers, method=method)

    def said(self) -> str:
        out = self.folder / "guard.out"
        return out.read_text() if out.is_file() else ""  # guard may not have been started yet

    def until(self, holds: object, limit_s: float) -> float:
        """How long it took."""
        assert callable(holds)
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > limit_s:
                raise SystemExit(f"nothing after {limit_s:.0f} s; guard said:\n{self.said()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> None:
        if self.guard is not None:
            self.guard.terminate()
            self.guard.wait(60)
        for file in (*self.folder.glob("*.pid"), *self.folder.glob("state/plimsoll/engine.state")):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(file.read_text())  # a number, or guard's record of its own server
                os.killpg(found if isinstance(found, int) else int(found["pid"]), signal.SIGKILL)


VERBS = {"start": "start", "stop": "stop", "is_running": "status"}


@contextlib.contextmanager
def scene(*, is_real: bool = False) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="plimsoll-reaction-", ignore_cleanup_errors=True) as folder:
        made = Scene(Path(folder), is_real=is_real)
        try:
            yield made
        finally:
            made.end()


def crash(*names: str, is_real: bool = False) -> list[float]:
    """The engine core dies with a word in the log, and the server with it; the supervisor says no more than that."""
    with scene(is_real=is_real) as made:
        made.begin(*(names if is_real else ("a", "b")))
        for name in names:
            if not is_real:
                with (made.folder / f"{name}.log").open("a") as log:
                    log.write("ERROR 11-15 09:00:00 [core.py:1] EngineCore encountered a fatal error.\n")
            os.kill(made.core(name) if is_real else made.pid(name), signal.SIGKILL)
        began = time.monotonic()
        for name in names:
            made.until(lambda name=name: f"{name}: restart because" in made.said(), 200.0)
        took = time.monotonic() - began
        for name in names:
            made.until(lambda name=name: f"{name}: undrain: " in made.said(), 60.0 + made.start_s)
        if "cut off" in made.said():
            raise SystemExit(made.said())
        return [took]


def own(*, is_real: bool = False) -> list[float]:
    """A server of guard's own is killed."""
    with scene(is_real=is_real) as made:
        made.start_guard("--engine", f"http://127.0.0.1:{made.ports['a']}", "--", *made.command("a"))
        made.until(lambda: made.answers("a"), made.start_s)
        made.until(lambda: ": answers" in made.said(), 60.0)
        time.sleep(3.0)
        lines = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()}
        port = str(made.ports["a"]).encode()
        (pid,) = (int(path.parent.name) for path, words in lines.items() if port in words and b"guard\0" not in words)
        os.kill(pid, signal.SIGKILL)
        return [made.until(lambda: "restart because guard's own server is not running" in made.said(), 60.0)]


def wedge(times: int = 3, *, is_real: bool = False) -> list[float]:
    """The same engine hangs with a request there, again and again; a dry run decides, so that the budget does not end it."""
    took = []
    with scene(is_real=is_real) as made:
        made.begin("a", is_acting=False)
        for number in range(times):
            made.ask("a", "/v1/completions", b'{"prompt": "hi", "max_tokens": 4}', 60.0)
            made.hang()
            with contextlib.suppress(OSError):
                made.ask("a", "/v1/completions", b'{"prompt": "hi", "max_tokens": 9}', 0.2)
            took.append(made.until(lambda number=number: made.said().count("guard would restart it") > number, 400.0))
            made.go_on()
            made.until(lambda number=number: made.said().count("recovered: engine.wedged") > number, 400.0)
            time.sleep(10.0)
    return took


def call() -> list[float]:
    """A call of every worker takes 100 s, as an update of weights may, while requests wait: nothing is begun."""
    with scene(is_real=True) as made:
        made.begin("a")
        body, pid = json.dumps({"method": "nap", "args": [CALL_S]}).encode(), made.pid("a")
        asked = [("/collective_rpc", body), *[("/v1/completions", b'{"prompt": "hi", "max_tokens": 9}')] * 3]
        began = time.monotonic()
        threads = [threading.Thread(target=made.ask, args=("a", *words, 3 * CALL_S)) for words in asked]
        for thread in threads:
            thread.start()
            time.sleep(1.0)
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
        time.sleep(30.0)
        if took < CALL_S or "a: restart" in made.said() or made.pid("a") != pid:
            raise SystemExit(f"{took:.0f} s; guard said:\n{made.said()}")
        print(f"call   {took:.1f} s with three requests waiting: nothing was begun; guard said:\n{made.said()}", flush=True)
        return []


def main(names: list[str]) -> int:
    is_real = "--real" in names
    plays = {
        "crash": lambda: crash("a", is_real=is_real), "both": lambda: crash("a", "b", is_real=is_real),
        "own": lambda: own(is_real=is_real), "wedge": lambda: wedge(is_real=is_real), "call": call,
    }  # fmt: skip
    is_late = False
    for name in [name for name in names if name != "--real"] or list(BOUNDS_S):
        took = plays[name]()
        if name == "call":
            continue
        is_late = is_late or max(took) > BOUNDS_S[name]
        words = ", ".join(f"{seconds:.1f} s" for seconds in took)
        print(f"{name:<6} {words} from the fault to the action (at most {BOUNDS_S[name]:g} s)", flush=True)
    return int(is_late)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

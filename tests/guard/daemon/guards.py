"""A guard as its own process, for tests: what it says, what its API answers, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes import asked

TOKEN = "a-guard-token-that-is-long"


class Guard:
    def __init__(self, process: subprocess.Popen[str], folder: Path, token: str) -> None:
        self.process, self._folder, self.token = process, folder, token
        self.said: list[str] = []
        self.complained: list[str] = []
        for stream, lines in ((process.stdout, self.said), (process.stderr, self.complained)):
            threading.Thread(target=lambda s=stream, k=lines: k.extend(s), daemon=True).start()

    def hears(self, text: str, patience_s: float = 30.0) -> str:
        return self._found(self.said, text, patience_s)

    def complains(self, text: str, patience_s: float = 30.0) -> str:
        return self._found(self.complained, text, patience_s)

    def _found(self, lines: list[str], text: str, patience_s: float) -> str:
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            for line in list(lines):
                if text in line:
                    return line.rstrip("\n")
            time.sleep(0.02)
        raise AssertionError(f"{text!r} was not said; said was: {self.said} {self.complained}")

    @property
    def port(self) -> int:
        """Where its API listens: it left its token under that number."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for path in (self._folder / "plimsoll").glob("guard-*.token"):
                self.token = path.read_text(encoding="ascii").strip() or self.token
                return int(path.stem.removeprefix("guard-"))
            time.sleep(0.02)
        raise AssertionError(f"no API: {self.complained}")

    def get(self, path: str, method: str = "GET", body: object = None, **headers: str) -> tuple[int, str]:
        """One question to its API, with its token unless told otherwise."""
        told = asked(self.port, method, path, body, **{"authorization": f"Bearer {self.token}", **headers})
        return told.status, told.body.decode()

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@contextlib.contextmanager
def guarding(folder: Path, *words: str, **environ: str) -> Iterator[Guard]:
    """One with an API on a free port, whose own files lie in `folder`."""
    listen = [] if "--no-api" in words or "--config" in words else ["--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "plimsoll", "guard", "--every", "1s", *listen, *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean, "XDG_RUNTIME_DIR": str(folder), "TZ": "UTC", **environ},
    ) as process:  # fmt: skip
        try:
            yield Guard(process, folder, environ.get("PLIMSOLL_GUARD_TOKEN", ""))
        finally:
            if process.poll() is None:
                process.kill()

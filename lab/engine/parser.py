"""Asks the real vLLM 0.32.0 how it reads a command line: the near end of `ask_parser.py`."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lab.engine.install import engine_home
from lab.engine.server import clean_environment

ASK_PARSER = Path(__file__).resolve().parent / "ask_parser.py"
FIRST_LIMIT_S = 180.0  # importing vLLM: 15 s on idle cores
LIMIT_S = 60.0


class ParserDiedError(Exception):
    """The parser process ended or did not answer; the message ends with the last lines it printed."""


class ParserProcess:
    """One long-lived process that holds vLLM's parsers; it ends when this one does, its stdin being closed then."""

    def __init__(self, script: Path = ASK_PARSER, *arguments: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process; closed in stop()
        self._process = subprocess.Popen(
            [str(engine_home() / "bin" / "python"), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env=clean_environment(),
        )
        self._unread = b""
        self._limit_s = FIRST_LIMIT_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def dump(self) -> list[dict[str, Any]]:
        """Every action of `vllm serve`: option_strings, dest, default, nargs, const, choices, type, deprecated, ..."""
        answer = self._ask({"dump": True})
        assert answer["ok"], answer["error"]
        actions: list[dict[str, Any]] = answer["actions"]
        return actions

    def parse(self, argv: Sequence[str], entry: str = "serve") -> dict[str, Any]:
        """What vLLM makes of a command line: `namespace` (what is not at its default) or `error`; and `warnings`."""
        return self._ask({"parse": list(argv), "entry": entry})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise ParserDiedError(f"the parser process has ended\n{self._tail()}") from None
        answer: dict[str, Any] = json.loads(self._read_line(time.monotonic() + self._limit_s))
        self._limit_s = LIMIT_S  # vLLM is imported now
        return answer

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ParserDiedError(f"the parser process did not answer in time\n{self._tail()}")
            if not (more := self._process.stdout.read(1 << 16)):
                raise ParserDiedError(f"the parser process has ended\n{self._tail()}")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _tail(self) -> str:
        self._said.seek(0)
        return "\n".join(self._said.read().decode(errors="replace").splitlines()[-20:])

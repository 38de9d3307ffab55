"""A demo that is stopped says so in one line and leaves nothing behind; what it says before that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process, with its temporary folder here."""
    process = subprocess.Popen(
        [sys.executable, "-m", "plimsoll", "demo", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TMPDIR": str(folder), "NO_COLOR": "1"}, cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process: subprocess.Popen[str], says: str) -> str:
    """Read until this is said."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if says in line:
            return seen
    raise AssertionError(f"it never said {says!r}:\n{seen}")


def left_of(folder: Path) -> list[str]:
    """Commands of processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            around = path.with_name("environ").read_bytes()
        except OSError:
            continue
        if int(path.parent.name) != os.getpid() and (str(folder) in words or str(folder).encode() in around):
            found.append(words)
    return found


@pytest.mark.parametrize(
    ("says", "number", "code"),
    [("Plan: will it fit", signal.SIGINT, 130), ("all serve", signal.SIGTERM, 143), ("all serve", signal.SIGINT, 130)],
)
def test_stopped_at_any_moment_it_leaves_nothing(tmp_path: Path, says: str, number: signal.Signals, code: int) -> None:
    """No process, no file, one line, also where the signal comes twice; before that it said, without colour, where all is."""
    with running(tmp_path, "--balancer", "own") as process:
        text = until(process, says)
        process.send_signal(number)
        time.sleep(0.2)
        process.send_signal(number)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == code, rest
    assert rest.strip().splitlines()[-1] == "plimsoll: stopped; all that was started has ended"
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
    assert left_of(tmp_path) == []
    assert "\x1b" not in text
    if says == "all serve":
        assert re.search(r"page +http://127\.0\.0\.1:\d+/", text)
        assert "--act" in text
        assert "KV cache: " in text

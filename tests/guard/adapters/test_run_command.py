"""Programs run to their end, or not past their limit."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from plimsoll.guard.adapters.run_command import CommandResult, run_command, small_environment
from tests.each import in_loop
from tests.fakes import eventually
from tests.guard.adapters.own_engine import is_alive

# Starts a second Python with the last word, and writes its number to the file that the word before names.
STARTS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
with open(sys.argv[1], "w") as file: file.write(str(child.pid))
"""


def run(*words: str, limit_s: float = 10.0, **more: int | bool) -> CommandResult:
    """In a loop of its own, with Python and its words."""
    return asyncio.run(run_command([sys.executable, "-c", *words], limit_s, small_environment(), **more))  # type: ignore[arg-type]


def test_its_code_and_its_last_line_and_past_the_limit_its_whole_group_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both streams or stdout alone, nothing that guard was given for itself; what a command leaves running lives on."""
    code = "import sys; print('one'); print('two  \\n'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(5)"
    ran = run(code)
    assert (ran.code, ran.last_line, ran.trouble) == (5, "err", "")
    apart = run(code, only_stdout=True)
    assert (apart.last_line, apart.complaints) == ("two", b"err\n")
    monkeypatch.setenv("PLIMSOLL_TOKEN", "secret")
    ran = run("import os, sys; print(sys.argv[1], 'PLIMSOLL_TOKEN' in os.environ)", "$(id) ; `id`")
    assert ran.last_line == "$(id) ; `id` False"
    code = STARTS + "import time; time.sleep(60)"
    ran = run(code, str(tmp_path / "pid"), "import time; time.sleep(60)", limit_s=1.0)
    assert (ran.code, ran.trouble) == (None, "it did not end within 1 s")
    eventually(lambda: not is_alive(int((tmp_path / "pid").read_text())), 10.0)
    (tmp_path / "pid").unlink()
    before = len(list(Path("/proc/self/fd").iterdir()))
    service = "import time\nfor _ in range(100): print('x' * 1000, flush=True); time.sleep(0.02)"
    assert run(STARTS, str(tmp_path / "pid"), service).code == 0
    time.sleep(0.5)
    assert is_alive(int((tmp_path / "pid").read_text()))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before, "no file stays open"


def test_one_that_prints_without_end_is_stopped_and_what_cannot_be_started_is_said() -> None:
    """Only the end of it is kept; one sentence."""
    ran = run("while True: print('x' * 1000)", most_bytes=1 << 20, keep_bytes=100)
    assert (ran.code, ran.trouble, len(ran.output)) == (None, "it prints without end", 100)
    loud = "import sys\nwhile True: sys.stderr.write('x' * 1000)"
    assert run(loud, most_bytes=1 << 20, only_stdout=True).trouble == "it prints without end"
    for words in (["/nonexistent/program"], ["/etc/passwd"], ["a\0b"]):
        ran = asyncio.run(run_command(words, 5.0, {}))
        assert (ran.code, ran.was_started) == (None, False)
        assert ran.trouble.startswith("it cannot be started (")


@in_loop
async def test_a_cancelled_one_is_killed(tmp_path: Path) -> None:
    """Whoever waits no longer leaves nothing behind."""
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    task = asyncio.create_task(run_command([sys.executable, "-c", code], 30.0, {}))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(int((tmp_path / "pid").read_text()))

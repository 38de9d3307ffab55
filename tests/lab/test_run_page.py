"""Pages that are run: what is not true fails with one line, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.run_page import ROOT, NotTrue, run_page

SLEEPS = f"7000.{os.getpid()}"  # seconds that nobody else sleeps for


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def is_asleep() -> bool:
    """Whether a process of these tests is still there."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"sleep\0{SLEEPS}" in entry.read_text(errors="replace"):
                return True
        except OSError:
            continue
    return False


TRUE = f"""\
<!-- the page: home /home/you, checkout /home/you/plimsoll, ports 8000 -->
```console
$ [ ~/plimsoll -ef . ] && cd && mkdir line && cd line && pwd
/home/you/line
$ sleep {SLEEPS} &
$ SLEEPER=$!
$ cat > greet.sh <<EOF
echo "http://127.0.0.1:8000 from $PWD"
EOF
$ bash greet.sh
http://127.0.0.1:8000 from /home/you/line
$ cat
$ kill $SLEEPER; echo 'on the other stream' >&2
on the other stream
```

<!-- run: exit 3 -->
```console
$ (exit 3)
```
"""


def test_a_true_page_runs_in_one_shell_with_a_readers_home_and_ports(tmp_path: Path) -> None:
    """What a command sets, the next one has; home and ports are as on the page; a command that reads finds nothing to read."""
    said: list[str] = []
    run_page(page(tmp_path, TRUE), say=said.append)
    assert len(said) == 8
    assert not is_asleep()


@pytest.mark.parametrize(
    ("true", "false", "line", "said"),
    [
        ("from /home/you/line\n$ cat\n", "from /home/me/line\n$ cat\n", 11, "printed was"),
        ("on the other stream\n```", "```", 13, "more was printed"),
        ("/home/you/line\n$ sl", "/home/you/line\n[...]\nthe end\n$ sl", 6, "not printed: 'the end'"),
        ("exit 3 -->", "exit 2 -->", 19, "exit code 3, not 2"),
        ("$ (exit 3)", "$ exit 3", 19, "ended the shell"),
        ("$ bash greet.sh", "$ bash welcome.sh", 10, "exit code 127"),
        ("$ cat\n", "$ echo 'never closed\n", 12, "exit code"),
        ("kill $SLEEPER; ", "", None, "still runs: sleep"),
    ],
    ids=["text", "more", "cut", "exit-code", "shell", "command", "syntax", "left-running"],
)  # fmt: skip
def test_a_false_page_fails_with_one_line_that_names_page_and_line(
    tmp_path: Path, true: str, false: str, line: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is not so: an output, an exit code, a command, a process that is left; and then nothing is left all the same."""
    monkeypatch.setattr("lab.run_page.GRACE_S", 0.5)
    assert TRUE.count(true) == 1
    path = page(tmp_path, TRUE.replace(true, false))
    with pytest.raises(NotTrue) as failed:
        run_page(path)
    (text,) = str(failed.value).splitlines()
    assert text.startswith(f"{path}:{line}: " if line else f"{path}: "), text
    assert said in text
    assert not is_asleep()


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """Within what is said above it, with all that it started, also in a session of its own."""
    path = page(tmp_path, f"<!-- run: within 1 s -->\n```console\n$ setsid sleep {SLEEPS} & sleep {SLEEPS}\n```\n")
    with pytest.raises(NotTrue, match=r"page\.md:3: not over after 1 s"):
        run_page(path)
    assert not is_asleep()


def test_a_command_is_left_out_only_if_it_is_there(tmp_path: Path) -> None:
    """Else a list of what cannot be run here would outlive what it lists."""
    path = page(tmp_path, "```console\n$ false\n$ echo a\na\n```\n")
    run_page(path, left_out=["false"])
    with pytest.raises(NotTrue, match="left out and not there: true"):
        run_page(path, left_out=["false", "true"])


def test_a_page_that_is_written_is_true(tmp_path: Path) -> None:
    """What was not so is replaced, what was so stays with its cuts, and its numbers are those of this run."""
    above = "<!-- run: numbers differ -->\n"
    path = page(tmp_path, above + "```console\n$ echo a\nb\n$ seq 9\n4\n[...]\n9\n```\n")
    run_page(path, write=True)
    assert path.read_text(encoding="utf-8") == above + "```console\n$ echo a\na\n$ seq 9\n1\n[...]\n9\n```\n"
    run_page(path)


@pytest.mark.parametrize("ends", ["it", "its parent"])
def test_a_run_that_is_stopped_leaves_nothing(tmp_path: Path, ends: str) -> None:
    """SIGTERM to it, and SIGKILL to whoever started it."""
    path = page(tmp_path, f"```console\n$ setsid sleep {SLEEPS} & sleep {SLEEPS}\n```\n")
    words = [sys.executable, "-m", "lab.run_page", str(path)]
    if ends == "its parent":
        words = ["sh", "-c", '"$@"; true', "sh", *words]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    _until(is_asleep)
    process.send_signal(signal.SIGTERM if ends == "it" else signal.SIGKILL)
    process.wait(20)
    _until(lambda: not is_asleep())


def _until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.1)

"""The whole demo, as anybody would run it: to its end, and stopped amid its story."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.each import sure
from tests.real.small_farm import busy

LONGEST_S = 90.0  # on a machine that has nothing else to do
FIRST_S = 20.0


@contextmanager
def demo(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Begun, with its temporary folder here; killed if it has not ended by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "plimsoll", "demo", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder), "NO_COLOR": "1"}, cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process: subprocess.Popen[str], says: str, *, on_stderr: bool = False) -> str:
    """Its story up to the line with these words."""
    stream = sure(process.stderr if on_stderr else process.stdout)
    seen = ""
    for line in stream:
        seen += line
        if says in line:
            return seen
    raise AssertionError(f"it never said {says!r}:\n{seen}")


@pytest.mark.once
@pytest.mark.timeout(300)
def test_four_incidents_and_no_request_is_lost(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Each ends as it should, the first is seen within 20 s, all of it takes less than 90 s, and nothing is left behind."""
    with demo(tmp_path, "--json", "--keep") as process:
        story = until(process, "It goes on", on_stderr=True)
        time.sleep(3.0)
        process.send_signal(signal.SIGINT)
        printed, rest = process.communicate(timeout=240)
    story += rest
    assert printed, f"no summary, exit code {process.returncode}: {story[-3000:]}"
    summary: dict[str, Any] = json.loads(printed)
    figures = {name: summary[name] for name in ("seconds", "requests", "actions", "states")}
    record_property("figures", {**figures, "times_as_busy": round(busy(), 1)})
    assert process.returncode == 0, story
    assert (summary["fine"], summary["requests"]["lost"]) == (True, 0)
    assert summary["requests"]["served"] == summary["requests"]["asked"] > 200
    assert summary["requests"]["waited"] > 0
    assert summary["requests"]["sent_again"] > 0
    assert summary["actions"].pop("shed").keys() == {"done"}
    assert summary["actions"] == {"compact": {"done": 1}, "restart": {"done": 1}}
    assert summary["states"]["c"]["out of service"] > 0
    assert summary["seconds"] < LONGEST_S * busy()
    assert float(next(line for line in story.splitlines() if "guard saw" in line).split()[0]) < FIRST_S * busy()
    assert "engine.wedged" in story
    assert "KV cache 9" in story
    assert list(tmp_path.iterdir()) == []
    for words in shown_on_its_page():
        assert words in _bare(story), words


def shown_on_its_page() -> list[str]:
    """Every line of its story on docs/demo.md, without what differs from run to run."""
    text = (Path(__file__).parents[2] / "docs" / "demo.md").read_text(encoding="utf-8")
    block = text.split("make demo ", 1)[1].split("```", 1)[0].splitlines()[1:]
    lines = [line for line in block if line.strip() and line != "[...]"]
    return [_bare(line) for line in lines if not re.search(r"part\(s\)|took it out|is over|^ +engine |stopped it", line)]


def _bare(text: str) -> str:
    return " ".join(re.sub(r"\d[\d,.]*", "N", text).split())


def left_of(folder: Path) -> list[str]:
    """Commands of processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, around = path.read_bytes(), path.with_name("environ").read_bytes()
        except OSError:
            continue
        if int(path.parent.name) != os.getpid() and str(folder).encode() in words + around:
            found.append(words.decode("utf-8", "replace"))
    return found


@pytest.mark.parametrize(
    ("says", "number", "code"),
    [("Plan: will it fit", signal.SIGINT, 130), ("all serve", signal.SIGTERM, 143), ("all serve", signal.SIGINT, 130)],
)
def test_stopped_at_any_moment_it_leaves_nothing(tmp_path: Path, says: str, number: signal.Signals, code: int) -> None:
    """No process, no file, one line, also where the signal comes twice; before that it said, without colour, where all is."""
    with demo(tmp_path) as process:
        text = until(process, says)
        process.send_signal(number)
        time.sleep(0.2)
        process.send_signal(number)
        said, complained = process.communicate(timeout=30)
    rest = said + complained
    assert process.returncode == code, rest
    assert rest.strip().splitlines()[-1] == "plimsoll: stopped; all that was started has ended"
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
    assert left_of(tmp_path) == []
    assert "\x1b" not in text + rest
    if says == "all serve":
        assert re.search(r"page +http://127\.0\.0\.1:\d+/", text)
        assert "--act" in text
        assert "KV cache: " in text

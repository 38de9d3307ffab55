"""The whole demo, as anybody would run it: with its own balancer, with a real HAProxy, and with an engine that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.small_farm import busy, need

LONGEST_S = 90.0  # on a machine that has nothing else to do
FIRST_S = 20.0


def demo(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Begun, with its temporary folder here."""
    return subprocess.Popen(
        [sys.executable, "-m", "plimsoll", "demo", "--json", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder)}, cwd="/",
    )  # fmt: skip


def ended(process: subprocess.Popen[str], *, is_kept: bool = False) -> tuple[dict[str, Any], str]:
    """Its summary and its story; one that is kept gets Ctrl-C when it goes on. A demo that does not end is killed."""
    told: list[str] = []
    try:
        if is_kept:
            assert process.stderr is not None
            for line in process.stderr:
                told.append(line)
                if "It goes on" in line:
                    break
            time.sleep(3.0)
            process.send_signal(signal.SIGINT)
        printed, rest = process.communicate(timeout=240)
    finally:
        process.kill()
    story = "".join(told) + rest
    assert printed, f"no summary, exit code {process.returncode}: {story[-3000:]}"
    return json.loads(printed), story


@pytest.mark.once
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("balancer", "more"), [("own", ["--keep"]), ("haproxy", [])], ids=["own-kept", "haproxy"])
def test_four_incidents_and_no_request_is_lost(
    tmp_path: Path, balancer: str, more: list[str], record_property: Callable[[str, object], None]
) -> None:
    """Each ends as it should, the first is seen within 20 s, all of it takes less than 90 s, and nothing is left behind."""
    if balancer == "haproxy":
        need("haproxy", "haproxy")
        tmp_path /= "a-folder-whose-path-is-longer-than-a-socket-may-have-" + "x" * 60
        tmp_path.mkdir()
    process = demo(tmp_path, "--balancer", balancer, *more)
    summary, story = ended(process, is_kept=bool(more))
    figures = {name: summary[name] for name in ("seconds", "requests", "actions", "states")}
    record_property("figures", {**figures, "times_as_busy": round(busy(), 1)})
    assert process.returncode == 0, story
    assert summary["fine"] is True
    assert summary["balancer"] == balancer
    assert summary["requests"]["lost"] == 0
    assert summary["requests"]["served"] == summary["requests"]["asked"] > 200
    assert summary["requests"]["waited"] > 0
    assert summary["requests"]["sent_again"] > 0
    assert summary["actions"] == {
        "shed": {"done": summary["actions"]["shed"]["done"]},
        "compact": {"done": 1},
        "restart": {"done": 1},
    }
    assert summary["states"]["c"]["out of service"] > 0
    assert summary["seconds"] < LONGEST_S * busy()
    first = next(line for line in story.splitlines() if "guard saw" in line)
    assert float(first.split()[0]) < FIRST_S * busy()
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


@pytest.mark.soak  # that what is lost is said is shown by tests/demo/test_summary.py, too
@pytest.mark.timeout(300)
def test_an_engine_that_is_killed_loses_requests_and_that_is_said(tmp_path: Path) -> None:
    """Exit code 1, with the count: what nobody drained is lost, and the demo does not hide it."""
    process = demo(tmp_path, "--balancer", "own", "--speed", "2")
    end_s = time.monotonic() + 60
    while not (states := list(tmp_path.glob("plimsoll-demo-*/a/engine.json"))):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    time.sleep(6.0)  # amid the burst: it has streams that have begun
    os.kill(json.loads(states[0].read_text(encoding="utf-8"))["pid"], signal.SIGKILL)
    summary, story = ended(process)
    assert process.returncode == 1, story
    assert summary["fine"] is False
    assert summary["requests"]["lost"] > 0
    assert "requests lost" in story
    assert list(tmp_path.iterdir()) == []

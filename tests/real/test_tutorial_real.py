"""docs/tutorial.md against the real engine, command by command, as somebody would type it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from lab import run_page
from lab.page import commands_of
from tests.real.conftest import need_vllm
from tests.real.small_farm import need

PAGE = run_page.ROOT / "docs" / "tutorial.md"
LIMIT_S = 900.0  # on a machine that has much else to do; alone it is four minutes


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_tutorial_is_true(record_property: Callable[[str, object], None]) -> None:
    """Every command ends as it should and prints what is shown; nothing is left running. Otherwise one line says where."""
    need_vllm()
    need("curl", "curl")
    # A process of its own: should this one be killed, it notices, and ends what it has started.
    words = [sys.executable, "-m", "lab.run_page", str(PAGE)]
    process = subprocess.Popen(words, cwd=run_page.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, times = process.communicate(timeout=LIMIT_S)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert (process.returncode, said) == (0, ""), said + times[-2000:]
    took = [float(seconds) for seconds in re.findall(r":\d+: ([\d.]+) s: ", times)]
    assert len(took) == len(commands_of(PAGE.read_text(encoding="utf-8")))
    record_property("figures", {"commands": len(took), "seconds": round(sum(took)), "longest": max(took)})


@pytest.mark.parametrize("part", ["flags", "plan", "tune", "assets", "guard", "guardctl", "doctor"])
def test_the_tutorial_goes_through_the_whole_loop(part: str) -> None:
    """None of the parts is only talked about."""
    assert any(f"plimsoll {part} " in command.text for command in commands_of(PAGE.read_text(encoding="utf-8")))

"""The parts of the charts: round axes, lines with holes, and moments in words."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from playwright._impl._driver import compute_driver_executable

from plimsoll.render.html import TEMPLATES
from plimsoll.render.simulate_html import moment_text

CHECKS = Path(__file__).with_name("plot_checks.js")


def test_the_chart_script_keeps_its_scales() -> None:
    """Ticks are round, few and inside; 0 and 1 are the corners of the plane; what is unknown is a hole in a line."""
    node, *_ = compute_driver_executable()
    script = (TEMPLATES / "plot.js").read_text(encoding="utf-8") + CHECKS.read_text(encoding="utf-8")
    done = subprocess.run([node, "--input-type=module", "-e", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "wrong": [], "corners": [10, 95, 44, 4, 4], "line": "M10.0 44.0L52.5 4.0M95.0 4.0",
        "moments": ["0 s", "0.25 s", "45 s", "2 min", "2:30 min", "1:05 h", "2 h", "2 d"],
        "spans": ["0.05 ms", "5 ms", "20 s", "12.5 min", "1.2 h"], "none": [0, 1],
    }  # fmt: skip


def test_moments_are_short() -> None:
    """As a clock would say it."""
    moments = (0, 0.25, 45, 120, 150, 3900, 7200, 172800)
    assert [*map(moment_text, moments)] == ["0 s", "0.25 s", "45 s", "2 min", "2:30 min", "1:05 h", "2 h", "2 d"]

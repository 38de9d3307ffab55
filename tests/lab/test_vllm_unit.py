"""A unit's text is read as systemd reads it, as far as its stop is concerned."""

from __future__ import annotations

from pathlib import Path

from lab.guard.vllm_unit import STOP_S, read_unit, unit_on

CAPTURES = Path(__file__).parents[1] / "captures" / "launches"
PAGE = Path(__file__).parents[2] / "docs" / "guard-acts.md"
BARE = "[Service]\nExecStart=/usr/bin/vllm serve M\n"


def test_the_unit_on_the_page_keeps_requests_alive() -> None:
    """SIGTERM to the server alone, time for requests to end, and more time than that until SIGKILL."""
    unit = read_unit(unit_on(PAGE.read_text(encoding="utf-8"), "vllm-a.service"))
    assert unit.kill_mode == "mixed"
    assert 30 <= float(unit.flag("--shutdown-timeout") or 0) < unit.stop_s
    assert "plimsoll.inside.Gate" in unit.flags
    assert not {"--port", "8000", "MODEL"} & set(unit.flags)


def test_what_is_not_said_is_systemds_default() -> None:
    """Every process is signalled, and killed after a minute and a half; the last word counts."""
    assert read_unit(BARE) == ("control-group", STOP_S, ())
    assert read_unit(BARE + "KillMode=none\nKillMode=process\nTimeoutStopSec=2min 30s\n")[:2] == ("process", 150.0)
    assert read_unit(BARE + "TimeoutStopSec=infinity\n").stop_s == float("inf")


def test_lines_that_go_on() -> None:
    """A command over several lines, with a comment between them."""
    unit = read_unit((CAPTURES / "vllm.service").read_text(encoding="utf-8"))
    assert unit.kill_mode == "mixed"
    assert unit.flag("--served-model-name") == "%i 100%"

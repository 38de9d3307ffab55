"""A unit's text is read as systemd reads it, as far as its stop is concerned."""

from __future__ import annotations

from pathlib import Path

from lab.guard.vllm_unit import STOP_S, read_unit, unit_on

CAPTURES = Path(__file__).parents[1] / "captures" / "launches"
PAGE = Path(__file__).parents[2] / "docs" / "guard-acts.md"
BARE = "[Service]\nExecStart=/usr/bin/vllm serve M\n"


def test_a_unit_is_read_as_systemd_reads_it() -> None:
    """The one on the page keeps requests alive; what is not said is systemd's default; a command may go on over lines."""
    unit = read_unit(unit_on(PAGE.read_text(encoding="utf-8"), "vllm-a.service"))
    assert unit.kill_mode == "mixed"
    assert 30 <= float(unit.flag("--shutdown-timeout") or 0) < unit.stop_s
    assert "plimsoll.inside.Gate" in unit.flags
    assert not {"--port", "8000", "MODEL"} & set(unit.flags)
    assert read_unit(BARE) == ("control-group", STOP_S, ())
    assert read_unit(BARE + "KillMode=none\nKillMode=process\nTimeoutStopSec=2min 30s\n")[:2] == ("process", 150.0)
    assert read_unit(BARE + "TimeoutStopSec=infinity\n").stop_s == float("inf")
    unit = read_unit((CAPTURES / "vllm.service").read_text(encoding="utf-8"))
    assert unit.kill_mode == "mixed"
    assert unit.flag("--served-model-name") == "%i 100%"

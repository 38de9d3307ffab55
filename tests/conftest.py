"""For every test: wild inputs have no deadline, since a busy machine is no mistake of ours; what was measured is printed."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

settings.register_profile("plimsoll", deadline=None)
settings.load_profile("plimsoll")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests measured (`record_property("figures", ...)`): it is wanted of those that pass, too."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind)]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "figures" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")

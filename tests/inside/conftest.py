"""What every test of plimsoll.inside begins with."""

from __future__ import annotations

import pytest

from plimsoll.inside.faults import FAULTS


@pytest.fixture(autouse=True)
def no_faults_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are counted by process, and each place is logged once: a test begins with none."""
    monkeypatch.setattr(FAULTS, "counts", {})

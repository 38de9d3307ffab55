"""A gate for itself: its pulse, its figures and its metrics are no one else's, and nothing lies in a shared folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from plimsoll.inside.gate_control import Alone, GateControl
from plimsoll.inside.meters import Meters
from plimsoll.inside.pulse import PULSE, Pulse
from tests.fakes import settings


def alone(figures: list[dict[str, Any]] | None = None) -> Alone:
    return Alone(Pulse(), lambda: figures or [], CollectorRegistry(), lambda requests: not requests)


def test_it_has_a_pulse_and_figures_of_its_own(tmp_path: Path) -> None:
    """And leaves no file."""
    worker = {"engine": 0, "rank": 0, "age_s": 0.5, "alive": True}
    core = GateControl(settings(tmp_path), alone=alone([worker]))
    assert core.pulse is not PULSE
    assert core.figures() == [worker]
    assert core.shared.can_drain
    core.enter()
    core.close()
    assert list(tmp_path.iterdir()) == []


def test_two_count_apart(tmp_path: Path) -> None:
    """Each in its registry, and none in the process's own."""
    cores = [GateControl(settings(tmp_path), alone=alone()) for _ in range(2)]
    cores[0].enter()
    cores[0].begin()
    pages = []
    for core in cores:
        Meters(core).refresh()
        assert core.alone is not None
        pages.append(generate_latest(core.alone.registry).decode())
        core.close()
    assert "plimsoll_begun_total 1.0" in pages[0]
    assert "plimsoll_begun_total 0.0" in pages[1]
    before = generate_latest(REGISTRY)
    assert b"plimsoll_in_flight 1.0" not in before

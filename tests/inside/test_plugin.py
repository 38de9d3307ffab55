"""The probe as a plugin: every worker gets it, whatever extension the server has."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.plugin import install, install_into
from plimsoll.inside.probe import Probe
from tests.inside.test_probe import folder as folder
from tests.inside.test_probe import inject, wait_for_figures, worker_classes

if TYPE_CHECKING:
    import pytest


class Another:
    def somebody_elses(self) -> str:
        return "theirs"


def test_a_worker_with_another_extension_has_both(folder: Path) -> None:
    """The thread runs, and their methods and ours answer."""
    base, worker_class = worker_classes()
    install_into(base)
    inject(worker_class, Another)
    worker = worker_class(vllm_config=None, rank=0)
    assert worker.somebody_elses() == "theirs"
    assert "refused" in worker.plimsoll_snapshot(history=5)
    assert worker.plimsoll_compact()["pid"] == wait_for_figures(folder, phase="serving")["pid"]
    assert worker.plimsoll_figures()["rank"] == 0


def test_plugin_and_extension_together(folder: Path) -> None:
    """The clash check passes since the class has no name of ours, and there is one thread."""
    base, worker_class = worker_classes()
    install_into(base)
    first = base.__new__
    install_into(base)  # vLLM may call a plugin several times
    assert base.__new__ is first
    inject(worker_class, Probe)
    before = threading.active_count()
    worker = worker_class(vllm_config=None, rank=0)
    assert threading.active_count() == before + 1
    assert "plimsoll_compact" not in worker.__dict__
    assert wait_for_figures(folder, rank=0)
    assert worker.plimsoll_figures()["rank"] == 0


def test_a_new_of_the_base_class_is_asked(folder: Path) -> None:
    """A later vLLM may make its workers in a way of its own: that way stays."""

    class Base:
        made = 0

        def __new__(cls, **_given: int) -> Any:
            Base.made += 1
            return object.__new__(cls)

        def __init__(self, rank: int) -> None:
            self.rank = rank

    install_into(Base)
    worker = Base(rank=4)
    assert (worker.rank, Base.made) == (4, 1)
    assert wait_for_figures(folder, rank=4)


def test_install_does_nothing_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PLIMSOLL_PROBE=plugin vLLM's modules are not even looked for; that they are missing is a counted fault."""
    before = FAULTS.counts.get("installing the probe as a plugin", 0)
    monkeypatch.delenv("PLIMSOLL_PROBE", raising=False)
    install()
    assert FAULTS.counts.get("installing the probe as a plugin", 0) == before
    monkeypatch.setenv("PLIMSOLL_PROBE", "plugin")
    install()
    assert FAULTS.counts["installing the probe as a plugin"] == before + 1

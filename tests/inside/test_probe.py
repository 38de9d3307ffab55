"""The worker extension, put into a worker class exactly as vLLM does it."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside import probe
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.figures import read_figures
from plimsoll.inside.plugin import install, install_into
from plimsoll.inside.probe import Probe


def worker_classes() -> tuple[Any, Any]:
    """A base and a worker class as vLLM's are: no `__new__`, arguments by name, methods that return something."""

    class Base:
        def __init__(self, vllm_config: Any, rank: int) -> None:
            self.vllm_config = vllm_config
            self.rank = rank
            self.device: Any = SimpleNamespace(type="cpu")
            self.loaded: list[Any] = []

        def compile_or_warm_up_model(self) -> str:
            if self.rank == 13:
                raise MemoryError("while a graph was recorded")
            return "warm"

        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            self.loaded.append(load_dummy_weights)

    class Worker(Base):
        """As the GPU's Worker."""

    return Base, Worker


def inject(worker_class: Any, extension: Any) -> None:
    for name in dir(extension):
        if not name.startswith("__"):
            assert not hasattr(worker_class, name), name
    worker_class.__bases__ = (*worker_class.__bases__, extension)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The shared folder of this test; vLLM's processes get it from their environment alone."""
    monkeypatch.setenv("PLIMSOLL_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PLIMSOLL_SAMPLE_S", "0.05")
    yield tmp_path / "run"
    for thread in threading.enumerate():
        if thread.name == "plimsoll-probe":
            thread._target.__self__.stop()  # type: ignore[attr-defined]
            thread.join(10)


def wait_for_figures(folder: Path, **wanted: Any) -> dict[str, Any]:
    """The worker's figures once they hold this."""
    for _ in range(2000):
        for found in read_figures(str(folder), os.getpid(), time.monotonic()) if folder.is_dir() else []:
            if all(found[name] == value for name, value in wanted.items()):
                return found
        time.sleep(0.01)
    raise AssertionError(f"no figures with {wanted}")


def test_a_worker_is_watched_from_its_making(folder: Path) -> None:
    """The start is over when its warm-up returns; what that returns or raises reaches vLLM as it was."""
    _, worker_class = worker_classes()
    inject(worker_class, Probe)
    worker = worker_class(vllm_config=None, rank=0)
    assert wait_for_figures(folder, rank=0)["phase"] == "starting"
    assert worker.compile_or_warm_up_model() == "warm"
    wait_for_figures(folder, phase="serving")
    _, worker_class = worker_classes()
    inject(worker_class, Probe)
    worker = worker_class(vllm_config=None, rank=13)
    with pytest.raises(MemoryError, match="graph"):
        worker.compile_or_warm_up_model()
    assert wait_for_figures(folder, rank=13)["phase"] == "starting"


def test_the_probe_s_names_say_whose_they_are() -> None:
    """vLLM refuses an extension with a name that its worker has; `plimsoll.inside.Probe` is this class."""
    assert all(name.startswith("plimsoll_") for name in dir(Probe) if not name.startswith("__"))
    assert importlib.import_module("plimsoll.inside").Probe is Probe


def test_the_methods_answer_on_a_cpu(folder: Path) -> None:
    """Compaction, a refusal in place of a snapshot, and the figures; a call from outside proves that the start is over."""
    _, worker_class = worker_classes()
    inject(worker_class, Probe)
    worker = worker_class(vllm_config=None, rank=0)
    compacted = worker.plimsoll_compact()
    assert "refused" in compacted or compacted["resident_before"] > 0
    assert "refused" in worker.plimsoll_snapshot()
    refusal = worker.plimsoll_snapshot("many")
    found = wait_for_figures(folder, phase="serving", last_compact=compacted, last_snapshot=refusal)
    assert worker.plimsoll_figures()["pid"] == found["pid"]
    worker_class.device = property(lambda _worker: 1 / 0)
    refusal = worker.plimsoll_compact()
    assert (refusal["refused"], refusal["rank"]) == ("compacting failed: ZeroDivisionError", 0), "a fault, without its text"


def test_a_worker_class_with_a_new_of_its_own_is_watched_from_the_first_call(folder: Path) -> None:
    """Its `__new__` hides ours; the worker is made as it wants, and figures begin with a call."""
    base, _ = worker_classes()

    class Worker(base):  # type: ignore[misc, valid-type]
        """Makes itself, and does not ask on."""

        def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
            return object.__new__(cls)

    inject(Worker, Probe)
    worker = Worker(vllm_config=None, rank=0)
    assert not folder.exists()
    worker.plimsoll_figures()
    assert wait_for_figures(folder, rank=0)["phase"] == "serving"


def test_a_worker_that_cannot_be_watched_is_made_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder its figures are not shared; with slots there is nowhere to keep a thread, which is counted."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLIMSOLL_DIR", str(tmp_path / "file" / "run"))
    _, worker_class = worker_classes()
    inject(worker_class, Probe)
    worker = worker_class(vllm_config=None, rank=0)
    assert worker.compile_or_warm_up_model() == "warm"
    worker.plimsoll_sampler.stop()
    probe.watch(type("Tight", (), {"__slots__": ("rank",)})())
    assert FAULTS.counts["watching a worker"] >= 1


def test_loading_passes_through_where_a_history_is_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments arrive, a CPU records nothing, and no fault of ours stops the load."""
    monkeypatch.setenv("PLIMSOLL_HISTORY", "1000")
    _, worker_class = worker_classes()
    inject(worker_class, Probe)
    worker = worker_class(vllm_config=None, rank=0)
    worker.load_model(load_dummy_weights=True)
    worker.device = SimpleNamespace(type="cuda")  # no torch here: asking it fails
    worker.load_model()
    assert worker.loaded == [True, False]
    assert wait_for_figures(folder, device="namespace(type='cuda')")["reasons"]["allocator"] == "asking failed: KeyError"


# The probe as a plugin: every worker gets it, whatever extension the server has.


def test_a_worker_with_another_extension_has_both(folder: Path) -> None:
    """The thread runs, and their methods and ours answer."""
    base, worker_class = worker_classes()
    install_into(base)
    inject(worker_class, type("Another", (), {"somebody_elses": lambda _: "theirs"}))
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
    assert (Base(rank=4).rank, Base.made) == (4, 1)
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

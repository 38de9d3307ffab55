"""Which errors are surely a device out of memory, and what is read from them."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest

from plimsoll.inside.survive.failures import SiteNote, StepFailure, identify, local_of, release_frames
from tests.each import rows, sure


class OutOfMemoryError(RuntimeError):
    """As torch's: known by its name, since torch is not here."""


class AcceleratorError(RuntimeError):
    """As torch's for a plain CUDA error."""


TEXT = (
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 79.11 GiB of which 110.50 MiB is free. "
    "Including non-PyTorch memory, this process has 78.00 GiB memory in use."
)
ASKED, FREE = round(1.95 * 2**30), round(110.5 * 2**20)


CASES = Path(__file__).parents[1] / "cases.txt"
KINDS = {
    kind.__name__: kind
    for kind in (AcceleratorError, AssertionError, KeyError, MemoryError, OutOfMemoryError, RuntimeError, ValueError)
}


def errors(section: str) -> list[BaseException]:
    return [KINDS[kind](*filter(None, [text])) for kind, text in rows(CASES, section)]


def test_only_what_surely_is_a_device_out_of_memory_is_one() -> None:
    """As torch raised it or as a worker's text, the driver's own, one it was raised from; any other error dies as before."""
    wrapped, looped = ValueError("a step failed"), ValueError("round")
    wrapped.__cause__, looped.__cause__ = OutOfMemoryError(TEXT), looped
    told = f"Worker failed with error '{TEXT}', please check the stack trace above for the root cause"
    known: list[Exception] = [OutOfMemoryError(TEXT), RuntimeError(told), RuntimeError(TEXT), wrapped]
    for error in known:
        assert identify(error) == StepFailure("unknown", ASKED, FREE), error
    assert [identify(error) for error in errors("out of device memory")] == [StepFailure()] * 3
    assert [error for error in (*errors("other errors"), looped) if identify(error) is not None] == []


def test_the_innermost_known_function_names_the_place() -> None:
    """execute_model calls everything; what it called when it failed is what counts."""

    def compute_logits() -> None:
        raise OutOfMemoryError(TEXT)

    def execute_model() -> None:
        scheduler_output = "the plan"
        compute_logits()
        assert scheduler_output

    with pytest.raises(OutOfMemoryError) as caught:
        execute_model()
    found = sure(identify(caught.value))
    assert found.site == "logits"
    assert local_of(caught.value, ("execute_model",), "scheduler_output") == "the plan"
    assert local_of(caught.value, ("step",), "scheduler_output") is None


def test_what_the_frames_hold_is_let_go() -> None:
    """The failed step's tensors hang in them, and would stay on the device."""

    class Tensor:
        """Something that can be waited for."""

    kept = []

    def execute_model() -> None:
        activation = Tensor()
        kept.append(weakref.ref(activation))
        raise OutOfMemoryError(TEXT)

    with pytest.raises(OutOfMemoryError) as caught:
        execute_model()
    release_frames(caught.value)
    gc.collect()
    assert kept[0]() is None


def test_a_workers_line_tells_the_place_and_keeps_no_error() -> None:
    """The worker logs each error it sends; the note costs nothing while there is none."""
    note = SiteNote()
    log = logging.getLogger("plimsoll.tests.worker")
    log.addFilter(note)

    def propose_draft_token_ids() -> None:
        raise OutOfMemoryError(TEXT)

    try:
        propose_draft_token_ids()
    except OutOfMemoryError:
        log.exception("WorkerProc hit an exception.")
    assert note.last == StepFailure("drafter", ASKED, FREE)
    assert vars(note).keys() == {"name", "nlen", "last"}

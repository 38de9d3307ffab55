"""What a reader is told of a text beside its findings."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.doctor.rules.log_text import Log
from plimsoll.findings import Code
from tests.doctor.log_maker import ARGS, ENGINE_DEAD, LOADED, LOADING, MEASURED, REQUEST, STARTED, VERSION, log, traceback
from tests.doctor.smi_texts import TABLE

STEP = "v1/worker/gpu_model_runner.py:execute_model"
JAVA = log("java.lang.OutOfMemoryError: Java heap space", "\tat java.nio.HeapByteBuffer.<init>(HeapByteBuffer.java:57)")
TRAINING = log("Traceback (most recent call last):", '  File "/app/train.py", line 8, in <module>', "    work()", "MemoryError")


def remarks(one: Log) -> str:
    """All that is remarked on a text."""
    found = diagnose([one]).facts.get("remarks", [])
    assert isinstance(found, list)
    return "\n".join(found)


def test_an_empty_text_is_called_empty() -> None:
    """As `kubectl logs --previous` may leave it: the reader learns that it is the input, not the server, that says nothing."""
    assert remarks(log("", source="a.log")) == "a.log is empty: nothing was written to it"
    assert "is empty" not in remarks(log("Dear diary"))


def test_an_exception_of_another_program_is_no_finding() -> None:
    """Where vLLM says nothing in a text, an error that nobody has words for says nothing of vLLM."""
    found = diagnose([JAVA])
    assert (found.memory_failure, found.findings) == (None, ())
    assert found.collect_next


def test_a_finding_in_a_text_without_vllm_is_marked_as_such() -> None:
    """Words that vLLM's log would have, too, are told with a warning; in a log of vLLM's there is none."""
    assert [finding.code for finding in diagnose([TRAINING]).findings] == [Code.HOST_OUT_OF_MEMORY]
    assert "nothing in server.log is recognised as vLLM's own" in remarks(TRAINING)
    assert remarks(log(STARTED, traceback(STEP), ENGINE_DEAD)) == ""
    kernel = log("[ 8123.4] NVRM: Xid (PCI:0000:3b:00): 79, pid=2, name=python, GPU has fallen off the bus.")
    assert diagnose([kernel]).findings
    assert remarks(kernel) == "", "the kernel's log is the kernel's"


@pytest.mark.parametrize(
    ("lines", "when"),
    [
        ([VERSION, ARGS], "before it loads the model"),
        ([VERSION, ARGS, LOADING], "while it loads the model"),
        ([VERSION, ARGS, LOADING, LOADED], "after the model was loaded and before its memory was measured"),
        ([VERSION, ARGS, LOADING, LOADED, MEASURED], "after its memory was measured"),
    ],
)
def test_a_start_that_breaks_off_says_where(lines: list[str], when: str) -> None:
    """The line, the step, and the last words: where to look is the first question then."""
    said = remarks(log(lines))
    assert f"breaks off at line {len(lines)}, {when}" in said
    assert lines[-1].rpartition("] ")[2] in said


def test_a_log_without_an_end_names_the_log_before_it() -> None:
    """After a restart `kubectl logs` shows the new server, which is well."""
    assert "kubectl logs --previous NAME" in remarks(log(STARTED))
    assert "--previous" not in remarks(log(STARTED, traceback(STEP), ENGINE_DEAD))


def test_two_servers_in_one_log_are_told() -> None:
    """Two API servers that speak in turn share the file, and most likely the cards; one after the other is a restart."""
    other = [line.replace("pid=1)", "pid=7)").replace("pid=2)", "pid=8)") for line in STARTED]
    mixed = [line for pair in zip(STARTED, other, strict=True) for line in pair]
    said = remarks(log(mixed))
    assert "two servers wrote into this log at the same time, APIServer pid=1 and APIServer pid=7" in said
    assert "APIServer pid=1 came up (line 13)" in said
    assert "two servers" not in remarks(log(STARTED, other))


def test_a_start_that_succeeded_after_the_failure_is_told() -> None:
    """Who reads the cause learns that the log goes on well."""
    failed = [VERSION, ARGS, LOADING, *traceback("model_executor/models/llama.py:load_weights"), ENGINE_DEAD]
    later = [line.replace("pid=1)", "pid=7)") for line in (*STARTED, REQUEST)]
    said = remarks(log(failed, later))
    assert f"a server (APIServer pid=7) came up at line {len(failed) + 7} of this log" in said
    assert "came up" not in remarks(log(failed))


def test_who_holds_the_card_is_shown() -> None:
    """nvidia-smi's table is read out, also where nothing in it is broken."""
    said = remarks(log(TABLE))
    assert "GPU 0: 77.4 GiB of 79.6 GiB are in use: VLLM::EngineCore (pid 2632314) 72.3 GiB, /usr/bin/gnome shell" in said
    assert "GPU 1: 20.0 GiB of 79.6 GiB are in use" in said
    assert "20,423 MiB in use belong to no listed process" in said

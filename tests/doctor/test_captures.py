"""Real failures that were provoked on purpose: the right cause comes first, and memory is blamed only where it was."""

from __future__ import annotations

import pytest

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.findings import Code, Severity
from tests.doctor.labelled import Labelled, diagnosis, labelled
from tests.each import each
from tests.log_bytes import log_of_bytes


@each("one", labelled(), ids=lambda one: one.name)
def test_the_cause_comes_first(one: Labelled) -> None:
    """The first finding is the provoked cause; a healthy server gets none that matters."""
    found = diagnosis(one.path)
    assert found.memory_failure in one.memory
    if one.codes:
        assert str(found.findings[0].code) in one.codes
    else:
        assert all(finding.severity is not Severity.CRITICAL for finding in found.findings)


@each("one", [one for one in labelled() if one.memory == (True,)], ids=lambda one: one.name)
def test_evidence_is_in_the_file_at_that_line(one: Labelled) -> None:
    """Every quoted line stands at the number that is given for it."""
    raw = one.data().decode("utf-8", "replace").split("\n")
    for evidence in diagnose([log_of_bytes("x.log", one.data())]).findings[0].evidence:
        assert evidence.line is not None
        said = evidence.text.rpartition(") ")[2].removesuffix("...")[:60].strip()
        assert said[:40] in raw[evidence.line - 1]


@each("one", [one for one in labelled() if one.codes and one.memory == (True,)], ids=lambda one: one.name)
def test_a_memory_failure_comes_with_something_to_do(one: Labelled) -> None:
    """The cause has a sentence, at least one cure with its reason, and what would be no use."""
    finding = diagnosis(one.path).findings[0]
    assert len(finding.because) > 40
    assert finding.remedy
    assert all(remedy.do and remedy.why for remedy in finding.remedy)
    assert finding.not_a_remedy


@each(("name", "words", "flag", "useless"), [
    ("0.25.1-neighbour", "13.9", None, ""),  # another process took so much while the server ran
    ("0.25.1-no-cache-blocks", "", "--gpu-memory-utilization", "--max-model-len"),  # whatever vLLM's message says
    ("0.25.1-graph-capture", "", "--kv-cache-memory-bytes", ""),  # it was set: the utilisation would be overruled
])  # fmt: skip
def test_the_finding_knows_this_server(name: str, words: str, flag: str | None, useless: str) -> None:
    """The neighbour's size, the flag that helps first, and what is no use."""
    finding = diagnosis(next(one.path for one in labelled() if one.name == name)).findings[0]
    assert words in finding.because
    assert finding.remedy[0].flag == flag
    assert any(useless in one for one in finding.not_a_remedy)


def test_the_kernels_word_settles_a_death_without_one() -> None:
    """A worker that vanished is nobody's fault until the kernel's log says that it was killed for want of memory."""
    one = next(one for one in labelled() if one.name == "0.32.0-host-memory-cgroup")
    alone = diagnosis(one.path)
    assert alone.memory_failure is None
    assert any("dmesg" in ask for ask in alone.collect_next)
    dmesg = next(one.path.parent.glob("host-memory-cgroup*dmesg*"))
    both = diagnose([read_log(str(one.path)), read_log(str(dmesg))])
    assert both.memory_failure is True
    assert both.findings[0].code is Code.HOST_OUT_OF_MEMORY


def _adapter_log() -> list[bytes]:
    return next(one for one in labelled() if one.name == "0.25.1-lora").data().split(b"\n")


def test_another_servers_stop_excuses_nothing() -> None:
    """Two servers write into one log and one is stopped: what then runs out of memory is told first, and not ruled out."""
    lines = _adapter_log()
    before = next(at for at, line in enumerate(lines) if b"Invocation of add_lora method failed" in line)
    other = [
        b"(APIServer pid=99) INFO 11-16 18:39:20 [api_utils.py:273] vLLM API server version 0.25.1",
        b"(APIServer pid=99) INFO 11-16 18:39:58 [launcher.py:100] [shutdown] API server: shutdown triggered",
    ]
    mixed = [other[0], *lines[:before], other[1], *lines[before:]]
    found = diagnose([log_of_bytes("x.log", b"\n".join(mixed))])
    assert found.memory_failure is None
    assert found.findings[0].code is Code.RUNTIME_LORA
    assert found.findings[0].confidence < 0.5


@pytest.mark.parametrize("pid", [99, 100])
def test_a_line_of_an_older_server_is_no_second_one(pid: int) -> None:
    """A server that spoke only before the stop, or was told itself, is not the one that ran out: the stop excuses it."""
    lines = _adapter_log()
    began = next(at for at, line in enumerate(lines) if b"Invocation of add_lora method failed" in line)
    old = [b'(APIServer pid=%d) INFO:     10.0.0.1:4 - "GET /health HTTP/1.1" 200 OK' % pid]
    old += [b"(APIServer pid=100) INFO 11-16 18:39:21 [launcher.py:100] [shutdown] API server: shutdown triggered"] * (
        pid == 100
    )
    stop = b"(APIServer pid=1560) INFO 11-16 18:39:58 [launcher.py:100] [shutdown] API server: shutdown triggered"
    goes_on = [b'(APIServer pid=100) INFO:     10.0.0.1:4 - "GET /health HTTP/1.1" 200 OK'] * (pid == 100)
    found = diagnose([log_of_bytes("x.log", b"\n".join([*old, *lines[:began], stop, *goes_on, *lines[began:]]))])
    assert found.memory_failure is False
    assert found.findings[0].code is Code.OTHER_STOPPED_BY_OPERATOR


def test_an_error_that_was_outlived_leaves_no_doubt() -> None:
    """One error line of the engine, requests answered long after it, then a stop: a healthy server that was stopped."""
    lines = next(one for one in labelled() if one.name == "0.25.1-healthy").data().split(b"\n")
    stop = next(at for at, line in enumerate(lines) if b"shutdown triggered" in line)
    error = b"(EngineCore pid=2970) ERROR 11-15 02:00:00 [fa_utils.py:212] Cannot use FA version 2 is not supported"
    served = [b'(APIServer pid=2904) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'] * 30
    found = diagnose([log_of_bytes("x.log", b"\n".join([*lines[:stop], error, *served, *lines[stop:]]))])
    assert found.memory_failure is False


def test_an_engines_error_that_lost_its_last_line_is_not_ruled_out() -> None:
    """The engine reported an error, what it was is missing, and then the server was stopped: memory cannot be told."""
    lines = [line for line in _adapter_log() if b"out of memory" not in line and b"OutOfMemory" not in line]
    assert diagnose([log_of_bytes("x.log", b"\n".join(lines))]).memory_failure is None

"""Contained failures in a log: told as what they are, and never as the end of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose
from plimsoll.findings import Code, Severity
from tests.doctor.contained_logs import (
    ABORTED,
    ARMED,
    CANNOT,
    GAVE_UP,
    ONE_PROCESS,
    STORM,
    TWO_PROCESSES,
    Recorded,
    contained,
    core,
    prompt,
    survived,
)
from tests.doctor.log_maker import ENGINE_DEAD, OOM, REQUEST, STARTED, log, traceback

STEP = "v1/worker/gpu_model_runner.py:execute_model"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
STOP = "(APIServer pid=1) INFO 11-15 09:30:00 [launcher.py:1] [shutdown] API server: shutdown triggered"
BOTH = pytest.mark.parametrize("path", [ONE_PROCESS, TWO_PROCESSES], ids=["one process", "two processes"])


def said(*parts: str | list[str]) -> Diagnosis:
    """What doctor says of these lines."""
    return diagnose([log(*parts)])


def codes(found: Diagnosis) -> list[Code]:
    """The codes, in their order."""
    return [one.code for one in found.findings]


@BOTH
def test_a_server_that_lives_on_is_not_called_dead(path: Path) -> None:
    """One finding, a warning about memory, with the plugin's own lines as evidence and how far the steps shrank."""
    lines = survived(path)
    found = said(lines)
    assert codes(found) == [Code.RUNTIME_CONTAINED]
    assert found.memory_failure is True
    (finding,) = found.findings
    assert finding.severity is Severity.WARNING
    assert all("plimsoll: survive: contained failure" in one.text for one in finding.evidence)
    assert [lines[(one.line or 0) - 1].partition("] ")[2][:44] for one in finding.evidence] == [
        "plimsoll: survive: contained failure 1: a st", "plimsoll: survive: contained failure 2: a st",
    ]  # fmt: skip
    for words in (
        "2 steps",
        "at forward",
        "8,192 tokens in 48 requests",
        "at most 2,048 tokens",
        "grew back to 6,144",
        "lives",
    ):
        assert words in finding.because
    assert found.collect_next == ()


@BOTH
def test_the_same_failure_without_containment_is_a_crash(path: Path) -> None:
    """The recordings that the others are made of end in the death that they show."""
    one = Recorded(path)
    assert codes(said([*one.start, *one.step, *one.end]))[0] is Code.RUNTIME_FORWARD


@BOTH
@pytest.mark.parametrize("last", [GAVE_UP, CANNOT], ids=["gave up", "cannot"])
def test_what_it_could_not_contain_is_the_cause_as_without_it(path: Path, last: str) -> None:
    """runtime.forward comes first, with a word on containment; what was contained before stands beside it."""
    one = Recorded(path)
    before = [*one.step, one.says(contained(1)), *[REQUEST] * 3]
    # In one process the last traceback stands below containment's word, with a worker above it.
    found = said([*one.start, one.says(ARMED), *before, *(one.step if path is TWO_PROCESSES else []), one.says(last), *one.end])
    assert codes(found)[:2] == [Code.RUNTIME_FORWARD, Code.RUNTIME_CONTAINED]
    assert found.findings[0].severity is Severity.CRITICAL
    assert last.partition("; ")[0] in found.findings[0].because
    assert any(last[:20] in evidence.text for evidence in found.findings[0].evidence)
    assert "lives" not in found.findings[1].because
    assert found.memory_failure is True


def test_another_cause_of_death_comes_first() -> None:
    """A server that survived its memory and died of an illegal access died of that: memory is not blamed."""
    found = said(
        STARTED, core(ARMED), traceback(STEP), core(contained(1)), [REQUEST] * 3, traceback(STEP, error=ILLEGAL), ENGINE_DEAD
    )
    assert codes(found) == [Code.OTHER_ILLEGAL_ACCESS, Code.RUNTIME_CONTAINED]
    assert found.memory_failure is False


def test_a_death_without_a_word_stays_one() -> None:
    """That memory ran out before does not say what it died of."""
    found = said(STARTED, traceback(STEP), core(contained(1)), [REQUEST] * 30, ENGINE_DEAD)
    assert codes(found) == [Code.ENGINE_DEAD, Code.RUNTIME_CONTAINED]
    assert found.memory_failure is None


def test_a_stop_afterwards_hides_nothing() -> None:
    """Stopped on purpose, later: what was contained is still the trouble."""
    found = said(STARTED, traceback(STEP), core(contained(1)), [REQUEST] * 3, STOP)
    assert codes(found) == [Code.RUNTIME_CONTAINED, Code.OTHER_STOPPED_BY_OPERATOR]
    assert found.memory_failure is True


@pytest.mark.parametrize("who", ["(EngineCore pid=2) ", "(EngineCore_DP1 pid=9) ", "(APIServer pid=1) "])
def test_another_processs_failure_is_not_cleared(who: str) -> None:
    """Of two engine cores each tells its own; what fails in the API server is nobody's step."""
    found = said(STARTED, traceback(STEP, who=who), core(contained(1)), ENGINE_DEAD)
    assert (codes(found)[0] is Code.RUNTIME_FORWARD) is (who != "(EngineCore pid=2) ")


def test_an_error_long_before_is_not_cleared() -> None:
    """Minutes apart, a failure and a contained one are two."""
    early = [
        line.replace("(EngineCore pid=2) ", "(EngineCore pid=2) ERROR 11-15 08:00:00 [core.py:1] ") for line in traceback(STEP)
    ]
    assert codes(said(STARTED, early, core(contained(1)), ENGINE_DEAD))[0] is Code.RUNTIME_FORWARD


def test_a_worker_that_writes_late_is_cleared_too() -> None:
    """Its traceback may come after the engine core's line; where the server dies soon after, it is not."""
    late = traceback(STEP, who="(Worker pid=7) ")
    assert codes(said(STARTED, core(contained(1)), late, [REQUEST] * 4)) == [Code.RUNTIME_CONTAINED]
    assert codes(said(STARTED, core(contained(1)), late, ENGINE_DEAD))[0] is Code.RUNTIME_FORWARD


@pytest.mark.parametrize(
    ("site", "flags"),
    [
        ("forward", ["--max-num-batched-tokens", "--gpu-memory-utilization"]),
        ("logits", ["--max-logprobs", "--max-num-batched-tokens", "--gpu-memory-utilization"]),
        ("sampler", ["--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"]),
        ("encoder", ["--mm-processor-kwargs", "--limit-mm-per-prompt", "--gpu-memory-utilization"]),
        ("adapter", ["--max-loras", "--max-lora-rank", "--gpu-memory-utilization"]),
        ("unknown", ["--max-num-batched-tokens", "--gpu-memory-utilization"]),
    ],
)
def test_each_site_has_the_flag_that_closes_it(site: str, flags: list[str]) -> None:
    """By the site, with the size of a step that worked and the share that leaves room for what was missing."""
    (finding,) = said(STARTED, traceback(STEP), core(contained(1, site=site)), [REQUEST] * 3).findings
    assert [one.flag for one in finding.remedy if one.flag] == flags
    assert [one.value for one in finding.remedy if one.flag == "--max-num-batched-tokens"] == ["4096"] * (
        flags[-2].endswith("tokens")
    )
    assert finding.remedy[-1].value == "0.90", "of 79.1 GiB 0.85 were missing"
    assert ("PLIMSOLL_ADMIT=certified" in " ".join(one.do for one in finding.remedy)) is (site in ("logits", "encoder"))


def test_a_neighbour_is_sent_away_first() -> None:
    """Where torch's message lists another process, that is what to move."""
    error = OOM.replace("Including", "Process 77 has 20.00 GiB memory in use. Including").replace("77.85", "57.85")
    (finding,) = said(STARTED, traceback(STEP, error=error), core(contained(1)), [REQUEST] * 3).findings
    assert finding.remedy[0].do.startswith("move the other process")


def test_an_abort_and_a_storm_are_told() -> None:
    """A request that was too large alone, and containment's own word that the server should be restarted."""
    (finding,) = said(STARTED, core(contained(1)), core(ABORTED), core(STORM)).findings
    assert "1 request was aborted" in finding.because
    assert "drained and restarted" in finding.because
    assert "1 step ran out of device memory at forward" in finding.because
    flags = [one.flag for one in finding.remedy if one.flag]
    assert flags[0] == "--mm-processor-kwargs", "what cost a request comes first"
    assert "--max-num-batched-tokens" in flags
    assert len(set(flags)) == len(flags)
    assert [line.text.partition("survive: ")[2][:8] for line in finding.evidence] == ["containe", "aborted ", "storm: 3"]


def test_asked_for_and_not_armed_is_told_to_whoever_died_of_memory() -> None:
    """With the reason; not where it was armed, and not beside another cause."""
    refused = core("not armed: a KV connector is set", level="INFO")
    dead = said(STARTED, refused, traceback(STEP), ENGINE_DEAD).findings[0]
    assert dead.remedy[-1].do.endswith("it was not armed: a KV connector is set")
    for lines in ([], [core(ARMED)]):
        assert not any(
            "PLIMSOLL_SURVIVE" in one.do for one in said(STARTED, lines, traceback(STEP), ENGINE_DEAD).findings[0].remedy
        )
    other = said(STARTED, refused, traceback(STEP, error=ILLEGAL), ENGINE_DEAD).findings[0]
    assert not any("PLIMSOLL_SURVIVE" in one.do for one in other.remedy)


def test_a_quoted_line_changes_nothing_of_a_crash() -> None:
    """Whoever writes the words into a prompt does not make a death harmless."""
    quoted = prompt(f"plimsoll: survive: {contained(1)}")
    found = said(STARTED, traceback(STEP), quoted, "plimsoll: survive: " + contained(1), ENGINE_DEAD)
    assert codes(found) == [Code.RUNTIME_FORWARD]


def test_the_command_finds_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the code in the first finding, and no other."""
    (tmp_path / "server.log").write_text("\n".join(survived(ONE_PROCESS)) + "\n", encoding="utf-8")
    assert main(["doctor", str(tmp_path / "server.log")]) == 1
    shown = capsys.readouterr().out
    assert "memory failure: yes" in shown
    assert "1. runtime.contained (warning, 95% sure)" in shown
    assert "\n2. " not in shown


def test_failures_at_several_sites_are_counted_apart() -> None:
    """Each with its number, and the flags of the two that fail most."""
    lines = [core(contained(1)), core(contained(2, site="logits")), core(contained(3))]
    (finding,) = said(STARTED, lines, [REQUEST] * 3).findings
    assert "3 steps ran out of device memory (2 at forward, 1 at logits;" in finding.because
    assert "--max-logprobs" in [one.flag for one in finding.remedy]

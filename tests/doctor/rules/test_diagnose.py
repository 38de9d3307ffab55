"""All that was collected, judged together."""

from __future__ import annotations

from itertools import permutations

import pytest

from plimsoll.doctor.rules.diagnose import InputVerdict, diagnose
from plimsoll.doctor.rules.log_text import Log
from plimsoll.findings import Code, Evidence, Finding, Severity
from tests.doctor.log_maker import ENGINE_DEAD, REQUEST, STARTED, log, traceback
from tests.each import each

STEP = "v1/worker/gpu_model_runner.py:execute_model"
WELL = log(STARTED, [REQUEST] * 5, source="well.log")
FAILED = log(STARTED, traceback(STEP), ENGINE_DEAD, source="failed.log")
VANISHED = log(STARTED, ENGINE_DEAD, source="vanished.log")
STOPPED = log(
    STARTED, "(APIServer pid=1) INFO 11-15 09:10:00 [launcher.py:1] API server: shutdown triggered", source="stopped.log"
)
KILLER = log(
    "[ 8123.4] Out of memory: Killed process 2 (VLLM::EngineCor) total-vm:900kB, anon-rss:800kB, file-rss:0kB", source="dmesg"
)
BUS = log("[ 8123.4] NVRM: Xid (PCI:0000:3b:00): 79, pid=2, name=python, GPU has fallen off the bus.", source="dmesg")
TEXT = log("Dear diary", source="diary.txt")


def judged(code: Code, severity: Severity = Severity.WARNING, confidence: float = 0.8) -> InputVerdict:
    finding = Finding(code, severity, confidence, "title", "because", (Evidence("page", "text"),))
    return InputVerdict("page", (finding,), {"is": "metrics", "engines": [{"engine": "0"}]})


@each(
    ("logs", "memory", "first"),
    [
        ([], None, None),
        ([TEXT], None, None),
        ([WELL], False, None),
        ([FAILED], True, Code.RUNTIME_FORWARD),
        ([VANISHED], None, Code.ENGINE_DEAD),
        ([STOPPED], False, Code.OTHER_STOPPED_BY_OPERATOR),
        ([WELL, FAILED], True, Code.RUNTIME_FORWARD),
        ([VANISHED, KILLER], True, Code.HOST_OUT_OF_MEMORY),
        ([KILLER], True, Code.HOST_OUT_OF_MEMORY),
        ([VANISHED, BUS], False, Code.OTHER_HARDWARE),
        ([WELL, VANISHED], None, Code.ENGINE_DEAD),
        ([WELL, TEXT], False, None),
    ],
)
def test_inputs_are_judged_together_in_any_order(logs: list[Log], memory: bool | None, first: Code | None) -> None:
    """The cause comes first whatever the order; a hole in the story leaves memory open; another's cause closes it."""
    for order in permutations(logs):
        found = diagnose(list(order))
        assert found.memory_failure is memory
        assert (found.findings[0].code if found.findings else None) is first


def test_what_is_open_asks_and_what_is_told_does_not() -> None:
    """Something to collect where it cannot be told, nothing where it can."""
    assert diagnose([VANISHED]).collect_next
    assert diagnose([TEXT]).collect_next
    assert diagnose([FAILED]).collect_next == ()
    assert diagnose([WELL]).collect_next == ()


def test_a_page_alone_may_show_a_memory_failure() -> None:
    """A storm on the metrics page is one, a low hit rate is none, and a mere hint is not enough."""
    assert diagnose([], [judged(Code.KV_PREEMPTION_STORM)]).memory_failure is True
    assert diagnose([], [judged(Code.PREFIX_CACHE_LOW_HIT_RATE)]).memory_failure is False
    assert diagnose([], [judged(Code.KV_PREEMPTION_STORM, Severity.INFO)]).memory_failure is False


def test_a_hint_at_a_full_cache_is_not_denied() -> None:
    """One look at a storm: it cannot be told, beside a sound log too, and a second look is asked for."""
    hint = judged(Code.KV_PREEMPTION_STORM, confidence=0.5)
    for logs in ([], [WELL], [STOPPED]):
        found = diagnose(logs, [hint])
        assert found.memory_failure is None
        assert any("second page" in ask for ask in found.collect_next)
    assert diagnose([WELL, BUS], [hint]).memory_failure is False


def test_trouble_is_read_before_a_stop() -> None:
    """An operator's stop is no trouble: what the page shows stands first, and memory is not called useless beside it."""
    for storm in (judged(Code.KV_PREEMPTION_STORM), judged(Code.KV_PREEMPTION_STORM, confidence=0.5)):
        found = diagnose([STOPPED], [storm]).findings
        assert [one.code for one in found] == [Code.KV_PREEMPTION_STORM, Code.OTHER_STOPPED_BY_OPERATOR]
        assert found[1].not_a_remedy == ()
    assert diagnose([STOPPED]).findings[0].not_a_remedy != ()


def test_a_shortage_does_not_say_of_what_a_server_died() -> None:
    """A log that ends in a death without a cause stays open; one that only begins in the middle does not."""
    storm = judged(Code.KV_PREEMPTION_STORM)
    assert diagnose([VANISHED], [storm]).memory_failure is None
    assert diagnose([log([REQUEST] * 5, source="cut.log")], [storm]).memory_failure is True


def test_an_unsure_finding_does_not_settle_it() -> None:
    """A memory cause below one half is told, not believed."""
    found = diagnose([], [judged(Code.RUNTIME_FORWARD, Severity.CRITICAL, 0.3)])
    assert found.memory_failure is not True


@pytest.mark.parametrize("code", [137, -9, 0, 1, 134])
def test_an_exit_code_proves_nothing_about_memory(code: int) -> None:
    """Alone, and beside a server that vanished without a word: it cannot be told."""
    assert diagnose([], exit_code=code).memory_failure is None
    assert diagnose([VANISHED], exit_code=code).memory_failure is None


def test_a_kill_leaves_open_what_a_sound_log_does_not_show() -> None:
    """A log without a fault and SIGKILL: nobody knows for what, and what would settle it is asked for."""
    found = diagnose([WELL], exit_code=137)
    assert (found.memory_failure, [one.code for one in found.findings]) == (None, [Code.OTHER_KILLED])
    assert any("dmesg" in ask for ask in found.collect_next)
    assert diagnose([WELL], exit_code=0).memory_failure is False
    assert diagnose([WELL, BUS], exit_code=137).memory_failure is False
    assert diagnose([WELL, KILLER], exit_code=137).memory_failure is True


def test_a_kill_after_an_orderly_stop_cannot_be_told() -> None:
    """The grace period may have run out, or memory: the log does not say; a supervisor that stopped it does."""
    found = diagnose([STOPPED], exit_code=137)
    assert (found.memory_failure, found.findings[0].code) == (None, Code.OTHER_KILLED)
    assert "asked to stop before" in found.findings[0].because
    assert any("dmesg" in ask for ask in found.collect_next)
    unit = log(
        "* vllm.service - vLLM",
        "     Loaded: loaded (/etc/systemd/system/vllm.service; enabled)",
        "Nov 15 09:10:00 h systemd[1]: Stopping vllm.service - vLLM...",
        "Nov 15 09:11:30 h systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL",
        source="systemctl",
    )
    told = diagnose([STOPPED, unit], exit_code=137)
    assert (told.memory_failure, {one.code for one in told.findings}) == (False, {Code.OTHER_STOPPED_BY_OPERATOR})


def test_the_page_of_another_program_settles_nothing() -> None:
    """Nor does a range with hardly a point in it: nothing wrong was seen because nothing was."""
    foreign = InputVerdict("page", (), {"is": "metrics", "engines": [], "notes": ("no metric of vLLM",)})
    found = diagnose([], [foreign])
    assert found.memory_failure is None
    assert found.facts["remarks"] == ["page: no metric of vLLM"]
    assert diagnose([], [InputVerdict("p", (), {"is": "range", "points": 3})]).memory_failure is None
    assert diagnose([], [InputVerdict("p", (), {"is": "range", "points": 30})]).memory_failure is False


def test_a_page_names_the_model() -> None:
    """Where no log does."""
    page = InputVerdict("page", (), {"is": "metrics", "engines": [{"model": "org/m"}]})
    assert diagnose([], [page]).facts["model"] == "org/m"
    assert diagnose([WELL], [page]).facts["model"] == "m"


def test_an_exit_code_is_kept_with_what_it_does_not_prove() -> None:
    """Among the facts: the number, what it says, and what not."""
    facts = diagnose([FAILED], exit_code=137).facts["exit_code"]
    assert isinstance(facts, dict)
    assert facts["code"] == 137
    assert "memory" in facts["does_not_prove"]


def test_a_cause_needs_no_exit_code_beside_it() -> None:
    """Where the log names the cause, how the process ended is no finding of its own."""
    assert [f.code for f in diagnose([FAILED], exit_code=137).findings] == [Code.RUNTIME_FORWARD]


def test_the_same_finding_is_told_once() -> None:
    """The same log twice under two names has one cause, not two."""
    twin = FAILED._replace(source="copy.log")
    assert len(diagnose([FAILED, twin]).findings) == 1


def test_facts_are_of_the_server_that_failed() -> None:
    """A healthy log beside it does not hide them; both are listed as inputs."""
    facts = diagnose([WELL, FAILED], [judged(Code.KV_SATURATED)]).facts
    assert facts["out_of_memory"] is not None
    inputs = facts["inputs"]
    assert isinstance(inputs, list)
    assert [one["is"] for one in inputs] == ["vLLM log", "vLLM log", "metrics"]
    others = facts["other_logs"]
    assert isinstance(others, list)
    assert [one["source"] for one in others] == ["well.log"]

"""One text, all that was collected together, what is remarked on it, and what is not denied beside it."""

from __future__ import annotations

from itertools import permutations

from plimsoll.doctor.rules.diagnose import LONGEST_EVIDENCE, InputVerdict, LogDiagnosis, diagnose, diagnose_log, evidence
from plimsoll.doctor.rules.facts import LogFacts, PlanFigures
from plimsoll.doctor.rules.log_text import Log
from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity
from tests.doctor.log_maker import (
    ARGS,
    BUS,
    ENGINE_DEAD,
    FAILED_START,
    KILLER,
    LOADED,
    LOADING,
    MEASURED,
    MOON,
    OOM,
    REQUEST,
    STARTED,
    STEP,
    STOP,
    VERSION,
    log,
    traceback,
)
from tests.doctor.pasted_text import printed
from tests.each import each

(TABLE,) = printed("TABLE")
WELL = log(STARTED, [REQUEST] * 5, source="well.log")
FAILED = log(STARTED, traceback(STEP), ENGINE_DEAD, source="failed.log")
VANISHED = log(STARTED, ENGINE_DEAD, source="vanished.log")
STOPPED = log(STARTED, STOP, source="stopped.log")
KILLED, LOST = log(KILLER, source="dmesg"), log(BUS, source="dmesg")
TEXT = log("Dear diary", source="diary.txt")
CUT = log([REQUEST] * 5, source="cut.log")
HELP = log(
    "usage: vllm serve [options]", "  --swap-space  CPU swap space size (GiB) per GPU.",
    "  --gpu-memory-utilization  The fraction of GPU memory to use; too much of it and out of memory errors occur.",
    "  --enforce-eager  avoids CUDA out of memory at graph capture",
)  # fmt: skip
UNIT = log(
    "* vllm.service - vLLM", "     Loaded: loaded (/etc/systemd/system/vllm.service; enabled)",
    "Nov 15 09:10:00 h systemd[1]: Stopping vllm.service - vLLM...",
    "Nov 15 09:11:30 h systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL", source="systemctl",
)  # fmt: skip
STORM, ENGINES = Code.KV_PREEMPTION_STORM, [{"engine": "0"}]


def judged(code: Code, severity: Severity = Severity.WARNING, confidence: float = 0.8) -> InputVerdict:
    finding = Finding(code, severity, confidence, "title", "because", (Evidence("page", "text"),))
    return InputVerdict("page", (finding,), {"is": "metrics", "engines": ENGINES})


PAGE, HINT = judged(STORM), judged(STORM, confidence=0.5)
FOREIGN = InputVerdict("page", (), {"is": "metrics", "engines": [], "notes": ("no metric of vLLM",)})


@each(("logs", "inputs", "exit_code", "memory", "codes"), [
    ([], [], None, None, []), ([TEXT], [], None, None, []), ([HELP], [], None, None, []), ([WELL], [], None, False, []),
    ([FAILED], [], None, True, [Code.RUNTIME_FORWARD]), ([VANISHED], [], None, None, [Code.ENGINE_DEAD]),
    ([STOPPED], [], None, False, [Code.OTHER_STOPPED_BY_OPERATOR]), ([WELL, FAILED], [], None, True, [Code.RUNTIME_FORWARD]),
    ([VANISHED, KILLED], [], None, True, [Code.HOST_OUT_OF_MEMORY]), ([KILLED], [], None, True, [Code.HOST_OUT_OF_MEMORY]),
    ([VANISHED, LOST], [], None, False, [Code.OTHER_HARDWARE]), ([WELL, VANISHED], [], None, None, [Code.ENGINE_DEAD]),
    ([WELL, TEXT], [], None, False, []),
    # A page alone: a storm is a memory failure, a low hit rate none, a hint is neither proved nor denied.
    ([], [PAGE], None, True, [STORM]), ([], [judged(Code.PREFIX_CACHE_LOW_HIT_RATE)], None, False,
     [Code.PREFIX_CACHE_LOW_HIT_RATE]),
    ([], [judged(STORM, Severity.INFO)], None, False, [STORM]),
    ([], [judged(Code.RUNTIME_FORWARD, Severity.CRITICAL, 0.3)], None, None, [Code.RUNTIME_FORWARD]),
    ([], [HINT], None, None, [STORM]), ([WELL], [HINT], None, None, [STORM]),
    ([WELL, LOST], [HINT], None, False, [Code.OTHER_HARDWARE, STORM]),
    # Trouble is read before a stop; a shortage does not say of what a server died.
    ([STOPPED], [PAGE], None, True, [STORM, Code.OTHER_STOPPED_BY_OPERATOR]),
    ([STOPPED], [HINT], None, None, [STORM, Code.OTHER_STOPPED_BY_OPERATOR]),
    ([VANISHED], [PAGE], None, None, [Code.ENGINE_DEAD, STORM]), ([CUT], [PAGE], None, True, [STORM]),
    # Another program's page, and a range with hardly a point in it, settle nothing.
    ([], [FOREIGN], None, None, []), ([], [InputVerdict("p", (), {"is": "range", "points": 3})], None, None, []),
    ([], [InputVerdict("p", (), {"is": "range", "points": 30})], None, False, []),
    # An exit code proves nothing about memory; a kill leaves open what a sound log does not show.
    *(([], [], number, None, codes) for number, codes in [(137, [Code.OTHER_KILLED]), (-9, [Code.OTHER_KILLED]), (1, [])]),
    ([FAILED], [], 137, True, [Code.RUNTIME_FORWARD]), ([WELL], [], 137, None, [Code.OTHER_KILLED]),
    ([WELL], [], 0, False, [Code.ENGINE_DEAD]), ([WELL, LOST], [], 137, False, [Code.OTHER_HARDWARE]),
    ([WELL, KILLED], [], 137, True, [Code.HOST_OUT_OF_MEMORY]),
    ([STOPPED], [], 137, None, [Code.OTHER_KILLED, Code.OTHER_STOPPED_BY_OPERATOR]),
    ([STOPPED, UNIT], [], 137, False, [Code.OTHER_STOPPED_BY_OPERATOR]),
])  # fmt: skip
def test_inputs_are_judged_together_in_any_order(
    logs: list[Log], inputs: list[InputVerdict], exit_code: int | None, memory: bool | None, codes: list[Code]
) -> None:
    """The cause comes first whatever the order; a hole in the story leaves memory open; another's cause closes it."""
    for order in permutations(logs):
        found = diagnose(list(order), inputs, exit_code=exit_code)
        assert found.memory_failure is memory
        assert [one.code for one in found.findings] == codes


@each(("logs", "inputs", "exit_code", "asked"), [
    ([VANISHED], [], None, "dmesg"), ([TEXT], [], None, "nothing of vLLM was recognised"),
    ([WELL], [HINT], None, "second page"),
    ([STOPPED], [HINT], None, "second page"), ([WELL], [], 137, "dmesg"), ([STOPPED], [], 137, "dmesg"),
    ([FAILED], [], None, ""), ([WELL], [], None, ""),
])  # fmt: skip
def test_what_is_open_asks_and_what_is_told_does_not(
    logs: list[Log], inputs: list[InputVerdict], exit_code: int | None, asked: str
) -> None:
    """Something to collect where it cannot be told, nothing where it can."""
    found = diagnose(logs, inputs, exit_code=exit_code).collect_next
    assert any(asked in ask for ask in found) if asked else found == ()


def test_facts_of_all_inputs_stand_together() -> None:
    """The model that a page names where no log does, what an exit code says and does not prove, and notes on a page."""
    page = InputVerdict("page", (), {"is": "metrics", "engines": [{"model": "org/m"}]})
    assert (diagnose([], [page]).facts["model"], diagnose([WELL], [page]).facts["model"]) == ("org/m", "m")
    assert diagnose([], [FOREIGN]).facts["remarks"] == ["page: no metric of vLLM"]
    exited = diagnose([FAILED], exit_code=137).facts["exit_code"]
    assert isinstance(exited, dict)
    assert (exited["code"], "memory" in exited["does_not_prove"]) == (137, True)
    assert "asked to stop before" in diagnose([STOPPED], exit_code=137).findings[0].because


NONE = "any memory setting: this is not a memory failure"
WAIT = "changing memory settings before it is known who killed it"
ALONE = "a restart: it changes nothing"
STOP_FINDING = Finding(Code.OTHER_STOPPED_BY_OPERATOR, Severity.INFO, 0.9, "t", "b", not_a_remedy=(NONE, WAIT, ALONE))
SHORT = Finding(STORM, Severity.WARNING, 0.5, "t", "b", remedy=(Remedy("more cache", "it is full"),))


@each(("beside", "facts", "memory", "kept"), [
    ([], {"is": "metrics", "engines": ENGINES}, False, (NONE, WAIT, ALONE)), ([], {}, None, (WAIT, ALONE)),
    ([SHORT], {}, None, (ALONE,)), ([SHORT._replace(confidence=0.7)], {}, True, (ALONE,)),
    ([SHORT._replace(severity=Severity.INFO)], {"is": "metrics", "engines": ENGINES}, False, (NONE, WAIT, ALONE)),
])  # fmt: skip
def test_no_finding_denies_what_another_advises(
    beside: list[Finding], facts: dict[str, object], memory: bool | None, kept: tuple[str, ...]
) -> None:
    """Nor does one deny a memory failure where the answer is that it cannot be told; a mere word is no shortage."""
    told = diagnose([], [InputVerdict("page", [STOP_FINDING, *beside], facts)])
    assert told.memory_failure is memory
    assert next(one for one in told.findings if one.code is STOP_FINDING.code).not_a_remedy == kept


def said(*parts: str | list[str]) -> LogDiagnosis:
    """What is said of these lines, without a plan."""
    return diagnose_log(log(*parts), lambda _: None)


def test_evidence_quotes_the_line_with_its_number() -> None:
    """Who said it, where, at most so long, with secrets hidden and nothing that moves a cursor."""
    quoted = evidence(log("first", "(EngineCore pid=2) HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz \x07 " + "x" * 900), 1)
    assert (quoted.source, quoted.line, quoted.text[:19]) == ("server.log", 2, "(EngineCore pid=2) ")
    assert "hf_abc" not in quoted.text
    assert quoted.text.isprintable()
    assert len(quoted.text) <= LONGEST_EVIDENCE + 3


NATIVE = ["Fatal Python error: Aborted", "", "Thread 0x7f (most recent call first):", '  File "/opt/x.py", line 7 in forward']
SIGNAL = ["*** SIGABRT received at time=1 on cpu 2 ***", "PC: @     0x7f5b1a0969fc  (unknown)  pthread_kill"]


@each(("lines", "shown"), [
    ([*STARTED, *NATIVE], {1: "forward"}), ([*STARTED, *SIGNAL], {1: "pthread_kill"}),
    ([*STARTED, *traceback("v1/engine/core.py:run_engine_core", STEP), ENGINE_DEAD],
     {0: OOM[:60], 1: "execute_model", 2: "EngineDead"}),
])  # fmt: skip
def test_the_proof_is_the_error_its_place_and_its_end(lines: list[str], shown: dict[int, str]) -> None:
    """What was said, the innermost call (of vLLM's, or of those that a native crash left), and what it led to."""
    proof = said(lines).findings[0].evidence
    assert all(text in proof[place].text for place, text in shown.items())


def test_the_plan_is_asked_for_memory_alone() -> None:
    """Nothing is planned for a stop, another cause or a healthy server; once for a memory failure, with the log's facts."""
    asked: list[LogFacts] = []

    def plan(facts: LogFacts) -> PlanFigures | None:
        asked.append(facts)
        return None

    for lines in (STARTED, [*STARTED, traceback(STEP, error=MOON)[-1], ENGINE_DEAD]):
        diagnose_log(log(lines), plan)
    assert asked == []
    diagnose_log(log(FAILED_START), plan)
    assert [(facts.version, facts.model, facts.flags["max_model_len"]) for facts in asked] == [("0.25.1", "m", "8192")]


def test_a_stop_in_the_middle_of_a_start_may_be_a_probes() -> None:
    """A pod that restarts for ever is stopped so; of one that served it is not said."""
    starting = said(VERSION, ARGS, LOADING, STOP).findings[0]
    assert "a probe that gives up sends the same signal" in starting.because
    assert "kubectl describe pod" in starting.remedy[0].do
    assert "probe that gives up" not in said(STARTED, STOP).findings[0].because


JAVA = log("java.lang.OutOfMemoryError: Java heap space", "\tat java.nio.HeapByteBuffer.<init>(HeapByteBuffer.java:57)")
TRAINING = log("Traceback (most recent call last):", '  File "/app/train.py", line 8, in <module>', "    work()", "MemoryError")
OTHER = [line.replace("pid=1)", "pid=7)").replace("pid=2)", "pid=8)") for line in STARTED]
MIXED = [line for pair in zip(STARTED, OTHER, strict=True) for line in pair]
BROKEN = [VERSION, ARGS, LOADING, *traceback("model_executor/models/llama.py:load_weights"), ENGINE_DEAD]


@each(("text", "remarks", "codes"), [
    (log("", source="a.log"), "a.log is empty: nothing was written to it", []), (TEXT, "", []), (JAVA, "", []),
    (TRAINING, "nothing in server.log is recognised as vLLM's own", [Code.HOST_OUT_OF_MEMORY]),
    (FAILED, "", [Code.RUNTIME_FORWARD]),
    (LOST, "", [Code.OTHER_HARDWARE]), (log(STARTED), "kubectl logs --previous NAME", []),
    (log(VERSION, ARGS), "breaks off at line 2, before it loads the model", []),
    (log(VERSION, ARGS, LOADING), "breaks off at line 3, while it loads the model, and does not say why; its last words: (E",
     []),
    (log(VERSION, ARGS, LOADING, LOADED), "line 4, after the model was loaded and before its memory was measured", []),
    (log(VERSION, ARGS, LOADING, LOADED, MEASURED), "line 5, after its memory was measured", []),
    (log(MIXED), "two servers wrote into this log at the same time, APIServer pid=1 and APIServer pid=7", []),
    (log(MIXED), "APIServer pid=1 came up (line 13)", []), (log(STARTED, OTHER), "kubectl logs --previous NAME", []),
    (log(BROKEN, OTHER), f"a server (APIServer pid=7) came up at line {len(BROKEN) + 7}", [Code.STARTUP_WEIGHTS_DO_NOT_FIT]),
    (log(BROKEN), "", [Code.STARTUP_WEIGHTS_DO_NOT_FIT]),
    (log(TABLE), "GPU 0: 77.4 GiB of 79.6 GiB are in use: VLLM::EngineCore (pid 2632314) 72.3 GiB, /usr/bin/gnome shell",
     [Code.OTHER_HARDWARE]),
    (log(TABLE), "20,423 MiB in use belong to no listed process", [Code.OTHER_HARDWARE]),
])  # fmt: skip
def test_what_a_reader_is_told_beside_the_findings(text: Log, remarks: str, codes: list[Code]) -> None:
    """An empty text, one of another program, a start that breaks off and where, two servers in one file, who holds the card."""
    found = diagnose([text])
    told = found.facts.get("remarks", [])
    assert isinstance(told, list)
    assert remarks in "\n".join(told) if remarks else told == []
    assert [one.code for one in found.findings] == codes

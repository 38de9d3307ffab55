"""One text input, read for everything it may hold."""

from __future__ import annotations

from plimsoll.doctor.rules.diagnose import CRASH_LOOP, LONGEST_EVIDENCE, LogDiagnosis, diagnose_log, evidence
from plimsoll.doctor.rules.facts import LogFacts, PlanFigures
from plimsoll.findings import Code, Severity
from tests.doctor.log_maker import ARGS, ENGINE_DEAD, LOADING, NOT_STARTED, OOM, REQUEST, STARTED, VERSION, log, traceback

STEP = "v1/worker/gpu_model_runner.py:execute_model"
FAILED_START = [VERSION, ARGS, LOADING, *traceback("v1/worker/gpu_worker.py:load_model"), NOT_STARTED]
KERNEL = "[ 8123.4] Out of memory: Killed process 2 (VLLM::EngineCor) total-vm:900kB, anon-rss:800kB, file-rss:0kB"
XID = "[ 8123.4] NVRM: Xid (PCI:0000:3b:00): 79, pid=2, name=python, GPU has fallen off the bus."


def said(*parts: str | list[str]) -> LogDiagnosis:
    """What is said of these lines, without a plan."""
    return diagnose_log(log(*parts), lambda _: None)


def codes(*parts: str | list[str]) -> list[Code]:
    return [finding.code for finding in said(*parts).findings]


def test_evidence_quotes_the_line_with_its_number() -> None:
    """Who said it, where, at most so long, with secrets hidden and nothing that moves a cursor."""
    given = log("first", "(EngineCore pid=2) HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz \x07 " + "x" * 900)
    quoted = evidence(given, 1)
    assert (quoted.source, quoted.line) == ("server.log", 2)
    assert quoted.text.startswith("(EngineCore pid=2) ")
    assert "hf_abc" not in quoted.text
    assert quoted.text.isprintable()
    assert len(quoted.text) <= LONGEST_EVIDENCE + 3


def test_a_crash_in_native_code_is_quoted_with_its_innermost_call() -> None:
    """Python's own dump, and a caught signal with its stack: never empty-handed."""
    dump = ["Fatal Python error: Aborted", "", "Thread 0x7f (most recent call first):", '  File "/opt/x.py", line 7 in forward']
    stack = ["*** SIGABRT received at time=1 on cpu 2 ***", "PC: @     0x7f5b1a0969fc  (unknown)  pthread_kill"]
    for lines, call in ((dump, "forward"), (stack, "pthread_kill")):
        finding = said(STARTED, lines).findings[0]
        assert finding.code is Code.OTHER_ENGINE_ERROR
        assert call in finding.evidence[1].text


def test_the_proof_is_the_error_its_place_and_its_end() -> None:
    """Three lines: what was said, vLLM's innermost call, and what it led to."""
    finding = said(STARTED, traceback("v1/engine/core.py:run_engine_core", STEP), ENGINE_DEAD).findings[0]
    assert [one.line for one in finding.evidence] == [14, 12, 15]
    assert "execute_model" in finding.evidence[1].text


def test_one_cause_and_its_noise_are_one_finding() -> None:
    """What the cause made follow it is not reported as a cause."""
    found = said(STARTED, traceback(STEP), traceback("a.py:b", error="BrokenPipeError: [Errno 32] Broken pipe"), ENGINE_DEAD)
    assert [finding.code for finding in found.findings] == [Code.RUNTIME_FORWARD]
    assert found.memory_failure is True
    assert found.collect_next == ()


def test_memory_in_pieces_is_said_beside_the_step() -> None:
    """Where torch held enough for the request in gaps, that is the second finding."""
    error = OOM.replace("120.00 MiB is reserved", "9.00 GiB is reserved")
    found = said(STARTED, traceback(STEP, error=error), ENGINE_DEAD)
    assert [finding.code for finding in found.findings][:2] == [Code.RUNTIME_FORWARD, Code.ALLOCATOR_FRAGMENTATION]
    assert found.findings[1].severity is Severity.WARNING


def test_a_death_without_a_word_asks_for_more() -> None:
    """Dead, and nobody says why: the finding says so, and what to collect."""
    found = said(STARTED, ENGINE_DEAD)
    assert [finding.code for finding in found.findings] == [Code.ENGINE_DEAD]
    assert found.memory_failure is None
    assert any("dmesg" in ask for ask in found.collect_next)
    assert found.findings[0].not_a_remedy


def test_the_same_failure_again_and_again_is_a_loop() -> None:
    """Two failed starts are two; three are a loop, beside the cause."""
    assert Code.ENGINE_CRASH_LOOP not in codes(FAILED_START * (CRASH_LOOP - 1))
    found = codes(FAILED_START * CRASH_LOOP)
    assert found[0] is Code.STARTUP_WEIGHTS_DO_NOT_FIT
    assert Code.ENGINE_CRASH_LOOP in found


def test_the_kernels_lines_beside_a_servers_are_judged_too() -> None:
    """One file with both: the out-of-memory killer, and a GPU that fell off the bus."""
    killed = said(STARTED, KERNEL, ENGINE_DEAD)
    assert killed.findings[0].code is Code.HOST_OUT_OF_MEMORY
    assert sum(finding.code is Code.HOST_OUT_OF_MEMORY for finding in killed.findings) == 1
    assert killed.memory_failure is True
    lost = said(STARTED, XID, ENGINE_DEAD)
    assert Code.OTHER_HARDWARE in [finding.code for finding in lost.findings]


def test_a_text_that_is_no_servers_is_none() -> None:
    """Kernel lines alone, and anything else."""
    kernel = said(XID)
    assert not kernel.is_server
    assert kernel.findings[0].code is Code.OTHER_HARDWARE
    assert kernel.facts == {}
    other = said("Dear diary,", "today memory was on my mind: out of sight, out of mind.")
    assert (other.findings, other.memory_failure, other.is_server) == ((), None, False)


def test_help_that_speaks_of_memory_is_no_failure() -> None:
    """A page of options full of the word is nobody's failure."""
    page = [
        "usage: vllm serve [options]",
        "  --gpu-memory-utilization  The fraction of GPU memory to use; too much of it and out of memory errors occur.",
        "  --swap-space  CPU swap space size (GiB) per GPU.",
        "  --enforce-eager  avoids CUDA out of memory at graph capture",
    ]
    found = said(page)
    assert found.findings == ()
    assert found.memory_failure is not True


def test_the_plan_is_asked_for_memory_alone() -> None:
    """Nothing is planned for a stop, another cause or a healthy server; once for a memory failure, with the log's facts."""
    asked: list[LogFacts] = []

    def plan(facts: LogFacts) -> PlanFigures | None:
        asked.append(facts)
        return None

    for lines in (STARTED, [*STARTED, traceback(STEP, error="RuntimeError: moon")[-1], ENGINE_DEAD]):
        diagnose_log(log(lines), plan)
    assert asked == []
    diagnose_log(log(FAILED_START), plan)
    assert [(facts.version, facts.model, facts.flags["max_model_len"]) for facts in asked] == [("0.25.1", "m", "8192")]


def test_facts_are_what_the_log_states() -> None:
    """Version, model, flags, how far it came, the step, the allocation that failed, and how many starts."""
    facts = said(STARTED, traceback(STEP), ENGINE_DEAD).facts
    assert (facts["vllm"], facts["model"], facts["reached"], facts["step"], facts["starts"]) == (
        "0.25.1", "m", "serving", "forward", 1,
    )  # fmt: skip
    assert facts["out_of_memory"]["tried_bytes"] == 2 << 30  # type: ignore[index]


def test_a_healthy_log_has_no_findings_and_no_questions() -> None:
    """From its first line on, nothing wrong: memory is ruled out."""
    found = said(STARTED, [REQUEST] * 5)
    assert (found.findings, found.memory_failure, found.collect_next) == ((), False, ())


def test_a_stop_in_the_middle_of_a_start_may_be_a_probes() -> None:
    """A pod that restarts for ever is stopped so; of one that served it is not said."""
    stop = "(APIServer pid=1) INFO 11-15 09:10:00 [launcher.py:1] [shutdown] API server: shutdown triggered"
    starting = said(VERSION, ARGS, LOADING, stop).findings[0]
    assert starting.code is Code.OTHER_STOPPED_BY_OPERATOR
    assert "a probe that gives up sends the same signal" in starting.because
    assert "kubectl describe pod" in starting.remedy[0].do
    assert "probe that gives up" not in said(STARTED, stop).findings[0].because


def test_what_is_harmless_is_told_with_its_line() -> None:
    """Who sees the words in the log can find that they are the ones that are meant."""
    stop = "(APIServer pid=1) INFO 11-15 09:10:00 [launcher.py:1] [shutdown] API server: shutdown triggered"
    harmless = said(STARTED, stop, OOM).facts["harmless"]
    assert isinstance(harmless, list)
    assert harmless[0].startswith(f"line {len(STARTED) + 2}: {OOM[:100]}")

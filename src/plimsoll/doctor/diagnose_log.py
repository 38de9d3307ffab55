"""One text input, read for everything it may hold: a server's log, kernel lines, a pod's description, nvidia-smi."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plimsoll.doctor.advice import finding_of
from plimsoll.doctor.arguments import without_values
from plimsoll.doctor.case import Case, PlanSays
from plimsoll.doctor.complaints import Complaint
from plimsoll.doctor.contained import finding_of_contained, proof_of, with_containment, without_contained
from plimsoll.doctor.contained_lines import ContainedLines, read_contained
from plimsoll.doctor.facts import LogFacts, facts_of, oom_facts
from plimsoll.doctor.fitting import fitting
from plimsoll.doctor.judge import Verdict, judge
from plimsoll.doctor.marks import kinds_in
from plimsoll.doctor.metrics_queues import is_full, matters
from plimsoll.doctor.quoted import without_quotes
from plimsoll.doctor.remarks import cards_shown, is_foreign, remarks_on
from plimsoll.doctor.steps import Progress
from plimsoll.doctor.story import Hit, Story, read_story
from plimsoll.domain.finding import Code, Evidence, Finding, Remedy, Severity
from plimsoll.domain.log import Log
from plimsoll.domain.printable import printable
from plimsoll.domain.redaction import redact
from plimsoll.domain.user_text import hide_user_text
from plimsoll.engine.failure_texts import TEXTS, Text

PlanFor = Callable[[LogFacts], PlanSays | None]
LONGEST_EVIDENCE = 320
MOST_NOTES = 3  # of each that speaks beside vLLM
# Where the cure is computed from the plan of the same command; planning costs more than reading the log.
PLANNED = frozenset({
    Code.STARTUP_WEIGHTS_DO_NOT_FIT, Code.STARTUP_NO_CACHE_BLOCKS, Code.STARTUP_CONTEXT_TOO_LONG, Code.STARTUP_PROFILE_RUN,
    Code.STARTUP_SAMPLER_WARMUP, Code.RUNTIME_LOGITS,
})  # fmt: skip
ASKS_OF_AN_END = (
    "the kernel's log of that time: dmesg -T (or journalctl -k), where the out-of-memory killer and the GPU driver speak",
    "the exit code, and on Kubernetes: kubectl describe pod NAME and kubectl logs --previous NAME",
)
CRASH_LOOP = 3  # the same failure so often is a loop


class LogDiagnosis(NamedTuple):
    """What one text input says."""

    source: str
    findings: tuple[Finding, ...]
    memory_failure: bool | None
    facts: dict[str, object]
    collect_next: tuple[str, ...]
    is_server: bool  # whether vLLM speaks in it at all
    kinds: frozenset[str] = frozenset()  # who else speaks in it: the kernel, a supervisor, nvidia-smi, torch's summary
    around: tuple[Finding, ...] = ()  # what these say
    remarks: tuple[str, ...] = ()  # what a reader should know of it beside the findings

    @property
    def what(self) -> str:
        """What kind of text it is."""
        return " and ".join([*(["vLLM log"] if self.is_server else []), *sorted(self.kinds)]) or "text"

    @property
    def says(self) -> str:
        """The shortest summary of it."""
        if self.findings:
            return str(self.findings[0].code)
        return "nothing wrong in it" if self.memory_failure is False or self.kinds else "nothing recognised in it"


def evidence(log: Log, index: int) -> Evidence:
    """One line of the user's own input, with secrets hidden."""
    line = log.lines[index]
    text = printable(hide_user_text(redact(line.text))).strip()
    if "unrecognized arguments:" in text:
        text = without_values(text)
    who = f"({line.process}) " if line.process else ""
    text = who + text
    return Evidence(log.source, text if len(text) <= LONGEST_EVIDENCE else text[:LONGEST_EVIDENCE] + "...", line.number)


def diagnose_log(log: Log, plan_for: PlanFor, texts: Sequence[Text] = TEXTS) -> LogDiagnosis:
    """The findings of one text input, its own root cause first."""
    log, is_written = without_quotes(log)
    story = read_story(log, texts)
    contained = read_contained(story.log.lines)
    story, survived = without_contained(story, contained)
    verdict = _without_strangers(story, judge(story))
    is_alive = not verdict.deaths and not contained.given_up and (verdict.root is None or verdict.stopped)
    if contained.failures and is_alive:
        verdict = verdict._replace(memory_failure=True)  # it ran out, and lived
    facts = facts_of(story, verdict.life)
    is_server = verdict.progress is not Progress.UNKNOWN or any((verdict.deaths, contained, _is_servers(verdict.root)))
    findings: list[Finding] = []
    if verdict.root is not None:
        findings += _of_root(story, verdict, facts, plan_for)
    elif verdict.deaths:
        findings.append(_dead(story, verdict, facts))
    if verdict.lives_failed >= CRASH_LOOP:
        findings.append(_crash_loop(story, verdict))
    if contained:
        findings[:1] = [_with_containment(story, one, contained) for one in findings[:1]]
    if contained.failures:
        proof = [evidence(story.log, at) for at in proof_of(contained)]
        findings.append(finding_of_contained(contained, survived, facts, proof, is_alive=is_alive))
    kinds = kinds_in(log)
    around, remarks = _around(log, verdict, kinds)
    remarks += (
        [f"{log.source} is a page that somebody wrote: the errors that it quotes are taken for nobody's"] if is_written else []
    )
    trends = _trends(log)
    # More work than one server does is no failure.
    remarks += [f"{one.code}: {one.because}" for one in trends if one.code is Code.ENGINE_SATURATED and is_server]
    trends = [one for one in trends if one.code is not Code.ENGINE_SATURATED]
    memory = verdict.memory_failure
    told = verdict.root is not None and not verdict.stopped
    if not told and (kv := [one for one in trends if one.code.startswith("kv.") and one.severity is not Severity.INFO]):
        memory, findings = True, [*kv, *findings]
        trends = [one for one in trends if one not in kv]
    elif memory is False and not told and _ends_full(log):
        memory = None  # full, with a queue, when the log breaks off: too short to call it trouble or to rule it out
    is_kernels = verdict.root is not None and verdict.root.text is not None and verdict.root.text.name == "kernel-oom"
    if is_kernels and around and findings[0].code is Code.HOST_OUT_OF_MEMORY:
        findings = findings[1:]  # the judge of the kernel's lines says more of it
    findings += [one for one in (*around, *trends) if one.code not in {known.code for known in findings}]
    shown = _facts(story, verdict, facts) if is_server else {}
    findings = [fitting(finding, facts.flags) for finding in findings]
    last = next((evidence(log, at) for at in range(len(log.lines) - 1, -1, -1) if log.lines[at].text.strip()), None)
    remarks += remarks_on(story, verdict, last, memory=memory, has_findings=bool(findings), is_server=is_server)
    return LogDiagnosis(
        log.source,
        tuple(findings),
        memory if is_server else None,
        shown,
        tuple(_asks(verdict, facts)),
        is_server,
        kinds,
        tuple(around),
        tuple(hide_user_text(redact(remark)) for remark in remarks),
    )


def _without_strangers(story: Story, verdict: Verdict) -> Verdict:
    """An exception that nobody has words for, in a text in which vLLM says nothing, is some other program's."""
    root = verdict.root
    if root is None or root.text is not None or not is_foreign(story, verdict):
        return verdict
    return verdict._replace(root=None, memory_failure=None)


def _is_servers(root: Complaint | None) -> bool:
    """Whether a complaint can only stand in a server's log: the kernel and the driver speak in logs of their own."""
    return root is not None and (root.text is None or root.text.speaker not in ("kernel", "nvml"))


def _of_root(story: Story, verdict: Verdict, facts: LogFacts, plan_for: PlanFor) -> Iterator[Finding]:
    root = verdict.root
    assert root is not None
    if root.oom is not None and root.oom.total is not None and facts.measured.total_bytes is None:
        facts = facts._replace(measured=facts.measured._replace(total_bytes=root.oom.total))
    plan = plan_for(facts) if root.code in PLANNED and not verdict.stopped else None
    case = Case(root, facts, _whole(story, root), plan)
    severity = Severity.INFO if verdict.stopped else Severity.CRITICAL
    yield finding_of(case, list(_proof(story, root, verdict.deaths)), severity)
    if case.oom.is_fragmented and root.code is not Code.ALLOCATOR_FRAGMENTATION:
        pieces = root._replace(code=Code.ALLOCATOR_FRAGMENTATION, confidence=0.6)
        yield finding_of(case._replace(complaint=pieces), [evidence(story.log, root.at)], Severity.WARNING)


def _with_containment(story: Story, found: Finding, contained: ContainedLines) -> Finding:
    """The cause with what containment had to do with it, where it could have had."""
    if not found.code.startswith("runtime.") or found.severity is not Severity.CRITICAL:
        return found
    proof = [evidence(story.log, one.at) for one in contained.given_up[-1:]]
    reason = printable(hide_user_text(redact(contained.not_armed[-1].text))).strip() if contained.not_armed else ""
    return with_containment(found, contained, proof, reason)


def _whole(story: Story, root: Complaint) -> str:
    """The line that names the cause and what belongs to it: a message may go on, and figures may stand a line away."""
    lines = story.log.lines[root.at : root.at + 6]
    text = lines[0].text + "\n" + " ".join(line.text for line in lines)
    return f"{text}\n{root.raised.message}" if root.raised is not None else text


def _proof(story: Story, root: Complaint, deaths: Sequence[Hit]) -> Iterator[Evidence]:
    """The line itself, the innermost call of vLLM's above it, and the end it led to."""
    yield evidence(story.log, root.at)
    if root.raised is not None:
        for index in range(root.raised.at, max(root.raised.first, root.raised.at - 200) - 1, -1):
            line = story.log.lines[index]
            if 'File "' in line.text and "/vllm/" in line.text and line.process == root.raised.process:
                yield evidence(story.log, index)
                break
    end = next((hit for hit in deaths if hit.at > root.at), None)
    if end is not None:
        yield evidence(story.log, end.at)


def _dead(story: Story, verdict: Verdict, facts: LogFacts) -> Finding:
    """It died and does not say of what."""
    first = verdict.deaths[0]
    code, because = facts.worker_exit_code, "the log ends in the engine's death and names no cause"
    if code == -9 or any(hit.text.name in ("shell-killed", "sigkill") for hit in verdict.deaths):
        because = (
            "a process of the server was killed (SIGKILL): by the host's out-of-memory killer, by the container's limit, or "
            "by a person; only the kernel's log or the orchestrator knows"
        )
    elif code in (-6, -11, -7):
        because = f"a process of the server crashed in native code (signal {-code}); the log names no cause"
    remedy = (Remedy("dmesg -T | grep -i -e oom -e killed -e xid, and kubectl describe pod", "they say who ended it"),)
    return Finding(
        Code.ENGINE_DEAD, Severity.CRITICAL, 0.6, "the engine died, and the log does not say why", because,
        (evidence(story.log, first.at),), remedy, ("changing memory settings before the cause is known",),
    )  # fmt: skip


def _crash_loop(story: Story, verdict: Verdict) -> Finding:
    because = (
        f"{verdict.lives_failed} starts in this log ended in a failure; starting again changes nothing while its cause stays"
    )
    starts = tuple(evidence(story.log, life.first) for life in story.lives[-3:])
    remedy = Remedy("stop the restarts, fix the cause above, then start once", "each start takes card and disk from the others")
    return Finding(
        Code.ENGINE_CRASH_LOOP, Severity.WARNING, 0.8, "the server fails again and again", because, starts, (remedy,)
    )


def _around(log: Log, verdict: Verdict, kinds: frozenset[str]) -> tuple[list[Finding], list[str]]:
    """What other speakers in the same text say, and show; each judge is loaded only where its own words occur."""
    found: list[Finding] = []
    shown: list[str] = []
    if "kernel" in kinds:
        from plimsoll.doctor.kernel import judge_kernel

        kernel = judge_kernel(log)
        found += kernel.findings
        shown += kernel.facts.notes[:MOST_NOTES]
    if "supervisor" in kinds:
        from plimsoll.doctor.kubernetes import judge_pods

        pods = judge_pods(log)
        found += pods.findings
        shown += pods.facts.notes[:MOST_NOTES]
    if "nvidia-smi" in kinds:
        from plimsoll.doctor.nvidia_smi import judge_nvidia_smi

        smi = judge_nvidia_smi(log)
        found += smi.findings
        shown += cards_shown(smi.facts)
    if "memory-summary" in kinds:
        from plimsoll.doctor.memory_summary import judge_memory_summary

        failed = verdict.root.oom.tried if verdict.root is not None and verdict.root.oom is not None else None
        found += judge_memory_summary(log, failed_bytes=failed).findings
    return found, shown


def _trends(log: Log) -> list[Finding]:
    if not any("throughput" in line.text or "is preempted by" in line.text for line in log.lines):
        return []
    from plimsoll.doctor.trends import judge_log_trends

    # One request that was thrown out is worth no finding.
    return [one for one in judge_log_trends(log) if one.severity is not Severity.INFO]


def _ends_full(log: Log) -> bool:
    """Whether one of the last periodic lines shows a full cache and a queue."""
    from plimsoll.doctor.trend_log import moments_of_log

    return any(
        is_full(one.kv, one.running, one.most_running) and matters(one.waiting, one.running)
        for moments in moments_of_log(log).values()
        for one in moments[-3:]
    )


def _facts(story: Story, verdict: Verdict, facts: LogFacts) -> dict[str, object]:
    measured = {name: value for name, value in facts.measured._asdict().items() if value is not None}
    root = verdict.root
    return {
        "vllm": facts.version,
        "model": redact(facts.model) if facts.model else None,
        "gpu": {
            "name": facts.gpu_name,
            "total_bytes": (root.oom.total if root and root.oom else None) or facts.measured.total_bytes,
        },
        "flags": dict(facts.flags),
        "memory": measured,
        "reached": facts.progress.name.lower(),
        "step": root.step.name if root is not None and root.step is not None else None,
        "out_of_memory": oom_facts(root.oom)
        if root is not None and root.oom is not None and root.oom.tried is not None
        else None,
        "scheduler_at_death": dict(facts.scheduler) or None,
        "worker_exit_code": facts.worker_exit_code,
        "processes": [one._asdict() for one in facts.processes if one.process],
        "harmless": [_with_line(evidence(story.log, hit.at)) for hit in verdict.noise[:3]],
        "starts": len(story.lives),
    }


def _with_line(one: Evidence) -> str:
    return one.text if one.line is None else f"line {one.line}: {one.text}"


def _asks(verdict: Verdict, facts: LogFacts) -> Iterator[str]:
    """What would settle it, where this log does not."""
    if verdict.memory_failure is not None:
        return
    if facts.progress is Progress.UNKNOWN and not verdict.deaths:
        return
    yield from ASKS_OF_AN_END
    if verdict.progress is not Progress.SERVING:
        yield "the whole log of the start, from its first line to its last, of every process (VLLM_LOGGING_LEVEL=DEBUG helps)"

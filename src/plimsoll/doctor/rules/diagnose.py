"""Diagnoses all inputs together: each text by itself, then one root cause first and its consequences after it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from plimsoll.doctor.remedies.choose import explain, offers, request_in_pieces
from plimsoll.doctor.rules.contained import (
    START,
    finding_of_contained,
    proof_of,
    read_contained,
    with_containment,
    without_contained,
)
from plimsoll.doctor.rules.exit_codes import judge_exit
from plimsoll.doctor.rules.facts import (
    FailureCase,
    LogFacts,
    PlanFigures,
    command_words,
    facts_of,
    fitting,
    oom_facts,
    request_clause,
    role_of,
    without_values,
)
from plimsoll.doctor.rules.kernel import judge_kernel
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.doctor.rules.nvidia_smi import judge_nvidia_smi
from plimsoll.doctor.rules.out_of_memory import OomFigures
from plimsoll.doctor.rules.pods import judge_pods
from plimsoll.doctor.rules.root_cause import LogVerdict, Symptom, is_consequence, judge, judge_runs, spans_of_servers
from plimsoll.doctor.rules.timeline import (
    Hit,
    LogTimeline,
    ServerProgress,
    kinds_in,
    read_timeline,
    without_reports,
)
from plimsoll.doctor.rules.trend_growth import is_full, matters
from plimsoll.doctor.rules.trends import judge_log_trends, moments_of_log
from plimsoll.doctor.words import finding, words
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.redaction import hide_user_text, printable, redact
from plimsoll.units import GIB, MIB, format_gib
from plimsoll.vllm.failure_texts import TEXTS, FailureText

_MOST_HOLDERS = 4
_CAME_UP = "Application startup complete"


def is_foreign(timeline: LogTimeline, verdict: LogVerdict) -> bool:
    """True if vLLM says nothing in this text: no process or record of its own, no step of its start, not even its name."""
    if verdict.progress is not ServerProgress.UNKNOWN or timeline.milestones:
        return False
    return not any(line.process or line.place or "vllm" in line.text.lower() for line in timeline.log.lines)


def remarks_on(
    timeline: LogTimeline,
    verdict: LogVerdict,
    last: Evidence | None,
    *,
    memory: bool | None,
    has_findings: bool,
    is_server: bool,
) -> Iterator[str]:
    """Remarks on the log, usually none; `last` is its last non-empty line, `is_server` says that vLLM writes in it."""
    source = timeline.log.source
    if last is None:
        yield f"{source} is empty: nothing was written to it"
        return
    if is_server and verdict.root is not None and is_foreign(timeline, verdict):
        yield f"nothing in {source} is recognised as vLLM's own: make sure that it is the server's log before you act on it"
    lines = timeline.log.lines
    at_once = list(_servers_at_once(lines))
    yield from at_once
    if not at_once and verdict.root is not None and not verdict.stopped:
        up = next((line for line in lines[verdict.root.at :] if _CAME_UP in line.text), None)
        if up is not None:
            who = f"({up.process}) " if up.process else ""
            where = "further down in this log" if up.number is None else f"at line {up.number} of this log"
            yield f"a server {who}came up {where}, after what failed above: it may be over, or it is another server's log, too"
    if verdict.root is not None or verdict.deaths or has_findings:
        return
    breaks_off = words("names")["breaks_off"].get(verdict.progress.name.lower())
    if memory is None and breaks_off is not None:
        at = "" if last.line is None else f" at line {last.line}"
        yield f"{source} breaks off{at}, {breaks_off}, and does not say why; its last words: {last.text[:160]}"
    elif memory is False and verdict.progress is ServerProgress.SERVING:
        yield (
            "the log shows a server that came up, and no end of it. If it was restarted, this is the log of the new one: "
            "kubectl logs --previous NAME, or the log from before the restart, has what ended the old one"
        )


def _servers_at_once(lines: Sequence[LogLine]) -> Iterator[str]:
    """Two servers that write into one file at the same time: most likely they share the cards, too."""
    spans = spans_of_servers(lines, 0, len(lines))
    up: dict[str, int | None] = {}
    for line in lines:
        if line.process in spans and _CAME_UP in line.text:
            up.setdefault(line.process, line.number)
    for name, (first, end) in spans.items():
        for second, (other_first, other_end) in spans.items():
            if first < other_first <= end and first < other_end:
                came = [f"{one} came up (line {up[one]})" for one in (name, second) if up.get(one) is not None]
                yield (
                    f"two servers wrote into this log at the same time, {name} and {second}"
                    + (f"; {' and '.join(came)}" if came else "")
                    + ". Where they share cards, what one takes is missing to the other while it measures: start one, wait "
                    "until it serves, then start the other with what is left"
                )
                return


PlanLookup = Callable[[LogFacts], PlanFigures | None]
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
    """The diagnosis of one text input."""

    source: str
    findings: tuple[Finding, ...]
    memory_failure: bool | None
    facts: dict[str, object]
    collect_next: tuple[str, ...]
    is_server: bool  # whether vLLM speaks in it at all
    kinds: frozenset[str] = frozenset()  # who else speaks in it: the kernel, a supervisor, nvidia-smi
    around: tuple[Finding, ...] = ()  # what these say
    remarks: tuple[str, ...] = ()  # what a reader should know of it beside the findings

    @property
    def what(self) -> str:
        """The kinds of text in it."""
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


def diagnose_log(log: Log, plan_for: PlanLookup, texts: Sequence[FailureText] = TEXTS) -> LogDiagnosis:
    """The findings of one text input, its own root cause first."""
    timeline = read_timeline(without_reports(log), texts)
    log = timeline.log  # without what users wrote
    contained = read_contained(log.lines) if any(line.text.startswith(START) for line in log.lines) else None
    survived: tuple[OomFigures, ...] = ()
    if contained is not None:
        timeline, survived = without_contained(timeline, contained)
    verdicts = judge_runs(timeline)
    verdict = judge(timeline, verdicts)
    stranger = None  # the exception in which a text without a word of vLLM's ends: another program's, most likely
    if verdict.root is not None and verdict.root.text is None and is_foreign(timeline, verdict):
        raised = verdict.root.exception
        verdict = verdict._replace(root=None, memory_failure=None)
        if raised is not None and not any(line.text.strip() for line in log.lines[raised.at + 1 :]):
            calls = [at for at in range(raised.first, raised.at) if log.lines[at].text.lstrip().startswith('File "')]
            place = re.sub(r'^\s*File "(.+?)", line (\d+).*', r" at \1:\2", log.lines[calls[-1]].text) if calls else ""
            proof = [evidence(log, at) for at in (*calls[-1:], raised.at)]
            stranger = finding("stranger", proof, name=raised.name, kind=raised.kind, place=place)
    is_alive = not verdict.deaths and (verdict.root is None or verdict.stopped)
    if contained is not None and contained.failures and (is_alive := is_alive and not contained.given_up):
        verdict = verdict._replace(memory_failure=True)  # it ran out, and lived
    facts = facts_of(timeline, verdict.run)
    speaks = verdict.root is not None and (verdict.root.text is None or verdict.root.text.speaker not in ("kernel", "nvml"))
    is_server = verdict.progress is not ServerProgress.UNKNOWN or bool(verdict.deaths or speaks or contained)
    findings: list[Finding] = []
    if verdict.root is not None:
        findings += _of_root(timeline, verdict, facts, plan_for)
    elif verdict.deaths:
        findings.append(_dead(timeline, verdict, facts))
    elif stranger is not None:
        findings.append(stranger)
    lived = sorted(
        max(times) - min(times)
        for one in verdicts
        if one.root is not None
        and one.progress is ServerProgress.SERVING
        and (times := [line.at for line in log.lines[one.run.first : one.run.end] if line.at is not None])
    )
    has_served = len(lived) >= CRASH_LOOP and lived[len(lived) // 2] >= SERVED_S
    if verdict.runs_failed >= CRASH_LOOP and not has_served:
        starts = [evidence(log, run.first) for run in timeline.runs[-3:]]
        findings.append(finding("failing-starts", starts, count=verdict.runs_failed))
    is_step = bool(findings) and findings[0].code.startswith("runtime.") and findings[0].severity is Severity.CRITICAL
    if contained is not None and is_step:
        proof = [evidence(timeline.log, one.at) for one in contained.given_up[-1:]]
        reason = printable(hide_user_text(redact(contained.not_armed[-1].text))).strip() if contained.not_armed else ""
        findings[0] = with_containment(findings[0], contained, proof, reason)
    if contained is not None and contained.failures:
        proof = [evidence(timeline.log, at) for at in proof_of(contained)]
        findings.append(finding_of_contained(contained, survived, facts, proof, is_alive=is_alive))
    kinds = kinds_in(log)
    around, remarks = _judge_others(log, kinds)
    has_trends = any("throughput" in line.text or "is preempted by" in line.text for line in log.lines)
    # One preempted request is worth no finding.
    trends = [one for one in judge_log_trends(log) if one.severity is not Severity.INFO] if has_trends else []
    # More work than one server does is no failure.
    remarks += [f"{one.code}: {one.because}" for one in trends if one.code is Code.ENGINE_SATURATED and is_server]
    trends = [one for one in trends if one.code is not Code.ENGINE_SATURATED]
    memory = verdict.memory_failure
    told = verdict.root is not None and not verdict.stopped
    if not told and (kv := [one for one in trends if one.code.startswith("kv.") and one.severity is not Severity.INFO]):
        memory, findings = True, [*kv, *findings]
        trends = [one for one in trends if one not in kv]
    elif memory is False and not told:
        ends = [one for moments in moments_of_log(log).values() for one in moments[-3:]]
        if any(is_full(one.kv, one.running, one.most_running) and matters(one.waiting, one.running) for one in ends):
            memory = None  # full, with a queue, when the log breaks off: too short to call it trouble or to rule it out
    is_kernels = verdict.root is not None and verdict.root.text is not None and verdict.root.text.name == "kernel-oom"
    if is_kernels and around and findings[0].code is Code.HOST_OUT_OF_MEMORY:
        findings = findings[1:]  # the judge of the kernel's lines says more of it
    findings += [one for one in (*around, *trends) if one.code not in {known.code for known in findings}]
    shown = _facts(timeline, verdict, facts) if is_server else {}
    findings = [fitting(finding, facts) for finding in findings]
    if is_server:
        shown.update(_runs(timeline, verdicts), **_failed_first(timeline, verdict))
    last = next((evidence(log, at) for at in range(len(log.lines) - 1, -1, -1) if log.lines[at].text.strip()), None)
    remarks += remarks_on(timeline, verdict, last, memory=memory, has_findings=bool(findings), is_server=is_server)
    return LogDiagnosis(
        log.source, tuple(findings), memory if is_server else None, shown, tuple(_asks(verdict, facts)), is_server, kinds,
        tuple(around), tuple(hide_user_text(redact(remark)) for remark in remarks),
    )  # fmt: skip


SERVED_S = 3600.0  # a server that lived so long before it failed is in no crash loop


def _runs(timeline: LogTimeline, verdicts: Sequence[LogVerdict]) -> dict[str, object]:
    """What became of each run, the last one that failed first; nothing where there is one."""
    if len(verdicts) < 2:
        return {}
    numbered = list(enumerate(verdicts, 1))
    failed = [pair for pair in numbered if pair[1].root is not None and not pair[1].stopped]
    order = [*failed[::-1], *(pair for pair in numbered if pair not in failed)]
    lines = timeline.log.lines
    rows = [
        {
            "run": number, "first_line": lines[one.run.first].number, "last_line": lines[one.run.end - 1].number,
            "memory_failure": one.memory_failure,
            "code": str(one.root.code) if one.root is not None else str(Code.ENGINE_DEAD) if one.deaths else None,
            "confidence": round(one.root.confidence, 2) if one.root is not None else None,
            "reached": one.progress.name.lower(),
        }
        for number, one in order
        if one.run.end > one.run.first
    ]  # fmt: skip
    return {"runs": rows[:MOST_RUNS_SHOWN]}


MOST_RUNS_SHOWN = 20


def _failed_first(timeline: LogTimeline, verdict: LogVerdict) -> dict[str, object]:
    """Which process failed first, and how many after it; nothing where one process alone says anything."""
    root = verdict.root
    if root is None or verdict.stopped:
        return {}
    lines = timeline.log.lines
    first: dict[str, int] = {}
    for one in timeline.exceptions:
        if verdict.run.first <= one.at < verdict.run.end and one.process and not one.in_logging and not one.warned:
            first.setdefault(one.process, one.at)
    process = lines[root.at].process
    peers = [name for name in first if not name.lower().startswith("apiserver")]  # it only passes on what its engine tells
    if not process or not peers or (len(peers) < 2 and "orker" not in process):
        return {}
    return {"failed_first": {
        "process": process, "is": role_of(process), "line": lines[root.at].number,
        "after_it": sorted(role_of(name) for name in peers if name != process)[:MOST_RUNS_SHOWN],
    }}  # fmt: skip


def _of_root(timeline: LogTimeline, verdict: LogVerdict, facts: LogFacts, plan_for: PlanLookup) -> Iterator[Finding]:
    root = verdict.root
    assert root is not None
    if root.oom is not None and root.oom.total is not None and facts.measured.total_bytes is None:
        facts = facts._replace(measured=facts.measured._replace(total_bytes=root.oom.total))
    plan = plan_for(facts) if root.code in PLANNED and not verdict.stopped else None
    lines = timeline.log.lines[root.at : root.at + 6]
    text = lines[0].text + "\n" + " ".join(line.text for line in lines)
    case = FailureCase(root, facts, f"{text}\n{root.exception.message}" if root.exception is not None else text, plan)
    severity = Severity.INFO if verdict.stopped else Severity.CRITICAL
    yield build_finding(case, list(_proof(timeline, root, verdict.deaths)), severity)
    if case.oom.is_fragmented and root.code is not Code.ALLOCATOR_FRAGMENTATION:
        pieces = root._replace(code=Code.ALLOCATOR_FRAGMENTATION, confidence=0.6)
        yield build_finding(case._replace(symptom=pieces), [evidence(timeline.log, root.at)], Severity.WARNING)


STRANGER = 0.3  # how sure it is that an exception in a text without a word of vLLM's ended a server


def build_finding(case: FailureCase, evidence: Sequence[Evidence], severity: Severity = Severity.CRITICAL) -> Finding:
    """The finding for this cause."""
    code, why = case.symptom.code, explain(case)
    row = words("causes")["codes"][why.row or str(code)]
    because = why.because or row["because"].format(request=request_clause(case), pieces=request_in_pieces(case))
    useless = row.get("not_a_remedy", () if code.is_memory else ("any memory setting: this is not a memory failure",))
    return Finding(
        code, severity, round(case.symptom.confidence, 2), row["title"], because, tuple(evidence),
        tuple(offers(case, why, row)), (*why.useless, *useless),
    )  # fmt: skip


def _proof(timeline: LogTimeline, root: Symptom, deaths: Sequence[Hit]) -> Iterator[Evidence]:
    """The line itself, the innermost call of vLLM's above it, and the end it led to."""
    yield evidence(timeline.log, root.at)
    if root.exception is not None:
        for index in range(root.exception.at, max(root.exception.first, root.exception.at - 200) - 1, -1):
            line = timeline.log.lines[index]
            if 'File "' in line.text and "/vllm/" in line.text and line.process == root.exception.process:
                yield evidence(timeline.log, index)
                break
    elif root.code is Code.OTHER_ENGINE_ERROR:  # a crash in native code: the innermost of the calls that it left behind
        following = range(root.at + 1, min(root.at + 60, len(timeline.log.lines)))
        calls = (at for at in following if re.search(_NATIVE_CALL, timeline.log.lines[at].text))
        yield from (evidence(timeline.log, at) for at in list(calls)[:1])
    end = next((hit for hit in deaths if hit.at > root.at), None)
    if end is not None:
        yield evidence(timeline.log, end.at)


def _last_words(timeline: LogTimeline, verdict: LogVerdict) -> tuple[str, list[int]]:
    """The last exception of the run, or the calls that a crash left behind, in words, and the lines that hold them."""
    run, lines = verdict.run, timeline.log.lines
    raised = [one for one in timeline.exceptions if run.first <= one.at < run.end and one.kind and not one.in_logging]
    ends = {hit.at for hit in verdict.deaths}
    first_hand = [one for one in raised if not is_consequence(one)] or [one for one in raised if one.at not in ends] or raised
    if first_hand:
        one = first_hand[-1]
        frame = next((at for at in range(one.at, one.first - 1, -1) if 'File "' in lines[at].text), None)
        where = re.search(r'File "([^"]{1,400})", line (\d{1,9})', lines[frame].text) if frame is not None else None
        place = f" at {where[1].rpartition('/')[2]}:{where[2]}" if where else ""
        said = f": {one.message.partition(chr(10))[0][:160]}" if one.message else ""
        return f"; the last exception is {one.name}{place}{said}", [one.at, *([frame] if frame is not None else [])]
    for at in range(run.end - 1, run.first - 1, -1):
        if (call := re.search(_NATIVE_CALL, lines[at].text)) is not None:
            while at > run.first and re.search(_NATIVE_CALL, lines[at - 1].text):
                at -= 1  # noqa: PLW2901  the innermost call stands on top
            call = re.search(_NATIVE_CALL, lines[at].text) or call
            return f"; the innermost call in the log is {next(filter(None, call.groups()))[:120]}", [at]
    return "", []


# A frame of faulthandler, of torch's or of glog's native stack.
_NATIVE_CALL = (
    r'^\s{2,4}File "(?P<file>[^"]{1,300})", line \d{1,9},? in \S|^(?:frame )?#\d{1,3}:? {1,2}(?P<frame>[^(]{4,120})\(0x|'
    r"^\s{0,8}(?:PC: )?@ {1,8}0x[0-9a-f]{6,16} {1,8}(?:\(unknown\) {1,4}|\d{1,9} {1,4})?(?P<symbol>[^\s(]\S{1,160})|"
    r"^ ?\d{1,3} {1,4}(?P<library>/\S{4,200}\(\S{1,120}\)) \[0x"
)


def _dead(timeline: LogTimeline, verdict: LogVerdict, facts: LogFacts) -> Finding:
    said, shown = _last_words(timeline, verdict)
    code, because = facts.worker_exit_code, f"the log ends in the engine's death and names no cause that is known{said}"
    if code == -9 or any(hit.text.name in ("shell-killed", "sigkill") for hit in verdict.deaths):
        because = (
            "a process of the server was killed (SIGKILL): by the host's out-of-memory killer, by the container's limit, or "
            "by a person; only the kernel's log or the orchestrator knows"
        )
    elif code in (-6, -11, -7):
        because = f"a process of the server crashed in native code (signal {-code}); the log names no cause"
    proof = [evidence(timeline.log, at) for at in dict.fromkeys((*shown, verdict.deaths[0].at))]
    return finding("died-of-unknown", proof, because)


def _judge_others(log: Log, kinds: frozenset[str]) -> tuple[list[Finding], list[str]]:
    """Findings and notes from what other programs wrote into the same text."""
    findings: list[Finding] = []
    notes: list[str] = []
    if "kernel" in kinds:
        kernel = judge_kernel(log)
        findings += kernel.findings
        notes += kernel.facts[:MOST_NOTES]
    if "supervisor" in kinds:
        pods = judge_pods(log)
        findings += pods.findings
        notes += pods.facts.notes[:MOST_NOTES]
    if "nvidia-smi" in kinds:
        smi = judge_nvidia_smi(log)
        findings += smi.findings
        reading, processes = smi.facts.last, smi.facts.processes or ()
        for gpu in reading.gpus if reading else ():  # who holds how much of each card
            if gpu.used_mib is not None and gpu.total_mib is not None:
                mine = sorted((one for one in processes if one.gpu == gpu.number and one.mib), key=lambda one: -(one.mib or 0))
                held = [f"{one.name} (pid {one.pid}) {format_gib((one.mib or 0) * MIB)}" for one in mine[:_MOST_HOLDERS]]
                by = f": {', '.join(held)}" if held else ""
                use = f"{format_gib(gpu.used_mib * MIB)} of {format_gib(gpu.total_mib * MIB)} are in use"
                notes.append(f"GPU {gpu.number}: {use}{by}")
        notes += smi.facts.notes
    return findings, notes


def _facts(timeline: LogTimeline, verdict: LogVerdict, facts: LogFacts) -> dict[str, object]:
    measured = {name: value for name, value in facts.measured._asdict().items() if value is not None}
    root = verdict.root
    oom = root.oom if root is not None else None
    harmless = [evidence(timeline.log, hit.at) for hit in verdict.noise[:3]]
    return {
        "vllm": facts.version,
        "model": redact(facts.model) if facts.model else None,
        "gpu": {"name": facts.gpu_name, "total_bytes": (oom.total if oom else None) or facts.measured.total_bytes},
        "flags": dict(facts.flags),
        "memory": measured,
        "reached": facts.progress.name.lower(),
        "step": root.step.name if root is not None and root.step is not None else None,
        "out_of_memory": oom_facts(oom) if oom is not None and oom.tried is not None else None,
        "scheduler_at_death": dict(facts.scheduler) or None,
        "worker_exit_code": facts.worker_exit_code,
        "harmless": [one.text if one.line is None else f"line {one.line}: {one.text}" for one in harmless],
        "starts": len(timeline.runs),
        "releases": list(facts.releases) if facts.releases else None,
        "traits": sorted(facts.traits),
    }


def _asks(verdict: LogVerdict, facts: LogFacts) -> Iterator[str]:
    if verdict.memory_failure is not None:
        return
    if facts.progress is ServerProgress.UNKNOWN and not verdict.deaths:
        return
    yield from ASKS_OF_AN_END
    if verdict.progress is not ServerProgress.SERVING:
        yield "the whole log of the start, from its first line to its last, of every process (VLLM_LOGGING_LEVEL=DEBUG helps)"


SURE = 0.6  # from here on a shortage is shown; below it is a hint
_DENIES = re.compile(r"(?:any |changing |GPU )?memory settings?\b")
_IS_NONE = "this is not a memory failure"


def is_memory_trouble(finding: Finding) -> bool:
    """True if the finding says that a server is short of memory, also before anything failed."""
    return finding.code.is_memory and finding.severity is not Severity.INFO


class Diagnosis(NamedTuple):
    """The answer of `plimsoll doctor`: findings, facts, and what to collect next."""

    memory_failure: bool | None  # None: unknown
    findings: tuple[Finding, ...]  # the root cause first
    facts: Mapping[str, object]  # plain values, ready for JSON
    collect_next: tuple[str, ...]
    look_next: str = ""  # one command for the person on call


MOST_EVIDENCE = 8
FEWEST_POINTS = 10  # of the longest series in a range, below which nothing wrong in it means nothing
ASKS_FOR_A_LOOK = "a second page of the same server, some minutes later; or its address: http://HOST:PORT is looked at twice"
_INTRODUCES = ("API server version", "LLM engine (v")


class InputVerdict(NamedTuple):
    """Findings and facts of an input that is no text: a metrics page, a time range, a memory snapshot, a gate's state."""

    source: str
    findings: Sequence[Finding]
    facts: Mapping[str, object]


def diagnose(
    logs: Sequence[Log], inputs: Sequence[InputVerdict] = (), *, exit_code: int | None = None,
    plan_for: PlanLookup = lambda _: None, texts: Sequence[FailureText] = TEXTS,
) -> Diagnosis:  # fmt: skip
    """The diagnosis over everything given."""
    parts: list[Log] = []
    for log in logs:  # where the wrapping names several servers that introduce themselves, each is diagnosed alone
        names = {line.server for line in log.lines if line.server and any(mark in line.text for mark in _INTRODUCES)}
        if len(names) < 2:
            parts.append(log)
            continue
        parts += [log._replace(lines=[line for line in log.lines if line.server == name]) for name in sorted(names)]
        rest = [line for line in log.lines if line.server not in names]
        parts += [log._replace(lines=rest)] if rest else []
    log_diagnoses = [diagnose_log(part, plan_for, texts) for part in parts]
    findings = [
        *(found for log in log_diagnoses for found in log.findings),
        *(found for one in inputs for found in one.findings),
    ]
    memory = _memory(log_diagnoses, inputs)
    facts = _all_facts(log_diagnoses, inputs)
    if exit_code is not None:
        was_stopped = any(finding.code is Code.OTHER_STOPPED_BY_OPERATOR for finding in findings)
        exited = judge_exit(exit_code, stop_seen=was_stopped)
        facts["exit_code"] = {"code": exit_code, "says": exited.sentence, "does_not_prove": exited.does_not_prove}
        # A supervisor that says that it stopped the server itself explains a kill already.
        by_supervisor = any(one.code is Code.OTHER_STOPPED_BY_OPERATOR for log in log_diagnoses for one in log.around)
        if exited.finding is not None and not any(map(_is_cause, findings)):
            is_explained = exited.finding.code is Code.OTHER_KILLED and by_supervisor
            findings += [] if is_explained else [exited.finding]  # after memory was judged: a number proves nothing of it
    if memory is False and _was_killed(findings):
        memory = None  # a log that shows nothing wrong does not say who killed the server, nor for what
    # No finding calls memory settings useless beside one that wants them changed; that it is no memory failure at all is
    # said only where that is the answer.
    ordered = list(_ordered(findings))
    wanted = any(is_memory_trouble(one) and one.remedy for one in ordered)
    for place, one in enumerate(ordered):
        denies = wanted and not one.code.is_memory
        kept = [
            useless for useless in one.not_a_remedy
            if not (denies and _DENIES.match(useless)) and not (memory is not False and _IS_NONE in useless)
        ]  # fmt: skip
        ordered[place] = one._replace(not_a_remedy=tuple(kept))
    asks = tuple(_ask_for(log_diagnoses, inputs, ordered, memory=memory))
    return Diagnosis(memory, tuple(ordered), facts, asks, look_next(ordered, facts, logs))


def look_next(findings: Sequence[Finding], facts: Mapping[str, object], logs: Sequence[Log]) -> str:
    """The one command that tells most about the first finding, for this machine and this server."""
    if not findings:
        return "plimsoll doctor http://HOST:PORT" if logs else ""
    code = str(findings[0].code)
    command = next((command for start, command in words("looks").items() if code.startswith(start)), "vllm collect-env")
    traits = facts.get("traits")
    if isinstance(command, dict):
        command = command[next((trait for trait in (traits if isinstance(traits, list) else []) if trait in command), "any")]
    flags, gpu = facts.get("flags"), facts.get("gpu")
    server = command_words({str(k): str(v) for k, v in flags.items()}) if isinstance(flags, Mapping) else None
    total = gpu.get("total_bytes") if isinstance(gpu, Mapping) else None
    card = f" --gpu-memory-gib {total / GIB:.2f}" if isinstance(total, int) else " --gpu NAME"
    line = shlex.join(server) if server else "vllm serve MODEL ..."
    return str(command).format(command=line, card=card, model=shlex.quote(server[2]) if server else "MODEL")


def _is_cause(finding: Finding) -> bool:
    effects = (Code.ENGINE_DEAD, Code.ENGINE_CRASH_LOOP, Code.ENGINE_WEDGED)
    return finding.severity is Severity.CRITICAL and finding.code not in effects


def _tells(finding: Finding) -> bool:
    """True if a cause says enough to settle what a log leaves open: a kill by nobody knows whom does not."""
    is_vague = finding.code is Code.OTHER_KILLED or (finding.code.is_memory and finding.confidence < 0.5)
    return _is_cause(finding) and not is_vague


def _was_killed(findings: Sequence[Finding]) -> bool:
    """True if it was killed by nobody knows whom: that it was asked to stop before does not say who lost patience."""
    return not any(map(_tells, findings)) and any(finding.code is Code.OTHER_KILLED for finding in findings)


def _memory(logs: Sequence[LogDiagnosis], inputs: Sequence[InputVerdict]) -> bool | None:
    """True where a memory failure is shown, False where all is told and none is, None where the evidence has a hole."""
    servers = [log for log in logs if log.is_server]
    beside = [finding for log in logs if not log.is_server for finding in log.findings]
    beside += [finding for one in inputs for finding in one.findings]
    causes = [finding for finding in (*beside, *(one for log in servers for one in log.around)) if _tells(finding)]
    causes = [finding for finding in causes if finding.confidence > STRANGER]
    if any(one.memory_failure for one in servers):
        return True
    if any(finding.code.is_memory and finding.confidence >= 0.5 for finding in causes):
        return True
    short = [finding for finding in beside if is_memory_trouble(finding)]  # of memory, and the server lives on
    holes = [one for one in servers if one.memory_failure is None]
    if any(finding.severity is Severity.CRITICAL for one in holes for finding in one.findings):
        return False if causes else None  # what it died of is not told by what it was short of; another's word may tell
    if any(finding.confidence >= SURE for finding in short):
        return True
    if causes:
        return False
    if holes or short:  # a hint at a shortage is not proved, and not denied
        return None
    # Figures of vLLM were there to be judged: another program's page says nothing of it.
    ranges = [one.facts.get("points", 0) for one in inputs if one.facts.get("is") == "range"]
    is_seen = any(isinstance(points, int) and points >= FEWEST_POINTS for points in ranges)
    is_seen = is_seen or any(one.facts.get("is") == "metrics" and one.facts.get("engines") for one in inputs)
    return False if servers or is_seen else None


def _ordered(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Causes first, the surest of them first where none explains another; then what came of them; what is no trouble last."""
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}

    def rank(pair: tuple[int, Finding]) -> tuple[bool, int, int]:
        place, finding = pair
        is_host = finding.code is Code.HOST_OUT_OF_MEMORY and _is_cause(finding)
        return not _is_cause(finding), order[finding.severity], -1 if is_host else place

    explained = any(map(_is_cause, findings))
    merged: dict[Code, Finding] = {}
    for _, one in sorted(enumerate(findings), key=rank):
        if explained and one.code is Code.ENGINE_DEAD:
            continue  # of what stands above it
        known = merged.get(one.code)
        if known is None:
            merged[one.code] = one
        elif known.evidence != one.evidence:  # the same thing seen from another side
            evidence = tuple(dict.fromkeys((*known.evidence, *one.evidence)))
            merged[one.code] = known._replace(evidence=evidence[:MOST_EVIDENCE])
    yield from merged.values()


def _all_facts(logs: Sequence[LogDiagnosis], inputs: Sequence[InputVerdict]) -> dict[str, object]:
    """The first server's facts in front, those of the others and of other inputs beside them."""
    facts: dict[str, object] = {"vllm": None, "gpu": None, "model": None, "flags": {}}
    servers = [log for log in logs if log.facts]
    first = next((log for log in servers if log.findings), servers[0] if servers else None)
    facts.update(first.facts if first is not None else {})
    remarks = [remark for log in logs for remark in log.remarks]
    notes: list[str] = []
    summaries: list[object] = [{"source": log.source, "is": log.what, "says": log.says} for log in logs]
    by_kind: dict[str, list[object]] = {}
    for one in inputs:
        kind, engines = str(one.facts.get("is", "figures")), one.facts.get("engines")
        said = one.facts.get("notes")
        told = [str(note) for note in said] if isinstance(said, (list, tuple)) else []
        if kind == "metrics":
            remarks += [f"{one.source}: {note}" for note in told]
        else:
            notes += told[:MOST_NOTES]
        named = engines[0].get("model") if isinstance(engines, list) and engines else None
        facts["model"] = facts["model"] or (named if isinstance(named, str) else None)
        quiet = "nothing of vLLM in it" if kind == "metrics" and not engines else "nothing wrong in it"
        says = str(one.findings[0].code) if one.findings else quiet
        summaries.append({"source": one.source, "is": kind, "says": says})
        by_kind.setdefault(kind, []).append({"source": one.source, **one.facts})
    facts |= {"remarks": remarks} if remarks else {}
    facts["inputs"] = summaries
    if first is not None and len(servers) > 1:
        facts["other_logs"] = [{"source": log.source, **log.facts} for log in servers if log.facts is not first.facts]
    return facts | by_kind | ({"notes": list(dict.fromkeys(notes))} if notes else {})


def _ask_for(
    logs: Sequence[LogDiagnosis], inputs: Sequence[InputVerdict], findings: Sequence[Finding], *, memory: bool | None
) -> list[str]:
    """The inputs to collect next, where these do not settle it."""
    if memory is not None and findings:
        return []
    kinds = {kind for log in logs for kind in log.kinds}
    asked = list(dict.fromkeys(ask for log in logs for ask in log.collect_next))
    if not asked and not findings and memory is None and not inputs:
        asked = ["the log of the server, from its first line: nothing of vLLM was recognised in what was given"]
    if not asked and memory is None and _was_killed(findings):
        asked = list(ASKS_OF_AN_END)
    pages = [one for one in inputs if one.facts.get("is") == "metrics"]
    if memory is None and any(is_memory_trouble(finding) for page in pages for finding in page.findings):
        asked.append(ASKS_FOR_A_LOOK)
    if "supervisor" in kinds:
        asked = [ask for ask in asked if ask != ASKS_OF_AN_END[1]]
    return [ask for ask in asked if "kernel" not in kinds or "dmesg" not in ask]

"""Judges all inputs together: one root cause first, then its consequences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from plimsoll.doctor.remedies.runtime import wedge_remedies
from plimsoll.doctor.rules.contained import finding_of_state, read_survival
from plimsoll.doctor.rules.diagnose_log import ASKS_OF_AN_END, MOST_NOTES, LogDiagnosis, PlanLookup, diagnose_log
from plimsoll.doctor.rules.exit_codes import judge_exit
from plimsoll.doctor.rules.log_text import Log
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.vllm.failure_texts import TEXTS, Text

SURE = 0.6  # from here on a shortage is shown; below it is a hint
_DENIES = re.compile(r"(?:any |changing |GPU )?memory settings?\b")
_IS_NONE = "this is not a memory failure"


def is_memory_trouble(finding: Finding) -> bool:
    """True if the finding says that a server is short of memory, also before anything failed."""
    return finding.code.is_memory and finding.severity is not Severity.INFO


def without_denials(findings: Sequence[Finding], *, memory: bool | None) -> Iterator[Finding]:
    """The findings, none of which calls memory settings useless beside one that wants them changed.

    That it is no memory failure at all is said only where that is the answer.
    """
    wanted = any(is_memory_trouble(one) and one.remedy for one in findings)
    for finding in findings:
        kept = tuple(
            one
            for one in finding.not_a_remedy
            if not (_DENIES.match(one) and wanted and not finding.code.is_memory)
            and not (memory is not False and _IS_NONE in one)
        )
        yield finding if kept == finding.not_a_remedy else finding._replace(not_a_remedy=kept)


class Diagnosis(NamedTuple):
    """The answer of `plimsoll doctor`: findings, facts, and what to collect next."""

    memory_failure: bool | None  # None: unknown
    findings: tuple[Finding, ...]  # the root cause first
    facts: Mapping[str, object]  # plain values, ready for JSON
    collect_next: tuple[str, ...]


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
    plan_for: PlanLookup = lambda _: None, texts: Sequence[Text] = TEXTS,
) -> Diagnosis:  # fmt: skip
    """The diagnosis over everything given."""
    log_diagnoses = [diagnose_log(one, plan_for, texts) for log in logs for one in _by_server(log)]
    findings = [finding for one in log_diagnoses for finding in one.findings]
    findings += [finding for one in inputs for finding in one.findings]
    memory = _memory(log_diagnoses, inputs)
    facts = _facts(log_diagnoses, inputs)
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
    ordered = tuple(without_denials(list(_ordered(findings)), memory=memory))
    return Diagnosis(memory, ordered, facts, tuple(_ask_for(log_diagnoses, inputs, ordered, memory=memory)))


def _by_server(log: Log) -> list[Log]:
    """One log for each server that introduces itself in it, where the wrapping names several: each is diagnosed alone."""
    names = {line.server for line in log.lines if line.server and any(mark in line.text for mark in _INTRODUCES)}
    if len(names) < 2:
        return [log]
    parts = [log._replace(lines=[line for line in log.lines if line.server == name]) for name in sorted(names)]
    rest = [line for line in log.lines if line.server not in names]
    return [*parts, log._replace(lines=rest)] if rest else parts


def _is_cause(finding: Finding) -> bool:
    effects = (Code.ENGINE_DEAD, Code.ENGINE_CRASH_LOOP, Code.ENGINE_WEDGED)
    return finding.severity is Severity.CRITICAL and finding.code not in effects


def _tells(finding: Finding) -> bool:
    """True if a cause says enough to settle what a log leaves open: a kill by nobody knows whom does not."""
    if finding.code is Code.OTHER_KILLED or (finding.code.is_memory and finding.confidence < 0.5):
        return False
    return _is_cause(finding)


def _was_killed(findings: Sequence[Finding]) -> bool:
    """True if it was killed by nobody knows whom: that it was asked to stop before does not say who lost patience."""
    told = any(_tells(finding) for finding in findings)
    return not told and any(finding.code is Code.OTHER_KILLED for finding in findings)


def _memory(logs: Sequence[LogDiagnosis], inputs: Sequence[InputVerdict]) -> bool | None:
    """True where a memory failure is shown, False where all is told and none is, None where the evidence has a hole."""
    servers = [log for log in logs if log.is_server]
    beside = [finding for log in logs if not log.is_server for finding in log.findings]
    beside += [finding for one in inputs for finding in one.findings]
    causes = [finding for finding in (*beside, *(one for log in servers for one in log.around)) if _tells(finding)]
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
    return False if servers or any(map(_shows_engine, inputs)) else None


def _shows_engine(one: InputVerdict) -> bool:
    """True if figures of vLLM were there to be judged: another program's page says nothing of it."""
    if one.facts.get("is") == "range":
        points = one.facts.get("points", 0)
        return isinstance(points, int) and points >= FEWEST_POINTS
    return one.facts.get("is") == "metrics" and bool(one.facts.get("engines"))


def _ordered(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Causes first, the surest of them first where none explains another; then what came of them; what is no trouble last."""
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}

    def rank(pair: tuple[int, Finding]) -> tuple[bool, int, int]:
        place, finding = pair
        is_host = finding.code is Code.HOST_OUT_OF_MEMORY and _is_cause(finding)
        return not _is_cause(finding), order[finding.severity], -1 if is_host else place

    explained = any(map(_is_cause, findings))
    merged: dict[Code, Finding] = {}
    for _, finding in sorted(enumerate(findings), key=rank):
        if explained and finding.code is Code.ENGINE_DEAD:
            continue  # of what stands above it
        known = merged.get(finding.code)
        if known is None:
            merged[finding.code] = finding
        elif known.evidence != finding.evidence:  # the same thing seen from another side
            evidence = tuple(dict.fromkeys((*known.evidence, *finding.evidence)))
            merged[finding.code] = known._replace(evidence=evidence[:MOST_EVIDENCE])
    yield from merged.values()


def _facts(logs: Sequence[LogDiagnosis], inputs: Sequence[InputVerdict]) -> dict[str, object]:
    """The first server's facts in front, those of the others and of other inputs beside them."""
    facts: dict[str, object] = {"vllm": None, "gpu": None, "model": None, "flags": {}}
    servers = [log for log in logs if log.facts]
    first = next((log for log in servers if log.findings), servers[0] if servers else None)
    facts.update(first.facts if first is not None else {})
    pages = [one for one in inputs if one.facts.get("is") == "metrics"]
    remarks = [remark for log in logs for remark in log.remarks]
    remarks += [f"{page.source}: {note}" for page in pages for note in _strings(page, "notes")]
    for one in inputs:
        engines = one.facts.get("engines")
        named = engines[0].get("model") if isinstance(engines, list) and engines else None
        facts["model"] = facts["model"] or (named if isinstance(named, str) else None)
    if remarks:
        facts["remarks"] = remarks
    summaries: list[object] = [{"source": log.source, "is": log.what, "says": log.says} for log in logs]
    for one in inputs:
        is_empty = one.facts.get("is") == "metrics" and not one.facts.get("engines")
        quiet = "nothing of vLLM in it" if is_empty else "nothing wrong in it"
        says = str(one.findings[0].code) if one.findings else quiet
        summaries.append({"source": one.source, "is": str(one.facts.get("is", "figures")), "says": says})
    facts["inputs"] = summaries
    if first is not None and len(servers) > 1:
        facts["other_logs"] = [{"source": log.source, **log.facts} for log in servers if log.facts is not first.facts]
    for one in inputs:
        facts.setdefault(str(one.facts.get("is", "figures")), []).append({"source": one.source, **one.facts})  # type: ignore[attr-defined]
    notes = [note for one in inputs if one.facts.get("is") != "metrics" for note in _strings(one, "notes")[:MOST_NOTES]]
    if notes:
        facts["notes"] = list(dict.fromkeys(notes))
    return facts


def _strings(one: InputVerdict, name: str) -> list[str]:
    value = one.facts.get(name)
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


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


# The state of a gate (`/plimsoll/state`, or `state.json` in guard's evidence): it alone proves a wedge.
SCHEMA = "plimsoll.state/1"
LONGEST = 320  # letters of a line that are shown
_FIRST_LINES = 3


def is_gate_state(log: Log) -> bool:
    """True if this text is such an answer."""
    first = "".join(line.text for line in log.lines[:_FIRST_LINES]).replace(" ", "")
    return first.startswith("{") and f'"schema":"{SCHEMA}"' in first


def judge_gate_state(log: Log) -> InputVerdict:
    """The findings of a gate's state; a text that is cut off says nothing."""
    try:
        state = json.loads("\n".join(line.text for line in log.lines))
    except (ValueError, RecursionError):
        state = {}
    state = state if isinstance(state, dict) else {}
    engine = state.get("engine")
    findings: list[Finding] = []
    if isinstance(engine, dict) and engine.get("is_wedged") is True:
        age, longest = engine.get("last_step_age_s"), engine.get("longest_step_s")
        since = f"no step for {age:.0f} s" if isinstance(age, int | float) else "no step"
        before = f"; the longest before took {longest:.2f} s" if isinstance(longest, int | float) else ""
        findings.append(Finding(
            Code.ENGINE_WEDGED, Severity.CRITICAL, 0.95, "the engine has work and makes no step",
            f"{since} with requests there{before}; and the gate's canary request of one token got no answer",
            (_line(log, '"is_wedged"'),), wedge_remedies(),
            ("a larger KV cache or other memory flags: nothing here is about memory",),
        ))  # fmt: skip
    survival = read_survival(state.get("survive"))
    contained = finding_of_state(survival, (_line(log, '"contained"'),)) if survival is not None else None
    findings += [] if contained is None else [contained]
    return InputVerdict(log.source, tuple(findings), {"is": "gate state", "ready": state.get("ready")})


def _line(log: Log, name: str) -> Evidence:
    place = next((n for n, line in enumerate(log.lines) if name in line.text), 0)
    text = log.lines[place].text.strip()
    at = max(0, text.find(name) - 40) if len(text) > LONGEST else 0  # a state on one line is long
    return Evidence(log.source, text[at : at + LONGEST], log.lines[place].number)

"""Judges what Kubernetes, docker or systemd tells: killed for memory or by a probe, evicted, looping, never started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.exit_codes import judge_exit
from plimsoll.doctor.host_memory import NOT_A_REMEDY
from plimsoll.doctor.pod_rules import judge_events
from plimsoll.doctor.pod_text import read_pods
from plimsoll.doctor.quoting import quote
from plimsoll.doctor.supervised import Ending, PodEvent, PodFacts
from plimsoll.doctor.supervisors import read_docker, read_systemd
from plimsoll.domain.finding import Code, Finding, Remedy, Severity
from plimsoll.domain.log import Log
from plimsoll.domain.units import format_gib


class PodVerdict(NamedTuple):
    """The findings, the gravest first, and the facts."""

    findings: list[Finding]
    facts: PodFacts


def judge_pods(log: Log) -> PodVerdict:
    """Say what the supervisor's text shows; text without any gives nothing."""
    facts = _together(read_pods(log), read_docker(log), read_systemd(log))
    found = [_out_of_memory(log, facts), _probe(log, facts), _timeout(log, facts), *judge_events(log, facts)]
    causes = [one for one in found if one]
    if not causes:
        causes += [one for one in (_ending(log, facts),) if one]
    causes += [one for one in (_loop(log, facts),) if one]
    notes = list(facts.notes)
    if facts.shm_mounted is False:
        notes.append("no volume on /dev/shm: the default of 64 MiB is too small for several GPUs (Bus error, exit code 135)")
    causes.sort(key=lambda one: (one.code is Code.ENGINE_CRASH_LOOP, one.severity is not Severity.CRITICAL, -one.confidence))
    return PodVerdict(causes, facts._replace(notes=tuple(notes)))


def _together(*parts: PodFacts) -> PodFacts:
    """One set of facts from all supervisors."""
    first = parts[0]
    for other in parts[1:]:
        first = first._replace(
            endings=first.endings + other.endings,
            restarts=other.restarts if first.restarts is None else first.restarts,
            restarts_line=first.restarts_line or other.restarts_line,
            memory_limit_bytes=first.memory_limit_bytes or other.memory_limit_bytes,
            shm_bytes=first.shm_bytes or other.shm_bytes,
            stop_asked=first.stop_asked + other.stop_asked,
            start_limit=first.start_limit + other.start_limit,
            timeouts=first.timeouts + other.timeouts,
            notes=first.notes + other.notes,
        )
    return first


def _ran(ending: Ending) -> str:
    return "" if ending.seconds is None else f" after {ending.seconds:,.0f} s"


def _out_of_memory(log: Log, facts: PodFacts) -> Finding | None:
    """The supervisor itself says that memory was the reason."""
    killed = [ending for ending in facts.endings if ending.out_of_memory]
    system = [event for event in facts.events if event.reason in ("OOMKilling", "SystemOOM")]
    if not killed:
        return None
    ending = killed[-1]
    limit = facts.memory_limit_bytes if ending.kind != "systemd" else None
    size = f" Its memory limit was {format_gib(limit)}." if limit else " Its memory limit is not in this text."
    whom = f"{'unit' if ending.kind == 'systemd' else 'container'} {ending.name}".strip()
    code = "" if ending.exit_code is None else f" with exit code {ending.exit_code}"
    room = f" above {format_gib(limit)}" if limit else ""
    return Finding(
        code=Code.HOST_OUT_OF_MEMORY,
        severity=Severity.CRITICAL,
        confidence=0.95,
        title=f"the server was killed for want of RAM ({ending.reason or 'OOMKilled'})",
        because=f"The supervisor says that {whom} was ended for memory{code}{_ran(ending)}.{size} This is RAM, not GPU memory.",
        evidence=quote(log, [*ending.lines, *(event.line for event in system)]),
        remedy=(
            Remedy(f"raise the memory limit{room}, if the machine has the RAM", "memory-backed volumes such as /dev/shm count"),
            Remedy("hold fewer prepared images", "4 GiB for each API server and rank", "--mm-processor-cache-gb", "0"),
            Remedy("lower or remove --kv-offloading-size and --cpu-offload-gb", "both are RAM, pinned"),
            Remedy("if it dies while compiling, set MAX_JOBS=1", "each compiler takes several GB"),
        ),
        not_a_remedy=(*NOT_A_REMEDY, "Restart=on-failure: the exit code may be 0"),
    )


def _probe(log: Log, facts: PodFacts) -> Finding | None:
    """The kubelet restarted the container because a probe failed; what the probe saw decides whose fault it was."""
    kills = [e for e in facts.events if e.reason == "Killing" and re.search("failed (?:liveness|startup) probe", e.message)]
    failed = [e for e in facts.events if e.reason == "Unhealthy" and re.search("(?:Liveness|Startup) probe", e.message)]
    if not kills:
        return None
    kind = "startup" if "startup" in kills[-1].message else "liveness"
    seen = " ".join(event.message for event in failed)
    if "statuscode: 503" in seen or "statuscode: 500" in seen:
        return _dead_by_probe(log, kills, failed)
    refused = "connection refused" in seen
    times = sum(event.times for event in failed)
    patience = next((probe.patience_s for probe in facts.probes if probe.kind == kind), None)
    allowed = f" The {kind} probe gives up after {patience} s (delay + period x failures)." if patience is not None else ""
    ran = next((e.seconds for e in reversed(facts.endings) if e.kind == "pod" and e.seconds is not None), None)
    lived = f" The container had run {ran:,.0f} s." if ran is not None else ""
    why = "the port was not open yet: it was still loading" if refused else "it did not answer in time"
    wanted = max(600, round(ran * 2)) if ran is not None else 1200
    return Finding(
        code=Code.OTHER_PROBE,
        severity=Severity.CRITICAL,
        confidence=0.9 if refused else 0.7,
        title=f"Kubernetes killed the server because its {kind} probe failed",
        because=f"The {kind} probe failed {times or len(kills)} time(s); {why}.{allowed}{lived} A start takes minutes.",
        evidence=quote(log, [event.line for event in (*kills, *failed)]),
        remedy=(
            Remedy(
                f"add a startupProbe with failureThreshold x periodSeconds of at least {wanted} s",
                "the liveness probe waits until it has passed",
            ),
            Remedy("give the liveness probe a timeout of 5 s or more and 3 or more failures", "a busy server answers late"),
            Remedy("keep the model and the compile cache on a fast volume", "later starts are shorter"),
        ),
        not_a_remedy=("memory settings: exit code 137 comes from the kubelet here", "more restarts"),
    )


def _dead_by_probe(log: Log, kills: Sequence[PodEvent], failed: Sequence[PodEvent]) -> Finding:
    return Finding(
        code=Code.ENGINE_DEAD,
        severity=Severity.CRITICAL,
        confidence=0.6,
        title="the server answered its probe with an error, and was restarted for it",
        because="The probe got HTTP 503 or 500: vLLM answers like this when its engine has died. The probe did its work.",
        evidence=quote(log, [event.line for event in (*failed, *kills)]),
        remedy=(Remedy("kubectl logs --previous, upward to the first error", "the cause of the engine's death stands there"),),
        not_a_remedy=("a more patient probe: a dead engine does not come back",),
    )


def _timeout(log: Log, facts: PodFacts) -> Finding | None:
    if not facts.timeouts:
        return None
    return Finding(
        code=Code.OTHER_TIMEOUT,
        severity=Severity.CRITICAL,
        confidence=0.85,
        title="systemd ended the server because it took too long",
        because=f"A time limit was over ({len(facts.timeouts)} line(s)); a start takes minutes; the default is 90 s.",
        evidence=quote(log, facts.timeouts),
        remedy=(Remedy("set TimeoutStartSec=1800 in the unit (and Type=simple, or exec)", "longer than the slowest start"),),
        not_a_remedy=("memory settings",),
    )


def _ending(log: Log, facts: PodFacts) -> Finding | None:
    """The last end that nothing else explains, judged by its exit code, which never shows a shortage by itself."""
    ends = [ending for ending in facts.endings if ending.exit_code is not None]
    if not ends:
        return None
    ending = ends[-1]
    assert ending.exit_code is not None
    if facts.stop_asked and ending.exit_code in (0, 137, 143, -9, -15):
        return _stopped(log, facts, ending)
    asked = bool(facts.stop_asked) if ending.kind == "pod" or facts.stop_asked else None
    verdict = judge_exit(ending.exit_code, stop_seen=asked)
    if verdict.finding is None:
        return None
    finding = verdict.finding
    evidence = quote(log, ending.lines) or finding.evidence
    because = (
        f"{finding.because} The supervisor gives the reason {ending.reason!r}{_ran(ending)}."
        if ending.reason
        else finding.because
    )
    return finding._replace(because=because, evidence=evidence)


def _stopped(log: Log, facts: PodFacts, ending: Ending) -> Finding:
    hard = ending.exit_code in (137, -9)
    slow = " It did not end within its grace period, so it was killed (SIGKILL)." if hard else ""
    return Finding(
        code=Code.OTHER_STOPPED_BY_OPERATOR,
        severity=Severity.INFO,
        confidence=0.8,
        title="the server was asked to stop",
        because=f"The supervisor stopped it, exit code {ending.exit_code}{_ran(ending)}.{slow} Nothing in this text failed.",
        evidence=quote(log, [*facts.stop_asked, *ending.lines]),
        remedy=(
            Remedy("let running requests finish", "the default aborts them at once", "--shutdown-timeout", "120"),
            Remedy("give the pod or unit a longer grace period than that", "else it is killed in the middle"),
        ),
        not_a_remedy=("memory settings",),
    )


def _loop(log: Log, facts: PodFacts) -> Finding | None:
    """Started and failed again and again: certain from the counts, silent about the cause."""
    backoff = [event for event in facts.events if event.reason == "BackOff" and "restarting failed" in event.message]
    waiting = [line for reason, line in facts.waiting if reason == "CrashLoopBackOff"]
    restarts = facts.restarts or 0
    if not (waiting or facts.start_limit or (backoff and restarts != 1) or restarts >= 3):
        return None
    sure = bool(waiting or facts.start_limit or backoff)
    last = facts.endings[-1] if facts.endings else None
    how = f" The last end: {last.reason or 'no reason given'}, exit code {last.exit_code}{_ran(last)}." if last else ""
    counted = [facts.restarts_line] if facts.restarts_line else []
    return Finding(
        code=Code.ENGINE_CRASH_LOOP,
        severity=Severity.CRITICAL,
        confidence=0.95 if sure else 0.7,
        title=f"the server is started again and again ({restarts} restarts)"
        if restarts
        else "the server is started again and again",
        because=f"The supervisor counts {restarts or 'several'} restarts.{how} The first failure is the cause.",
        evidence=quote(log, [*waiting, *counted, *(event.line for event in backoff), *facts.start_limit]),
        remedy=(
            Remedy(
                "stop the loop (scale to zero, or stop the unit) and keep the log of the FIRST failure", "it was not serving"
            ),
            Remedy("kubectl logs --previous (or journalctl -u) and give that to doctor", "the cause stands there"),
            Remedy(
                "start once by hand when no VLLM:: process is left and the card is empty", "leftovers refuse the next start"
            ),
        ),
        not_a_remedy=("faster restarts", "changing one memory flag per round at random"),
    )

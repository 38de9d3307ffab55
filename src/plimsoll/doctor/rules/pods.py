"""Judges what Kubernetes, docker or systemd tells: killed for memory or by a probe, evicted, looping, never started."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.doctor.rules.exit_codes import judge_exit
from plimsoll.doctor.rules.host_memory import NOT_A_REMEDY
from plimsoll.doctor.rules.log_text import POD, POD_EVENT, POD_ROW, Log, LogLine, TextVerdict, contains_any, quote
from plimsoll.doctor.rules.supervisors import (
    MOST_ENDINGS,
    MOST_EVENTS,
    PodEvent,
    PodFacts,
    PodProbe,
    Termination,
    integer,
    pair,
    quantity,
    read_docker,
    read_systemd,
    seconds_between,
)
from plimsoll.doctor.words import fields, words
from plimsoll.findings import Code, Finding, Remedy, Severity
from plimsoll.units import format_gib


class _EventRule(NamedTuple):
    """Events and states that all mean one thing."""

    pattern: str  # searched in "reason: message"
    code: Code
    confidence: float
    title: str
    remedy: tuple[Remedy, ...]
    severity: Severity = Severity.CRITICAL
    not_a_remedy: tuple[str, ...] = ("memory settings of vLLM: it did not run",)


def judge_events(log: Log, facts: PodFacts) -> list[Finding]:
    """One finding for each kind of trouble; what a line means once it means however often it is repeated."""
    said: list[tuple[str, LogLine]] = [(f"{event.reason}: {event.message}", event.line) for event in facts.events]
    said += facts.waiting
    said += [(f"{ending.reason}: ", ending.lines[0]) for ending in facts.endings if ending.reason and ending.lines]
    if facts.pod_lines:
        said.append((f"{facts.pod_reason}: {facts.pod_message}", facts.pod_lines[-1]))
    findings = []
    for rule in (_EventRule(**fields(row)) for row in words("events")):
        found = [(text, line) for text, line in said if re.search(rule.pattern, text)]
        if not found or (
            rule.code is Code.OTHER_BAD_CONFIG and rule.pattern.startswith("FailedScheduling") and bool(facts.endings)
        ):
            continue
        text = " ".join(found[-1][0].split())
        findings.append(
            Finding(
                code=rule.code, severity=rule.severity, confidence=rule.confidence, title=rule.title,
                because=f"Kubernetes says so {len(found)} time(s): {text if len(text) <= 240 else text[:240] + '...'}",
                evidence=quote(log, [line for _, line in found]), remedy=rule.remedy, not_a_remedy=rule.not_a_remedy,
            ),
        )  # fmt: skip
    scheduling = [one for one in findings if "FailedScheduling" in one.because]
    return [one for one in findings if one not in scheduling[1:]]


_SHM = "/dev" + "/shm"
_EVENT = r"(?:^|\s)(?:Normal|Warning)\s{2,60}(?P<reason>[A-Z][A-Za-z]{2,40})\s{1,60}(?P<message>\S.{0,2000})"
_REASONS = frozenset(
    "Killing Unhealthy BackOff Failed FailedScheduling Evicted OOMKilling SystemOOM Preempted Preempting NodeNotReady "
    "TaintManagerEviction NodeShutdown FailedMount FailedAttachVolume FailedCreatePodSandBox UnexpectedAdmissionError "
    "ExceededGracePeriod EvictionThresholdMet FailedKillPod InspectFailed ErrImageNeverPull".split()
)
_POD_REASONS = frozenset(
    "Evicted NodeLost Shutdown Terminated Preempting UnexpectedAdmissionError DeadlineExceeded NodeShutdown".split()
)
_POD_ROW = (
    r"^\s{0,8}(?P<name>[a-z0-9][\w.\-/]{2,120})\s{1,60}\d{1,3}/\d{1,3}\s{1,60}"
    r"(?P<status>[A-Z][\w:]{2,40})\s{1,60}(?P<restarts>\d{1,6})\b"
)


class _Block:
    """An open part of the text: everything deeper than its own indent belongs to it."""

    def __init__(self, kind: str, indent: int, line: LogLine) -> None:
        self.kind, self.indent, self.lines = kind, indent, [line]
        self.values: dict[str, str] = {}


class _PodReader:
    """Walks the lines once and keeps what they say."""

    def __init__(self) -> None:
        self.facts = PodFacts()
        self.block: _Block | None = None
        self.which, self.status_indent = "", -1
        self.container, self.in_containers = "", False
        self.ends: list[Termination] = []
        self.unnamed: list[tuple[int, int]] = []  # index into ends, indent of the status it stands in
        self.waiting: list[tuple[str, LogLine]] = []
        self.probes: list[PodProbe] = []

    def take(self, line: LogLine) -> None:
        if _SHM in line.text and ("from" in line.text or "mountPath" in line.text):
            self.facts = self.facts._replace(shm_mounted=True)
        found = pair(line.text)
        if found is None:
            return
        indent, key, value = found
        if self.block is not None and indent <= self.block.indent:
            self.close()
        if self.block is not None and key not in ("terminated", "waiting"):
            if len(self.block.values) < 32:
                self.block.values.setdefault(key, value)
                self.block.lines.append(line)
            return
        self.open(indent, key, value, line)

    def open(self, indent: int, key: str, value: str, line: LogLine) -> None:
        value = "" if value in ("{", "[") else value
        if key in ("laststate", "state"):
            self.which, self.status_indent = key, indent
            if value in ("Terminated", "Waiting"):
                self.block = _Block(value.lower(), indent, line)
        elif key in ("terminated", "waiting", "limits", "livenessprobe", "startupprobe") and not value:
            self.block = _Block(key, indent, line)
        elif key in ("liveness", "startup") and "delay=" in value:
            self.probe(key, dict(re.findall(r"#?(delay|period|failure)=(\d{1,6})", value)))
        elif key == "restartcount" and (count := integer(value)) is not None:
            if count >= (self.facts.restarts or 0):
                self.facts = self.facts._replace(restarts=count, restarts_line=line)
        elif key == "mounts":
            self.facts = self.facts._replace(shm_mounted=bool(self.facts.shm_mounted))
        elif key == "name":
            self.named(indent, value)
        elif key in ("containers", "initcontainers", "containerstatuses") and not value:
            self.in_containers, self.container = indent == 0, ""
        elif self.in_containers and indent == 2 and not value:
            self.container = key
        elif indent <= 2:
            self.top(key, value, line)

    def top(self, key: str, value: str, line: LogLine) -> None:
        if key == "reason" and value in _POD_REASONS:
            self.facts = self.facts._replace(pod_reason=value, pod_lines=(*self.facts.pod_lines, line))
        elif key == "message" and value and not self.facts.pod_message:
            self.facts = self.facts._replace(pod_message=value[:500], pod_lines=(*self.facts.pod_lines, line))
        elif key == "deletiontimestamp" or (key == "status" and value.startswith("Terminating")):
            self.facts = self.facts._replace(stop_asked=(*self.facts.stop_asked, line)[:20])

    def named(self, indent: int, value: str) -> None:
        """In YAML and JSON a container's name stands behind its states, at the same depth."""
        for index, depth in self.unnamed:
            if depth == indent:
                self.ends[index] = self.ends[index]._replace(name=value[:120])
        self.unnamed = [one for one in self.unnamed if one[1] != indent]

    def probe(self, kind: str, values: dict[str, str]) -> None:
        if len(self.probes) < 100:
            numbers = {name: int(text) for name, text in values.items()}
            self.probes.append(
                PodProbe(
                    kind, numbers.get("delay", 0), numbers.get("period", 10), numbers.get("failure", 3)
                )  # Kubernetes' defaults
            )

    def close(self) -> None:
        block, self.block = self.block, None
        if block is None:
            return
        values = block.values
        if block.kind == "terminated" and len(self.ends) < MOST_ENDINGS:
            code = integer(values.get("exitcode", ""))
            if code is None and not values.get("reason"):
                return
            ran = seconds_between(
                values.get("started") or values.get("startedat", ""), values.get("finished") or values.get("finishedat", "")
            )
            reason = values.get("reason", "")
            if not self.container:
                self.unnamed.append((len(self.ends), self.status_indent))
            self.ends.append(
                Termination("pod", self.container, reason, code, reason == "OOMKilled", ran, tuple(block.lines[:6]))
            )
        elif block.kind == "waiting" and values.get("reason") and len(self.waiting) < MOST_EVENTS:
            self.waiting.append((values["reason"][:60], block.lines[-1]))
        elif block.kind == "limits" and (size := quantity(values.get("memory", ""))) is not None:
            if self.facts.memory_limit_bytes is None:
                self.facts = self.facts._replace(memory_limit_bytes=size)
        elif block.kind in ("livenessprobe", "startupprobe"):
            names = {"initialdelayseconds": "delay", "periodseconds": "period", "failurethreshold": "failure"}
            numbers = {short: values[name] for name, short in names.items() if integer(values.get(name, "")) is not None}
            self.probe(block.kind.removesuffix("probe"), numbers)


def read_pods(log: Log) -> PodFacts:
    """Reads the Kubernetes text among these lines; other text gives empty facts."""
    if not contains_any(log.lines, (*POD, *POD_EVENT, *POD_ROW)):
        return PodFacts()
    reader = _PodReader()
    lines = [line for line in log.lines if not line.process]
    if any(marker in line.text for line in lines for marker in POD):
        for line in lines:
            if ":" in line.text or _SHM in line.text:
                reader.take(line)
        reader.close()
    events = [event for line in lines if (event := _event(line))][:MOST_EVENTS]
    for line in lines:
        if any(state in line.text for state in POD_ROW):
            _pod_row(reader, line)
    stops = [e.line for e in events if e.reason == "Killing" and "Stopping container" in e.message]
    return reader.facts._replace(
        endings=tuple(reader.ends),
        waiting=tuple(reader.waiting),
        events=tuple(events),
        probes=tuple(reader.probes),
        stop_asked=(*reader.facts.stop_asked, *stops)[:20],
    )


def _event(line: LogLine) -> PodEvent | None:
    text = line.text
    if not any(word in text for word in POD_EVENT):
        return None
    found = re.search(_EVENT, text)
    if found is None or found["reason"] not in _REASONS:
        return None
    count = re.search(r"\(x(\d{1,7}) over ", text)
    return PodEvent(found["reason"], found["message"].strip(), int(count[1]) if count else 1, line)


def _pod_row(reader: _PodReader, line: LogLine) -> None:
    found = re.match(_POD_ROW, line.text)
    if found is None:
        return
    status, restarts = found["status"], int(found["restarts"])
    if restarts >= (reader.facts.restarts or 0):
        reader.facts = reader.facts._replace(restarts=restarts, restarts_line=line)
    if status == "Evicted":
        reader.facts = reader.facts._replace(pod_reason=status, pod_lines=(*reader.facts.pod_lines, line)[:6])
    elif status in ("OOMKilled", "Error", "Completed"):
        code = 0 if status == "Completed" else None
        if len(reader.ends) < MOST_ENDINGS:
            reader.ends.append(Termination("pod", found["name"], status, code, status == "OOMKilled", None, (line,)))
    elif len(reader.waiting) < MOST_EVENTS:
        reader.waiting.append((status, line))


def judge_pods(log: Log) -> TextVerdict[PodFacts]:
    """Say what the supervisor's text shows; text without any gives nothing."""
    facts = _together(read_pods(log), read_docker(log), read_systemd(log))
    found = [_out_of_memory(log, facts), _probe(log, facts), _timeout(log, facts), *judge_events(log, facts)]
    causes = [one for one in found if one]
    if not causes:
        causes += [one for one in (_ending(log, facts),) if one]
    causes += [one for one in (_loop(log, facts),) if one]
    notes = list(facts.notes)
    if facts.restarts and _has_served(facts):
        notes.append(f"{facts.restarts} restarts, hours of service between them: no crash loop")
    if facts.shm_mounted is False:
        notes.append("no volume on /dev/shm: the default of 64 MiB is too small for several GPUs (Bus error, exit code 135)")
    causes.sort(key=lambda one: (one.code is Code.ENGINE_CRASH_LOOP, one.severity is not Severity.CRITICAL, -one.confidence))
    return TextVerdict(causes, facts._replace(notes=tuple(notes)))


def _together(*parts: PodFacts) -> PodFacts:
    first = parts[0]
    for other in parts[1:]:
        first = first._replace(
            endings=first.endings + other.endings, restarts=other.restarts if first.restarts is None else first.restarts,
            restarts_line=first.restarts_line or other.restarts_line,
            restarts_apart_s=first.restarts_apart_s or other.restarts_apart_s,
            memory_limit_bytes=first.memory_limit_bytes or other.memory_limit_bytes,
            shm_bytes=first.shm_bytes or other.shm_bytes, stop_asked=first.stop_asked + other.stop_asked,
            start_limit=first.start_limit + other.start_limit, timeouts=first.timeouts + other.timeouts,
            notes=first.notes + other.notes,
        )  # fmt: skip
    return first


def _ran(ending: Termination) -> str:
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
        code=Code.HOST_OUT_OF_MEMORY, severity=Severity.CRITICAL, confidence=0.95,
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
    )  # fmt: skip


def _probe(log: Log, facts: PodFacts) -> Finding | None:
    """The kubelet restarted the container because a probe failed; what the probe saw decides whose fault it was."""
    kills = [e for e in facts.events if e.reason == "Killing" and re.search("failed (?:liveness|startup) probe", e.message)]
    failed = [e for e in facts.events if e.reason == "Unhealthy" and re.search("(?:Liveness|Startup) probe", e.message)]
    if not kills:
        return None
    kind = "startup" if "startup" in kills[-1].message else "liveness"
    seen = " ".join(event.message for event in failed)
    if "statuscode: 503" in seen or "statuscode: 500" in seen:
        return Finding(
            code=Code.ENGINE_DEAD, severity=Severity.CRITICAL, confidence=0.6,
            title="the server answered its probe with an error, and was restarted for it",
            because="The probe got HTTP 503 or 500: vLLM answers like this when its engine has died. The probe did its work.",
            evidence=quote(log, [event.line for event in (*failed, *kills)]),
            remedy=(
                Remedy("kubectl logs --previous, upward to the first error", "the cause of the engine's death stands there"),
            ),
            not_a_remedy=("a more patient probe: a dead engine does not come back",),
        )  # fmt: skip
    if (status := re.search(r"statuscode: (\d{3})", seen)) is not None:
        return _wrong_question(log, status[1], [event.line for event in (*failed, *kills)])
    refused = "connection refused" in seen
    times = sum(event.times for event in failed)
    patience = next((probe.patience_s for probe in facts.probes if probe.kind == kind), None)
    allowed = f" The {kind} probe gives up after {patience} s (delay + period x failures)." if patience is not None else ""
    ran = next((e.seconds for e in reversed(facts.endings) if e.kind == "pod" and e.seconds is not None), None)
    lived = f" The container had run {ran:,.0f} s." if ran is not None else ""
    why = "the port was not open yet: it was still loading" if refused else "it did not answer in time"
    wanted = max(600, round(ran * 2)) if ran is not None else 1200
    return Finding(
        code=Code.OTHER_PROBE, severity=Severity.CRITICAL, confidence=0.9 if refused else 0.7,
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
    )  # fmt: skip


_BY_STATUS = {
    "404": ("it has no such path", "probe /health (vLLM's; /v1/models needs the key where one is set)"),
    "401": ("it wants a key", "probe /health, which needs no key"),
    "403": ("something in front of it forbids it", "probe the pod itself"),
    "429": ("it was told to wait", "probe /health: it is answered however many requests wait"),
}  # fmt: skip


def _wrong_question(log: Log, status: str, lines: list[LogLine]) -> Finding:
    """The server answered, and the answer was no: not that it was slow."""
    why, do = _BY_STATUS.get(status, ("it answered with an error", "see what the path of the probe answers: curl -i"))
    return Finding(
        code=Code.OTHER_PROBE, severity=Severity.CRITICAL, confidence=0.9,
        title=f"Kubernetes killed the server because its probe got HTTP {status}",
        because=f"The server answered the probe with HTTP {status}: {why}. It was up, so more time changes nothing.",
        evidence=quote(log, lines), remedy=(Remedy(do, "the probe then asks what the server can answer"),),
        not_a_remedy=("a longer delay or more failures: it answered in time", "memory settings: the kubelet ended it"),
    )  # fmt: skip


def _timeout(log: Log, facts: PodFacts) -> Finding | None:
    if not facts.timeouts:
        return None
    return Finding(
        code=Code.OTHER_TIMEOUT, severity=Severity.CRITICAL, confidence=0.85,
        title="systemd ended the server because it took too long",
        because=f"A time limit was over ({len(facts.timeouts)} line(s)); a start takes minutes; the default is 90 s.",
        evidence=quote(log, facts.timeouts),
        remedy=(Remedy("set TimeoutStartSec=1800 in the unit (and Type=simple, or exec)", "longer than the slowest start"),),
        not_a_remedy=("memory settings",),
    )  # fmt: skip


def _ending(log: Log, facts: PodFacts) -> Finding | None:
    """The last end that nothing else explains, judged by its exit code, which never shows a shortage by itself."""
    ends = [ending for ending in facts.endings if ending.exit_code is not None]
    if not ends:
        return None
    ending = ends[-1]
    assert ending.exit_code is not None
    if facts.stop_asked and ending.exit_code in (0, 137, 143, -9, -15):
        hard = ending.exit_code in (137, -9)
        slow = " It did not end within its grace period, so it was killed (SIGKILL)." if hard else ""
        return Finding(
            code=Code.OTHER_STOPPED_BY_OPERATOR, severity=Severity.INFO, confidence=0.8, title="the server was asked to stop",
            because=f"The supervisor stopped it, exit code {ending.exit_code}{_ran(ending)}.{slow} Nothing here failed.",
            evidence=quote(log, [*facts.stop_asked, *ending.lines]),
            remedy=(
                Remedy("let running requests finish", "the default aborts them at once", "--shutdown-timeout", "120"),
                Remedy("give the pod or unit a longer grace period than that", "else it is killed in the middle"),
            ),
            not_a_remedy=("memory settings",),
        )  # fmt: skip
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


SERVED_S = 3600.0  # who ran so long before it ended was serving


def _has_served(facts: PodFacts) -> bool:
    """True if the last life took an hour or more, or the restarts that were counted lie so far apart."""
    last = facts.endings[-1] if facts.endings else None
    apart = facts.restarts_apart_s
    return (last is not None and (last.seconds or 0) >= SERVED_S) or (apart is not None and apart >= SERVED_S)


def _loop(log: Log, facts: PodFacts) -> Finding | None:
    """Started and failed again and again: certain from the counts, silent about the cause."""
    backoff = [event for event in facts.events if event.reason == "BackOff" and "restarting failed" in event.message]
    waiting = [line for reason, line in facts.waiting if reason == "CrashLoopBackOff"]
    restarts = facts.restarts or 0
    if _has_served(facts):
        return None  # restarts that are hours apart are no loop, however many
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

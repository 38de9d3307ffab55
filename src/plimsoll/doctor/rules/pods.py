"""Judges what Kubernetes, docker or systemd tells: killed for memory or by a probe, evicted, looping, never started."""

from __future__ import annotations

import re
from typing import Any

from plimsoll.doctor.rules.exit_codes import judge_exit
from plimsoll.doctor.rules.log_text import WRITTEN_BY, Log, LogLine, TextVerdict, quote
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
from plimsoll.doctor.words import finding, words
from plimsoll.findings import Code, Finding, Severity
from plimsoll.units import format_gib

_SHM = "/dev" + "/shm"
_EVENT = r"(?:^|\s)(?:Normal|Warning)\s{2,60}(?P<reason>[A-Z][A-Za-z]{2,40})\s{1,60}(?P<message>\S.{0,2000})"
_OBJECT = r"[a-z]{2,40}/\S"  # the third column of `kubectl get events`
_KNOWN = words("names")["supervisors"]
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
        if self.block is None or key in ("terminated", "waiting"):
            self.open(indent, key, value, line)
        elif len(self.block.values) < 32:
            self.block.values.setdefault(key, value)
            self.block.lines.append(line)

    def open(self, indent: int, key: str, value: str, line: LogLine) -> None:
        value, facts = "" if value in ("{", "[") else value, self.facts
        if key in ("laststate", "state"):
            self.which, self.status_indent = key, indent
            if value in ("Terminated", "Waiting"):
                self.block = _Block(value.lower(), indent, line)
        elif key in ("terminated", "waiting", "limits", "livenessprobe", "startupprobe") and not value:
            self.block = _Block(key, indent, line)
        elif key in ("liveness", "startup") and "delay=" in value:
            self.probe(key, dict(re.findall(r"#?(delay|period|failure)=(\d{1,6})", value)))
        elif key == "restartcount" and (count := integer(value)) is not None:
            self.count_restarts(count, line)
        elif key == "mounts":
            self.facts = facts._replace(shm_mounted=bool(facts.shm_mounted))
        elif key == "name":  # in YAML and JSON a container's name stands behind its states, at the same depth
            for index, depth in self.unnamed:
                if depth == indent:
                    self.ends[index] = self.ends[index]._replace(name=value[:120])
            self.unnamed = [one for one in self.unnamed if one[1] != indent]
        elif key in ("containers", "initcontainers", "containerstatuses") and not value:
            self.in_containers, self.container = indent == 0, ""
        elif self.in_containers and indent == 2 and not value:
            self.container = key
        elif indent <= 2 and key == "reason" and value in _KNOWN["pods"]:
            self.facts = facts._replace(pod_reason=value, pod_lines=(*facts.pod_lines, line))
        elif indent <= 2 and key == "message" and value and not facts.pod_message:
            self.facts = facts._replace(pod_message=value[:500], pod_lines=(*facts.pod_lines, line))
        elif indent <= 2 and (key == "deletiontimestamp" or (key == "status" and value.startswith("Terminating"))):
            self.facts = facts._replace(stop_asked=(*facts.stop_asked, line)[:20])

    def count_restarts(self, count: int, line: LogLine) -> None:
        if count >= (self.facts.restarts or 0):
            self.facts = self.facts._replace(restarts=count, restarts_line=line)

    def probe(self, kind: str, values: dict[str, str]) -> None:
        if len(self.probes) < 100:
            usual = {"delay": 0, "period": 10, "failure": 3}  # Kubernetes' defaults
            self.probes.append(PodProbe(kind, *(int(values.get(name, number)) for name, number in usual.items())))

    def close(self) -> None:
        block, self.block = self.block, None
        values = block.values if block is not None else {}
        if block is None:
            return
        if block.kind == "terminated" and len(self.ends) < MOST_ENDINGS:
            code, reason = integer(values.get("exitcode", "")), values.get("reason", "")
            if code is None and not reason:
                return
            begin, end = (values.get(name) or values.get(f"{name}at", "") for name in ("started", "finished"))
            if not self.container:
                self.unnamed.append((len(self.ends), self.status_indent))
            ran, lines = seconds_between(begin, end), tuple(block.lines[:6])
            self.ends.append(Termination("pod", self.container, reason, code, reason == "OOMKilled", ran, lines))
        elif block.kind == "waiting" and values.get("reason") and len(self.waiting) < MOST_EVENTS:
            self.waiting.append((values["reason"][:60], block.lines[-1]))
        elif block.kind == "limits" and (size := quantity(values.get("memory", ""))) is not None:
            if self.facts.memory_limit_bytes is None:
                self.facts = self.facts._replace(memory_limit_bytes=size)
        elif block.kind in ("livenessprobe", "startupprobe"):
            names = {"initialdelayseconds": "delay", "periodseconds": "period", "failurethreshold": "failure"}
            numbers = {short: values[name] for name, short in names.items() if integer(values.get(name, "")) is not None}
            self.probe(block.kind.removesuffix("probe"), numbers)

    def row(self, line: LogLine) -> None:
        """A line of `kubectl get pods`."""
        found = re.match(_POD_ROW, line.text)
        if found is None:
            return
        status = found["status"]
        self.count_restarts(int(found["restarts"]), line)
        if status == "Evicted":
            self.facts = self.facts._replace(pod_reason=status, pod_lines=(*self.facts.pod_lines, line)[:6])
        elif status in ("OOMKilled", "Error", "Completed"):
            code = 0 if status == "Completed" else None
            if len(self.ends) < MOST_ENDINGS:
                self.ends.append(Termination("pod", found["name"], status, code, status == "OOMKilled", None, (line,)))
        elif len(self.waiting) < MOST_EVENTS:
            self.waiting.append((status, line))


def read_pods(log: Log) -> PodFacts:
    """Reads the Kubernetes text among these lines; other text gives empty facts."""
    # Where a server itself speaks, an object with another name is another's.
    is_beside = any(line.process or line.place for line in log.lines)
    known = {line.server for line in log.lines if line.server}

    def is_ours(text: str) -> bool:
        return not is_beside or re.search("(?i)vllm|python", text) is not None or any(name in text for name in known)

    reader = _PodReader()
    events: list[PodEvent] = []
    lines = [line for line in log.lines if not line.process]
    if any(marker in line.text for line in lines for marker in WRITTEN_BY["pod"]):
        for line in lines:
            if ":" in line.text or _SHM in line.text:
                reader.take(line)
        reader.close()
    for line in lines:
        found = re.search(_EVENT, line.text) if any(word in line.text for word in WRITTEN_BY["pod_event"]) else None
        is_told = found is not None and (re.match(_OBJECT, found["message"]) is None or is_ours(found["message"]))
        if found is not None and is_told and found["reason"] in _KNOWN["events"] and len(events) < MOST_EVENTS:
            count = re.search(r"\(x(\d{1,7}) over ", line.text)
            events.append(PodEvent(found["reason"], found["message"].strip(), int(count[1]) if count else 1, line))
        if any(state in line.text for state in WRITTEN_BY["pod_row"]) and is_ours(line.text):
            reader.row(line)
    stops = [e.line for e in events if e.reason == "Killing" and "Stopping container" in e.message]
    return reader.facts._replace(
        endings=tuple(reader.ends), waiting=tuple(reader.waiting), events=tuple(events), probes=tuple(reader.probes),
        stop_asked=(*reader.facts.stop_asked, *stops)[:20],
    )  # fmt: skip


def judge_pods(log: Log) -> TextVerdict[PodFacts]:
    """Say what the supervisor's text shows; text without any gives nothing."""
    facts = read_pods(log)
    for other in (read_docker(log), read_systemd(log)):  # lists are joined, of the rest the first that is known counts
        joined: dict[str, Any] = {}
        for name, default in PodFacts._field_defaults.items():
            mine, theirs = getattr(facts, name), getattr(other, name)
            joined[name] = mine + theirs if default == () else theirs if mine in (None, "") else mine
        facts = facts._replace(**joined)
    # Restarts that are hours apart are no loop, however many.
    lived = [facts.endings[-1].seconds if facts.endings else None, facts.restarts_apart_s]
    has_served = any(seconds is not None and seconds >= SERVED_S for seconds in lived)
    found = [_out_of_memory(log, facts), _probe(log, facts)]
    if facts.timeouts:
        found.append(finding("unit-timeout", quote(log, facts.timeouts), count=len(facts.timeouts)))
    causes = [one for one in (*found, *_judge_events(log, facts)) if one]
    if not causes and (end := _ending(log, facts)) is not None:
        causes.append(end)
    if not has_served and (loop := _loop(log, facts)) is not None:
        causes.append(loop)
    notes = list(facts.notes)
    if facts.restarts and has_served:
        notes.append(f"{facts.restarts} restarts, hours of service between them: no crash loop")
    if facts.shm_mounted is False:
        notes.append("no volume on /dev/shm: the default of 64 MiB is too small for several GPUs (Bus error, exit code 135)")
    causes.sort(key=lambda one: (one.code is Code.ENGINE_CRASH_LOOP, one.severity is not Severity.CRITICAL, -one.confidence))
    return TextVerdict(causes, facts._replace(notes=tuple(notes)))


def _judge_events(log: Log, facts: PodFacts) -> list[Finding]:
    """One finding for each kind of trouble; what a line means once it means however often it is repeated."""
    said: list[tuple[str, LogLine]] = [(f"{event.reason}: {event.message}", event.line) for event in facts.events]
    said += facts.waiting
    said += [(f"{ending.reason}: ", ending.lines[0]) for ending in facts.endings if ending.reason and ending.lines]
    if facts.pod_lines:
        said.append((f"{facts.pod_reason}: {facts.pod_message}", facts.pod_lines[-1]))
    findings, is_unscheduled = [], False
    for row in words("events"):
        found = [(text, line) for text, line in said if re.search(row["pattern"], text)]
        text = " ".join(found[-1][0].split()) if found else ""
        is_late = row["code"] == Code.OTHER_BAD_CONFIG and row["pattern"].startswith("FailedScheduling") and bool(facts.endings)
        if not found or is_late or (is_unscheduled and "FailedScheduling" in text):
            continue
        is_unscheduled = is_unscheduled or "FailedScheduling" in text
        because = f"Kubernetes says so {len(found)} time(s): {text if len(text) <= 240 else text[:240] + '...'}"
        shown = quote(log, [line for _, line in found])
        findings.append(finding(row, shown, because, not_a_remedy=("memory settings of vLLM: it did not run",)))
    return findings


def _out_of_memory(log: Log, facts: PodFacts) -> Finding | None:
    """The supervisor itself says that memory was the reason."""
    killed = [ending for ending in facts.endings if ending.out_of_memory]
    if not killed:
        return None
    ending = killed[-1]
    system = [event.line for event in facts.events if event.reason in ("OOMKilling", "SystemOOM")]
    limit = facts.memory_limit_bytes if ending.kind != "systemd" else None
    code = "" if ending.exit_code is None else f" with exit code {ending.exit_code}"
    return finding(
        "pod-out-of-memory", quote(log, [*ending.lines, *system]), reason=ending.reason or "OOMKilled",
        whom=f"{'unit' if ending.kind == 'systemd' else 'container'} {ending.name}".strip(), ended=code + _ran(ending),
        size=f" Its memory limit was {format_gib(limit)}." if limit else " Its memory limit is not in this text.",
        room=f" above {format_gib(limit)}" if limit else "",
    )  # fmt: skip


def _ending(log: Log, facts: PodFacts) -> Finding | None:
    """The last end that nothing else explains, judged by its exit code, which never shows a shortage by itself."""
    ending = next((ending for ending in reversed(facts.endings) if ending.exit_code is not None), None)
    if ending is None or ending.exit_code is None:
        return None
    if facts.stop_asked and ending.exit_code in (0, 137, 143, -9, -15):
        hard = ending.exit_code in (137, -9)
        slow = " It did not end within its grace period, so it was killed (SIGKILL)." if hard else ""
        shown = quote(log, [*facts.stop_asked, *ending.lines])
        return finding("stopped-by-supervisor", shown, code=ending.exit_code, ran=_ran(ending), slow=slow)
    asked = bool(facts.stop_asked) if ending.kind == "pod" or facts.stop_asked else None
    found = judge_exit(ending.exit_code, stop_seen=asked).finding
    if found is None:
        return None
    why = f" The supervisor gives the reason {ending.reason!r}{_ran(ending)}." if ending.reason else ""
    return found._replace(because=found.because + why, evidence=quote(log, ending.lines) or found.evidence)


def _loop(log: Log, facts: PodFacts) -> Finding | None:
    """Started and failed again and again: certain from the counts, silent about the cause."""
    backoff = [e.line for e in facts.events if e.reason == "BackOff" and "restarting failed" in e.message]
    waiting = [line for reason, line in facts.waiting if reason == "CrashLoopBackOff"]
    restarts = facts.restarts or 0
    if not (waiting or facts.start_limit or (backoff and restarts != 1) or restarts >= 3):
        return None
    last = facts.endings[-1] if facts.endings else None
    counted = [facts.restarts_line] if facts.restarts_line else []
    return finding(
        "restart-loop", quote(log, [*waiting, *counted, *backoff, *facts.start_limit]), restarts=restarts or "several",
        confidence=0.95 if waiting or facts.start_limit or backoff else None,
        counted=f" ({restarts} restarts)" if restarts else "",
        how=f" The last end: {last.reason or 'no reason given'}, exit code {last.exit_code}{_ran(last)}." if last else "",
    )  # fmt: skip


def _ran(ending: Termination) -> str:
    return "" if ending.seconds is None else f" after {ending.seconds:,.0f} s"


def _probe(log: Log, facts: PodFacts) -> Finding | None:
    """The kubelet restarted the container because a probe failed; what the probe saw decides whose fault it was."""
    kills = [e for e in facts.events if e.reason == "Killing" and re.search("failed (?:liveness|startup) probe", e.message)]
    failed = [e for e in facts.events if e.reason == "Unhealthy" and re.search("(?:Liveness|Startup) probe", e.message)]
    if not kills:
        return None
    kind = "startup" if "startup" in kills[-1].message else "liveness"
    seen = " ".join(event.message for event in failed)
    shown = quote(log, [event.line for event in (*failed, *kills)])
    if "statuscode: 503" in seen or "statuscode: 500" in seen:
        return finding("probe-found-it-dead", shown)
    if (status := re.search(r"statuscode: (\d{3})", seen)) is not None:  # it answered, and the answer was no
        unknown = ("it answered with an error", "see what the path of the probe answers: curl -i")
        why, do = words("names")["probes"].get(int(status[1]), unknown)
        return finding("probe-refused", shown, status=status[1], why=why, do=do)
    refused = "connection refused" in seen
    patience = next((probe.patience_s for probe in facts.probes if probe.kind == kind), None)
    ran = next((e.seconds for e in reversed(facts.endings) if e.kind == "pod" and e.seconds is not None), None)
    return finding(
        "probe-failed", quote(log, [event.line for event in (*kills, *failed)]), confidence=0.9 if refused else None, kind=kind,
        times=sum(event.times for event in failed) or len(kills), wanted=max(600, round(ran * 2)) if ran is not None else 1200,
        why="the port was not open yet: it was still loading" if refused else "it did not answer in time",
        allowed=f" The {kind} probe gives up after {patience} s (delay + period x failures)." if patience is not None else "",
        lived=f" The container had run {ran:,.0f} s." if ran is not None else "",
    )  # fmt: skip


SERVED_S = 3600.0  # who ran so long before it ended was serving

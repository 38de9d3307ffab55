"""Reads Kubernetes text: `kubectl describe pod`, `get pod -o yaml` or `-o json`, `get pods` and events."""

from __future__ import annotations

import re

from plimsoll.doctor.marks import POD, POD_EVENT, POD_ROW, holds
from plimsoll.doctor.supervised import (
    MOST_ENDINGS,
    MOST_EVENTS,
    Ending,
    PodEvent,
    PodFacts,
    Probe,
    integer,
    pair,
    quantity,
    seconds_between,
)
from plimsoll.domain.log import Line, Log

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

    def __init__(self, kind: str, indent: int, line: Line) -> None:
        self.kind, self.indent, self.lines = kind, indent, [line]
        self.values: dict[str, str] = {}


class _Reader:
    """Walks the lines once and keeps what they say."""

    def __init__(self) -> None:
        self.facts = PodFacts()
        self.block: _Block | None = None
        self.which, self.status_indent = "", -1
        self.container, self.in_containers = "", False
        self.ends: list[Ending] = []
        self.unnamed: list[tuple[int, int]] = []  # index into ends, indent of the status it stands in
        self.waiting: list[tuple[str, Line]] = []
        self.probes: list[Probe] = []

    def take(self, line: Line) -> None:
        """One line of describe, YAML or JSON."""
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

    def open(self, indent: int, key: str, value: str, line: Line) -> None:
        """A key outside any open part."""
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

    def top(self, key: str, value: str, line: Line) -> None:
        """The pod's own reason and message."""
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
                Probe(
                    kind, numbers.get("delay", 0), numbers.get("period", 10), numbers.get("failure", 3)
                )  # Kubernetes' defaults
            )

    def close(self) -> None:
        """The open part is over: keep what it said."""
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
            self.ends.append(Ending("pod", self.container, reason, code, reason == "OOMKilled", ran, tuple(block.lines[:6])))
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
    """What the Kubernetes text among these lines says; text of another kind gives empty facts."""
    if not holds(log.lines, (*POD, *POD_EVENT, *POD_ROW)):
        return PodFacts()
    reader = _Reader()
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


def _event(line: Line) -> PodEvent | None:
    text = line.text
    if not any(word in text for word in POD_EVENT):
        return None
    found = re.search(_EVENT, text)
    if found is None or found["reason"] not in _REASONS:
        return None
    count = re.search(r"\(x(\d{1,7}) over ", text)
    return PodEvent(found["reason"], found["message"].strip(), int(count[1]) if count else 1, line)


def _pod_row(reader: _Reader, line: Line) -> None:
    """One row of `kubectl get pods`."""
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
            reader.ends.append(Ending("pod", found["name"], status, code, status == "OOMKilled", None, (line,)))
    elif len(reader.waiting) < MOST_EVENTS:
        reader.waiting.append((status, line))

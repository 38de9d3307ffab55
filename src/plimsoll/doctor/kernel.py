"""Judges kernel lines (dmesg, journalctl -k): the OOM killer, NVIDIA's Xid errors, and what else ends a server from below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.host_memory import judge_kills
from plimsoll.doctor.kernel_rules import NOT_MEMORY, judge_lines
from plimsoll.doctor.marks import KERNEL, holds
from plimsoll.doctor.oom_killer import Kill, read_kills
from plimsoll.doctor.quoting import kernel_text, quote, whose
from plimsoll.doctor.xids import Blame, explain
from plimsoll.domain.finding import Code, Finding, Remedy, Severity
from plimsoll.domain.log import Line, Log

MOST_EVENTS = 2000
_XID = (
    r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]{4,20})[^)]{0,60}\): (?P<number>\d{1,4})"
    r"(?:, pid='?(?P<pid>[^,']{1,20})'?)?(?:, name=(?P<name>[^,]{1,64}))?,?\s?(?P<rest>.{0,300})"
)


class XidEvent(NamedTuple):
    """One Xid line."""

    number: int
    device: str
    pid: int | None
    name: str | None
    text: str
    line: Line


class KernelFacts(NamedTuple):
    """What the kernel said, whether or not it is the server's trouble."""

    kills: tuple[Kill, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    notes: tuple[str, ...] = ()  # seen, and not the cause by itself


class KernelVerdict(NamedTuple):
    """The findings, the gravest first, and the facts."""

    findings: list[Finding]
    facts: KernelFacts


def judge_kernel(log: Log) -> KernelVerdict:
    """Say what the kernel lines in this text show; text without any gives nothing."""
    kills = read_kills(log)
    xids: list[XidEvent] = []
    rest: list[tuple[str, Line]] = []
    for line in log.lines if holds(log.lines, KERNEL) else ():
        if line.process or not any(word in line.text for word in KERNEL):
            continue
        text = kernel_text(line.text)
        xid = _xid(text, line) if "Xid (" in text else None
        if xid is not None and len(xids) < MOST_EVENTS:
            xids.append(xid)
        elif xid is None and len(rest) < MOST_EVENTS:
            rest.append((text, line))
    if any(event.number == 79 for event in xids):
        rest = [(text, line) for text, line in rest if "fallen off the bus" not in text]  # the Xid says it already
    findings: list[Finding] = []
    notes: list[str] = []
    for found, said in (judge_kills(log, kills), _judge_xids(log, xids), judge_lines(log, rest)):
        findings += found
        notes += said
    findings.sort(key=lambda one: (one.severity is not Severity.CRITICAL, -one.confidence))
    return KernelVerdict(findings, KernelFacts(tuple(kills), tuple(xids), tuple(dict.fromkeys(notes))))


def _xid(text: str, line: Line) -> XidEvent | None:
    found = re.search(_XID, text)
    if found is None:
        return None
    pid = found["pid"] or ""
    name = (found["name"] or "").strip("<>' ")
    return XidEvent(
        number=int(found["number"]),
        device=found["device"],
        pid=int(pid) if pid.isascii() and pid.isdecimal() else None,
        name=None if name in ("", "unknown") else name,
        text=found["rest"].strip(),
        line=line,
    )


def _judge_xids(log: Log, xids: Sequence[XidEvent]) -> tuple[list[Finding], list[str]]:
    """Per card: a fault rules; a program's error counts only where no fault stands beside it; echoes are notes."""
    findings: list[Finding] = []
    notes: list[str] = []
    for device in dict.fromkeys(event.device for event in xids):
        here = [event for event in xids if event.device == device]
        by = {blame: [e for e in here if explain(e.number).blame is blame] for blame in Blame}
        programs = [e for e in by[Blame.PROGRAM] if e.name is None or whose(e.name) in ("vllm", "python")]
        if by[Blame.FAULT]:
            findings.append(_fault(log, device, by[Blame.FAULT], here))
        elif programs:
            findings.append(_program(log, device, programs))
        elif by[Blame.REPAIRED]:
            findings.append(_repaired(log, device, by[Blame.REPAIRED]))
        strangers = [e for e in by[Blame.PROGRAM] if e not in programs]
        notes += [f"Xid {e.number} on {device} belongs to {e.name}, not to vLLM" for e in strangers]
        for event in (*by[Blame.ECHO], *by[Blame.UNKNOWN]):
            notes.append(f"Xid {event.number} on {device}: {explain(event.number).meaning}; {event.text[:120]}".rstrip("; "))
    return findings, notes


def _numbers(events: Sequence[XidEvent]) -> list[int]:
    return list(dict.fromkeys(event.number for event in events))


def _fault(log: Log, device: str, faults: Sequence[XidEvent], here: Sequence[XidEvent]) -> Finding:
    """The card, its link or its firmware failed; the driver's own advice (Xid 154) comes first."""
    first = explain(faults[0].number)
    echoes = len(here) - len(faults)
    after = f" {echoes} other Xid line(s) on this card are most likely its consequence." if echoes else ""
    asked = [m[1] for e in here if e.number == 154 and (m := re.search(r" to 0x\w{1,8} \(([^)]{1,40})\)", e.text))]
    remedy = [Remedy(explain(n).cure, f"Xid {n}: {explain(n).meaning}") for n in _numbers(faults)[:4]]
    if asked and asked[-1] != "None":
        remedy.insert(0, Remedy(f"do what the driver asks for on {device}: {asked[-1]}", "Xid 154 names what this GPU needs"))
    return Finding(
        code=Code.OTHER_HARDWARE,
        severity=Severity.CRITICAL,
        confidence=0.6 if first.number in (32, 38) else 0.95,
        title=f"GPU {device}: {first.meaning}",
        because=(
            f"The driver reported Xid {', '.join(map(str, _numbers(faults)))} on GPU {device} ({len(faults)} line(s)): "
            f"{first.meaning}.{after}"
        ),
        evidence=quote(log, [event.line for event in (*faults, *here)]),
        remedy=(*remedy, Remedy("serve from another card or node meanwhile", "a fault returns until it is cured")),
        not_a_remedy=(NOT_MEMORY, "starting vLLM on the same card again without a reset: a scheduler does that all night"),
    )


def _repaired(log: Log, device: str, events: Sequence[XidEvent]) -> Finding:
    first = explain(events[0].number)
    return Finding(
        code=Code.OTHER_HARDWARE,
        severity=Severity.INFO,
        confidence=0.4,
        title=f"GPU {device} corrected a fault: {first.meaning}",
        because=f"Xid {first.number} on GPU {device} ({len(events)} line(s)): {first.meaning}. Alone it ends no server.",
        evidence=quote(log, [event.line for event in events]),
        remedy=(Remedy(first.cure, "such events grow in number before a card fails"),),
        not_a_remedy=(NOT_MEMORY,),
    )


def _program(log: Log, device: str, events: Sequence[XidEvent]) -> Finding:
    """A kernel of the server's did wrong; certain of the access, not of whose bug it is."""
    first = explain(events[0].number)
    who = next((f" by {event.name} (pid {event.pid})" for event in events if event.name), "")
    named = any(event.name and whose(event.name) == "vllm" for event in events)
    confidence = 0.5 if _numbers(events) == [43] else 0.9 if named else 0.75
    return Finding(
        code=Code.OTHER_ILLEGAL_ACCESS,
        severity=Severity.CRITICAL,
        confidence=confidence,
        title=f"a GPU program failed on {device}: {first.meaning}",
        because=(
            f"The driver reported Xid {', '.join(map(str, _numbers(events)))} on GPU {device}{who}: {first.meaning}. "
            "No fault of the card (Xid 48, 79, 94, 95 and others) stands beside it."
        ),
        evidence=quote(log, [event.line for event in events]),
        remedy=(
            Remedy("start the server again", "the process's GPU state is lost; the card is healthy"),
            Remedy("upgrade vLLM; these are bugs of one kernel", "most are repaired in a later release"),
            Remedy("change the suspected part, one at a time, on a replica", "to find the kernel", "--attention-backend"),
            Remedy("set CUDA_LAUNCH_BLOCKING=1 on a test replica", "it makes the traceback name the kernel; much slower"),
            Remedy("if only this card does it, have the card checked", "a failing card can look the same"),
        ),
        not_a_remedy=(NOT_MEMORY, "PYTORCH_CUDA_ALLOC_CONF"),
    )

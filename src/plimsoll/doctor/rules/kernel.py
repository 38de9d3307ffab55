"""Judges kernel lines (dmesg, journalctl -k): the OOM killer, NVIDIA's Xid errors, and what else ends a server from below."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from plimsoll.doctor.rules.host_memory import judge_kills, read_kills
from plimsoll.doctor.rules.log_text import KERNEL, Log, LogLine, TextVerdict, contains_any, kernel_message, process_owner, quote
from plimsoll.doctor.words import fields, words
from plimsoll.findings import Code, Finding, Remedy, Severity

NOT_MEMORY = "memory settings (utilisation, --max-model-len, --max-num-seqs): nothing ran out"
Texts = Sequence[tuple[str, LogLine]]  # the message without its stamps, and the line it came from


class KernelRule(NamedTuple):
    """Lines that all mean one thing."""

    pattern: str
    code: Code
    confidence: float
    title: str
    do: str
    why: str
    unless: str = r"(?!)"  # a line that also matches this does not count
    severity: Severity = Severity.CRITICAL


def _rule(row: Mapping[str, Any]) -> KernelRule:
    return KernelRule(**fields(row))


_CRASH = r"(?P<name>\S{1,40})\[\d{1,10}\]:? (?P<how>segfault|general protection|trap invalid opcode)"
_STUCK = r"task (?P<name>.{1,40}?):\d{1,10} blocked for more than (?P<s>\d{1,6}) seconds"


def judge_lines(log: Log, texts: Texts) -> tuple[list[Finding], list[str]]:
    """One finding for each kind of trouble in these lines, and what is only worth a note."""
    plain = [(text, line) for text, line in texts if "amdgpu" not in text]
    amd = [(text, line) for text, line in texts if "amdgpu" in text]
    findings = [finding for row in words("kernel")["rules"] if (finding := _apply(log, _rule(row), plain))]
    findings += [finding for row in words("kernel")["amd"] if (finding := _apply(log, _rule(row), amd))][:1]
    crashes, notes = _judge_processes(log, texts)
    refused = [t for t, _ in texts if "NVRM" in t and ("NV_ERR_NO_MEMORY" in t or "out of memory" in t.lower())]
    if refused:
        times = f"the NVIDIA driver was refused memory {len(refused)} time(s)"
        notes.append(f"{times}; whether the card's or the host's it does not say: {refused[0][:160]}")
    return findings + crashes, notes


def _apply(log: Log, rule: KernelRule, texts: Texts) -> Finding | None:
    lines = [line for text, line in texts if re.search(rule.pattern, text) and not re.search(rule.unless, text)]
    if not lines:
        return None
    first = " ".join(lines[0].text.split())
    first = first if len(first) <= 160 else f"{first[:160]}..."
    return _build_finding(log, rule, lines, f"The log says so {len(lines)} time(s), first: {first}")


def _build_finding(log: Log, rule: KernelRule, lines: Sequence[LogLine], because: str) -> Finding:
    return Finding(
        rule.code, rule.severity, rule.confidence, rule.title, because, quote(log, lines), (Remedy(rule.do, rule.why),),
        (NOT_MEMORY,),
    )  # fmt: skip


def _judge_processes(log: Log, texts: Texts) -> tuple[list[Finding], list[str]]:
    """Crashes in native code and processes stuck in the kernel: the server's are findings, another program's are notes."""
    findings: dict[str, Finding] = {}
    notes: list[str] = []
    for text, line in texts:
        pattern = _STUCK if "blocked for more than" in text else _CRASH
        match = re.search(pattern, text)
        if match is None:
            continue
        inside = re.search(r" in ([^\[\s]{1,80})\[", text)
        where = f" in {inside[1]}" if inside else ""
        if process_owner(match["name"]) not in ("vllm", "python"):
            notes.append(f"no process of vLLM: {match[0][:100]}")
        elif pattern is _STUCK:
            because = f"{match['name']} did not move for more than {match['s']} s: it waited for a device or a file system."
            findings.setdefault("stuck", _build_finding(log, _rule(words("kernel")["stuck"]), [line], because))
        elif match["how"] == "trap invalid opcode":
            because = f"{match['name']} was ended by the CPU{where}: unknown instruction."
            findings.setdefault("crash", _build_finding(log, _rule(words("kernel")["opcode"]), [line], because))
        else:
            because = (
                f"The kernel reports a {match['how']} of {match['name']}{where}: a bug or a broken library, not a shortage."
            )
            rule = _rule(words("kernel")["crash"])._replace(title=_rule(words("kernel")["crash"]).title + where)
            findings.setdefault("crash", _build_finding(log, rule, [line], because))
    return list(findings.values()), notes[:20]


class Blame(StrEnum):
    """Where an Xid points."""

    PROGRAM = "program"  # a GPU program did wrong: a bug, rarely a card
    ECHO = "echo"  # says only that something else happened before
    FAULT = "fault"  # the card, its link, its firmware or its driver
    REPAIRED = "repaired"  # a fault that was put right: watch it
    UNKNOWN = "unknown"


class Xid(NamedTuple):
    """One number of the catalog."""

    number: int
    meaning: str
    blame: Blame
    cure: str


def explain(number: int) -> Xid:
    """The meaning of an Xid number; a number that is not in the table is unknown, never guessed."""
    unknown = "a GPU error this table does not hold"
    row = next((row for row in words("kernel")["xids"] if row[0] == number), None)
    if row is None:
        return Xid(number, unknown, Blame.UNKNOWN, "look the number up in NVIDIA's Xid catalog")
    return Xid(number, row[1], Blame(row[2]), row[3])


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
    line: LogLine


def judge_kernel(log: Log) -> TextVerdict[tuple[str, ...]]:
    """Findings of the kernel lines in this text, and notes on what is not the cause by itself."""
    xids: list[XidEvent] = []
    rest: list[tuple[str, LogLine]] = []
    for line in log.lines if contains_any(log.lines, KERNEL) else ():
        if not any(word in line.text for word in KERNEL):
            continue
        text = line.text if "No space left" in line.text and not line.process else kernel_message(line)
        if text is None:
            continue
        xid = _xid(text, line) if "Xid (" in text else None
        if xid is not None and len(xids) < MOST_EVENTS:
            xids.append(xid)
        elif xid is None and len(rest) < MOST_EVENTS:
            rest.append((text, line))
    if any(event.number == 79 for event in xids):
        rest = [(text, line) for text, line in rest if "fallen off the bus" not in text]  # the Xid says it already
    findings: list[Finding] = []
    notes: list[str] = []
    for found, said in (judge_kills(log, read_kills(log)), _judge_xids(log, xids), judge_lines(log, rest)):
        findings += found
        notes += said
    findings.sort(key=lambda one: (one.severity is not Severity.CRITICAL, -one.confidence))
    return TextVerdict(findings, tuple(dict.fromkeys(notes)))


def _xid(text: str, line: LogLine) -> XidEvent | None:
    found = re.search(_XID, text)
    if found is None:
        return None
    pid = found["pid"] or ""
    name = (found["name"] or "").strip("<>' ")
    return XidEvent(
        number=int(found["number"]), device=found["device"], pid=int(pid) if pid.isascii() and pid.isdecimal() else None,
        name=None if name in ("", "unknown") else name, text=found["rest"].strip(), line=line,
    )  # fmt: skip


def _judge_xids(log: Log, xids: Sequence[XidEvent]) -> tuple[list[Finding], list[str]]:
    """Per card: a fault rules; a program's error counts only where no fault stands beside it; echoes are notes."""
    findings: list[Finding] = []
    notes: list[str] = []
    for device in dict.fromkeys(event.device for event in xids):
        here = [event for event in xids if event.device == device]
        by = {blame: [e for e in here if explain(e.number).blame is blame] for blame in Blame}
        programs = [e for e in by[Blame.PROGRAM] if e.name is None or process_owner(e.name) in ("vllm", "python")]
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
        code=Code.OTHER_HARDWARE, severity=Severity.CRITICAL, confidence=0.6 if first.number in (32, 38) else 0.95,
        title=f"GPU {device}: {first.meaning}",
        because=(
            f"The driver reported Xid {', '.join(map(str, _numbers(faults)))} on GPU {device} ({len(faults)} line(s)): "
            f"{first.meaning}.{after}"
        ),
        evidence=quote(log, [event.line for event in (*faults, *here)]),
        remedy=(*remedy, Remedy("serve from another card or node meanwhile", "a fault returns until it is cured")),
        not_a_remedy=(NOT_MEMORY, "starting vLLM on the same card again without a reset: a scheduler does that all night"),
    )  # fmt: skip


def _repaired(log: Log, device: str, events: Sequence[XidEvent]) -> Finding:
    first = explain(events[0].number)
    return Finding(
        code=Code.OTHER_HARDWARE, severity=Severity.INFO, confidence=0.4,
        title=f"GPU {device} corrected a fault: {first.meaning}",
        because=f"Xid {first.number} on GPU {device} ({len(events)} line(s)): {first.meaning}. Alone it ends no server.",
        evidence=quote(log, [event.line for event in events]),
        remedy=(Remedy(first.cure, "such events grow in number before a card fails"),), not_a_remedy=(NOT_MEMORY,),
    )  # fmt: skip


def _program(log: Log, device: str, events: Sequence[XidEvent]) -> Finding:
    """A kernel of the server's did wrong; certain of the access, not of whose bug it is."""
    first = explain(events[0].number)
    who = next((f" by {event.name} (pid {event.pid})" for event in events if event.name), "")
    named = any(event.name and process_owner(event.name) == "vllm" for event in events)
    confidence = 0.5 if _numbers(events) == [43] else 0.9 if named else 0.75
    return Finding(
        code=Code.OTHER_ILLEGAL_ACCESS, severity=Severity.CRITICAL, confidence=confidence,
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
    )  # fmt: skip

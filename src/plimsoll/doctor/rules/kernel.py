"""Judges kernel lines (dmesg, journalctl -k): the OOM killer, NVIDIA's Xid errors, and what else ends a server from below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from plimsoll.doctor.rules.host_memory import judge_kills, read_kills
from plimsoll.doctor.rules.log_text import Log, LogLine, TextVerdict, kernel_message, process_owner, quote
from plimsoll.doctor.words import finding, words
from plimsoll.findings import Finding, Remedy, Severity

NOT_MEMORY = ("memory settings (utilisation, --max-model-len, --max-num-seqs): nothing ran out",)
Texts = Sequence[tuple[str, LogLine]]  # the message without its stamps, and the line it came from


def _judge_lines(log: Log, texts: Texts) -> tuple[list[Finding], list[str]]:
    """One finding for each kind of trouble in these lines, and what is only worth a note."""
    findings: list[Finding] = []
    for kind in ("rules", "amd"):
        told: list[Finding] = []
        mine = [(text, line) for text, line in texts if ("amdgpu" in text) == (kind == "amd")]
        for row in words("kernel")[kind]:
            unless = row.get("unless", r"(?!)")  # a line that also matches this does not count
            lines = [line for text, line in mine if re.search(row["pattern"], text) and not re.search(unless, text)]
            if lines:
                first = " ".join(lines[0].text.split())
                because = f"The log says so {len(lines)} time(s), first: {first[:160]}{'...' if len(first) > 160 else ''}"
                told.append(finding(row, quote(log, lines), because, not_a_remedy=NOT_MEMORY))
        findings += told[:1] if kind == "amd" else told
    crashes, notes = _judge_processes(log, texts)
    refused = [t for t, _ in texts if "NVRM" in t and ("NV_ERR_NO_MEMORY" in t or "out of memory" in t.lower())]
    if refused:
        times = f"the NVIDIA driver was refused memory {len(refused)} time(s)"
        notes.append(f"{times}; whether the card's or the host's it does not say: {refused[0][:160]}")
    return findings + crashes, notes


_CRASH = r"(?P<name>\S{1,40})\[\d{1,10}\]:? (?P<how>segfault|general protection|trap invalid opcode)"
_STUCK = r"task (?P<name>.{1,40}?):\d{1,10} blocked for more than (?P<s>\d{1,6}) seconds"


def _judge_processes(log: Log, texts: Texts) -> tuple[list[Finding], list[str]]:
    """Crashes in native code and processes stuck in the kernel: the server's are findings, another program's are notes."""
    findings: dict[str, Finding] = {}
    notes: list[str] = []
    for text, line in texts:
        is_stuck = "blocked for more than" in text
        match = re.search(_STUCK if is_stuck else _CRASH, text)
        if match is None:
            continue
        name, inside = match["name"], re.search(r" in ([^\[\s]{1,80})\[", text)
        where = f" in {inside[1]}" if inside else ""
        if process_owner(name) not in ("vllm", "python"):
            notes.append(f"no process of vLLM: {match[0][:100]}")
            continue
        kind = "stuck" if is_stuck else "opcode" if match["how"] == "trap invalid opcode" else "crash"
        figures: dict[str, Any] = match.groupdict()
        told = finding(words("kernel")[kind], quote(log, [line]), not_a_remedy=NOT_MEMORY, **figures, where=where)
        findings.setdefault("stuck" if is_stuck else "crash", told)
    return list(findings.values()), notes[:20]


class Blame(StrEnum):
    """Where an Xid points."""

    PROGRAM = "program"  # a GPU program did wrong: a bug, rarely a card
    ECHO = "echo"  # says only that something else happened before
    FAULT = "fault"  # the card, its link, its firmware or its driver
    REPAIRED = "repaired"  # a fault that was put right: watch it
    UNKNOWN = "unknown"


class Xid(NamedTuple):
    """The meaning of one number of the catalog."""

    meaning: str
    blame: Blame
    cure: str


def explain(number: int) -> Xid:
    """The meaning of an Xid number; a number that is not in the table is unknown, never guessed."""
    unknown = (number, "a GPU error this table does not hold", "unknown", "look the number up in NVIDIA's Xid catalog")
    _, meaning, blame, cure = next((row for row in words("kernel")["xids"] if row[0] == number), unknown)
    return Xid(meaning, Blame(blame), cure)


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
    is_servers = any(line.process or line.place for line in log.lines)  # whose own disk the rules of its log judge
    for line in log.lines:
        if not any(word in line.text for word in words("names")["written_by"]["kernel"]):
            continue
        text = line.text if "No space left" in line.text and not is_servers else kernel_message(line)
        if text is None:
            continue
        found = re.search(_XID, text) if "Xid (" in text else None
        xid = None
        if found is not None:
            pid, name = found["pid"] or "", (found["name"] or "").strip("<>' ")
            number = int(pid) if pid.isascii() and pid.isdecimal() else None
            owner = None if name in ("", "unknown") else name
            xid = XidEvent(int(found["number"]), found["device"], number, owner, found["rest"].strip(), line)
        if xid is not None and len(xids) < MOST_EVENTS:
            xids.append(xid)
        elif xid is None and len(rest) < MOST_EVENTS:
            rest.append((text, line))
    if any(event.number == 79 for event in xids):
        rest = [(text, line) for text, line in rest if "fallen off the bus" not in text]  # the Xid says it already
    findings: list[Finding] = []
    notes: list[str] = []
    for some, said in (judge_kills(log, read_kills(log)), _judge_xids(log, xids), _judge_lines(log, rest)):
        findings += some
        notes += said
    findings.sort(key=lambda one: (one.severity is not Severity.CRITICAL, -one.confidence))
    return TextVerdict(findings, tuple(dict.fromkeys(notes)))


def _judge_xids(log: Log, xids: Sequence[XidEvent]) -> tuple[list[Finding], list[str]]:
    """Per card: a fault rules; a program's error counts only where no fault stands beside it; echoes are notes."""
    findings: list[Finding] = []
    notes: list[str] = []
    for device in dict.fromkeys(event.device for event in xids):
        here = [event for event in xids if event.device == device]
        by = {blame: [e for e in here if explain(e.number).blame is blame] for blame in Blame}
        faults, repaired = by[Blame.FAULT], by[Blame.REPAIRED]
        programs = [e for e in by[Blame.PROGRAM] if e.name is None or process_owner(e.name) in ("vllm", "python")]
        told = faults or programs or repaired or here
        numbers, first = list(dict.fromkeys(event.number for event in told)), explain(told[0].number)
        listed = ", ".join(map(str, numbers))
        figures: dict[str, Any] = {"device": device, "meaning": first.meaning, "count": len(told), "numbers": listed}
        if faults:
            # The driver's own advice (Xid 154) comes first.
            asked = [m[1] for e in here if e.number == 154 and (m := re.search(r" to 0x\w{1,8} \(([^)]{1,40})\)", e.text))]
            cures = [Remedy(explain(n).cure, f"Xid {n}: {explain(n).meaning}") for n in numbers[:4]]
            if asked and asked[-1] != "None":
                do = f"do what the driver asks for on {device}: {asked[-1]}"
                cures.insert(0, Remedy(do, "Xid 154 names what this GPU needs"))
            echoes = len(here) - len(faults)
            after = f" {echoes} other Xid line(s) on this card are most likely its consequence." if echoes else ""
            findings.append(finding(
                "xid-fault", quote(log, [event.line for event in (*faults, *here)]), first=cures, **figures, after=after,
                confidence=0.6 if numbers[0] in (32, 38) else None,
            ))  # fmt: skip
        elif programs:  # certain of the access, not of whose bug it is
            named = any(event.name and process_owner(event.name) == "vllm" for event in programs)
            findings.append(finding(
                "xid-program", quote(log, [event.line for event in programs]), **figures,
                who=next((f" by {event.name} (pid {event.pid})" for event in programs if event.name), ""),
                confidence=0.5 if numbers == [43] else 0.9 if named else None,
            ))  # fmt: skip
        elif repaired:
            shown = quote(log, [event.line for event in repaired])
            findings.append(finding("xid-repaired", shown, **figures, number=numbers[0], cure=first.cure))
        strangers = [e for e in by[Blame.PROGRAM] if e not in programs]
        notes += [f"Xid {e.number} on {device} belongs to {e.name}, not to vLLM" for e in strangers]
        for event in (*by[Blame.ECHO], *by[Blame.UNKNOWN]):
            notes.append(f"Xid {event.number} on {device}: {explain(event.number).meaning}; {event.text[:120]}".rstrip("; "))
    return findings, notes

"""Reads the output of nvidia-smi (table, -q, csv) and rocm-smi: cards, memory, who holds it; judges what it says is broken."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.doctor.marks import SMI, SMI_ERROR, holds
from plimsoll.doctor.quoting import quote
from plimsoll.doctor.smi_full import Health, read_full
from plimsoll.doctor.smi_tables import SmiGpu, SmiProcess, SmiReading, read_csv, read_rocm, read_tables
from plimsoll.domain.finding import Code, Finding, Remedy, Severity
from plimsoll.domain.log import Line, Log

_NOT_MEMORY = ("memory settings: nothing ran out",)
_CONTEXT_MIB = 1024  # what drivers and contexts take unseen; less than this is not worth a word


class SmiFacts(NamedTuple):
    """Every reading in the text, in order; the last one is what counts."""

    readings: tuple[SmiReading, ...] = ()
    health: tuple[Health, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> SmiReading | None:
        """The last reading that saw a card."""
        return next((one for one in reversed(self.readings) if one.gpus), None)

    @property
    def processes(self) -> tuple[SmiProcess, ...] | None:
        """Who holds memory, after the last listing there is; None where none was printed."""
        return next((one.processes for one in reversed(self.readings) if one.processes is not None), None)


class SmiVerdict(NamedTuple):
    """The findings, the gravest first, and the facts."""

    findings: list[Finding]
    facts: SmiFacts


def judge_nvidia_smi(log: Log) -> SmiVerdict:
    """Facts for other judges, and findings only for what the tool itself calls broken."""
    if not holds(log.lines, (*SMI, *SMI_ERROR)):
        return SmiVerdict([], SmiFacts())
    lines = [line for line in log.lines if not line.process]
    full, health = read_full(lines)
    readings = (*read_tables(lines), *full, *read_csv(lines), *read_rocm(lines))
    facts = SmiFacts(readings, health)
    errors = _tool_errors(log, lines)
    lost = any(one.code is Code.OTHER_HARDWARE for one in errors)  # then the table's ERR! says the same again
    cards = [one for card in health if (one := _judge_health(log, card))] + _judge_table(log, facts, lost=lost)
    found = errors + cards
    found.sort(key=lambda one: (one.severity is not Severity.CRITICAL, -one.confidence))
    return SmiVerdict(found, facts._replace(notes=tuple(_notes(facts))))


def unlisted_mib(reading: SmiReading, gpu: SmiGpu) -> int | None:
    """Memory in use on a card that no listed process holds; None where the listing or a figure is missing."""
    if reading.processes is None or gpu.used_mib is None:
        return None
    held = [process.mib for process in reading.processes if process.gpu == gpu.number]
    if any(size is None for size in held):
        return None
    return max(0, gpu.used_mib - sum(size for size in held if size is not None))


def _notes(facts: SmiFacts) -> list[str]:
    reading = facts.last
    notes = []
    for gpu in reading.gpus if reading else ():
        missing = unlisted_mib(reading, gpu) if reading else None
        if missing is not None and missing >= _CONTEXT_MIB:
            notes.append(
                f"GPU {gpu.number}: {missing:,} MiB in use belong to no listed process (another container, another user, "
                "or a process that is ending); inside a container nvidia-smi lists no process of others"
            )
    return notes


class _Said(NamedTuple):
    pattern: str
    code: Code
    confidence: float
    title: str
    do: str
    why: str


_ERRORS = (
    _Said(
        r"Unable to determine the device handle for|GPU is lost|GPU has fallen off the bus",
        Code.OTHER_HARDWARE,
        0.9,
        "nvidia-smi cannot reach a GPU any more",
        "reboot the machine; look for Xid lines in the kernel log; if it returns, check power, heat and seating",
        "the card does not answer its driver",
    ),
    _Said(
        r"Failed to initialize NVML: Driver/library version mismatch|NVML library version: \d",
        Code.OTHER_INSTALLATION,
        0.9,
        "the driver's kernel module and its libraries are of different versions",
        "reboot, or reload the NVIDIA modules",
        "the libraries were upgraded under a loaded module; no program can use the GPU until then",
    ),
    _Said(
        r"NVIDIA-SMI has failed because it couldn.t communicate|Failed to initialize NVML: (?:Unknown|Driver Not)",
        Code.OTHER_INSTALLATION,
        0.8,
        "the NVIDIA driver is not running, or the container has lost its GPU",
        "load or reinstall the driver; in a container start it again (after a cgroup reload it loses its devices)",
        "no program can use the GPU until then",
    ),
    _Said(
        r"^\s{0,8}No devices were found\s{0,8}$",
        Code.OTHER_HARDWARE,
        0.8,
        "nvidia-smi finds no GPU",
        "check that the container was given GPUs, and the kernel log for RmInitAdapter and Xid lines",
        "the driver runs and sees no usable card",
    ),
)


def _tool_errors(log: Log, lines: list[Line]) -> list[Finding]:
    """What nvidia-smi says instead of a table."""
    shown = [line for line in lines if any(word in line.text for word in SMI_ERROR) and "NVRM" not in line.text]
    findings = []
    for said in _ERRORS:
        found = [line for line in shown if re.search(said.pattern, line.text)]
        if found:
            findings.append(
                Finding(
                    code=said.code,
                    severity=Severity.CRITICAL,
                    confidence=said.confidence,
                    title=said.title,
                    because=f"nvidia-smi says: {' '.join(found[0].text.split())[:200]}",
                    evidence=quote(log, found),
                    remedy=(Remedy(said.do, said.why),),
                    not_a_remedy=_NOT_MEMORY,
                )
            )
    return findings


def _judge_table(log: Log, facts: SmiFacts, *, lost: bool) -> list[Finding]:
    """A card whose fields read ERR!, or whose uncorrectable errors are counted."""
    reading = facts.last
    findings = []
    for gpu in reading.gpus if reading else ():
        if gpu.broken and lost:
            continue
        if gpu.broken:
            why, confidence = "nvidia-smi prints ERR! where this card's values should stand", 0.8
        elif gpu.uncorrected:
            why, confidence = (
                f"the card has counted {gpu.uncorrected} uncorrectable memory error(s) since the driver was loaded",
                0.75,
            )
        else:
            continue
        findings.append(
            Finding(
                code=Code.OTHER_HARDWARE,
                severity=Severity.CRITICAL if gpu.broken else Severity.WARNING,
                confidence=confidence,
                title=f"GPU {gpu.number} ({gpu.name or 'unknown'}) is not healthy",
                because=f"GPU {gpu.number}: {why}.",
                evidence=quote(log, gpu.lines),
                remedy=(
                    Remedy(
                        "drain the node, reset the GPU or reboot, and look at nvidia-smi -q -d ECC,ROW_REMAPPER",
                        "a fault stays",
                    ),
                ),
                not_a_remedy=_NOT_MEMORY,
            )
        )
    return findings


def _judge_health(log: Log, card: Health) -> Finding | None:
    """What `nvidia-smi -q` says about errors and repairs of one card."""
    if card.remap_failed or card.threshold or card.unrepairable:
        what, confidence, severity = "the card has no way left to repair its memory", 0.9, Severity.CRITICAL
        do = "take the GPU out of service and ask the vendor for a replacement"
    elif card.uncorrected:
        what, confidence, severity = (
            f"{card.uncorrected} uncorrectable memory error(s) since the driver was loaded",
            0.75,
            Severity.WARNING,
        )
        do = "drain the node and reset the GPU; watch whether they return"
    elif card.recovery not in ("", "None", "N/A"):
        what, confidence, severity = f"the driver asks for: {card.recovery}", 0.85, Severity.CRITICAL
        do = f"do what the driver asks for ({card.recovery})"
    elif card.remap_pending:
        what, confidence, severity = "a bad memory row waits for its replacement", 0.5, Severity.WARNING
        do = "reset the GPU at the next quiet moment: the row is replaced then"
    else:
        return None
    return Finding(
        code=Code.OTHER_HARDWARE,
        severity=severity,
        confidence=confidence,
        title=f"GPU {card.gpu}: {what}",
        because=f"nvidia-smi -q says of GPU {card.gpu}: {what}.",
        evidence=quote(log, card.lines),
        remedy=(Remedy(do, "memory faults of a card return until then"),),
        not_a_remedy=_NOT_MEMORY,
    )

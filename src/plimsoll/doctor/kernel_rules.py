"""Judges kernel lines that carry no Xid: lost GPUs, AMD's driver, the bus, broken RAM, disks, crashes in native code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.quoting import quote, whose
from plimsoll.domain.finding import Code, Finding, Remedy, Severity
from plimsoll.domain.log import Line, Log

NOT_MEMORY = "memory settings (utilisation, --max-model-len, --max-num-seqs): nothing ran out"
Texts = Sequence[tuple[str, Line]]  # the message without its stamps, and the line it came from


class Rule(NamedTuple):
    """Lines that all mean one thing."""

    pattern: str
    code: Code
    confidence: float
    title: str
    do: str
    why: str
    unless: str = r"(?!)"  # a line that also matches this does not count
    severity: Severity = Severity.CRITICAL


_RULES = (
    Rule(
        r"NVRM:.{0,120}fallen off the bus",
        Code.OTHER_HARDWARE,
        0.95,
        "a GPU has fallen off the bus",
        "reboot the machine; if it returns, check power, heat, seating and slot, or replace the card",
        "the host can no longer reach it",
    ),
    Rule(
        r"NVRM:.{0,120}RmInitAdapter failed",
        Code.OTHER_HARDWARE,
        0.85,
        "the driver could not start a GPU",
        "power the machine off and on; if it stays, try another driver version, then another card",
        "the card did not answer its driver",
    ),
    Rule(
        r"NVRM: API mismatch",
        Code.OTHER_INSTALLATION,
        0.9,
        "the driver's kernel module and its libraries are of different versions",
        "reboot, or reload the module, so that both come from one driver release",
        "the libraries were upgraded under a loaded module",
    ),
    Rule(
        r"SXid \(",
        Code.OTHER_HARDWARE,
        0.6,
        "an NVLink switch reported an error",
        "look the SXid up in the Fabric Manager guide; for a fatal one reset all GPUs and switches of the node",
        "the GPUs of the node share it",
        unless=r"(?i:non-?fatal)",
    ),
    Rule(
        r"No space left on device.{0,80}/dev/shm|/dev/shm.{0,80}No space left on device",
        Code.HOST_OUT_OF_MEMORY,
        0.8,
        "the shared memory folder (/dev/shm) is too small",
        "give the container more: --ipc=host, --shm-size 16g, or a memory-backed volume there",
        "vLLM's processes pass data through it",
    ),
    Rule(
        r"No space left on device",
        Code.OTHER_DISK,
        0.7,
        "a disk is full",
        "free space, or move HF_HOME, VLLM_CACHE_ROOT and the temporary folder to a larger disk",
        "weights and compiled kernels are written there",
        unless=r"\b/?dev/shm",
    ),
    Rule(
        r"(?:Buffer|metadata|medium|nvme\d{1,4}\w{0,10}).{0,60}I/O error|I/O error,? (?:on )?dev|nvme.{0,40}controller is down",
        Code.OTHER_DISK,
        0.6,
        "a disk reports read or write errors",
        "check the disk (smartctl) and copy the model to another one",
        "a file that cannot be read ends the start",
        unless=r"dev (?:fd|sr|loop)\d",
    ),
    Rule(
        r"AER:.{0,60}\(?Fatal|severity=Uncorrect\w{2,4} \(Fatal\)",
        Code.OTHER_HARDWARE,
        0.7,
        "the PCIe bus reported a fatal error",
        "drain the node, reboot, and check the slot and riser that the line names",
        "a device on a failing link is lost sooner or later",
        unless=r"Non-Fatal",
    ),
    Rule(
        r"Memory failure: 0x|EDAC MC\d{1,3}: \d{1,6} UE ",
        Code.OTHER_HARDWARE,
        0.8,
        "the host's own memory (RAM) has an uncorrectable error",
        "drain the node and replace the memory module that the line names",
        "the process that used the page was killed; this is not a shortage",
    ),
)
_AMD_BROKEN = Rule(
    r"(?i:uncorrectable|poison|GPU is lost|hardware error)",
    Code.OTHER_HARDWARE,
    0.85,
    "an AMD GPU reported an uncorrectable error",
    "drain the node and reset the GPU (rocm-smi --gpureset), or reboot",
    "the error stays until a reset",
)
_AMD_FAULT = Rule(
    r"page fault",
    Code.OTHER_ILLEGAL_ACCESS,
    0.75,
    "a GPU program touched memory it must not touch",
    "start the server again; upgrade vLLM or change the attention backend",
    "a bug in a kernel, not a shortage; a reset after it is its consequence",
)
_AMD_RESET = Rule(
    r"GPU reset begin|ring \S{1,30} timeout|GPU reset\(",
    Code.OTHER_HARDWARE,
    0.6,
    "an AMD GPU hung and was reset",
    "start the server again; if it returns on the same card, have the card checked",
    "the reset ended every program on it",
)
_CRASH = r"(?P<name>\S{1,40})\[\d{1,10}\]:? (?P<how>segfault|general protection|trap invalid opcode)"
_STUCK = r"task (?P<name>.{1,40}?):\d{1,10} blocked for more than (?P<s>\d{1,6}) seconds"


def judge_lines(log: Log, texts: Texts) -> tuple[list[Finding], list[str]]:
    """One finding for each kind of trouble in these lines, and what is only worth a note."""
    if not texts:
        return [], []
    plain = [(text, line) for text, line in texts if "amdgpu" not in text]
    findings = [found for rule in _RULES if (found := _apply(log, rule, plain))]
    amd = [(text, line) for text, line in texts if "amdgpu" in text]
    findings += [found for rule in (_AMD_BROKEN, _AMD_FAULT, _AMD_RESET) if (found := _apply(log, rule, amd))][:1]
    crashes, notes = _processes(log, texts)
    refused = [t for t, _ in texts if "NVRM" in t and ("NV_ERR_NO_MEMORY" in t or "out of memory" in t.lower())]
    if refused:
        said = f"the NVIDIA driver was refused memory {len(refused)} time(s); whether the card's or the host's it does not say"
        notes.append(f"{said}: {refused[0][:160]}")
    return findings + crashes, notes


def _apply(log: Log, rule: Rule, texts: Texts) -> Finding | None:
    lines = [line for text, line in texts if re.search(rule.pattern, text) and not re.search(rule.unless, text)]
    return _finding(log, rule, lines, f"The log says so {len(lines)} time(s), first: {_short(lines[0])}") if lines else None


def _short(line: Line) -> str:
    text = " ".join(line.text.split())
    return text if len(text) <= 160 else f"{text[:160]}..."


def _finding(log: Log, rule: Rule, lines: Sequence[Line], because: str) -> Finding:
    return Finding(
        rule.code,
        rule.severity,
        rule.confidence,
        rule.title,
        because,
        quote(log, lines),
        (Remedy(rule.do, rule.why),),
        (NOT_MEMORY,),
    )


def _processes(log: Log, texts: Texts) -> tuple[list[Finding], list[str]]:
    """Crashes in native code and processes stuck in the kernel: the server's are findings, a stranger's are notes."""
    found: dict[str, Finding] = {}
    notes: list[str] = []
    for text, line in texts:
        if "blocked for more than" in text:
            match = re.search(_STUCK, text)
        elif "segfault" in text or "general protection" in text or "trap invalid" in text:
            match = re.search(_CRASH, text)
        else:
            continue
        if match is None:
            continue
        if whose(match["name"]) not in ("vllm", "python"):
            notes.append(f"not a process of vLLM's: {match[0][:100]}")
        elif "s" in match.groupdict():
            found.setdefault("stuck", _stuck(log, match, line))
        else:
            found.setdefault("crash", _crash(log, match, text, line))
    return list(found.values()), notes[:20]


def _stuck(log: Log, match: re.Match[str], line: Line) -> Finding:
    rule = Rule(
        "",
        Code.ENGINE_WEDGED,
        0.5,
        "a process of the server was stuck inside the kernel",
        "look at the disk or network file system, and at the GPU (nvidia-smi), at that minute",
        "a process waits there for hardware or for a remote disk",
        severity=Severity.WARNING,
    )
    because = f"{match['name']} did not move for more than {match['s']} s: it waited for a device or a file system."
    return _finding(log, rule, [line], because)


def _crash(log: Log, match: re.Match[str], text: str, line: Line) -> Finding:
    inside = re.search(r" in ([^\[\s]{1,80})\[", text)
    where = f" in {inside[1]}" if inside else ""
    if match["how"] == "trap invalid opcode":
        rule = Rule(
            "",
            Code.OTHER_INSTALLATION,
            0.6,
            "a library uses an instruction that this CPU does not have",
            "install builds made for this CPU",
            "a binary for a newer CPU cannot run here",
        )
        return _finding(log, rule, [line], f"{match['name']} was ended by the CPU{where}: unknown instruction.")
    rule = Rule(
        "",
        Code.ENGINE_DEAD,
        0.7,
        f"a process of the server crashed in native code{where}",
        "bring vLLM, torch and the driver to releases that belong together; keep the core dump for the bug report",
        "mixed libraries are the most common cause",
    )
    because = f"The kernel reports a {match['how']} of {match['name']}{where}: a bug or a broken library, not a shortage."
    return _finding(log, rule, [line], because)

"""Reads the output of nvidia-smi (the table, and -q): cards, memory, who holds it; judges what it says is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import WRITTEN_BY, Log, LogLine, TextVerdict, quote
from plimsoll.doctor.words import finding
from plimsoll.findings import Code, Finding, Severity

MOST_READINGS = 500
_BUS = r"\b([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\b"
_MEMORY = r"(\d{1,9})MiB\s{0,8}/\s{0,8}(\d{1,9})MiB"
_PROCESS = (
    r"^\|\s{1,8}(?P<gpu>\d{1,3})\s{1,12}(?:(?P<gi>N/A|\d{1,3})\s{1,8}(?P<ci>N/A|\d{1,3})\s{1,24})?(?P<pid>\d{1,10})\s{1,12}"
    r"(?P<type>M\+C|C\+G|[CGM])\s{1,8}(?P<name>\S.{0,200}?)\s{1,120}(?:(?P<mib>\d{1,9})MiB|N/A|Insufficient\S{0,4})\s{0,8}\|"
)


_HEAD = r"\s{0,6}(\d{1,3})\s{1,6}(\S.{0,80}?)\s{0,40}(?:On|Off|N/A|WDDM|TCC|MCDM|ERR!)?\s{0,6}$"


class SmiGpu(NamedTuple):
    """One card; what the tool does not say (N/A, Not Supported, ERR!) is None."""

    number: int  # as nvidia-smi counts the cards
    name: str
    used_mib: int | None = None
    total_mib: int | None = None
    uncorrected: int | None = None  # volatile uncorrectable ECC errors
    broken: bool = False  # the tool printed ERR!
    lines: tuple[LogLine, ...] = ()


class SmiProcess(NamedTuple):
    """One process on a card."""

    gpu: int
    pid: int
    name: str
    mib: int | None


class SmiReading(NamedTuple):
    """One printout."""

    gpus: tuple[SmiGpu, ...] = ()
    processes: tuple[SmiProcess, ...] | None = None  # None: no listing was printed; (): it says there are none


def read_tables(lines: Sequence[LogLine]) -> tuple[SmiReading, ...]:
    """Every classic table in the text; `watch nvidia-smi` gives several."""
    readings: list[SmiReading] = []
    row: SmiGpu | None = None  # a card whose second row is still to come
    for line in lines:
        text = line.text.strip()
        if not text.startswith("|"):
            continue
        if "NVIDIA-SMI" in text:
            readings.append(SmiReading())
            del readings[:-MOST_READINGS]
            row = None
            continue
        if not readings:
            if not re.search(_BUS, text) and "Processes:" not in text:
                continue
            readings.append(SmiReading())  # the head was cut off
        reading, cells = readings[-1], text.strip("|").split("|")
        head = re.match(_HEAD, cells[0]) if len(cells) >= 3 and re.search(_BUS, cells[1]) else None
        if head is not None:
            errors = cells[2].strip()
            uncorrected = int(errors) if errors.isascii() and errors.isdecimal() and len(errors) < 12 else None
            row = SmiGpu(int(head[1]), head[2].strip(), uncorrected=uncorrected, broken="ERR!" in text, lines=(line,))
            readings[-1] = reading._replace(gpus=(*reading.gpus, row)[:256])
        elif row is not None and (len(cells) < 3 or text.startswith(("|=", "|-"))):
            row = None if text[1:2] in ("=", "-") else row
        elif row is not None and not cells[0].strip() and not cells[1].strip():
            row = None  # the row after the memory's: the card is complete
        elif row is not None:
            memory = re.search(_MEMORY, cells[1])
            used, total = map(int, memory.groups()) if memory else (None, None)
            broken = row.broken or "ERR!" in text or "GPU is lost" in text
            row = row._replace(used_mib=used, total_mib=total, broken=broken, lines=(*row.lines, line))
            readings[-1] = reading._replace(gpus=(*reading.gpus[:-1], row))
        elif "No running processes found" in text or "Processes:" in text:
            readings[-1] = reading._replace(processes=reading.processes or ())
        # Of MIG devices nothing is read: their memory is not the card's.
        elif (found := re.match(_PROCESS, text)) and (reading.processes is not None or reading.gpus):
            size = int(found["mib"]) if found["mib"] else None
            process = SmiProcess(int(found["gpu"]), int(found["pid"]), found["name"], size)
            readings[-1] = reading._replace(processes=(*(reading.processes or ()), process)[:2000])
    return tuple(reading for reading in readings if reading != SmiReading())


MOST_CARDS = 512
_CARD = r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s{0,8}$"


class CardHealth(NamedTuple):
    """The health a card reports; empty and None where it reports nothing."""

    gpu: str  # its bus address
    uncorrected: int | None = None  # since the driver was loaded
    faults: frozenset[str] = frozenset()  # keys of _FAULTS
    recovery: str = ""
    lines: tuple[LogLine, ...] = ()


class _Card:
    """One card's part of the printout."""

    def __init__(self, index: int, bus: str) -> None:
        self.gpu = SmiGpu(index, "")
        self.health = CardHealth(bus)
        self.processes: list[SmiProcess] = []
        self.pid: int | None = None
        self.name = ""

    def take(self, path: list[str], key: str, value: str, line: LogLine) -> None:
        """One `key : value` line, with the headings it stands under."""
        number = int(value.split()[0]) if re.match(r"\d{1,12}(?: |$)", value) else None
        old, shown = self.health, False
        if "FB Memory Usage" in path and key in ("Total", "Used"):
            gpu = self.gpu._replace(lines=(*self.gpu.lines, line)[:6])
            self.gpu = gpu._replace(total_mib=number) if key == "Total" else gpu._replace(used_mib=number)
        elif key == "Product Name":
            self.gpu = self.gpu._replace(name=value)
        elif key == "Process ID":  # the first of a process's four lines; the last one completes it
            self.pid, self.name = number, ""
        elif key == "Used GPU Memory":
            if self.pid is not None and len(self.processes) < 2000:
                self.processes.append(SmiProcess(self.gpu.number, self.pid, self.name, number))
                self.pid = None
        elif "Processes" in path:
            self.name = value if key == "Name" else self.name
        elif "Uncorrectable" in key and "Volatile" in path and number is not None:
            self.health, shown = old._replace(uncorrected=(old.uncorrected or 0) + number), number > 0
        elif key == "GPU Recovery Action":
            self.health, shown = old._replace(recovery=value[:60]), value not in ("None", "N/A")
        elif value == "Yes" and key in _FAULTS and (key != "Pending" or "Remapped Rows" in path):
            self.health, shown = old._replace(faults=old.faults | {key}), True
        if shown:
            self.health = self.health._replace(lines=(*self.health.lines, line)[:6])


_LASTING_FAULTS = frozenset({"Remapping Failure Occurred", "SRAM Threshold Exceeded", "Unrepairable Memory"})
_FAULTS = _LASTING_FAULTS | {"Pending", "Pending Page Blacklist"}


def read_full(lines: Sequence[LogLine]) -> tuple[tuple[SmiReading, ...], tuple[CardHealth, ...]]:
    """Every `nvidia-smi -q` in the text, also a part of one (`-d MEMORY`)."""
    cards: list[_Card] = []
    path: list[tuple[int, str]] = []
    for line in lines:
        text = line.text.rstrip()
        if not text or not (cards or text.startswith("GPU ")):
            continue
        head = re.match(_CARD, text) if text.startswith("GPU ") else None
        if head and len(cards) < MOST_CARDS:
            cards.append(_Card(len({card.health.gpu for card in cards} - {head[1]}), head[1]))
            path = []
            continue
        key, colon, value = text.partition(" : ")
        if not colon:
            if cards and len(text) < 80 and ":" not in text:
                indent = len(text) - len(text.lstrip())
                path = [one for one in path if one[0] < indent][:8]
                path.append((indent, text.strip()))
            continue
        if cards:
            indent = len(text) - len(text.lstrip())
            path = [one for one in path if one[0] < indent]
            cards[-1].take([one[1] for one in path], key.strip(), value.strip(), line)
    if not cards:
        return (), ()
    listed = tuple(process for card in cards for process in card.processes)
    return (SmiReading(tuple(card.gpu for card in cards), listed or None),), tuple(card.health for card in cards)


_CONTEXT_MIB = 1024  # what drivers and contexts take unseen; less than this is not worth a word


class SmiFacts(NamedTuple):
    """Every reading in the text, in order; the last one is what counts."""

    readings: tuple[SmiReading, ...] = ()
    health: tuple[CardHealth, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> SmiReading | None:
        """The last reading that saw a card."""
        return next((one for one in reversed(self.readings) if one.gpus), None)

    @property
    def processes(self) -> tuple[SmiProcess, ...] | None:
        """Who holds memory, after the last listing there is; None where none was printed."""
        return next((one.processes for one in reversed(self.readings) if one.processes is not None), None)


def judge_nvidia_smi(log: Log) -> TextVerdict[SmiFacts]:
    """Facts for other judges, and findings only for what the tool itself calls broken."""
    lines = [line for line in log.lines if not line.process]
    full, health = read_full(lines)
    facts = SmiFacts((*read_tables(lines), *full), health)
    complaints = [
        line for line in lines if any(word in line.text for word in WRITTEN_BY["smi_error"]) and "NVRM" not in line.text
    ]
    found = []
    for name, pattern in _ERRORS.items():
        if shown := [line for line in complaints if re.search(pattern, line.text)]:
            found.append(finding(name, quote(log, shown), said=" ".join(shown[0].text.split())[:200]))
    is_lost = any(one.code is Code.OTHER_HARDWARE for one in found)  # then the table's ERR! says the same again
    found += [one for card in health if (one := _judge_health(log, card))]
    reading = facts.last
    notes = []
    for gpu in reading.gpus if reading else ():
        if gpu.broken and not is_lost:
            why = "nvidia-smi prints ERR! where this card's values should stand"
            found.append(finding("card-broken", quote(log, gpu.lines), number=gpu.number, name=gpu.name or "unknown", why=why))
        elif gpu.uncorrected and not gpu.broken:
            why = f"the card has counted {gpu.uncorrected} uncorrectable memory error(s) since the driver was loaded"
            found.append(finding(
                "card-broken", quote(log, gpu.lines), severity=Severity.WARNING, confidence=0.75, number=gpu.number,
                name=gpu.name or "unknown", why=why,
            ))  # fmt: skip
        listed = [one.mib for one in (reading and reading.processes) or () if one.gpu == gpu.number]
        held = [size for size in listed if size is not None]
        if reading is None or reading.processes is None or gpu.used_mib is None or len(held) < len(listed):
            continue
        if (missing := gpu.used_mib - sum(held)) >= _CONTEXT_MIB:
            notes.append(
                f"GPU {gpu.number}: {missing:,} MiB in use belong to no listed process (another container, another user, "
                "or a process that is ending); inside a container nvidia-smi lists no process of others"
            )
    found.sort(key=lambda one: (one.severity is not Severity.CRITICAL, -one.confidence))
    return TextVerdict(found, facts._replace(notes=tuple(notes)))


_ERRORS = {
    "smi-unreachable": r"Unable to determine the device handle for|GPU is lost|GPU has fallen off the bus",
    "smi-mismatch": r"Failed to initialize NVML: Driver/library version mismatch|NVML library version: \d",
    "smi-no-driver": (
        r"NVIDIA-SMI has failed because it couldn.t communicate|Failed to initialize NVML: (?:Unknown|Driver Not)"
    ),
    "smi-no-devices": r"^\s{0,8}No devices were found\s{0,8}$",
}


def _judge_health(log: Log, card: CardHealth) -> Finding | None:
    severity, confidence = Severity.CRITICAL, 0.9
    if card.faults & _LASTING_FAULTS:
        what = "the card has no way left to repair its memory"
        do = "take the GPU out of service and ask the vendor for a replacement"
    elif card.uncorrected:
        what = f"{card.uncorrected} uncorrectable memory error(s) since the driver was loaded"
        severity, confidence = Severity.WARNING, 0.75
        do = "drain the node and reset the GPU; watch whether they return"
    elif card.recovery not in ("", "None", "N/A"):
        what, confidence = f"the driver asks for: {card.recovery}", 0.85
        do = f"do what the driver asks for ({card.recovery})"
    elif card.faults:
        what, severity, confidence = "a bad memory row waits for its replacement", Severity.WARNING, 0.5
        do = "reset the GPU at the next quiet moment: the row is replaced then"
    else:
        return None
    return finding(
        "card-health", quote(log, card.lines), severity=severity, confidence=confidence, gpu=card.gpu, what=what, do=do
    )

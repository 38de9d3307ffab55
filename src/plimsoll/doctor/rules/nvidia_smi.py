"""Reads nvidia-smi (the table, the health of -q): cards, memory, who holds it; judges what it says is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import WRITTEN_BY, Log, LogLine, TextVerdict, quote
from plimsoll.doctor.words import finding, words
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
    """The health a card reports; empty and 0 where it reports nothing."""

    gpu: str  # its bus address
    uncorrected: int = 0  # memory errors since the driver was loaded
    faults: frozenset[str] = frozenset()  # keys of _FAULTS
    recovery: str = ""
    lines: tuple[LogLine, ...] = ()


_LASTING_FAULTS = frozenset({"Remapping Failure Occurred", "SRAM Threshold Exceeded", "Unrepairable Memory"})
_FAULTS = _LASTING_FAULTS | {"Pending", "Pending Page Blacklist"}


def read_health(lines: Sequence[LogLine]) -> tuple[CardHealth, ...]:
    """The health of each card in every `nvidia-smi -q` in the text, also in a part of one (`-d ECC`)."""
    cards: list[CardHealth] = []
    path: list[tuple[int, str]] = []  # the headings that a line stands under, with their indentation
    for line in lines:
        text = line.text.rstrip()
        if text.startswith("GPU ") and (head := re.match(_CARD, text)) and len(cards) < MOST_CARDS:
            cards.append(CardHealth(head[1]))
            path = []
        if not cards or not text[:1].isspace():
            continue
        indent = len(text) - len(text.lstrip())
        key, colon, value = (part.strip() for part in text.partition(" : "))
        path = [heading for heading in path if heading[0] < indent][:8]
        headings = [heading for _, heading in path]
        path += [] if colon else [(indent, key[:80])]
        card, number = cards[-1], int(value) if value.isascii() and value.isdecimal() and len(value) < 12 else 0
        if "Uncorrectable" in key and "Volatile" in headings and number:
            card = card._replace(uncorrected=card.uncorrected + number)
        elif key == "GPU Recovery Action" and value not in ("None", "N/A"):
            card = card._replace(recovery=value[:60])
        elif value == "Yes" and key in _FAULTS and (key != "Pending" or "Remapped Rows" in headings):
            card = card._replace(faults=card.faults | {key})
        else:
            continue
        cards[-1] = card._replace(lines=(*card.lines, line)[:6])
    return tuple(cards)


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
    facts = SmiFacts(read_tables(lines), read_health(lines))
    complaints = [
        line for line in lines if any(word in line.text for word in WRITTEN_BY["smi_error"]) and "NVRM" not in line.text
    ]
    rows = (row for name, row in words("findings").items() if name.startswith("smi-"))
    matched = ((row, [line for line in complaints if re.search(row["pattern"], line.text)]) for row in rows)
    found = [finding(row, quote(log, told), said=" ".join(told[0].text.split())[:200]) for row, told in matched if told]
    is_lost = any(one.code is Code.OTHER_HARDWARE for one in found)  # then the table's ERR! says the same again
    found += [one for card in facts.health if (one := _judge_health(log, card))]
    reading = facts.last
    notes = []
    for gpu in reading.gpus if reading else ():
        if gpu.broken and not is_lost:
            why = "nvidia-smi prints ERR! where this card's values should stand"
            found.append(finding("card-broken", quote(log, gpu.lines), number=gpu.number, name=gpu.name or "unknown", why=why))
        elif gpu.uncorrected and not gpu.broken and len(gpu.lines) > 1:  # its row of memory is there, too
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


def _judge_health(log: Log, card: CardHealth) -> Finding | None:
    severity, confidence = Severity.CRITICAL, 0.9
    if card.faults & _LASTING_FAULTS:
        what = "the card has no way left to repair its memory"
        do = "take the GPU out of service and ask the vendor for a replacement"
    elif card.uncorrected:
        what = f"{card.uncorrected} uncorrectable memory error(s) since the driver was loaded"
        severity, confidence = Severity.WARNING, 0.75
        do = "drain the node and reset the GPU; watch whether they return"
    elif card.recovery:
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

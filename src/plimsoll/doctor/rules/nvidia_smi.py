"""Reads the output of nvidia-smi (table, -q, csv) and rocm-smi: cards, memory, who holds it; judges what it says is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import SMI, SMI_ERROR, Log, LogLine, TextVerdict, contains_any, quote
from plimsoll.findings import Code, Finding, Remedy, Severity

MOST_READINGS = 500
_VERSIONS = r"NVIDIA-SMI\s{1,8}\S{1,24}\s{1,24}Driver Version:\s{0,8}(\S{1,24})(?:\s{1,24}CUDA Version:\s{0,8}(\S{1,12}))?"
_BUS = r"\b([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\b"
_MEMORY = r"(\d{1,9})MiB\s{0,8}/\s{0,8}(\d{1,9})MiB"
_PROCESS = (
    r"^\|\s{1,8}(?P<gpu>\d{1,3})\s{1,12}(?:(?P<gi>N/A|\d{1,3})\s{1,8}(?P<ci>N/A|\d{1,3})\s{1,24})?(?P<pid>\d{1,10})\s{1,12}"
    r"(?P<type>M\+C|C\+G|[CGM])\s{1,8}(?P<name>\S.{0,200}?)\s{1,120}(?:(?P<mib>\d{1,9})MiB|N/A|Insufficient\S{0,4})\s{0,8}\|"
)
_MIG = r"^\|\s{1,6}(\d{1,3})\s{1,6}(\d{1,3})\s{1,6}(\d{1,3})\s{1,6}(\d{1,3})\s{1,6}\|\s{1,40}" + _MEMORY


class SmiGpu(NamedTuple):
    """One card; what the tool does not say (N/A, Not Supported, ERR!) is None."""

    number: int | None  # as nvidia-smi counts the cards
    name: str
    used_mib: int | None = None
    total_mib: int | None = None
    util_percent: int | None = None
    temperature_c: int | None = None
    persistence: bool | None = None
    bus: str | None = None
    uncorrected: int | None = None  # volatile uncorrectable ECC errors
    mig: bool | None = None
    used_percent: int | None = None  # rocm-smi gives only this
    broken: bool = False  # the tool printed ERR!
    lines: tuple[LogLine, ...] = ()


class SmiProcess(NamedTuple):
    """One process on a card."""

    gpu: int | None
    pid: int
    name: str
    mib: int | None


class MigSlice(NamedTuple):
    """One MIG device: the memory of a slice, not of the card."""

    gpu: int
    instance: int
    device: int
    used_mib: int
    total_mib: int


class SmiReading(NamedTuple):
    """One printout."""

    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[SmiGpu, ...] = ()
    processes: tuple[SmiProcess, ...] | None = None  # None: no listing was printed; (): it says there are none
    mig: tuple[MigSlice, ...] = ()


def read_tables(lines: Sequence[LogLine]) -> tuple[SmiReading, ...]:
    """Every classic table in the text; `watch nvidia-smi` gives several."""
    readings: list[SmiReading] = []
    row: SmiGpu | None = None  # a card whose second row is still to come
    for line in lines:
        text = line.text.strip()
        if not text.startswith("|"):
            continue
        if "NVIDIA-SMI" in text:
            found = re.search(_VERSIONS, text)
            readings.append(SmiReading(found[1], found[2]) if found else SmiReading())
            del readings[:-MOST_READINGS]
            row = None
            continue
        if not readings:
            if not re.search(_BUS, text) and "Processes:" not in text:
                continue
            readings.append(SmiReading())  # the head was cut off
        first = _first_row(text, line)
        if first is not None:
            row = first
            readings[-1] = readings[-1]._replace(gpus=(*readings[-1].gpus, first)[:256])
        elif row is not None:
            row, done = _second_row(text, line, row)
            readings[-1] = readings[-1]._replace(gpus=(*readings[-1].gpus[:-1], row))
            row = None if done else row
        else:
            readings[-1] = _other_row(text, readings[-1])
    return tuple(reading for reading in readings if reading != SmiReading())


def _first_row(text: str, line: LogLine) -> SmiGpu | None:
    cells = text.strip("|").split("|")
    bus = re.search(_BUS, cells[1]) if len(cells) >= 3 else None
    head = (
        re.match(r"\s{0,6}(\d{1,3})\s{1,6}(\S.{0,80}?)\s{0,40}(On|Off|N/A|WDDM|TCC|MCDM|ERR!)?\s{0,6}$", cells[0])
        if bus
        else None
    )
    if bus is None or head is None:
        return None
    errors = cells[2].strip()
    return SmiGpu(
        number=int(head[1]), name=head[2].strip(), persistence={"On": True, "Off": False}.get(head[3] or ""), bus=bus[1],
        uncorrected=int(errors) if errors.isascii() and errors.isdecimal() and len(errors) < 12 else None,
        broken="ERR!" in text, lines=(line,),
    )  # fmt: skip


def _second_row(text: str, line: LogLine, gpu: SmiGpu) -> tuple[SmiGpu, bool]:
    """Temperature, memory, use; then the row with the MIG mode. The second value says that the card is complete."""
    cells = text.strip("|").split("|")
    if len(cells) < 3 or text.startswith(("|=", "|-")):
        return gpu, text[1:2] in ("=", "-")
    if not cells[0].strip() and not cells[1].strip():
        mode = cells[2].strip()
        return gpu._replace(mig={"Enabled": True, "Disabled": False}.get(mode.rstrip("*"))), True
    memory = re.search(_MEMORY, cells[1])
    heat = re.search(r"\b(\d{1,3})C\b", cells[0])
    use = re.match(r"\s{0,20}(\d{1,3})%", cells[2])
    return gpu._replace(
        used_mib=int(memory[1]) if memory else None,
        total_mib=int(memory[2]) if memory else None,
        temperature_c=int(heat[1]) if heat else None,
        util_percent=int(use[1]) if use else None,
        broken=gpu.broken or "ERR!" in text or "GPU is lost" in text,
        lines=(*gpu.lines, line),
    ), False


def _other_row(text: str, reading: SmiReading) -> SmiReading:
    """A MIG device, a process, or the words that there is none."""
    if "No running processes found" in text:
        return reading._replace(processes=reading.processes or ())
    slice_ = re.match(_MIG, text)
    if slice_:
        gpu, instance, _, device, used, total = map(int, slice_.groups())
        return reading._replace(mig=(*reading.mig, MigSlice(gpu, instance, device, used, total))[:256])
    if "Processes:" in text:
        return reading._replace(processes=reading.processes or ())
    found = re.match(_PROCESS, text)
    if found is None or (reading.processes is None and not reading.gpus):
        return reading
    process = SmiProcess(int(found["gpu"]), int(found["pid"]), found["name"], int(found["mib"]) if found["mib"] else None)
    return reading._replace(processes=(*(reading.processes or ()), process)[:2000])


def read_csv(lines: Sequence[LogLine]) -> tuple[SmiReading, ...]:
    """`--query-gpu` and `--query-compute-apps` with their header; rows without one are not guessed at."""
    readings: list[SmiReading] = []
    header: list[str] = []
    for line in lines:
        if not header and not (
            "," in line.text and ("memory." in line.text or "pid" in line.text or "utilization." in line.text)
        ):
            continue
        cells = [cell.strip() for cell in line.text.split(",")]
        if len(cells) < 2 or len(cells) > 200:
            header = []
            continue
        names = [re.sub(r"\s{0,4}\[.{0,8}\]$", "", cell) for cell in cells]
        if {"memory.used", "memory.total", "utilization.gpu", "memory.free"} & set(names):
            header = names
            readings.append(SmiReading())
        elif "pid" in names and {"used_memory", "used_gpu_memory", "process_name", "name"} & set(names):
            header = names
            readings.append(SmiReading(processes=()))
        elif header and len(cells) == len(header) and readings:
            readings[-1] = _csv_row(dict(zip(header, cells, strict=True)), readings[-1], line)
        else:
            header = []
        del readings[:-MOST_READINGS]
    return tuple(reading for reading in readings if reading.gpus or reading.processes is not None)


def _number(text: str | None) -> int | None:
    found = re.match(r"(\d{1,12})", text or "")
    return int(found[1]) if found else None


def _csv_row(row: dict[str, str], reading: SmiReading, line: LogLine) -> SmiReading:
    if reading.processes is not None:
        pid = _number(row.get("pid"))
        if pid is None:
            return reading
        name = row.get("process_name") or row.get("name", "")
        size = _number(row.get("used_memory") or row.get("used_gpu_memory"))
        return reading._replace(processes=(*reading.processes, SmiProcess(None, pid, name, size))[:2000])
    gpu = SmiGpu(
        number=_number(row.get("index", str(len(reading.gpus)))), name=row.get("name") or row.get("gpu_name", ""),
        used_mib=_number(row.get("memory.used")), total_mib=_number(row.get("memory.total")),
        util_percent=_number(row.get("utilization.gpu")), temperature_c=_number(row.get("temperature.gpu")),
        persistence={"Enabled": True, "Disabled": False}.get(row.get("persistence_mode", "")), bus=row.get("pci.bus_id"),
        uncorrected=_number(row.get("ecc.errors.uncorrected.volatile.total")),
        broken=any(value in ("[GPU is lost]", "[Unknown Error]", "ERR!") for value in row.values()), lines=(line,),
    )  # fmt: skip
    return reading._replace(gpus=(*reading.gpus, gpu)[:256], driver=row.get("driver_version") or reading.driver)


def read_rocm(lines: Sequence[LogLine]) -> tuple[SmiReading, ...]:
    """rocm-smi's short table, and `--showmeminfo vram`."""
    gpus: dict[int, SmiGpu] = {}
    table = False
    for line in lines:
        text = line.text
        if "VRAM%" in text:
            table = True
        elif "GPU[" in text and "VRAM Total" in text:
            found = re.search(r"GPU\[(\d{1,3})\]\s{0,16}:\s{0,8}VRAM Total (Used )?Memory \(B\): (\d{1,18})", text)
            if found:
                index, mib = int(found[1]), int(found[3]) >> 20
                gpu = gpus.get(index, SmiGpu(index, "", lines=(line,)))
                gpus[index] = gpu._replace(used_mib=mib) if found[2] else gpu._replace(total_mib=mib)
        elif table and "%" in text:
            row = re.match(r"\s{0,4}(\d{1,3})\s.{0,200}?\s(\d{1,3})%\s{1,12}(\d{1,3})%\s{0,8}$", text)
            if row and len(gpus) < 256:
                heat = re.search(r"\b(\d{1,3})\.\d°?[cC]\b", text)
                old = gpus.get(int(row[1]), SmiGpu(int(row[1]), "", lines=(line,)))
                gpus[int(row[1])] = old._replace(
                    used_percent=int(row[2]), util_percent=int(row[3]), temperature_c=int(heat[1]) if heat else None
                )
    return (SmiReading(gpus=tuple(gpus.values())),) if gpus else ()


MOST_CARDS = 512
_CARD = r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s{0,8}$"


class CardHealth(NamedTuple):
    """The health a card reports; False and None where it reports nothing."""

    gpu: str  # its bus address
    uncorrected: int | None = None  # since the driver was loaded
    uncorrected_ever: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    threshold: bool = False
    unrepairable: bool = False
    recovery: str = ""
    lines: tuple[LogLine, ...] = ()


class _Card:
    """One card's part of the printout."""

    def __init__(self, index: int, bus: str) -> None:
        self.gpu = SmiGpu(index, "", bus=bus)
        self.health = CardHealth(bus)
        self.processes: list[SmiProcess] = []
        self.pid: int | None = None
        self.name = ""

    def take(self, path: list[str], key: str, value: str, line: LogLine) -> None:
        """One `key : value` line, with the headings it stands under."""
        number = int(value.split()[0]) if re.match(r"\d{1,12}(?: |$)", value) else None
        if "FB Memory Usage" in path and key in ("Total", "Used"):
            gpu = self.gpu._replace(lines=(*self.gpu.lines, line)[:6])
            self.gpu = gpu._replace(total_mib=number) if key == "Total" else gpu._replace(used_mib=number)
        elif key == "Product Name":
            self.gpu = self.gpu._replace(name=value)
        elif key == "Persistence Mode":
            self.gpu = self.gpu._replace(persistence=value == "Enabled")
        elif key == "GPU Current Temp":
            self.gpu = self.gpu._replace(temperature_c=number)
        elif key == "Gpu" and "Utilization" in path:
            self.gpu = self.gpu._replace(util_percent=number)
        elif "Processes" in path or key in ("Process ID", "Used GPU Memory"):
            self.process(key, value, number)
        else:
            self.errors(path, key, value, number, line)

    def process(self, key: str, value: str, number: int | None) -> None:
        """The four lines of a process; the last one completes it."""
        if key == "Process ID":
            self.pid, self.name = number, ""
        elif key == "Name":
            self.name = value
        elif key == "Used GPU Memory" and self.pid is not None and len(self.processes) < 2000:
            self.processes.append(SmiProcess(self.gpu.number, self.pid, self.name, number))
            self.pid = None

    def errors(self, path: list[str], key: str, value: str, number: int | None, line: LogLine) -> None:
        old = self.health
        if "Uncorrectable" in key and ("Volatile" in path or "Aggregate" in path) and number is not None:
            if "Volatile" in path:
                self.health = old._replace(uncorrected=(old.uncorrected or 0) + number)
            else:
                self.health = old._replace(uncorrected_ever=(old.uncorrected_ever or 0) + number)
            shown = number > 0 and "Volatile" in path
        elif key == "GPU Recovery Action":
            self.health, shown = old._replace(recovery=value[:60]), value not in ("None", "N/A")
        else:
            shown = value == "Yes"
            if not shown:
                return
            if (key == "Pending" and "Remapped Rows" in path) or key == "Pending Page Blacklist":
                self.health = old._replace(remap_pending=True)
            elif key == "Remapping Failure Occurred":
                self.health = old._replace(remap_failed=True)
            elif key == "SRAM Threshold Exceeded":
                self.health = old._replace(threshold=True)
            elif key == "Unrepairable Memory":
                self.health = old._replace(unrepairable=True)
            else:
                return
        if shown:
            self.health = self.health._replace(lines=(*self.health.lines, line)[:6])


def read_full(lines: Sequence[LogLine]) -> tuple[tuple[SmiReading, ...], tuple[CardHealth, ...]]:
    """Every `nvidia-smi -q` in the text, also a part of one (`-d MEMORY`)."""
    cards: list[_Card] = []
    driver: str | None = None
    cuda: str | None = None
    path: list[tuple[int, str]] = []
    for line in lines:
        text = line.text.rstrip()
        if not text or not (cards or text.startswith("GPU ") or " Version " in text):
            continue
        head = re.match(_CARD, text) if text.startswith("GPU ") else None
        if head and len(cards) < MOST_CARDS:
            cards.append(_Card(len({card.gpu.bus for card in cards} - {head[1]}), head[1]))
            path = []
            continue
        key, colon, value = text.partition(" : ")
        if not colon:
            if cards and len(text) < 80 and ":" not in text:
                indent = len(text) - len(text.lstrip())
                path = [one for one in path if one[0] < indent][:8]
                path.append((indent, text.strip()))
            continue
        name, value = key.strip(), value.strip()
        if name == "Driver Version":
            driver = value[:24]
        elif name == "CUDA Version":
            cuda = value[:12]
        elif cards:
            indent = len(text) - len(text.lstrip())
            path = [one for one in path if one[0] < indent]
            cards[-1].take([one[1] for one in path], name, value, line)
    if not cards:
        return (), ()
    listed = tuple(process for card in cards for process in card.processes)
    reading = SmiReading(driver, cuda, tuple(card.gpu for card in cards), listed or None)
    return (reading,), tuple(card.health for card in cards)


_NOT_MEMORY = ("memory settings: nothing ran out",)
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
    if not contains_any(log.lines, (*SMI, *SMI_ERROR)):
        return TextVerdict([], SmiFacts())
    lines = [line for line in log.lines if not line.process]
    full, health = read_full(lines)
    readings = (*read_tables(lines), *full, *read_csv(lines), *read_rocm(lines))
    facts = SmiFacts(readings, health)
    errors = _tool_errors(log, lines)
    lost = any(one.code is Code.OTHER_HARDWARE for one in errors)  # then the table's ERR! says the same again
    cards = [one for card in health if (one := _judge_health(log, card))] + _judge_table(log, facts, lost=lost)
    found = errors + cards
    found.sort(key=lambda one: (one.severity is not Severity.CRITICAL, -one.confidence))
    reading = facts.last
    notes = []
    for gpu in reading.gpus if reading else ():
        missing = unlisted_mib(reading, gpu) if reading else None
        if missing is not None and missing >= _CONTEXT_MIB:
            notes.append(
                f"GPU {gpu.number}: {missing:,} MiB in use belong to no listed process (another container, another user, "
                "or a process that is ending); inside a container nvidia-smi lists no process of others"
            )
    return TextVerdict(found, facts._replace(notes=tuple(notes)))


def unlisted_mib(reading: SmiReading, gpu: SmiGpu) -> int | None:
    """Memory in use on a card that no listed process holds; None where the listing or a figure is missing."""
    if reading.processes is None or gpu.used_mib is None:
        return None
    held = [process.mib for process in reading.processes if process.gpu == gpu.number]
    if any(size is None for size in held):
        return None
    return max(0, gpu.used_mib - sum(size for size in held if size is not None))


class _ToolError(NamedTuple):
    pattern: str
    code: Code
    confidence: float
    title: str
    do: str
    why: str


_ERRORS = (
    _ToolError(
        r"Unable to determine the device handle for|GPU is lost|GPU has fallen off the bus",
        Code.OTHER_HARDWARE,
        0.9,
        "nvidia-smi cannot reach a GPU any more",
        "reboot the machine; look for Xid lines in the kernel log; if it returns, check power, heat and seating",
        "the card does not answer its driver",
    ),
    _ToolError(
        r"Failed to initialize NVML: Driver/library version mismatch|NVML library version: \d",
        Code.OTHER_INSTALLATION,
        0.9,
        "the driver's kernel module and its libraries are of different versions",
        "reboot, or reload the NVIDIA modules",
        "the libraries were upgraded under a loaded module; no program can use the GPU until then",
    ),
    _ToolError(
        r"NVIDIA-SMI has failed because it couldn.t communicate|Failed to initialize NVML: (?:Unknown|Driver Not)",
        Code.OTHER_INSTALLATION,
        0.8,
        "the NVIDIA driver is not running, or the container has lost its GPU",
        "load or reinstall the driver; in a container start it again (after a cgroup reload it loses its devices)",
        "no program can use the GPU until then",
    ),
    _ToolError(
        r"^\s{0,8}No devices were found\s{0,8}$",
        Code.OTHER_HARDWARE,
        0.8,
        "nvidia-smi finds no GPU",
        "check that the container was given GPUs, and the kernel log for RmInitAdapter and Xid lines",
        "the driver runs and sees no usable card",
    ),
)


def _tool_errors(log: Log, lines: list[LogLine]) -> list[Finding]:
    shown = [line for line in lines if any(word in line.text for word in SMI_ERROR) and "NVRM" not in line.text]
    findings = []
    for said in _ERRORS:
        found = [line for line in shown if re.search(said.pattern, line.text)]
        if found:
            findings.append(
                Finding(
                    code=said.code, severity=Severity.CRITICAL, confidence=said.confidence, title=said.title,
                    because=f"nvidia-smi says: {' '.join(found[0].text.split())[:200]}", evidence=quote(log, found),
                    remedy=(Remedy(said.do, said.why),), not_a_remedy=_NOT_MEMORY,
                ),
            )  # fmt: skip
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
                code=Code.OTHER_HARDWARE, severity=Severity.CRITICAL if gpu.broken else Severity.WARNING, confidence=confidence,
                title=f"GPU {gpu.number} ({gpu.name or 'unknown'}) is not healthy", because=f"GPU {gpu.number}: {why}.",
                evidence=quote(log, gpu.lines),
                remedy=(
                    Remedy(
                        "drain the node, reset the GPU or reboot, and look at nvidia-smi -q -d ECC,ROW_REMAPPER",
                        "a fault stays",
                    ),
                ),
                not_a_remedy=_NOT_MEMORY,
            ),
        )  # fmt: skip
    return findings


def _judge_health(log: Log, card: CardHealth) -> Finding | None:
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
        code=Code.OTHER_HARDWARE, severity=severity, confidence=confidence, title=f"GPU {card.gpu}: {what}",
        because=f"nvidia-smi -q says of GPU {card.gpu}: {what}.", evidence=quote(log, card.lines),
        remedy=(Remedy(do, "memory faults of a card return until then"),), not_a_remedy=_NOT_MEMORY,
    )  # fmt: skip

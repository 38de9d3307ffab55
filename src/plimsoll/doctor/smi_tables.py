"""Reads nvidia-smi's table (all layouts, MIG, processes), its csv queries, and rocm-smi's table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.domain.log import Line

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
    lines: tuple[Line, ...] = ()


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


def read_tables(lines: Sequence[Line]) -> tuple[SmiReading, ...]:
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


def _first_row(text: str, line: Line) -> SmiGpu | None:
    """Index, name, persistence mode, bus, uncorrected errors."""
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
        number=int(head[1]),
        name=head[2].strip(),
        persistence={"On": True, "Off": False}.get(head[3] or ""),
        bus=bus[1],
        uncorrected=int(errors) if errors.isascii() and errors.isdecimal() and len(errors) < 12 else None,
        broken="ERR!" in text,
        lines=(line,),
    )


def _second_row(text: str, line: Line, gpu: SmiGpu) -> tuple[SmiGpu, bool]:
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


def read_csv(lines: Sequence[Line]) -> tuple[SmiReading, ...]:
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


def _csv_row(row: dict[str, str], reading: SmiReading, line: Line) -> SmiReading:
    if reading.processes is not None:
        pid = _number(row.get("pid"))
        if pid is None:
            return reading
        name = row.get("process_name") or row.get("name", "")
        size = _number(row.get("used_memory") or row.get("used_gpu_memory"))
        return reading._replace(processes=(*reading.processes, SmiProcess(None, pid, name, size))[:2000])
    gpu = SmiGpu(
        number=_number(row.get("index", str(len(reading.gpus)))),
        name=row.get("name") or row.get("gpu_name", ""),
        used_mib=_number(row.get("memory.used")),
        total_mib=_number(row.get("memory.total")),
        util_percent=_number(row.get("utilization.gpu")),
        temperature_c=_number(row.get("temperature.gpu")),
        persistence={"Enabled": True, "Disabled": False}.get(row.get("persistence_mode", "")),
        bus=row.get("pci.bus_id"),
        uncorrected=_number(row.get("ecc.errors.uncorrected.volatile.total")),
        broken=any(value in ("[GPU is lost]", "[Unknown Error]", "ERR!") for value in row.values()),
        lines=(line,),
    )
    return reading._replace(gpus=(*reading.gpus, gpu)[:256], driver=row.get("driver_version") or reading.driver)


def read_rocm(lines: Sequence[Line]) -> tuple[SmiReading, ...]:
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

"""Reads `nvidia-smi -q`: memory, processes, and what a card says about its own errors and repairs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.smi_tables import SmiGpu, SmiProcess, SmiReading
from plimsoll.domain.log import Line

MOST_CARDS = 512
_CARD = r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s{0,8}$"


class Health(NamedTuple):
    """What a card says about itself; False and None where it says nothing."""

    gpu: str  # its bus address
    uncorrected: int | None = None  # since the driver was loaded
    uncorrected_ever: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    threshold: bool = False
    unrepairable: bool = False
    recovery: str = ""
    lines: tuple[Line, ...] = ()


class _Card:
    """One card's part of the printout."""

    def __init__(self, index: int, bus: str) -> None:
        self.gpu = SmiGpu(index, "", bus=bus)
        self.health = Health(bus)
        self.processes: list[SmiProcess] = []
        self.pid: int | None = None
        self.name = ""

    def take(self, path: list[str], key: str, value: str, line: Line) -> None:
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

    def errors(self, path: list[str], key: str, value: str, number: int | None, line: Line) -> None:
        """Errors and repairs."""
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


def read_full(lines: Sequence[Line]) -> tuple[tuple[SmiReading, ...], tuple[Health, ...]]:
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

"""What this machine says of an engine on it: found by its port, with its limit and its cards; and questions that may hang."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.guard.daemon.engine_look import EngineWatcher, LookLimits
from plimsoll.guard.daemon.host import FIRST_NAMESPACE, Machine, SameHost, SlowQuestion
from plimsoll.guard.judge.look import CardState, Look, Reach
from tests.fakes import eventually
from tests.net.raw_server import by_path, free_port, raw_server

LOOK = Look(1.0, 2.0, Reach.ANSWERS, figures={"running": 3.0})
XID = "3,2,2,-;NVRM: Xid (PCI:0000:{}:00): {}, pid=<unknown>, GPU has fallen off the bus.\n"
LINE = "   0: 0100007F:{:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 {} 1 0 100 0 0 10 0\n"


def process(root: Path, pid: int, parent: int, resident_kb: int, name: str = "python3", started: int = 50) -> Path:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    rest = " ".join(["0"] * 17)
    (folder / "stat").write_text(f"{pid} (a name) with ) in it) S {parent} {rest} {started} 0", encoding="utf-8")
    (folder / "status").write_text(f"Name:\tx\nRssAnon:\t{resident_kb} kB\n", encoding="utf-8")
    (folder / "cgroup").write_text("0::/pod/box\n", encoding="utf-8")
    (folder / "cmdline").write_bytes(b"/usr/bin/" + name.encode() + b"\0-m\0vllm\0")
    (folder / "comm").write_text(f"{name}\n", encoding="utf-8")
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A server on port 8000 with a worker, another engine on 8001, and a stranger."""
    net = tmp_path / "proc" / "net"
    net.mkdir(parents=True)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    (net / "tcp").write_text(head + LINE.format(8000, 4242) + LINE.format(8001, 4343), encoding="utf-8")
    (process(tmp_path, 100, 1, 1000) / "fd" / "7").symlink_to("socket:[4242]")
    process(tmp_path, 101, 100, 2000)
    process(tmp_path, 102, 101, 4000)
    process(tmp_path, 200, 1, 9000)
    (process(tmp_path, 300, 1, 100) / "fd" / "7").symlink_to("socket:[4343]")
    box = tmp_path / "sys" / "fs" / "cgroup" / "pod" / "box"
    box.mkdir(parents=True)
    (box / "memory.max").write_text("max\n", encoding="utf-8")
    (box.parent / "memory.max").write_text("68719476736\n", encoding="utf-8")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kmsg").write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1\n", encoding="utf-8")
    return tmp_path


def fresh(root: Path, nvml: Any = None, *, deadline_s: float = 1.5) -> Machine:
    """A machine that is read at every look."""
    return Machine(root, nvml or library(), deadline_s=deadline_s, keep_s=0.0)


def seen(here: SameHost, look: Look = LOOK) -> Look:
    """One look with what the machine says."""
    return asyncio.run(here.add_to(look))


def library(cards: dict[str, dict[int, int | None]] | None = None, *, ecc: Callable[[], int] | None = None) -> SimpleNamespace:
    """NVML with these cards: what each process holds there. It counts how often it was initialised."""

    class NVMLError(Exception):
        pass

    def count(name: str) -> None:
        setattr(nvml, name, getattr(nvml, name) + 1)

    def errors(*_: object) -> int:
        if ecc is None:
            raise NVMLError("not supported")
        return ecc()

    def held(bus: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in (cards or {})[bus].items()]

    nvml: SimpleNamespace = SimpleNamespace(
        begun=0, ended=0, NVMLError=NVMLError, NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: count("begun"), nvmlShutdown=lambda: count("ended"), nvmlDeviceGetCount=lambda: len(cards or {}),
        nvmlDeviceGetHandleByIndex=lambda index: sorted(cards or {})[index],
        nvmlDeviceGetPciInfo=lambda bus: SimpleNamespace(busId=f"00000000:{bus.upper()}:00.0".encode()),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80 << 30, free=5 << 30),
        nvmlDeviceGetComputeRunningProcesses=held, nvmlDeviceGetTotalEccErrors=errors,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=83, memory=40),
    )  # fmt: skip
    return nvml


def end_server(root: Path) -> None:
    for name in ("100", "101", "102"):
        (root / "proc" / name).rename(root / f"gone-{name}")


def write_xids(root: Path, *xids: int) -> None:
    with (root / "dev" / "kmsg").open("a", encoding="utf-8") as file:
        file.write("".join(XID.format("3b", xid) for xid in xids))


# Processes
def test_the_server_is_found_by_its_port_also_after_its_restart(machine: Path) -> None:
    """The memory of its tree and the tightest limit; who has its old number later is not it; of none here nothing is told."""
    found = seen(SameHost(8000, fresh(machine)))
    assert found.figures == {"running": 3.0, "host_resident": 7000 * 1024.0, "host_limit": 64.0 * 2**30}
    assert found.cards == ()
    assert seen(SameHost(8002, fresh(machine))) == LOOK
    assert seen(SameHost(8000, fresh(machine / "nowhere"))) == LOOK
    here = SameHost(8000, fresh(machine))
    seen(here)
    end_server(machine)
    new = process(machine, 500, 1, 500)
    (new / "fd" / "3").symlink_to("socket:[4242]")
    assert seen(here).figures["host_resident"] == 500 * 1024.0
    new.rename(machine / "gone-500")
    process(machine, 500, 1, 12345, started=99)
    assert "host_resident" not in seen(here).figures


@pytest.mark.parametrize("name", ["docker-proxy", "ssh", "haproxy", "nginx", "envoy", "kubectl"])
def test_a_proxy_is_not_the_engine(name: str, machine: Path) -> None:
    """What listens there and is neither Python nor on a card says nothing: the page's own figure stays, and no card is told."""
    net = machine / "proc" / "net" / "tcp"
    net.write_text(net.read_text(encoding="utf-8") + LINE.format(9000, 4444), encoding="utf-8")
    (process(machine, 400, 1, 77, name) / "fd" / "3").symlink_to("socket:[4444]")
    look = LOOK._replace(figures={"host_resident": 5.0})
    here = SameHost(9000, fresh(machine, library({"3b": {}})))
    assert seen(here, look) == look
    write_xids(machine, 79)
    assert seen(here, look) == look
    on_card = seen(SameHost(9000, fresh(machine, library({"3b": {400: 1}}))), look)
    assert on_card.figures["host_resident"] == 77 * 1024.0
    assert [card.name for card in on_card.cards] == ["3b:00"]


def test_a_process_is_known_by_its_start_also_after_the_clock_was_set(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then moves the time of its boot: a page from before shows the old one, a new process the new one."""
    stat, ahead_s = machine / "proc" / "stat", 0.0
    monkeypatch.setattr(
        "plimsoll.guard.daemon.host.time", SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + ahead_s)
    )
    stat.write_text("cpu 1 2\nbtime 1000\n", encoding="utf-8")
    here, ticks_s = SameHost(8000, fresh(machine)), 50 / os.sysconf("SC_CLK_TCK")
    before = LOOK._replace(started_unix_s=1000 + ticks_s)
    assert seen(here, before).local_start == 1000 + ticks_s
    stat.write_text("btime 4600\n", encoding="utf-8")
    ahead_s = 3600.0
    assert seen(here, before).local_start == 1000 + ticks_s
    assert seen(here, before._replace(started_unix_s=4600 + ticks_s)).local_start == 4600 + ticks_s
    assert seen(here, before._replace(started_unix_s=2000.0)).local_start == 1000 + ticks_s, "a proxy's page of elsewhere"


def test_a_closed_port_and_a_figure_that_is_not_known_are_no_guess(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets may be passed on without a listener; while /proc hangs the page's smaller figure is not the tree's."""
    look = LOOK._replace(figures={"host_resident": 5.0})
    one = fresh(machine, deadline_s=0.1)
    held = SameHost(8000, one)
    assert seen(held, look).figures["host_resident"] == 7000 * 1024.0
    go = threading.Event()

    def hangs() -> dict[int, Any]:
        go.wait(5)
        return {}

    monkeypatch.setattr(one.servers, "_ask", hangs)
    assert "host_resident" not in seen(held, look).figures
    assert seen(SameHost(8000, one), look).figures == {"host_resident": 5.0}
    go.set()
    net, refused = machine / "proc" / "net" / "tcp", Look(1.0, 2.0, Reach.REFUSED)
    here, passed_on, new = (SameHost(port, fresh(machine)) for port in (8000, 8080, 8000))
    for host in (here, passed_on):
        seen(host)
    assert seen(here, refused).is_port_open is True
    net.write_text("  sl\n", encoding="utf-8")
    assert [seen(host, refused).is_port_open for host in (here, passed_on, new)] == [False, None, None]


def test_a_real_server_of_this_machine_is_found() -> None:
    """The kernel's own /proc: a child of ours that listens and holds 64 MiB."""
    port = free_port()
    code = f"import socket, sys; held = bytearray(64 << 20); s = socket.create_server(('127.0.0.1', {port}))"
    code += "; print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    here = SameHost(port)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        resident = seen(here).figures["host_resident"]
    finally:
        child.kill()
        child.communicate()
        here.close()
    assert 64 << 20 <= resident < 256 << 20


def test_one_walk_serves_all_engines_of_the_machine(machine: Path) -> None:
    """/proc is walked when an engine is first looked for, then once within the interval for all; NVML is initialised once."""
    nvml = library({"3b": {102: 1}, "5e": {300: 2}})
    one = Machine(machine, nvml, keep_s=60.0)
    walks: list[float] = []
    walk = one.servers._ask
    one.servers._ask = lambda: walks.append(time.monotonic()) or walk()  # type: ignore[func-returns-value]
    engines = [SameHost(8000, one), SameHost(8001, one)]
    found = [seen(engine) for _ in range(5) for engine in engines]
    assert (len(walks), nvml.begun) == (len(engines), 1)
    assert [look.figures["host_resident"] for look in found[:2]] == [7000 * 1024.0, 100 * 1024.0]
    assert [[card.name for card in look.cards] for look in found[:2]] == [["3b:00"], ["5e:00"]]


# Cards
def test_cards_are_those_its_processes_use_and_their_errors_count_from_when_guard_looks(machine: Path) -> None:
    """Numbers of another namespace tie nothing; Xids are told once to each engine; without ECC nothing is known."""
    nvml = library({"3b": {102: 60 << 30, 101: 1 << 30, 900: 7}, "5e": {200: 5}, "af": {300: 1}})
    (card,) = seen(SameHost(8000, fresh(machine, nvml))).cards
    assert card == CardState("3b:00", (), None, 80 << 30, 5 << 30, 61 << 30, 0.83)
    unknown = library({"3b": {102: None}})
    assert seen(SameHost(8000, fresh(machine, unknown))).cards == (CardState("3b:00", (), None, 80 << 30, 5 << 30, None, 0.83),)
    nvml = library({"3b": {77_000: 1}, "5e": {}})
    one = fresh(machine, nvml)
    first = SameHost(8000, one)
    assert [card.name for card in seen(first).cards] == ["3b:00", "5e:00"]
    second = SameHost(8001, one)
    assert [seen(engine).cards for engine in (second, first)] == [(), ()]
    second.close()
    assert [card.name for card in seen(first).cards] == ["3b:00", "5e:00"]
    folder = machine / "proc" / "self" / "ns"
    folder.mkdir(parents=True)
    (folder / "pid").symlink_to(FIRST_NAMESPACE)  # process numbers are the driver's own
    assert seen(SameHost(8000, fresh(machine, nvml))).cards == ()
    counts = iter([2, 2, 5, 1])
    here = SameHost(8000, fresh(machine, library({"3b": {102: 1}}, ecc=lambda: next(counts))))
    assert [seen(here).cards[0].uncorrectable for _ in range(4)] == [0, 0, 3, 1]
    assert seen(SameHost(8000, fresh(machine, library({"3b": {102: 1}})))).cards[0].uncorrectable is None
    one = fresh(machine, library({"3b": {102: 1}, "5e": {300: 2}}))
    first, second = SameHost(8000, one), SameHost(8001, one)
    assert [seen(engine).cards[0].xids for engine in (first, second)] == [(), ()]
    write_xids(machine, 79, 154)
    assert [seen(engine).cards[0].xids for engine in (second, first, first)] == [(), (79, 154), ()]


@pytest.mark.parametrize("reach", [Reach.REFUSED, Reach.SILENT, Reach.NONSENSE])
def test_a_card_that_takes_the_engine_down_is_seen(reach: Reach, machine: Path) -> None:
    """The engine is gone and its card with it: the Xid is told all the same, and no figures are made up."""
    cards: dict[str, dict[int, int | None]] = {"3b": {102: 1}}
    here = SameHost(8000, fresh(machine, library(cards)))
    seen(here)
    end_server(machine)
    cards["3b"].clear()
    write_xids(machine, 79)
    found = seen(here, Look(1.0, 2.0, reach, "gone"))
    assert [(card.name, card.xids) for card in found.cards] == [("3b:00", (79,))]
    assert found.figures == {}


def test_a_driver_that_hangs_costs_one_deadline_and_hides_nothing_else(machine: Path) -> None:
    """It is not asked again until it comes back, and is said; processes and the kernel's log are read all the while."""
    nvml, go, calls = library({"3b": {102: 1}}), threading.Event(), list[str]()
    here = SameHost(8000, fresh(machine, nvml, deadline_s=0.3))
    seen(here)
    assert here.note == ""
    memory = nvml.nvmlDeviceGetMemoryInfo

    def hangs(bus: str) -> object:
        calls.append(bus)
        go.wait(60)
        return memory(bus)

    nvml.nvmlDeviceGetMemoryInfo = hangs
    began = time.monotonic()
    seen(here)
    assert time.monotonic() - began < 50
    write_xids(machine, 79)
    found = [seen(here) for _ in range(5)]
    assert len(calls) == 1
    assert "the GPU driver on this machine does not answer" in here.note
    assert found[0].cards == (CardState("3b:00", (79,)),)
    assert found[0].figures["host_resident"] == 7000 * 1024.0
    go.set()
    eventually(lambda: here.note == "")
    assert seen(here).cards[0].total == 80 << 30


async def test_the_loop_goes_on_while_the_driver_hangs(machine: Path) -> None:
    """Another engine is looked at in its time while this one's driver is waited for."""
    nvml, go = library({"3b": {102: 1}}), threading.Event()
    nvml.nvmlInit = lambda: go.wait(60)
    page = b'vllm:num_requests_running{engine="0"} 1.0\n'
    async with raw_server(by_path({"/metrics": page})) as server:
        other = EngineWatcher(server.url, limits=LookLimits(20.0, 10.0, 10.0))
        stuck = asyncio.create_task(SameHost(8000, fresh(machine, nvml, deadline_s=60.0)).add_to(LOOK))
        await asyncio.sleep(0.05)
        look = await other.look(1.0, 1.0)
        assert not stuck.done()
        go.set()
        await stuck
        await other.close()
    assert look.reach is Reach.ANSWERS


async def test_what_is_open_is_closed_with_the_last_engine(machine: Path) -> None:
    """One handle of the kernel's log for the machine, however many engines come and go; none after the last."""

    def handles() -> int:
        return sum(one.exists() and one.samefile(machine / "dev" / "kmsg") for one in Path("/proc/self/fd").iterdir())

    nvml = library({"3b": {102: 1}})
    one = fresh(machine, nvml)
    engines = [SameHost(port, one) for port in (8000, 8001, 8002)]
    assert handles() == 0
    for engine in engines:
        await engine.add_to(LOOK)
    assert handles() == 1
    engines[0].close()
    engines[0].close()
    assert handles() == 1
    await EngineWatcher("http://127.0.0.1:1", same_host=engines[1]).close()
    engines[2].close()
    assert handles() == 0
    eventually(lambda: nvml.ended == 1)
    with socket.socket():  # and again
        assert [card.name for card in (await SameHost(8000, one).add_to(LOOK)).cards] == ["3b:00"]
    assert (handles(), nvml.begun) == (1, 2)


def test_a_driver_without_words_is_begun_anew(machine: Path) -> None:
    """Where it tells nothing of any card, it may have been replaced; a lost card does not hide the others."""
    nvml = library({"3b": {102: 1}, "5e": {101: 1}})
    here = SameHost(8000, fresh(machine, nvml))
    memory = nvml.nvmlDeviceGetMemoryInfo

    def lost(bus: str) -> object:
        if bus == "3b":
            raise nvml.NVMLError("GPU is lost")
        return memory(bus)

    nvml.nvmlDeviceGetMemoryInfo = lost
    assert [(card.name, card.total) for card in seen(here).cards] == [("3b:00", None), ("5e:00", 80 << 30)]

    def gone(_: str) -> object:
        raise nvml.NVMLError("Driver/library version mismatch")

    nvml.nvmlDeviceGetMemoryInfo = nvml.nvmlDeviceGetComputeRunningProcesses = gone
    assert [card.total for card in seen(here).cards] == [None, None]
    assert nvml.ended == 1


async def test_an_answer_serves_everybody_for_a_while() -> None:
    """Asked once for all who ask at the same time and soon after; again when it is old, will not do, or failed."""
    asked: list[float] = []

    def ask() -> int:
        time.sleep(0.05)
        asked.append(time.monotonic())
        if len(asked) == 3:
            raise OSError
        return len(asked)

    question = SlowQuestion(ask, deadline_s=20.0, keep_s=60.0)
    assert await asyncio.gather(*(question.answer() for _ in range(5))) == [1] * 5
    assert await question.answer() == 1
    question.forget()
    assert await question.answer() == 2
    old_at_once = SlowQuestion(ask, deadline_s=20.0, keep_s=0.0)
    assert [await old_at_once.answer() for _ in range(3)] == [None, 4, 5]

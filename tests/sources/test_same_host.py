"""What this machine says of an engine on it: found by its port, with all that it started, its limit and its cards."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from plimsoll.domain.look import Card, Look, Reach
from plimsoll.sources.same_host import SameHost

LOOK = Look(1.0, 2.0, Reach.ANSWERS, figures={"running": 3.0})


def _process(root: Path, pid: int, parent: int, resident_kb: int) -> Path:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a name) with ) in it) S {parent} 0 0", encoding="utf-8")
    (folder / "status").write_text(f"Name:\tx\nRssAnon:\t{resident_kb} kB\n", encoding="utf-8")
    (folder / "cgroup").write_text("0::/pod/box\n", encoding="utf-8")
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A server on port 8000 with a worker, and a stranger."""
    net = tmp_path / "proc" / "net"
    net.mkdir(parents=True)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    line = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0 100 0 0 10 0\n"
    (net / "tcp").write_text(head + line, encoding="utf-8")
    server = _process(tmp_path, 100, 1, 1000)
    (server / "fd" / "7").symlink_to("socket:[4242]")
    _process(tmp_path, 101, 100, 2000)
    _process(tmp_path, 102, 101, 4000)
    _process(tmp_path, 200, 1, 9000)
    box = tmp_path / "sys" / "fs" / "cgroup" / "pod" / "box"
    box.mkdir(parents=True)
    (box / "memory.max").write_text("max\n", encoding="utf-8")
    (box.parent / "memory.max").write_text("68719476736\n", encoding="utf-8")
    return tmp_path


def test_the_server_is_found_by_its_port_with_all_that_it_started(machine: Path) -> None:
    """Its memory is that of the whole tree, its limit the tightest around it; the page's figures stay."""
    seen = SameHost(8000, machine).add_to(LOOK)
    assert seen.figures == {"running": 3.0, "host_resident": 7000 * 1024.0, "host_limit": 64.0 * 2**30}
    assert seen.cards == ()


def test_nothing_is_told_of_a_server_that_is_not_here(machine: Path) -> None:
    """Another port, an empty machine: the look stays as it was."""
    assert SameHost(8001, machine).add_to(LOOK) == LOOK
    assert SameHost(8000, machine / "nowhere").add_to(LOOK) == LOOK


def test_a_server_that_was_restarted_is_found_again(machine: Path) -> None:
    """By its port, under another number."""
    here = SameHost(8000, machine)
    here.add_to(LOOK)
    for name in ("100", "101", "102"):
        (machine / "proc" / name).rename(machine / f"gone-{name}")
    new = _process(machine, 300, 1, 500)
    (new / "fd" / "3").symlink_to("socket:[4242]")
    assert here.add_to(LOOK).figures["host_resident"] == 500 * 1024.0


def test_a_real_server_of_this_machine_is_found() -> None:
    """The kernel's own /proc: a child of ours that listens and holds 64 MiB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import socket, sys; held = bytearray(64 << 20); s = socket.create_server(('127.0.0.1', {port}))"
    code += "; print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        resident = SameHost(port).add_to(LOOK).figures["host_resident"]
    finally:
        child.kill()
        child.communicate()
    assert 64 << 20 <= resident < 256 << 20


def _library(count: int | None) -> SimpleNamespace:
    class NVMLError(Exception):
        pass

    def errors(*_: object) -> int:
        if count is None:
            raise NVMLError("not supported")
        return count

    return SimpleNamespace(
        NVMLError=NVMLError, NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_VOLATILE_ECC=0, nvmlInit=lambda: None,
        nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId=b"00000000:3B:00.0"), nvmlDeviceGetTotalEccErrors=errors,
    )  # fmt: skip


def test_cards_tell_of_errors_and_of_xids_since_guard_looks(machine: Path) -> None:
    """NVML and the kernel write a card's address differently; both mean one card. Old messages do not count."""
    kernel = machine / "dev" / "kmsg"
    kernel.parent.mkdir()
    kernel.write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1\n", encoding="utf-8")
    here = SameHost(8000, machine, _library(2))
    assert here.add_to(LOOK).cards == (Card("3b:00", (), 2),)
    with kernel.open("a", encoding="utf-8") as file:
        file.write("3,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=<unknown>, GPU has fallen off the bus.\n")
    assert here.add_to(LOOK).cards == (Card("3b:00", (79,), 2),)
    assert here.add_to(LOOK).cards == (Card("3b:00", (), 2),)


def test_a_card_without_ecc_is_no_sick_one(machine: Path) -> None:
    """Not known is not zero, and not many."""
    assert SameHost(8000, machine, _library(None)).add_to(LOOK).cards == (Card("3b:00", (), None),)

"""What the kernel says of this process's memory and its group's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.memory import group_files, group_memory, host_memory, resident_bytes

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> str:
    """A machine of these files; the root to read it from."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_this_very_process_is_read() -> None:
    """On a real Linux every figure but the limit is there, and they are in proportion."""
    figures, reasons = host_memory()
    resident, peak, total = figures["resident"], figures["resident_peak"], figures["total"]
    assert resident is not None
    assert peak is not None
    assert total is not None
    assert 5 << 20 < resident <= peak + (1 << 20) < total
    assert set(reasons) <= {"host_memory.limit", "host_memory.used_by_group"}
    assert resident_bytes() == pytest.approx(resident, rel=0.2)


def test_what_the_machine_does_not_say_is_unknown(tmp_path: Path) -> None:
    """All are None, each with its sentence; no limit is None, and then the own group is told."""
    figures, reasons = host_memory(str(tmp_path))
    assert set(figures.values()) == {None}
    assert set(reasons) == {f"host_memory.{name}" for name in figures}
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": "77"}
    assert group_memory(group_files(machine(tmp_path, files))) == (None, 77)


def test_the_tightest_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    """A pod's limit binds its containers, and the use that counts is that of the group that is limited."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{9 * GIB}\n",
        },
    )
    assert group_memory(group_files(root)) == (8 * GIB, 5 * GIB)


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    """Its memory has a tree of its own; in a container only the top of it is there, and 'no limit' is a huge number."""
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    root = machine(tmp_path, files)
    assert group_memory(group_files(root)) == (3 * GIB, GIB)
    machine(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert group_memory(group_files(root)) == (None, GIB)


@given(text=st.text(max_size=200))
def test_strange_files_are_unknown(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands in them, nothing is raised and no figure is negative."""
    text = text.encode("utf-8", "replace").decode()
    names = ("proc/self/status", "proc/meminfo", "proc/self/cgroup", "sys/fs/cgroup/memory.max")
    root = machine(tmp_path_factory.mktemp("odd"), dict.fromkeys(names, f"0::/\nVmRSS: {text}\n{text}"))
    figures, _ = host_memory(root)
    assert all(value is None or value >= 0 for value in figures.values())

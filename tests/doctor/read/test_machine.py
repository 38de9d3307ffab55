"""What is said of a machine: read from a made-up root, and from this one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from plimsoll import __version__
from plimsoll.doctor.read.bundle import ArchivePart, collect_here

ABSENT = ("/nowhere/nvidia-smi",)


def texts(parts: list[ArchivePart]) -> dict[str, str]:
    """Every part's text by its name."""
    found = {}
    for part in parts:
        assert isinstance(part.content, bytes)
        found[part.name.removeprefix("machine/")] = part.content.decode()
    return found


def made(root: Path, files: dict[str, str]) -> Path:
    """A root with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def program(path: Path, script: str) -> tuple[str]:
    """A program that stands where nvidia-smi would."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


def test_this_machine_is_described() -> None:
    """Versions come from what is installed, without importing it; JSON is JSON."""
    found = texts(collect_here(nvidia_smi=ABSENT))
    versions = json.loads(found["versions.json"])
    assert versions["plimsoll"] == __version__
    assert versions["python"].startswith("CPython 3.")
    assert set(versions["packages"]) >= {"vllm", "torch", "transformers", "flashinfer-python", "nvidia-nccl-cu12"}
    assert "MemTotal" in found["meminfo.txt"]
    assert json.loads(found["limits.json"])["locked_memory_bytes"].keys() == {"soft", "hard"}
    assert found["nvidia-smi.txt"] == "nvidia-smi: not found on this machine\n"


def test_the_limit_of_a_control_group_above_is_seen(tmp_path: Path) -> None:
    """Version 2: own group first, then those above; the names of the groups stay out."""
    root = made(tmp_path, {
        "proc/self/cgroup": "0::/kubepods/secret-team/pod1\n",
        "sys/fs/cgroup/kubepods/secret-team/pod1/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/secret-team/pod1/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n",
        "sys/fs/cgroup/kubepods/secret-team/memory.max": "68719476736\n",
        "sys/fs/cgroup/kubepods/secret-team/memory.current": "68719470000\n",
    })  # fmt: skip
    shown = texts(collect_here(root, nvidia_smi=ABSENT))["cgroup.txt"]
    assert shown == (
        "own control group\n  memory.max: max\n  memory.events: low 0 high 0 max 7 oom 2 oom_kill 1\n"
        "1 above\n  memory.max: 68719476736\n  memory.current: 68719470000\n"
    )


def test_version_1_names_are_read(tmp_path: Path) -> None:
    """The older control groups say the same by other names."""
    root = made(tmp_path, {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
        "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/docker/1/memory.failcnt": "3\n",
    })  # fmt: skip
    shown = texts(collect_here(root, nvidia_smi=ABSENT))["cgroup.txt"]
    assert shown == "own control group\n  memory.limit_in_bytes: 1000\n  memory.failcnt: 3\n"


def test_a_container_sees_only_the_root_of_its_own_tree(tmp_path: Path) -> None:
    """Where the path leads nowhere, and where it tries to lead out, the root of the tree is read."""
    root = made(tmp_path, {"proc/self/cgroup": "0::/../../elsewhere\n", "sys/fs/cgroup/memory.max": "5\n"})
    assert texts(collect_here(root, nvidia_smi=ABSENT))["cgroup.txt"] == "1 above\n  memory.max: 5\n"


def test_an_empty_machine_says_what_is_missing(tmp_path: Path) -> None:
    """Nothing there is an answer, not a failure."""
    found = texts(collect_here(tmp_path, nvidia_smi=ABSENT))
    assert found["cgroup.txt"] == "no memory control group found\n"
    assert found["meminfo.txt"] == "/proc/meminfo: not there\n"
    assert json.loads(found["limits.json"])["dev_shm"] == "not there"
    assert json.loads(found["versions.json"])["system"] is None


def test_what_nvidia_smi_says_is_kept_with_its_secrets_hidden(tmp_path: Path) -> None:
    """A command line among its processes loses its key and the owner of its folder; a failure is named."""
    smi = program(tmp_path / "smi", "echo '| 0 N/A 12 C /home/annabelle/vllm --api-key hunter2hunter2 |'; exit 9")
    shown = texts(collect_here(tmp_path, nvidia_smi=smi))["nvidia-smi.txt"]
    assert "hunter2" not in shown
    assert "annabelle" not in shown
    assert "~/vllm --api-key [redacted]" in shown
    assert "[smi ended with exit code 9]" in shown


@pytest.mark.parametrize("script", ["echo begun; sleep 60", "echo begun; trap '' TERM; while :; do sleep 1; done"])
def test_a_driver_that_hangs_is_not_waited_for(script: str, tmp_path: Path) -> None:
    """What came in time is kept, and the program is ended."""
    started = time.monotonic()
    shown = texts(collect_here(tmp_path, nvidia_smi=program(tmp_path / "smi", script), wait_s=0.5))["nvidia-smi.txt"]
    assert time.monotonic() - started < 40
    assert shown.startswith("begun\n")
    assert "did not finish within 0.5 s" in shown


def test_output_without_end_is_bounded(tmp_path: Path) -> None:
    """A program that never stops talking is cut off."""
    found = collect_here(tmp_path, nvidia_smi=program(tmp_path / "smi", "yes"), wait_s=20)
    shown = texts(found)["nvidia-smi.txt"]
    assert len(shown) < 300_000
    assert "left out" in shown

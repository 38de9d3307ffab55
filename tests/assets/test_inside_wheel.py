"""The wheel of plimsoll.inside: what is in it, and that it works in every way it may be put to use."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import plimsoll
from plimsoll.assets.inside_wheel import ENTRY_POINTS, Wheel, make_wheel, write_wheel
from plimsoll.errors import WorldFailed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "plimsoll"

# Imports both halves, asks for the entry points, and looks at what came along.
USE = """
import sys
before = set(sys.modules)
import plimsoll.inside
from plimsoll.inside import Gate, Probe
foreign = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
foreign -= {'plimsoll', '__mp_main__'}  # the second is how multiprocessing calls the main program
from importlib.metadata import entry_points, version
points = sorted(p.value for g in ('vllm.general_plugins', 'vllm.stat_logger_plugins') for p in entry_points(group=g))
print(plimsoll.inside.__file__, version('plimsoll-inside'), sorted(foreign), points, sep='\\n')
"""


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    """The wheel of the sources as they are."""
    return make_wheel()


def _used(*paths: Path) -> list[str]:
    """What a Python without any installed package prints with these paths on PYTHONPATH."""
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", USE], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _expect(lines: list[str], home: Path) -> None:
    place, version, foreign, points = lines
    assert place.startswith(str(home))
    assert version == plimsoll.__version__
    assert foreign == "[]"
    assert points == str(sorted(value for group in ENTRY_POINTS.values() for value in group.values()))


def test_the_file_or_what_is_in_it_can_be_on_the_path(wheel: Wheel, tmp_path: Path) -> None:
    """Mounted as it is or unpacked: imported out of it, entry points found, nothing foreign loaded; `plimsoll` still works."""
    path = write_wheel(wheel, str(tmp_path))
    _expect(_used(path), path)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")
    _expect(_used(tmp_path / "unpacked"), tmp_path / "unpacked")
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "flags", "--vllm", "0.32.0", "--", "vllm", "serve", "m"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.real
def test_pip_installs_it(wheel: Wheel, tmp_path: Path) -> None:
    """pip takes it without network and finds its records right."""
    path = write_wheel(wheel, str(tmp_path / "dist"))
    target = tmp_path / "site"
    quiet = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(path)], check=True, timeout=100)
    _expect(_used(target), target)


def test_it_holds_exactly_what_inside_needs(wheel: Wheel) -> None:
    """plimsoll.inside whole, what it imports, nothing of the rest, each listed with hash and size; a ConfigMap takes it."""
    info = f"plimsoll_inside-{plimsoll.__version__}.dist-info"
    expected = {f"plimsoll/{path}" for path in ("__init__.py", "errors.py", "py.typed")}
    own = (path for kind in ("*.py", "*.json") for path in (PACKAGE / "inside").rglob(kind))
    expected |= {f"plimsoll/{path.relative_to(PACKAGE).as_posix()}" for path in own}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert set(wheel.members) == expected
    assert len(base64.b64encode(wheel.content)) < 1_000_000
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        assert archive.testzip() is None
        assert "Requires-Dist" not in archive.read(f"{info}/METADATA").decode()
        rows = list(csv.reader(archive.read(f"{info}/RECORD").decode().splitlines()))
        assert {row[0] for row in rows} == set(archive.namelist()) == expected
        for name, digest, size in rows:
            if not name.endswith("/RECORD"):
                content = archive.read(name)
                found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (digest, size) == (f"sha256={found}", str(len(content)))


def test_the_same_sources_give_the_same_bytes_and_nothing_stays_at_home(wheel: Wheel, tmp_path: Path) -> None:
    """Neither time nor place nor order shows; of plimsoll itself only its version is in the wheel, also for what comes late."""
    copy = tmp_path / "elsewhere" / "plimsoll"
    shutil.copytree(PACKAGE, copy, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__"))
    assert make_wheel(copy) == wheel
    texts = [path.read_text(encoding="utf-8") for path in (PACKAGE / "inside").rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"(?m)^\s*(?:from|import) plimsoll\.(\w+)", text)}
    beside = {name for text in texts for name in re.findall(r"(?m)^\s*from plimsoll import (.+)", text)}
    assert (found <= {"errors", "inside"}, beside) == (True, set())


def test_what_the_entry_points_name_is_there() -> None:
    """pyproject.toml and the wheel name the same; each module lies in the package and defines the name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["entry-points"] == ENTRY_POINTS
    for value in (value for group in ENTRY_POINTS.values() for value in group.values()):
        module, _, name = value.partition(":")
        text = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
        assert f"def {name}(" in text or f"class {name}(" in text


def test_a_place_that_cannot_be_written_is_the_worlds_fault(wheel: Wheel, tmp_path: Path) -> None:
    """A file in the folder's place, or a folder in the file's; nothing half written is left."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(WorldFailed, match="cannot be written"):
        write_wheel(wheel, str(tmp_path / "file"))
    (tmp_path / wheel.name).mkdir()
    with pytest.raises(WorldFailed, match="cannot be written"):
        write_wheel(wheel, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", wheel.name]

"""Finds a vLLM that is installed or runs: its sources as text, its version, and the command line of its process.

vLLM is never imported: that takes seconds and may touch the GPU.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from plimsoll.errors import BadInput, TimedOut, WorldFailed
from plimsoll.launch.command_line import Launch, find_launch
from plimsoll.vllm.extension_points import Sources

ASK_S = 60.0  # for another Python to locate its vLLM; a cold disk or a network mount is slow
_FILE_BYTES_MAX = 8 << 20
_FILES_MAX = 5000

# Run by another Python. It must run on every version that vLLM ever ran on, and import nothing of vLLM.
_QUESTION = """
import importlib.util, json
from importlib import metadata
def origin(name):
    try:
        spec = importlib.util.find_spec(name)
        return [getattr(spec, "origin", None), list(getattr(spec, "submodule_search_locations", None) or [])]
    except Exception:
        return [None, []]
points = []
version = None
for found in metadata.distributions():
    try:
        name = (found.metadata["Name"] or "").lower()
        if name == "vllm":
            version = found.version
        points += [[p.group, p.name, p.value] for p in found.entry_points if p.value.startswith("plimsoll.inside.")]
    except Exception:
        pass
answer = {"vllm": origin("vllm"), "inside": origin("plimsoll.inside"), "version": version, "points": points}
print("plimsoll-answer " + json.dumps(answer))
"""


class InsideVisibility(NamedTuple):
    """The place at which the Python that runs vLLM finds plimsoll.inside, if it does."""

    is_visible: bool
    place: str | None
    entry_points: tuple[str, ...]  # names under which vLLM will load it


class _Answer(msgspec.Struct):
    """The answer of another Python; a place is a file, and the folders of a package."""

    vllm: tuple[str | None, list[str]]
    inside: tuple[str | None, list[str]]
    version: str | None
    points: list[tuple[str, str, str]]


class InstalledVllm(NamedTuple):
    folder: str
    version: str | None  # None: neither its metadata nor its own file says
    sources: Sources
    seen: InsideVisibility | None  # None: no Python was asked


def vllm_in(folder: str) -> InstalledVllm:
    """Finds the vLLM in a folder: the package itself, or its parent, such as site-packages or an unpacked wheel."""
    given = Path(folder)
    try:
        if not given.is_dir():
            raise BadInput(f"--vllm-dir {folder}: no such folder")
        package = next((p for p in (given / "vllm", given) if p.name == "vllm" and (p / "__init__.py").is_file()), None)
    except OSError as error:
        raise BadInput(f"--vllm-dir {folder}: {error.strerror or error}") from None
    if package is None:
        raise BadInput(f"--vllm-dir {folder}: there is no vllm package in it")
    return InstalledVllm(str(package), version_beside(package), sources_in(package), None)


def vllm_of(python: str | None, variables: Mapping[str, str]) -> InstalledVllm:
    """Finds the vLLM that an interpreter (None: this one) would import, with the variables that its command sets."""
    who = "this Python" if python is None else f"--python {python}"
    which = "name one with --python or --vllm-dir (of an image: its vLLM wheel, unpacked); docs/support.md has every release"
    nothing = f"this Python has no vLLM; {which}"
    if python is not None:
        if not python.strip():
            raise BadInput("--python is empty; give the path of a Python, such as /usr/bin/python3")
        if Path(python).is_dir():
            raise BadInput(f"--python {python} is a folder; name the Python in it, such as {python.rstrip('/')}/bin/python")
        nothing = f"{python} has no vLLM; name another with --python, or its folder with --vllm-dir"
    wanted = {name: value for name, value in variables.items() if name.startswith("PYTHON") and "$" not in value}
    try:
        done = subprocess.run(  # noqa: S603 - the user names the interpreter
            [python or sys.executable, "-c", _QUESTION], capture_output=True, check=False, timeout=ASK_S,
            stdin=subprocess.DEVNULL,
            cwd="/",  # a folder named vllm in the user's working directory is not the installed one
            env={**os.environ, **wanted},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimedOut(f"{who} did not say within {ASK_S:.0f} s where its vLLM is") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{who} cannot be run: {getattr(error, 'strerror', None) or error}") from None
    said = [line for line in done.stdout.splitlines() if line.startswith(b"plimsoll-answer ")]
    try:
        answer = msgspec.json.decode(said[-1].partition(b" ")[2] if said else b"", type=_Answer)
    except ValueError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BadInput(f"{who} is not a Python that answers: {last[:200]}") from None
    origin, (inside, folders) = answer.vllm[0], answer.inside
    if origin is None or not Path(origin).is_file():
        raise WorldFailed(nothing)
    package, names = Path(origin).parent, {name for _, name, _ in answer.points}
    seen = InsideVisibility(inside is not None, inside or next(iter(folders), None), tuple(sorted(names)))
    return InstalledVllm(str(package), version_beside(package) or answer.version, sources_in(package), seen)


def sources_in(package: Path) -> Sources:
    """Returns access to the files of the package; an unreadable file counts as absent."""

    def read(path: str) -> str | None:
        try:
            with (package / path).open("rb") as file:
                raw = file.read(_FILE_BYTES_MAX + 1)
        except OSError:
            return None
        return raw.decode(errors="replace") if len(raw) <= _FILE_BYTES_MAX else None

    def listed(folder: str) -> list[str]:
        found: list[str] = []
        for inner, folders, names in os.walk(package / folder):
            folders.sort()
            found += [Path(inner, n).relative_to(package).as_posix() for n in sorted(names) if n.endswith(".py")]
            if len(found) > _FILES_MAX:
                break
        return found[:_FILES_MAX]

    return Sources(read, listed)


def version_beside(package: Path) -> str | None:
    """Returns the version in the metadata beside the package, else the one in its own file; None without both."""
    try:
        beside = sorted(package.parent.glob("vllm*.dist-info"), key=lambda p: (not p.name.startswith("vllm-"), p.name))
        for folder in beside[:20]:
            text = _head(folder / "METADATA")
            name, version = (re.search(rf"^{key}: *(\S+)", text, re.MULTILINE) for key in ("Name", "Version"))
            if name and version and (name[1].lower() == "vllm" or "vllm/__init__.py," in _head(folder / "RECORD", 4 << 20)):
                return version[1]
    except OSError:
        pass
    try:
        tree = ast.parse(_head(package / "_version.py"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"}:
                return node.value.value if isinstance(node.value.value, str) else None
    return None


def _head(path: Path, limit: int = 1 << 16) -> str:
    try:
        with path.open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""


_READ_MAX = 4 * 1024 * 1024  # twice Linux's usual limit on arguments and environment together
_PARENTS_MAX = 16
# vLLM renames its processes ("VLLM::EngineCore", the prefix can be set); before that they are Python's own children.
_RENAMED = re.compile(r"[\w.-]+::\w.*")
_RELEVANT = tuple(
    "VLLM_ CUDA_ PYTORCH_ TORCH_ NCCL_ HF_ TRANSFORMERS_ OMP_ RAY_ PROMETHEUS_ TRITON_ LD_PRELOAD UCX_ GLOO_".split()
)


def launch_of_process(pid: int, proc: Path = Path("/proc")) -> Launch:
    """Returns the command that started the vLLM server that `pid` is, or is a part of."""
    words = _command_line(pid, proc)
    if not words:
        raise BadInput(f"pid {pid} has no command line: a kernel thread, or a process that has ended")
    title = words[0] if len(words) == 1 and _RENAMED.fullmatch(words[0]) else None
    if title is None and not any(word.startswith("from multiprocessing.") for word in words):
        launch = _launch(words, pid, proc)
        if launch is None:
            raise BadInput(f"pid {pid} is not a vLLM server: {words[0]}")
        return launch
    what = title or "a child of Python's multiprocessing"
    seen = [pid]
    while len(seen) <= _PARENTS_MAX:
        try:
            found = re.search(r"^PPid:\s*([0-9]+)", _read(proc / str(seen[-1]) / "status"), re.MULTILINE)
        except OSError:
            break
        parent = int(found.group(1)) if found else 0
        if parent <= 0 or parent in seen:
            break
        seen.append(parent)
        launch = _launch(_command_line(parent, proc), parent, proc)
        if launch is not None:
            note = f"pid {pid} is {what}; the command line is that of its parent, pid {parent}"
            return replace(launch, source=f"pid {pid}", notes=(*launch.notes, note))
    raise BadInput(f"pid {pid} is {what}, and none of its parents shows the command that started it")


def _launch(words: tuple[str, ...], pid: int, proc: Path) -> Launch | None:
    content, notes = "", tuple[str, ...]()
    try:
        content = _read(proc / str(pid) / "environ")
    except OSError as error:
        notes = (f"its environment cannot be read ({error.strerror}): run as the same user or as root",)
    pairs = (entry.partition("=") for entry in content.split("\0"))
    relevant = [(name, value) for name, given, value in pairs if given and name.startswith(_RELEVANT)]
    launch = find_launch(words, relevant, f"pid {pid}")
    if launch is None:
        return None
    # Nothing is missing in a running process: a `$` in its words is meant.
    version = _version_of(words, pid, proc)
    running = (version, f"runs as pid {pid}") if version else None
    return replace(launch, unresolved=(), notes=launch.notes + notes, vllm=running)


def _version_of(words: tuple[str, ...], pid: int, proc: Path) -> str | None:
    """Returns the version of a process's vLLM: the one in its Python's environment, seen from inside its container."""
    root, programs = proc / str(pid) / "root", [word for word in words[:2] if word.startswith("/")]
    with contextlib.suppress(OSError):
        programs.append(str((proc / str(pid) / "exe").readlink()))
    for program in programs:
        for folder in ("lib/python3*/site-packages/vllm", "lib/python3*/dist-packages/vllm"):
            try:
                packages = sorted((root / Path(program).parent.parent.relative_to("/")).glob(folder))
            except (OSError, ValueError):
                continue
            if packages and (version := version_beside(packages[-1])):
                return version
    return None


def _command_line(pid: int, proc: Path) -> tuple[str, ...]:
    try:
        content = _read(proc / str(pid) / "cmdline")
    except (FileNotFoundError, ProcessLookupError):
        raise BadInput(f"pid {pid}: no such process") from None
    except OSError as error:
        raise BadInput(f"pid {pid}: its command line cannot be read: {error.strerror}") from None
    title = content.rstrip("\0")  # a renamed process leaves the rest of its old arguments as zeros
    if not title or _RENAMED.fullmatch(title):
        return (title,) if title else ()
    return tuple(content.removesuffix("\0").split("\0"))


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_READ_MAX).decode("utf-8", errors="replace")

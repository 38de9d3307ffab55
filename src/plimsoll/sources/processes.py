"""Reads the command line and environment of a running vLLM server from /proc."""

from __future__ import annotations

import re
from pathlib import Path

from plimsoll.domain.launch import Launch
from plimsoll.errors import BadInput
from plimsoll.sources.launch_words import find_launch

_READ_MAX = 4 * 1024 * 1024  # twice Linux's usual limit on arguments and environment together
_PARENTS_MAX = 16
# vLLM renames its processes ("VLLM::EngineCore", the prefix can be set); before that they are Python's own children.
_RENAMED = re.compile(r"[\w.-]+::\w.*")
_RELEVANT = (
    "VLLM_",
    "CUDA_",
    "PYTORCH_",
    "TORCH_",
    "NCCL_",
    "HF_",
    "TRANSFORMERS_",
    "OMP_",
    "RAY_",
    "PROMETHEUS_",
    "TRITON_",
    "LD_PRELOAD",
    "UCX_",
    "GLOO_",
)


def launch_of_process(pid: int, proc: Path = Path("/proc")) -> Launch:
    """The command that started the vLLM server which `pid` is, or is a part of."""
    words = _command_line(pid, proc)
    if not words:
        raise BadInput(f"pid {pid} has no command line: a kernel thread, or a process that has ended")
    title = words[0] if len(words) == 1 and _RENAMED.fullmatch(words[0]) else None
    if title is None and not _is_python_child(words):
        launch = _launch(words, pid, proc)
        if launch is None:
            raise BadInput(f"pid {pid} is not a vLLM server: {words[0]}")
        return launch
    what = title or "a child of Python's multiprocessing"
    for parent in _parents(pid, proc):
        launch = _launch(_command_line(parent, proc), parent, proc)
        if launch is not None:
            note = f"pid {pid} is {what}; the command line is that of its parent, pid {parent}"
            return launch._replace(source=f"pid {pid}", notes=(*launch.notes, note))
    raise BadInput(f"pid {pid} is {what}, and none of its parents shows the command that started it")


def _is_python_child(words: tuple[str, ...]) -> bool:
    return any(word.startswith("from multiprocessing.") for word in words)


def _launch(words: tuple[str, ...], pid: int, proc: Path) -> Launch | None:
    environment, notes = _environment(pid, proc)
    launch = find_launch(words, environment, f"pid {pid}")
    # Nothing is missing in a running process: a `$` in its words is meant.
    return launch and launch._replace(unresolved=(), notes=launch.notes + notes)


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


def _environment(pid: int, proc: Path) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The variables that matter to vLLM, and a note where they cannot be read."""
    try:
        content = _read(proc / str(pid) / "environ")
    except OSError as error:
        return (), (f"its environment cannot be read ({error.strerror}): run as the same user or as root",)
    pairs = (entry.partition("=") for entry in content.split("\0"))
    return tuple((name, value) for name, given, value in pairs if given and name.startswith(_RELEVANT)), ()


def _parents(pid: int, proc: Path) -> list[int]:
    """The process's parent, its parent, and so on, as far as they can be read."""
    parents: list[int] = []
    while len(parents) < _PARENTS_MAX:
        try:
            status = _read(proc / str(pid) / "status")
        except OSError:
            break
        found = re.search(r"^PPid:\s*([0-9]+)", status, re.MULTILINE)
        pid = int(found.group(1)) if found else 0
        if pid <= 0 or pid in parents:
            break
        parents.append(pid)
    return parents


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_READ_MAX).decode("utf-8", errors="replace")

"""Finds the vLLM start that a command is about: in the words typed, in a file, or in a running process."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from os.path import dirname, exists, isfile, join
from pathlib import Path

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.check_flags import ConfigFile
from plimsoll.launch.command_line import Launch, find_launch, version_in_image
from plimsoll.launch.files import BYTES_MAX, pinned_version, read_launches
from plimsoll.launch.manifests import documents_in
from plimsoll.launch.options import Words, meant
from plimsoll.launch.shell_script import commands_in
from plimsoll.vllm.versions import Engine, engine_named

_FILES = (".sh", ".bash", ".yaml", ".yml", ".json", ".txt", ".service", ".env", ".log", ".gz")


def launches_named(options: Words, command_name: str) -> list[tuple[Launch, str]]:
    """The starts that were meant, each with the folder that relative paths in it most likely mean."""
    pid: int | None = getattr(options, "pid", None)  # of commands that have --pid
    if pid is not None:
        if options.rest or options.verbatim:
            raise BadInput("--pid names a running server; give no command or file beside it")
        return [(launch_of_process(pid), "")]
    if options.verbatim is not None and options.rest:
        raise BadInput(f"{options.rest[0]!r} stands in front of --; give a file or a command, not both")
    command = options.verbatim if options.verbatim is not None else options.rest
    if not command:
        raise BadInput(f"nothing to look at; give a command, a file, --pid N or - (plimsoll {command_name} --help)")
    if options.verbatim is None and len(command) == 1 and not any(blank in command[0] for blank in " \t\n"):
        stdin = sys.stdin.buffer if command[0] == "-" and sys.stdin is not None else None
        folder = "" if command[0] == "-" else dirname(command[0])
        _check_no_model(command[0])
        return [(_with_requirement(launch, folder), folder) for launch in read_launches(command[0], stdin)]
    if len(command) == 1:
        return [(launch, "") for launch in launches_in(command[0])]
    launch = find_launch(command, (), "command line")
    if launch is None or launch.in_front:
        raise BadInput(_not_a_command(command, options, command_name, has_start=launch is not None))
    return [(launch, "")]


def _with_requirement(launch: Launch, folder: str) -> Launch:
    """The launch with the vLLM that the requirements.txt beside its file pins, where nothing nearer names one."""
    path = Path(folder) / "requirements.txt"
    try:
        text = "" if launch.vllm or launch.image or not path.is_file() else path.read_text("utf-8", "replace")[:BYTES_MAX]
    except OSError:
        return launch
    pinned = pinned_version(text)
    return launch._replace(vllm=(pinned, "pinned in requirements.txt")) if pinned else launch


def engine_meant(launch: Launch, asked: str | None) -> Engine:
    """The vLLM that a launch is about: the one asked for, the one its image or surroundings name, else the newest known."""
    if asked is not None:
        return engine_named(asked)
    named = [launch.vllm] if launch.vllm else []
    if launch.image and (version := version_in_image(launch.image)):
        named.insert(0, (version, f"the tag of the image {launch.image}"))
    for version, because in named:
        try:
            return engine_named(version, f"{launch.source}:")._replace(because=because)
        except BadInput:
            continue  # a number that is no version of vLLM decides nothing
    return engine_named(None)


def _not_a_command(words: tuple[str, ...], options: Words, command_name: str, *, has_start: bool) -> str:
    """Explains words that start no vLLM: an option that does not exist, more than one file, or none of it vLLM's."""
    option = words[0] if has_start else next((word for word in words if word.startswith("-") and word != "-"), None)
    if option is not None and (has_start or words[0] == option or isfile(words[0])):
        behind = "; vLLM's own flags go behind `vllm serve MODEL`" if has_start else ""
        return f"{option} is no option of plimsoll {command_name}{meant(option, options)} (--help lists them){behind}"
    if isfile(words[0]):
        return f"{words[0]} is a file, and {words[1]!r} stands beside it: one file at a time"
    shown = " ".join(words[:3]) + (" ..." if len(words) > 3 else "")
    return f"no vLLM start in `{shown}`; it begins with `vllm serve`, `python -m vllm...` or `docker run`"


def _check_no_model(word: str) -> None:
    """BadInput where a model stands alone: a folder with a config.json, or no file and a name as the hub's are."""
    is_folder = isfile(join(word, "config.json"))
    owner, _, name = word.partition("/")
    is_id = all(part[:1].isalnum() and part.isascii() and "/" not in part for part in (owner, name))
    if not is_folder and (exists(word) or word.endswith(_FILES) or not is_id):
        return
    what = "the folder of a model" if is_folder else "no such file"
    raise BadInput(f"{word}: {what}; a model goes behind `vllm serve`: vllm serve {word}")


def launches_in(text: str) -> list[Launch]:
    """The starts in a whole command in one pair of quotes."""
    found = [
        launch
        for command in commands_in(text)
        if (launch := find_launch(command.words, command.environment, "command line", command.unresolved)) is not None
    ]
    if not found:
        raise BadInput("no vLLM start command in the quoted text")
    return found


def config_of(launch: Launch, folder: str) -> ConfigFile | None:
    """The flags of a `--config` file, where the file is at hand."""
    name = config_named(launch.arguments)
    if name is None or "$" in name:
        return None
    for path in (name, join(folder, name)):
        if isfile(path):
            return ConfigFile(path, read_vllm_config(path))
    return ConfigFile(name, None)


def config_named(words: tuple[str, ...]) -> str | None:
    """The file that `--config FILE` or `--config=FILE` names."""
    for place, word in enumerate(words):
        if word == "--config" and place + 1 < len(words):
            return words[place + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


_READ_MAX = 4 * 1024 * 1024  # twice Linux's usual limit on arguments and environment together
_PARENTS_MAX = 16
# vLLM renames its processes ("VLLM::EngineCore", the prefix can be set); before that they are Python's own children.
_RENAMED = re.compile(r"[\w.-]+::\w.*")
_RELEVANT = tuple(
    "VLLM_ CUDA_ PYTORCH_ TORCH_ NCCL_ HF_ TRANSFORMERS_ OMP_ RAY_ PROMETHEUS_ TRITON_ LD_PRELOAD UCX_ GLOO_".split()
)


def launch_of_process(pid: int, proc: Path = Path("/proc")) -> Launch:
    """The command that started the vLLM server which `pid` is, or is a part of."""
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
    for parent in _parents(pid, proc):
        launch = _launch(_command_line(parent, proc), parent, proc)
        if launch is not None:
            note = f"pid {pid} is {what}; the command line is that of its parent, pid {parent}"
            return launch._replace(source=f"pid {pid}", notes=(*launch.notes, note))
    raise BadInput(f"pid {pid} is {what}, and none of its parents shows the command that started it")


def _launch(words: tuple[str, ...], pid: int, proc: Path) -> Launch | None:
    environment, notes = _environment(pid, proc)
    launch = find_launch(words, environment, f"pid {pid}")
    if launch is None:
        return None
    # Nothing is missing in a running process: a `$` in its words is meant.
    version = _version_of(words, pid, proc)
    running = (version, f"runs as pid {pid}") if version else None
    return launch._replace(unresolved=(), notes=launch.notes + notes, vllm=running)


def _version_of(words: tuple[str, ...], pid: int, proc: Path) -> str | None:
    """The vLLM that a process runs: the one in the environment of its Python, seen from inside its container."""
    from plimsoll.launch.installed_vllm import version_beside  # the table of extension points, for --pid alone

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


CONFIG_BYTES_MAX = 1024 * 1024


def read_vllm_config(path: str) -> Mapping[str, object]:
    """The entries of the file, by flag name; BadInput if it is not a flat mapping that vLLM could read."""
    if not path.endswith((".yaml", ".yml")):
        raise BadInput(f"{path}: vLLM reads --config only from a .yaml or .yml file")
    try:
        with Path(path).open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if len(content) > CONFIG_BYTES_MAX:
        raise TooLarge(f"{path}: larger than {CONFIG_BYTES_MAX // 1024} KiB, which is no list of flags")
    try:
        documents = documents_in(content.decode("utf-8"), path, booleans=True)
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not text") from None
    found = next(iter(documents), None)
    if not isinstance(found, dict):
        raise BadInput(f"{path}: not a mapping of flag names to values")
    return {str(key): value for key, value in found.items()}

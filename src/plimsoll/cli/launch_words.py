"""Finds the vLLM start that a command is about: in the words typed, in a file, or in a running process."""

from __future__ import annotations

import sys
from os.path import dirname, exists, isfile, join

from plimsoll.cli.options import Split
from plimsoll.domain.launch import Launch
from plimsoll.engine.check import ConfigFile
from plimsoll.errors import BadInput

_FILES = (".sh", ".bash", ".yaml", ".yml", ".json", ".txt", ".service", ".env", ".log", ".gz")


def launches_named(options: Split, command_name: str) -> list[tuple[Launch, str]]:
    """The starts that were meant, each with the folder that relative paths in it most likely mean."""
    here = ""
    if "--pid" in options.values:
        from plimsoll.sources.processes import launch_of_process

        if options.rest or options.verbatim:
            raise BadInput("--pid names a running server; give no command or file beside it")
        pid = options.values["--pid"]
        if not pid.isascii() or not pid.isdigit():
            raise BadInput(f"--pid {pid!r} is not a process id")
        return [(launch_of_process(int(pid)), here)]
    from plimsoll.sources.launches import find_launch, read_launches

    if options.verbatim is not None and options.rest:
        raise BadInput(f"{options.rest[0]!r} stands in front of --; give a file or a command, not both")
    command = options.verbatim if options.verbatim is not None else options.rest
    if not command:
        raise BadInput(f"nothing to look at; give a command, a file, --pid N or - (plimsoll {command_name} --help)")
    if options.verbatim is None and len(command) == 1 and _is_file(command[0]):
        stdin = sys.stdin.buffer if command[0] == "-" and sys.stdin is not None else None
        folder = here if command[0] == "-" else dirname(command[0])
        _check_no_model(command[0])
        return [(launch, folder) for launch in read_launches(command[0], stdin)]
    if len(command) == 1:
        return [(launch, here) for launch in _pasted(command[0])]
    launch = find_launch(command, (), "command line")
    if launch is None or launch.in_front:
        raise BadInput(_not_a_command(command, command_name, has_start=launch is not None))
    return [(launch, here)]


def _not_a_command(words: tuple[str, ...], command_name: str, *, has_start: bool) -> str:
    """What is wrong with words that are no start: an option that does not exist, more than one file, or none of it vLLM's."""
    listed = f"plimsoll {command_name} --help lists them"
    option = words[0] if has_start else next((word for word in words if word.startswith("-") and word != "-"), None)
    if has_start:
        return f"{option} is no option of plimsoll {command_name} ({listed}); vLLM's own flags go behind `vllm serve MODEL`"
    if option is not None and (words[0] == option or isfile(words[0])):
        return f"{option} is no option of plimsoll {command_name} ({listed})"
    if isfile(words[0]):
        return f"{words[0]} is a file, and {words[1]!r} stands beside it: one file at a time"
    shown = " ".join(words[:3]) + (" ..." if len(words) > 3 else "")
    return f"no vLLM start in `{shown}`; it begins with `vllm serve`, `python -m vllm...` or `docker run`"


def _is_file(word: str) -> bool:
    return word == "-" or not any(blank in word for blank in " \t\n")


def _check_no_model(word: str) -> None:
    """BadInput where a model stands alone: a folder with a config.json, or no file and a name as the hub's are."""
    is_folder = isfile(join(word, "config.json"))
    if not is_folder and (exists(word) or word.endswith(_FILES) or not _is_id(word)):
        return
    what = "the folder of a model" if is_folder else "no such file"
    raise BadInput(f"{word}: {what}; a model goes behind `vllm serve`: vllm serve {word}")


def _is_id(word: str) -> bool:
    owner, _, name = word.partition("/")
    return all(part[:1].isalnum() and part.isascii() and "/" not in part for part in (owner, name))


def _pasted(text: str) -> list[Launch]:
    """A whole command in one pair of quotes."""
    from plimsoll.sources.launches import find_launch
    from plimsoll.sources.shell_script import commands_in

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
            from plimsoll.sources.vllm_config import read_vllm_config

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

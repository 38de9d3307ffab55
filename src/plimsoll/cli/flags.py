"""usage: plimsoll flags [--vllm VERSION] [--from VERSION] [--json] WHAT

Says which flags of a vLLM start command a version takes, which it refuses, which do nothing, and rewrites the command so
that the version takes it. Needs no GPU, no model and no vLLM.

WHAT is one of
  vllm serve MODEL ...          the command itself, as pasted (put -- in front to keep every word for vLLM)
  start.sh                      a shell script, a systemd unit, a Dockerfile
  compose.yaml, deployment.yaml a compose file or Kubernetes manifest
  --pid N                       a running server
  -                             any of these on standard input

  --vllm VERSION   the version to check against; default: the newest known
  --from VERSION   also say what the upgrade from this version changes for this command
  --json           one JSON object, schema plimsoll.flags/1

Exit codes: 0 the version takes it, 1 something is refused or has no effect, 2 WHAT cannot be read.
Read on: docs/flags.md
"""

from __future__ import annotations

import sys
from os.path import dirname, isfile, join

from plimsoll.cli.options import Split, split_options
from plimsoll.cli.output import show
from plimsoll.domain.launch import Launch
from plimsoll.engine.check import ConfigFile, check
from plimsoll.engine.versions import engine_named
from plimsoll.errors import BadInput


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = split_options(words, with_value=("--vllm", "--from", "--pid"), switches=("--json", "--help", "-h"))
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    engine = engine_named(options.values.get("--vllm"))
    came_from = engine_named(options.values["--from"], "--from") if "--from" in options.values else None
    results = [check(launch, engine, came_from, _config_of(launch, folder)) for launch, folder in _launches(options)]
    from plimsoll.report import flags as report

    show(report.as_json(results) if "--json" in options.switches else report.as_text(results))
    return 1 if any(item.status.is_problem for result in results for item in result.items) else 0


def _launches(options: Split) -> list[tuple[Launch, str]]:
    """The starts to check, each with the folder that relative paths in it most likely mean."""
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
        raise BadInput("nothing to check; give a command, a file, --pid N or - (plimsoll flags --help)")
    if options.verbatim is None and len(command) == 1 and _is_file(command[0]):
        stdin = sys.stdin.buffer if command[0] == "-" and sys.stdin is not None else None
        folder = here if command[0] == "-" else dirname(command[0])
        return [(launch, folder) for launch in read_launches(command[0], stdin)]
    if len(command) == 1:
        return [(launch, here) for launch in _pasted(command[0])]
    launch = find_launch(command, (), "command line")
    if launch is None:
        shown = " ".join(command[:3])
        raise BadInput(f"no vLLM start in `{shown} ...`; it begins with `vllm serve`, `python -m vllm...` or `docker run`")
    return [(launch, here)]


def _is_file(word: str) -> bool:
    return word == "-" or not any(blank in word for blank in " \t\n")


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


def _config_of(launch: Launch, folder: str) -> ConfigFile | None:
    """The flags of a `--config` file, where the file is at hand."""
    words = launch.arguments
    place = next((i for i, w in enumerate(words[:-1]) if w == "--config"), None)
    if place is None or "$" in words[place + 1]:
        return None
    for path in (words[place + 1], join(folder, words[place + 1])):
        if isfile(path):
            from plimsoll.sources.vllm_config import read_vllm_config

            return ConfigFile(path, read_vllm_config(path))
    return ConfigFile(words[place + 1], None)

"""usage: plimsoll flags [--vllm VERSION] [--from VERSION] [--json] WHAT

Says which flags of a vLLM start command a version takes, which it refuses, which do nothing, and rewrites the command so
that the version takes it. Needs no GPU, no model and no vLLM.

WHAT is one of
  vllm serve MODEL ...          the command itself, as pasted (put -- in front to keep every word for vLLM)
  start.sh                      a shell script, a systemd unit
  compose.yaml, deployment.yaml a compose file or Kubernetes manifest
  -                             any of these on standard input

{options}

Exit codes: 0 the version takes it, 1 something is refused or has no effect, 2 WHAT cannot be read.
Read on: docs/flags.md
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.cli.main import OptionsCommand
from plimsoll.launch.check_flags import check, with_branches
from plimsoll.launch.command_line import config_of, engine_meant, launches_named
from plimsoll.launch.options import Words, option, pid_of, switch
from plimsoll.render import flags as report
from plimsoll.render.terminal import show
from plimsoll.vllm.versions import engine_named, releases


@dataclass(frozen=True, kw_only=True)
class FlagsOptions(Words):
    vllm: str | None = option(
        "VERSION",
        "the version to check against; default: what the image, a pin or the process says, else the newest known",
        offers=releases,
    )
    came_from: str | None = option(
        "VERSION", "also say what the upgrade from this version changes for this command", name="--from", offers=releases
    )
    pid: int | None = option("N", "check the server that runs as process N", read=pid_of)
    json: bool = switch("one JSON object, schema plimsoll.flags/1")


def run(options: FlagsOptions) -> int:
    came_from = engine_named(options.came_from, "--from") if options.came_from is not None else None
    named = launches_named(options, "flags")
    results = [
        with_branches(check(launch, engine_meant(launch, options.vllm), came_from, config_of(launch, folder)))
        for launch, folder in named
    ]
    show(report.as_json(results) if options.json else report.as_text(results))
    return 1 if any(item.status.is_problem for result in results for item in result.items) else 0


COMMAND = OptionsCommand("flags", FlagsOptions, run, __doc__, is_open=True)

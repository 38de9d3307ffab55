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

from plimsoll.launch.check_flags import check, with_branches
from plimsoll.launch.inputs import config_of, launches_named
from plimsoll.launch.options import split_options
from plimsoll.render import flags as report
from plimsoll.render.terminal import show
from plimsoll.vllm.versions import engine_named


def run(words: list[str]) -> int:
    """Prints the verdict on every flag of the commands that were named."""
    options = split_options(words, with_value=("--vllm", "--from", "--pid"), switches=("--json", "--help", "-h"))
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    engine = engine_named(options.values.get("--vllm"))
    came_from = engine_named(options.values["--from"], "--from") if "--from" in options.values else None
    named = launches_named(options, "flags")
    results = [with_branches(check(launch, engine, came_from, config_of(launch, folder))) for launch, folder in named]
    show(report.as_json(results) if "--json" in options.switches else report.as_text(results))
    return 1 if any(item.status.is_problem for result in results for item in result.items) else 0

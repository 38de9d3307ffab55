"""usage: plimsoll lint [--gpu NAME] [--vllm VERSION] [--json] FILE...

Finds what will go wrong with a vLLM server before its file is deployed: flags that its version refuses or ignores, a command
that does not fit its card, probes that kill a slow start, stops that cut requests off, too little shared memory, restarts
that do not come, secrets in the open. Each with its line, the reason and the fix. Nothing is run and nothing is changed.

FILE is a compose file, a Kubernetes manifest (a Helm chart once rendered with `helm template`), a systemd unit or a script.

{options}

Exit codes: 0 no trap, 1 at least one, 2 a FILE cannot be read or starts no vLLM.
Read on: docs/lint.md
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import BadInput
from plimsoll.launch.files import NoStart
from plimsoll.launch.options import switch
from plimsoll.lint.check import LintedServer, lint_file
from plimsoll.plan.options import ServerOptions
from plimsoll.render import lint as report
from plimsoll.render.terminal import show


@dataclass(frozen=True, kw_only=True)
class LintOptions(ServerOptions):
    skip_others: bool = switch("pass over files that start no vLLM or cannot be read, as a commit hook needs it")
    json: bool = switch("one JSON object, schema plimsoll.lint/1")


def run(options: LintOptions) -> int:
    paths = (*options.rest, *(options.verbatim or ()))
    if not paths:
        raise BadInput("nothing to look at; give a compose file, a manifest or a unit (plimsoll lint --help)")
    files: dict[str, list[LintedServer]] = {}
    skipped: dict[str, str] = {}
    for path in paths:
        try:
            files[path] = lint_file(path, options)
        except BadInput as error:  # a commit hook meets templates and other people's files
            if not options.skip_others:
                raise
            skipped[path] = "" if isinstance(error, NoStart) else str(error)
    show(report.as_json(files, skipped) if options.json else report.as_text(files, skipped))
    return 0 if report.is_fine(files) else 1


COMMAND = OptionsCommand("lint", LintOptions, run, __doc__)

"""usage: plimsoll doctor [INPUT...] [options]

Reads what is left of a vLLM server and says what happened, why, and what fixes it. Needs no GPU and no vLLM.

INPUT, any mix, told apart by what is in it:
  a log file or a folder of them (plain, gzip, zstd; docker, kubectl and journald wrapping; several servers mixed), `-`
  dmesg or journal lines, kubectl describe pod, nvidia-smi, torch.cuda.memory_summary(): text, alone or within a log
  a saved metrics page (several of one server are compared), or http://HOST:8000 of a running one (looked at twice)
  http://PROMETHEUS:9090, with --since 6h (or --start, --end in Unix seconds), --step SECONDS, --match label=value
  a torch memory snapshot (.pickle; nothing in it is executed); two of one process show what grew

  --exit-code N         what the process ended with: 0 to 255, -9 for a signal, or a wait status
  --gpu NAME            the card, where the log does not say its size; or --gpu-memory-gib X
  --timeout S           at most so long for each input (60)
  --watch               look at the servers named again and again, and say what changes; --interval S (10), --looks N
  --html FILE           a memory snapshot as a picture for a browser
  --bundle FILE         OUT.tar.zst, .tar.gz or .tar for a ticket: logs, pages, findings, this machine; secrets and users'
                        text are hidden, CONTENTS.txt says what is in it; --force replaces an old one
  --explain CODE        the page on a finding: runtime.logits, startup.no-cache-blocks, ...; without CODE: which there are
  --json                one object, schema plimsoll.doctor/1 (--schema prints its JSON schema)

Exit codes: 1 a failure was diagnosed (any finding is a warning or critical, also where the first line cannot tell whether it
is of memory), 0 none was (all is well, it was stopped on purpose, or nothing was recognised), 2 your input is wrong, 3 a server
did not answer.
Read on: docs/doctor.md
"""

from __future__ import annotations

from plimsoll.cli.options import Split, split_options
from plimsoll.cli.output import show, write_file
from plimsoll.errors import BadInput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.doctor.diagnosis import Diagnosis

_WITH_VALUE = (
    "--exit-code --timeout --bundle --html --explain --since --start --end --step --match --interval --looks --gpu "
    "--gpu-memory-gib"
).split()
_SWITCHES = "--json --watch --schema --force --help -h".split()


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    if words[-1:] == ["--explain"]:
        words = [*words, ""]  # without a code: the codes there are
    options = split_options(words, with_value=_WITH_VALUE, switches=_SWITCHES)
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    if "--schema" in options.switches:
        show(schema())
        return 0
    if "--explain" in options.values:
        from plimsoll.cli.doctor_pages import page

        show(page(options.values["--explain"]))
        return 0
    _check(options)
    if "--watch" in options.switches:
        from plimsoll.cli.doctor_watch import watch

        return watch(options)
    return _diagnose(options)


def _check(options: Split) -> None:
    unknown = next((word for word in options.rest if word.startswith("-") and word != "-"), None)
    if unknown is not None:
        raise BadInput(f"there is no option {unknown!r}; plimsoll doctor --help lists them")
    if options.verbatim:
        raise BadInput("doctor takes files and addresses, not a command after `--`")
    from plimsoll.cli.doctor_inputs import range_of

    range_of(options)  # what is wrong in an option is wrong also where it is not used
    if {"--gpu", "--gpu-memory-gib"} & set(options.values):
        from plimsoll.cli.plan import card_of

        card_of(options)
    if not options.rest and "--exit-code" not in options.values:
        raise BadInput("nothing to read: name a log, a folder, a metrics address, a snapshot, or - for standard input")


def _diagnose(options: Split) -> int:
    from plimsoll.cli.doctor_inputs import exit_code, gather
    from plimsoll.cli.doctor_plan import Planner
    from plimsoll.doctor.diagnose import diagnose
    from plimsoll.report import doctor as report

    given = gather(options)
    planner = Planner(options)
    diagnosis = diagnose(given.logs, given.judged(), exit_code=exit_code(options), plan_for=planner)
    if planner.said is not None:
        diagnosis = diagnosis._replace(facts={**diagnosis.facts, "plan": planner.said})
    if given.notes:
        said = diagnosis.facts.get("notes")
        notes = [*(said if isinstance(said, list) else ()), *given.notes]
        diagnosis = diagnosis._replace(facts={**diagnosis.facts, "notes": notes})
    if "--html" in options.values:
        write_file(options.values["--html"], given.picture())
    as_text = report.as_text(diagnosis)
    if "--html" in options.values:
        as_text += f"\n\nWrote {options.values['--html']}."
    if "--bundle" in options.values:
        from plimsoll.cli.doctor_bundle import bundle

        as_text += "\n\n" + bundle(options, given, diagnosis, as_text)
    show(report.as_json(diagnosis) if "--json" in options.switches else as_text)
    return failed(diagnosis)


def failed(diagnosis: Diagnosis) -> int:
    """1 where a failure was diagnosed, 0 where nothing more than a word is to be said."""
    return int(any(finding.severity != "info" for finding in diagnosis.findings))


def schema() -> str:
    """The JSON schema of the answer."""
    from pathlib import Path

    import plimsoll.report

    return (Path(plimsoll.report.__file__).parent / "doctor.schema.json").read_text(encoding="utf-8").rstrip()

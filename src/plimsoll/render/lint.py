"""The report of `plimsoll lint`, one line a trap as compilers print them, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.findings import Severity
from plimsoll.lint.check import LintedServer
from plimsoll.redaction import one_line
from plimsoll.render.terminal import BAD, FAINT, GOOD, WARN, Line, Report, json_text, picked

_STYLES = {Severity.CRITICAL: BAD, Severity.WARNING: WARN, Severity.INFO: FAINT}


def as_json(files: Mapping[str, Sequence[LintedServer]], skipped: Mapping[str, str]) -> str:
    """One object, schema plimsoll.lint/1."""
    servers = [
        {
            "file": path,
            **picked(server, "source model vllm vllm_because=because gpu=card"),
            "findings": [picked(trap, "rule severity file line title why fix") for trap in server.traps],
        }
        for path, linted in files.items()
        for server in linted
    ]
    body = {"schema": "plimsoll.lint/1", "fine": is_fine(files), "servers": servers, "skipped": list(skipped)}
    return json_text(body)


def is_fine(files: Mapping[str, Sequence[LintedServer]]) -> bool:
    """True if no trap is graver than INFO."""
    return all(trap.severity is Severity.INFO for linted in files.values() for server in linted for trap in server.traps)


def as_text(files: Mapping[str, Sequence[LintedServer]], skipped: Mapping[str, str]) -> Report:
    """Each trap under its file and line; then one line a server, and the number of traps."""
    report = Report()
    for linted in files.values():
        for server in linted:
            for trap in server.traps:
                where = f"{one_line(trap.file)}:{trap.line}"
                report.append(
                    Line(f"{where}: {trap.severity.value} {trap.rule}: {one_line(trap.title)}", 4, _STYLES[trap.severity])
                )
                report += [Line(f"    why: {one_line(trap.why)}", 9), Line(f"    fix: {one_line(trap.fix)}", 9)]
            card = f"planned on {server.card}" if server.card else "not planned: the card is not known (--gpu NAME)"
            count = sum(trap.severity is not Severity.INFO for trap in server.traps)
            verdict = f"{count} {'trap' if count == 1 else 'traps'}" if count else "no trap"
            basis = f"vLLM {server.vllm} ({one_line(server.because)}), {card}"
            report += [Line(f"{one_line(server.source)}: {verdict}; {basis}", 2, GOOD if not count else WARN), ""]
    others = [path for path, problem in skipped.items() if not problem]
    report += [Line(f"passed over: {one_line(path)}: {one_line(problem)}", 4) for path, problem in skipped.items() if problem]
    if others:
        report.append(f"passed over, no vLLM start: {', '.join(map(one_line, others))}")
    if report and not skipped:
        report.pop()  # the blank line after the last server
    return report

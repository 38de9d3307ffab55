"""What `plimsoll assets` did or would do, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.assets.files import Changes
from plimsoll.redaction import one_line
from plimsoll.render.terminal import wrapped

_STEPS = {
    "systemd": "docs/launch.md#systemd",
    "compose": "the top of compose/compose.yaml, docs/launch.md#compose",
    "kubernetes": "the top of kubernetes/kustomization.yaml, docs/launch.md#kubernetes",
    "monitoring": "docs/monitoring.md",
}


class AssetsReport(NamedTuple):
    """One run: where, from what, and what came of it."""

    folder: str
    vllm: str
    model: str | None
    changes: Changes
    notes: tuple[str, ...] = ()
    is_check: bool = False
    differences: tuple[str, ...] = ()  # of --check: lines of a unified diff

    @property
    def is_fine(self) -> bool:
        """Whether what is there is what is generated; edits of the newest text are fine, but not for --check."""
        changes = self.changes
        if self.is_check:
            return not any((changes.write, changes.kept, changes.outdated, changes.remove, changes.left))
        return not changes.outdated


def as_json(report: AssetsReport, *, starts: bool = True) -> str:
    """One object, schema plimsoll.assets/1; nothing is fine where the server of the plan does not start."""
    changes = report.changes
    body: dict[str, object] = {
        "schema": "plimsoll.assets/1",
        "out": one_line(report.folder),
        "vllm": report.vllm,
        "model": one_line(report.model) if report.model is not None else None,
        "check": report.is_check,
        "fine": starts and report.is_fine,
        "written" if not report.is_check else "would_write": list(changes.write),
        "unchanged": list(changes.same),
        "kept": list(changes.kept),
        "outdated": list(changes.outdated),
        "removed" if not report.is_check else "would_remove": list(changes.remove),
        "left": list(changes.left),
        "notes": [one_line(note) for note in report.notes],
    }
    if report.is_check:
        body["diff"] = "\n".join(report.differences)
    return json.dumps(body, indent=2, ensure_ascii=False)


def as_text(report: AssetsReport) -> str:
    """What was written, what was kept and why; with --check the differences."""
    lines = [*report.differences] if report.is_check else []
    lines += _verdict(report)
    if not report.is_check:
        lines += _listed("edited by hand and kept", report.changes.kept)
        lines += _listed("no longer generated, edited by hand and left in place", report.changes.left)
        lines += _listed("removed, no longer generated", report.changes.remove)
    outdated = "edited by hand, and the generated text has changed: compare with --check, or overwrite with --force"
    lines += _listed(outdated, report.changes.outdated)
    for note in report.notes:
        lines += wrapped(f"  note: {one_line(note)}", " " * 8)
    return "\n".join([*lines, *_next(report)])


def _next(report: AssetsReport) -> list[str]:
    """Where the commands stand that put the written files to use."""
    written = {path.partition("/")[0] for path in report.changes.write}
    if report.is_check or not written & _STEPS.keys():
        return []
    lines = ["", "Next steps:"]
    for way, where in _STEPS.items():
        if way in written:
            lines.append(f"  {way:<12}{where}")
    return lines


def _verdict(report: AssetsReport) -> list[str]:
    changes = report.changes
    of = f"for vLLM {report.vllm}" + (f" and {one_line(report.model)}" if report.model is not None else "")
    if report.is_check:
        count = sum(len(part) for part in (changes.write, changes.kept, changes.outdated, changes.remove, changes.left))
        if not count:
            return [f"{one_line(report.folder)} is as it would be generated {of}: {_files(len(changes.same))}"]
        return [f"{one_line(report.folder)} differs from what would be generated {of}: {_files(count)}"]
    same = f", {len(changes.same)} unchanged" if changes.same else ""
    return [
        f"wrote {_files(len(changes.write))} to {one_line(report.folder)} {of}{same}",
        *(f"  {path}" for path in changes.write),
    ]


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


def _listed(why: str, paths: Sequence[str]) -> list[str]:
    return [f"{why}:", *(f"  {path}" for path in paths)] if paths else []

"""The report of `plimsoll assets`, in words and as JSON."""

from __future__ import annotations

import json
from typing import NamedTuple

from plimsoll.assets.files import Changes
from plimsoll.redaction import one_line
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, NAME, WARN, Line, Report, Whole

_STEPS = {
    "systemd": "docs/launch.md#systemd",
    "compose": "the top of compose/compose.yaml, docs/launch.md#compose",
    "kubernetes": "the top of kubernetes/kustomization.yaml, docs/launch.md#kubernetes",
    "monitoring": "docs/monitoring.md",
    "guard": "the top of guard/kustomization.yaml, docs/kubernetes.md",
    "patch": "the top of patch/kustomization.yaml, docs/kubernetes.md#the-patch",
}


class AssetsReport(NamedTuple):
    """One run: the folder, the sources, and the changes."""

    folder: str
    vllm: str
    model: str | None
    changes: Changes
    notes: tuple[str, ...] = ()
    is_check: bool = False
    differences: tuple[str, ...] = ()  # of --check: lines of a unified diff

    @property
    def is_fine(self) -> bool:
        """True if the files are as generated; edits of the newest text are fine, but not for --check."""
        changes = self.changes
        if self.is_check:
            return not any((changes.write, changes.kept, changes.outdated, changes.remove, changes.left))
        return not changes.outdated


def as_json(report: AssetsReport, *, starts: bool = True) -> str:
    """One object, schema plimsoll.assets/1; `starts` is False where the planned server does not start: then nothing is fine."""
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


def as_text(report: AssetsReport) -> Report:
    """Returns the files written, those kept and why; with --check the differences."""
    changes = report.changes
    of = f"for vLLM {report.vllm}" + (f" and {one_line(report.model)}" if report.model is not None else "")
    colours = {"+": GOOD, "-": BAD, "@": NAME}
    text = Report(Whole(line, colours.get(line[:1], "")) for line in (report.differences if report.is_check else ()))
    if report.is_check:
        count = sum(len(part) for part in (changes.write, changes.kept, changes.outdated, changes.remove, changes.left))
        says = f"differs from what would be generated {of}" if count else f"is as it would be generated {of}"
        text.append(Line(f"{one_line(report.folder)} {says}: {_files(count or len(changes.same))}", 2, WARN if count else GOOD))
    else:
        same = f", {len(changes.same)} unchanged" if changes.same else ""
        text.append(Line(f"wrote {_files(len(changes.write))} to {one_line(report.folder)} {of}{same}", 2, GOOD))
        text += [Whole(f"  {path}") for path in changes.write]
    kept = [
        ("edited by hand and kept", changes.kept),
        ("no longer generated, edited by hand and left in place", changes.left),
        ("removed, no longer generated", changes.remove),
    ]
    outdated = "edited by hand, and the generated text has changed: compare with --check, or overwrite with --force"
    for why, paths in [*(kept if not report.is_check else []), (outdated, changes.outdated)]:
        text += [Line(f"{why}:", 2, WARN), *(Whole(f"  {path}") for path in paths)] if paths else []
    text += [Line(f"  note: {one_line(note)}", 8, FAINT, 7) for note in report.notes]
    written = {path.partition("/")[0] for path in changes.write}
    if not report.is_check and written & _STEPS.keys():
        text += ["", Line("Next steps:", 2, BOLD), *(f"  {way:<12}{_STEPS[way]}" for way in _STEPS if way in written)]
    return text


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"

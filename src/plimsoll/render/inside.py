"""The reports of `plimsoll inside`, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Template

from plimsoll.assets.inside_wheel import ENTRY_POINTS
from plimsoll.launch.inside_command import FLAGS, PLUGIN_NAME, PROBE_PLUGIN_NAME, InsideLaunch
from plimsoll.launch.installed_vllm import InstalledVllm
from plimsoll.redaction import one_line
from plimsoll.render.flags import put_back, rewritten_line
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, WARN, Line, Report, Whole, json_text, picked
from plimsoll.vllm.extension_points import NEEDS, InsidePart, Need, NeedAnswer, PartVerdict, knob_lines
from plimsoll.vllm.versions import Engine

GIVES = {
    InsidePart.PROBE: "each worker's memory figures; compaction and snapshots",
    InsidePart.GATE: "readiness, state, memory and metrics; every request in flight is counted",
    InsidePart.DRAIN: "takes a server out of service without losing a request",
    InsidePart.SHED: "refuses what would wait too long (off unless asked for)",
    InsidePart.RECORDER: "one line for each finished request, for simulate and tune",
}


class Checkup(NamedTuple):
    """The results of `plimsoll inside check` for one vLLM."""

    vllm: InstalledVllm
    engine: Engine  # the known release that it is checked as
    evidence: str
    answers: tuple[NeedAnswer, ...]
    verdicts: tuple[PartVerdict, ...]
    fitted: tuple[InsideLaunch, ...] = ()  # one for each command that was given
    survive: tuple[str, ...] = ()  # lines on the places where containment is armed with this release
    missing: tuple[str, ...] = ()  # the reasons why required parts would be missing

    @property
    def is_visible(self) -> bool | None:
        """True if its Python can import plimsoll.inside; None: no Python was asked."""
        return None if self.vllm.seen is None else self.vllm.seen.is_visible

    @property
    def entry_points(self) -> tuple[str, ...]:
        return () if self.vllm.seen is None else self.vllm.seen.entry_points

    @property
    def takes_all(self) -> bool:
        """True if every part works, the package is not known to be missing and the given commands start."""
        works = all(verdict.works == "yes" for verdict in self.verdicts)
        return works and self.is_visible is not False and all(fitted.checked.starts for fitted in self.fitted)


def check_json(checkups: Sequence[Checkup]) -> str:
    """One object, schema plimsoll.inside/1: the first of several releases, with the `others` in it."""
    first, *others = map(_checkup_json, checkups)
    return json_text(first | ({"others": others} if others else {}))


def _checkup_json(checkup: Checkup) -> dict[str, object]:
    needs = {need.name: need for need in NEEDS}
    return {
        "schema": "plimsoll.inside/1",
        "vllm": checkup.vllm.version,
        "vllm_folder": checkup.vllm.folder,
        "stands_for_it": checkup.engine.release,
        **picked(checkup, "evidence takes_all"),
        "package": {"visible": checkup.is_visible, "entry_points": checkup.entry_points},
        "parts": [picked(verdict, "part works because details") for verdict in checkup.verdicts],
        "needs": [_need_json(answer, needs[answer.name]) for answer in checkup.answers],
        "survive": checkup.survive,
        "knobs": knob_lines(checkup.engine.release),
        "flags": FLAGS,
        "commands": [_command_json(fitted) for fitted in checkup.fitted],
        "missing": checkup.missing,
        "notes": _notes(checkup),
    }


def _need_json(answer: NeedAnswer, need: Need) -> dict[str, object]:
    return {
        **picked(answer, "name state"),
        "purpose": need.purpose,
        "where": answer.where or None,
        "note": answer.note or None,
        "lost": None if answer.state.is_met else need.lost,
        "parts": need.weights,
    }


def _command_json(fitted: InsideLaunch) -> dict[str, object]:
    return {
        "source": fitted.checked.launch.source,
        "starts": fitted.checked.starts,
        "refused": [item.name for item in fitted.checked.items if item.status.is_refused],
        "remarks": [picked(remark, "name says parts leaves=makes") for remark in fitted.remarks],
        "rewritten": rewritten_line(fitted.checked),
    }


def check_text(checkups: Sequence[Checkup]) -> Report:
    """Returns for each release the verdict first, then the parts that are lost, then the commands to type."""
    return Report([line for at, checkup in enumerate(checkups) for line in ([""] if at else []) + _checkup_text(checkup)])


def _checkup_text(checkup: Checkup) -> Report:
    named = f"vLLM {one_line(checkup.vllm.version)}" if checkup.vllm.version else "vLLM of unknown version"
    style = GOOD if checkup.takes_all else BAD
    report = Report(
        [Line(f"{named}: {_headline(checkup)} ({checkup.evidence})", 2, style), f"  {one_line(checkup.vllm.folder)}", ""]
    )
    asked = "contains steps that run out of device memory, with PLIMSOLL_SURVIVE=1"
    parts = [(part.part.value, part.works, GIVES[part.part], (*part.because, *part.details)) for part in checkup.verdicts]
    turned = "limits of the scheduler turn between two steps (docs/knobs.md)"
    more = [("survive", "asked", asked, checkup.survive), ("knobs", "yes", turned, knob_lines(checkup.engine.release))]
    for name, works, gives, reasons in [*parts, *more]:
        colour = {"yes": GOOD, "no": BAD}.get(works, WARN)
        report.append(Line(f"  {name:<10}{works:<8}{gives}", 20, colour, 20))
        report += [Line(f"{'':20}- {one_line(why)}", 22) for why in reasons]
    met = [answer for answer in checkup.answers if answer.state.is_met]
    report += ["", f"{len(met)} of {len(checkup.answers)} things that it relies on are there, by the sources."]
    for answer in checkup.answers:
        if not answer.state.is_met:
            where = f" ({answer.where})" if answer.where else ""
            report.append(Line(f"  {answer.state.value:<10}{answer.name}: {one_line(answer.note)}{where}", 12, WARN, 12))
    report += [Line(f"  {'note':<10}{note}", 12, FAINT, 12) for note in _notes(checkup)]
    for fitted in checkup.fitted:
        report += ["", one_line(fitted.checked.launch.source)]
        refused = [item for item in fitted.checked.items if item.status.is_refused]
        report += [
            Line(f"  {'refused':<10}{one_line(item.name)}: {one_line(item.note or item.status.value)}", 12, BAD, 12)
            for item in refused
        ]
        report += [Line(f"  {'note':<10}{one_line(one.name)}: {one_line(one.says)}", 12, FAINT, 12) for one in fitted.remarks]
        command = rewritten_line(fitted.checked)
        report += ["", Line("With plimsoll.inside:", 2, BOLD), "", Whole(f"  {command}"), *put_back(command)]
    if not checkup.fitted:
        report += ["", Line("Add to the command:", 2, BOLD), "", Whole(f"  {' '.join(FLAGS)}")]
    report += (
        ["", *(Line(f"  {'required':<10}{one_line(why)}", 12, BAD, 12) for why in checkup.missing)] if checkup.missing else []
    )
    opened = "Endpoints other than /plimsoll/ready open with PLIMSOLL_TOKEN or PLIMSOLL_TOKEN_FILE in the environment."
    return Report([*report, "", opened])


def _headline(checkup: Checkup) -> str:
    if checkup.takes_all:
        return "takes plimsoll.inside"
    if checkup.is_visible is False:
        return "cannot take plimsoll.inside yet: its Python does not see it"
    works = [verdict.works for verdict in checkup.verdicts]
    if all(word == "no" for word in works):
        return "does not take plimsoll.inside"
    if not all(word == "yes" for word in works):
        return "takes plimsoll.inside in part"
    return "takes plimsoll.inside, but refuses this command as it is"


def _notes(checkup: Checkup) -> list[str]:
    notes = []
    if checkup.is_visible is False:
        notes.append("`plimsoll inside wheel` makes the file that its Python needs, and says how to mount it")
    elif checkup.is_visible and set(checkup.entry_points) < {PLUGIN_NAME, PROBE_PLUGIN_NAME}:
        notes.append(
            "it is importable but not installed: vLLM finds no entry points, so the gate brings the recorder, "
            "and PLIMSOLL_PROBE=plugin has no effect"
        )
    if checkup.engine.note:
        notes.append(one_line(checkup.engine.note))
    return notes


# Ways to install the wheel that `plimsoll inside wheel` wrote: into a pod, a container or an environment.

WAYS = ("kubernetes", "docker", "pip")


def wheel_text(path: str, size_bytes: int, sha256: str, ways: Sequence[str]) -> str:
    """Returns the wheel's path, and the next steps."""
    text = (Path(__file__).parent / "templates/wheel.txt.j2").read_text(encoding="utf-8")
    facts = {"path": path, "name": path.rpartition("/")[2], "size_bytes": size_bytes, "sha256": sha256, "ways": ways}
    return str(Template(text, trim_blocks=True).render(facts, flags=" ".join(FLAGS))).rstrip()


def wheel_json(path: str, size_bytes: int, sha256: str, members: Sequence[str]) -> str:
    """One object, schema plimsoll.inside-wheel/1."""
    body = {"schema": "plimsoll.inside-wheel/1", "path": path, "bytes": size_bytes, "sha256": sha256, "members": list(members)}
    return json_text(body | {"entry_points": ENTRY_POINTS})

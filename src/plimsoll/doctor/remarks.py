"""What a reader should know of a text beside its findings: that it is empty, another program's, breaks off, or has no end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plimsoll.doctor.judge import Verdict, spans_of_servers
from plimsoll.doctor.steps import Progress
from plimsoll.doctor.story import Story
from plimsoll.domain.finding import Evidence
from plimsoll.domain.log import Line
from plimsoll.domain.units import format_gib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.doctor.nvidia_smi import SmiFacts

_MIB = 1 << 20
_MOST_HOLDERS = 4
_CAME_UP = "Application startup complete"
_WHEN = {
    Progress.BEGUN: "before it loads the model",
    Progress.LOADING: "while it loads the model",
    Progress.LOADED: "after the model was loaded and before its memory was measured",
    Progress.MEASURED: "after its memory was measured",
    Progress.CAPTURING: "while it captures CUDA graphs",
    Progress.CAPTURED: "right before it would serve",
}


def is_foreign(story: Story, verdict: Verdict) -> bool:
    """Whether vLLM says nothing in this text: no process of its own, no step of its start, not even its name."""
    if verdict.progress is not Progress.UNKNOWN or story.marks:
        return False
    return not any(line.process or "vllm" in line.text.lower() for line in story.log.lines)


def remarks_on(
    story: Story, verdict: Verdict, last: Evidence | None, *, memory: bool | None, has_findings: bool, is_server: bool
) -> Iterator[str]:
    """Sentences, most of the time none; `last` is the last line that says anything, `is_server` what a finding rests on."""
    source = story.log.source
    if last is None:
        yield f"{source} is empty: nothing was written to it"
        return
    if is_server and verdict.root is not None and is_foreign(story, verdict):
        yield f"nothing in {source} is recognised as vLLM's own: make sure that it is the server's log before you act on it"
    yield from list(_servers_at_once(story.log.lines)) or _came_up_later(story.log.lines, verdict)
    if verdict.root is not None or verdict.deaths or has_findings:
        return
    if memory is None and verdict.progress in _WHEN:
        at = "" if last.line is None else f" at line {last.line}"
        yield f"{source} breaks off{at}, {_WHEN[verdict.progress]}, and does not say why; its last words: {last.text[:160]}"
    elif memory is False and verdict.progress is Progress.SERVING:
        yield (
            "the log shows a server that came up, and no end of it. If it was restarted, this is the log of the new one: "
            "kubectl logs --previous NAME, or the log from before the restart, has what ended the old one"
        )


def _servers_at_once(lines: Sequence[Line]) -> Iterator[str]:
    """Two servers that write into one file at the same time: most likely they share the cards, too."""
    spans = spans_of_servers(lines, 0, len(lines))
    up: dict[str, int | None] = {}
    for line in lines:
        if line.process in spans and _CAME_UP in line.text:
            up.setdefault(line.process, line.number)
    for name, (first, end) in spans.items():
        for other, (other_first, other_end) in spans.items():
            if first < other_first <= end and first < other_end:
                came = [f"{one} came up (line {up[one]})" for one in (name, other) if up.get(one) is not None]
                yield (
                    f"two servers wrote into this log at the same time, {name} and {other}"
                    + (f"; {' and '.join(came)}" if came else "")
                    + ". Where they share cards, what one takes is missing to the other while it measures: start one, wait "
                    "until it serves, then start the other with what is left"
                )
                return


def _came_up_later(lines: Sequence[Line], verdict: Verdict) -> Iterator[str]:
    """A failure with a start after it that succeeded."""
    if verdict.root is None or verdict.stopped:
        return
    up = next((line for line in lines[verdict.root.at :] if _CAME_UP in line.text), None)
    if up is not None:
        who = f"({up.process}) " if up.process else ""
        where = "further down in this log" if up.number is None else f"at line {up.number} of this log"
        yield f"a server {who}came up {where}, after what failed above: it may be over, or it is another server's log, too"


def cards_shown(facts: SmiFacts) -> Iterator[str]:
    """Who holds how much of each card, as nvidia-smi shows it."""
    reading = facts.last
    for gpu in reading.gpus if reading else ():
        if gpu.used_mib is None or gpu.total_mib is None:
            continue
        mine = sorted(
            (one for one in facts.processes or () if one.gpu == gpu.number and one.mib), key=lambda one: -(one.mib or 0)
        )
        held = [f"{one.name} (pid {one.pid}) {format_gib((one.mib or 0) * _MIB)}" for one in mine[:_MOST_HOLDERS]]
        by = f": {', '.join(held)}" if held else ""
        yield f"GPU {gpu.number}: {format_gib(gpu.used_mib * _MIB)} of {format_gib(gpu.total_mib * _MIB)} are in use{by}"
    yield from facts.notes

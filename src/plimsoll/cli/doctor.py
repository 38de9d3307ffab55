"""usage: plimsoll doctor [INPUT...] [options]

Reads what is left of a vLLM server and says what happened, why, and what fixes it. Needs no GPU and no vLLM.

INPUT, any mix, told apart by what is in it:
  a log file or a folder of them (plain, gzip, zstd; docker, kubectl and journald wrapping; several servers mixed), `-`
  dmesg or journal lines, kubectl describe pod, nvidia-smi: text, alone or within a log
  a saved metrics page (several of one server are compared), or http://HOST:8000 of a running one (looked at twice)
  http://PROMETHEUS:9090, with --since 6h (or --start, --end in Unix seconds), --step SECONDS, --match label=value
  a torch memory snapshot (.pickle; nothing in it is executed); two of one process show what grew

{options}

Exit codes: 1 a failure was diagnosed (any finding is a warning or critical, also where the first line cannot tell whether it
is of memory), 0 none was (all is well, it was stopped on purpose, or nothing was recognised), 2 your input is wrong, 3 a server
did not answer. Read on: docs/doctor.md
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import plimsoll
from plimsoll.cli.main import OptionsCommand
from plimsoll.doctor.read.inputs import DoctorInputs, RangeOptions, read_inputs
from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose
from plimsoll.doctor.rules.facts import LogFacts, PlanFigures, command_words
from plimsoll.errors import BadInput, PlimsollError
from plimsoll.findings import Code
from plimsoll.hardware.cards import gpu_names
from plimsoll.launch.options import option, switch
from plimsoll.plan.options import CardOptions, ServerOptions, memory_of
from plimsoll.render import doctor as report
from plimsoll.render.terminal import bar, show
from plimsoll.units import GIB, format_count
from plimsoll.vllm.metrics_page import Page, escaped_label

USUAL_TIMEOUT_S = 60.0
LOWEST_EXIT = -64  # Python's way to name a signal


def _positive(text: str, most: float, error: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < most:
        raise BadInput(error)
    return value


def _seconds(text: str, name: str) -> float:
    return _positive(text.removesuffix("s"), 1e9, f"{name} {text!r} is not a number of seconds")


def _moment(text: str, name: str) -> float:
    return _positive(text, 1e11, f"{name} {text!r} is not a time in Unix seconds (date +%s)")


def _span(text: str, name: str) -> float:
    scale = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}.get(text[-1:], 0)
    wrong = f"{name} {text!r} is not a time: 30m, 6h, 2d"
    return _positive(text[:-1] if scale else text, 1e9 / (scale or 1), wrong) * (scale or 1)


def _labels(text: str, name: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(label and equals for label, equals, _ in pairs):
        raise BadInput(f"{name} wants label=value, several joined by commas")
    return {label.strip(): value.strip().strip("\"'") for label, _, value in pairs}


def _exit_code(text: str, name: str) -> int:
    if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > 8:
        raise BadInput(f"{name} {text!r} is not a number")
    code = int(text)
    if not (LOWEST_EXIT <= code <= 255 or (code % 256 == 0 and 0 < code >> 8 <= 255)):
        raise BadInput(f"{name} {text}: there is no such code; 0 to 255, a signal as -1 to -64, or a wait status (35072)")
    return code


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(CardOptions):
    gpu: str | None = option("NAME", "the card, where the log does not say its size", offers=gpu_names)
    gpu_memory_gib: int | None = option("X", "or its memory alone", read=memory_of)
    exit_code: int | None = option("N", "what the process ended with: 0 to 255, -9 a signal, or a wait status", read=_exit_code)
    timeout: float | None = option("S", "at most so long for each input (60)", read=_seconds)
    since: float | None = option("6h", "of a Prometheus: so much of its past", read=_span)
    start: float | None = option("TIME", "or from here, in Unix seconds", read=_moment)
    end: float | None = option("TIME", "to here", read=_moment)
    step: float | None = option("SECONDS", "and how far apart its points are", read=_seconds)
    match: dict[str, str] | None = option("label=value", "only series with these labels", read=_labels)
    bundle: str | None = option(
        "FILE", "OUT.tar.zst, .tar.gz or .tar for a ticket; secrets and users' text are hidden, CONTENTS.txt says what is in it"
    )
    force: bool = switch("replace an old bundle")
    explain: str | None = option(
        "CODE", "the page on a finding: runtime.logits, ...; without CODE: which there are", bare="", offers=lambda: list(Code)
    )
    schema: bool = switch("the JSON schema of --json")
    json: bool = switch("one object, schema plimsoll.doctor/1")


def run(options: DoctorOptions) -> int:
    if options.schema:
        show((Path(report.__file__).parent / "doctor.schema.json").read_text(encoding="utf-8").rstrip())
        return 0
    if options.explain is not None:
        show(page(options.explain))
        return 0
    if options.verbatim:
        raise BadInput("doctor takes files and addresses, not a command after `--`")
    if options.gpu is not None or options.gpu_memory_gib is not None:
        from plimsoll.plan.read import card_of

        card_of(options)  # what is wrong in an option is wrong also where it is not used
    if not options.rest and options.exit_code is None:
        raise BadInput("nothing to read: name a log, a folder, a metrics address, a snapshot, or - for standard input")
    names = {"since": "since_s", "start": "start_s", "end": "end_s", "step": "step_s", "match": "match"}
    given = {field: value for field in names if (value := getattr(options, field)) is not None}
    time_range: RangeOptions = {names[field]: value for field, value in given.items()}  # type: ignore[assignment]
    timeout_s, flags = options.timeout or USUAL_TIMEOUT_S, frozenset(f"--{field}" for field in given)
    with bar("reading", "inputs") as progress:
        inputs = read_inputs(options.rest, timeout_s=timeout_s, time_range=time_range, range_flags=flags, on_progress=progress)
    planner = Planner(options)
    diagnosis = diagnose(inputs.logs, inputs.judge(), exit_code=options.exit_code, plan_for=planner)
    if planner.figures is not None:
        diagnosis = diagnosis._replace(facts={**diagnosis.facts, "plan": planner.figures})
    if inputs.notes:
        known = diagnosis.facts.get("notes")
        notes = [*(known if isinstance(known, list) else ()), *inputs.notes]
        diagnosis = diagnosis._replace(facts={**diagnosis.facts, "notes": notes})
    as_text = report.as_text(diagnosis)
    if options.bundle is not None:
        as_text += ["", bundle(options, inputs, diagnosis, str(as_text))]
    show(report.as_json(diagnosis) if options.json else as_text)
    return int(any(finding.severity != "info" for finding in diagnosis.findings))


def bundle(options: DoctorOptions, inputs: DoctorInputs, diagnosis: Diagnosis, as_text: str) -> str:
    """Write the archive for a ticket, with secrets and users' text hidden; returns the sentence that says so."""
    from plimsoll.doctor.read.bundle import ArchivePart, TextFile, collect_here, write_bundle

    found = report.as_json(diagnosis).encode()
    parts = [
        ArchivePart("doctor.json", "json", "The findings and facts, schema plimsoll.doctor/1.", found),
        ArchivePart("report.txt", "text", "The same as a person reads it.", as_text.encode()),
    ]
    for log in inputs.logs:
        name = f"logs/{log.source.rpartition('/')[2] or 'log'}"
        parts.append(ArchivePart(name, "text", "A log or other text that was given.", TextFile(inputs.paths[log.source])))
    for page in inputs.pages:
        source = page.source.rpartition("/")[2]
        name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in source)[-80:] or "page"
        looks = ((page.first, "A page of metrics."), (page.second, "The same a few seconds later."))
        parts += [
            ArchivePart(f"metrics/{name}-{number}.txt", "text", what, "\n".join(_page(look)).encode())
            for number, (look, what) in enumerate(looks, 1)
            if look is not None
        ]
    never_copied = "a memory snapshot is never copied; what it shows is in doctor.json"
    parts += collect_here()
    with bar("packing, secrets hidden", "parts") as progress:

        def packed() -> Iterator[ArchivePart]:
            for place, part in enumerate(parts):
                progress(place, len(parts))
                yield part

        written = write_bundle(
            options.bundle or "", packed(), made_with=f"plimsoll {plimsoll.__version__}", at=int(time.time()),
            force=options.force, left_out=[f"{source.rpartition('/')[2]}: {never_copied}" for source, _ in inputs.snapshots],
        )  # fmt: skip
    return (
        f"Wrote {written.path}: {len(written.members)} files, {format_count(written.size_bytes)} bytes, "
        "secrets and users' text hidden. Look at its CONTENTS.txt before you send it."
    )


def _page(page: Page) -> Iterator[str]:
    """The samples as Prometheus writes them."""
    for samples in page.by_name.values():
        for one in samples:
            labels = ",".join(f'{name}="{escaped_label(value)}"' for name, value in one.labels.items())
            yield f"{one.name}{'{' + labels + '}' if labels else ''} {one.value:.17g}"


_INSTALLED = Path(plimsoll.__file__).parent / "findings"
_REPOSITORY = Path(plimsoll.__file__).parents[2] / "docs" / "findings"


def page(code: str) -> str:
    """The page, or the list of all where no code is given; BadInput with what was probably meant where there is none such."""
    known = [str(one) for one in Code]
    code = code.strip().lower() or "README"
    if code not in (*known, "README"):
        near = [one for one in known if one.startswith(f"{code.rstrip('.')}.")] or difflib.get_close_matches(code, known, n=3)
        near = near or [one for one in known if code.replace(" ", "-") in one]
        meant = f"did you mean {', '.join(near)}?" if near else "plimsoll doctor --explain lists them all"
        raise BadInput(f"there is no finding {code!r}; {meant}")
    for folder in (_INSTALLED, _REPOSITORY):
        file = folder / f"{code}.md"
        if file.is_file():
            return file.read_text(encoding="utf-8").rstrip()
    raise BadInput(f"the page of {code} is not in this installation; it is docs/findings/{code}.md of the repository")


class Planner:
    """Plans the server of a log, so that remedies come with values computed for it.

    Returns None where the log says too little or the model is not at hand. Never asks the network.
    """

    def __init__(self, options: DoctorOptions) -> None:
        self._options = options
        self.figures: dict[str, object] | None = None

    def __call__(self, facts: LogFacts) -> PlanFigures | None:
        """The plan of this server's own command."""
        words, total = command_words(facts.flags), facts.measured.total_bytes
        # A folder that this machine does not have belongs to the machine the log is from.
        is_folder = words is not None and words[2].startswith(("/", "./", "../", "~"))
        is_here = words is not None and not (is_folder and not os.access(words[2], os.R_OK))
        given = self._options.gpu is not None or self._options.gpu_memory_gib is not None
        if not given and (total is None or not is_here):
            return None
        from plimsoll.plan.read import card_of

        try:
            if words is not None and is_here:
                memory = self._options.gpu_memory_gib if given else memory_of(f"{(total or 0) / GIB:.3f}", "the log")
                return self._plan(words, facts, memory)
        except PlimsollError:
            pass  # a model nobody described, a flag that makes no sense: the log's own figures must do
        return PlanFigures(total_bytes=card_of(self._options).total_bytes) if given else None

    def _plan(self, words: list[str], facts: LogFacts, memory: int | None) -> PlanFigures:
        os.environ["HF_HUB_OFFLINE"] = "1"  # a diagnosis must not wait for a hub, nor tell it anything
        from plimsoll.plan.read import plan_command

        planned = plan_command(
            ServerOptions(gpu=self._options.gpu, gpu_memory_gib=memory, vllm=facts.version or None, verbatim=tuple(words))
        )
        ledger = planned.ledger
        figures = PlanFigures(
            ledger.weights.value, ledger.kv.value, ledger.slack.value, ledger.card.total_bytes, ledger.requested.value,
            planned.shape.vocab_size, tuple(planned.advice),
        )  # fmt: skip
        self.figures = {name: value for name, value in figures._asdict().items() if name != "advice"}
        return figures


COMMAND = OptionsCommand("doctor", DoctorOptions, run, __doc__)

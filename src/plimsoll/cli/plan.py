"""usage: plimsoll plan --gpu NAME [options] vllm serve MODEL [any vllm flag...]

Says before launch whether a vLLM server fits its GPU, how many KV blocks remain, and what limits it. Needs no GPU, no vLLM
and, for a local folder or a bundled model, no network.

  --gpu NAME            the card: H100, L40S, A100-80G, ... (docs/gpus.md lists them); default: this machine's, through NVML
  --gpus N              how many there are; default: as many as the command needs (TP x PP x DP)
  --gpu-memory-gib X    a card that is not known, by the memory vLLM sees; with --gpu it replaces the card's total
  --used-gib X          memory that other processes hold on the card
  --vllm VERSION        default: the vLLM installed beside plimsoll, else the newest known
  --from VERSION        also what the upgrade from this version does to the flags and the KV cache
  --pid N               plan the server that runs as process N
  --workload prompt=1200,output=300,concurrency=64
                        will that many such requests fit at once, what paging saves, what block sizes waste;
                        or a trace (Azure's CSV, Mooncake's JSON lines): TRACE or TRACE:concurrency=64
  --matrix context=8k,32k,128k concurrency=8..256
                        what fits, for every combination
  --html FILE           the plan as one page for a browser, with the matrix as a heat map
  --certify             can any admitted request exceed the card (docs/certify.md); --table FILE writes what the door reads
  --compare FILE        one command a line, planned side by side; a line may begin with a --gpu (or --vllm) of its own
  --learn LOG           read the log of a real start of this command, show planned against measured, and use it next time
  --forget              forget all that was learned
  --json                one JSON object, schema plimsoll.plan/1

MODEL is a folder with config.json, a model in Hugging Face's own cache or in the bundled catalogue (docs/models.md), or any
other id, whose config.json and safetensors headers are then read from the Hugging Face hub. HF_HUB_OFFLINE=1 forbids that.
Instead of a command, a script, compose file or manifest works as well: plimsoll plan --gpu L4 start.sh

Exit codes: 0 it fits (is certified), 1 it does not, 2 your input is wrong, 3 the hub did not answer. Read on: docs/plan.md
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.hardware.cards import Vendor, gpu_named
from plimsoll.launch.arguments import launches_named
from plimsoll.launch.check_flags import Checked, with_config
from plimsoll.launch.command_line import read_command_line
from plimsoll.launch.options import Split, split_options
from plimsoll.plan.certify import Certificate, Kind, Question, assumptions_of, certify, smallest_request
from plimsoll.plan.certify_terms import RequestLimits, read_limits
from plimsoll.plan.findings import stops_the_start
from plimsoll.plan.ledger import ModelFacts
from plimsoll.plan.read import Ready, card_of, planned_from, planned_launch, read_launch
from plimsoll.plan.settings import AUTO_FIT, Flags
from plimsoll.render.terminal import show, write_file
from plimsoll.units import GIB, format_count

if TYPE_CHECKING:
    from plimsoll.launch.launches import Launch
    from plimsoll.plan.ledger import Ledger
    from plimsoll.plan.matrix import Matrix
    from plimsoll.plan.workload import WorkloadAnswer


OPTIONS_WITH_VALUE = tuple(
    "--gpu --gpus --gpu-memory-gib --used-gib --vllm --from --pid --workload --matrix --html --compare --learn --table".split()
)
_SWITCHES = ("--json", "--forget", "--certify", "--help", "-h")


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = _with_matrix(split_options(words, with_value=OPTIONS_WITH_VALUE, switches=_SWITCHES))
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    if "--forget" in options.switches:
        return _forget(options)
    if "--learn" in options.values:
        return _learn(options)
    if "--compare" in options.values:
        return compare(options)
    named = launches_named(options, "plan")
    ready = read_launch(options, *named[0])
    ready = ready._replace(notes=(*_others_in_file(options, named), *ready.notes))
    if "--certify" in options.switches or "--table" in options.values:
        return run_certify(options, ready)
    planned = planned_from(ready)
    answer, matrix = _workload(options, planned.ledger, ready.model), _matrix(options, ready)
    if "--html" in options.values:
        from plimsoll.render.plan_html import as_html

        write_file(options.values["--html"], as_html(planned, matrix=matrix, workload=answer))
    from plimsoll.render import plan as report

    show((report.as_json if "--json" in options.switches else report.as_text)(planned, matrix, answer))
    return 0 if planned.fits and (answer is None or answer.verdict.is_fine) else 1


def _others_in_file(options: Split, named: list[tuple[Launch, str]]) -> tuple[str, ...]:
    """A file with several starts: which of them this is, and how to see all."""
    if len(named) < 2:
        return ()
    file = "FILE" if options.rest[:1] in ((), ("-",)) else options.rest[0]
    first = f"{len(named)} vLLM starts were found and this is the first, {named[0][0].source}"
    return (f"{first}; --compare {file} plans them all, side by side",)


def _with_matrix(options: Split) -> Split:
    """`--matrix context=8k,32k concurrency=8..64` is one value in two words."""
    if "--matrix" not in options.values:
        return options
    more = [word for word in options.rest if word.partition("=")[0] in ("context", "concurrency")]
    values = {**options.values, "--matrix": " ".join([options.values["--matrix"], *more])}
    return options._replace(values=values, rest=tuple(word for word in options.rest if word not in more))


def _forget(options: Split) -> int:
    from plimsoll.plan.store import forget
    from plimsoll.render.plan import forgotten

    show(forgotten(forget(), is_json="--json" in options.switches))
    return 0


def _learn(options: Split) -> int:
    """What a real start of this command printed, beside what was planned; kept for the next plan."""
    from plimsoll.plan.learned import compare, correction_from, key_of
    from plimsoll.plan.store import read_start, store
    from plimsoll.render import plan

    measured = read_start(options.values["--learn"])
    ready = read_launch(options, *launches_named(options, "plan")[0], learned=False)
    ledger, _ = ready.replan(ready.settings)
    store(key_of(ledger, ready.model.shape), correction_from(ledger, measured))
    differences = compare(ledger, measured)
    show(plan.learned_as_json(differences) if "--json" in options.switches else plan.learned_as_text(differences))
    return 0


def _workload(options: Split, ledger: Ledger, model: ModelFacts) -> WorkloadAnswer | None:
    if "--workload" not in options.values:
        return None
    from plimsoll.plan.workload import Workload, judge

    text = options.values["--workload"]
    path, _, wish = text.partition(":concurrency=")
    if "=" in path:
        return judge(Workload.parse(text), ledger, model)
    from plimsoll.simulate.trace_files import read_lengths

    if wish and not wish.isdigit():
        raise BadInput(f"--workload {text!r}: the concurrency is a number")
    return judge(Workload.from_trace(read_lengths(path), int(wish) if wish else None), ledger, model)


def _matrix(options: Split, ready: Ready) -> Matrix | None:
    if "--matrix" not in options.values:
        return None
    from plimsoll.plan.matrix import MatrixSpec, plan_matrix

    return plan_matrix(
        MatrixSpec.parse(options.values["--matrix"]),
        ready.settings,
        lambda changed: ready.replan(changed)[0],
        longest=ready.model.shape.max_context,
    )


# `plimsoll plan --certify`: whether any request that a command admits can exceed the card, and what closes each kind.

SCHEMA, TABLE_SCHEMA = "plimsoll.certify/1", "plimsoll.certificate/1"
_NOT_BESIDE = ("--workload", "--matrix", "--html")


def run_certify(options: Split, ready: Ready) -> int:
    """Certify the command, print the answer and write the door's table where one was asked for."""
    if "--certify" not in options.switches:
        raise BadInput("--table writes a certificate's table: it stands beside --certify")
    beside = [name for name in _NOT_BESIDE if name in options.values]
    if beside:
        raise BadInput(f"--certify answers one question; {beside[0]} beside it asks another")
    certificate = certificate_of(ready)
    if "--table" in options.values:
        _write_table(options.values["--table"], certificate, ready)
    show(as_json(certificate, ready) if "--json" in options.switches else as_text(certificate, ready))
    return 0 if certificate.certified else 1


def certificate_of(ready: Ready) -> Certificate:
    """The certificate of a command that was read."""
    ledger, findings = ready.replan(ready.settings)
    limits = limits_of(ready.checked)
    other = _other_card(ledger.card.name)
    limits = limits._replace(not_modelled=(*other, *limits.not_modelled))
    certificate = certify(Question(ready.model, ready.settings, limits, lambda changed: ready.replan(changed)[0]))
    return certificate._replace(starts=not any(stops_the_start(finding) for finding in findings))


def limits_of(checked: Checked) -> RequestLimits:
    """What the command's flags and variables say of the requests it takes."""
    release = checked.engine.release
    line = with_config(read_command_line(checked.rewritten[2:], release, unseen=checked.unseen), checked.config, checked.engine)
    return read_limits(Flags(line, release), dict(checked.launch.environment))


def _other_card(name: str) -> tuple[str, ...]:
    """Cards for which nothing was counted: other makers' kernels, and memory that the host hands out as well."""
    try:
        gpu = gpu_named(name)
    except BadInput:
        return ()  # known by its size alone
    if gpu.vendor is not Vendor.NVIDIA:
        return (f"the step on {name}, which runs other kernels",)
    return (f"what the host takes of {name}'s memory",) if gpu.unified_memory else ()


def _write_table(path: str, certificate: Certificate, ready: Ready) -> None:
    text = json.dumps(table_of(certificate, ready.model.name, datetime.now(UTC).isoformat(timespec="seconds")), indent=1)
    try:
        write_file(path, text + "\n")
    except WorldFailed as error:
        raise BadInput(f"--table {error}") from None


def table_of(certificate: Certificate, model: str, made: str) -> dict[str, Any]:
    """The table that the door reads. A kind that no request can exceed costs nothing: its worst is held back already."""
    settings = certificate.ledger.settings
    return {
        "schema": TABLE_SCHEMA,
        "vllm": settings.release,
        "model": model,
        "gpu": certificate.ledger.card.name,
        "made": made,
        "certified": certificate.certified,
        "spare_bytes": certificate.spare,
        "assumes": _assumes(certificate),
        "kinds": [
            _kind_row(kind) | ({} if kind.is_open else {"fixed_bytes": 0, "bytes_per_unit": 0}) for kind in certificate.kinds
        ],
    }


def _assumes(certificate: Certificate) -> dict[str, int | float]:
    """What must be so; the door holds the names of vLLM's settings against the engine's own."""
    settings = certificate.ledger.settings
    assumes: dict[str, int | float] = {
        "free_bytes_at_start": certificate.free_at_start,
        "neighbours_bytes": certificate.ledger.card.used_bytes,
        "pieces_bytes": certificate.pieces,
        "alive_bytes": certificate.alive,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_logprobs": certificate.step.limits.max_logprobs,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "v2_model_runner": settings.v2_runner,
    }
    if settings.max_model_len != AUTO_FIT:
        assumes["max_model_len"] = settings.max_model_len
    if not settings.has_fixed_cache:
        assumes["gpu_memory_utilization"] = settings.utilization
    if settings.max_loras:
        assumes |= {"max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}
    return assumes


def _kind_row(kind: Kind) -> dict[str, Any]:
    phase = kind.phase
    return {
        "kind": phase.kind,
        "unit": phase.unit,
        "fixed_bytes": phase.fixed_bytes,
        "bytes_per_unit": phase.bytes_per_unit,
        "most_units": phase.most_units,
        "scope": phase.scope,
        "smallest": kind.smallest,
        "closes": kind.closes,
        "source": phase.source,
    }


def as_json(certificate: Certificate, ready: Ready) -> str:
    """The answer as one object."""
    card = certificate.ledger.card
    body = {
        "schema": SCHEMA,
        "certified": certificate.certified,
        "fits": certificate.ledger.fits,
        "vllm": certificate.ledger.settings.release,
        "model": ready.model.name,
        "gpu": {"name": card.name, "total_bytes": card.total_bytes},
        "room_bytes": certificate.room,
        "spare_bytes": certificate.spare,
        "terms": [{"name": term.name, "bytes": term.size, "source": term.source} for term in certificate.terms]
        + [{"name": found.name, "bytes": -found.size, "source": found.source} for found in certificate.residents],
        "kinds": [
            _kind_row(kind)
            | {
                "worst_bytes": kind.phase.bytes_of(kind.phase.most_units),
                "spare_bytes": kind.spare,
                "covered_by_profile": kind.phase.covered,
                "why": kind.phase.why,
                "request": smallest_request(kind) if kind.is_open else None,
            }
            for kind in certificate.kinds
        ],
        "unknown": [unknown.reason for unknown in certificate.unknown],
        "closes_all": certificate.closes_all or None,
        "assumes": _assumes(certificate),
        "assumptions": assumptions_of(certificate),
        "notes": list(ready.notes),
    }
    return json.dumps(body, indent=2)


def as_text(certificate: Certificate, ready: Ready) -> str:
    """The answer in words: the verdict, the kinds that are open, the account, what is assumed."""
    lines = [_verdict(certificate)]
    release, card = certificate.ledger.settings.release, certificate.ledger.card.name
    lines.append(f"{ready.model.name} on {card}, vLLM {release}")
    for kind in certificate.open_kinds:
        closes = kind.closes or "no flag that plan knows"
        lines += [f"  {smallest_request(kind)}", f"    closed by: {closes}   ({kind.phase.source})"]
    lines += [f"  not known: {unknown.reason}" for unknown in certificate.unknown]
    if certificate.closes_all:
        lines.append(f"  all of them closed by: {certificate.closes_all}")
    lines += ["", "What is left for a step, at the bad end of every band:"]
    lines += [_row(term.name, term.size, term.source) for term in certificate.terms]
    lines += [_row(found.name, -found.size, found.source) for found in certificate.residents]
    lines += [_row("spare", certificate.spare, "for each phase of a step"), "", "The most that a step's phases take:"]
    lines += [_phase_row(kind) for kind in certificate.kinds]
    lines += ["", "Assumed:", *(f"  {sentence}" for sentence in assumptions_of(certificate))]
    lines += [f"  note: {note}" for note in ready.notes]
    return "\n".join(lines)


def _verdict(certificate: Certificate) -> str:
    if certificate.certified:
        return "Certified: no admitted request can exceed the card"
    if not certificate.starts or not certificate.ledger.fits:
        return "Not certified: vLLM would not start with it (plan says why)"
    if certificate.open_kinds:
        count = len(certificate.open_kinds)
        return f"Not certified: {format_count(count)} kind{'s' if count > 1 else ''} of request can exceed the card"
    return f"Not certified: {certificate.unknown[0].reason} is not known"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _row(name: str, size: int, source: str) -> str:
    return f"  {name:<44} {_gib(size):>11}   {source}"


def _phase_row(kind: Kind) -> str:
    phase = kind.phase
    most = f"{phase.kind}, {format_count(phase.most_units)} {phase.unit}"
    size = "in profile" if phase.covered else _gib(phase.bytes_of(phase.most_units))
    return f"  {most:<44} {size:>11}   {phase.source}: {phase.why}"


# `plimsoll plan --compare FILE`: one command a line, planned side by side; a line may name a card of its own.

OF_A_LINE = ("--gpu", "--gpus", "--gpu-memory-gib", "--used-gib", "--vllm")
"""What may stand in front of a line's `vllm serve`."""
_NAMES_A_CARD = frozenset({"--gpu", "--gpu-memory-gib"})
_OF_A_CARD = _NAMES_A_CARD | {"--used-gib"}


def compare(options: Split) -> int:
    """Plan every start in the file; one that cannot be planned says why in its place."""
    from plimsoll.launch.files import read_list
    from plimsoll.render import plan

    path = options.values["--compare"]
    beside = (*options.rest, *(options.verbatim or ()))
    if beside:
        raise BadInput(f"--compare {path} names the file that holds the commands; {beside[0]!r} stands beside it")
    launches, notes = read_list(path)
    if not all(_NAMES_A_CARD & _names(launch) for launch in launches):
        card_of(options)  # a card that is missing or unknown is said once, not for each line
    found = []
    for launch in launches:
        try:
            planned = planned_launch(_of_line(options, launch), launch, "", learned=True)
            found.append(plan.Compared(launch.source, planned))
        except PlimsollError as error:
            found.append(plan.Compared(launch.source, None, str(error)))
    as_shown = plan.compare_as_json if "--json" in options.switches else plan.compare_as_text
    show(as_shown(found, notes))
    return 0 if all(one.planned is not None and one.planned.fits for one in found) else 1


def _names(launch: Launch) -> set[str]:
    return {word.partition("=")[0] for word in launch.in_front}


def _of_line(options: Split, launch: Launch) -> Split:
    """The options for one line: its own go before those that were typed; a card of its own has neighbours of its own."""
    own = split_options(launch.in_front, with_value=OF_A_LINE, switches=())
    if own.rest or own.verbatim is not None:
        raise BadInput(f"`{' '.join(launch.in_front)}`: in front of a command only {', '.join(OF_A_LINE)} can stand")
    other_card = bool(own.values.keys() & _NAMES_A_CARD)
    typed = {name: value for name, value in options.values.items() if not (other_card and name in _OF_A_CARD)}
    return options._replace(values={**typed, **own.values})

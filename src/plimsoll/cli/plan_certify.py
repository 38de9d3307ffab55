"""`plimsoll plan --certify`: whether any request that a command admits can exceed the card, and what closes each kind."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from plimsoll.cli.options import Split
from plimsoll.cli.output import show, write_file
from plimsoll.domain.gpu import Vendor, gpu_named
from plimsoll.domain.units import GIB, format_count
from plimsoll.engine.check import Checked, with_config
from plimsoll.engine.command_line import read_command_line
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.plan.certify import Certificate, Kind, Question, assumptions_of, certify, smallest_request
from plimsoll.plan.certify_limits import RequestLimits, read_limits
from plimsoll.plan.findings import stops_the_start
from plimsoll.plan.settings import AUTO_FIT, Flags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.cli.plan import Ready

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

"""Shows a certificate as text, as JSON, and as the table that the door reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from plimsoll.plan.certify import Certificate, Kind, assumptions_of, smallest_request
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, NAME, WARN, Line, Report, Table, json_text, picked
from plimsoll.units import GIB, format_count

SCHEMA, TABLE_SCHEMA = "plimsoll.certify/1", "plimsoll.certificate/1"


def table_json(certificate: Certificate, model: str, made: str) -> str:
    """The table that the door reads. A kind that no request can exceed costs nothing: its worst case is reserved already."""
    table = {
        "schema": TABLE_SCHEMA,
        "vllm": certificate.ledger.settings.release,
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
    return json.dumps(table, indent=1) + "\n"


def _assumes(certificate: Certificate) -> dict[str, int | float]:
    """Returns the certificate's assumptions; the door compares those named as vLLM's settings with the engine's own."""
    settings = certificate.ledger.settings
    assumes: dict[str, int | float] = {
        "free_bytes_at_start": certificate.free_at_start,
        "neighbours_bytes": certificate.ledger.card.used_bytes,
        "pieces_bytes": certificate.pieces,
        "alive_bytes": certificate.alive,
        **picked(settings, "max_num_batched_tokens max_num_seqs"),
        "max_logprobs": certificate.step.limits.max_logprobs,
        **picked(settings, "tensor_parallel_size=tensor_parallel pipeline_parallel_size=pipeline_parallel"),
        "v2_model_runner": settings.v2_runner,
    }
    if not settings.auto_fit:
        assumes["max_model_len"] = settings.max_model_len
    if not settings.has_fixed_cache:
        assumes["gpu_memory_utilization"] = settings.utilization
    if settings.max_loras:
        assumes |= {"max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}
    return assumes


def _kind_row(kind: Kind) -> dict[str, Any]:
    costs = picked(kind.phase, "kind unit fixed_bytes bytes_per_unit most_units scope")
    return {**costs, **picked(kind, "smallest closes"), "source": kind.phase.source}


def as_json(certificate: Certificate, model: str, notes: Sequence[str]) -> str:
    """The answer as one object."""
    card = certificate.ledger.card
    body = {
        "schema": SCHEMA,
        "certified": certificate.certified,
        "fits": certificate.ledger.fits,
        "vllm": certificate.ledger.settings.release,
        "model": model,
        "gpu": {"name": card.name, "total_bytes": card.total_bytes},
        "room_bytes": certificate.room,
        "spare_bytes": certificate.spare,
        "terms": [picked(term, "name bytes=size source") for term in certificate.terms]
        + [{"name": resident.name, "bytes": -resident.size, "source": resident.source} for resident in certificate.residents],
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
        "notes": list(notes),
    }
    return json_text(body)


def as_text(certificate: Certificate, model: str, notes: Sequence[str]) -> Report:
    """The answer in words: the verdict, the open kinds, the account, the assumptions."""
    release, card = certificate.ledger.settings.release, certificate.ledger.card.name
    report = Report(
        [Line(_verdict(certificate), 2, GOOD if certificate.certified else BAD), f"{model} on {card}, vLLM {release}"]
    )
    for kind in certificate.open_kinds:
        closes = kind.closes or "no flag that plan knows"
        report += [
            Line(f"  {smallest_request(kind)}", 4, WARN),
            Line(f"    closed by: {closes}   ({kind.phase.source})", 6, NAME, 14),
        ]
    report += [Line(f"  not known: {unknown.reason}", 4, WARN) for unknown in certificate.unknown]
    if certificate.closes_all:
        report.append(Line(f"  all of them closed by: {certificate.closes_all}", 4, NAME, 24))
    account = [(term.name, _gib(term.size), term.source) for term in certificate.terms]
    account += [(resident.name, _gib(-resident.size), resident.source) for resident in certificate.residents]
    account.append(("spare", _gib(certificate.spare), "for each phase of a step"))
    report += ["", Line("What is left for a step, at the bad end of every band:", 2, BOLD), Table("lrw", account)]
    phases = []
    for phase in (kind.phase for kind in certificate.kinds):
        size = "in profile" if phase.covered else _gib(phase.bytes_of(phase.most_units))
        most = f"{phase.kind}, {format_count(phase.most_units)} {phase.unit}"
        phases.append((most, size, f"{phase.source}: {phase.why}"))
    report += ["", Line("The most that a step's phases take:", 2, BOLD), Table("lrw", phases), "", Line("Assumed:", 2, BOLD)]
    report += [Line(f"  {sentence}", 4) for sentence in assumptions_of(certificate)]
    return Report([*report, *(Line(f"  note: {note}", 8, FAINT, 7) for note in notes)])


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

"""What `plimsoll plan` found, as a drawn ledger and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.domain.estimate import Estimate
from plimsoll.domain.finding import Finding, Severity
from plimsoll.domain.model import ModelShape
from plimsoll.domain.units import format_count, format_gib
from plimsoll.engine.check import Checked
from plimsoll.plan.advise import NOT_OF_MEMORY, Advice, is_for_the_user
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.matrix import Matrix
from plimsoll.plan.workload import WorkloadAnswer
from plimsoll.report import plan_matrix
from plimsoll.report.flags import clean, flags_json
from plimsoll.report.wrapping import wrapped

BAR = 64
_WHY = 56  # where the reason of a term begins
_MARKS = "WnagK"  # weights, non-torch, activation, graphs, KV cache


class Planned(NamedTuple):
    """A plan and all that was said about it."""

    model: str
    ledger: Ledger
    findings: Sequence[Finding]
    advice: Sequence[Advice]
    checked: Checked
    shape: ModelShape  # what the workload and the matrix are judged by
    notes: Sequence[str] = ()
    before: Ledger | None = None  # the same command in the release an upgrade starts from

    @property
    def fits(self) -> bool:
        """Whether it will start and serve, as far as we can tell."""
        return self.ledger.fits and not any(finding.severity is Severity.CRITICAL for finding in self.findings)


def gpus_of(ledger: Ledger) -> str:
    """The card, and how many where there are several: 2 x H100."""
    number, name = ledger.settings.gpus, clean(ledger.card.name)
    return f"{number} x {name}" if number > 1 else name


def as_json(planned: Planned, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> str:
    """One object of the schema plimsoll.plan/1; sizes in bytes."""
    import json

    return json.dumps(_body(planned, matrix, workload), indent=2, ensure_ascii=False)


def _body(planned: Planned, matrix: Matrix | None, workload: WorkloadAnswer | None) -> dict[str, object]:
    ledger, kv = planned.ledger, planned.ledger.kv_plan
    body: dict[str, object] = {
        "schema": "plimsoll.plan/1",
        "fits": planned.fits,
        "model": clean(planned.model),
        "vllm": ledger.settings.release,
        "gpu": {"name": ledger.card.name, "total_bytes": ledger.card.total_bytes, "count": ledger.settings.gpus},
        "ledger": {
            name: {"value": term.value, "low": term.low, "high": term.high}
            for name, term in (
                ("requested", ledger.requested),
                ("weights", ledger.weights),
                ("non_torch", ledger.non_torch),
                ("activation", ledger.activation),
                ("graphs", ledger.graphs),
                ("kv", ledger.kv),
                ("slack", ledger.slack),
            )
        },
        "kv": {
            "block_size": kv.block_size,
            "bytes_per_block": kv.bytes_per_block,
            "num_blocks": kv.num_blocks,
            "tokens": kv.tokens,
            "max_concurrency": kv.max_concurrency,
            "max_model_len": kv.max_model_len,
            "fits_at_low_end": ledger.fits_at_low_end,
            "groups": [
                {
                    "layers": g.layers,
                    "kind": g.kind,
                    "block_size": g.block_size,
                    "blocks_per_request": g.blocks_per_request,
                    "window": g.window,
                }
                for g in kv.groups
            ],
        },
        "settings": _settings_json(ledger),
        "parameters": _parameters_json(planned.shape),
        "flags": flags_json([planned.checked]),
        "findings": [_finding_json(finding) for finding in planned.findings],
        "advice": [_advice_json(advice) for advice in planned.advice],
        "notes": [clean(note) for note in planned.notes],
    }
    if planned.before is not None:
        old = planned.before
        body["from"] = {
            "vllm": old.settings.release,
            "kv": {"value": old.kv.value, "low": old.kv.low, "high": old.kv.high},
            "tokens": old.kv_plan.tokens,
        }
    if workload is not None:
        body["workload"] = plan_matrix.workload_json(workload)
    if matrix is not None:
        body["matrix"] = plan_matrix.matrix_json(matrix)
    return body


def _parameters_json(shape: ModelShape) -> dict[str, object]:
    """How much there is to read and to compute in a step; for `simulate`."""
    from plimsoll.plan.weights import parameters, routed_parameters

    moe = shape.moe
    return {
        "total": parameters(shape),
        "routed": routed_parameters(shape),
        "experts": moe.experts if moe is not None else None,
        "experts_per_token": moe.experts_per_token if moe is not None else None,
    }


def _settings_json(ledger: Ledger) -> dict[str, object]:
    settings = ledger.settings
    return {
        "gpu_memory_utilization": settings.utilization,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "data_parallel_size": settings.data_parallel,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": settings.prefix_caching,
        "async_scheduling": settings.async_scheduling,
        "enable_chunked_prefill": settings.chunked_prefill,
        "scheduling_policy": settings.scheduling_policy,
        "long_prefill_token_threshold": settings.long_prefill_token_threshold,
        "watermark": settings.watermark,
        "scheduler_reserve_full_isl": settings.reserve_full_isl,
        "enforce_eager": settings.enforce_eager,
        "num_speculative_tokens": settings.speculative_tokens,
        "kv_connector": settings.kv_connector,
    }


def _advice_json(advice: Advice) -> dict[str, object]:
    """One offer; `also` is there only where further flags belong to it."""
    also = {"also": [{"flag": flag, "value": value} for flag, value in advice.also]} if advice.also else {}
    return {"flag": advice.flag, "value": advice.value, **also, "why": advice.why, "effect": advice.effect}


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "code": finding.code.value,
        "severity": finding.severity.value,
        "confidence": finding.confidence,
        "title": finding.title,
        "because": clean(finding.because),
        "evidence": [{"source": e.source, "line": e.line, "text": clean(e.text)} for e in finding.evidence],
    }


def as_text(planned: Planned, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> str:
    """The verdict, the bar, the terms, the cache, the trouble and what helps."""
    ledger = planned.ledger
    lines = [*wrapped(_verdict(planned, workload), "  "), "", *_bar(ledger), "", *_terms(ledger), "", *_cache(ledger)]
    for finding in planned.findings:
        lines += ["", *wrapped(f"  {finding.code}: {finding.title}", " " * 4)]
        lines += wrapped(f"    {clean(finding.because)}", " " * 4)
    if planned.advice:
        besides = " beside what vLLM refuses" if any(map(is_for_the_user, planned.findings)) else ""
        lines += ["", f"What would help{besides}, planned again to be sure:", ""]
        for advice in planned.advice:
            lines += wrapped(f"  {advice.words}", " " * 4)
            lines += wrapped(f"    {advice.why}: {advice.effect}", " " * 4)
    if workload is not None:
        lines += ["", *plan_matrix.workload_lines(workload)]
    if matrix is not None:
        lines += ["", *plan_matrix.matrix_lines(matrix)]
    if planned.before is not None:
        lines += ["", *_upgrade(planned.before, ledger)]
    for note in planned.notes:
        lines += wrapped(f"  note: {clean(note)}", " " * 8)
    return "\n".join(lines)


def _upgrade(old: Ledger, new: Ledger) -> list[str]:
    change = new.kv_plan.tokens - old.kv_plan.tokens
    share = f" ({change / old.kv_plan.tokens:+.1%})" if old.kv_plan.tokens > 0 else ""
    sizes = f"KV {format_gib(old.kv.value)} -> {format_gib(new.kv.value)}"
    tokens = f"{format_count(old.kv_plan.tokens)} -> {format_count(new.kv_plan.tokens)} tokens{share}"
    return [f"From {old.settings.release} to {new.settings.release}: {sizes}, {tokens}"]


def _verdict(planned: Planned, workload: WorkloadAnswer | None) -> str:
    what = f"{clean(planned.model)} on {gpus_of(planned.ledger)}, vLLM {planned.ledger.settings.release}"
    stops = [finding for finding in planned.findings if finding.severity is Severity.CRITICAL]
    memory_first = sorted(stops, key=lambda finding: finding.code in NOT_OF_MEMORY)
    told = "; ".join(finding.title for finding in memory_first) or "too little memory"
    beside = ", but not this workload" if planned.fits and workload is not None and not workload.verdict.is_fine else ""
    return f"{verdict(planned)}{beside}: {what}" + ("" if planned.fits else f": {told}")


def verdict(planned: Planned) -> str:
    """In a word or a few: whether it will start, by the central figures and by the low end of the band."""
    if planned.fits:
        return "fits" if planned.ledger.fits_at_low_end else "fits by the estimate, not at its low end"
    stops = [finding.code for finding in planned.findings if finding.severity is Severity.CRITICAL]
    return "does not start" if stops and all(code in NOT_OF_MEMORY for code in stops) else "does not fit"


def _bar(ledger: Ledger) -> list[str]:
    """The card drawn to scale: others, context, the terms of the request, slack."""
    total = ledger.card.total_bytes
    parts = [("o", ledger.card.used_bytes), ("c", ledger.context.value)]
    terms = (ledger.weights, ledger.non_torch, ledger.activation, ledger.graphs, ledger.kv)
    parts += [(mark, max(0, term.value)) for mark, term in zip(_MARKS, terms, strict=True)]
    drawn, end, so_far = "", 0, 0
    for mark, size in parts:
        so_far += size
        upto = min(BAR, round(so_far / total * BAR))
        if size > 0 and upto == end and upto < BAR:
            upto += 1  # every term that exists is seen
        drawn += mark * (upto - end)
        end = max(end, upto)
    over = " over the edge" if so_far > total else ""
    legend = "W weights  n non-torch  a activation  g graphs  K KV cache  . slack  c context" + (
        "  o others" if parts[0][1] else ""
    )
    return [f"  |{drawn.ljust(BAR, '.')}|{over}", f"   {legend}"]


def _terms(ledger: Ledger) -> list[str]:
    rows = [("card", Estimate(ledger.card.total_bytes, ledger.card.low_bytes, ledger.card.high_bytes)),
            ("requested", ledger.requested), ("  weights", ledger.weights), ("  non-torch", ledger.non_torch),
            ("  activation", ledger.activation), ("  graphs", ledger.graphs), ("  KV cache", ledger.kv),
            ("slack", ledger.slack)]  # fmt: skip
    lines = []
    for name, term in rows:
        band = "" if term.is_exact else f"   {format_gib(term.low)} to {format_gib(term.high)}"
        why = term.why.split(";")[0]
        lines += wrapped(f"  {name:14}{format_gib(term.value):>12}{band:28}{why}".rstrip(), " " * _WHY)
    return lines


def _cache(ledger: Ledger) -> list[str]:
    kv = ledger.kv_plan
    if kv.num_blocks <= 0 or ledger.kv.value <= 0:
        return ["  no KV blocks"]
    concurrency = (
        f"{kv.max_concurrency:.2f} requests of {format_count(kv.max_model_len)} tokens at once" if kv.max_concurrency else ""
    )
    blocks = f"{format_count(kv.num_blocks)} blocks of {kv.block_size} tokens and {format_gib(kv.bytes_per_block)}"
    return [f"  {blocks}: {format_count(kv.tokens)} tokens, {concurrency}".rstrip(", "), *_at_low_end(ledger)]


def _at_low_end(ledger: Ledger) -> list[str]:
    """A plan that fits by its central figures alone: what would happen, and what would start even so."""
    if not ledger.fits or ledger.fits_at_low_end:
        return []
    kv = ledger.kv_plan
    needs = f"one request of {format_count(kv.max_model_len)} tokens takes {format_gib(kv.bytes_for_one_request)}"
    there = f"has {format_gib(ledger.kv.low)} and vLLM does not start: {needs}" if ledger.kv.low > 0 else "has no block at all"
    shorter = ledger.context_at_low_end
    sure = (
        f"--max-model-len {shorter} starts there too"
        if shorter
        else "A larger share of the card, or more cards, would make it sure"
    )
    said = f"At the low end of its band the KV cache {there}. {sure}; after a real start, --learn narrows the band."
    return wrapped(f"  {said}", "  ")

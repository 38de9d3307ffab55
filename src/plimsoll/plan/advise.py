"""Which flag to change: each offer is the smallest step that clears the trouble, and was planned again to prove it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plimsoll.domain.finding import Code, Finding
from plimsoll.domain.model import ModelShape
from plimsoll.domain.units import format_count, format_gib
from plimsoll.errors import BadInput
from plimsoll.plan.findings import ROOM_FOR_THE_REST, logits_bytes, stops_the_start
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings

HIGHEST_UTILIZATION = 0.97
Replan = Callable[[Settings], tuple[Ledger, list[Finding]]]


class Advice(NamedTuple):
    """One change that clears a finding."""

    flag: str
    value: str
    why: str
    effect: str
    clears: Code


def advise(ledger: Ledger, shape: ModelShape, findings: list[Finding], replan: Replan) -> list[Advice]:
    """Offers for what stops the start (or, if nothing does, for what is risky), cheapest for the user first.

    Where several things stop it, the first offer for one is taken as followed before the next is looked at: the first offers,
    taken together, make a start.
    """
    wanted = [f for f in findings if stops_the_start(f)] or findings
    offers: dict[tuple[Code, str], Advice] = {}
    for _ in range(len(Code)):
        finding = next((f for f in wanted if f.code not in {code for code, _ in offers}), None)
        if finding is None:
            break
        best = _offer(finding.code, ledger, shape, findings, replan, offers)
        if best is None:
            wanted = [f for f in wanted if f.code is not finding.code]
            continue
        ledger, findings = best
        wanted = [f for f in findings if stops_the_start(f)]
    return list(offers.values())


def _offer(
    code: Code,
    ledger: Ledger,
    shape: ModelShape,
    findings: list[Finding],
    replan: Replan,
    offers: dict[tuple[Code, str], Advice],
) -> tuple[Ledger, list[Finding]] | None:
    """Put every change that clears one finding among the offers; returns the plan after the first of them."""
    first = None
    for change, flag, value, why in _candidates(code, ledger, shape, replan):
        if (code, flag) in offers:
            continue  # the smallest step of a flag is enough
        try:
            after, left = replan(change)
        except BadInput:
            continue  # vLLM would refuse that change: heads that do not divide, for example
        if code in {f.code for f in left} or not _is_progress(code, after, left, findings):
            continue
        offers[code, flag] = Advice(flag, value, why, _effect(after), code)
        first = first or (after, left)
    return first


def _is_progress(code: Code, after: Ledger, left: list[Finding], before: list[Finding]) -> bool:
    """Nothing new stops the start, except that less memory for the request may leave too little for the cache."""
    worse = {f.code for f in left if stops_the_start(f)} - {f.code for f in before if stops_the_start(f)}
    allowed = {Code.STARTUP_CONTEXT_TOO_LONG} if code is Code.STARTUP_FREE_MEMORY_CHECK else set()
    return worse <= allowed and after.kv.value > 0


Candidate = tuple[Settings, str, str, str]


def _candidates(code: Code, ledger: Ledger, shape: ModelShape, replan: Replan) -> Iterator[Candidate]:
    match code:
        case Code.STARTUP_CONTEXT_TOO_LONG:
            yield from _shorter_context(ledger)
            yield from _more_for_the_cache(ledger, replan)
            yield from _smaller_cache(ledger)
            yield from _more_gpus(ledger, shape)
        case Code.STARTUP_NO_CACHE_BLOCKS:
            yield from _more_for_the_cache(ledger, replan)
            yield from _smaller_batches(ledger, replan)
            yield from _more_gpus(ledger, shape)
        case Code.STARTUP_WEIGHTS_DO_NOT_FIT:
            yield from _more_gpus(ledger, shape)
        case Code.STARTUP_FREE_MEMORY_CHECK:
            yield from _what_is_free(ledger)
        case Code.STARTUP_KV_ALLOCATION | Code.RUNTIME_FORWARD:
            yield from _a_cache_that_fits(ledger)
        case Code.OTHER_BAD_CONFIG:
            context = shape.max_context
            yield (
                ledger.settings._replace(max_model_len=context),
                "--max-model-len",
                str(context),
                "what the model was made for",
            )
        case Code.STARTUP_GRAPH_CAPTURE | Code.STARTUP_SAMPLER_WARMUP | Code.RUNTIME_LOGITS:
            if ledger.settings.has_fixed_cache:  # no utilisation leaves more beside it
                yield from _a_cache_that_fits(ledger)
            yield from _more_slack(ledger, shape)
            yield from _fewer_sequences(ledger)
        case _:
            return


def _shorter_context(ledger: Ledger) -> Iterator[Candidate]:
    fits = ledger.kv_plan.largest_context_that_fits
    if fits > 0:
        sure = ledger.context_at_low_end
        also = f" ({format_count(sure)} even at the low end of its band)" if sure is not None and sure < fits else ""
        why = f"the longest context one request can have in this cache{also}"
        yield ledger.settings._replace(max_model_len=fits), "--max-model-len", str(fits), why


def _more_for_the_cache(ledger: Ledger, replan: Replan) -> Iterator[Candidate]:
    """The lowest utilisation, in hundredths, at which it starts."""
    settings = ledger.settings
    if settings.kv_cache_memory_bytes is not None:
        return
    step = math.floor(settings.utilization * 100) + 1
    while step <= HIGHEST_UTILIZATION * 100:
        change = settings._replace(utilization=step / 100)
        after, _ = replan(change)
        if after.fits and after.slack.value > 0:
            why = "a larger share of the card; it leaves less outside the request"
            yield change, "--gpu-memory-utilization", f"{step / 100:.2f}", why
            return
        step += 1


def _smaller_cache(ledger: Ledger) -> Iterator[Candidate]:
    if not ledger.settings.kv_cache_dtype.startswith(("fp8", "int", "nvfp4")):
        yield (
            ledger.settings._replace(kv_cache_dtype="fp8"),
            "--kv-cache-dtype",
            "fp8",
            "half the bytes a token; check the answers",
        )


def _more_gpus(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    settings = ledger.settings
    for factor in (2, 4, 8):
        wanted = settings.tensor_parallel * factor
        if shape.attention_heads % wanted == 0:
            why = f"the weights are divided over {wanted} GPUs"
            yield settings._replace(tensor_parallel=wanted), "--tensor-parallel-size", str(wanted), why


def _smaller_batches(ledger: Ledger, replan: Replan) -> Iterator[Candidate]:
    settings = ledger.settings
    sequences = settings.max_num_seqs
    while sequences > 16:
        sequences //= 2
        change = settings._replace(max_num_seqs=sequences)
        if replan(change)[0].fits:
            yield change, "--max-num-seqs", str(sequences), "a smaller batch is profiled, so less is set aside for it"
            return


def _what_is_free(ledger: Ledger) -> Iterator[Candidate]:
    free = ledger.card.total_bytes - ledger.card.used_bytes - ledger.context.high
    share = math.floor(free / ledger.card.total_bytes * 100) / 100
    if 0 < share < ledger.settings.utilization:
        why = "what is free, less the CUDA context"
        yield ledger.settings._replace(utilization=share), "--gpu-memory-utilization", f"{share:.2f}", why


def _a_cache_that_fits(ledger: Ledger) -> Iterator[Candidate]:
    unreserved = max(0, ledger.graphs_actual.value - ledger.graphs.value)
    size = ledger.kv.value + ledger.slack.low - unreserved - ROOM_FOR_THE_REST
    if size > 0 and ledger.settings.num_gpu_blocks_override is None:
        why = "what the card has beside everything else"
        yield ledger.settings._replace(kv_cache_memory_bytes=size), "--kv-cache-memory-bytes", str(size), why


def _more_slack(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    unreserved = max(0, ledger.graphs_actual.value - ledger.graphs.value)
    needs = 4 * logits_bytes(ledger, shape) + ROOM_FOR_THE_REST + unreserved
    share = math.floor((ledger.free_bytes - needs) / ledger.card.total_bytes * 100) / 100
    if 0 < share < ledger.settings.utilization:
        why = "leaves the room beside the request that sampling and graphs need"
        yield ledger.settings._replace(utilization=share), "--gpu-memory-utilization", f"{share:.2f}", why


def _fewer_sequences(ledger: Ledger) -> Iterator[Candidate]:
    sequences = ledger.settings.max_num_seqs
    while sequences > 16:
        sequences //= 2
        why = "fewer rows of logits at once"
        yield ledger.settings._replace(max_num_seqs=sequences), "--max-num-seqs", str(sequences), why
        if sequences <= ledger.settings.max_num_seqs // 8:
            return


def _effect(after: Ledger) -> str:
    tokens = format_count(after.kv_plan.tokens)
    return f"KV {format_gib(after.kv.value)}, {tokens} tokens, {format_gib(after.slack.value)} outside the request"

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
    """Offers for what stops the start (or, if nothing does, for what is risky), cheapest for the user first."""
    wanted = [f for f in findings if stops_the_start(f)] or findings
    stopping = {f.code for f in findings if stops_the_start(f)}
    offers: dict[tuple[Code, str], Advice] = {}
    for finding in wanted:
        for change, flag, value, why in _candidates(finding.code, ledger, shape, replan):
            if (finding.code, flag) in offers:
                continue  # the smallest step of a flag is enough
            try:
                after, left = replan(change)
            except BadInput:
                continue  # vLLM would refuse that change: heads that do not divide, for example
            worse = {f.code for f in left if stops_the_start(f)} - stopping
            if finding.code not in {f.code for f in left} and not worse:
                offers[finding.code, flag] = Advice(flag, value, why, _effect(after), finding.code)
    return list(offers.values())


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
        case Code.STARTUP_GRAPH_CAPTURE | Code.STARTUP_SAMPLER_WARMUP | Code.RUNTIME_LOGITS:
            yield from _more_slack(ledger, shape)
            yield from _fewer_sequences(ledger)
        case _:
            return


def _shorter_context(ledger: Ledger) -> Iterator[Candidate]:
    fits = ledger.kv_plan.largest_context_that_fits
    if fits > 0:
        why = "the longest context one request can have in this cache"
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


def _more_slack(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    unreserved = max(0, ledger.graphs_actual.value - ledger.graphs.value)
    needs = 4 * logits_bytes(ledger, shape) + ROOM_FOR_THE_REST + unreserved
    free = ledger.card.total_bytes - ledger.card.used_bytes - ledger.context.value - needs
    share = math.floor(free / ledger.card.total_bytes * 100) / 100
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

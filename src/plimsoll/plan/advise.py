"""Which flag to change: each offer is the smallest step that clears the trouble, and was planned again to prove it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.findings import Code, Finding
from plimsoll.models.shape import ModelShape
from plimsoll.plan.findings import (
    NOT_QUANTISED,
    ROOM_FOR_THE_REST,
    TOO_FEW_LORAS_IN_HOST,
    TOO_LONG_FOR_THE_MODEL,
    logits_bytes,
    may_be_float16,
    stops_the_start,
)
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings
from plimsoll.units import format_count, format_gib

HIGHEST_UTILIZATION = 0.97
STEPS_BELOW_FREE = 8
NOT_OF_MEMORY = frozenset({Code.STARTUP_BAD_FLAG, Code.OTHER_BAD_CONFIG, Code.OTHER_UNSUPPORTED_GPU})
MOST_CHANGES = 3
# What no value clears: what it says has to be followed by hand.
_FOR_THE_USER = frozenset({(Code.STARTUP_BAD_FLAG, ""), (Code.OTHER_BAD_CONFIG, NOT_QUANTISED)})
Replan = Callable[[Settings], tuple[Ledger, list[Finding]]]


class Advice(NamedTuple):
    """One change, or several that belong together, with which nothing stops the start any more."""

    flag: str
    value: str
    why: str
    effect: str
    clears: Code
    also: tuple[tuple[str, str], ...] = ()
    """Further flags with their values, where one change alone is not enough."""

    @property
    def words(self) -> str:
        """All of it as it is typed."""
        return " ".join(f"{flag} {value}".strip() for flag, value in ((self.flag, self.value), *self.also))


class _Step(NamedTuple):
    """A plan with some changes followed: which, why, and which finding was the first to be cleared."""

    ledger: Ledger
    findings: list[Finding]
    changes: tuple[tuple[str, str], ...] = ()
    why: tuple[str, ...] = ()
    clears: Code | None = None


def advise(ledger: Ledger, shape: ModelShape, findings: list[Finding], replan: Replan) -> list[Advice]:
    """Offers for what stops the start (or, if nothing does, for what is risky), cheapest for the user first.

    With each of them nothing stops it any more. Where no change alone does that, the first that clears something is taken as
    followed, and each offer is that one and another together. One that leaves no warning goes before one that does.
    """
    step = _Step(ledger, findings)
    for _ in range(MOST_CHANGES):
        whole, better = _offers(step, shape, replan)
        if whole or better is None:
            return [_as_advice(one, ledger) for one in sorted(whole, key=lambda one: bool(_left(one)))]
        step = better
    return []


def _offers(step: _Step, shape: ModelShape, replan: Replan) -> tuple[list[_Step], _Step | None]:
    """Every next change after which nothing stops the start, one for each flag; and the first that only clears something."""
    whole: dict[str, _Step] = {}
    better = None
    for finding in _wanted(step.findings):
        for change, flag, value, why in _candidates(finding, step.ledger, shape, replan):
            if flag in whole and not _left(whole[flag]):
                continue  # the smallest step of a flag is enough
            try:
                ledger, left = replan(change)
            except BadInput:
                continue  # vLLM would refuse that change: heads that do not divide, for example
            if _name(finding) in map(_name, left) or not _is_progress(finding.code, ledger, left, step.findings):
                continue
            changes = {**dict(step.changes), flag: value}
            after = _Step(ledger, left, tuple(changes.items()), (*step.why, why), step.clears or finding.code)
            if better is None or (flag == better.changes[-1][0] and _is_risky(better) and not _is_risky(after)):
                better = after
            if not any(stops_the_start(one) for one in _left(after)) and (flag not in whole or not _left(after)):
                whole[flag] = after
    return list(whole.values()), better


def _wanted(findings: list[Finding]) -> list[Finding]:
    """What is to be cleared: what stops the start before what is risky, and limits of the model before those of memory."""
    stops = [finding for finding in findings if stops_the_start(finding)]
    return sorted(stops or findings, key=lambda finding: finding.code not in NOT_OF_MEMORY)


def _left(step: _Step) -> list[Finding]:
    """What is still found, without what no value of a flag clears: a flag that vLLM refuses has to go, whatever is offered."""
    return [finding for finding in step.findings if not is_for_the_user(finding)]


def is_for_the_user(finding: Finding) -> bool:
    """Whether no value of a flag clears it."""
    return _name(finding) in _FOR_THE_USER


def _is_risky(step: _Step) -> bool:
    return any(not stops_the_start(finding) for finding in step.findings)


def _name(finding: Finding) -> tuple[Code, str]:
    """Tells findings apart: only settings that contradict each other can be found several times at once."""
    return finding.code, finding.title if finding.code is Code.OTHER_BAD_CONFIG else ""


def _as_advice(step: _Step, before: Ledger) -> Advice:
    (flag, value), *also = step.changes
    clears = step.clears or Code.OTHER_BAD_CONFIG
    return Advice(flag, value, "; ".join(dict.fromkeys(step.why)), _effect(step.ledger, before), clears, tuple(also))


def _is_progress(code: Code, after: Ledger, left: list[Finding], before: list[Finding]) -> bool:
    """Nothing new stops the start, except that less memory for the request may leave too little for the cache."""
    worse = {_name(f) for f in left if stops_the_start(f)} - {_name(f) for f in before if stops_the_start(f)}
    allowed = {(Code.STARTUP_CONTEXT_TOO_LONG, "")} if code is Code.STARTUP_FREE_MEMORY_CHECK else set()
    return worse <= allowed and after.kv.value > 0


Candidate = tuple[Settings, str, str, str]


def _candidates(finding: Finding, ledger: Ledger, shape: ModelShape, replan: Replan) -> Iterator[Candidate]:
    match finding.code:
        case Code.STARTUP_CONTEXT_TOO_LONG:
            yield from _shorter_context(ledger, shape)
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
            yield from _within_the_limits(finding, ledger, shape)
        case Code.OTHER_UNSUPPORTED_GPU if may_be_float16(shape):
            why = "16 bits that every card has; some models overflow in it"
            yield ledger.settings._replace(dtype="float16"), "--dtype", "float16", why
        case Code.STARTUP_GRAPH_CAPTURE | Code.STARTUP_SAMPLER_WARMUP | Code.RUNTIME_LOGITS:
            if ledger.settings.has_fixed_cache:  # no utilisation leaves more beside it
                yield from _a_cache_that_fits(ledger)
            yield from _more_slack(ledger, shape)
            yield from _fewer_sequences(ledger)
        case _:
            return


def _within_the_limits(finding: Finding, ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    """What clears settings that contradict the model, the card or each other."""
    if finding.title == TOO_LONG_FOR_THE_MODEL:
        yield from _context_of_the_model(ledger, shape)
        yield from _shorter_context(ledger, shape)
    elif finding.title == TOO_FEW_LORAS_IN_HOST:
        slots = ledger.settings.max_loras
        changed = ledger.settings._replace(max_cpu_loras=slots)
        yield changed, "--max-cpu-loras", str(slots), "as many as the GPU holds"


def _context_of_the_model(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    context = shape.max_context
    if context < ledger.settings.max_model_len:
        changed = ledger.settings._replace(max_model_len=context)
        yield changed, "--max-model-len", str(context), "what the model was made for"


def _shorter_context(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    fits = ledger.kv_plan.largest_context_that_fits
    if fits > 0:
        sure = ledger.context_at_low_end
        also = f" ({format_count(sure)} even at the low end of its band)" if sure is not None and sure < fits else ""
        why = f"the longest context one request can have in this cache{also}"
        yield ledger.settings._replace(max_model_len=fits), "--max-model-len", str(fits), why
    if fits > shape.max_context:
        yield from _context_of_the_model(ledger, shape)


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
    """What is free, and shares a little below it: the first may leave too little beside the request."""
    free = ledger.card.total_bytes - ledger.card.used_bytes - ledger.context.high
    highest = math.floor(free / ledger.card.total_bytes * 100)
    why = "what is free, less the CUDA context"
    for hundredths in range(highest, max(0, highest - STEPS_BELOW_FREE), -1):
        share = hundredths / 100
        if share < ledger.settings.utilization:
            yield ledger.settings._replace(utilization=share), "--gpu-memory-utilization", f"{share:.2f}", why
        why = "what is free, less the CUDA context and the room that a full batch needs beside the request"


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


def _effect(after: Ledger, before: Ledger) -> str:
    tokens, shown = after.kv_plan.tokens, before.kv_plan.tokens
    if abs(tokens - shown) == 1:  # vLLM rounds down from a quotient of the context: of the same blocks one token can be lost
        tokens = shown
    sizes = f"{format_count(tokens)} tokens, {format_gib(after.slack.value)} outside the request"
    return f"KV {format_gib(after.kv.value)}, {sizes}"

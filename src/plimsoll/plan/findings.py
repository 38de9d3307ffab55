"""Predicts what will go wrong before anything is started, by code, and which flag to change.

Each piece of advice is the smallest step that clears the trouble, proved by planning again with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.launch.check_flags import Item
from plimsoll.models.shape import ModelShape
from plimsoll.plan.kv import WhyRefused
from plimsoll.plan.ledger import MEASURED_TOWERS, Ledger, embedding_table, film_tokens, keeps_copies
from plimsoll.plan.settings import SMALLER_CARD, Settings, whole_item_tokens
from plimsoll.units import GIB, ceil_div, filled, format_count, format_gib
from plimsoll.vllm.versions import Behaviour, releases, table

_TEXTS = table("findings", "plan")  # titles and reasons, by the names used in the code below
LORA_RANKS = frozenset({1, 8, 16, 32, 64, 128, 256, 320, 512})  # config/lora.py; 1 since 0.11
BFLOAT16_SINCE = (8, 0)  # compute capability; asked by the workers of every release
CUDA_13_SINCE = (7, 5)  # compute capability of the oldest cards that CUDA 13 compiles for


def _finding(
    name: str, evidence: tuple[Evidence, ...] = (), *, sure: bool = True, confidence: float = 0, code: str = "", **values: Any
) -> Finding:
    """The finding of that name, its texts filled with these values: critical where it is sure, else a warning."""
    row = _TEXTS["findings"][name]
    if flag := row.get("flag"):
        evidence = (Evidence("command", filled(flag, values)),)
    title, because = filled(row["title"], values), filled(row["because"], values)
    if not sure:
        title = row.get("may", title)
    severity = Severity.CRITICAL if sure else Severity.WARNING
    confidence = confidence or row["sure" if sure else "unsure"]
    return Finding(Code(code or row["code"]), severity, confidence, title, because, evidence)


def _is(finding: Finding, name: str) -> bool:
    return bool(finding.title == _TEXTS["findings"][name]["title"])


def refusals(ledger: Ledger, shape: ModelShape, environment: Mapping[str, str], *, unquantised: bool) -> Iterator[Finding]:
    """Settings that vLLM refuses for this model or card; `unquantised`: the checkpoint is known to hold plain weights."""
    settings, has, method = ledger.settings, ledger.card.compute_capability, ledger.settings.quantization
    if settings.max_model_len > shape.max_context and environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        yield _finding("beyond-the-model", length=settings.max_model_len, longest=shape.max_context)
    if has is not None and has < CUDA_13_SINCE and Behaviour.CUDA_13_BUILDS.is_in(settings.release) and not settings.own_build:
        last = next(release for release in reversed(releases()) if not Behaviour.CUDA_13_BUILDS.is_in(release))
        yield _finding("no-kernels", release=settings.release, card=ledger.card.name, has=has, least=CUDA_13_SINCE, last=last)
    if settings.dtype == "bfloat16" and has is not None and has < BFLOAT16_SINCE:  # left to itself, vLLM takes float16 there
        yield _finding("no-bfloat16", card=ledger.card.name, has=has)
    if method in _TEXTS["made_before"] and shape.quantization is None and unquantised:
        yield _finding("not-quantised", method=method)
    if settings.max_loras and 0 < settings.max_cpu_loras < settings.max_loras:  # vLLM takes 0 as not given
        yield _finding("too-few-loras-in-host", host=settings.max_cpu_loras, slots=settings.max_loras)
    if settings.max_loras and settings.max_lora_rank not in LORA_RANKS:
        yield _finding("lora-rank", rank=settings.max_lora_rank, ranks=", ".join(map(str, sorted(LORA_RANKS))))
    yield from _contradictions(settings, shape)
    whole, tokens = whole_item_tokens(shape), settings.max_num_batched_tokens
    reads = shape.towers and not settings.language_model_only
    if reads and tokens < whole and Behaviour.UNREAD_TOWERS.is_in(settings.release):
        sure = Behaviour.GRAPH_ESTIMATE.is_in(settings.release)  # a nightly of 0.19 started so, 0.19.1 did not
        yield _finding("item-beyond-the-batch", sure=sure, whole=whole, tokens=tokens, stops="stops" if sure else "may stop")


def _contradictions(settings: Settings, shape: ModelShape) -> Iterator[Finding]:
    """Sizes that contradict each other, whatever the memory: config/scheduler.py, config/model.py and arg_utils.py of vLLM."""
    tokens, context, threshold = settings.max_num_batched_tokens, settings.max_model_len, settings.long_prefill_token_threshold
    if not settings.chunked_prefill and 0 < tokens < context:
        yield _finding("prompt-beyond-the-batch", tokens=tokens, context=context)
    if threshold > settings.context:
        yield _finding("threshold-beyond-the-context", threshold=threshold)
    drafted = 1 + settings.speculative_tokens
    if settings.max_loras and settings.speculative and tokens < settings.max_num_seqs * drafted:
        yield _finding("too-few-drafted-tokens", drafted=drafted, sequences=settings.max_num_seqs)
    dcp, ranks, heads = settings.decode_context_parallel, settings.tensor_parallel, shape.kv_heads
    if dcp > 1 and shape.mla is None and heads and (ranks <= heads or dcp > ranks // heads):
        yield _finding("too-many-context-ranks", heads=heads, ranks=ranks, most=max(1, ranks // heads), asked=dcp)


# Room for lazily loaded kernels, cuBLAS workspaces and the like, on top of what can be computed.
ROOM_FOR_THE_REST = GIB // 2


def findings_of(
    ledger: Ledger, shape: ModelShape, items: Sequence[Item], environment: Mapping[str, str], *, unquantised: bool = False
) -> list[Finding]:
    """Everything that stops the start or makes it risky, worst first; `unquantised`: the weights are known to be plain."""
    findings = [
        *_bad_flags(ledger, items, environment),
        *_weights_and_cache(ledger),
        *(_fixed_cache(ledger, shape) if ledger.settings.has_fixed_cache else ()),
        *refusals(ledger, shape, environment, unquantised=unquantised),
        *_outside_the_request(ledger, shape),
        *_too_few_blocks(ledger),
    ]
    return sorted(findings, key=lambda finding: not stops_the_start(finding))


def stops_the_start(finding: Finding) -> bool:
    return finding.severity is Severity.CRITICAL


def logits_bytes(ledger: Ledger, shape: ModelShape) -> int:
    """One 32-bit copy of the logits of a full batch, which vLLM makes as soon as one request samples."""
    return ledger.settings.max_num_seqs * shape.vocab_size * 4


def _bad_flags(ledger: Ledger, items: Sequence[Item], environment: Mapping[str, str]) -> Iterator[Finding]:
    if refused := [item for item in items if item.status.is_refused]:
        what, its = ("flag or value", "its") if len(refused) == 1 else ("flags or values", "their")
        evidence = tuple(Evidence("command", f"{item.name}: {item.status} {item.since or ''}".rstrip()) for item in refused)
        yield _finding("bad-flag", evidence, names=", ".join(item.name for item in refused), what=what, its=its)
    conf, connector = environment.get("PYTORCH_CUDA_ALLOC_CONF", ""), ledger.settings.kv_connector
    change = Behaviour.SEGMENTS_REFUSED
    if "expandable_segments:True" in conf and connector is not None and change.is_in(ledger.settings.release):
        set_by = (Evidence("environment", f"PYTORCH_CUDA_ALLOC_CONF={conf}"),)
        yield _finding("segments-beside-a-connector", set_by, connector=connector, since=change.since)


def _weights_and_cache(ledger: Ledger) -> Iterator[Finding]:
    """The weights, the free memory and the cache, in the order in which vLLM looks at them."""
    free, weights, requested, kv = ledger.free_bytes, ledger.weights, ledger.requested, ledger.kv
    if weights.value > free:
        yield _finding("weights", sure=weights.low > free, weights=weights.value, free=free)
    if free < requested.value and Behaviour.NEIGHBOURS_APART.is_in(ledger.settings.release):
        sure = ledger.slack.high < 0 or free < requested.value - ledger.context.value
        yield _finding("free-memory", sure=sure, requested=requested.value, free=free)
    if weights.value > free:
        return  # vLLM stops before it looks at what is left for the cache
    activation, refusal = ledger.activation, ledger.kv_plan.refusal
    # How sure it is depends on the whole band, not on the value.
    how: dict[str, Any] = {"sure": not ledger.fits_at_high_end, "confidence": 0.95 if kv.high <= 0 else 0.7}
    if kv.value <= 0:
        if weights.value + ledger.non_torch.value + activation.value > free:
            # The weights fit the card, but not beside the batch that vLLM tries before it counts what is left.
            sure, tokens = weights.low + ledger.non_torch.low + activation.low > free, ledger.settings.max_num_batched_tokens
            sizes: dict[str, Any] = {"weights": weights.value, "activation": activation.value, "free": free}
            yield _finding("trial-run", sure=sure, tokens=tokens, **sizes)
        largest, term = max(("weights", weights), ("activations", activation), key=lambda term: term[1].value)
        yield _finding("no-cache", **how, requested=requested.value, largest=largest, size=term.value, missing=-kv.value)
    elif refusal is not None:
        is_nothing = refusal.why is WhyRefused.NOTHING_FITS
        block = ledger.kv_plan.bytes_per_block
        enough = (ceil_div(refusal.needed_bytes, block) + 1) * block  # vLLM keeps one
        is_given = ledger.settings.kv_cache_memory_bytes is not None and not is_nothing
        yield _finding(
            "too-long", **how, what="not one token fits" if is_nothing else "one request of full length does not fit",
            length=ledger.kv_plan.max_model_len, needed=refusal.needed_bytes, available=refusal.available_bytes,
            fits=ledger.kv_plan.largest_context_that_fits,
            given=f"; --kv-cache-memory-bytes {enough} holds one" if is_given else "",
        )  # fmt: skip


def _fixed_cache(ledger: Ledger, shape: ModelShape) -> Iterator[Finding]:
    """A cache of a size somebody set: vLLM allocates it without a trial run; the first step that finds nothing left fails."""
    cache, slack, tokens = ledger.kv.value, ledger.slack, ledger.settings.max_num_batched_tokens
    if slack.value >= 0 > slack.low:
        more = slack.value - slack.low
        yield _finding("pieces", sure=False, cache=cache, slack=slack.value, tokens=tokens, more=more)
    if slack.value >= 0:
        return
    left = slack.value + ledger.activation.value + ledger.graphs.value
    after_graphs = left - ledger.graphs_actual.value
    if left < 0:
        code, what = Code.STARTUP_KV_ALLOCATION, "does not fit"
    elif after_graphs < 0:
        code, what = Code.STARTUP_GRAPH_CAPTURE, "leaves no room for CUDA graphs"
    elif not ledger.settings.v2_runner and after_graphs < 4 * logits_bytes(ledger, shape):
        code, what = Code.STARTUP_SAMPLER_WARMUP, "leaves no room for the sampler's warm-up"
    else:
        code, what = Code.RUNTIME_FORWARD, "leaves no room for a full batch"
    yield _finding("fixed-cache", sure=slack.high < 0, code=code, what=what, cache=cache, missing=-slack.value)


def _outside_the_request(ledger: Ledger, shape: ModelShape) -> Iterator[Finding]:
    """Findings for memory outside a request that is granted: graphs that vLLM did not set aside, the sampler, late kernels."""
    settings, slack, graphs, requested = ledger.settings, ledger.slack, ledger.graphs_actual, ledger.requested.value
    sequences = settings.max_num_seqs
    if slack.value < 0:
        if not settings.has_fixed_cache and ledger.free_bytes >= requested and ledger.kv.value > 0:
            missing = -slack.value
            yield _finding("warm-up", sure=slack.high < 0, sequences=sequences, requested=requested, missing=missing)
        return
    room, aside = slack.value - _graphs_not_set_aside(ledger), ledger.graphs.value
    logits = logits_bytes(ledger, shape)
    sampler = 4 * logits  # logits, their 32-bit copy, and the sort of top-k and top-p with its indices
    if not settings.enforce_eager and graphs.value > aside and room < 0:
        sizes: dict[str, Any] = {"graphs": graphs.value, "aside": aside, "slack": slack.value}
        yield _finding("graph-capture", sure=slack.high < graphs.low - aside, release=settings.release, **sizes)
    elif not settings.enforce_eager and not settings.v2_runner and room < sampler:
        sizes = {"vocabulary": shape.vocab_size, "sampler": sampler, "room": room}
        yield _finding("first-runner-warm-up", sure=False, sequences=sequences, **sizes)
    if room < logits + ROOM_FOR_THE_REST:
        yield _finding("little-room", sure=False, room=room, logits=logits)


def _too_few_blocks(ledger: Ledger) -> Iterator[Finding]:
    """Too few blocks for a request of full length once vLLM keeps one for itself, or for a state of every sequence."""
    settings, cache = ledger.settings, ledger.kv_plan
    blocks, needed, most = cache.num_blocks, cache.blocks_per_request, max(cache.bytes_per_block_by_rank, default=0)
    if blocks <= needed and cache.fits_one_request and Behaviour.V1_ENGINE.is_in(settings.release):
        yield _finding("one-block-short", sure=False, length=cache.max_model_len, needed=needed, blocks=blocks)
    # Full CUDA graphs need a state for every sequence: vLLM refuses more sequences than the cache has blocks.
    keeps_states = any(group.kind in ("state", "mixed") for group in cache.groups)
    is_checked = Behaviour.STATE_FOR_EVERY_SEQUENCE.is_in(settings.release) and settings.full_graphs
    has_cache = most > 0 and ledger.kv.value > 0 and ledger.weights.value <= ledger.free_bytes
    if keeps_states and is_checked and has_cache and settings.max_num_seqs > blocks:
        sequences = min(settings.max_num_seqs, SMALLER_CARD[0]) if settings.batch_by_size else settings.max_num_seqs
        sure = sequences > (blocks if ledger.kv.is_exact else ledger.kv.high // most)
        yield _finding("more-sequences-than-states", sure=sure, blocks=blocks, sequences=settings.max_num_seqs)


def deciding_fact(ledger: Ledger, shape: ModelShape) -> str:
    """The one fact that would narrow the widest term."""
    terms = {name: getattr(ledger, name) for name in ("weights", "non_torch", "activation", "graphs")}
    widest = max(terms, key=lambda name: terms[name].high - terms[name].low)
    if widest == "weights":
        return "the checkpoint's own sizes: its folder instead of its name, or the Hugging Face hub"
    if widest == "activation" and keeps_copies(ledger.settings, shape):
        return "whether torch's compile cache is warm, or the log of one start: --learn LOG"
    if ledger.settings.shares_host_memory and widest == "non_torch":
        return "what the host's own processes take while vLLM starts, or the log of one start: --learn LOG"
    return "the log of one start of this command: --learn LOG"


def band_notes(ledger: Ledger, shape: ModelShape) -> list[str]:
    """Returns notes on what widens this plan's bands beyond those that starts of its kind have shown."""
    settings, card, size = ledger.settings, ledger.card.name, embedding_table(shape, ledger.settings)
    copies, film = keeps_copies(settings, shape), film_tokens(shape, settings)
    reads = shape.towers and not settings.language_model_only and not settings.skips_mm_profiling
    holds = {
        "one copy": copies == 1,
        "two copies": copies > 1,
        "shared memory": settings.shares_host_memory,
        "amd": settings.is_amd,
        "pipelines": settings.pipeline_parallel > 1,
        "size alone": settings.batch_by_size and settings.max_num_seqs > SMALLER_CARD[0],
        "film": film,
        "encoder": reads and shape.model_type not in MEASURED_TOWERS,
        "mixed": shape.quantization is not None and "mixed" in ledger.weights.why,
    }
    values = {"table": size, "card": card, "film": film, "fewer": SMALLER_CARD}
    values |= {"sequences": settings.max_num_seqs, "tokens": settings.max_num_batched_tokens}
    return [filled(_TEXTS["notes"][name], values) for name, is_so in holds.items() if is_so]


HIGHEST_UTILIZATION = 0.97
STEPS_BELOW_FREE = 8
NOT_OF_MEMORY = frozenset({Code.STARTUP_BAD_FLAG, Code.OTHER_BAD_CONFIG, Code.OTHER_UNSUPPORTED_GPU})
MOST_CHANGES = 3
# Findings that no flag's value clears: the user has to follow their advice by hand.
_FOR_THE_USER = frozenset({
    (Code.STARTUP_BAD_FLAG, ""), (Code.OTHER_BAD_CONFIG, "the checkpoint is not quantised"),
    (Code.OTHER_UNSUPPORTED_GPU, "this release does not run on the card"),
})  # fmt: skip
Replan = Callable[[Settings], tuple[Ledger, list[Finding]]]


class Advice(NamedTuple):
    """One change, or several that belong together, after which nothing stops the start any more."""

    flag: str
    value: str
    why: str
    effect: str
    clears: Code
    also: tuple[tuple[str, str], ...] = ()  # further flags with their values, where one change alone is not enough

    @property
    def words(self) -> str:
        return " ".join(f"{flag} {value}".strip() for flag, value in ((self.flag, self.value), *self.also))


class _Step(NamedTuple):
    """A plan with some changes made: which, why, and the first finding that they cleared."""

    ledger: Ledger
    findings: list[Finding]
    changes: tuple[tuple[str, str], ...] = ()
    why: tuple[str, ...] = ()
    clears: Code | None = None

    @property
    def left(self) -> list[Finding]:
        """The findings still left, without those that no flag's value clears: a flag that vLLM refuses has to go anyway."""
        return [finding for finding in self.findings if not is_for_the_user(finding)]

    @property
    def is_risky(self) -> bool:
        return not all(map(stops_the_start, self.findings))

    def as_advice(self, before: Ledger) -> Advice:
        (flag, value), *also = self.changes
        tokens, shown = self.ledger.kv_plan.tokens, before.kv_plan.tokens
        if abs(tokens - shown) == 1:  # vLLM rounds a quotient of the context down: the same blocks can print as one token fewer
            tokens = shown
        outside = f"{format_gib(self.ledger.slack.value)} outside the request"
        effect = f"KV {format_gib(self.ledger.kv.value)}, {format_count(tokens)} tokens, {outside}"
        clears = self.clears or Code.OTHER_BAD_CONFIG
        return Advice(flag, value, "; ".join(dict.fromkeys(self.why)), effect, clears, tuple(also))


def advise(ledger: Ledger, shape: ModelShape, findings: list[Finding], replan: Replan) -> list[Advice]:
    """Offers for what stops the start (or, if nothing does, for what is risky), cheapest for the user first.

    With each of them nothing stops the start any more. Where no single change does that, the first that clears something is
    made, and each offer is that one and another together. An offer that leaves no warning comes before one that does.
    """
    step = _Step(ledger, findings)
    for _ in range(MOST_CHANGES):
        whole, better = _offers(step, shape, replan)
        if whole or better is None:
            return [offer.as_advice(ledger) for offer in sorted(whole, key=lambda offer: bool(offer.left))]
        step = better
    return []


def _offers(step: _Step, shape: ModelShape, replan: Replan) -> tuple[list[_Step], _Step | None]:
    """Every next change after which nothing stops the start, one for each flag; and the first that only clears something."""
    whole: dict[str, _Step] = {}
    better = None
    # What stops the start comes before what is risky, and limits of the model before those of memory.
    stops = [finding for finding in step.findings if stops_the_start(finding)]
    for finding in sorted(stops or step.findings, key=lambda finding: finding.code not in NOT_OF_MEMORY):
        for change, flag, value, why in _candidates(finding, step.ledger, shape, replan):
            if flag in whole and not whole[flag].left:
                continue  # the smallest step of a flag is enough
            try:
                ledger, left = replan(change)
            except BadInput:
                continue  # vLLM would refuse that change: heads that do not divide, for example
            # Nothing new may stop the start, except that less memory for the request may leave too little for the cache.
            worse = {_name(other) for other in left if stops_the_start(other)} - set(map(_name, stops))
            is_free_memory = finding.code is Code.STARTUP_FREE_MEMORY_CHECK
            allowed = {(Code.STARTUP_CONTEXT_TOO_LONG, "")} if is_free_memory else set()
            if _name(finding) in map(_name, left) or not worse <= allowed or ledger.kv.value <= 0:
                continue
            changes = {**dict(step.changes), flag: value}
            after = _Step(ledger, left, tuple(changes.items()), (*step.why, why), step.clears or finding.code)
            if better is None or (flag == better.changes[-1][0] and better.is_risky and not after.is_risky):
                better = after
            if not any(map(stops_the_start, after.left)) and (flag not in whole or not after.left):
                whole[flag] = after
    return list(whole.values()), better


def is_for_the_user(finding: Finding) -> bool:
    """True if no flag's value clears the finding."""
    return _name(finding) in _FOR_THE_USER


def _name(finding: Finding) -> tuple[Code, str]:
    """Tells findings apart: those of settings and of the card can be found several times at once."""
    return finding.code, finding.title if finding.code in (Code.OTHER_BAD_CONFIG, Code.OTHER_UNSUPPORTED_GPU) else ""


Candidate = tuple[Settings, str, str, str]


def _candidates(finding: Finding, ledger: Ledger, shape: ModelShape, replan: Replan) -> Iterator[Candidate]:
    settings, blocks = ledger.settings, ledger.kv_plan.num_blocks
    match finding.code:
        case Code.STARTUP_CONTEXT_TOO_LONG:
            yield from _shorter_context(ledger, shape)
            yield from _more_for_the_cache(ledger, replan)
            if not settings.kv_cache_dtype.startswith(("fp8", "int", "nvfp4")):
                yield _set(settings, "kv_cache_dtype", "fp8", "half the bytes a token; check the answers")
            yield from _more_gpus(settings, shape)
        case Code.STARTUP_NO_CACHE_BLOCKS:
            yield from _more_for_the_cache(ledger, replan)
            for sequences in _halves(settings.max_num_seqs):
                change = _set(settings, "max_num_seqs", sequences, "a smaller batch is profiled, so less is set aside for it")
                if replan(change[0])[0].fits:
                    yield change
                    break
            yield from _more_gpus(settings, shape)
        case Code.STARTUP_WEIGHTS_DO_NOT_FIT:
            yield from _more_gpus(settings, shape)
        case Code.STARTUP_FREE_MEMORY_CHECK:
            # The free memory, and shares a little below it: the first may leave too little beside the request.
            free = ledger.card.total_bytes - ledger.card.used_bytes - ledger.context.high
            highest = math.floor(free / ledger.card.total_bytes * 100)
            why = "what is free, less the CUDA context"
            for hundredths in range(highest, max(0, highest - STEPS_BELOW_FREE), -1):
                yield from _lower_utilization(settings, hundredths / 100, why)
                why = "what is free, less the CUDA context and the room that a full batch needs beside the request"
        case Code.STARTUP_KV_ALLOCATION | Code.RUNTIME_FORWARD:
            yield from _a_cache_that_fits(ledger)
        case Code.OTHER_BAD_CONFIG if _is(finding, "beyond-the-model"):
            yield from _shorter_context(ledger, shape, of_the_model=True)
        case Code.OTHER_BAD_CONFIG if _is(finding, "item-beyond-the-batch"):
            yield _set(settings, "max_num_batched_tokens", whole_item_tokens(shape), "one film of the default length")
        case Code.OTHER_BAD_CONFIG if _is(finding, "too-few-loras-in-host"):
            yield _set(settings, "max_cpu_loras", settings.max_loras, "as many as the GPU holds")
        case Code.OTHER_UNSUPPORTED_GPU if _is(finding, "no-bfloat16") and shape.model_type not in _TEXTS["not_in_float16"]:
            yield _set(settings, "dtype", "float16", "16 bits that every card has; some models overflow in it")
        case Code.STARTUP_GRAPH_CAPTURE if _is(finding, "more-sequences-than-states"):
            if blocks > 0:
                yield _set(settings, "max_num_seqs", blocks, "as many sequences as the cache has states")
            yield from _more_for_the_cache(ledger, replan)
        case Code.STARTUP_GRAPH_CAPTURE | Code.STARTUP_SAMPLER_WARMUP | Code.RUNTIME_LOGITS:
            if settings.has_fixed_cache:  # no utilisation leaves more beside it
                yield from _a_cache_that_fits(ledger)
            needs = 4 * logits_bytes(ledger, shape) + ROOM_FOR_THE_REST + _graphs_not_set_aside(ledger)
            share = math.floor((ledger.free_bytes - needs) / ledger.card.total_bytes * 100) / 100
            yield from _lower_utilization(settings, share, "leaves the room beside the request that sampling and graphs need")
            for sequences in _halves(settings.max_num_seqs):
                yield _set(settings, "max_num_seqs", sequences, "fewer rows of logits at once")
                if sequences <= settings.max_num_seqs // 8:
                    break


_FLAGS = {"utilization": "--gpu-memory-utilization", "tensor_parallel": "--tensor-parallel-size"}


def _set(settings: Settings, name: str, value: str | float, why: str) -> Candidate:
    """The settings with one of them changed, and the flag and the value that change it."""
    changed: dict[str, Any] = {name: value}
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return replace(settings, **changed), _FLAGS.get(name, f"--{name.replace('_', '-')}"), shown, why


def _halves(sequences: int) -> Iterator[int]:
    while sequences > 16:
        sequences //= 2
        yield sequences


def _lower_utilization(settings: Settings, share: float, why: str) -> Iterator[Candidate]:
    if 0 < share < settings.utilization:
        yield _set(settings, "utilization", share, why)


def _shorter_context(ledger: Ledger, shape: ModelShape, *, of_the_model: bool = False) -> Iterator[Candidate]:
    """Yields the longest context that fits, and the model's own where that is shorter; first if `of_the_model`."""
    fits, longest = ledger.kv_plan.largest_context_that_fits, shape.max_context
    own = _set(ledger.settings, "max_model_len", longest, "what the model was made for")
    if of_the_model and longest < ledger.settings.max_model_len:
        yield own
    if fits > 0:
        sure = ledger.context_at_low_end
        also = f" ({format_count(sure)} even at the low end of its band)" if sure is not None and sure < fits else ""
        yield _set(ledger.settings, "max_model_len", fits, f"the longest context one request can have in this cache{also}")
    if fits > longest < ledger.settings.max_model_len:
        yield own


def _more_for_the_cache(ledger: Ledger, replan: Replan) -> Iterator[Candidate]:
    """The lowest utilisation, in hundredths, at which it starts."""
    settings = ledger.settings
    if settings.kv_cache_memory_bytes is not None:
        return
    for hundredths in range(math.floor(settings.utilization * 100) + 1, int(HIGHEST_UTILIZATION * 100) + 1):
        why = "a larger share of the card; it leaves less outside the request"
        change = _set(settings, "utilization", hundredths / 100, why)
        after, _ = replan(change[0])
        if after.fits and after.slack.value > 0:
            yield change
            return


def _more_gpus(settings: Settings, shape: ModelShape) -> Iterator[Candidate]:
    for factor in (2, 4, 8):
        wanted = settings.tensor_parallel * factor
        if shape.attention_heads % wanted == 0:
            yield _set(settings, "tensor_parallel", wanted, f"the weights are divided over {wanted} GPUs")


def _a_cache_that_fits(ledger: Ledger) -> Iterator[Candidate]:
    size = ledger.kv.value + ledger.slack.low - _graphs_not_set_aside(ledger) - ROOM_FOR_THE_REST
    if size > 0 and ledger.settings.num_gpu_blocks_override is None:
        yield _set(ledger.settings, "kv_cache_memory_bytes", size, "what the card has beside everything else")


def _graphs_not_set_aside(ledger: Ledger) -> int:
    return max(0, ledger.graphs_actual.value - ledger.graphs.value)

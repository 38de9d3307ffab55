"""What will go wrong before anything is started, by code, and which flag to change.

Each piece of advice is the smallest step that clears the trouble, and was planned again to prove it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.launch.check_flags import Item
from plimsoll.models.shape import ModelShape
from plimsoll.plan.kv import WhyRefused
from plimsoll.plan.ledger import MEASURED_TOWERS, Ledger, embedding_table, film_tokens, keeps_copies
from plimsoll.plan.settings import SMALLER_CARD, Settings, whole_item_tokens
from plimsoll.units import GIB, format_count, format_gib
from plimsoll.vllm.versions import Behaviour

TOO_LONG_FOR_THE_MODEL = "the model has no such context"
NOT_QUANTISED = "the checkpoint is not quantised"
TOO_FEW_LORAS_IN_HOST = "fewer LoRAs in host memory than on the GPU"
ITEM_BEYOND_THE_BATCH = "one picture or film is larger than a batch"
LORA_RANKS = frozenset({1, 8, 16, 32, 64, 128, 256, 320, 512})  # config/lora.py; 1 since 0.11
MORE_SEQUENCES_THAN_STATES = "more sequences than the cache has states"
BFLOAT16_SINCE = (8, 0)  # compute capability; asked by the workers of every release
# Methods that read how a checkpoint was made from its own files and do not quantise while they load (as fp8 does).
_MADE_BEFORE = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})
# Model types that vLLM refuses to serve in 16 bits of the older kind (`_FLOAT16_NOT_SUPPORTED_MODELS` of 0.32.0).
NOT_IN_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})


def refusals(ledger: Ledger, shape: ModelShape, environment: Mapping[str, str], *, unquantised: bool) -> list[Finding]:
    """Settings that vLLM refuses for this model or card; `unquantised`: the checkpoint is known to hold plain weights."""
    settings, has = ledger.settings, ledger.card.compute_capability
    found = []

    def refuse(code: Code, confidence: float, title: str, because: str, flag: str = "") -> None:
        evidence = (Evidence("command", flag),) if flag else ()
        found.append(Finding(code, Severity.CRITICAL, confidence, title, because, evidence))

    if settings.max_model_len > shape.max_context and environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        because = f"--max-model-len {settings.max_model_len} is beyond the model's own {shape.max_context}"
        because += "; VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 overrides"
        refuse(Code.OTHER_BAD_CONFIG, 0.9, TOO_LONG_FOR_THE_MODEL, because)
    if settings.dtype == "bfloat16" and has is not None and has < BFLOAT16_SINCE:  # left to itself, vLLM takes float16 there
        because = f"--dtype bfloat16 needs compute capability 8.0, {ledger.card.name} has {has[0]}.{has[1]}"
        because += ": vLLM's workers stop at it"
        refuse(Code.OTHER_UNSUPPORTED_GPU, 0.95, "the card has no bfloat16", because, "--dtype bfloat16")
    method = settings.quantization
    if method in _MADE_BEFORE and shape.quantization is None and unquantised:
        because = (
            f"--quantization {method} reads weights that were quantised before, and the model has no quantization_config: vLLM "
            f'stops with "Cannot find the config file for {method}". Leave it out, or take a checkpoint that was made so'
        )
        refuse(Code.OTHER_BAD_CONFIG, 0.95, NOT_QUANTISED, because, f"--quantization {method}")
    if settings.max_loras and 0 < settings.max_cpu_loras < settings.max_loras:  # vLLM takes 0 as not given
        because = f"--max-cpu-loras {settings.max_cpu_loras} must be at least --max-loras {settings.max_loras}: vLLM refuses it"
        refuse(Code.OTHER_BAD_CONFIG, 0.95, TOO_FEW_LORAS_IN_HOST, because)
    if settings.max_loras and settings.max_lora_rank not in LORA_RANKS:
        because = f"--max-lora-rank {settings.max_lora_rank} is not one of {', '.join(map(str, sorted(LORA_RANKS)))}"
        refuse(Code.OTHER_BAD_CONFIG, 0.9, "vLLM has no such LoRA rank", because, f"--max-lora-rank {settings.max_lora_rank}")
    for title, because in _contradictions(settings, shape):
        refuse(Code.OTHER_BAD_CONFIG, 0.9, title, f"{because}: vLLM refuses it")
    whole = whole_item_tokens(shape)
    reads = shape.towers and not settings.language_model_only
    if reads and settings.max_num_batched_tokens < whole and Behaviour.UNREAD_TOWERS.is_in(settings.release):
        sure = Behaviour.GRAPH_ESTIMATE.is_in(settings.release)  # a nightly of 0.19 started so, 0.19.1 did not
        severity = Severity.CRITICAL if sure else Severity.WARNING
        because = (
            f"this model reads a picture or film whole, up to {format_count(whole)} tokens, and --max-num-batched-tokens is "
            f"{format_count(settings.max_num_batched_tokens)}: vLLM {'stops' if sure else 'may stop'} with "
            '"Chunked MM input disabled"'
        )
        found.append(Finding(Code.OTHER_BAD_CONFIG, severity, 0.8 if sure else 0.6, ITEM_BEYOND_THE_BATCH, because, ()))
    return found


def _contradictions(settings: Settings, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Sizes that contradict each other, whatever the memory: config/scheduler.py, config/model.py and arg_utils.py of vLLM."""
    tokens, context = settings.max_num_batched_tokens, settings.max_model_len
    if not settings.chunked_prefill and 0 < tokens < context:
        because = f"without chunked prefill a batch of {format_count(tokens)} tokens must hold {format_count(context)}"
        yield "a prompt of full length is larger than a batch", because
    if settings.long_prefill_token_threshold > settings.context:
        because = f"--long-prefill-token-threshold {settings.long_prefill_token_threshold} is beyond the context"
        yield "a threshold beyond the context", because
    drafted = 1 + settings.speculative_tokens
    if settings.max_loras and settings.speculative and tokens < settings.max_num_seqs * drafted:
        because = f"with LoRA a batch must hold {drafted} tokens of each of {settings.max_num_seqs} sequences"
        yield "a batch too small for drafted tokens", because
    dcp, ranks, heads = settings.decode_context_parallel, settings.tensor_parallel, shape.kv_heads
    if dcp > 1 and shape.mla is None and heads and (ranks <= heads or dcp > ranks // heads):
        most = max(1, ranks // heads)
        because = f"{heads} key-value heads over {ranks} GPUs allow --decode-context-parallel-size {most}, not {dcp}"
        yield "too many ranks for one context", because


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
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def stops_the_start(finding: Finding) -> bool:
    return finding.severity is Severity.CRITICAL


def logits_bytes(ledger: Ledger, shape: ModelShape) -> int:
    """One 32-bit copy of the logits of a full batch, which vLLM makes as soon as one request samples."""
    return ledger.settings.max_num_seqs * shape.vocab_size * 4


def _finding(code: Code, title: str, because: str, confidences: tuple[float, float], *, sure: bool) -> Finding:
    """Critical with the first confidence where it is sure, else a warning with the second."""
    severity, confidence = (Severity.CRITICAL, confidences[0]) if sure else (Severity.WARNING, confidences[1])
    return Finding(code, severity, confidence, title, because)


def _bad_flags(ledger: Ledger, items: Sequence[Item], environment: Mapping[str, str]) -> Iterator[Finding]:
    if refused := [item for item in items if item.status.is_refused]:
        names = ", ".join(item.name for item in refused)
        what, its = ("flag or value", "its") if len(refused) == 1 else ("flags or values", "their")
        evidence = tuple(Evidence("command", f"{item.name}: {item.status} {item.since or ''}".rstrip()) for item in refused)
        because = f"the parser has no such {what}; `plimsoll flags` says what takes {its} place"
        yield Finding(Code.STARTUP_BAD_FLAG, Severity.CRITICAL, 0.95, f"vLLM refuses {names}", because, evidence)
    conf, connector = environment.get("PYTORCH_CUDA_ALLOC_CONF", ""), ledger.settings.kv_connector
    is_refused = connector is not None and Behaviour.SEGMENTS_REFUSED.is_in(ledger.settings.release)
    if "expandable_segments:True" in conf and is_refused:
        because = f"vLLM refuses expandable_segments:True with {connector} since {Behaviour.SEGMENTS_REFUSED.since}"
        set_by = (Evidence("environment", f"PYTORCH_CUDA_ALLOC_CONF={conf}"),)
        title = "expandable segments beside a KV connector"
        yield Finding(Code.STARTUP_BAD_FLAG, Severity.CRITICAL, 0.9, title, because, set_by)


def _weights_and_cache(ledger: Ledger) -> Iterator[Finding]:
    """The weights, the free memory and the cache, in the order in which vLLM looks at them."""
    free, weights, requested, kv = ledger.free_bytes, ledger.weights, ledger.requested, ledger.kv
    if weights.value > free:
        sure = weights.low > free
        title = "the weights do not fit" if sure else "the weights may not fit"
        because = f"the weights of one GPU take {format_gib(weights.value)}, the card has {format_gib(free)}"
        yield _finding(Code.STARTUP_WEIGHTS_DO_NOT_FIT, title, because, (0.95, 0.6), sure=sure)
    if free < requested.value and Behaviour.NEIGHBOURS_APART.is_in(ledger.settings.release):
        asked = f"vLLM asks for {format_gib(requested.value)} and refuses to start when less is free"
        sure = ledger.slack.high < 0 or free < requested.value - ledger.context.value
        title, because = "less memory is free than asked for", f"{asked}; about {format_gib(free)} will be"
        yield _finding(Code.STARTUP_FREE_MEMORY_CHECK, title, because, (0.95, 0.5), sure=sure)
    if weights.value > free:
        return  # what is left for the cache is not asked any more
    refusal = ledger.kv_plan.refusal
    confidence = 0.95 if kv.high <= 0 else 0.7
    severity = Severity.WARNING if ledger.fits_at_high_end else Severity.CRITICAL
    if kv.value <= 0:
        if weights.value + ledger.non_torch.value + ledger.activation.value > free:
            # The weights fit the card, but not beside the batch that vLLM tries before it counts what is left.
            tokens = format_count(ledger.settings.max_num_batched_tokens)
            batch = f"a batch of {tokens} tokens, {format_gib(ledger.activation.value)}"
            because = f"weights of {format_gib(weights.value)} and {batch}, are tried together; the card has {format_gib(free)}"
            sure = weights.low + ledger.non_torch.low + ledger.activation.low > free
            yield _finding(Code.STARTUP_PROFILE_RUN, "the trial run does not fit", because, (0.9, 0.6), sure=sure)
        largest = max(("weights", weights), ("activations", ledger.activation), key=lambda term: term[1].value)
        because = (
            f"the budget is {format_gib(requested.value)}; {largest[0]} take {format_gib(largest[1].value)} of it and "
            f"{format_gib(-kv.value)} are missing before the first block"
        )
        yield Finding(Code.STARTUP_NO_CACHE_BLOCKS, severity, confidence, "nothing is left for the KV cache", because)
    elif refusal is not None:
        title = "not one token fits" if refusal.why is WhyRefused.NOTHING_FITS else "one request of full length does not fit"
        because = (
            f"{format_count(ledger.kv_plan.max_model_len)} tokens need {format_gib(refusal.needed_bytes)} of KV cache, "
            f"{format_gib(refusal.available_bytes)} are there; "
            f"{format_count(ledger.kv_plan.largest_context_that_fits)} tokens would fit"
        )
        yield Finding(Code.STARTUP_CONTEXT_TOO_LONG, severity, confidence, title, because)


def _fixed_cache(ledger: Ledger, shape: ModelShape) -> Iterator[Finding]:
    """A cache of a size somebody set: vLLM allocates it without a trial run; the first step that finds nothing left fails."""
    size, slack = format_gib(ledger.kv.value), ledger.slack
    if slack.value >= 0 > slack.low:
        because = (
            f"beside the cache of {size} and all else {format_gib(slack.value)} are left; freed memory comes back in "
            f"pieces, so batches of {format_count(ledger.settings.max_num_batched_tokens)} tokens may need "
            f"{format_gib(slack.value - slack.low)} more than they use at once"
        )
        yield Finding(Code.RUNTIME_FORWARD, Severity.WARNING, 0.5, "a full batch may run out of memory", because)
    if slack.value >= 0:
        return
    left = slack.value + ledger.activation.value + ledger.graphs.value
    after_graphs = left - ledger.graphs_actual.value
    if left < 0:
        code, title = Code.STARTUP_KV_ALLOCATION, "does not fit"
    elif after_graphs < 0:
        code, title = Code.STARTUP_GRAPH_CAPTURE, "leaves no room for CUDA graphs"
    elif not ledger.settings.v2_runner and after_graphs < 4 * logits_bytes(ledger, shape):
        code, title = Code.STARTUP_SAMPLER_WARMUP, "leaves no room for the sampler's warm-up"
    else:
        code, title = Code.RUNTIME_FORWARD, "leaves no room for a full batch"
    because = f"the cache was set to {size}; with weights, activations and what is on the card that is "
    because += f"{format_gib(-slack.value)} more than there is"
    yield _finding(code, f"the cache that was asked for {title}", because, (0.95, 0.6), sure=slack.high < 0)


def _outside_the_request(ledger: Ledger, shape: ModelShape) -> Iterator[Finding]:
    """A request that is granted, and what comes on top of it: graphs that vLLM did not set aside, the sampler, late kernels."""
    settings, slack, graphs = ledger.settings, ledger.slack, ledger.graphs_actual
    if slack.value < 0:
        if not settings.has_fixed_cache and ledger.free_bytes >= ledger.requested.value and ledger.kv.value > 0:
            because = (
                f"vLLM is granted its {format_gib(ledger.requested.value)}, but buffers of the sampler for "
                f"{settings.max_num_seqs} sequences come on top, and {format_gib(-slack.value)} are missing when it warms up"
            )
            title = "the sampler's warm-up will not fit"
            yield _finding(Code.STARTUP_SAMPLER_WARMUP, title, because, (0.8, 0.5), sure=slack.high < 0)
        return
    room = slack.value - _graphs_not_set_aside(ledger)
    logits = logits_bytes(ledger, shape)
    sampler = 4 * logits  # logits, their 32-bit copy, and the sort of top-k and top-p with its indices
    if not settings.enforce_eager and graphs.value > ledger.graphs.value and room < 0:
        because = (
            f"CUDA graphs take about {format_gib(graphs.value)}, {settings.release} sets "
            f"{format_gib(ledger.graphs.value)} aside, and only {format_gib(slack.value)} lie outside the request"
        )
        title, sure = "graph capture will run out of memory", slack.high < graphs.low - ledger.graphs.value
        yield _finding(Code.STARTUP_GRAPH_CAPTURE, title, because, (0.7, 0.7), sure=sure)
    elif not settings.enforce_eager and not settings.v2_runner and room < sampler:
        because = (
            f"the first model runner warms the sampler up with {settings.max_num_seqs} rows of "
            f"{format_count(shape.vocab_size)} logits after the cache is allocated, up to {format_gib(sampler)}; "
            f"{format_gib(room)} are left"
        )
        yield Finding(Code.STARTUP_SAMPLER_WARMUP, Severity.WARNING, 0.4, "the sampler's warm-up may not fit", because)
    if room < logits + ROOM_FOR_THE_REST:
        because = (
            f"{format_gib(room)} lie outside the request; a full batch that samples copies "
            f"{format_gib(logits)} of logits, which vLLM's own profile leaves out, and kernels load late"
        )
        yield Finding(Code.RUNTIME_LOGITS, Severity.WARNING, 0.5, "little room beside the request", because)


def _too_few_blocks(ledger: Ledger) -> Iterator[Finding]:
    """Too few for a request of full length once vLLM keeps one for itself, or for a state of every sequence."""
    settings, cache = ledger.settings, ledger.kv_plan
    blocks, most = cache.num_blocks, max(cache.bytes_per_block_by_rank, default=0)
    if blocks <= cache.blocks_per_request and cache.fits_one_request and Behaviour.V1_ENGINE.is_in(settings.release):
        because = (
            f"a request of {format_count(cache.max_model_len)} tokens needs {format_count(cache.blocks_per_request)} blocks, "
            f"and of the {format_count(blocks)} that there are vLLM keeps one; it starts, and such a request waits for ever"
        )
        yield Finding(Code.KV_SATURATED, Severity.WARNING, 0.8, "one block short for a request of full length", because)
    # Full CUDA graphs need a state for every sequence: vLLM refuses more sequences than the cache has blocks.
    keeps_states = any(group.kind in ("state", "mixed") for group in cache.groups)
    is_checked = Behaviour.STATE_FOR_EVERY_SEQUENCE.is_in(settings.release) and settings.full_graphs
    has_cache = most > 0 and ledger.kv.value > 0 and ledger.weights.value <= ledger.free_bytes
    if keeps_states and is_checked and has_cache and settings.max_num_seqs > blocks:
        because = (
            f"the model keeps one state for each sequence, and the cache has {format_count(blocks)} blocks; vLLM stops with "
            f'"max_num_seqs ({settings.max_num_seqs}) exceeds available Mamba cache blocks ({blocks})" unless CUDA graphs are '
            "piecewise or off"
        )
        sequences = min(settings.max_num_seqs, SMALLER_CARD[0]) if settings.batch_by_size else settings.max_num_seqs
        sure = sequences > (blocks if ledger.kv.is_exact else ledger.kv.high // most)
        yield _finding(Code.STARTUP_GRAPH_CAPTURE, MORE_SEQUENCES_THAN_STATES, because, (0.95, 0.7), sure=sure)


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
    """What widens the bands of this plan beyond what starts of its kind have shown."""
    settings, notes = ledger.settings, []
    if copies := keeps_copies(settings, shape):
        table = format_gib(embedding_table(shape, settings))
        leaves = (
            f"leaves up to two copies of the embedding table ({table} each)"
            if copies > 1
            else f"may leave a copy of the embedding table ({table})"
        )
        notes.append(
            f"a start with a cold compile cache {leaves} in the activation, one with a warm cache none: the band holds both"
        )
    if settings.shares_host_memory:
        notes.append(f"{ledger.card.name} shares its memory with the host: what other processes take while vLLM starts counts")
    if settings.is_amd:
        notes.append("few starts on AMD cards are known: graphs took several GiB in some of them, and the band says so")
    if settings.pipeline_parallel > 1:
        notes.append(
            "of pipelines from 0.20 on one start is known: the figures are those of the fullest stage, with a wide band"
        )
    if settings.batch_by_size and settings.max_num_seqs > SMALLER_CARD[0]:
        notes.append(
            f"the card is known by its size alone: vLLM takes {settings.max_num_seqs} sequences and "
            f"{settings.max_num_batched_tokens} tokens a batch on most cards of this size, {SMALLER_CARD[0]} and "
            f"{SMALLER_CARD[1]} on some; the band holds both, --max-num-seqs settles it"
        )
    if film := film_tokens(shape, settings):
        notes.append(
            f"vLLM profiles one film of {format_count(film)} tokens, which makes the activation; without films "
            "(--limit-mm-per-prompt '{\"video\": 0}') the KV cache gets most of it"
        )
    reads = shape.towers and not settings.language_model_only and not settings.skips_mm_profiling
    if reads and shape.model_type not in MEASURED_TOWERS:
        notes.append("no start of this kind of encoder is known: the activation may be without it, or twice as large")
    if shape.quantization is not None and "mixed" in ledger.weights.why:
        notes.append("the checkpoint mixes precisions: the weights are a guess until its headers are read")
    return notes


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
    also: tuple[tuple[str, str], ...] = ()  # further flags with their values, where one change alone is not enough

    @property
    def words(self) -> str:
        return " ".join(f"{flag} {value}".strip() for flag, value in ((self.flag, self.value), *self.also))


class _Step(NamedTuple):
    """A plan with some changes followed: which, why, and which finding was the first to be cleared."""

    ledger: Ledger
    findings: list[Finding]
    changes: tuple[tuple[str, str], ...] = ()
    why: tuple[str, ...] = ()
    clears: Code | None = None

    @property
    def left(self) -> list[Finding]:
        """What is still found, without what no value of a flag clears: a flag that vLLM refuses has to go anyway."""
        return [finding for finding in self.findings if not is_for_the_user(finding)]

    @property
    def is_risky(self) -> bool:
        return not all(map(stops_the_start, self.findings))

    def as_advice(self, before: Ledger) -> Advice:
        (flag, value), *also = self.changes
        tokens, shown = self.ledger.kv_plan.tokens, before.kv_plan.tokens
        if abs(tokens - shown) == 1:  # vLLM rounds down from a quotient of the context: of the same blocks one can be lost
            tokens = shown
        outside = f"{format_gib(self.ledger.slack.value)} outside the request"
        effect = f"KV {format_gib(self.ledger.kv.value)}, {format_count(tokens)} tokens, {outside}"
        clears = self.clears or Code.OTHER_BAD_CONFIG
        return Advice(flag, value, "; ".join(dict.fromkeys(self.why)), effect, clears, tuple(also))


def advise(ledger: Ledger, shape: ModelShape, findings: list[Finding], replan: Replan) -> list[Advice]:
    """Offers for what stops the start (or, if nothing does, for what is risky), cheapest for the user first.

    With each of them nothing stops it any more. Where no change alone does that, the first that clears something is taken as
    followed, and each offer is that one and another together. One that leaves no warning goes before one that does.
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
    # What stops the start goes before what is risky, and limits of the model before those of memory.
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
    """Whether no value of a flag clears it."""
    return _name(finding) in _FOR_THE_USER


def _name(finding: Finding) -> tuple[Code, str]:
    """Tells findings apart: only settings that contradict each other can be found several times at once."""
    return finding.code, finding.title if finding.code is Code.OTHER_BAD_CONFIG else ""


Candidate = tuple[Settings, str, str, str]


def _candidates(finding: Finding, ledger: Ledger, shape: ModelShape, replan: Replan) -> Iterator[Candidate]:
    settings, blocks = ledger.settings, ledger.kv_plan.num_blocks
    match finding.code:
        case Code.STARTUP_CONTEXT_TOO_LONG:
            yield from _shorter_context(ledger, shape)
            yield from _more_for_the_cache(ledger, replan)
            if not settings.kv_cache_dtype.startswith(("fp8", "int", "nvfp4")):
                why = "half the bytes a token; check the answers"
                yield replace(settings, kv_cache_dtype="fp8"), "--kv-cache-dtype", "fp8", why
            yield from _more_gpus(settings, shape)
        case Code.STARTUP_NO_CACHE_BLOCKS:
            yield from _more_for_the_cache(ledger, replan)
            for sequences in _halves(settings.max_num_seqs):
                change = replace(settings, max_num_seqs=sequences)
                if replan(change)[0].fits:
                    yield change, "--max-num-seqs", str(sequences), "a smaller batch is profiled, so less is set aside for it"
                    break
            yield from _more_gpus(settings, shape)
        case Code.STARTUP_WEIGHTS_DO_NOT_FIT:
            yield from _more_gpus(settings, shape)
        case Code.STARTUP_FREE_MEMORY_CHECK:
            # What is free, and shares a little below it: the first may leave too little beside the request.
            free = ledger.card.total_bytes - ledger.card.used_bytes - ledger.context.high
            highest = math.floor(free / ledger.card.total_bytes * 100)
            why = "what is free, less the CUDA context"
            for hundredths in range(highest, max(0, highest - STEPS_BELOW_FREE), -1):
                yield from _lower_utilization(settings, hundredths / 100, why)
                why = "what is free, less the CUDA context and the room that a full batch needs beside the request"
        case Code.STARTUP_KV_ALLOCATION | Code.RUNTIME_FORWARD:
            yield from _a_cache_that_fits(ledger)
        case Code.OTHER_BAD_CONFIG if finding.title == TOO_LONG_FOR_THE_MODEL:
            yield from _shorter_context(ledger, shape, of_the_model=True)
        case Code.OTHER_BAD_CONFIG if finding.title == ITEM_BEYOND_THE_BATCH:
            tokens = whole_item_tokens(shape)
            change = replace(settings, max_num_batched_tokens=tokens)
            yield change, "--max-num-batched-tokens", str(tokens), "one film of the default length"
        case Code.OTHER_BAD_CONFIG if finding.title == TOO_FEW_LORAS_IN_HOST:
            slots = settings.max_loras
            yield replace(settings, max_cpu_loras=slots), "--max-cpu-loras", str(slots), "as many as the GPU holds"
        case Code.OTHER_UNSUPPORTED_GPU if shape.model_type not in NOT_IN_FLOAT16:
            why = "16 bits that every card has; some models overflow in it"
            yield replace(settings, dtype="float16"), "--dtype", "float16", why
        case Code.STARTUP_GRAPH_CAPTURE if finding.title == MORE_SEQUENCES_THAN_STATES:
            if blocks > 0:
                why = "as many sequences as the cache has states"
                yield replace(settings, max_num_seqs=blocks), "--max-num-seqs", str(blocks), why
            yield from _more_for_the_cache(ledger, replan)
        case Code.STARTUP_GRAPH_CAPTURE | Code.STARTUP_SAMPLER_WARMUP | Code.RUNTIME_LOGITS:
            if settings.has_fixed_cache:  # no utilisation leaves more beside it
                yield from _a_cache_that_fits(ledger)
            needs = 4 * logits_bytes(ledger, shape) + ROOM_FOR_THE_REST + _graphs_not_set_aside(ledger)
            share = math.floor((ledger.free_bytes - needs) / ledger.card.total_bytes * 100) / 100
            yield from _lower_utilization(settings, share, "leaves the room beside the request that sampling and graphs need")
            for sequences in _halves(settings.max_num_seqs):
                change = replace(settings, max_num_seqs=sequences)
                yield change, "--max-num-seqs", str(sequences), "fewer rows of logits at once"
                if sequences <= settings.max_num_seqs // 8:
                    break


def _halves(sequences: int) -> Iterator[int]:
    while sequences > 16:
        sequences //= 2
        yield sequences


def _lower_utilization(settings: Settings, share: float, why: str) -> Iterator[Candidate]:
    if 0 < share < settings.utilization:
        yield replace(settings, utilization=share), "--gpu-memory-utilization", f"{share:.2f}", why


def _shorter_context(ledger: Ledger, shape: ModelShape, *, of_the_model: bool = False) -> Iterator[Candidate]:
    """What fits, and the model's own longest where that is shorter or asked for, which then goes first."""
    fits, longest = ledger.kv_plan.largest_context_that_fits, shape.max_context
    own = replace(ledger.settings, max_model_len=longest), "--max-model-len", str(longest), "what the model was made for"
    if of_the_model and longest < ledger.settings.max_model_len:
        yield own
    if fits > 0:
        sure = ledger.context_at_low_end
        also = f" ({format_count(sure)} even at the low end of its band)" if sure is not None and sure < fits else ""
        why = f"the longest context one request can have in this cache{also}"
        yield replace(ledger.settings, max_model_len=fits), "--max-model-len", str(fits), why
    if fits > longest < ledger.settings.max_model_len:
        yield own


def _more_for_the_cache(ledger: Ledger, replan: Replan) -> Iterator[Candidate]:
    """The lowest utilisation, in hundredths, at which it starts."""
    settings = ledger.settings
    if settings.kv_cache_memory_bytes is not None:
        return
    for hundredths in range(math.floor(settings.utilization * 100) + 1, int(HIGHEST_UTILIZATION * 100) + 1):
        change = replace(settings, utilization=hundredths / 100)
        after, _ = replan(change)
        if after.fits and after.slack.value > 0:
            why = "a larger share of the card; it leaves less outside the request"
            yield change, "--gpu-memory-utilization", f"{hundredths / 100:.2f}", why
            return


def _more_gpus(settings: Settings, shape: ModelShape) -> Iterator[Candidate]:
    for factor in (2, 4, 8):
        wanted = settings.tensor_parallel * factor
        if shape.attention_heads % wanted == 0:
            why = f"the weights are divided over {wanted} GPUs"
            yield replace(settings, tensor_parallel=wanted), "--tensor-parallel-size", str(wanted), why


def _a_cache_that_fits(ledger: Ledger) -> Iterator[Candidate]:
    size = ledger.kv.value + ledger.slack.low - _graphs_not_set_aside(ledger) - ROOM_FOR_THE_REST
    if size > 0 and ledger.settings.num_gpu_blocks_override is None:
        why = "what the card has beside everything else"
        yield replace(ledger.settings, kv_cache_memory_bytes=size), "--kv-cache-memory-bytes", str(size), why


def _graphs_not_set_aside(ledger: Ledger) -> int:
    return max(0, ledger.graphs_actual.value - ledger.graphs.value)

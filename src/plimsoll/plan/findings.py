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
from plimsoll.plan.settings import SMALLER_CARD, WHOLE_ITEM_TOKENS, Settings
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
    whole = WHOLE_ITEM_TOKENS.get(shape.model_type, 0)
    reads = shape.towers and not settings.language_model_only
    if reads and settings.max_num_batched_tokens < whole and Behaviour.UNREAD_TOWERS.is_in(settings.release):
        because = (
            f"this model reads a picture or film whole, up to {format_count(whole)} tokens, and --max-num-batched-tokens is "
            f'{format_count(settings.max_num_batched_tokens)}: vLLM stops with "Chunked MM input disabled"'
        )
        refuse(Code.OTHER_BAD_CONFIG, 0.8, ITEM_BEYOND_THE_BATCH, because)
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
    too_heavy = _weights(ledger)
    findings = [*_flags(items), *_segments(ledger, environment), *too_heavy, *_free_memory(ledger)]
    findings += [] if too_heavy else _cache(ledger)  # what is left for the cache is not asked any more
    findings += _too_large_a_cache(ledger, shape) + _in_pieces(ledger)
    findings += refusals(ledger, shape, environment, unquantised=unquantised)
    findings += _warm_up(ledger) + _graphs(ledger, shape) + _thin(ledger, shape) + _one_block_short(ledger)
    findings += [] if too_heavy else _too_few_states(ledger)
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def stops_the_start(finding: Finding) -> bool:
    """Whether vLLM will not serve because of it."""
    return finding.severity is Severity.CRITICAL


def logits_bytes(ledger: Ledger, shape: ModelShape) -> int:
    """One 32-bit copy of the logits of a full batch, which vLLM makes as soon as one request samples."""
    return ledger.settings.max_num_seqs * shape.vocab_size * 4


def room_after_graphs(ledger: Ledger) -> int:
    """What is left outside the request once graphs that vLLM did not set aside are captured."""
    return ledger.slack.value - max(0, ledger.graphs_actual.value - ledger.graphs.value)


def _flags(items: Sequence[Item]) -> list[Finding]:
    refused = [item for item in items if item.status.is_refused]
    if not refused:
        return []
    names = ", ".join(item.name for item in refused)
    what, its = ("flag or value", "its") if len(refused) == 1 else ("flags or values", "their")
    evidence = tuple(Evidence("command", f"{item.name}: {item.status} {item.since or ''}".rstrip()) for item in refused)
    because = f"the parser has no such {what}; `plimsoll flags` says what takes {its} place"
    return [Finding(Code.STARTUP_BAD_FLAG, Severity.CRITICAL, 0.95, f"vLLM refuses {names}", because, evidence)]


def _segments(ledger: Ledger, environment: Mapping[str, str]) -> list[Finding]:
    conf = environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    connector = ledger.settings.kv_connector
    is_refused = connector is not None and Behaviour.SEGMENTS_REFUSED.is_in(ledger.settings.release)
    if "expandable_segments:True" not in conf or not is_refused:
        return []
    return [
        Finding(Code.STARTUP_BAD_FLAG, Severity.CRITICAL, 0.9, "expandable segments beside a KV connector",
                f"vLLM refuses expandable_segments:True with {connector} since {Behaviour.SEGMENTS_REFUSED.since}",
                (Evidence("environment", f"PYTORCH_CUDA_ALLOC_CONF={conf}"),))
    ]  # fmt: skip


def _weights(ledger: Ledger) -> list[Finding]:
    room = ledger.free_bytes
    if ledger.weights.value <= room:
        return []
    because = f"the weights of one GPU take {format_gib(ledger.weights.value)}, the card has {format_gib(room)}"
    sure = ledger.weights.low > room
    severity, confidence = (Severity.CRITICAL, 0.95) if sure else (Severity.WARNING, 0.6)
    title = "the weights do not fit" if sure else "the weights may not fit"
    return [Finding(Code.STARTUP_WEIGHTS_DO_NOT_FIT, severity, confidence, title, because)]


def _free_memory(ledger: Ledger) -> list[Finding]:
    free = ledger.free_bytes
    if free >= ledger.requested.value or not Behaviour.NEIGHBOURS_APART.is_in(ledger.settings.release):
        return []
    because = (
        f"vLLM asks for {format_gib(ledger.requested.value)} and refuses to start when less is free; "
        f"about {format_gib(free)} will be"
    )
    sure = ledger.slack.high < 0 or free < ledger.requested.value - ledger.context.value
    severity, confidence = (Severity.CRITICAL, 0.95) if sure else (Severity.WARNING, 0.5)
    return [Finding(Code.STARTUP_FREE_MEMORY_CHECK, severity, confidence, "less memory is free than asked for", because)]


def _cache(ledger: Ledger) -> list[Finding]:
    refusal = ledger.kv_plan.refusal
    confidence = 0.95 if ledger.kv.high <= 0 else 0.7
    severity = Severity.WARNING if ledger.fits_at_high_end else Severity.CRITICAL
    if ledger.kv.value <= 0:
        largest = max(("weights", ledger.weights), ("activations", ledger.activation), key=lambda term: term[1].value)
        because = (
            f"the budget is {format_gib(ledger.requested.value)}; {largest[0]} take {format_gib(largest[1].value)} of it and "
            f"{format_gib(-ledger.kv.value)} are missing before the first block"
        )
        return [
            *_profile_run(ledger),
            Finding(Code.STARTUP_NO_CACHE_BLOCKS, severity, confidence, "nothing is left for the KV cache", because),
        ]
    if refusal is None:
        return []
    largest_context = ledger.kv_plan.largest_context_that_fits
    title = "not one token fits" if refusal.why is WhyRefused.NOTHING_FITS else "one request of full length does not fit"
    because = (
        f"{format_count(ledger.kv_plan.max_model_len)} tokens need {format_gib(refusal.needed_bytes)} of KV cache, "
        f"{format_gib(refusal.available_bytes)} are there; {format_count(largest_context)} tokens would fit"
    )
    return [Finding(Code.STARTUP_CONTEXT_TOO_LONG, severity, confidence, title, because)]


def _profile_run(ledger: Ledger) -> list[Finding]:
    """Weights that fit the card, but not beside the batch that vLLM tries before it counts what is left."""
    room = ledger.free_bytes
    needed = ledger.weights.value + ledger.non_torch.value + ledger.activation.value
    if needed <= room:
        return []
    because = (
        f"weights of {format_gib(ledger.weights.value)} and a batch of "
        f"{format_count(ledger.settings.max_num_batched_tokens)} tokens, {format_gib(ledger.activation.value)}, are tried "
        f"together; the card has {format_gib(room)}"
    )
    surely = ledger.weights.low + ledger.non_torch.low + ledger.activation.low > room
    severity, confidence = (Severity.CRITICAL, 0.9) if surely else (Severity.WARNING, 0.6)
    return [Finding(Code.STARTUP_PROFILE_RUN, severity, confidence, "the trial run does not fit", because)]


def _too_large_a_cache(ledger: Ledger, shape: ModelShape) -> list[Finding]:
    """A cache of a size somebody set: vLLM allocates it without a trial run; the first step that finds nothing left fails."""
    if not ledger.settings.has_fixed_cache or ledger.slack.value >= 0:
        return []
    because = (
        f"the cache was set to {format_gib(ledger.kv.value)}; with weights, activations and what is on the card that is "
        f"{format_gib(-ledger.slack.value)} more than there is"
    )
    severity, confidence = (Severity.CRITICAL, 0.95) if ledger.slack.high < 0 else (Severity.WARNING, 0.6)
    code, title = _where_it_is_missed(ledger, shape)
    return [Finding(code, severity, confidence, title, because)]


def _where_it_is_missed(ledger: Ledger, shape: ModelShape) -> tuple[Code, str]:
    """The first step for which nothing is left: the cache, the graphs, the sampler's warm-up, or the first full batch."""
    left = ledger.slack.value + ledger.activation.value + ledger.graphs.value
    if left < 0:
        return Code.STARTUP_KV_ALLOCATION, "the cache that was asked for does not fit"
    left -= ledger.graphs_actual.value
    if left < 0:
        return Code.STARTUP_GRAPH_CAPTURE, "the cache that was asked for leaves no room for CUDA graphs"
    if not ledger.settings.v2_runner and left < 4 * logits_bytes(ledger, shape):
        return Code.STARTUP_SAMPLER_WARMUP, "the cache that was asked for leaves no room for the sampler's warm-up"
    return Code.RUNTIME_FORWARD, "the cache that was asked for leaves no room for a full batch"


def _in_pieces(ledger: Ledger) -> list[Finding]:
    """A cache of a given size that leaves what the batches take together, and not what they take in torch's pieces."""
    if not ledger.settings.has_fixed_cache or ledger.slack.value < 0 or ledger.slack.low >= 0:
        return []
    because = (
        f"beside the cache of {format_gib(ledger.kv.value)} and all else {format_gib(ledger.slack.value)} are left; freed "
        f"memory comes back in pieces, so batches of {format_count(ledger.settings.max_num_batched_tokens)} tokens may need "
        f"{format_gib(ledger.slack.value - ledger.slack.low)} more than they use at once"
    )
    return [Finding(Code.RUNTIME_FORWARD, Severity.WARNING, 0.5, "a full batch may run out of memory", because)]


def _warm_up(ledger: Ledger) -> list[Finding]:
    """A request that is granted, on a card that does not hold what comes beside it."""
    settings = ledger.settings
    is_granted = ledger.free_bytes >= ledger.requested.value
    if settings.has_fixed_cache or ledger.slack.value >= 0 or not is_granted or ledger.kv.value <= 0:
        return []
    because = (
        f"vLLM is granted its {format_gib(ledger.requested.value)}, but buffers of the sampler for {settings.max_num_seqs} "
        f"sequences come on top, and {format_gib(-ledger.slack.value)} are missing when it warms up"
    )
    severity, confidence = (Severity.CRITICAL, 0.8) if ledger.slack.high < 0 else (Severity.WARNING, 0.5)
    return [Finding(Code.STARTUP_SAMPLER_WARMUP, severity, confidence, "the sampler's warm-up will not fit", because)]


def _one_block_short(ledger: Ledger) -> list[Finding]:
    """vLLM counts all blocks when it starts and keeps one for itself when it serves."""
    cache = ledger.kv_plan
    enough = cache.num_blocks > cache.blocks_per_request
    if enough or not cache.fits_one_request or not Behaviour.V1_ENGINE.is_in(ledger.settings.release):
        return []
    because = (
        f"a request of {format_count(cache.max_model_len)} tokens needs {format_count(cache.blocks_per_request)} blocks, and "
        f"of the {format_count(cache.num_blocks)} that there are vLLM keeps one; it starts, and such a request waits for ever"
    )
    return [Finding(Code.KV_SATURATED, Severity.WARNING, 0.8, "one block short for a request of full length", because)]


def _too_few_states(ledger: Ledger) -> list[Finding]:
    """Full CUDA graphs need a state for every sequence: vLLM refuses more sequences than the cache has blocks."""
    settings, cache = ledger.settings, ledger.kv_plan
    blocks, most = cache.num_blocks, max(cache.bytes_per_block_by_rank, default=0)
    keeps_states = any(group.kind in ("state", "mixed") for group in cache.groups)
    is_checked = Behaviour.STATE_FOR_EVERY_SEQUENCE.is_in(settings.release) and settings.full_graphs
    if not keeps_states or not is_checked or not most or ledger.kv.value <= 0 or settings.max_num_seqs <= blocks:
        return []
    because = (
        f"the model keeps one state for each sequence, and the cache has {format_count(blocks)} blocks; vLLM stops with "
        f'"max_num_seqs ({settings.max_num_seqs}) exceeds available Mamba cache blocks ({blocks})" unless CUDA graphs are '
        "piecewise or off"
    )
    sequences = min(settings.max_num_seqs, SMALLER_CARD[0]) if settings.batch_by_size else settings.max_num_seqs
    sure = sequences > (blocks if ledger.kv.is_exact else ledger.kv.high // most)
    severity, confidence = (Severity.CRITICAL, 0.95) if sure else (Severity.WARNING, 0.7)
    return [Finding(Code.STARTUP_GRAPH_CAPTURE, severity, confidence, MORE_SEQUENCES_THAN_STATES, because)]


def _graphs(ledger: Ledger, shape: ModelShape) -> list[Finding]:
    if ledger.slack.value < 0 or ledger.settings.enforce_eager:
        return []
    missing = ledger.graphs_actual.value - ledger.graphs.value
    if missing > 0 and room_after_graphs(ledger) < 0:
        because = (
            f"CUDA graphs take about {format_gib(ledger.graphs_actual.value)}, {ledger.settings.release} sets "
            f"{format_gib(ledger.graphs.value)} aside, and only {format_gib(ledger.slack.value)} lie outside the request"
        )
        sure = ledger.slack.high < ledger.graphs_actual.low - ledger.graphs.value
        severity = Severity.CRITICAL if sure else Severity.WARNING
        return [Finding(Code.STARTUP_GRAPH_CAPTURE, severity, 0.7, "graph capture will run out of memory", because)]
    needs = 4 * logits_bytes(ledger, shape)  # logits, their 32-bit copy, and the sort of top-k and top-p with its indices
    if not ledger.settings.v2_runner and room_after_graphs(ledger) < needs:
        because = (
            f"the first model runner warms the sampler up with {ledger.settings.max_num_seqs} rows of "
            f"{format_count(shape.vocab_size)} logits after the cache is allocated, up to {format_gib(needs)}; "
            f"{format_gib(room_after_graphs(ledger))} are left"
        )
        return [Finding(Code.STARTUP_SAMPLER_WARMUP, Severity.WARNING, 0.4, "the sampler's warm-up may not fit", because)]
    return []


def _thin(ledger: Ledger, shape: ModelShape) -> list[Finding]:
    needs = logits_bytes(ledger, shape) + ROOM_FOR_THE_REST
    if ledger.slack.value < 0 or room_after_graphs(ledger) >= needs:
        return []
    because = (
        f"{format_gib(room_after_graphs(ledger))} lie outside the request; a full batch that samples copies "
        f"{format_gib(logits_bytes(ledger, shape))} of logits, which vLLM's own profile leaves out, and kernels load late"
    )
    return [Finding(Code.RUNTIME_LOGITS, Severity.WARNING, 0.5, "little room beside the request", because)]


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
    if keeps_copies(settings, shape):
        table = embedding_table(shape, settings)
        notes.append(
            f"a start with a cold compile cache leaves up to two copies of the embedding table ({format_gib(table)} each) in "
            "the activation, one with a warm cache none: the band holds both"
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
            return [_as_advice(offer, ledger) for offer in sorted(whole, key=lambda offer: bool(_left(offer)))]
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
            if not any(map(stops_the_start, _left(after))) and (flag not in whole or not _left(after)):
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
        case Code.OTHER_UNSUPPORTED_GPU if shape.model_type not in NOT_IN_FLOAT16:
            why = "16 bits that every card has; some models overflow in it"
            yield replace(ledger.settings, dtype="float16"), "--dtype", "float16", why
        case Code.STARTUP_GRAPH_CAPTURE if finding.title == MORE_SEQUENCES_THAN_STATES:
            yield from _as_many_sequences_as_states(ledger)
            yield from _more_for_the_cache(ledger, replan)
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
    elif finding.title == ITEM_BEYOND_THE_BATCH:
        tokens = WHOLE_ITEM_TOKENS[shape.model_type]
        changed = replace(ledger.settings, max_num_batched_tokens=tokens)
        yield changed, "--max-num-batched-tokens", str(tokens), "one film of the default length"
    elif finding.title == TOO_FEW_LORAS_IN_HOST:
        slots = ledger.settings.max_loras
        changed = replace(ledger.settings, max_cpu_loras=slots)
        yield changed, "--max-cpu-loras", str(slots), "as many as the GPU holds"


def _as_many_sequences_as_states(ledger: Ledger) -> Iterator[Candidate]:
    blocks = ledger.kv_plan.num_blocks
    if blocks > 0:
        changed = replace(ledger.settings, max_num_seqs=blocks)
        yield changed, "--max-num-seqs", str(blocks), "as many sequences as the cache has states"


def _context_of_the_model(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    context = shape.max_context
    if context < ledger.settings.max_model_len:
        changed = replace(ledger.settings, max_model_len=context)
        yield changed, "--max-model-len", str(context), "what the model was made for"


def _shorter_context(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    fits = ledger.kv_plan.largest_context_that_fits
    if fits > 0:
        sure = ledger.context_at_low_end
        also = f" ({format_count(sure)} even at the low end of its band)" if sure is not None and sure < fits else ""
        why = f"the longest context one request can have in this cache{also}"
        yield replace(ledger.settings, max_model_len=fits), "--max-model-len", str(fits), why
    if fits > shape.max_context:
        yield from _context_of_the_model(ledger, shape)


def _more_for_the_cache(ledger: Ledger, replan: Replan) -> Iterator[Candidate]:
    """The lowest utilisation, in hundredths, at which it starts."""
    settings = ledger.settings
    if settings.kv_cache_memory_bytes is not None:
        return
    step = math.floor(settings.utilization * 100) + 1
    while step <= HIGHEST_UTILIZATION * 100:
        change = replace(settings, utilization=step / 100)
        after, _ = replan(change)
        if after.fits and after.slack.value > 0:
            why = "a larger share of the card; it leaves less outside the request"
            yield change, "--gpu-memory-utilization", f"{step / 100:.2f}", why
            return
        step += 1


def _smaller_cache(ledger: Ledger) -> Iterator[Candidate]:
    if not ledger.settings.kv_cache_dtype.startswith(("fp8", "int", "nvfp4")):
        why = "half the bytes a token; check the answers"
        yield replace(ledger.settings, kv_cache_dtype="fp8"), "--kv-cache-dtype", "fp8", why


def _more_gpus(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    settings = ledger.settings
    for factor in (2, 4, 8):
        wanted = settings.tensor_parallel * factor
        if shape.attention_heads % wanted == 0:
            why = f"the weights are divided over {wanted} GPUs"
            yield replace(settings, tensor_parallel=wanted), "--tensor-parallel-size", str(wanted), why


def _smaller_batches(ledger: Ledger, replan: Replan) -> Iterator[Candidate]:
    settings = ledger.settings
    sequences = settings.max_num_seqs
    while sequences > 16:
        sequences //= 2
        change = replace(settings, max_num_seqs=sequences)
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
            yield replace(ledger.settings, utilization=share), "--gpu-memory-utilization", f"{share:.2f}", why
        why = "what is free, less the CUDA context and the room that a full batch needs beside the request"


def _a_cache_that_fits(ledger: Ledger) -> Iterator[Candidate]:
    unreserved = max(0, ledger.graphs_actual.value - ledger.graphs.value)
    size = ledger.kv.value + ledger.slack.low - unreserved - ROOM_FOR_THE_REST
    if size > 0 and ledger.settings.num_gpu_blocks_override is None:
        why = "what the card has beside everything else"
        yield replace(ledger.settings, kv_cache_memory_bytes=size), "--kv-cache-memory-bytes", str(size), why


def _more_slack(ledger: Ledger, shape: ModelShape) -> Iterator[Candidate]:
    unreserved = max(0, ledger.graphs_actual.value - ledger.graphs.value)
    needs = 4 * logits_bytes(ledger, shape) + ROOM_FOR_THE_REST + unreserved
    share = math.floor((ledger.free_bytes - needs) / ledger.card.total_bytes * 100) / 100
    if 0 < share < ledger.settings.utilization:
        why = "leaves the room beside the request that sampling and graphs need"
        yield replace(ledger.settings, utilization=share), "--gpu-memory-utilization", f"{share:.2f}", why


def _fewer_sequences(ledger: Ledger) -> Iterator[Candidate]:
    sequences = ledger.settings.max_num_seqs
    while sequences > 16:
        sequences //= 2
        why = "fewer rows of logits at once"
        yield replace(ledger.settings, max_num_seqs=sequences), "--max-num-seqs", str(sequences), why
        if sequences <= ledger.settings.max_num_seqs // 8:
            return


def _effect(after: Ledger, before: Ledger) -> str:
    tokens, shown = after.kv_plan.tokens, before.kv_plan.tokens
    if abs(tokens - shown) == 1:  # vLLM rounds down from a quotient of the context: of the same blocks one token can be lost
        tokens = shown
    sizes = f"{format_count(tokens)} tokens, {format_gib(after.slack.value)} outside the request"
    return f"KV {format_gib(after.kv.value)}, {sizes}"

"""Certifies that no request a command admits can exceed the card: compares the worst step with the memory left for it.

    room  = what no weight, cache, graph or context holds, at the low end of every band, with what vLLM's profile reserved
    alive = what stays allocated through a step's phases
    spare = room - pieces - alive: all that one phase of a step may take

A step runs its phases one after another: adapters, encoder, forward pass, sampler, prompt log-probabilities, drafter. What a
phase frees the next one may take again, so the phases are not added: each comes on top of what stays alive through all of
them. A kind of request is closed when the most of it that one step can hold fits into the spare memory. A bound may be too
high, never too low: every band is taken at its bad end and the bad ends are added. Allocations were counted in vLLM's source,
0.25.1 to 0.32.0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from plimsoll.findings import Finding
from plimsoll.hardware.cards import Vendor, gpu_named
from plimsoll.models.shape import ModelShape, Tower
from plimsoll.plan.findings import stops_the_start
from plimsoll.plan.ledger import (
    DEEPSTACK,
    PIECES_AT_MOST,
    V2_PENALTY_BYTES,
    Batch,
    Ledger,
    ModelFacts,
    batch_of,
    era_of,
    likely_capability,
    persistent,
)
from plimsoll.plan.settings import Flags, Settings, limit_of
from plimsoll.plan.weights_tables import STYLES, Style
from plimsoll.units import GIB, MIB, ceil_div, filled, round_up
from plimsoll.unknown import Unknown
from plimsoll.vllm.versions import Behaviour, Coverage, table

_TEXTS = table("certify", "plan")  # phases, where vLLM's source has them, and what was counted there


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The command's limits on requests, beside the ledger's settings."""

    max_logprobs: int = 20  # -1: the whole vocabulary
    max_pixels: int | None = None
    takes_video: bool = True
    expandable_segments: bool = False
    flashinfer: bool = False  # asked for; newer cards than Hopper use it anyway
    not_modelled: tuple[str, ...] = ()  # flags whose memory nobody counted
    runner_doubts: tuple[str, ...] = ()  # flags beside which vLLM may fall back to the first model runner
    runner_chosen: bool = False  # by VLLM_USE_V2_MODEL_RUNNER


def read_limits(flags: Flags, environment: Mapping[str, str]) -> RequestLimits:
    """Returns what --max-logprobs and its like allow, and the flags that change the step in ways nobody counted."""
    kwargs = flags.mapping("--mm-processor-kwargs")
    size = kwargs.get("size")
    pixels = kwargs.get("max_pixels", size.get("longest_edge") if isinstance(size, dict) else None)
    conf = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    words: Mapping[str, str] = _TEXTS["not_modelled"]
    unknown = [f"{name}: {what}" for name, what in words.items() if flags.text(name) not in (None, "0") or flags.switch(name)]
    if flags.word("--runner") in ("pooling", "draft") or flags.text("--task") not in (None, "auto", "generate"):
        unknown.append("a pooling model's step")
    if (dtype := flags.word("--kv-cache-dtype") or "auto") not in _TEXTS["counted_caches"]:
        unknown.append(f"--kv-cache-dtype {dtype}: what kernels unpack of such a cache")
    compilation = flags.mapping("--compilation-config")
    if compilation.get("cudagraph_mm_encoder"):
        unknown.append("the encoder's CUDA graphs")
    doubts = [name for name, harmless in _TEXTS["harmless"].items() if flags.text(name) not in (None, *harmless)]
    doubts += [name for name in _TEXTS["doubtful_switches"] if flags.switch(name)]
    doubts += ["--compilation-config"] if compilation.keys() & {"mode", "level", "pass_config"} else []
    doubts += ["--logprobs-mode"] if (flags.word("--logprobs-mode") or "").endswith("_logits") else []
    given = flags.integer("--max-logprobs")
    return RequestLimits(
        max_logprobs=20 if given is None else given,
        max_pixels=pixels if isinstance(pixels, int) and pixels > 0 else None,
        takes_video=limit_of(flags.mapping("--limit-mm-per-prompt"), "video") != 0,
        expandable_segments="expandable_segments:True" in conf,
        flashinfer="FLASHINFER" in (flags.word("--attention-backend") or "").upper(),
        not_modelled=tuple(unknown),
        runner_doubts=tuple(doubts),
        runner_chosen=environment.get("VLLM_USE_V2_MODEL_RUNNER") in ("0", "1"),
    )


PROMPT_CHUNK = 1024  # rows of logits at once in the second runner, v1/worker/gpu/sample/prompt_logprob.py
# A chosen log-probability: the top-k's value and index, its sort, the concatenation and the copy as 32-bit ids.
BYTES_PER_CHOICE = 72
# An entry of the vocabulary in one row, beside the 16-bit logits. First runner: raw log-probabilities, 32-bit logits,
# probabilities, 64-bit noise; with penalties instead of the last two: two 64-bit counts, their masks and product. Second
# runner: 32-bit logits, masked logits, probabilities, bit masks.
SAMPLER_FIRST, PENALTIES_FIRST, SAMPLER_SECOND = 20, 32, 14
# Fewer than eight rows are sorted by torch instead of a kernel (apply_top_k_top_p_pytorch): values, indices, their scratch.
SORTED_ROWS, SORTED_BYTES = 8, 60
# Ids of prompts and outputs, padded to the longest, and the ones that are scattered (apply_penalties): 64-bit each.
PENALTY_TOKEN_BYTES = 24
TOKEN_IDS = 128  # the most of `logprob_token_ids`, sampling_params.py MAX_LOGPROB_TOKEN_IDS
FLASHINFER_WORKSPACE = 2 * 394 * MIB  # its own and TensorRT-LLM's, made at the first batch: envs.py


class Phase(NamedTuple):
    """One moment of a step: what it takes on top of what stays alive, by units of what requests ask for."""

    kind: str
    unit: str
    fixed_bytes: int
    bytes_per_unit: int
    most_units: int
    scope: str  # "step": gone after it; "process": loaded once
    source: str
    why: str
    covered: bool = False  # vLLM's profile run held it, so it is in the budget already

    def bytes_of(self, units: int) -> int:
        return self.fixed_bytes + self.bytes_per_unit * min(units, self.most_units) if units > 0 else 0


class CertificateTerm(NamedTuple):
    """One line of the certificate's account: memory that is there, or that stays allocated through a step's phases."""

    name: str
    size: int
    source: str


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that the scheduler may build, for one rank."""

    settings: Settings
    shape: ModelShape
    limits: RequestLimits
    batch: Batch

    @property
    def rows(self) -> int:
        """Rows of logits: sequences, each with its drafted tokens."""
        return min(self.batch.tokens, self.settings.max_num_seqs * (1 + self.settings.speculative_tokens))

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary, padded as vLLM pads it."""
        return round_up(self.shape.vocab_size, 64 * self.settings.tensor_parallel)

    @property
    def choices(self) -> int:
        """Log-probabilities that one row may ask for."""
        most = self.limits.max_logprobs
        return self.vocabulary if most < 0 else min(most, self.vocabulary)

    @property
    def runner(self) -> str:
        """The path of this command's model runner in vLLM's source."""
        return "v1/worker/gpu/model_runner.py" if self.settings.v2_runner else "v1/worker/gpu_model_runner.py"

    def term(self, part: str, name: str, size: int) -> CertificateTerm:
        """A line of the account, with the place of its allocation in vLLM's source."""
        return CertificateTerm(name, size, filled(_TEXTS[part][name], {"runner": self.runner}))

    @property
    def encodes(self) -> bool:
        return bool(self.shape.towers) and not self.settings.language_model_only

    @property
    def profiles_encoder(self) -> bool:
        """True if vLLM's profile run held a full batch of the encoder, so that the budget has room for it."""
        runs = not self.settings.v2_runner or era_of(self.settings.release).does(Behaviour.CONSUMED_MEMORY)
        return runs and not self.settings.skips_mm_profiling and not self.settings.has_fixed_cache

    @property
    def item_tokens(self) -> int:
        """The most tokens that one picture or film can have: the processor's limit, else the whole prompt."""
        side: int | None = _TEXTS["pixels_per_token"].get(self.shape.model_type)
        most: int | None = _TEXTS["most_picture_tokens"].get(self.shape.model_type)
        if side is not None and self.limits.max_pixels is not None:
            most = ceil_div(self.limits.max_pixels, side * side)
        films = side is not None and self.limits.takes_video
        return self.batch.context if most is None or films else min(self.batch.context, most)

    @property
    def embedding_bytes(self) -> int:
        """An encoder's output for one token, in bytes."""
        return self.shape.hidden_size * DEEPSTACK.get(self.shape.model_type, 1) * self.batch.dtype_bytes

    @property
    def sampler_bytes(self) -> int:
        """The sampler's bytes for every row, with all that a request may ask of it but penalties and many log-probabilities."""
        per_entry = SAMPLER_SECOND if self.settings.v2_runner else SAMPLER_FIRST
        rows = max(self.rows * per_entry, min(self.rows, SORTED_ROWS) * SORTED_BYTES)
        return rows * self.vocabulary + self.rows * (ceil_div(self.vocabulary, 8) + TOKEN_IDS * BYTES_PER_CHOICE)

    @property
    def choice_row(self) -> int:
        """Bytes of the result for one token: an id and a figure for each choice, and the rank."""
        return 12 * (1 + self.choices) + 8

    @property
    def held_bytes(self) -> int:
        """Bytes that a token of a prompt read in several steps holds until the last one: a view keeps all rows of its step."""
        chunk = max(1, self.batch.tokens - self.rows)
        if threshold := self.settings.long_prefill_token_threshold:
            chunk = max(1, min(chunk, threshold))
        return math.ceil(2 * self.choice_row * self.batch.tokens / chunk)


def residents_of(step: LargestStep, held_tokens: int) -> list[CertificateTerm]:
    """Returns the memory alive in every phase; `held_tokens` prompt tokens keep log-probabilities until their prompt's end."""
    settings, batch, vocabulary = step.settings, step.batch, step.vocabulary
    kernel_rows = min(step.rows, batch.multiprocessors)
    workspace = persistent(step.shape, batch, era_of(settings.release))
    layers = 4 if settings.speculative else 1  # a drafter may read those of three more layers
    hidden = (layers * batch.tokens + 2 * step.rows) * step.shape.hidden_size * batch.dtype_bytes
    residents = {
        "hidden states": hidden,
        "logits that are sampled": step.rows * vocabulary * batch.dtype_bytes,
        "buffer of the top-k kernel": kernel_rows * vocabulary * 4,
        "matrix workspaces": workspace,
    }
    if step.limits.flashinfer or likely_capability(settings) >= (10, 0):
        residents["attention workspaces"] = FLASHINFER_WORKSPACE
    if step.encodes:
        residents["encoder cache"] = max(batch.tokens, step.item_tokens) * step.embedding_bytes
    if settings.v2_runner:
        residents["log-probabilities of half-read prompts"] = held_tokens * step.held_bytes
    drafting = settings.speculative or {}
    if settings.speculative_tokens and drafting and drafting.get("method") not in _TEXTS["without_drafter"]:
        residents["drafted logits"] = settings.max_num_seqs * settings.speculative_tokens * vocabulary * 4
    return [step.term("residents", name, size) for name, size in residents.items()]


def _phase(
    step: LargestStep, kind: str, most: int, per: int, fixed: int = 0, *, why: str = "why", covered: bool = False, **values: Any
) -> Phase:
    """The phase of that name in the runner of this step; `why` names the reason to print."""
    row = _TEXTS["phases"][kind]
    source = row.get("second", row["first"]) if step.settings.v2_runner else row["first"]
    reason = filled(row[why], values)
    return Phase(kind, row["unit"], fixed, per, most, row.get("scope", "step"), source, reason, covered)


def phases_of(step: LargestStep) -> list[Phase]:
    """The phases that requests can widen."""
    settings, shape, batch = step.settings, step.shape, step.batch
    drafted, sequences = 1 + settings.speculative_tokens, settings.max_num_seqs
    phases = [
        _phase(step, "sampling", sequences, ceil_div(step.sampler_bytes, max(1, step.rows)) * drafted),
        _phase(step, "logprobs", step.choices, step.rows * BYTES_PER_CHOICE, step.sampler_bytes),
        _prompt_logprobs(step),
    ]
    if not settings.v2_runner:
        per = (PENALTIES_FIRST * step.vocabulary + PENALTY_TOKEN_BYTES * batch.context) * drafted
        phases.append(_phase(step, "penalties", sequences, per))
    if step.encodes:
        covered = step.profiles_encoder
        per = step.embedding_bytes + max(_tower_bytes(tower, shape, batch.dtype_bytes) for tower in shape.towers)
        tokens, why = max(batch.tokens, step.item_tokens), "why covered" if covered else "why"
        phases.append(_phase(step, "pictures", tokens, per, why=why, covered=covered))
    if settings.max_loras:
        widest = max(shape.vocab_size, shape.hidden_size, shape.intermediate_size or 0, shape.attention_heads * shape.head_dim)
        phases.append(_phase(step, "adapter", 1, widest * settings.max_lora_rank * batch.dtype_bytes))
    return phases


def _prompt_logprobs(step: LargestStep) -> Phase:
    batch, chosen = step.batch, BYTES_PER_CHOICE * (1 + step.choices)
    if not step.settings.v2_runner:
        copies = batch.dtype_bytes + 4 + (4 if batch.dtype_bytes < 4 else 0)  # logits, their 32-bit copy, log_softmax
        copies += 0 if step.limits.expandable_segments else 2  # logits in an older prompt's larger piece leave it half used
        per = copies * step.vocabulary + chosen
        return _phase(step, "prompt_logprobs", batch.tokens, per, why="why first", copies=copies)
    first = min(batch.tokens, PROMPT_CHUNK)
    last = min(batch.tokens, 2 * PROMPT_CHUNK) - first  # a chunk's logits live until the next one's are there
    capped = step.shape.model_type.startswith(tuple(_TEXTS["caps_logits"]))
    copies = 3 if step.settings.tensor_parallel > 1 else 2 if capped else 1
    # One chunk more: an older one's piece that is in use, or a copy without the vocabulary's padding.
    fixed = (first * copies + last + first) * batch.dtype_bytes * step.vocabulary + first * chosen
    fixed += 2 * batch.tokens * step.choice_row
    return _phase(step, "prompt_logprobs", batch.context, step.held_bytes, fixed, chunk=PROMPT_CHUNK)


def _tower_bytes(tower: Tower, shape: ModelShape, wide: int) -> int:
    # One token's patches: pixels as they come and as they are used, attention, feed-forward with its gate.
    style = STYLES.get(shape.model_type, Style())
    width = style.width or tower.hidden_size or shape.hidden_size
    inner = tower.intermediate_size if tower.intermediate_size and style.width is None else 4 * width
    pixels = 3 * style.frames * (tower.patch_size or 14) ** 2
    side = max(style.merge, 4 if shape.model_type == "gemma3" else 2)
    return side**2 * ((4 * inner + 8 * width) * wide + pixels * (4 + wide))


def unknown_terms(step: LargestStep, model: ModelFacts) -> list[str]:
    """Terms that cannot be counted, each with its reason; one is enough to certify nothing."""
    settings, shape = step.settings, step.shape
    read, reasons = Coverage.STEP_MEMORY, []
    if not read.has(settings.release):
        span = f"its source was read from {read.first} to {read.last}"
        reasons.append(f"what vLLM {settings.release} allocates in a step: {span}")
    reasons += [f"{what} (its memory was never counted)" for what in step.limits.not_modelled]
    drafting = settings.speculative or {}
    method = drafting.get("method")
    doubts = list(step.limits.runner_doubts) if settings.v2_runner else []
    drafts_on_second = method in _TEXTS["drafts_on_second"] and not drafting.get("parallel_drafting")
    if drafting and settings.v2_runner and not (drafts_on_second and settings.pipeline_parallel == 1):
        doubts.append("--speculative-config")
    is_early = any(name.startswith(tuple(_TEXTS["early_on_second"])) for name in shape.architectures)
    if is_early and not Behaviour.V2_RUNNER_ALL.is_in(settings.release):
        doubts.append(shape.architectures[0])
    if doubts and not step.limits.runner_chosen:
        reasons.append(f"which model runner vLLM takes beside {', '.join(doubts)} (VLLM_USE_V2_MODEL_RUNNER says)")
    if settings.kv_connector is not None:
        reasons.append(f"the buffers of the KV connector {settings.kv_connector}")
    if settings.expert_parallel and settings.data_parallel > 1:
        reasons.append("the exchange buffers of data-parallel experts")
    if shape.is_encoder_decoder:
        reasons.append("an encoder-decoder model's step")
    if step.encodes and not step.profiles_encoder and shape.model_type not in STYLES:
        reasons.append(f"the encoder of {shape.model_type or 'this model'}: its code was not read")
    if step.encodes and len({tower.what for tower in shape.towers}) > 1:
        reasons.append("an encoder other than the one that vLLM profiles (it profiles the kind with the longest items alone)")
    if drafting and model.drafter is None and not settings.drafts_with_own_head and method not in _TEXTS["without_drafter"]:
        reasons.append(f"the drafter {drafting.get('model', method)}: its shape could not be read")
    return reasons


LATE = GIB // 2  # kernels that load late, cuBLAS's other workspaces: 0.44 GiB came after the start on an H200
LATE_TOGETHER = GIB  # and channels of NCCL that open at the first large collective; not measured
LEAST_TOKENS = 256
PIXELS_TRIED = (4_194_304, 2_097_152, 1_048_576, 524_288)
SHARE_STEP = 0.005
Replan = Callable[[Settings], Ledger]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, what it costs, and the smallest one that exceeds the spare memory."""

    phase: Phase
    spare: int  # for this kind
    smallest: int | None  # units; None: none can
    closes: str = ""

    @property
    def is_open(self) -> bool:
        return self.smallest is not None


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of a command, or the terms and kinds of request that prevent one."""

    ledger: Ledger
    step: LargestStep
    room: int
    pieces: int
    residents: tuple[CertificateTerm, ...]
    terms: tuple[CertificateTerm, ...]
    kinds: tuple[Kind, ...]
    unknown: tuple[Unknown, ...]
    closes_all: str = ""
    starts: bool = True  # False where plan finds that vLLM will refuse the command

    @property
    def alive(self) -> int:
        return sum(resident.size for resident in self.residents)

    @property
    def spare(self) -> int:
        """Bytes that one phase of a step may take."""
        return self.room - self.pieces - self.alive

    @property
    def open_kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in self.kinds if kind.is_open)

    @property
    def certified(self) -> bool:
        """True if no admitted request can exceed the card; False while a term is unknown."""
        return self.starts and self.ledger.fits and not self.unknown and not self.open_kinds

    @property
    def free_at_start(self) -> int:
        """The least that vLLM's snapshot finds free: the card's low end, less neighbours, less the largest context."""
        return self.ledger.card.low_bytes - self.ledger.card.used_bytes - self.ledger.context.high


@dataclass(frozen=True, slots=True)
class Question:
    """A command to certify, with all that is needed to certify it again with other settings."""

    model: ModelFacts
    settings: Settings
    limits: RequestLimits
    replan: Replan


def certificate_of(
    model: ModelFacts, settings: Settings, flags: Flags, environment: Mapping[str, str],
    replan: Callable[[Settings], tuple[Ledger, list[Finding]]],
) -> Certificate:  # fmt: skip
    """The certificate of a command, each open kind with the flag that closes it, tried by certifying again.

    There is none where a finding stops the start, or for cards on which nothing was counted: other makers' kernels, and memory
    that the host hands out as well.
    """
    ledger, findings = replan(settings)
    limits, card = read_limits(flags, environment), ledger.card
    if card.is_named:
        gpu = gpu_named(card.name)
        if gpu.vendor is not Vendor.NVIDIA:
            limits = replace(limits, not_modelled=(f"the step on {card.name}, which runs other kernels", *limits.not_modelled))
        elif gpu.unified_memory:
            limits = replace(limits, not_modelled=(f"what the host takes of {card.name}'s memory", *limits.not_modelled))
    question = Question(model, settings, limits, lambda changed: replan(changed)[0])
    certificate = assess(question)
    kinds = tuple(
        replace(kind, closes=_closes(kind.phase.kind, question)) if kind.is_open else kind for kind in certificate.kinds
    )
    closes_all = _smaller_request(question, None) if certificate.open_kinds else ""
    return replace(certificate, kinds=kinds, closes_all=closes_all, starts=not any(map(stops_the_start, findings)))


def assess(question: Question) -> Certificate:
    """The certificate without the flags that close the open kinds."""
    model, settings = question.model, question.settings
    ledger = question.replan(settings)
    step = LargestStep(settings, model.shape, question.limits, batch_of(settings))
    terms = [step.term("room", name, size) for name, size in _room(ledger, step)]
    room = sum(term.size for term in terms)
    pieces = int(PIECES_AT_MOST * ledger.activation.value)
    residents, kinds = _with_held(step, room - pieces)
    spare = room - pieces - sum(resident.size for resident in residents)
    kinds = [_batch_kind(step, ledger, room, question.replan), *kinds]
    if settings.speculative and (model.drafter is not None or settings.drafts_with_own_head):
        # The drafter's own forward pass, after the sampler.
        whole, tokens = ledger.activation.high, step.batch.tokens
        if model.drafter is not None and model.drafter.shape.hidden_size > model.shape.hidden_size:
            whole *= -(-model.drafter.shape.hidden_size // model.shape.hidden_size)
        phase = _phase(step, "drafter", tokens, -(-whole // tokens))
        kinds.append(Kind(phase, spare, _smallest(phase, spare)))
    terms.append(step.term("room", "pieces of torch's pool", -pieces))
    unknown = tuple(map(Unknown, unknown_terms(step, model)))
    return Certificate(ledger, step, room, pieces, tuple(residents), tuple(terms), tuple(kinds), unknown)


def _room(ledger: Ledger, step: LargestStep) -> Iterator[tuple[str, int]]:
    """Yields the terms whose sum is left for a step's transient memory; every band at its bad end."""
    card, settings = ledger.card, ledger.settings
    yield "card, low end", card.low_bytes
    yield "neighbours", -card.used_bytes
    yield "context before vLLM's snapshot", -ledger.context.high
    if settings.has_fixed_cache:
        yield "weights", -ledger.weights.high
        yield "outside torch", -ledger.non_torch.high
        yield "KV cache", -ledger.kv.value
        yield "CUDA graphs", -ledger.graphs_actual.high
    else:
        yield "requested", -(int(card.low_bytes * settings.utilization) + 1)
        yield "CUDA graphs beyond vLLM's estimate", -max(0, ledger.graphs_actual.high - ledger.graphs.low)
        yield "peak of the profile run, inside the request", ledger.activation.low
    if settings.v2_runner and not era_of(settings.release).does(Behaviour.CONSUMED_MEMORY):  # in no term of vLLM's until 0.27
        yield "penalty counters", -int(V2_PENALTY_BYTES * settings.max_num_seqs * step.shape.vocab_size)
    yield "kernels that load late", -_late(settings)


def _late(settings: Settings) -> int:
    return LATE if settings.tensor_parallel * settings.pipeline_parallel == 1 else LATE_TOGETHER


def _smallest(phase: Phase, spare: int) -> int | None:
    """The least units whose cost exceeds the spare memory, or None."""
    if phase.bytes_of(phase.most_units) <= spare:
        return None
    if phase.bytes_per_unit <= 0 or phase.bytes_of(1) > spare:
        return 1
    return (spare - phase.fixed_bytes) // phase.bytes_per_unit + 1


def _with_held(step: LargestStep, left: int) -> tuple[list[CertificateTerm], list[Kind]]:
    """Returns the memory that stays alive, and the kinds beside it.

    Where prompt log-probabilities can exceed the card, only their own kind reports it: the other kinds are judged beside the
    log-probabilities that prompts below the smallest such request hold.
    """
    # Two prompts of full length wait at once, or those of all rows where long prompts take turns.
    held = step.batch.context * (step.settings.max_num_seqs if step.settings.long_prefill_token_threshold else 2)
    residents = residents_of(step, held)
    kinds = _kinds_of(phases_of(step), left - sum(resident.size for resident in residents))
    asks = next(kind for kind in kinds if kind.phase.kind == "prompt_logprobs")
    if asks.smallest is None:
        return residents, kinds
    residents = residents_of(step, min(held, 2 * (asks.smallest - 1)))
    fewer = _kinds_of(phases_of(step), left - sum(resident.size for resident in residents))
    return residents, [asks if kind.phase.kind == "prompt_logprobs" else kind for kind in fewer]


def _kinds_of(phases: list[Phase], spare: int) -> list[Kind]:
    """Each phase with the smallest request that exceeds the spare memory; where sampling alone does, logprobs add no news."""
    kinds = [Kind(phase, spare, None if phase.covered else _smallest(phase, spare)) for phase in phases]
    samples = any(kind.is_open and kind.phase.kind == "sampling" for kind in kinds)
    return [replace(kind, smallest=None) if samples and kind.phase.kind == "logprobs" else kind for kind in kinds]


def _batch_kind(step: LargestStep, ledger: Ledger, room: int, replan: Replan) -> Kind:
    """A plain step full of prompt tokens: the forward pass that vLLM profiles, in torch's pieces."""
    settings, tokens = step.settings, step.batch.tokens
    fixed = settings.has_fixed_cache
    # The adapters' shrink kernels (lora/punica_wrapper): three 32-bit slices of the rank.
    adapters = 3 * 4 * tokens * settings.max_lora_rank if settings.max_loras and fixed else 0

    def needs(count: int, plan: Ledger) -> int:
        peak = plan.activation.high if fixed else plan.activation.low
        return peak + adapters * count // tokens + int(PIECES_AT_MOST * plan.activation.value)

    whole = needs(tokens, ledger)
    phase = _phase(step, "batch", tokens, -(-whole // tokens))
    if whole <= room:
        return Kind(phase, room, None)

    def fits(count: int) -> bool:
        changed = replace(settings, max_num_batched_tokens=count, max_num_seqs=min(settings.max_num_seqs, count))
        return needs(count, replan(changed)) <= room

    return Kind(phase, room, 1 + _largest(0, tokens, fits))


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits; `low` is assumed to fit and `high` is known not to."""
    return low + bisect_left(range(low + 1, high), 1, key=lambda number: not fits(number))


def _closes(kind: str, question: Question) -> str:
    """The first flag or limit that closes a kind, tried by certifying again; "" where none does."""
    settings = question.settings
    field, least = "", 1
    if kind in ("sampling", "penalties"):
        field = "max_num_seqs"
    elif kind in ("batch", "drafter") or (kind == "prompt_logprobs" and not settings.v2_runner):
        field, least = "max_num_batched_tokens", max(LEAST_TOKENS, settings.max_num_seqs)
    elif kind == "adapter":
        field = "max_lora_rank"

    def closed(value: int) -> bool:
        changed: dict[str, Any] = {field: value}
        return _is_closed(kind, assess(replace(question, settings=replace(settings, **changed))))

    flag = ""
    if field:
        now = getattr(settings, field)
        if least < now and closed(least):
            flag = f"--{field.replace('_', '-')} {_largest(least, now, closed)}"
    elif kind in ("logprobs", "prompt_logprobs"):
        # --max-logprobs bounds their number; it refuses neither `logprobs: 0` nor `prompt_logprobs: 0`.
        most = question.limits.max_logprobs
        fewer = [replace(question.limits, max_logprobs=count) for count in (20, 5, 0) if most < 0 or count < most]
        tried = (limits for limits in fewer if _is_closed(kind, assess(replace(question, limits=limits))))
        flag = next((f"--max-logprobs {limits.max_logprobs}" for limits in tried), "")
    else:
        # A profile run with the encoder, else a limit on a picture's pixels.
        profiled = replace(question, settings=replace(settings, skips_mm_profiling=False))
        if profiled != question and _is_closed(kind, assess(profiled)):
            return "leave out --skip-mm-profiling"
        now = question.limits.max_pixels
        for pixels in (pixels for pixels in PIXELS_TRIED if now is None or pixels < now):
            limits = replace(question.limits, max_pixels=pixels, takes_video=False)
            if _is_closed(kind, assess(replace(question, limits=limits))):
                video = " --limit-mm-per-prompt '{\"video\": 0}'" if question.limits.takes_video else ""
                return f"--mm-processor-kwargs '{{\"max_pixels\": {pixels}}}'{video}"
    return flag or _smaller_request(question, kind)


def _is_closed(kind: str | None, certificate: Certificate) -> bool:
    """True if the kind (None: every kind) cannot exceed the card any more, with a cache that still serves."""
    return certificate.ledger.fits and not any(kind in (None, left.phase.kind) for left in certificate.open_kinds)


def _smaller_request(question: Question, kind: str | None) -> str:
    """A lower --gpu-memory-utilization, or a smaller cache of a given size, that closes the kind, or all; it must still fit."""
    settings = question.settings
    if settings.num_gpu_blocks_override is not None:
        return ""
    if settings.kv_cache_memory_bytes is not None:
        unit = settings.kv_cache_memory_bytes // 100
        sizes = [unit * share for share in range(99, 0, -1)]
        changed = [replace(settings, kv_cache_memory_bytes=size) for size in sizes]
        flags = [f"--kv-cache-memory-bytes {size}" for size in sizes]
    else:
        most = math.ceil(settings.utilization / SHARE_STEP - 1e-9) - 1
        shares = [round(share * SHARE_STEP, 3) for share in range(most, 0, -1)]
        changed = [replace(settings, utilization=share) for share in shares]
        flags = [f"--gpu-memory-utilization {share:g}" for share in shares]

    def closes(smaller: Settings) -> bool:
        left = assess(replace(question, settings=smaller)).open_kinds
        return not any(kind in (None, other.phase.kind) for other in left)

    # The first that closes it, whether or not it still fits: the smaller the cache, the more is left.
    at = bisect_left(changed, 1, key=closes)
    return flags[at] if at < len(changed) and _is_closed(kind, assess(replace(question, settings=changed[at]))) else ""


def smallest_request(kind: Kind) -> str:
    """The smallest request that exceeds the spare memory, in words."""
    return filled(
        _TEXTS["phases"][kind.phase.kind]["one" if kind.smallest == 1 else "many"], {"count": f"{kind.smallest or 0:,}"}
    )


def assumptions_of(certificate: Certificate) -> list[str]:
    """Returns the assumptions under which the certificate holds."""
    settings = certificate.ledger.settings
    values = {
        "free": certificate.free_at_start, "neighbours": certificate.ledger.card.used_bytes, "pieces": certificate.pieces,
        "late": _late(settings), "tokens": settings.max_num_batched_tokens, "sequences": settings.max_num_seqs,
    }  # fmt: skip
    assumptions = [filled(text, values) for text in _TEXTS["assumptions"]]
    if any(kind.phase.kind == "pictures" for kind in certificate.kinds):
        assumptions.append("the processor scales pictures as its makers' own configuration says")
    return assumptions

"""Whether any request that a command admits can exceed the card: the worst step against what is left for it.

    room  = what no weight, cache, graph or context holds, at the low end of every band, with what vLLM's profile reserved
    alive = what stays allocated through a step's phases
    spare = room - pieces - alive: all that one phase of a step may take

A kind of request is closed when the most of it that one step can hold fits into the spare memory. A bound may be too high,
never too low: every band is taken at its bad end and the bad ends are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from plimsoll.plan.certify_terms import (
    Phase,
    RequestLimits,
    Resident,
    Step,
    adapter_activation,
    free_at_start,
    held_tokens_of,
    phases_of,
    reserved_of,
    residents_of,
    runner_file,
    step_of,
    unknown_terms,
    unseen_of,
)
from plimsoll.plan.ledger import PIECES_AT_MOST, Ledger, ModelFacts
from plimsoll.plan.settings import Settings
from plimsoll.units import GIB, format_count, format_gib
from plimsoll.unknown import Unknown
from plimsoll.vllm.versions import Coverage

LATE = GIB // 2  # kernels that load late, cuBLAS's other workspaces: 0.44 GiB came after the start on an H200
LATE_TOGETHER = GIB  # and channels of NCCL that open at the first large collective; not measured
LEAST_TOKENS = 256
PIXELS_TRIED = (4_194_304, 2_097_152, 1_048_576, 524_288)
SHARE_STEP = 0.005
Replan = Callable[[Settings], Ledger]


class Term(NamedTuple):
    """One line of the certificate's account."""

    name: str
    size: int
    source: str


class Kind(NamedTuple):
    """A kind of request, what it costs, and the smallest one that exceeds the spare memory."""

    phase: Phase
    spare: int  # for this kind
    smallest: int | None  # units; None: none can
    closes: str = ""

    @property
    def is_open(self) -> bool:
        """Whether a request of this kind can exceed the card."""
        return self.smallest is not None


class Certificate(NamedTuple):
    """What is certified, or what stands in the way."""

    ledger: Ledger
    step: Step
    room: int
    pieces: int
    residents: tuple[Resident, ...]
    terms: tuple[Term, ...]
    kinds: tuple[Kind, ...]
    unknown: tuple[Unknown, ...]
    closes_all: str = ""
    starts: bool = True  # False where plan finds that vLLM will refuse the command

    @property
    def alive(self) -> int:
        """Bytes that stay allocated through a step."""
        return sum(resident.size for resident in self.residents)

    @property
    def spare(self) -> int:
        """Bytes that one phase of a step may take."""
        return self.room - self.pieces - self.alive

    @property
    def open_kinds(self) -> tuple[Kind, ...]:
        """Kinds of request that can exceed the card."""
        return tuple(kind for kind in self.kinds if kind.is_open)

    @property
    def certified(self) -> bool:
        """Whether no admitted request can exceed the card; never so while a term is unknown."""
        return self.starts and self.ledger.fits and not self.unknown and not self.open_kinds

    @property
    def free_at_start(self) -> int:
        """What has to be free when vLLM starts for this to hold."""
        return free_at_start(self.ledger, self.ledger.card)


class Question(NamedTuple):
    """What is asked: a command, with all that is needed to ask again with other settings."""

    model: ModelFacts
    settings: Settings
    limits: RequestLimits
    replan: Replan


def certify(asked: Question) -> Certificate:
    """The certificate of one command, each open kind with the flag that closes it, tried by certifying again."""
    certificate = assess(asked)
    kinds = tuple(kind._replace(closes=_closes(kind.phase.kind, asked)) if kind.is_open else kind for kind in certificate.kinds)
    closes_all = _smaller_request(asked, None) if certificate.open_kinds else ""
    return certificate._replace(kinds=kinds, closes_all=closes_all)


def assess(asked: Question) -> Certificate:
    """The same without looking for what closes a kind."""
    model, settings = asked.model, asked.settings
    ledger = asked.replan(settings)
    step = step_of(ledger, model, asked.limits)
    terms, room = _room(ledger, unseen_of(settings, model.shape), reserved_of(ledger, model.shape))
    pieces = int(PIECES_AT_MOST * ledger.activation.value)
    residents, kinds = _with_held(step, room - pieces)
    spare = room - pieces - sum(resident.size for resident in residents)
    kinds = [_batch_kind(step, ledger, room, asked.replan), *kinds, *_drafter_kinds(step, model, ledger, spare)]
    unknown = tuple(Unknown(reason) for reason in (*_release(settings), *unknown_terms(step, model)))
    terms = (*terms, Term("pieces of torch's pool", -pieces, "docs/overhead.md, measured: at most 0.7 of the activation"))
    return Certificate(ledger, step, room, pieces, tuple(residents), terms, tuple(kinds), unknown)


def _release(settings: Settings) -> list[str]:
    read = Coverage.STEP_MEMORY
    if read.has(settings.release):
        return []
    return [f"what vLLM {settings.release} allocates in a step: its source was read from {read.first} to {read.last}"]


def _room(ledger: Ledger, unseen: int, reserved: int) -> tuple[tuple[Term, ...], int]:
    """What is left for a step's transient memory, and how it was reckoned; every band at its bad end."""
    card, settings = ledger.card, ledger.settings
    worker = "v1/worker/gpu_worker.py"
    terms = [
        Term("card, low end", card.low_bytes, "cudaMemGetInfo, docs/gpus.md"),
        Term("neighbours", -card.used_bytes, "--used-gib"),
        Term("context before vLLM's snapshot", -ledger.context.high, f"{worker} init_device"),
    ]
    if settings.has_fixed_cache:
        terms += [
            Term("weights", -ledger.weights.high, f"{worker} load_model"),
            Term("outside torch", -ledger.non_torch.high, f"{worker} determine_available_memory"),
            Term("KV cache", -ledger.kv.value, f"{worker} initialize_from_config"),
            Term("CUDA graphs", -ledger.graphs_actual.high, f"{runner_file(settings)} capture_model"),
        ]
    else:
        requested = int(card.low_bytes * settings.utilization) + 1
        missed = max(0, ledger.graphs_actual.high - ledger.graphs.low)
        terms += [
            Term("requested", -requested, "v1/worker/utils.py request_memory"),
            Term("CUDA graphs beyond vLLM's estimate", -missed, f"{runner_file(settings)} profile_cudagraph_memory"),
            Term("peak of the profile run, inside the request", reserved, f"{runner_file(settings)} profile_run"),
        ]
    if unseen:
        terms.append(Term("penalty counters", -unseen, "v1/worker/gpu/sample/penalties.py PenaltiesState"))
    terms.append(Term("kernels that load late", -_late(settings), "measured after the start on an H200: 0.44 GiB"))
    return tuple(terms), sum(term.size for term in terms)


def _late(settings: Settings) -> int:
    return LATE if settings.tensor_parallel * settings.pipeline_parallel == 1 else LATE_TOGETHER


def _smallest(phase: Phase, spare: int) -> int | None:
    """The least units whose cost exceeds the spare memory, or None."""
    if phase.bytes_of(phase.most_units) <= spare:
        return None
    if phase.bytes_per_unit <= 0 or phase.bytes_of(1) > spare:
        return 1
    return (spare - phase.fixed_bytes) // phase.bytes_per_unit + 1


def _with_held(step: Step, left: int) -> tuple[list[Resident], list[Kind]]:
    """What stays alive, and the kinds beside it.

    Where prompt log-probabilities can exceed the card they are that kind's to answer for: of the others' memory they take what
    the prompts below the smallest hold.
    """
    held = held_tokens_of(step)
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
    return [kind._replace(smallest=None) if samples and kind.phase.kind == "logprobs" else kind for kind in kinds]


def _batch_kind(step: Step, ledger: Ledger, room: int, replan: Replan) -> Kind:
    """A plain step full of prompt tokens: the forward pass that vLLM profiles, in torch's pieces."""
    settings, tokens = step.settings, step.batch.tokens
    fixed = settings.has_fixed_cache

    def needs(count: int, plan: Ledger) -> int:
        peak = plan.activation.high if fixed else reserved_of(plan, step.shape)
        return peak + adapter_activation(step) * count // tokens * fixed + int(PIECES_AT_MOST * plan.activation.value)

    whole = needs(tokens, ledger)
    phase = Phase(
        "batch", "tokens in a step", 0, -(-whole // tokens), tokens, "step", f"{runner_file(settings)} profile_run",
        "the forward pass of a full batch and the pieces it leaves",
    )  # fmt: skip
    if whole <= room:
        return Kind(phase, room, None)
    low, high = 0, tokens  # the first fits, or nothing does; the second does not
    while high - low > 1:
        middle = (low + high) // 2
        changed = settings._replace(max_num_batched_tokens=middle, max_num_seqs=min(settings.max_num_seqs, middle))
        low, high = (middle, high) if needs(middle, replan(changed)) <= room else (low, middle)
    return Kind(phase, room, high)


def _drafter_kinds(step: Step, model: ModelFacts, ledger: Ledger, spare: int) -> list[Kind]:
    """The drafter's own forward pass, after the sampler."""
    settings = step.settings
    if not settings.speculative or (model.drafter is None and not settings.drafts_with_own_head):
        return []
    whole = ledger.activation.high
    if model.drafter is not None and model.drafter.shape.hidden_size > model.shape.hidden_size:
        whole = whole * -(-model.drafter.shape.hidden_size // model.shape.hidden_size)
    phase = Phase(
        "drafter", "tokens in a step", 0, -(-whole // step.batch.tokens), step.batch.tokens, "step",
        "v1/worker/gpu/spec_decode propose; v1/spec_decode propose", "at most as wide as the model's own pass",
    )  # fmt: skip
    return [Kind(phase, spare, _smallest(phase, spare))]


def _closes(kind: str, asked: Question) -> str:
    """The first flag or limit that closes a kind, found by certifying again; "" where none does."""
    settings = asked.settings
    if kind in ("sampling", "penalties"):
        found = _fewer(kind, asked, "--max-num-seqs", 1, settings.max_num_seqs, lambda n: settings._replace(max_num_seqs=n))
    elif kind in ("batch", "drafter") or (kind == "prompt_logprobs" and not settings.v2_runner):
        found = _fewer(
            kind,
            asked,
            "--max-num-batched-tokens",
            max(LEAST_TOKENS, settings.max_num_seqs),
            settings.max_num_batched_tokens,
            lambda n: settings._replace(max_num_batched_tokens=n),
        )
    elif kind in ("logprobs", "prompt_logprobs"):
        found = _fewer_choices(kind, asked)
    elif kind == "adapter":
        found = _fewer(kind, asked, "--max-lora-rank", 1, settings.max_lora_rank, lambda n: settings._replace(max_lora_rank=n))
    else:
        found = _smaller_pictures(kind, asked)
    return found or _smaller_request(asked, kind)


def _is_closed(kind: str | None, certificate: Certificate) -> bool:
    """Whether a kind (None: every kind) cannot exceed the card any more, with a cache that still serves."""
    is_open = any(kind in (None, found.phase.kind) for found in certificate.open_kinds)
    return certificate.ledger.fits and not is_open


def _fewer(kind: str, asked: Question, flag: str, least: int, now: int, change: Callable[[int], Settings]) -> str:
    """The largest value of a flag below what it is now that closes the kind."""

    def closed(value: int) -> bool:
        return _is_closed(kind, assess(asked._replace(settings=change(value))))

    if least >= now or not closed(least):
        return ""
    low, high = least, now
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if closed(middle) else (low, middle)
    return f"{flag} {low}"


def _fewer_choices(kind: str, asked: Question) -> str:
    """A smaller --max-logprobs; it bounds how many, and refuses neither `logprobs: 0` nor `prompt_logprobs: 0`."""
    for count in (20, 5, 0):
        is_fewer = asked.limits.max_logprobs < 0 or count < asked.limits.max_logprobs
        limits = asked.limits._replace(max_logprobs=count)
        if is_fewer and _is_closed(kind, assess(asked._replace(limits=limits))):
            return f"--max-logprobs {count}"
    return ""


def _smaller_pictures(kind: str, asked: Question) -> str:
    """A profile run with the encoder, else a limit on a picture's pixels."""
    profiled = asked._replace(settings=asked.settings._replace(skips_mm_profiling=False))
    if profiled != asked and _is_closed(kind, assess(profiled)):
        return "leave out --skip-mm-profiling"
    for pixels in PIXELS_TRIED:
        limits = asked.limits._replace(max_pixels=pixels, takes_video=False)
        is_fewer = asked.limits.max_pixels is None or pixels < asked.limits.max_pixels
        if is_fewer and _is_closed(kind, assess(asked._replace(limits=limits))):
            video = " --limit-mm-per-prompt '{\"video\": 0}'" if asked.limits.takes_video else ""
            return f"--mm-processor-kwargs '{{\"max_pixels\": {pixels}}}'{video}"
    return ""


def _smaller_request(asked: Question, kind: str | None) -> str:
    """A lower --gpu-memory-utilization, or a smaller cache of a given size, that closes the kind, or all; it must still fit."""
    settings = asked.settings
    if settings.num_gpu_blocks_override is not None:
        return ""
    if settings.kv_cache_memory_bytes is not None:
        unit = settings.kv_cache_memory_bytes // 100
        sizes = [unit * share for share in range(99, 0, -1)]
        changed = [settings._replace(kv_cache_memory_bytes=size) for size in sizes]
        flags = [f"--kv-cache-memory-bytes {size}" for size in sizes]
    else:
        most = math.ceil(settings.utilization / SHARE_STEP - 1e-9) - 1
        shares = [round(share * SHARE_STEP, 3) for share in range(most, 0, -1)]
        changed = [settings._replace(utilization=share) for share in shares]
        flags = [f"--gpu-memory-utilization {share:g}" for share in shares]
    low, high = 0, len(changed)
    while low < high:  # the first that closes it, whether or not it still fits: the smaller the cache, the more is left
        middle = (low + high) // 2
        found = assess(asked._replace(settings=changed[middle]))
        is_open = any(kind in (None, one.phase.kind) for one in found.open_kinds)
        low, high = (middle + 1, high) if is_open else (low, middle)
    return flags[low] if low < len(changed) and _is_closed(kind, assess(asked._replace(settings=changed[low]))) else ""


def smallest_request(kind: Kind) -> str:
    """The smallest request that does it, in words."""
    phase, count = kind.phase, format_count(kind.smallest or 0)
    if kind.smallest == 1:
        return {
            "batch": "any prompt",
            "sampling": "one sequence that samples",
            "penalties": "one request with a penalty",
            "prompt_logprobs": "any prompt with prompt_logprobs, in a step that others fill",
            "pictures": "any picture",
            "adapter": "one adapter of the largest rank",
        }.get(phase.kind, f"one request with {phase.kind}")
    return {
        "batch": f"prompts that put {count} tokens into one step",
        "sampling": f"{count} sequences that sample at once",
        "penalties": f"one request with a penalty among {count} sequences of full length",
        "logprobs": f"one request with logprobs {count}",
        "prompt_logprobs": f"a prompt of {count} tokens with prompt_logprobs",
        "pictures": f"pictures of {count} encoder tokens",
    }.get(phase.kind, f"{phase.kind}: {count} {phase.unit}")


def assumptions_of(certificate: Certificate) -> list[str]:
    """What has to be so for the certificate to hold."""
    settings = certificate.ledger.settings
    pool = "0.7 of the activation, measured (docs/overhead.md)"
    found = [
        f"{format_gib(certificate.free_at_start)} are free when vLLM takes its snapshot",
        f"neighbours hold {format_gib(certificate.ledger.card.used_bytes)} and no new one comes",
        f"torch's pool loses at most {format_gib(certificate.pieces)} to pieces: {pool}",
        f"kernels that load after the start take at most {format_gib(_late(settings))}",
        f"a step holds at most {format_count(settings.max_num_batched_tokens)} tokens of {settings.max_num_seqs} sequences",
        "plan's terms lie in their bands, about 90 % of what was measured for each",
        "no plugin in vLLM's environment adds logits processors",
    ]
    if any(kind.phase.kind == "pictures" for kind in certificate.kinds):
        found.append("the processor scales pictures as its makers' own configuration says")
    return found

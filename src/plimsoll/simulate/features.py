"""Reads what a command adds to the plain scheduler: drafts, LoRA slots, limits of the queue, an encoder.

--speculative-config '{"method": "eagle3", "num_speculative_tokens": 3}'   1 + 3 tokens a step, of which 1 to 4 are kept
--enable-lora --max-loras 2                                                a request waits while two other adapters run
--max-num-queued-reqs 64, --max-num-queued-tokens 100000                   who comes beyond that is refused
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_named
from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.weights import tower_parts
from plimsoll.plan.weights_checkpoint import parameters
from plimsoll.simulate.settings import COMPUTE_SHARE, EncoderLimits, EngineLimits, HostCache, Speculation
from plimsoll.simulate.start import MOST_BLOCKS
from plimsoll.units import GIB

ACCEPTANCE = (0.4, 0.6, 0.8)
"""The share of drafts that are accepted where nobody says it: lowest, assumed, highest. A guess that no run was fitted to."""
MOST_DRAFTS = 1000
MOST_QUEUED = 2**31 - 2  # no limit that a replay could meet
PATCHES = 4  # of a picture for each of its tokens: two by two, as most models merge them
REPLAYED = ("--kv-offloading-size", "--max-num-queued-reqs", "--max-num-queued-tokens", "--enable-lora", "--max-loras")
WITHOUT_DRAFTER = ("ngram", "[ngram]", "ngram_gpu", "suffix")
DRAFT_MODEL_SHARE, HEAD_SHARE = 0.1, 0.05  # of the model's time, for a draft model and for a head of unknown models
UNREPLAYED_DRAFTS = (
    "speculative decoding is not replayed: further tokens come sooner than here, where the batch is full less so"
)
HOST_BYTES_PER_S = 20e9  # from the host's memory to a card: PCIe 4.0 with sixteen lanes, as it is reached
HOST_LOADS = (
    "blocks come from the host's memory at 20 GB/s and the step waits for them; in vLLM others go on: tokens come sooner"
)
HOST_LEFT_OUT = (
    "--kv-offloading-size is not replayed for these layers: first tokens of prompts seen before come sooner than here"
)
SLOWER_STEPS = "steps with LoRA adapters cost more than here: tokens come later"
NO_ADAPTERS = "no request names an adapter (a field `adapter` of the trace): none waits for a LoRA slot here, some will"


class Features(NamedTuple):
    """Limits with the command's further parts, notes on them, and how much their own doubt widens a step's time."""

    settings: EngineLimits
    notes: tuple[str, ...] = ()
    band: tuple[float, float] = (1.0, 1.0)


def method_of(config: Mapping[str, Any]) -> str:
    """The drafter's method, by vLLM's own rule where the configuration leaves it out."""
    model, said = str(config.get("model") or "").lower(), str(config.get("method") or "")
    guesses = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp"}
    guessed = next((method for part, method in guesses.items() if part in model), "draft_model")
    return said or ("ngram" if model in WITHOUT_DRAFTER else guessed)


def read_speculation(
    config: Mapping[str, Any], acceptance: float | None, shape: ModelShape | None = None
) -> Speculation | None:
    """The drafter of a --speculative-config; None where it does not say how many tokens are drafted.

    Slots, lookahead and the dropped block are those of vLLM's SpeculativeConfig.
    """
    said, method = config.get("num_speculative_tokens"), method_of(config)
    if said is None:  # the drafter's own configuration says it, or vLLM does not start
        return None
    try:
        tokens = int(said) if isinstance(said, str) or said == int(said) else 0
    except (TypeError, ValueError, OverflowError):
        tokens = 0
    if not 0 < tokens <= MOST_DRAFTS:
        raise BadInput(f"num_speculative_tokens must be a whole number from 1 to {MOST_DRAFTS}, not {str(said)[:40]}")
    is_parallel, share = config.get("parallel_drafting") is True, ACCEPTANCE[1] if acceptance is None else acceptance
    reads_states = method in ("eagle", "eagle3", "dflash", "dspark") or "mtp" in method
    has_cache = reads_states or method == "draft_model"
    slots = tokens - 1 if is_parallel or method == "dspark" else 0
    if method in ("dflash", "draft_model"):
        slots = tokens if is_parallel or method == "dflash" else 1
    cost = DRAFT_MODEL_SHARE if method == "draft_model" else HEAD_SHARE if has_cache else 0.0
    if reads_states and shape is not None and shape.layers:  # a head is one more layer, and reads the output matrix again
        cost = 1 / len(shape.layers) + shape.vocab_size * shape.hidden_size / max(1, parameters(shape))
    return Speculation(
        tokens=tokens,
        acceptance=share,
        lookahead=tokens + (method == "dflash") if has_cache else 0,
        slots=slots,
        looks_ahead=int(reads_states),
        drops_block=reads_states and config.get("disable_eagle_block_drop") is not True,
        draft_ppm=round(1e6 * min(1.0, cost)),
    )


def _embed_ps(shape: ModelShape, card: str) -> int:
    """Picoseconds to encode one token of a picture: two operations a parameter of the encoder and patch; 0 without a card."""
    encoders = [tower_parts(tower, shape, 1) for tower in shape.towers]
    parts = [part for encoder in encoders for part in (*(encoder.layer * encoder.layers), *encoder.rest)]
    with contextlib.suppress(BadInput):
        if flops := gpu_named(card).bf16_flops:
            return round(1e12 * 2 * PATCHES * sum(part.elements for part in parts) / (COMPUTE_SHARE * flops))
    return 0


def with_features(settings: EngineLimits, ledger: Ledger, shape: ModelShape, acceptance: float | None = None) -> Features:
    """The limits of a planned server with the parts of its command that `planned_settings` leaves out."""
    said = ledger.settings
    host_gib = said.kv_offloading_gib or 0.0
    if not 0 <= host_gib < math.inf:
        raise BadInput(f"--kv-offloading-size must be a size in GiB, not {host_gib}")
    changes: dict[str, Any] = {"max_loras": said.max_loras or None}
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        limit = getattr(said, name)
        if limit is not None and limit < 0:
            raise BadInput(f"--{name.replace('_', '-')} must be 0 or more, not {limit}: vLLM does not start otherwise")
        changes[name] = None if limit is None else min(limit, MOST_QUEUED)
    notes = [SLOWER_STEPS] if said.max_loras else []
    if shape.towers:
        changes["encoder"] = EncoderLimits(embed_ps=_embed_ps(shape, ledger.card.name))
    block_bytes = ledger.kv_plan.bytes_per_block
    blocks = int(min(MOST_BLOCKS, host_gib * GIB / (block_bytes * said.tensor_parallel * said.pipeline_parallel)))
    if host_gib:
        is_plain = not settings.groups and settings.prefix_caching and blocks > 0
        notes.append(HOST_LOADS if is_plain else HOST_LEFT_OUT)
        if is_plain:
            changes["host_cache"] = HostCache(blocks, round(1e9 * block_bytes / HOST_BYTES_PER_S))
    found = with_drafts(settings.turned(**changes), said.speculative, acceptance, shape)
    return Features(found.settings, (*notes, *found.notes), found.band)


def with_drafts(
    settings: EngineLimits, config: Mapping[str, Any] | None, acceptance: float | None, shape: ModelShape | None = None
) -> Features:
    """The limits with the drafter of a --speculative-config."""
    if not config:
        return Features(settings)
    speculation = read_speculation(config, acceptance, shape)
    if speculation is None or any(group.kind == "mamba" for group in settings.groups):
        return Features(settings, (UNREPLAYED_DRAFTS,))
    drafting = settings.turned(speculation=speculation)
    if acceptance is not None:
        return Features(drafting)
    low, middle, high = (1 + share * speculation.tokens for share in ACCEPTANCE)  # tokens of a step
    shares = " to ".join(f"{share:.0%}" for share in ACCEPTANCE[::2])
    note = f"{ACCEPTANCE[1]:.0%} of the drafts are taken to be accepted, {shares} in the band; vLLM's log has yours: "
    return Features(drafting, (f"{note}--acceptance-rate X",), (middle / high, middle / low))

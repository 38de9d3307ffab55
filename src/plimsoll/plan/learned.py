"""Compares predicted with measured memory, and corrects the next plan by what a real start showed.

    log ──> Measured ──┬──> compare ──> differences, term by term
    Ledger ────────────┴──> correction_from ──> Correction ──> corrected ──> Ledger with measured centres and narrower bands

Where the planner predicts the same of a term for the new start as for the old one, the measured figure replaces it; where
the batch differs, the centre moves by the same factor and the band stays as wide as it was. docs/learn.md has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import Ledger, ModelFacts, Terms, added_up, neighbours_in_budget, sum_of
from plimsoll.units import GIB, MIB, Estimate, format_gib
from plimsoll.vllm.log_lines import PRINTED_TOLERANCE, Measured
from plimsoll.vllm.versions import is_same_release, table

SCHEMA = "plimsoll.corrections/"
VERSION = 1
FILE_MAX_BYTES = 8 << 20
STARTS_MAX = 16  # per key; the oldest goes first
KEYS_MAX = 10_000

_KEY = re.compile(r"[a-z0-9][a-z0-9.=;+_\-]{0,199}")
_LARGEST = 1 << 60


class Learned(NamedTuple):
    """One term of one start, in bytes."""

    predicted: int
    measured: int
    tolerance: int  # how far off the measured figure may be, from rounding in the log or in working it out


class Start(NamedTuple):
    """One start: the limits of its batch, and its terms by the names of `_REPEATS`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    terms: dict[str, Learned]

    @property
    def conditions(self) -> tuple[int, int, int]:
        """The limits that the profile run's peak depends on beside the key."""
        return self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len


class Correction(NamedTuple):
    """All starts known of one release, card, model shape and parallelism; the newest is the last."""

    starts: tuple[Start, ...]

    def joined(self, newer: Correction) -> Correction:
        """Both together; a start that is in both counts once."""
        kept = tuple(start for start in self.starts if start not in newer.starts)
        return Correction((kept + newer.starts)[-STARTS_MAX:])


def encoded(corrections: Mapping[str, Correction]) -> str:
    assert all(_KEY.fullmatch(key) for key in corrections), "keys are made by plan.learned.key_of"
    body = {key: correction.starts for key, correction in sorted(corrections.items())}
    return json.dumps({"schema": f"{SCHEMA}{VERSION}", "corrections": body}, indent=1) + "\n"


def decoded(content: bytes, where: str) -> dict[str, Correction]:
    """Returns the corrections in the file; BadInput in one line where it is broken, or a newer plimsoll's."""
    import msgspec  # only where something was learned

    broken = BadInput(f"{where}: not a corrections file of plimsoll, or damaged; move it away to start anew")
    if len(content) > FILE_MAX_BYTES:
        raise broken
    try:
        loaded = msgspec.json.decode(content)
        schema = loaded.get("schema") if isinstance(loaded, dict) else None
        number = re.fullmatch(rf"{SCHEMA}([0-9]{{1,6}})", schema) if isinstance(schema, str) else None
        if number is not None and int(number[1]) != VERSION:
            raise BadInput(f"{where}: written by a newer plimsoll ({schema}); this one reads {SCHEMA}{VERSION}")
        found = msgspec.convert(loaded["corrections"] if number else None, dict[str, tuple[Start, ...]])
    except (KeyError, ValueError, RecursionError):
        raise broken from None
    figures = [figure for starts in found.values() for start in starts for term in start.terms.values() for figure in term]
    conditions = [abs(limit) for starts in found.values() for start in starts for limit in start.conditions]
    is_sound = len(found) <= KEYS_MAX and all(0 <= figure <= _LARGEST for figure in figures + conditions)
    if not is_sound or not all(_KEY.fullmatch(key) and 0 < len(starts) <= STARTS_MAX for key, starts in found.items()):
        raise broken
    return {key: Correction(starts) for key, starts in found.items()}


_REPEATS: Mapping[str, tuple[float, float]] = table("overhead", "plan")["repeats"]["gib"]
_FARTHEST_FACTOR = 2.0
_SHARED = "its share of what was measured for non-torch and activation together"
_TOKEN_SIZE_TOLERANCE = 0.05
_SAME = MIB  # predictions this close are of the same thing


class TermDifference(NamedTuple):
    """One line of predicted against measured; sizes in bytes, except the tokens of the cache."""

    term: str  # as in the JSON ledger; "non_torch+activation" where the log does not tell them apart; "kv_tokens"
    predicted: Estimate
    measured: int
    tolerance: int  # of the measured figure

    @property
    def error(self) -> int:
        return self.predicted.value - self.measured

    @property
    def is_in_band(self) -> bool:
        return self.predicted.low - self.tolerance <= self.measured <= self.predicted.high + self.tolerance


class _TermFigure(NamedTuple):
    value: int
    tolerance: int


def compare(ledger: Ledger, measured: Measured) -> list[TermDifference]:
    """Every term that the start's log gives, in the order of the ledger."""
    figures = _figures(ledger, measured)
    if "non_torch" in figures and "activation" in figures:
        figures.pop("remainder", None)
    predicted = _predicted(ledger)
    rows = [
        TermDifference("non_torch+activation" if name == "remainder" else name, predicted[name], *figures[name])
        for name in predicted
        if name in figures
    ]
    if measured.kv_tokens is not None:
        tokens, kv = Estimate.exact(ledger.kv_plan.tokens), ledger.kv
        if kv.value > 0:  # the cache in tokens, its band in proportion to that of its bytes
            low, high = tokens.value * kv.low // kv.value, -(-tokens.value * kv.high // kv.value)
            tokens = Estimate(tokens.value, max(0, low), high)
        rows.append(TermDifference("kv_tokens", tokens, measured.kv_tokens, 0))
    return rows


def correction_from(ledger: Ledger, measured: Measured) -> Correction:
    """Returns the correction from this start; BadInput where it is not the start that was planned, or not plausible."""
    _refuse_another_start(ledger, measured)
    figures, predicted = _figures(ledger, measured), _predicted(ledger)
    rest = figures.get("remainder")
    if rest is not None:
        expected = predicted["remainder"]
        if rest.value < 0 or rest.value - rest.tolerance > expected.high + max(2 * expected.high, 4 * GIB):
            raise BadInput(
                f"the log leaves {format_gib(rest.value)} for non-torch memory and activation, expected were "
                f"{format_gib(expected.value)}: another process on the card, or not this command; nothing learned"
            )
    settings, plan = ledger.settings, ledger.kv_plan
    is_comparable = not settings.has_fixed_cache and settings.pipeline_parallel == 1
    if is_comparable and measured.kv_bytes and measured.kv_tokens and plan.tokens:
        # A cache whose tokens have another size belongs to another model, or to another --kv-cache-dtype.
        logged, planned = measured.kv_bytes / measured.kv_tokens, max(0, ledger.kv.value) / plan.tokens
        if planned and not 1 - _TOKEN_SIZE_TOLERANCE <= logged / planned <= 1 + _TOKEN_SIZE_TOLERANCE:
            raise BadInput(
                f"a token takes {logged:,.0f} bytes of the log's KV cache and {planned:,.0f} of this plan's: the log of "
                "another model, or of another --kv-cache-dtype; nothing learned"
            )
    terms = {
        name: Learned(predicted[name].value, figure.value, figure.tolerance)
        for name, figure in figures.items()
        if name in _REPEATS and figure.value >= 0
    }
    if not terms:
        raise BadInput("the log tells no term of the ledger; nothing learned")
    return Correction((Start(*_conditions(ledger), terms),))


def key_of(ledger: Ledger, shape: ModelShape) -> str:
    """Release, card, model shape and parallelism; and, as one number, the other flags that change what a rank holds."""
    settings = ledger.settings
    gpu = re.sub(r"[^a-z0-9.]+", "-", ledger.card.name.lower()).strip("-")[:48] or "unnamed"
    model = _hash([
        shape.architectures, shape.hidden_size, shape.vocab_size, shape.embedding_size, shape.tie_word_embeddings,
        shape.dtype, shape.intermediate_size, shape.mtp_layers,
        [[layer.kind.value, layer.feed_forward.value, layer.attention_heads, layer.kv_heads, layer.head_dim, layer.v_head_dim,
          layer.window, layer.intermediate_size] for layer in shape.layers],
        shape.moe and [shape.moe.experts, shape.moe.experts_per_token, shape.moe.intermediate_size, shape.moe.shared_experts],
        [[tower.what, tower.layers, tower.hidden_size] for tower in shape.towers],
        shape.quantization and [shape.quantization.method, shape.quantization.algorithm, shape.quantization.bits,
                                shape.quantization.group_size],
    ])  # fmt: skip
    drafter = settings.speculative or {}
    run = _hash([
        settings.data_parallel, settings.decode_context_parallel, settings.expert_parallel, settings.dtype,
        settings.quantization, settings.cpu_offload_gib, settings.max_loras and [settings.max_loras, settings.max_lora_rank],
        settings.enforce_eager, settings.v2_runner, settings.estimates_graphs, settings.pipeline_partition,
        settings.skips_mm_profiling, settings.language_model_only, settings.kv_connector, sorted(map(str, drafter.items())),
        *(["whole encoders"] if settings.encoders_whole else ()),  # last: what was learned without it keeps its key
    ])  # fmt: skip
    release = re.sub(r"[^a-z0-9.]+", "-", settings.release.lower())[:24]
    parallel = f"tp={settings.tensor_parallel};pp={settings.pipeline_parallel}"
    return f"vllm={release};gpu={gpu};model={model};{parallel};run={run}"


def corrected(ledger: Ledger, correction: Correction, model: ModelFacts) -> Ledger:
    """The ledger with measured terms in place of predicted ones, added up anew."""
    predicted, now = _predicted(ledger), _conditions(ledger)
    several = ledger.settings.tensor_parallel * ledger.settings.pipeline_parallel > 1
    known = {name: _term(predicted[name], name, correction, now, several=several) for name in _REPEATS}
    both = known.pop("remainder")
    terms = Terms(**{name: term or predicted[name] for name, term in known.items()})
    if both is not None:  # the two terms are made to add up to what is known of them together
        outside, inside = terms.non_torch, terms.activation
        gap = both.value - outside.value - inside.value
        doubt = [float(term.high - term.value if gap > 0 else term.value - term.low) ** 2 for term in (outside, inside)]
        share = doubt[0] / sum(doubt) if sum(doubt) else 0.5
        activation = max(0, both.value - max(0, outside.value + round(gap * share)))
        parts = {"non_torch": _moved(outside, both.value - activation), "activation": _moved(inside, activation)}
        if abs(gap) > _SAME and "measured" not in outside.why + inside.why:
            parts = {name: replace(part, why=_SHARED) for name, part in parts.items()}
        terms = replace(terms, **parts)
    return added_up(model, ledger.settings, ledger.card, terms, both)


def _predicted(ledger: Ledger) -> dict[str, Estimate]:
    names = ("weights", "non_torch", "activation", "remainder", "graphs", "graphs_actual", "context", "kv")
    both = sum_of((ledger.non_torch, ledger.activation))
    return {name: both if name == "remainder" else getattr(ledger, name) for name in names}


def _conditions(ledger: Ledger) -> tuple[int, int, int]:
    settings = ledger.settings
    return settings.max_num_seqs, settings.max_num_batched_tokens, ledger.kv_plan.max_model_len


def _figures(ledger: Ledger, measured: Measured) -> dict[str, _TermFigure]:
    """Returns the measured figure of each term that the start's log gives, cut as the ledger cuts them."""
    settings, card, printed = ledger.settings, ledger.card, PRINTED_TOLERANCE
    told = {
        "weights": measured.weights_bytes,
        "non_torch": measured.non_torch_bytes,
        "activation": measured.activation_bytes,
        "graphs": measured.graphs_estimated_bytes if settings.estimates_graphs else None,
        "graphs_actual": measured.graphs_actual_bytes,
    }
    figures = {name: _TermFigure(size, printed) for name, size in told.items() if size is not None}
    if "non_torch" not in figures and measured.consumed_bytes is not None and measured.weights_bytes is not None:
        figures["non_torch"] = _TermFigure(max(0, measured.consumed_bytes - measured.weights_bytes), 2 * printed)
    if measured.graphs_subtracted is False:
        figures["graphs"] = _TermFigure(0, 0)
    if measured.free_bytes is not None:
        # The memory taken at vLLM's snapshot; far more than a context needs is a neighbour's, and is not learned.
        total = measured.total_bytes or card.total_bytes
        tolerance = 2 * printed if measured.total_bytes else max(card.high_bytes - total, total - card.low_bytes)
        value = total - measured.free_bytes - card.used_bytes
        if 0 < value <= ledger.context.high + GIB // 4:
            figures["context"] = _TermFigure(value, tolerance)
    kv = _kv(ledger, measured)
    if kv is not None and settings.kv_cache_memory_bytes is None:
        # Non-torch and activation together: the request less the terms that are known. It uses the planner's own total, not the
        # printed one: the next plan starts from the same total, so its error cancels out.
        requested = ledger.requested.value
        if measured.utilization is not None and abs(measured.utilization - settings.utilization) > 1e-4:
            requested = math.ceil(card.total_bytes * measured.utilization)
        weights = figures.get("weights") or _TermFigure(ledger.weights.value, _half(ledger.weights))
        graphs = figures.get("graphs") or _TermFigure(ledger.graphs.value, _half(ledger.graphs))
        rest = requested - neighbours_in_budget(settings, card) - weights.value - graphs.value - kv.value
        spread = math.sqrt(sum(figure.tolerance**2 for figure in (weights, graphs, kv)))
        figures |= {"kv": kv, "remainder": _TermFigure(rest, math.ceil(spread))}
    return figures


def _kv(ledger: Ledger, measured: Measured) -> _TermFigure | None:
    """The bytes that were left for the cache, from the most exact figure in the start's log."""
    if measured.kv_bytes is not None:
        return _TermFigure(measured.kv_bytes, PRINTED_TOLERANCE)
    settings = ledger.settings
    if measured.blocks and settings.pipeline_parallel == 1 and settings.num_gpu_blocks_override is None:
        block = ledger.kv_plan.bytes_per_block
        return _TermFigure(measured.blocks * block + block // 2, block // 2 + 1)
    return None


def _term(
    now: Estimate, name: str, correction: Correction, conditions: tuple[int, int, int], *, several: bool
) -> Estimate | None:
    """This term as starts have shown it; None where none has, or where the present band is at least as narrow."""
    told = [(start, term) for start in correction.starts if (term := start.terms.get(name)) is not None]
    if not told:
        return None
    alike = [t for start, t in told if start.conditions == conditions or abs(t.predicted - now.value) <= _SAME]
    repeats = math.ceil(_REPEATS[name][several] * GIB)
    if alike:
        low = max(0, min(t.measured - t.tolerance for t in alike) - repeats)
        high = max(t.measured + t.tolerance for t in alike) + repeats
        if low <= now.low and now.high <= high:
            return None
        middle = sorted(t.measured for t in alike)[len(alike) // 2]  # the larger of two: too little cache is the lesser harm
        return Estimate(
            middle, low, high, f"measured, {len(alike)} start{'s' * (len(alike) > 1)}; predicted {format_gib(now.value)}"
        )
    newest = told[-1][1]
    factor = newest.measured / newest.predicted if newest.predicted else 1.0
    value = math.ceil(now.value * min(_FARTHEST_FACTOR, max(1 / _FARTHEST_FACTOR, factor)))
    return replace(_moved(now, value), why=f"moved by a start with another batch; predicted {format_gib(now.value)}")


def _moved(term: Estimate, value: int) -> Estimate:
    """The same band around another centre."""
    value = max(0, value)
    return replace(term, value=value, low=max(0, value - (term.value - term.low)), high=value + term.high - term.value)


def _half(term: Estimate) -> int:
    return max(term.high - term.value, term.value - term.low)


def _refuse_another_start(ledger: Ledger, measured: Measured) -> None:
    settings = ledger.settings
    stated = (
        ("--tensor-parallel-size", measured.tensor_parallel, settings.tensor_parallel),
        ("--pipeline-parallel-size", measured.pipeline_parallel, settings.pipeline_parallel),
        ("--enforce-eager", measured.enforce_eager, settings.enforce_eager),
        ("--max-num-batched-tokens", measured.max_num_batched_tokens, settings.max_num_batched_tokens),
        ("--max-num-seqs", measured.max_num_seqs, settings.max_num_seqs),
        ("--max-model-len", None if settings.auto_fit else measured.max_model_len, settings.max_model_len),
    )
    if measured.release is not None and not is_same_release(measured.release, settings.release):
        raise BadInput(f"the log is of vLLM {measured.release}, the plan of {settings.release}: give --vllm {measured.release}")
    for flag, logged, planned in stated:
        if logged is not None and logged != planned:
            raise BadInput(
                f"the log is of a start with {flag} {logged}, the plan has {planned}: give the command that was started"
            )
    total, card, printed = measured.total_bytes, ledger.card, 2 * PRINTED_TOLERANCE
    if total is not None and not card.low_bytes - printed <= total <= card.high_bytes + printed:
        size, known = f"{total / GIB:.2f}", f"{card.total_bytes / GIB:.2f}"
        raise BadInput(f"the log is of a card with {size} GiB, the plan's has {known}: give --gpu-memory-gib {size}")


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:12]

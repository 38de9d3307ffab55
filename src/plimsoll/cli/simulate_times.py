"""How long a step takes, for `plimsoll simulate`: said, fitted to a real run, or by the data sheet of the plan's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.cli.simulate_numbers import amount, number_in, object_in, whole
from plimsoll.domain.trace import Trace
from plimsoll.errors import BadInput
from plimsoll.simulate.settings import Settings, StepTime

_SAID = {"--base-ns": "base_ns", "--token-ns": "token_ns", "--seq-ns": "seq_ns", "--ctx-ps": "ctx_ps"}
AS_GIVEN = "step times as given, the others those of no card; the data sheet is not used"
_MOST_NS = 10**13
_FP8_BYTES = (0.9, 1.2)
"""Bytes a parameter between which weights are taken for 8-bit floats, which are computed with as such."""


class Times(NamedTuple):
    """Step times, what the fit says about its error (None: a rough guide), and where they are from."""

    step_time: StepTime
    fitted: str | None = None
    notes: tuple[str, ...] = ()


def read_times(values: Mapping[str, str], plan: Mapping[str, object] | None, settings: Settings, trace: Trace) -> Times:
    """What the user said, else a fit, else the data sheet, else the reference's constants."""
    said = {field: whole(values[name], name, most=_MOST_NS) for name, field in _SAID.items() if name in values}
    if said and "--fit" in values:
        raise BadInput(f"either --fit or {next(name for name in _SAID if name in values)}, not both")
    by_sheet = _data_sheet(plan, settings) if plan is not None and not said else None
    if "--fit" in values:
        return _fitted(values["--fit"], settings, trace, by_sheet.step_time if by_sheet else None)
    if by_sheet is not None:
        return by_sheet
    notes = (AS_GIVEN,) if said and plan is not None else ()
    return Times(StepTime(**{**StepTime()._asdict(), **said}), notes=notes)


def _fitted(path: str, settings: Settings, trace: Trace, start: StepTime | None) -> Times:
    from plimsoll.simulate.fit import fit
    from plimsoll.simulate.fit_histograms import fit_histograms
    from plimsoll.sources.metric_histograms import looks_like_metrics, read_histograms
    from plimsoll.sources.traces import read_measured

    if looks_like_metrics(path):
        found = fit_histograms(trace, settings, read_histograms(path), start=start)
    else:
        found = fit(read_measured(path), settings, start=start)
    return Times(found.step_time, found.sentence)


def _data_sheet(plan: Mapping[str, object], settings: Settings) -> Times:
    """By the card's bandwidth and rate and the model's size."""
    from plimsoll.domain.gpu import gpu_named
    from plimsoll.simulate.graphs import graph_sizes
    from plimsoll.simulate.roofline import Experts, Speed, Work, roofline

    try:
        card = gpu_named(str(object_in(plan, "gpu").get("name")))
        kv, counted = object_in(plan, "kv"), object_in(plan, "parameters")
        said = object_in(plan, "settings")
        cards, stages = number_in(said, "tensor_parallel_size"), number_in(said, "pipeline_parallel_size")
        # A step goes through one stage after the other.
        weights = amount(object_in(object_in(plan, "ledger"), "weights"), "value") * cards * stages
        total, routed = amount(counted, "total"), amount(counted, "routed")
        block_bytes = amount(kv, "bytes_per_block")
    except (KeyError, BadInput):
        return Times(StepTime(), notes=("the plan does not say enough of card and model: step times are those of no card",))
    if not card.bandwidth_bytes_per_s or not card.bf16_flops:
        return Times(StepTime(), notes=(f"no data sheet gives the rates of {card.name}: step times are those of no card",))
    experts, per_token = counted.get("experts"), counted.get("experts_per_token")
    mixture, active = None, total
    if isinstance(experts, int) and isinstance(per_token, int) and 0 < per_token <= experts and total > 0:
        mixture = Experts(experts, per_token, routed / total)
        active = total - routed * (1 - per_token / experts)
    is_fp8 = total > 0 and _FP8_BYTES[0] <= weights / total <= _FP8_BYTES[1]
    flops = card.fp8_flops if is_fp8 and card.fp8_flops else card.bf16_flops
    full = sum(group.kind == "full" for group in settings.groups) if settings.groups else 1
    work = Work(weights, active, full * block_bytes * cards * stages / settings.block_size, mixture, cards)
    sizes = graph_sizes(settings.max_num_seqs)
    step_time = roofline(work, Speed(card.bandwidth_bytes_per_s, flops), settings.max_num_batched_tokens, sizes)
    return Times(
        step_time, notes=(f"step times by the data sheet of {cards} x {card.name}; --fit learns them from a real run",)
    )

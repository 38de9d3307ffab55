"""What vLLM subtracts beside weights and KV: activation peak, memory outside torch, CUDA graphs, each with its band.

All that changes with the release is data in `overhead_table`; the tensors are counted in `overhead_peaks`. Where two
figures are equally likely the larger one is the value: too little KV is an inconvenience, too much takes a server down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from plimsoll.domain.estimate import Estimate
from plimsoll.domain.model import ModelShape
from plimsoll.domain.units import GIB, format_gib
from plimsoll.domain.version import Version
from plimsoll.plan import overhead_peaks as peaks
from plimsoll.plan import overhead_table as table
from plimsoll.plan.overhead_table import ERAS, Era

_DTYPE_BYTES = {"float32": 4, "float": 4, "float64": 8}


@dataclass(frozen=True)
class OverheadInput:
    """What the overhead depends on; `v2_runner` and `estimates_graphs` are None where nobody chose."""

    release: str
    shape: ModelShape
    gpu_bytes: int
    compute_capability: tuple[int, int] | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    enforce_eager: bool = False
    estimates_graphs: bool | None = None
    v2_runner: bool | None = None
    dtype: str = "bfloat16"


class Overhead(NamedTuple):
    """The terms per GPU, of the rank that holds most."""

    activation: Estimate
    non_torch: Estimate
    graphs: Estimate  # as vLLM subtracts it: 0 where it subtracts nothing
    graphs_actual: Estimate  # what capture takes, subtracted or not

    @property
    def subtracted(self) -> int:
        """All three that vLLM takes off the requested memory, central values."""
        return self.activation.value + self.non_torch.value + self.graphs.value


def overhead(given: OverheadInput, era: Era | None = None) -> Overhead:
    """The three terms of one start; `era` is for the fit, which holds rows out of the table."""
    era = era or era_of(given.release)
    v2 = v2_by_default(given.release, given.shape) if given.v2_runner is None else given.v2_runner
    if era.since < (0, 20, 0):
        v2 = False  # the second runner was an experiment until then; no figure of it is known
    actual = _graphs_actual(given, era, v2=v2)
    return Overhead(_activation(given, era, v2=v2), _non_torch(given, era, v2=v2), _graphs(given, era, actual, v2=v2), actual)


def unseen_buffers(given: OverheadInput) -> int:
    """What the second runner allocates after the weights were weighed and before the profile begins: in no term until 0.27."""
    era = era_of(given.release)
    v2 = v2_by_default(given.release, given.shape) if given.v2_runner is None else given.v2_runner
    return int(_buffers(given, v2=True)) if v2 and era.since >= (0, 20, 0) and not era.consumed_counts_all else 0


def era_of(release: str) -> Era:
    """The range a release belongs to; a newer one than we know is met as the newest range."""
    number = _number(release)
    return next(era for era in reversed(ERAS) if era.since <= number)


def v2_by_default(release: str, shape: ModelShape) -> bool:
    """Whether this release runs this model on the second model runner when nobody asks (config/vllm.py)."""
    number = _number(release)
    if number >= table.V2_SINCE_ALL:
        return True
    hybrid = any(layer.kind.keeps_state for layer in shape.layers)
    architectures = set(shape.architectures)
    early = table.V2_EARLY_DENSE.get(number[:2])
    if early is not None:
        return bool(architectures & early) and shape.moe is None and shape.quantization is None
    if number < table.V2_SINCE_DENSE or hybrid:
        return False
    return shape.moe is None or bool(architectures & table.V2_EARLY_EXPERTS)


def _number(release: str) -> tuple[int, int, int]:
    try:
        parts = Version(release).release
    except ValueError:
        return ERAS[-1].since
    return parts[0], parts[1], parts[2]


def _capability(given: OverheadInput) -> tuple[int, int]:
    """The card's compute capability; one that is known by its size alone is taken for a Hopper card if large."""
    return given.compute_capability or ((9, 0) if given.gpu_bytes >= 70 * GIB else (8, 6))


def _batch(given: OverheadInput) -> peaks.Batch:
    tokens = max(1, given.max_num_batched_tokens)
    return peaks.Batch(
        tokens=tokens,
        rows=max(1, min(given.max_num_seqs, tokens)),
        context=max(1, given.max_model_len),
        tensor_parallel=max(1, given.tensor_parallel),
        dtype_bytes=_DTYPE_BYTES.get(given.dtype, 2),
        is_hopper=_capability(given) >= (9, 0),
        multiprocessors=peaks.multiprocessors_of(_capability(given)),
    )


def _activation(given: OverheadInput, era: Era, *, v2: bool) -> Estimate:
    shape, batch, compiled = given.shape, _batch(given), not given.enforce_eager and era.name != "V0"
    if v2 and not era.v2_profiles_encoder:
        shape = replace(shape, towers=())
    contest = {
        "sampler": peaks.sampler_peak(shape, batch, era, v2=v2),
        "forward pass": peaks.forward_peak(shape, batch, era, compiled=compiled),
    }
    if shape.towers:
        contest["encoder"] = peaks.encoder_peak(shape, batch)
    embedding = peaks.embedding_peak(shape, batch) if compiled else 0
    if era.copies_embedding:
        contest["embedding"] = embedding
    winner = max(contest, key=lambda peak: contest[peak])
    value = contest[winner]
    below, above = era.activation_band
    low = value * (1 - below) - era.band_gib * GIB
    if given.pipeline_parallel > 1:  # only the last rank samples, and it need not be the one that is shown
        low = min(low, 0.9 * contest["forward pass"])
    high = value * (1 + above) + era.band_gib * GIB
    if era.since >= (0, 8, 0):
        high = max(high, embedding)
    if shape.towers:
        high += peaks.encoder_outputs(shape, batch)
    if shape.moe is not None and shape.quantization is not None:  # other kernels, whose workspaces were not measured
        low, high = low - peaks.moe_workspace(shape, batch) / 2, high + peaks.moe_workspace(shape, batch) / 2
    crosses = shape.is_encoder_decoder or any(name.startswith("Mllama") for name in shape.architectures)
    if era.name == "V0" and (shape.towers or crosses):
        items = batch.rows if crosses else min(batch.rows, batch.tokens // table.V0_ITEM_TOKENS)
        likely, most = (items * gib * GIB for gib in table.V0_ITEM_GIB)
        value, high, winner = ceil(value + likely), high + most, f"{winner} and {items} encoder items"
    return _estimate(value, low, high, f"{winner} of the profile run, vLLM {era.name}{_thin(era)}")


def _non_torch(given: OverheadInput, era: Era, *, v2: bool) -> Estimate:
    fast = (9, 0) <= _capability(given) < (12, 0)
    terms, name = era.non_torch, "one GPU"
    if given.tensor_parallel > 1:
        band = terms.together if fast else terms.together_slow_link
        name = f"tensor parallel {given.tensor_parallel}"
    elif given.pipeline_parallel > 1:
        band, name = terms.staged, "pipeline parallel"
    else:
        band = terms.alone
    value, low, high = (gib * GIB for gib in band)
    if given.tensor_parallel == 2 and fast and era.since >= (0, 18, 0):
        value -= table.TWO_GPUS_LESS_GIB * GIB
    if given.tensor_parallel == 1 and not fast:
        low = min(low, 0.02 * GIB)  # 24 and 48 GB cards showed 0.02 to 0.12 where an H100 showed 0.13
    if given.tensor_parallel == 1 and given.data_parallel > 1:
        high += GIB  # communicators of the data-parallel group: one start showed 0.61
    if given.shape.vocab_size % 8 and era.since >= (0, 18, 0):
        value, high = value + table.ODD_VOCABULARY_GIB * GIB, high + 2 * table.ODD_VOCABULARY_GIB * GIB
    if era.consumed_counts_all:
        buffers = _buffers(given, v2=v2)
        value, low, high = value + buffers + 0.05 * GIB, low + 0.8 * buffers, high + buffers + 0.5 * GIB
        name += f", and {format_gib(int(buffers))} of torch's buffers outside the weights"
    return _estimate(value, low, high, f"{name}, vLLM {era.name}{_thin(era)}")


def _buffers(given: OverheadInput, *, v2: bool) -> float:
    """What the runner allocates beside the weights and 0.27 began to count: penalty counters, or input embeddings."""
    if v2:
        return table.V2_PENALTY_BYTES * max(1, given.max_num_seqs) * given.shape.vocab_size
    return float(_DTYPE_BYTES.get(given.dtype, 2) * max(1, given.max_num_batched_tokens) * given.shape.hidden_size)


def _graphs_actual(given: OverheadInput, era: Era, *, v2: bool) -> Estimate:
    if given.enforce_eager:
        return Estimate.exact(0, "eager: no graphs")
    shares = table.GRAPH_V2 if v2 else table.GRAPH_ACTUAL
    value = _graph_gib(given, shares, largest=given.max_num_seqs * (1 if v2 else 2)) * GIB
    band = table.GRAPH_BAND_GIB * GIB
    if era.name in ("V0", "0.8.0 to 0.9.0", "0.9.1 to 0.10"):  # up to 3.2 GiB was seen on one GPU
        return _estimate(value, 0.1 * value, 3.0 * value + band, f"graphs of 0.19 by layers, vLLM {era.name} differs widely")
    return _estimate(value, 0.5 * value - band / 2, value + 2 * band, "layers, experts and capture sizes")


def _graphs(given: OverheadInput, era: Era, actual: Estimate, *, v2: bool) -> Estimate:
    if given.enforce_eager:
        return Estimate.exact(0, "eager: no graphs")
    asked = era.graph_estimate in ("v1", "both") if given.estimates_graphs is None else given.estimates_graphs
    if era.graph_estimate == "none" or not asked:
        return Estimate.exact(0, f"vLLM {era.name} does not subtract graphs{' unless asked' if not asked else ''}")
    if v2 and era.graph_estimate != "both":
        return Estimate.exact(0, f"the second model runner of {era.name} estimates 0")
    if v2:
        return _estimate(actual.value, 0.4 * actual.low, actual.high, f"as captured, vLLM {era.name}{_thin(era)}")
    value, band = _graph_gib(given, table.GRAPH_ESTIMATE, largest=2 * given.max_num_seqs) * GIB, table.GRAPH_BAND_GIB * GIB
    return _estimate(value, 0.9 * value - band, value + band, f"layers, experts and capture sizes, vLLM {era.name}")


def _graph_gib(given: OverheadInput, shares: tuple[float, float, float, float], largest: int) -> float:
    """Graphs in GiB; `largest` is the largest batch captured, at most 512, and the fewer sizes there are the less they take."""
    fixed, per_layer, experts, quantised = shares
    layers = max(1, len(given.shape.layers)) / max(1, given.pipeline_parallel)
    gib = fixed + per_layer * layers
    gib += experts if given.shape.moe is not None else 0.0
    gib += quantised if given.shape.quantization is not None else 0.0
    reach = min(1.0, max(1, largest) / table.GRAPH_LARGEST_SIZE)
    return max(table.GRAPH_LEAST_GIB, gib) * (0.1 + 0.9 * reach)


def _thin(era: Era) -> str:
    return "" if era.has_rows else f"; wide band: {era.evidence}"


def _estimate(value: float, low: float, high: float, why: str) -> Estimate:
    whole = max(0, ceil(value))
    return Estimate(whole, max(0, min(whole, int(low))), max(whole, ceil(high)), why)

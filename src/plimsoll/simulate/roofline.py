"""How long a step should take by the card's data sheet and the model's size alone: a rough guide, where nothing was measured.

A step reads all weights once and computes two operations for each active parameter and token; the slower of the two sets its
time. Reading the KV cache of every running request comes on top, and so does what the engine itself needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate.settings import StepTime
from plimsoll.simulate.trace import Floats, Integers

# CUDA graphs: small steps are padded to the next captured size, larger ones run without a graph.
#
# tokens in the step   1  2  3  4  5 ... 8  9 ... 16      512  513 ...
# computed as          1  2  4  4  8 ... 8  16 ... 16     512  513 + the step up

LARGEST = 512  # vLLM captures no larger size by itself (1024 on a few cards and models)


def graph_sizes(max_num_seqs: int, *, largest: int = LARGEST) -> tuple[int, ...]:
    """The sizes vLLM captures when none are named: twice as many tokens as there may be requests, at most `largest`."""
    top = min(2 * max_num_seqs, largest)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
    return tuple(size for size in sizes if size <= top)


def padded(sizes: Sequence[int], most_tokens: int) -> Integers:
    """As how many tokens a step of T is computed, for every T from 0 to `most_tokens`."""
    tokens = np.arange(most_tokens + 1, dtype=np.int64)
    if not sizes:
        return tokens
    captured = np.sort(np.asarray(sizes, dtype=np.int64))
    inside = tokens <= captured[-1]
    tokens[inside] = captured[np.searchsorted(captured, tokens[inside])]
    tokens[0] = 0
    return tokens


def step_table(base_ns: float, token_ns: float, most_tokens: int, sizes: Sequence[int] = (), step_up_ns: float = 0) -> Integers:
    """StepTime's `by_tokens`: a line over the padded tokens, and `step_up_ns` more where no graph is large enough."""
    took = base_ns + token_ns * padded(sizes, most_tokens).astype(np.float64)
    if sizes:
        took[max(sizes) + 1 :] += step_up_ns
    return np.rint(took).astype(np.int64)


BANDWIDTH_SHARE = 0.8  # Of the data sheet's bandwidth. A customary figure, chosen beforehand and not fitted to any run.
COMPUTE_SHARE = 0.6  # Of the data sheet's dense rate. Customary, too, and not fitted.
OVERHEAD_NS = 2_000_000  # Launching, sampling and handing out a step's answers. A guess, not fitted.
FP8_BYTES = (0.9, 1.2)
SEQ_NS = 10_000  # The engine's own work for each request in a step


class Experts(NamedTuple):
    """A mixture of experts: a step reads only the experts that some token of it was sent to."""

    experts: int
    per_token: int
    weights_share: float  # Of all weights, those that belong to routed experts

    def hit(self, tokens: Floats) -> Floats:
        """The share of experts that so many tokens are sent to, if each chooses independently."""
        return 1 - (1 - min(self.per_token, self.experts) / self.experts) ** tokens

    def read(self, tokens: Floats) -> Floats:
        """The share of all weights that a step of so many tokens reads."""
        return 1 - self.weights_share * (1 - self.hit(tokens))


def active_parameters(total: float, routed: float, experts: Experts | None) -> float:
    """Those that take part in computing one token: of routed experts only the chosen ones."""
    return total - routed * (1 - experts.per_token / experts.experts) if experts else total


def dense_rate(bf16_flops: float, fp8_flops: float | None, bytes_a_parameter: float) -> float:
    """The rate that counts: weights of one byte are taken for 8-bit floats, which are computed with as such."""
    return fp8_flops if fp8_flops and FP8_BYTES[0] <= bytes_a_parameter <= FP8_BYTES[1] else bf16_flops


class Work(NamedTuple):
    """What the model asks of one card: figures of the whole model, and over how many cards they are spread."""

    weights_bytes: float  # As they lie in memory, embedding tables left out where they are only looked up
    active_parameters: float  # Those that take part in computing one token
    kv_bytes_per_token: float
    experts: Experts | None = None
    cards: int = 1  # Tensor parallel size


class Speed(NamedTuple):
    """What one card can do, by its data sheet."""

    bandwidth_bytes_per_s: float
    flops_per_s: float  # Dense, in the type the model computes in


def roofline(work: Work, speed: Speed, most_tokens: int, sizes: Sequence[int] = ()) -> StepTime:
    """Step times by the data sheet, for steps of up to `most_tokens`; `sizes` are the captured graphs that pad them."""
    if min(work.weights_bytes, work.active_parameters, *speed) <= 0 or work.kv_bytes_per_token < 0 or work.cards < 1:
        raise BadInput("a step time needs a model and a card with sizes and rates above 0")
    bandwidth = speed.bandwidth_bytes_per_s * BANDWIDTH_SHARE
    tokens = padded(sizes, most_tokens).astype(np.float64)
    read = work.experts.read(tokens) if work.experts else np.ones_like(tokens)
    reading = 1e9 * work.weights_bytes * read / work.cards / bandwidth
    token_ns = 1e9 * 2 * work.active_parameters / work.cards / (speed.flops_per_s * COMPUTE_SHARE)
    took = OVERHEAD_NS + np.maximum(reading, token_ns * tokens)
    return StepTime(
        base_ns=round(OVERHEAD_NS + reading[-1]),
        token_ns=round(token_ns),
        seq_ns=SEQ_NS,
        ctx_ps=round(1e12 * work.kv_bytes_per_token / work.cards / bandwidth),
        by_tokens=np.rint(took).astype(np.int64),
    )

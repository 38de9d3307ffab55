"""CUDA graphs: small steps are padded to the next captured size, larger ones run without a graph.

tokens in the step   1  2  3  4  5 ... 8  9 ... 16      512  513 ...
computed as          1  2  4  4  8 ... 8  16 ... 16     512  513 + the step up
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plimsoll.domain.trace import Integers

LARGEST = 512
"""vLLM captures no larger size by itself (1024 on a few cards and models)."""


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

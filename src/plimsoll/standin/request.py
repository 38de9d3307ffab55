"""An engine's figures, its tokeniser, and its requests."""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The numbers of one engine's metrics page. Only its scheduler and its memory change them.

# The histograms. `max_output` is the longest of the n answers to one request.
HISTOGRAMS = tuple(
    "ttft inter_token tpot e2e queue inference prefill decode prompt output max_output params_max_tokens params_n step_tokens "
    "request_preemptions prefill_kv_computed".split()
)
ENDS = ("stop", "length", "abort", "error", "repetition")
VALVES = ("max_num_queued_reqs", "max_num_queued_tokens")


class BucketCounts:
    """The number of observed values under each edge of a histogram."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value; one on an edge belongs to the bucket that ends there."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Figures:
    """The metrics of one engine. Gauges are those of the last step, as in vLLM."""

    def __init__(self, edges: Mapping[str, Sequence[float]]) -> None:
        self.running = self.waiting = 0
        self.kv_usage = 0.0
        self.steps = self.preemptions = self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = self.prompt_computed = self.prompt_cached = 0
        self.success = dict.fromkeys(ENDS, 0)
        self.rejected = dict.fromkeys(VALVES, 0)
        self.sleep_state = "awake"
        self.histograms = {name: BucketCounts(edges.get(name, ())) for name in HISTOGRAMS}


# Words and token ids: a small tokeniser of our own, so that equal text is equal content and answers can be read back.
#
# It is no model's tokeniser: a word of up to eight letters is one token, a longer one several, and each mark is one. For
# English prose it counts about as many tokens as Llama's, and nothing here claims more.

Ids = npt.NDArray[np.int64]

VOCABULARY = 32_000
RESERVED = 1_000  # answers are made of the words with smaller ids
_PIECES = re.compile(r" ?[^\W_]{1,8}| ?[^\w\s]| ?_|\s")
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu")
_SPLIT = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


# The words of the reserved ids: three syllables, one for each digit.
WORDS = tuple(" " + "".join(_SYLLABLES[int(digit)] for digit in f"{token:03d}") for token in range(RESERVED))
_IDS = {word: token for token, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Returns the text as token ids; equal pieces have equal ids in every process."""
    rest = VOCABULARY - RESERVED
    return [
        RESERVED + zlib.crc32(word.encode("utf-8", "surrogatepass")) % rest if (known := _IDS.get(word)) is None else known
        for word in _PIECES.findall(text)
    ]


def draw(seed: int, count: int) -> Ids:
    with np.errstate(over="ignore"):
        number = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed & 0xFFFFFFFF)) * _SPLIT
        return (mixed(number) % np.uint64(RESERVED)).astype(np.int64)


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns each number's digest: one changed bit changes half of the digest's."""
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX1
        numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX2
        return numbers ^ (numbers >> np.uint64(31))


def content_ids(tokens: Ids, block: int) -> Ids:
    """Returns one number for each whole block of tokens, which depends only on its content."""
    blocks = tokens[: len(tokens) // block * block].reshape(-1, block).astype(np.uint64)
    with np.errstate(over="ignore"):
        # Each place has its own weight, so that the order counts.
        weights = mixed(np.arange(1, block + 1, dtype=np.uint64) * _SPLIT) | np.uint64(1)
        return mixed((blocks * weights).sum(axis=1, dtype=np.uint64)).view(np.int64)


@dataclass(slots=True)
class SampleGroup:
    """The several answers to one prompt: vLLM counts some things once for all of them."""

    left: int
    longest: int = 0


class RequestSpec(NamedTuple):
    prompt: Ids
    output: int  # the number of tokens it will produce
    seed: int = 0  # of those tokens
    reason: str = "length"  # its end: "length" or "stop"
    max_tokens: int | None = None
    priority: int = 0
    n: int = 1
    family: SampleGroup | None = None  # of a request that is one of n
    shared: int | None = None
    """How many of its first tokens another request could have, too; None: any, those of the answer among them."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request in the engine. Times are ns since the engine's start, -1 for events that have not come yet."""

    spec: RequestSpec
    arrival_ns: int
    wake: Callable[[], None]
    number: int = -1  # the run's number; -1 while the request is held back by a paused engine
    produced: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    scheduled_ns: int = -1
    first_ns: int = -1
    finished_ns: int = -1
    finish: str | None = None
    _output_ids: Ids | None = None

    @property
    def output_ids(self) -> Ids:
        if self._output_ids is None:
            self._output_ids = draw(self.spec.seed, self.spec.output)
        return self._output_ids

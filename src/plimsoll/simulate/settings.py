"""What is simulated: the engine's limits, the cache groups that share its pool, and how long a step takes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate.trace import Integers

LONGEST_STEP_NS = 86_400 * 10**9


Kind = Literal["full", "sliding", "mamba"]


class Group(NamedTuple):
    """One KV cache group: layers that share a block table. All groups take their blocks from one pool."""

    kind: Kind = "full"
    block_size: int = 16
    window: int = 0  # Of a sliding group, in tokens


class Settings(NamedTuple):
    """vLLM's own limits, by its names; the defaults are those of the command line."""

    num_blocks: int = 8192  # vLLM's num_gpu_blocks: one of them is the null block, the others are usable
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 16384
    prefix_caching: bool = True
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = False
    watermark: float = 0.0
    reserve_full_isl: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    groups: tuple[Group, ...] = ()  # Empty: one full-attention group of `block_size`


def groups_of(settings: Settings) -> tuple[Group, ...]:
    """The groups that share the pool. Without prefix caching a Mamba group keeps one state: a block as long as any request."""
    groups = settings.groups or (Group("full", settings.block_size),)
    if settings.prefix_caching:
        return groups
    return tuple(group._replace(block_size=settings.max_model_len) if group.kind == "mamba" else group for group in groups)


class StepTime(NamedTuple):
    """How long one step takes, in whole nanoseconds, so that a run can be repeated to the digit.

    t = base + token*T + seq*S + (ctx_ps*C)//1000, where T tokens of S requests are computed and C is the sum of their lengths
    after the step. `by_tokens` replaces base + token*T by a table where the cost is not a line: graph padding, a roofline.
    """

    base_ns: int = 6_000_000
    token_ns: int = 20_000
    seq_ns: int = 10_000
    ctx_ps: int = 40_000
    by_tokens: Integers | None = None  # by_tokens[T] in ns, for T from 0 to max_num_batched_tokens

    def reaching(self, most_tokens: int) -> StepTime:
        """The same, with a table for steps of up to so many tokens: one that is too short goes on as a line."""
        if self.by_tokens is None or len(self.by_tokens) > most_tokens:
            return self
        more = np.arange(1, most_tokens + 2 - len(self.by_tokens)) * self.token_ns
        return self._replace(by_tokens=np.concatenate((self.by_tokens, self.by_tokens[-1] + more)))

    def table(self, most_tokens: int) -> Integers:
        """The part that depends on T alone, for every T a step can have."""
        if min(self.base_ns, self.token_ns, self.seq_ns, self.ctx_ps) < 0:
            raise BadInput("--base-ns, --token-ns, --seq-ns and --ctx-ps must be 0 or more")
        if self.by_tokens is not None:
            assert len(self.by_tokens) > most_tokens, "a time for every number of tokens that a step can have"
            return self.by_tokens
        if self.base_ns + self.token_ns * most_tokens > LONGEST_STEP_NS:
            raise BadInput("a step would take more than a day: lower --base-ns, --token-ns or --max-num-batched-tokens")
        return np.int64(self.base_ns) + np.int64(self.token_ns) * np.arange(most_tokens + 1, dtype=np.int64)

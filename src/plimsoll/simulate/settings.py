"""Settings of a simulation: the engine's limits, the cache groups that share its pool, and the step times.

Where nothing was measured, a step's time follows from the card's data sheet and the model's size, a rough guide: a step reads
all weights once and computes two operations for each active parameter and token; the slower of the two sets its time. Reading
the KV cache of every running request comes on top, and so does what the engine itself needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import Gpu
from plimsoll.plan.kv import KvPlan
from plimsoll.plan.settings import Settings as LaunchSettings
from plimsoll.simulate.trace import Floats, Integers

LONGEST_STEP_NS = 86_400 * 10**9


Kind = Literal["full", "sliding", "mamba"]


class CacheGroup(NamedTuple):
    """One KV cache group: layers that share a block table. All groups take their blocks from one pool."""

    kind: Kind = "full"
    block_size: int = 16
    window: int = 0  # Of a sliding group, in tokens


class Speculation(NamedTuple):
    """Speculative decoding: a drafter guesses tokens, and the next step verifies them."""

    tokens: int  # vLLM's num_speculative_tokens
    acceptance: float  # Share of the drafts that are accepted, as vLLM's log has it
    lookahead: int = 0  # Slots of the cache for what the drafter writes beyond the tokens of a step
    slots: int = 0  # Of the step's budget, beside the tokens, for each request
    drops_block: bool = False  # The last block of a hit is computed again
    looks_ahead: int = 0  # Tokens of a prompt that the drafter reads beyond those of a step
    draft_ppm: int = 0  # A draft pass takes so many millionths of the time of a step with its tokens

    @property
    def each(self) -> float:
        """The chance of a draft whose predecessors were accepted: of k drafts p + p^2 + ... + p^k are accepted on average."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            is_low = sum(middle**place for place in range(1, self.tokens + 1)) < self.acceptance * self.tokens
            low, high = (middle, high) if is_low else (low, middle)
        return high


class EncoderLimits(NamedTuple):
    """An encoder of pictures or sounds; a budget or a cache smaller than the largest item is raised to it, as in vLLM."""

    budget: int | None = None  # Tokens of them that a step encodes at most; None: as many as of text
    cache: int | None = None  # Tokens of them that are kept; None: as many as the budget
    embed_ps: int = 0  # The time for one, in picoseconds


class HostCache(NamedTuple):
    """KV blocks of prompts that are kept in the host's memory, too."""

    blocks: int
    block_ns: int  # The time to load one


class EngineLimits(NamedTuple):
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
    groups: tuple[CacheGroup, ...] = ()  # Empty: one full-attention group of `block_size`
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_loras: int | None = None  # None: LoRA is off
    speculation: Speculation | None = None
    encoder: EncoderLimits | None = None  # None: vLLM's own limits, and encoding takes no time
    host_cache: HostCache | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The limits that are set, by name, as plain values."""
        found = {name: value for name, value in self._asdict().items() if value is not None}
        found["groups"] = [group._asdict() for group in self.groups]
        parts = {"speculation": self.speculation, "encoder": self.encoder, "host_cache": self.host_cache}
        return found | {name: part._asdict() for name, part in parts.items() if part is not None}

    def turned(self, **limits: Any) -> EngineLimits:
        """The same engine with other limits."""
        return self._replace(**limits)


def groups_of(settings: EngineLimits) -> tuple[CacheGroup, ...]:
    """The groups that share the pool. Without prefix caching a Mamba group keeps one state: a block as long as any request."""
    groups = settings.groups or (CacheGroup("full", settings.block_size),)
    if settings.prefix_caching:
        return groups
    return tuple(group._replace(block_size=settings.max_model_len) if group.kind == "mamba" else group for group in groups)


class StepTime(NamedTuple):
    """The time of one step, in whole nanoseconds, so that a run can be repeated to the digit.

    t = base + token*T + seq*S + (ctx_ps*C)//1000 + (pair_fs*P)//10**6, where T tokens of S requests are computed, C is the sum
    of their lengths after the step, and P is twice the sum, over tokens of prompts, of the tokens that each looks at. A step
    with prompts in it takes `prompt_ns` more.
    `by_tokens` replaces base + token*T by a table where the cost is not a line: graph padding, measured kernels, a roofline.
    """

    base_ns: int = 6_000_000
    token_ns: int = 20_000
    seq_ns: int = 10_000
    ctx_ps: int = 40_000
    by_tokens: Integers | None = None  # by_tokens[T] in ns, for T from 0 to max_num_batched_tokens
    pair_fs: int = 0  # Attention of prompts: tokens times context
    prompt_ns: int = 0  # The host's time for a step with prompts in it, whose attention no graph holds
    front_ns: int = 0  # No part of a step: from a request's arrival to the scheduler, and from a first token to the client

    def scaled(self, factor: float) -> StepTime:
        """The same with every part of a step `factor` times as long."""
        names = ("base_ns", "token_ns", "seq_ns", "ctx_ps", "pair_fs", "prompt_ns")
        table = None if self.by_tokens is None else np.round(self.by_tokens * factor).astype(np.int64)
        return self._replace(**{name: round(getattr(self, name) * factor) for name in names}, by_tokens=table)

    def reaching(self, most_tokens: int) -> StepTime:
        """The same, with a table for steps of up to `most_tokens`: one that is too short goes on as a line."""
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


# CUDA graphs: small steps are padded to the next captured size, larger ones run without a graph.
#
# tokens in the step   1  2  3  4  5 ... 8  9 ... 16      512  513 ...
# computed as          1  2  4  4  8 ... 8  16 ... 16     512  513 + the step up

LARGEST = 512  # vLLM captures no larger size by itself (1024 on a few cards and models)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes vLLM captures by default: up to twice as many tokens as there may be requests, at most LARGEST."""
    top = min(2 * max_num_seqs, LARGEST)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
    return tuple(size for size in sizes if size <= top)


def padded(sizes: Sequence[int], most_tokens: int) -> Integers:
    """Returns the number of tokens computed in a step of T, for every T from 0 to `most_tokens`."""
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
OVERHEAD_NS = 2_000_000  # To launch a step, sample and send its answers. A guess, not fitted.
FP8_BYTES = (0.9, 1.2)
SEQ_NS = 10_000  # The engine's own work for each request in a step


class Experts(NamedTuple):
    """A mixture of experts: a step reads only the experts that some token of it was sent to."""

    experts: int
    per_token: int
    weights_share: float  # The share of all weights that belongs to routed experts

    def hit(self, tokens: Floats) -> Floats:
        """The share of experts that these tokens are sent to, if each chooses independently."""
        return 1 - (1 - min(self.per_token, self.experts) / self.experts) ** tokens

    def read(self, tokens: Floats) -> Floats:
        """The share of all weights that a step of these tokens reads."""
        return 1 - self.weights_share * (1 - self.hit(tokens))


REPLAYED_ALL_THE_SAME = "; it is replayed as if it did"  # the end of the note on a replayed server that does not start
# `plan`'s names of groups, and ours.
_KINDS: Mapping[str, Kind] = {
    "full": "full", "mla": "full", "indexer": "full", "sliding": "sliding", "sliding-mla": "sliding", "state": "mamba",
}  # fmt: skip


def group_of(kind: object, block_size: int, window: int | None) -> CacheGroup:
    """A group of a plan; a kind that the scheduler's replica does not know is BadInput."""
    ours = _KINDS.get(kind if isinstance(kind, str) else "")
    if ours is None:
        raise BadInput(f"the plan has layers of kind {kind!r}: their blocks cannot be replayed yet")
    return CacheGroup(ours, block_size, (window or 0) if ours == "sliding" else 0)


def with_groups(settings: EngineLimits, groups: Sequence[CacheGroup]) -> EngineLimits:
    """The settings with these groups; a single one of full attention is left out, as the default."""
    is_plain = len(groups) == 1 and groups[0].kind == "full" and groups[0].block_size == settings.block_size
    return settings._replace(groups=() if is_plain else tuple(groups))


def planned_settings(said: LaunchSettings, kv: KvPlan) -> EngineLimits:
    """The planned server's scheduler: its blocks, its cache groups and its limits."""
    alike = (
        "max_num_seqs max_num_batched_tokens prefix_caching chunked_prefill long_prefill_token_threshold async_scheduling "
        "watermark reserve_full_isl"
    )
    limits: dict[str, Any] = {name: getattr(said, name) for name in alike.split()}
    limits |= {name: getattr(kv, name) for name in ("num_blocks", "block_size", "max_model_len")}
    settings = EngineLimits(**limits, policy="priority" if said.scheduling_policy == "priority" else "fcfs")
    return with_groups(settings, [group_of(group.kind, group.block_size, group.window) for group in kv.groups])


class Sheet(NamedTuple):
    """The figures beside the card that the step time depends on: those of one GPU, and the number of GPUs."""

    weights_bytes: float
    block_bytes: float
    parameters: float
    routed: float = 0.0  # The parameters of routed experts among them
    experts: Experts | None = None
    cards: int = 1  # Tensor parallel size
    stages: int = 1  # Pipeline parallel size: a step goes through one stage after the other
    is_eager: bool = False


def experts_of(total: float, routed: float, experts: object, per_token: object) -> Experts | None:
    """A mixture's experts, if these counts make one."""
    if not (isinstance(experts, int) and isinstance(per_token, int)):
        return None
    return Experts(experts, per_token, routed / total) if 0 < per_token <= experts and 0 < routed <= total else None


def captured_sizes(settings: EngineLimits, *, is_eager: bool) -> tuple[int, ...]:
    """The sizes of the graphs that pad small steps."""
    drafts = settings.speculation.tokens if settings.speculation is not None else 0
    return () if is_eager else graph_sizes(settings.max_num_seqs * (1 + drafts))


def sheet_time(sheet: Sheet, card: Gpu, settings: EngineLimits) -> StepTime | None:
    """Step times by the card's bandwidth and rate and the model's size; None if no data sheet gives the card's rates."""
    if not card.bandwidth_bytes_per_s or not card.bf16_flops:
        return None
    spread, most = sheet.cards * sheet.stages, settings.max_num_batched_tokens
    weights = sheet.weights_bytes * spread
    # Weights of one byte are taken for 8-bit floats, which are computed as such; four bits are unpacked to sixteen.
    is_fp8 = FP8_BYTES[0] <= weights / max(1.0, sheet.parameters) <= FP8_BYTES[1]
    flops = card.fp8_flops if card.fp8_flops and is_fp8 else card.bf16_flops
    bandwidth = card.bandwidth_bytes_per_s * BANDWIDTH_SHARE
    full = sum(group.kind == "full" for group in settings.groups) if settings.groups else 1
    kv_bytes_per_token = full * sheet.block_bytes * spread / settings.block_size
    # Only the chosen routed experts compute a token, and a step reads only the experts that its tokens reach.
    idle = sheet.routed * (1 - sheet.experts.per_token / sheet.experts.experts) if sheet.experts else 0.0
    tokens = padded(captured_sizes(settings, is_eager=sheet.is_eager), most).astype(np.float64)
    read = sheet.experts.read(tokens) if sheet.experts else np.ones_like(tokens)
    reading = 1e9 * weights * read / sheet.cards / bandwidth
    token_ns = 1e9 * 2 * (sheet.parameters - idle) / sheet.cards / (flops * COMPUTE_SHARE)
    return StepTime(
        base_ns=round(OVERHEAD_NS + reading[-1]),
        token_ns=round(token_ns),
        seq_ns=SEQ_NS,
        ctx_ps=round(1e12 * kv_bytes_per_token / sheet.cards / bandwidth),
        by_tokens=np.rint(OVERHEAD_NS + np.maximum(reading, token_ns * tokens)).astype(np.int64),
    )

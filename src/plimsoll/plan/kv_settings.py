"""What of a launch decides the KV cache, and where vLLM's releases differ in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from plimsoll.domain.version import Version
from plimsoll.errors import BadInput

NEWEST = "0.32.0"


@dataclass(frozen=True)
class KvRules:
    """How one release counts; read in its source."""

    reserves_null_block: bool
    """The start-up check leaves out the block vLLM keeps for itself (0.29.0)."""
    counts_all_batches: bool
    """Windows hold the tokens of every concurrent step, not of one (0.26.0)."""
    tokens_by_concurrency: bool
    """"KV cache size" is max_concurrency x max_model_len (0.21.0), before it was blocks // groups x block size."""
    group_tolerance: float
    """Types are padded to one length when the longest is shorter than this times the shortest."""
    keeps_checkpoints: bool
    """Mamba 2 under prefix caching keeps one more state (0.32.0)."""
    reads_state_dtype: bool
    """The config's word on the element type of a state is heard (0.13.0)."""
    v2_runner: bool
    """The second model runner is the default for every architecture it supports (0.29.0)."""
    hybrid_manager: bool
    """Layers of different types have groups of their own (0.9.1); before, a window was allocated like full attention."""
    chooses_block_by_backend: bool
    """The block size is the smallest that every attention backend takes (0.18.0); before, MLA had 64 or 128."""


@lru_cache(maxsize=64)
def rules_of(version: str) -> KvRules:
    """The rules of a release, given as text; newer ones than we know are taken to be like the newest."""
    try:
        release = Version(version).release
    except ValueError as error:
        raise BadInput(str(error)) from None
    tolerance = 1.5 if release >= (0, 18, 0) else 1.25 if release >= (0, 12, 0) else 1.0
    return KvRules(
        reserves_null_block=release >= (0, 29, 0),
        counts_all_batches=release >= (0, 26, 0),
        tokens_by_concurrency=release >= (0, 21, 0),
        group_tolerance=tolerance,
        keeps_checkpoints=release >= (0, 32, 0),
        reads_state_dtype=release >= (0, 13, 0),
        v2_runner=release >= (0, 29, 0),
        hybrid_manager=release >= (0, 9, 1),
        chooses_block_by_backend=release >= (0, 18, 0),
    )


@dataclass(frozen=True, kw_only=True)
class KvSettings:
    """The launch, as far as the KV cache depends on it. Sizes are those vLLM has resolved, not -1 or auto."""

    max_model_len: int
    auto_fit: bool = False
    """--max-model-len -1: `max_model_len` is the model's own, and vLLM lowers it to what fits."""
    context_limit: int | None = None
    """Upper end of the search for the largest context; None: `max_model_len`, as in vLLM."""
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    prefix_caching: bool = True
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pp_partition: tuple[int, ...] | None = None
    """VLLM_PP_LAYER_PARTITION."""
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    state_mode: str | None = None
    """--mamba-cache-mode; None: "align" under prefix caching, else "none"."""
    num_spec: int = 0
    """Speculative tokens a step."""
    prefill_lookahead: int = 0
    """Tokens a drafter of several modules reads ahead (`num_spec` for multi-layer MTP, else 0 or 1)."""
    mtp_layers: int = 0
    """Layers of the model's own MTP head that draft; each keeps a cache like the last attention layer."""
    hybrid_manager: bool | None = None
    """None: as vLLM decides it: on, but off for chunked local attention and before 0.9.1."""
    num_blocks_override: int | None = None
    v2_runner: bool | None = None
    """None: as the release's default on CUDA."""
    capability: int = 9
    """The GPU's major compute capability, which decides the attention backend and so the default block size."""
    interleaved: bool = False
    """The cache layout has the block outermost (BLHNC, BLNHC): DeepSeek V4, or VLLM_KV_CACHE_LAYOUT."""
    version: str = NEWEST

    @property
    def rules(self) -> KvRules:
        """How the release counts."""
        return rules_of(self.version)

    @property
    def in_flight_tokens(self) -> int:
        """Most tokens that are scheduled and not yet settled."""
        if not self.rules.counts_all_batches:
            return self.max_num_batched_tokens
        batches = self.pp
        if self.async_scheduling:
            v2_runner = self.rules.v2_runner if self.v2_runner is None else self.v2_runner
            if v2_runner:
                batches = self.pp + 1
            elif self.pp <= 1:
                batches = 2
        return batches * self.max_num_batched_tokens

    @property
    def resolved_state_mode(self) -> str:
        """What --mamba-cache-mode comes to."""
        if not self.prefix_caching:
            return "none"
        return self.state_mode if self.state_mode not in (None, "none") else "align"


def layers_by_stage(layers: int, stages: int, partition: tuple[int, ...] | None = None) -> list[range]:
    """The layers of each pipeline stage: the remainder goes to the stages before the last (vLLM's get_pp_indices)."""
    if partition is None:
        sizes = [layers // stages] * stages
        for back in range(2, layers % stages + 2):
            sizes[-back] += 1
    elif len(partition) == stages and sum(partition) == layers:
        sizes = list(partition)
    else:
        said = ",".join(map(str, partition))
        raise BadInput(f"VLLM_PP_LAYER_PARTITION={said} does not spread {layers} layers over {stages} stages")
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

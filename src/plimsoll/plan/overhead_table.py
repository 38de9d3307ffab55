"""The figures of `overhead`, by vLLM release range; where they come from and how far they are off: docs/overhead.md."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.units import MIB


class NonTorch(NamedTuple):
    """Growth of memory outside torch since vLLM's snapshot, in GiB: value, low, high."""

    alone: tuple[float, float, float]
    together: tuple[float, float, float]  # tensor parallel, on cards with a fast link (compute capability 9 and up)
    together_slow_link: tuple[float, float, float]
    staged: tuple[float, float, float]  # pipeline parallel without tensor parallel


class Era(NamedTuple):
    """A range of releases whose profile run allocates alike."""

    name: str
    since: tuple[int, int, int]  # the first release of the range; it ends where the next one begins
    evidence: str
    sampler_bytes: float  # per row and vocabulary entry at the peak of the sampler's dummy run, first model runner
    forward_hidden: float  # hidden-sized tensors alive beside the widest feed-forward of a compiled pass
    non_torch: NonTorch
    activation_band: tuple[float, float]  # share below and above the value that about 90 % of held-out starts stay in
    band_gib: float  # and a constant part of that band
    graph_estimate: str = "none"  # or "opt-in": when asked for; "v1": default, but the second runner returns 0; "both"
    top_k_buffer: bool = False  # the Triton top-k kernel keeps a row of 4-byte logits per multiprocessor
    copies_embedding: bool = False  # a compiled pass holds a second copy of the embedding table
    keeps_moe_workspace: bool = False  # the experts' workspace outlives the pass and adds to the sampler's peak
    consumed_counts_all: bool = False  # whatever the device lost counts, sampler state and input buffers too
    v2_profiles_encoder: bool = False  # the second runner's profile run left the encoder out until 0.27
    has_rows: bool = True  # whether a start of this range was measured


_SNAPSHOT_AFTER_NCCL = NonTorch((0.14, 0.02, 0.25), (0.55, 0.3, 2.2), (0.3, 0.05, 0.9), (0.12, 0.03, 0.3))
_SINCE_18 = NonTorch((0.27, 0.17, 0.39), (2.21, 2.0, 2.33), (0.6, 0.08, 2.2), (0.12, 0.05, 0.3))
_SINCE_20 = NonTorch((0.27, 0.17, 0.4), (2.21, 0.5, 2.6), (0.6, 0.08, 2.2), (0.14, 0.04, 0.4))

ERAS: tuple[Era, ...] = (
    Era("V0", (0, 0, 0), "18 starts of the first engine", 38.0, 4.0,
        NonTorch((0.25, 0.03, 0.75), (0.9, 0.1, 8.0), (0.5, 0.1, 1.2), (0.5, 0.05, 2.0)), (0.25, 0.6), 0.15),
    Era("0.8.0 to 0.9.0", (0, 8, 0), "no start prints a term: the sampler of 0.9 to 0.16, and all memory outside torch counts",
        38.0, 4.0, NonTorch((0.6, 0.2, 1.2), (2.4, 0.8, 4.5), (1.5, 0.5, 3.0), (1.2, 0.4, 2.5)), (0.15, 0.25), 0.3,
        has_rows=False),
    Era("0.9.1 to 0.10", (0, 9, 1), "2 starts on one GPU; NCCL counts, and no start with several GPUs is known", 38.0, 4.0,
        NonTorch((0.1, 0.02, 0.3), (1.6, 0.5, 3.0), (0.8, 0.1, 2.0), (0.8, 0.1, 2.0)), (0.06, 0.12), 0.12),
    Era("0.11 to 0.12", (0, 11, 0), "7 starts", 38.0, 4.0, _SNAPSHOT_AFTER_NCCL, (0.05, 0.08), 0.08, copies_embedding=True),
    Era("0.13 to 0.16", (0, 13, 0), "3 starts, and the sampler of 0.11", 38.0, 4.0, _SNAPSHOT_AFTER_NCCL, (0.05, 0.08), 0.08,
        copies_embedding=True, keeps_moe_workspace=True),
    Era("0.17", (0, 17, 0), "1 start, and the sampler of 0.18 to 0.19", 14.0, 4.0, _SNAPSHOT_AFTER_NCCL, (0.08, 0.1), 0.1,
        top_k_buffer=True, copies_embedding=True, keeps_moe_workspace=True),
    Era("0.18 to 0.19", (0, 18, 0), "20 starts", 14.0, 4.0, _SINCE_18, (0.06, 0.1), 0.08, "opt-in",
        top_k_buffer=True, copies_embedding=True, keeps_moe_workspace=True),
    Era("0.20 to 0.26", (0, 20, 0), "18 starts of our own (0.25.1, H200, one GPU); none with several GPUs", 14.0, 3.5,
        _SINCE_20, (0.1, 0.12), 0.1, "v1", top_k_buffer=True, copies_embedding=True, keeps_moe_workspace=True),
    Era("0.27 to 0.28", (0, 27, 0), "no start prints a term: the tensors of 0.25.1 under the new accounting", 14.0, 3.5,
        _SINCE_20, (0.2, 0.25), 0.35, "v1", top_k_buffer=True, copies_embedding=True, keeps_moe_workspace=True,
        consumed_counts_all=True, v2_profiles_encoder=True, has_rows=False),
    Era("0.29 to 0.32", (0, 29, 0), "no start prints a term: the tensors of 0.25.1 under the new accounting", 14.0, 3.5,
        _SINCE_20, (0.25, 0.3), 0.4, "both", top_k_buffer=True, copies_embedding=True, keeps_moe_workspace=True,
        consumed_counts_all=True, v2_profiles_encoder=True, has_rows=False),
)  # fmt: skip

# Granite's vocabulary is not a multiple of 8 and other matrix kernels are loaded: 0.46 for 0.25 GiB on H100, 0.33 for 0.22
# on H200.
ODD_VOCABULARY_GIB = 0.21

# Two GPUs show 2.07 to 2.11 where four show 2.17 to 2.21 (0.19.0, H100).
TWO_GPUS_LESS_GIB = 0.09

# The first engine profiled one picture or recording per sequence: GiB each, as likely and at most.
V0_ITEM_GIB = (0.035, 0.3)
V0_ITEM_TOKENS = 256

# The second model runner (V2): what its sampler holds per row and vocabulary entry: 16-bit logits and their 32-bit copy.
V2_SAMPLER_BYTES = 6.0
# Its penalty counters, allocated when the model is loaded: 4 B an entry and one bit.
V2_PENALTY_BYTES = 4.125
# Where it is the default: unquantised models of these architectures, then every dense one, then all.
V2_EARLY_DENSE = {(0, 22): frozenset({"Qwen3ForCausalLM"}),
                  (0, 23): frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"})}  # fmt: skip
V2_SINCE_DENSE = (0, 24, 0)
V2_SINCE_ALL = (0, 29, 0)
V2_EARLY_EXPERTS = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})

# CUDA graphs: GiB = fixed + per layer x layers + experts (if any) + quantised (if so), at 51 capture sizes (up to 512).
# Least absolute deviations over the 0.19.0 campaign, by lab.fit_overhead.
GRAPH_ACTUAL = (0.35, 0.0158, 0.304, 0.18)
GRAPH_ESTIMATE = (0.0, 0.02, 0.28, 0.22)
GRAPH_V2 = (0.70, 0.0088, 0.0, 0.0)  # 0.25.1, H200: 4 and 32 layers
GRAPH_BAND_GIB = 0.35
GRAPH_LARGEST_SIZE = 512
GRAPH_LEAST_GIB = 0.4  # four layers took 0.41 on an H200 and were estimated at 0.40

# Multiprocessors by compute capability: rows of the top-k buffer. The largest card of each.
MULTIPROCESSORS = {(7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188}
CUBLAS_WORKSPACE = {True: 32 * MIB, False: 8 * MIB + 128 * 1024}  # torch's own, by whether the card is Hopper or newer

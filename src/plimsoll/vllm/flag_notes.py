"""Notes on flags that the wheels do not give: the replacement, the effect on memory, the numbers that are taken.

Each note names its evidence where that is not the disappearance of the flag itself. `rewrite` is what takes the flag's
place in a command; `VALUES` stands for what followed the old flag. A rewrite is used only where the target release has
the new flag; without one the old flag is simply left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from plimsoll.vllm.versions import Behaviour, Coverage, is_before

VALUES = "*"
_READ = Coverage.CONFIG_CHECKS.first


class Removal(NamedTuple):
    """A flag that a release dropped."""

    why: str
    instead: str | None = None
    rewrite: tuple[str, ...] = ()
    value_until: str = ""  # only the part of each value in front of this is kept
    only: frozenset[str] = frozenset()  # where these are the values that the new flag takes, whatever the old one took


_V0 = "belonged to the first engine (V0), which is gone"

GONE: Mapping[str, Removal] = {
    # Memory and scheduling of the first engine.
    "--swap-space": Removal(
        "preempted requests are recomputed, never swapped to host memory (since V1, 0.8.0)",
        "--kv-offloading-size keeps evicted prefix-cache blocks in host memory, which is the nearest thing",
    ),
    "--preemption-mode": Removal("preemption is always by recomputation now"),
    "--scheduler-delay-factor": Removal(_V0),
    "--num-scheduler-steps": Removal(f"multi-step scheduling {_V0}", "async scheduling is on by default where it can be"),
    "--multi-step-stream-outputs": Removal(f"multi-step scheduling {_V0}"),
    "--use-v2-block-manager": Removal("the second block manager became the only one"),
    "--num-lookahead-slots": Removal("derived from the speculative configuration"),
    "--disable-async-output-proc": Removal(_V0),
    "--max-num-partial-prefills": Removal("the scheduler no longer limits partial prefills", "--long-prefill-token-threshold"),
    "--max-long-partial-prefills": Removal("the scheduler no longer limits partial prefills", "--long-prefill-token-threshold"),
    "--max-paddings": Removal("batches are no longer padded"),
    "--forced-num-gpu-blocks": Removal("renamed", "--num-gpu-blocks-override", ("--num-gpu-blocks-override", VALUES)),
    # CUDA graphs.
    "--max-seq-len-to-capture": Removal(
        "graphs are captured by batch size, not by context length", "--cudagraph-capture-sizes"
    ),
    "--max-context-len-to-capture": Removal("graphs are captured by batch size, not by context length"),
    "--cuda-graph-sizes": Removal("renamed", "--cudagraph-capture-sizes", ("--cudagraph-capture-sizes", VALUES)),
    "-O": Removal("sets the optimisation level only, as -O0 to -O3", "--compilation-config"),
    # Logging.
    "--disable-log-requests": Removal("request logging is off unless --enable-log-requests (0.10.1) asks for it"),
    # KV cache and quantisation.
    "--calculate-kv-scales": Removal("scales come from the checkpoint, or are 1.0"),
    "--quantization-param-path": Removal("KV scales come from the checkpoint"),
    "--override-attention-dtype": Removal("no longer offered; it had an effect on ROCm only"),
    # Models and tokenizers.
    "--task": Removal("split in two", "--runner pooling, with --convert embed or classify to adapt a generative model"),
    "--rope-scaling": Removal(
        "set through the model's configuration", "--hf-overrides", ("--hf-overrides.rope_scaling", VALUES)
    ),
    "--rope-theta": Removal("set through the model's configuration", "--hf-overrides", ("--hf-overrides.rope_theta", VALUES)),
    "--device": Removal("the device is detected"),
    "--override-pooler-config": Removal("renamed", "--pooler-config", ("--pooler-config", VALUES)),
    "--override-neuron-config": Removal("Neuron moved to a plugin of its own", "--additional-config"),
    "--tokenizer-pool-size": Removal("tokenisation no longer runs in a pool"),
    "--tokenizer-pool-type": Removal("tokenisation no longer runs in a pool"),
    "--tokenizer-pool-extra-config": Removal("tokenisation no longer runs in a pool"),
    "--logits-processor-pattern": Removal("logits processors are loaded at start", "--logits-processors"),
    "--use-gpu-for-pooling-score": Removal("no longer a choice"),
    # Distribution.
    "--worker-use-ray": Removal("renamed", "--distributed-executor-backend ray", ("--distributed-executor-backend", "ray")),
    "--engine-use-ray": Removal("the engine runs in a process of its own"),
    "--disable-frontend-multiprocessing": Removal("the engine always runs in a process of its own"),
    "--num-redundant-experts": Removal(
        "moved", "--eplb-config.num_redundant_experts", ("--eplb-config.num_redundant_experts", VALUES)
    ),
    "--eplb-window-size": Removal("moved", "--eplb-config.window_size", ("--eplb-config.window_size", VALUES)),
    "--eplb-step-interval": Removal("moved", "--eplb-config.step_interval", ("--eplb-config.step_interval", VALUES)),
    "--eplb-log-balancedness": Removal("moved", "--eplb-config.log_balancedness", ("--eplb-config.log_balancedness", "true")),
    "--enable-bf16x3-router-gemm": Removal("no longer a choice"),
    # Structured output.
    "--guided-decoding-backend": Removal(
        "moved", "--structured-outputs-config.backend", ("--structured-outputs-config.backend", VALUES), ":"
    ),
    "--guided-decoding-disable-fallback": Removal("the backend either works or the request fails"),
    # Neither is rewritten: the new keys are taken only beside a backend that has them.
    "--guided-decoding-disable-any-whitespace": Removal(
        "moved", "--structured-outputs-config.disable_any_whitespace with backend xgrammar or guidance"
    ),
    "--guided-decoding-disable-additional-properties": Removal(
        "moved", "--structured-outputs-config.disable_additional_properties with backend guidance"
    ),
    "--enable-reasoning": Removal("--reasoning-parser alone switches it on"),
    "--expand-tools-even-if-tool-choice-none": Removal(
        "it is the default now; the opposite has a flag", "--exclude-tools-when-tool-choice-none"
    ),
    "--chat-template-text-format": Removal(
        "renamed", "--chat-template-content-format", ("--chat-template-content-format", VALUES)
    ),
    # LoRA and prompt adapters.
    "--enable-lora-bias": Removal("LoRA biases are no longer supported"),
    "--lora-extra-vocab-size": Removal("adapters no longer add vocabulary"),
    "--long-lora-scaling-factors": Removal("long LoRA is no longer supported"),
    "--qlora-adapter-name-or-path": Removal("adapters are loaded with --lora-modules", "--lora-modules"),
    "--enable-prompt-adapter": Removal("prompt adapters are gone; LoRA stays"),
    "--prompt-adapters": Removal("prompt adapters are gone; LoRA stays"),
    "--max-prompt-adapters": Removal("prompt adapters are gone; LoRA stays"),
    "--max-prompt-adapter-token": Removal("prompt adapters are gone; LoRA stays"),
    # Multimodal.
    "--disable-mm-preprocessor-cache": Removal("renamed", "--mm-processor-cache-gb 0", ("--mm-processor-cache-gb", "0")),
    "--mm-cache-preprocessor": Removal("the cache is on by default", "--mm-processor-cache-gb"),
    "--enable-multimodal-encoder-data-parallel": Removal(
        "renamed", "--mm-encoder-tp-mode data", ("--mm-encoder-tp-mode", "data")
    ),
    "--image-feature-size": Removal("read from the model"),
    "--image-input-shape": Removal("read from the model"),
    "--image-input-type": Removal("read from the model"),
    "--image-token-id": Removal("read from the model"),
    # Mamba.
    "--enable-mamba-fine-grained-prefix-cache": Removal("no longer a choice"),
    # Speculative decoding: one JSON argument took the place of a dozen flags in 0.8.3.
    "--speculative-model": Removal("moved", "--speculative-config.model", ("--speculative-config.model", VALUES)),
    "--num-speculative-tokens": Removal(
        "moved", "--speculative-config.num_speculative_tokens", ("--speculative-config.num_speculative_tokens", VALUES)
    ),
    "--speculative-draft-tensor-parallel-size": Removal(
        "moved", "--speculative-config.draft_tensor_parallel_size", ("--speculative-config.draft_tensor_parallel_size", VALUES)
    ),
    "-spec-draft-tp": Removal(
        "moved", "--speculative-config.draft_tensor_parallel_size", ("--speculative-config.draft_tensor_parallel_size", VALUES)
    ),
    "--speculative-max-model-len": Removal(
        "moved", "--speculative-config.max_model_len", ("--speculative-config.max_model_len", VALUES)
    ),
    "--speculative-model-quantization": Removal(
        "moved", "--speculative-config.quantization", ("--speculative-config.quantization", VALUES)
    ),
    "--ngram-prompt-lookup-max": Removal(
        "moved", "--speculative-config.prompt_lookup_max", ("--speculative-config.prompt_lookup_max", VALUES)
    ),
    "--ngram-prompt-lookup-min": Removal(
        "moved", "--speculative-config.prompt_lookup_min", ("--speculative-config.prompt_lookup_min", VALUES)
    ),
    "--speculative-disable-by-batch-size": Removal("no longer offered"),
    "--speculative-disable-mqa-scorer": Removal(f"the scorer {_V0}"),
    "--spec-decoding-acceptance-method": Removal(f"the acceptance samplers {_V0}", "--speculative-config"),
    "--typical-acceptance-sampler-posterior-threshold": Removal(f"that sampler {_V0}"),
    "--typical-acceptance-sampler-posterior-alpha": Removal(f"that sampler {_V0}"),
    "--disable-logprobs-during-spec-decoding": Removal("logprobs follow the request"),
}

# Of AttentionBackendEnum in v1/attention/backends/registry.py, those that 0.25.1 and 0.32.0 both have. XFORMERS and the names
# that end in _VLLM_V1 are in neither.
_BACKENDS = frozenset(
    "CPU_ATTN CUTLASS_MLA FLASHINFER FLASHINFER_MLA FLASHINFER_MLA_SPARSE FLASHMLA FLASHMLA_SPARSE FLASH_ATTN "
    "FLASH_ATTN_DIFFKV FLASH_ATTN_MLA FLEX_ATTENTION ROCM_AITER_FA ROCM_AITER_MLA ROCM_AITER_MLA_SPARSE ROCM_AITER_TRITON_MLA "
    "ROCM_AITER_UNIFIED_ATTN ROCM_ATTN TORCH_SDPA TRITON_ATTN TRITON_MLA".split()
)

GONE_VARIABLES: Mapping[str, Removal] = {
    "VLLM_ATTENTION_BACKEND": Removal(
        "the variable is no longer read", "--attention-backend", ("--attention-backend", VALUES), only=_BACKENDS
    ),
    "VLLM_FLASH_ATTN_VERSION": Removal(
        "the variable is no longer read",
        "--attention-config.flash_attn_version",
        ("--attention-config.flash_attn_version", VALUES),
    ),
    "VLLM_ALL2ALL_BACKEND": Removal("the variable is no longer read", "--all2all-backend", ("--all2all-backend", VALUES)),
    "VLLM_USE_V1": Removal("V1 is the only engine"),
    "VLLM_MM_INPUT_CACHE_GIB": Removal("renamed", "--mm-processor-cache-gb", ("--mm-processor-cache-gb", VALUES)),
    "VLLM_TORCH_PROFILER_DIR": Removal(
        "moved to the profiler's configuration",
        "--profiler-config.torch_profiler_dir with --profiler-config.profiler torch",
        ("--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", VALUES),
    ),
    "VLLM_RPC_TIMEOUT": Removal("the variable is no longer read"),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": Removal(
        "the variable is no longer read", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS bounds one step of the model"
    ),
    "VLLM_USE_RAY_COMPILED_DAG": Removal("the variable is no longer read"),
    "VLLM_USE_RAY_SPMD_WORKER": Removal("the variable is no longer read"),
    "VLLM_USE_TRITON_FLASH_ATTN": Removal("chosen by the attention backend", "--attention-backend"),
    "VLLM_FUSED_MOE_CHUNK_SIZE": Removal("the variable is no longer read"),
    "VLLM_NVFP4_GEMM_BACKEND": Removal("moved", "--linear-backend"),
    "VLLM_FLASHINFER_MOE_BACKEND": Removal("moved", "--moe-backend"),
    "VLLM_USE_TRTLLM_ATTENTION": Removal("moved", "--attention-config"),
    "VLLM_SLEEP_WHEN_IDLE": Removal("the variable is no longer read"),
}

# Flags that article after article passes on, and that no release ever had.
FOLKLORE: Mapping[str, str] = {
    "--max-num-on-the-fly-batches": "what it is said to do, --max-num-seqs and --max-num-batched-tokens do",
    "--enable-memory-compaction": "blocks of the KV cache are equal in size and never need compaction",
    "--max-batch-size": "--max-num-seqs limits sequences at once, --max-num-batched-tokens the tokens of one step",
    "--gpu-memory-limit": "--gpu-memory-utilization is a share of the card, --kv-cache-memory-bytes a size",
    "--num-gpu-blocks": "--num-gpu-blocks-override",
    "--tensor-parallel": "--tensor-parallel-size",
    "--max-tokens": "the limit on output belongs to the request; --max-model-len limits prompt and output together",
    "--context-length": "--max-model-len",
}


class Implicit(NamedTuple):
    """A switch that says what is so anyway, from a release on."""

    since: str
    why: str


# A bare switch whose effect is the default: chunked prefill (None means on) is not visible in the parser's own default.
IMPLIED: Mapping[str, Implicit] = {
    "--enable-chunked-prefill": Implicit(Behaviour.V1_ENGINE.since, "on by default for generating models since V1 (0.8.0)"),
    # Until 0.25.1 hybrid (Mamba) models had it off by default, so the switch was not idle for them.
    "--enable-prefix-caching": Implicit(
        Behaviour.HYBRID_PREFIX_CACHING.since, "on by default where supported; for hybrid models too since 0.26.0"
    ),
}

# Taken by the parser and used by nothing. 0.32.0 says so itself when the flag is given.
IDLE: Mapping[str, Implicit] = {"--disable-cascade-attn": Implicit(_READ, "cascade attention is gone; vLLM ignores the flag")}


class Requirement(NamedTuple):
    """The flag without which another does nothing."""

    flag: str
    since: str | None = None  # the release whose source was read; None: it is so in every release that has both


# LoRA's settings are handed on only where `enable_lora` is set (EngineArgs.create_engine_config).
_OF_LORA = """--enable-lora-bias --enable-mixed-moe-lora-format --enable-moe-shared-loras --enable-tower-connector-lora
 --fully-sharded-loras --lora-dtype --lora-extra-vocab-size --lora-target-modules --max-cpu-loras --max-lora-cls-labels
 --max-lora-rank --max-loras --specialize-active-lora""".split()

NEEDS: Mapping[str, Requirement] = {
    **dict.fromkeys(_OF_LORA, Requirement("--enable-lora")),
    "--kv-cache-metrics-sample": Requirement("--kv-cache-metrics", _READ),
    "--kv-offloading-backend": Requirement("--kv-offloading-size", _READ),
    "--max-log-len": Requirement("--enable-log-requests", _READ),
}

# Names that a release has itself, where a plugin can register more and the parser takes any text. 0.32.0 refuses another
# name of --quantization once it has read the model (ModelConfig._verify_quantization), unless the model's files overrule it.
OPEN_LISTS: Mapping[tuple[str, str], frozenset[str]] = {
    ("--quantization", _READ): frozenset(
        "auto_awq auto_gptq awq awq_marlin compressed-tensors deepseek_v4_fp8 experts_int8 fbgemm_fp8 fp8 fp8_per_block"
        " fp8_per_channel fp8_per_tensor fp_quant gpt_oss_mxfp4 gptq gptq_marlin humming inc int8_per_channel_weight_only"
        " modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 mxfp8 nvfp4_per_token online quark"
        " torchao".split()
    )
}

# What a flag does to memory: shown beside changed defaults and used by the planner's advice.
MEMORY: Mapping[str, str] = {
    "--gpu-memory-utilization": "sets the budget: ceil(total x value), of which the KV cache gets what is left",
    "--kv-cache-memory-bytes": "fixes the KV cache and skips profiling; the free-memory check still uses the utilisation",
    "--max-model-len": "one request of this length must fit the KV cache, or the start is refused",
    "--max-num-seqs": "sizes the sampler's buffers (sequences x vocabulary) and the CUDA graphs",
    "--max-num-batched-tokens": "the profiled batch: more tokens, more activation memory, fewer KV blocks",
    "--block-size": "tokens per block; the last block of each request is part empty",
    "--num-gpu-blocks-override": "sets the block count regardless of memory",
    "--kv-cache-dtype": "bytes per token: fp8 halves the KV cache of a 16-bit model",
    "--cpu-offload-gb": "moves weights to host memory",
    "--kv-offloading-size": "host memory for evicted prefix-cache blocks",
    "--enforce-eager": "no CUDA graphs: their memory goes to the KV cache",
    "--cudagraph-capture-sizes": "more and larger sizes, more graph memory",
    "--max-cudagraph-capture-size": "more and larger sizes, more graph memory",
    "--tensor-parallel-size": "divides weights and KV heads over GPUs",
    "--pipeline-parallel-size": "divides layers over GPUs",
    "--data-parallel-size": "each rank has its own KV cache",
    "--decode-context-parallel-size": "divides the KV cache's tokens over GPUs",
    "--enable-expert-parallel": "divides experts by count instead of by slice",
    "--enable-sleep-mode": "weights and KV come from another allocator that can give them back",
    "--enable-cumem-allocator": "weights and KV come from another allocator",
    "--max-loras": "adapter slots are allocated at load",
    "--max-lora-rank": "adapter slots are allocated at load",
    "--limit-mm-per-prompt": "sets the encoder batch that is profiled",
    "--skip-mm-profiling": "encoder memory is not set aside",
    "--mm-processor-cache-gb": "host memory, once per API server and engine",
    "--mm-ipc-gpu-memory-gb": "taken from the KV cache",
    "--max-logprobs": "large values need tokens x vocabulary at once",
    "--enable-prefix-caching": "uses blocks that are free anyway; costs no memory",
    "--enable-chunked-prefill": "a step never holds more than --max-num-batched-tokens",
    "--scheduler-reserve-full-isl": "a prompt is admitted only when all of it fits",
    "--watermark": "keeps a share of blocks free when admitting",
    "--async-scheduling": "two batches in flight: more blocks for sliding windows",
    "--disable-hybrid-kv-cache-manager": "sliding-window layers take as much as full ones",
    "--swap-space": "took pinned host memory for swapped blocks",
    "--speculative-config": "a draft model takes weights and KV of its own",
    "--performance-mode": "throughput doubles the default batch limits",
}


class NumberRange(NamedTuple):
    """The numbers that vLLM's configuration takes for a flag, once its parser took the word."""

    least: float
    most: float = math.inf
    above: bool = False  # the least itself is refused
    below: bool = False  # the most itself is refused
    since: str | None = None  # the release whose source was read; None: it is so in every release
    unless: frozenset[str] = frozenset()  # beside these nobody looks at the number

    def problem(self, value: str) -> str | None:
        """Why the number is refused; None if it is not, or is no number."""
        try:
            number = float(value)
        except ValueError:
            return None
        low = number > self.least if self.above else number >= self.least
        high = number < self.most if self.below else number <= self.most
        if low and high:
            return None
        ends = [f"{'above' if self.above else 'at least'} {self.least:g}"]
        ends += [f"{'below' if self.below else 'at most'} {self.most:g}"] if self.most < math.inf else []
        return f"{value!r} is not {' and '.join(ends)}"


# The limits in vLLM's configuration classes; earlier releases had some of them and were not read for it.
_FROM_ONE = NumberRange(1, since=_READ)
RANGES: Mapping[str, NumberRange] = {
    "--gpu-memory-utilization": NumberRange(0, 1, above=True),
    # No socket has another number. With these the server listens elsewhere or not at all.
    "--port": NumberRange(0, 65535, unless=frozenset({"--uds", "--headless", "--grpc"})),
    "--tensor-parallel-size": _FROM_ONE,
    "--pipeline-parallel-size": _FROM_ONE,
    "--decode-context-parallel-size": _FROM_ONE,
    "--max-num-seqs": _FROM_ONE,
    "--max-num-batched-tokens": _FROM_ONE,
    "--block-size": _FROM_ONE,
    "--stream-interval": _FROM_ONE,
    "--cpu-offload-gb": NumberRange(0, since=_READ),
    "--watermark": NumberRange(0, 1, below=True, since=_READ),
}


_Note = TypeVar("_Note", Implicit, Requirement, NumberRange)


def in_force(table: Mapping[str, _Note], flag: str, release: str) -> _Note | None:
    """The flag's note in one of these tables; None where there is none, or it begins with a later release."""
    note = table.get(flag)
    return None if note is None or (note.since is not None and is_before(release, note.since)) else note

"""The flags of a launch that decide its memory, as values, with the defaults of its vLLM release."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import Argument, CommandLine
from plimsoll.models.shape import FAMILY_TABLE, LayerKind, ModelShape
from plimsoll.units import GIB, parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.vllm.flags import UNKNOWN_DEFAULT, flags_of
from plimsoll.vllm.versions import Behaviour, Coverage

AUTO_FIT = -1  # --max-model-len auto
V0_CHUNKS_ABOVE = 32768
SECOND_ENGINE_SINCE = (8, 0)  # compute capability, until 0.10
# Tokens of the largest picture or film of models that attend to it in both directions, so that it must fit one batch.
WHOLE_ITEM_TOKENS = {"gemma4": 32 * (70 + 2 + 6)}
# Where the second model runner is the default: unquantised models of these architectures, then every dense one, then all.
V2_EARLY_DENSE = {
    Behaviour.V2_RUNNER_QWEN3: {"Qwen3ForCausalLM"}, Behaviour.V2_RUNNER_LLAMA: {"LlamaForCausalLM", "MistralForCausalLM"}
}  # fmt: skip
V2_EARLY_EXPERTS = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})
_READS: Mapping[str, list[str]] = FAMILY_TABLE["encoder_inputs"]["rows"]


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU that is planned for."""

    name: str
    total_bytes: int
    low_bytes: int
    high_bytes: int
    compute_capability: tuple[int, int] | None = None
    used_bytes: int = 0  # by others, before vLLM starts
    shares_host_memory: bool = False  # GB10 and Jetson: the host's own processes use the same memory
    is_amd: bool = False
    is_named: bool = True  # False: known by its size alone


class Flags:
    """Looks values up by flag name: the command's last value of it, else the release's default."""

    def __init__(self, line: CommandLine, release: str) -> None:
        self.release = release
        self.given: dict[str, Argument] = {}
        self.dotted: dict[str, dict[str, str]] = {}
        for argument in line.arguments:
            if argument.row is None:
                continue
            if argument.path:
                self.dotted.setdefault(argument.row.name, {})[argument.path] = argument.values[-1] if argument.values else ""
            else:
                self.given[argument.row.name] = argument

    def text(self, name: str) -> str | None:
        """The value as typed; None where there is none, or where it is an unresolved variable or a command's answer."""
        argument = self.given.get(name)
        value = argument.values[-1] if argument is not None and argument.values else ""
        return None if value in ("", "None") or re.search(r"[$`]", value) else value

    def default(self, name: str) -> Any:
        """The release's own value; None where it has none, or none that is known."""
        row = flags_of(self.release).get(name)
        return None if row is None or row.default is UNKNOWN_DEFAULT else row.default

    def integer(self, name: str) -> int | None:
        """The value as a whole number, in vLLM's notation (8k, 1M)."""
        if (text := self.text(name)) is not None:
            return parse_vllm_integer(text)
        default = self.default(name)
        return default if isinstance(default, int) and not isinstance(default, bool) else None

    def at_least_one(self, name: str) -> int:
        """A whole number of at least 1; 1 where there is no value."""
        given = self.integer(name)
        if given is not None and given < 1:
            raise BadInput(f"{name} must be at least 1, not {given}")
        return given or 1

    def number(self, name: str) -> float | None:
        """The value as a fraction."""
        text = self.text(name)
        if text is None:
            default = self.default(name)
            return float(default) if isinstance(default, int | float) else None
        try:
            return float(text)
        except ValueError:
            raise BadInput(f"{name} {text!r} is not a number") from None

    def word(self, name: str) -> str | None:
        """The value as typed, else the release's own where it is a text."""
        default = self.default(name)
        return self.text(name) or (default if isinstance(default, str) and default else None)

    def switch(self, name: str) -> bool | None:
        """True if the switch is on; None where neither the command nor the release's default says."""
        argument = self.given.get(name)
        if argument is None:
            default = self.default(name)
            return default if isinstance(default, bool) else None
        if argument.values:
            return argument.values[-1].lower() not in ("false", "0", "no")
        return not argument.is_negated

    def mapping(self, name: str) -> dict[str, Any]:
        """The value as a JSON object, with the dotted flags laid over it; empty where there is no value."""
        text = self.text(name)
        merged: dict[str, Any] = {}
        if text is not None:
            try:
                loaded = json.loads(text)
            except ValueError:
                raise BadInput(f"{name} is not JSON: {text[:60]!r}") from None
            merged.update(loaded if isinstance(loaded, dict) else {})
        for path, value in self.dotted.get(name, {}).items():
            try:
                merged[path] = json.loads(value)
            except ValueError:
                merged[path] = value
        return merged


def _flag(name: str, read: Callable[[Flags, str], Any], *, default: Any) -> Any:
    """A setting that one flag alone decides; the default where neither the command nor its release says."""
    return field(default=default, metadata={"flag": name, "read": read})


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force for one launch of one model on one card; sizes in bytes, lengths in tokens.

    Weights, KV cache and overhead all read this class. Defaults are those of vLLM 0.32.0 for Llama on an H100.
    """

    release: str = Coverage.KV_RULES.last
    utilization: float = 0.92
    max_model_len: int = 8192  # AUTO_FIT where vLLM chooses: it lowers `model_context` to what fits
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    tensor_parallel: int = _flag("--tensor-parallel-size", Flags.at_least_one, default=1)
    pipeline_parallel: int = _flag("--pipeline-parallel-size", Flags.at_least_one, default=1)
    data_parallel: int = _flag("--data-parallel-size", Flags.at_least_one, default=1)
    decode_context_parallel: int = _flag("--decode-context-parallel-size", Flags.at_least_one, default=1)
    expert_parallel: bool = _flag("--enable-expert-parallel", Flags.switch, default=False)
    kv_cache_memory_bytes: int | None = _flag("--kv-cache-memory-bytes", Flags.integer, default=None)
    kv_cache_dtype: str = _flag("--kv-cache-dtype", Flags.word, default="auto")
    dtype: str = _flag("--dtype", Flags.word, default="auto")
    quantization: str | None = _flag("--quantization", Flags.text, default=None)
    block_size: int | None = None
    num_gpu_blocks_override: int | None = _flag("--num-gpu-blocks-override", Flags.integer, default=None)
    enforce_eager: bool = False
    prefix_caching: bool = True
    async_scheduling: bool = True
    hybrid_manager: bool | None = None  # None: as vLLM decides it: on, but off for chunked local attention and before 0.9.1
    cpu_offload_gib: float = 0.0
    max_loras: int = 0  # 0: LoRA is off
    max_lora_rank: int = _flag("--max-lora-rank", Flags.integer, default=16)
    max_cpu_loras: int = _flag("--max-cpu-loras", Flags.integer, default=0)  # 0: as many as on the GPU
    speculative: Mapping[str, Any] | None = None
    kv_connector: str | None = None
    pipeline_partition: tuple[int, ...] | None = None  # layers of each stage, VLLM_PP_LAYER_PARTITION
    estimates_graphs: bool = True
    v2_runner: bool = True
    skips_mm_profiling: bool = _flag("--skip-mm-profiling", Flags.switch, default=False)
    reads_videos: bool = True  # False: --limit-mm-per-prompt allows none
    language_model_only: bool = False  # also where every kind of input that an encoder reads has a limit of 0
    encoders_whole: bool = False  # --mm-encoder-tp-mode data: every rank has the whole encoder
    mamba_cache_dtype: str = _flag("--mamba-cache-dtype", Flags.word, default="auto")
    mamba_ssm_cache_dtype: str = _flag("--mamba-ssm-cache-dtype", Flags.word, default="auto")
    mamba_cache_mode: str = _flag("--mamba-cache-mode", Flags.word, default="none")
    # The scheduler's settings; memory does not depend on them, `simulate` does.
    chunked_prefill: bool = True
    scheduling_policy: str = _flag("--scheduling-policy", Flags.word, default="fcfs")
    long_prefill_token_threshold: int = _flag("--long-prefill-token-threshold", Flags.integer, default=0)
    watermark: float = _flag("--watermark", Flags.number, default=0.0)
    reserve_full_isl: bool = _flag("--scheduler-reserve-full-isl", Flags.switch, default=True)
    kv_offloading_gib: float | None = _flag("--kv-offloading-size", Flags.number, default=None)
    max_num_queued_reqs: int | None = _flag("--max-num-queued-reqs", Flags.integer, default=None)
    max_num_queued_tokens: int | None = _flag("--max-num-queued-tokens", Flags.integer, default=None)
    # Facts of the model and the card that vLLM's own choices depend on.
    model_context: int = 8192  # the model's own longest
    auto_dtype: str = "bfloat16"  # the type that --dtype auto chooses
    interleaved: bool = False  # a cache layout with the block outermost (BLHNC, BLNHC): DeepSeek V4
    gpu_bytes: int = 80 * GIB
    compute_capability: tuple[int, int] | None = None
    shares_host_memory: bool = False
    is_amd: bool = False
    batch_by_size: bool = False  # the batch is the default of a card that is known by its size alone
    full_graphs: bool = True  # CUDA graphs of whole decode steps: off with --enforce-eager and by `cudagraph_mode`
    own_build: bool = False  # the version or the image names a build with CUDA 12, or one that is not vLLM's own
    first_engine: bool = False  # vLLM before 0.8, and until 0.10 on cards and with settings that the second engine refused

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def auto_fit(self) -> bool:
        """True if vLLM chooses the context: --max-model-len auto, or -1."""
        return self.max_model_len == AUTO_FIT

    @property
    def context(self) -> int:
        """The longest request that the command asks for."""
        return self.model_context if self.auto_fit else self.max_model_len

    @property
    def model_dtype(self) -> str:
        """The type of activations and of an unquantised cache: as given, else the 16-bit type that vLLM picks."""
        given = {"half": "float16", "float": "float32"}.get(self.dtype, self.dtype)
        return self.auto_dtype if given == "auto" else given

    @property
    def has_fixed_cache(self) -> bool:
        """True if the command sets the size of the cache, which vLLM then allocates whether it fits or not."""
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None

    @property
    def drafts_with_own_head(self) -> bool:
        """True if the model's own multi-token head drafts."""
        method = (self.speculative or {}).get("method")
        return isinstance(method, str) and "mtp" in method

    @property
    def speculative_tokens(self) -> int:
        number = (self.speculative or {}).get("num_speculative_tokens", 0)
        return number if isinstance(number, int) else 0


def read_settings(flags: Flags, environment: Mapping[str, str], shape: ModelShape, card: Card) -> Settings:
    """The values in force, as vLLM of that release would choose them on that card."""
    release = flags.release
    # Until 0.10 the second engine (V1) refused cards before Ampere, and vLLM fell back to the first.
    is_v1 = Behaviour.V1_ENGINE.is_in(release)
    if is_v1 and not Behaviour.V0_GONE.is_in(release):
        too_old = card.compute_capability is not None and card.compute_capability < SECOND_ENGINE_SINCE
        is_v1 = environment.get("VLLM_USE_V1", "0" if too_old else "1") != "0"
    typed_context = flags.text("--max-model-len")
    context = shape.default_context if typed_context is None else parse_vllm_integer_or_auto(typed_context)
    if context < 1 and context != AUTO_FIT:
        raise BadInput(f"--max-model-len must be at least 1 (or auto), not {context}")
    utilization = flags.number("--gpu-memory-utilization")
    if utilization is None or not 0 < utilization <= 1:
        raise BadInput(f"--gpu-memory-utilization must lie above 0 and at most at 1, not {utilization}")
    offloaded = flags.number("--cpu-offload-gb") or 0.0
    if not 0 <= offloaded < 1e6:
        raise BadInput(f"--cpu-offload-gb must be a size in GiB, not {offloaded}")
    chunked = flags.switch("--enable-chunked-prefill")
    sequences, tokens = _batch(flags, card, shape, context, is_v1=is_v1, chunked=chunked)
    transfer, limits = flags.mapping("--kv-transfer-config"), flags.mapping("--limit-mm-per-prompt")
    graphs = str(flags.mapping("--compilation-config").get("cudagraph_mode", "FULL_AND_PIECEWISE")).upper()
    eager = graphs == "NONE"
    prefix_caching, runs_ahead = flags.switch("--enable-prefix-caching"), flags.switch("--async-scheduling")
    runner = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    estimate = environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    partition = environment.get("VLLM_PP_LAYER_PARTITION")
    try:
        stages = tuple(int(part) for part in partition.split(",")) if partition else None
    except ValueError:
        raise BadInput(f"VLLM_PP_LAYER_PARTITION={partition!r} is not a list of layer counts") from None
    # vLLM does not load an encoder if every kind of input it reads has a limit of 0.
    kinds: list[list[str]] = [
        _READS.get(f"{shape.model_type} {tower.what}", _READS.get(tower.what, [tower.what])) for tower in shape.towers
    ]
    no_inputs = bool(kinds) and all(limit_of(limits, kind) == 0 for each in kinds for kind in each)
    text_alone = Behaviour.UNREAD_TOWERS.is_in(release) and no_inputs
    rows = [(each, each.metadata["read"](flags, each.metadata["flag"])) for each in fields(Settings) if each.metadata]
    of_one_flag: dict[str, Any] = {each.name: each.default if value is None else value for each, value in rows}
    return Settings(
        **of_one_flag,
        release=release,
        utilization=utilization,
        max_model_len=context,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        block_size=flags.at_least_one("--block-size") if flags.text("--block-size") else None,
        enforce_eager=bool(flags.switch("--enforce-eager")) or eager,
        prefix_caching=is_v1 and caches_prefixes_by_default(shape, release) if prefix_caching is None else prefix_caching,
        async_scheduling=Behaviour.ASYNC_SCHEDULING.is_in(release) if runs_ahead is None else runs_ahead,
        hybrid_manager=False if flags.switch("--disable-hybrid-kv-cache-manager") else None,
        cpu_offload_gib=offloaded,
        max_loras=flags.at_least_one("--max-loras") if flags.switch("--enable-lora") else 0,
        speculative=flags.mapping("--speculative-config") or None,
        kv_connector=str(transfer["kv_connector"]) if "kv_connector" in transfer else None,
        pipeline_partition=stages,
        estimates_graphs=(estimate == "1") if estimate is not None else Behaviour.GRAPH_ESTIMATE.is_in(release),
        v2_runner=v2_by_default(release, shape) if runner not in ("0", "1") else runner == "1",
        reads_videos=limit_of(limits, "video") != 0,
        language_model_only=bool(flags.switch("--language-model-only")) or text_alone,
        encoders_whole=flags.text("--mm-encoder-tp-mode") == "data",
        chunked_prefill=chunked is not False,
        model_context=shape.max_context,
        auto_dtype=auto_dtype_of(shape),
        interleaved=LayerKind.MLA_COMPRESSED in shape.kinds,
        gpu_bytes=card.total_bytes,
        compute_capability=card.compute_capability,
        shares_host_memory=card.shares_host_memory,
        is_amd=card.is_amd,
        batch_by_size=not card.is_named and flags.text("--max-num-seqs") is None,
        full_graphs=not (eager or flags.switch("--enforce-eager")) and "FULL" in graphs,
        first_engine=not is_v1,
    )


def auto_dtype_of(shape: ModelShape) -> str:
    """The 16-bit type that vLLM picks for a checkpoint without --dtype."""
    return "bfloat16" if shape.dtype in (None, "bfloat16", "float32") else shape.dtype


def v2_by_default(release: str, shape: ModelShape) -> bool:  # config/vllm.py
    if Behaviour.V2_RUNNER_ALL.is_in(release):
        return True
    architectures = set(shape.architectures)
    if not Behaviour.V2_RUNNER_DENSE.is_in(release):
        early = set().union(*(names for change, names in V2_EARLY_DENSE.items() if change.is_in(release)))
        is_taken = shape.quantization is None or Behaviour.V2_RUNNER_QUANTISED.is_in(release)
        return bool(architectures & early) and shape.moe is None and is_taken
    if any(layer.kind.keeps_state for layer in shape.layers):
        return False
    return shape.moe is None or bool(architectures & V2_EARLY_EXPERTS)


def caches_prefixes_by_default(shape: ModelShape, release: str) -> bool:
    """True if the second engine (V1) turns prefix caching on for this model when no flag decides it."""
    if any(kind.keeps_state for kind in shape.kinds):
        is_hybrid = any(kind.keeps_tokens for kind in shape.kinds)  # attention-free models: off in every release
        return is_hybrid and Behaviour.HYBRID_PREFIX_CACHING.is_in(release)
    return not shape.is_encoder_decoder and LayerKind.ENCODER not in shape.kinds


def _batch(flags: Flags, card: Card, shape: ModelShape, context: int, *, is_v1: bool, chunked: bool | None) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens, with each other's limits applied as vLLM applies them."""
    given, tokens = flags.integer("--max-num-seqs"), flags.integer("--max-num-batched-tokens")
    told = 0 if card.shares_host_memory else card.total_bytes  # NVML does not tell the total of GB10 and Jetson
    limits = batch_limits(flags.release, card.name, told) if is_v1 else None
    if limits is None:  # the first engine: a batch holds the longest prompt unless prompts are chunked, on by itself above 32k
        is_chunked = context > V0_CHUNKS_ABOVE if chunked is None else chunked
        limits = 256, 2048 if is_chunked else max(context, 2048)
    doubled = 2 if flags.text("--performance-mode") == "throughput" else 1
    sequences = limits[0] * doubled if given is None else given
    if tokens is None:
        tokens = limits[1] * doubled
        if is_v1 and chunked is False:
            tokens = max(context, tokens)
        if Behaviour.MM_ITEM_IN_ONE_BATCH.is_in(flags.release):
            tokens = max(tokens, whole_item_tokens(shape))
        if is_v1 and context > 0:
            tokens = min(tokens, sequences * context)
    if given is None:
        sequences = min(sequences, tokens)
    for name, value in (("--max-num-seqs", sequences), ("--max-num-batched-tokens", tokens)):
        if value < 1:
            raise BadInput(f"{name} must be at least 1, not {value}")
    if tokens < sequences:
        raise BadInput(f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {sequences}: vLLM refuses it")
    return sequences, tokens


def limit_of(limits: Mapping[str, Any], kind: str) -> object:
    """The limit of one kind of input: a number, or an object (or a dotted flag) that holds a count."""
    given = limits.get(kind, limits.get(f"{kind}.count"))
    return given.get("count") if isinstance(given, dict) else given


def whole_item_tokens(shape: ModelShape) -> int:
    """The tokens of the largest picture or film that must fit one batch; 0 where a batch may hold a part of one."""
    return WHOLE_ITEM_TOKENS.get(shape.model_type, 0) if shape.reads_items_whole else 0


SMALLER_CARD = (256, 2048)  # sequences and tokens by default on cards below 70 GiB, A100s and those whose total is not told


def batch_limits(release: str, gpu_name: str, gpu_bytes: int) -> tuple[int, int] | None:
    """max_num_seqs and max_num_batched_tokens of `vllm serve` under the second engine (V1), before the context is looked at;
    None for releases that ran the first one by default.

    Read in `engine/arg_utils.py` of each release (`get_batch_defaults` and its forerunners).
    """
    if not Behaviour.V1_ENGINE.is_in(release):
        return None
    name = gpu_name.lower()
    if Behaviour.LARGEST_BATCH.is_in(release) and gpu_bytes >= 160 * GIB:
        return 1024, 16384
    if Behaviour.BATCH_BY_MEMORY.is_in(release):
        is_large = gpu_bytes >= 70 * GIB and not (Behaviour.A100_BATCH.is_in(release) and "a100" in name)
    else:
        is_large = "h100" in name or "h200" in name
    if is_large:
        return 1024, 8192
    return 256 if Behaviour.FEWER_SEQUENCES.is_in(release) else 1024, 2048

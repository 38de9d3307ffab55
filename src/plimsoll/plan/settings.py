"""The flags of a launch that decide its memory, as values, with the defaults of its vLLM release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import Argument, CommandLine
from plimsoll.models.shape import LayerKind, ModelShape
from plimsoll.plan.overhead import v2_by_default
from plimsoll.units import parse_vllm_integer, parse_vllm_integer_or_auto
from plimsoll.vllm.defaults import batch_limits, batch_limits_v0
from plimsoll.vllm.flags import UNKNOWN_DEFAULT, flags_of
from plimsoll.vllm.versions import Behaviour

AUTO_FIT = -1  # --max-model-len auto
V0_CHUNKS_ABOVE = 32768
# What an encoder reads, by the names that vLLM 0.32.0 marks it with.
_BY_TOWER = {"vision": ("image", "video"), "audio": ("audio",)}
_INPUTS = {
    **{(name, "vision"): ("image",) for name in ("gemma3", "gemma3n", "llama4", "llava", "llava_next", "mistral3", "pixtral")},
    ("kimi_vl", "vision"): ("image",),
    ("kimi_k25", "vision"): ("vision_chunk",),
}


class Settings(NamedTuple):
    """What the planner needs of a command; sizes in bytes, lengths in tokens."""

    release: str
    utilization: float
    max_model_len: int  # AUTO_FIT where vLLM is to choose
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    decode_context_parallel: int = 1
    expert_parallel: bool = False
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool = True
    async_scheduling: bool = True
    hybrid_manager: bool = True
    cpu_offload_gib: float = 0.0
    max_loras: int = 0  # 0: LoRA is off
    max_lora_rank: int = 16
    max_cpu_loras: int = 0  # 0: as many as on the GPU
    speculative: Mapping[str, Any] | None = None
    kv_connector: str | None = None
    pipeline_partition: tuple[int, ...] | None = None
    estimates_graphs: bool = True
    v2_runner: bool = True
    skips_mm_profiling: bool = False
    language_model_only: bool = False  # also where every kind of input that an encoder reads has a limit of 0
    encoders_whole: bool = False  # --mm-encoder-tp-mode data: every rank has the whole encoder
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_cache_mode: str = "none"
    # What the scheduler is told; memory does not depend on it, `simulate` does.
    chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    reserve_full_isl: bool = True

    @property
    def gpus(self) -> int:
        """How many GPUs the command needs."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def has_fixed_cache(self) -> bool:
        """Whether somebody set the size of the cache, which vLLM then allocates whether it fits or not."""
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None

    @property
    def drafts_with_own_head(self) -> bool:
        """Whether the model's own multi-token head drafts."""
        method = (self.speculative or {}).get("method")
        return isinstance(method, str) and "mtp" in method

    @property
    def speculative_tokens(self) -> int:
        """Tokens drafted ahead in each step."""
        number = (self.speculative or {}).get("num_speculative_tokens", 0)
        return number if isinstance(number, int) else 0


class Flags:
    """Looks values up by flag name: the command's last word on it, else the release's default."""

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
        argument = self.given.get(name)
        if argument is None or not argument.values or argument.values[-1] in ("", "None") or "$" in argument.values[-1]:
            return None
        return argument.values[-1]

    def default(self, name: str) -> Any:
        row = flags_of(self.release).get(name)
        return None if row is None or row.default is UNKNOWN_DEFAULT else row.default

    def integer(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            default = self.default(name)
            return default if isinstance(default, int) and not isinstance(default, bool) else None
        return parse_vllm_integer(text)

    def number(self, name: str) -> float | None:
        text = self.text(name)
        if text is None:
            default = self.default(name)
            return float(default) if isinstance(default, int | float) else None
        try:
            return float(text)
        except ValueError:
            raise BadInput(f"{name} {text!r} is not a number") from None

    def word(self, name: str, otherwise: str = "auto") -> str:
        default = self.default(name)
        return self.text(name) or (default if isinstance(default, str) and default else otherwise)

    def switch(self, name: str) -> bool | None:
        argument = self.given.get(name)
        if argument is None:
            default = self.default(name)
            return default if isinstance(default, bool) else None
        if argument.values:
            return argument.values[-1].lower() not in ("false", "0", "no")
        return not argument.is_negated

    def mapping(self, name: str) -> dict[str, Any] | None:
        text = self.text(name)
        found: dict[str, Any] = {}
        if text is not None:
            try:
                loaded = json.loads(text)
            except ValueError:
                raise BadInput(f"{name} is not JSON: {text[:60]!r}") from None
            found.update(loaded if isinstance(loaded, dict) else {})
        for path, value in self.dotted.get(name, {}).items():
            try:
                found[path] = json.loads(value)
            except ValueError:
                found[path] = value
        return found or None


def read_settings(
    line: CommandLine, environment: Sequence[tuple[str, str]], release: str, shape: ModelShape, gpu_name: str, gpu_bytes: int
) -> Settings:
    """The values in force, as vLLM of that release would arrive at them on that card."""
    flags = Flags(line, release)
    variables = dict(environment)
    asks_for_v0 = variables.get("VLLM_USE_V1") == "0" and not Behaviour.V0_GONE.is_in(release)
    is_v1 = Behaviour.V1_ENGINE.is_in(release) and not asks_for_v0
    context = _context(flags, shape)
    chunked = flags.switch("--enable-chunked-prefill")
    sequences, tokens = _batch(flags, release, gpu_name, gpu_bytes, context, is_v1=is_v1, chunked=chunked)
    compilation = flags.mapping("--compilation-config") or {}
    transfer = flags.mapping("--kv-transfer-config") or {}
    lora = bool(flags.switch("--enable-lora"))
    eager = bool(flags.switch("--enforce-eager")) or compilation.get("cudagraph_mode") == "NONE"
    runner = variables.get("VLLM_USE_V2_MODEL_RUNNER")
    estimate = variables.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    return Settings(
        release=release,
        utilization=_share(flags.number("--gpu-memory-utilization")),
        max_model_len=context,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        tensor_parallel=_at_least_one(flags, "--tensor-parallel-size"),
        pipeline_parallel=_at_least_one(flags, "--pipeline-parallel-size"),
        data_parallel=_at_least_one(flags, "--data-parallel-size"),
        decode_context_parallel=_at_least_one(flags, "--decode-context-parallel-size"),
        expert_parallel=bool(flags.switch("--enable-expert-parallel")),
        kv_cache_memory_bytes=flags.integer("--kv-cache-memory-bytes"),
        kv_cache_dtype=flags.word("--kv-cache-dtype"),
        dtype=flags.word("--dtype"),
        quantization=flags.text("--quantization"),
        block_size=_at_least_one(flags, "--block-size") if flags.text("--block-size") else None,
        num_gpu_blocks_override=flags.integer("--num-gpu-blocks-override"),
        enforce_eager=eager,
        prefix_caching=_prefix_caching(flags, shape, release, is_v1=is_v1),
        async_scheduling=_async(flags, release),
        hybrid_manager=not flags.switch("--disable-hybrid-kv-cache-manager"),
        cpu_offload_gib=_offload(flags.number("--cpu-offload-gb")),
        max_loras=(flags.integer("--max-loras") or 1) if lora else 0,
        max_lora_rank=flags.integer("--max-lora-rank") or 16,
        max_cpu_loras=flags.integer("--max-cpu-loras") or 0,
        speculative=flags.mapping("--speculative-config"),
        kv_connector=str(transfer["kv_connector"]) if "kv_connector" in transfer else None,
        pipeline_partition=_partition(variables.get("VLLM_PP_LAYER_PARTITION")),
        estimates_graphs=(estimate == "1") if estimate is not None else Behaviour.GRAPH_ESTIMATE.is_in(release),
        v2_runner=v2_by_default(release, shape) if runner not in ("0", "1") else runner == "1",
        skips_mm_profiling=bool(flags.switch("--skip-mm-profiling")),
        language_model_only=bool(flags.switch("--language-model-only")) or _reads_text_alone(flags, release, shape),
        encoders_whole=flags.text("--mm-encoder-tp-mode") == "data",
        mamba_cache_dtype=flags.word("--mamba-cache-dtype"),
        mamba_ssm_cache_dtype=flags.word("--mamba-ssm-cache-dtype"),
        mamba_cache_mode=flags.word("--mamba-cache-mode", "none"),
        chunked_prefill=chunked is not False,
        scheduling_policy=flags.word("--scheduling-policy", "fcfs"),
        long_prefill_token_threshold=flags.integer("--long-prefill-token-threshold") or 0,
        watermark=flags.number("--watermark") or 0.0,
        reserve_full_isl=flags.switch("--scheduler-reserve-full-isl") is not False,
    )


def _context(flags: Flags, shape: ModelShape) -> int:
    text = flags.text("--max-model-len")
    context = shape.default_context if text is None else parse_vllm_integer_or_auto(text)
    if context < 1 and context != AUTO_FIT:
        raise BadInput(f"--max-model-len must be at least 1 (or auto), not {context}")
    return context


def _offload(gib: float | None) -> float:
    if gib is not None and not 0 <= gib < 1e6:
        raise BadInput(f"--cpu-offload-gb must be a size in GiB, not {gib}")
    return gib or 0.0


def _reads_text_alone(flags: Flags, release: str, shape: ModelShape) -> bool:
    """Whether --limit-mm-per-prompt is 0 for all that the encoders read: vLLM then does not load them."""
    if not shape.towers or not Behaviour.UNREAD_TOWERS.is_in(release):
        return False
    limits = flags.mapping("--limit-mm-per-prompt") or {}
    read = {
        kind
        for tower in shape.towers
        for kind in _INPUTS.get((shape.model_type, tower.what), _BY_TOWER.get(tower.what, (tower.what,)))
    }
    return all(_limit(limits, kind) == 0 for kind in read)


def _limit(limits: Mapping[str, Any], kind: str) -> object:
    """The limit of one kind of input: a number, or an object (or a dotted flag) that holds a count."""
    given = limits.get(kind, limits.get(f"{kind}.count"))
    return given.get("count") if isinstance(given, dict) else given


def overrides_of(line: CommandLine, release: str) -> dict[str, Any]:
    """What --hf-overrides puts in place of the model's own configuration."""
    return Flags(line, release).mapping("--hf-overrides") or {}


def revision_of(line: CommandLine, release: str) -> str | None:
    """The branch, tag or commit of the model's repository that --revision names."""
    return Flags(line, release).text("--revision")


def _share(utilization: float | None) -> float:
    if utilization is None or not 0 < utilization <= 1:
        raise BadInput(f"--gpu-memory-utilization must lie above 0 and at most at 1, not {utilization}")
    return utilization


def _at_least_one(flags: Flags, name: str) -> int:
    given = flags.integer(name)
    value = 1 if given is None else given
    if value < 1:
        raise BadInput(f"{name} must be at least 1, not {value}")
    return value


def _batch(
    flags: Flags, release: str, gpu_name: str, gpu_bytes: int, context: int, *, is_v1: bool, chunked: bool | None
) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens, with each other's limits applied as vLLM applies them."""
    sequences, tokens = flags.integer("--max-num-seqs"), flags.integer("--max-num-batched-tokens")
    limits = batch_limits(release, gpu_name, gpu_bytes) if is_v1 else None
    if limits is None:
        limits = batch_limits_v0(context, chunked=bool(chunked) or (chunked is None and context > V0_CHUNKS_ABOVE))
    doubled = 2 if flags.text("--performance-mode") == "throughput" else 1
    wanted_sequences = sequences if sequences is not None else limits.sequences * doubled
    if tokens is None:
        tokens = limits.tokens * doubled
        if is_v1 and chunked is False:
            tokens = max(context, tokens)
        if is_v1 and context > 0:
            tokens = min(tokens, wanted_sequences * context)
    if sequences is None:
        wanted_sequences = min(wanted_sequences, tokens)
    for name, value in (("--max-num-seqs", wanted_sequences), ("--max-num-batched-tokens", tokens)):
        if value < 1:
            raise BadInput(f"{name} must be at least 1, not {value}")
    if tokens < wanted_sequences:
        raise BadInput(f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {wanted_sequences}: vLLM refuses it")
    return wanted_sequences, tokens


def _prefix_caching(flags: Flags, shape: ModelShape, release: str, *, is_v1: bool) -> bool:
    given = flags.switch("--enable-prefix-caching")
    if given is not None:
        return given
    return is_v1 and caches_prefixes_by_default(shape, release)


def caches_prefixes_by_default(shape: ModelShape, release: str) -> bool:
    """Whether the second engine (V1) turns prefix caching on for this model when no flag says so."""
    if any(kind.keeps_state for kind in shape.kinds):
        is_hybrid = any(kind.keeps_tokens for kind in shape.kinds)  # attention-free models: off in every release
        return is_hybrid and Behaviour.HYBRID_PREFIX_CACHING.is_in(release)
    return not shape.is_encoder_decoder and LayerKind.ENCODER not in shape.kinds


def _async(flags: Flags, release: str) -> bool:
    given = flags.switch("--async-scheduling")
    return given if given is not None else Behaviour.ASYNC_SCHEDULING.is_in(release)


def _partition(text: str | None) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"VLLM_PP_LAYER_PARTITION={text!r} is not a list of layer counts") from None

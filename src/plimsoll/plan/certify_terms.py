"""What the requests of one step can make vLLM allocate beyond its profile run, counted in vLLM's source, 0.25.1 to 0.32.0.

A step runs its phases one after another: adapters, encoder, forward pass, sampler, prompt log-probabilities, drafter. What a
phase frees the next one may take again, so the phases are not added: each stands on what stays alive through all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from plimsoll.models.shape import ModelShape, Tower
from plimsoll.plan import overhead as peaks
from plimsoll.plan.ledger import Card, Ledger, ModelFacts, model_dtype
from plimsoll.plan.overhead import V2_PENALTY_BYTES, era_of
from plimsoll.plan.settings import AUTO_FIT, Flags, Settings
from plimsoll.plan.weights_parts import STYLES, Style
from plimsoll.units import MIB, ceil_div, round_up
from plimsoll.vllm.versions import Behaviour

# What a command says of the requests it admits, and what of it makes a certificate impossible.

# config/vllm.py _get_v2_model_runner_unsupported_features: where vLLM falls back to the first runner, by release.
_HARMLESS = {
    "--prefill-context-parallel-size": ("1",),
    "--distributed-executor-backend": ("mp", "uni", "ray"),
    "--mamba-cache-mode": ("none", "align"),
    "--ec-transfer-config": (),
}
_DOUBTFUL_SWITCHES = ("--enable-elastic-ep", "--kv-sharing-fast-prefill")
_DRAFTS_ON_SECOND = ("eagle", "eagle3", "mtp", "deepseek_mtp")
# Experts that 0.26 to 0.28 run on the second runner beside plan's own list.
_EARLY_ON_SECOND = ("Inkling", "KimiK3", "LongcatFlashNgram", "DeepseekV4")


class RequestLimits(NamedTuple):
    """What the command says of the requests it takes, beside the ledger's settings."""

    max_logprobs: int = 20  # -1: the whole vocabulary
    max_pixels: int | None = None
    takes_video: bool = True
    expandable_segments: bool = False
    flashinfer: bool = False  # asked for; newer cards than Hopper use it anyway
    not_modelled: tuple[str, ...] = ()  # flags whose memory nobody counted
    runner_doubts: tuple[str, ...] = ()  # flags beside which vLLM may fall back to the first model runner
    runner_chosen: bool = False  # by VLLM_USE_V2_MODEL_RUNNER


def read_limits(flags: Flags, environment: Mapping[str, str]) -> RequestLimits:
    """What --max-logprobs and its like allow; flags that change the step in ways nobody counted are named."""
    kwargs = flags.mapping("--mm-processor-kwargs") or {}
    size = kwargs.get("size")
    pixels = kwargs.get("max_pixels", size.get("longest_edge") if isinstance(size, dict) else None)
    limits = flags.mapping("--limit-mm-per-prompt") or {}
    video = limits.get("video", limits.get("video.count"))
    video = video.get("count") if isinstance(video, dict) else video
    conf = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    words = {
        "--logits-processors": "processors of your own",
        "--enable-dbo": "two half batches at once",
        "--enable-prompt-embeds": "prompts that are tensors",
        "--enable-mm-embeds": "pictures that are tensors",
        "--kv-offloading-size": "an offloading connector's buffers",
        "--mm-ipc-gpu-memory-gb": "pictures decoded on the GPU",
        "--enable-return-routed-experts": "the routed experts of every token",
        "--offload-group-size": "weights fetched ahead of their layers",
    }
    unknown = [f"{name}: {what}" for name, what in words.items() if flags.text(name) not in (None, "0") or flags.switch(name)]
    if flags.word("--runner") in ("pooling", "draft") or flags.text("--task") not in (None, "auto", "generate"):
        unknown.append("a pooling model's step")
    compilation = flags.mapping("--compilation-config") or {}
    if compilation.get("cudagraph_mm_encoder"):
        unknown.append("the encoder's CUDA graphs")
    doubts = [name for name, harmless in _HARMLESS.items() if flags.text(name) not in (None, *harmless)]
    doubts += [name for name in _DOUBTFUL_SWITCHES if flags.switch(name)]
    doubts += ["--compilation-config"] if compilation.keys() & {"mode", "level", "pass_config"} else []
    doubts += ["--logprobs-mode"] if flags.word("--logprobs-mode", "").endswith("_logits") else []
    given = flags.integer("--max-logprobs")
    return RequestLimits(
        max_logprobs=20 if given is None else given,
        max_pixels=pixels if isinstance(pixels, int) and pixels > 0 else None,
        takes_video=video != 0,
        expandable_segments="expandable_segments:True" in conf,
        flashinfer="FLASHINFER" in flags.word("--attention-backend", "").upper(),
        not_modelled=tuple(unknown),
        runner_doubts=tuple(doubts),
        runner_chosen=environment.get("VLLM_USE_V2_MODEL_RUNNER") in ("0", "1"),
    )


def runner_in_doubt(settings: Settings, shape: ModelShape, limits: RequestLimits) -> list[str]:
    """Why it is not known which model runner vLLM takes; empty where it is, or where the command chose."""
    if limits.runner_chosen:
        return []
    doubts = list(limits.runner_doubts) if settings.v2_runner else []
    drafting = settings.speculative or {}
    plain = drafting.get("method") in _DRAFTS_ON_SECOND and not drafting.get("parallel_drafting")
    if drafting and settings.v2_runner and not (plain and settings.pipeline_parallel == 1):
        doubts.append("--speculative-config")
    is_early = any(name.startswith(_EARLY_ON_SECOND) for name in shape.architectures)
    if is_early and not Behaviour.V2_RUNNER_ALL.is_in(settings.release):
        doubts.append(shape.architectures[0])
    return [f"which model runner vLLM takes beside {', '.join(doubts)} (VLLM_USE_V2_MODEL_RUNNER says)"] if doubts else []


PROMPT_CHUNK = 1024  # rows of logits at once in the second runner, v1/worker/gpu/sample/prompt_logprob.py
# A chosen log-probability: the top-k's value and index, its sort, the concatenation and the copy as 32-bit ids.
BYTES_PER_CHOICE = 72
# An entry of the vocabulary in one row, beside the 16-bit logits. First runner: raw log-probabilities, 32-bit logits,
# probabilities, 64-bit noise; with penalties instead of the last two: two 64-bit counts, their masks and product. Second
# runner: 32-bit logits, masked logits, probabilities, bit masks.
SAMPLER_FIRST, PENALTIES_FIRST, SAMPLER_SECOND = 20, 32, 14
# Fewer than eight rows are sorted by torch instead of a kernel (apply_top_k_top_p_pytorch): values, indices, their scratch.
SORTED_ROWS, SORTED_BYTES = 8, 60
# Ids of prompts and outputs, padded to the longest, and the ones that are scattered (apply_penalties): 64-bit each.
PENALTY_TOKEN_BYTES = 24
DEEPSTACK = {"qwen3_vl": 4, "qwen3_vl_moe": 4}  # embeddings of several layers beside the last one's
# The side of a picture that becomes one token, and the most tokens of one picture by the makers' own processor.
_PIXELS_PER_TOKEN = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_vl_moe": 32, "qwen3_5": 32, "qwen3_5_moe": 32}
_MOST_PICTURE_TOKENS = {"gemma3": 256, "llava": 576, **dict.fromkeys(_PIXELS_PER_TOKEN, 16384)}
_WITHOUT_DRAFTER = ("ngram", "suffix", "ngram_gpu")
# Models that cap their logits with a tanh: two copies while they do (model_executor/layers/logits_processor.py).
_CAPS_LOGITS = ("gemma2", "gemma3n", "gemma4", "grok")
TOKEN_IDS = 128  # the most of `logprob_token_ids`, sampling_params.py MAX_LOGPROB_TOKEN_IDS
FLASHINFER_WORKSPACE = 2 * 394 * MIB  # its own and TensorRT-LLM's, made at the first batch: envs.py
HELD = "log-probabilities of half-read prompts"


class Phase(NamedTuple):
    """One moment of a step: what it takes on top of what stays alive, by units of what requests ask for."""

    kind: str
    unit: str
    fixed_bytes: int
    bytes_per_unit: int
    most_units: int
    scope: str  # "step": gone after it; "process": loaded once
    source: str
    why: str
    covered: bool = False  # vLLM's profile run held it, so it is in the budget already

    def bytes_of(self, units: int) -> int:
        """What so many units take."""
        return self.fixed_bytes + self.bytes_per_unit * min(units, self.most_units) if units > 0 else 0


class Resident(NamedTuple):
    """Memory that stays allocated through a step's phases."""

    name: str
    size: int
    source: str


class Step(NamedTuple):
    """The largest step that the scheduler may build, for one rank."""

    settings: Settings
    shape: ModelShape
    limits: RequestLimits
    batch: peaks.Batch
    rows: int  # of logits: sequences, each with its drafted tokens
    vocabulary: int  # padded as vLLM pads it
    choices: int  # log-probabilities that one row may ask for
    context: int
    flashinfer: bool


def step_of(ledger: Ledger, model: ModelFacts, limits: RequestLimits) -> Step:
    """The largest step of this command."""
    settings, shape = ledger.settings, model.shape
    capability = ledger.card.compute_capability or ((9, 0) if ledger.card.total_bytes >= 70 << 30 else (8, 6))
    context = shape.max_context if settings.max_model_len == AUTO_FIT else settings.max_model_len
    tokens, wide = settings.max_num_batched_tokens, model_dtype(shape, settings) in ("float32", "float")
    batch = peaks.Batch(
        tokens=tokens,
        rows=max(1, min(settings.max_num_seqs, tokens)),
        context=max(1, context),
        tensor_parallel=settings.tensor_parallel,
        dtype_bytes=4 if wide else 2,
        is_hopper=capability >= (9, 0),
        multiprocessors=peaks.multiprocessors_of(capability),
    )
    vocabulary = round_up(shape.vocab_size, 64 * settings.tensor_parallel)
    return Step(
        settings,
        shape,
        limits,
        batch,
        rows=min(tokens, settings.max_num_seqs * (1 + settings.speculative_tokens)),
        vocabulary=vocabulary,
        choices=vocabulary if limits.max_logprobs < 0 else min(limits.max_logprobs, vocabulary),
        context=max(1, context),
        flashinfer=limits.flashinfer or capability >= (10, 0),
    )


def unseen_of(settings: Settings, shape: ModelShape) -> int:
    """The second runner's penalty counters, in no term of vLLM's accounting until 0.27."""
    counted = era_of(settings.release).consumed_counts_all or not settings.v2_runner
    return 0 if counted else int(V2_PENALTY_BYTES * settings.max_num_seqs * shape.vocab_size)


def reserved_of(ledger: Ledger, shape: ModelShape) -> int:
    """The peak that the profile run reserves inside the request, at the least.

    The second runner copies the profile's logits to 32 bits only until 0.27 (sample/sampler.py needs_logits_processing).
    """
    settings, low = ledger.settings, ledger.activation.low
    copies = not settings.v2_runner or not Behaviour.LEAN_PROFILE.is_in(settings.release)
    if copies or not ledger.activation.why.startswith("sampler"):
        return low
    return max(0, low - 4 * min(settings.max_num_seqs, settings.max_num_batched_tokens) * shape.vocab_size)


def residents_of(step: Step, held_tokens: int) -> list[Resident]:
    """What stays alive while any phase runs, with so many prompt tokens whose log-probabilities wait for their prompt's end."""
    settings, batch, runner = step.settings, step.batch, runner_file(step.settings)
    kernel_rows = min(step.rows, batch.multiprocessors)
    workspace = peaks.persistent(step.shape, batch, era_of(settings.release))
    found = [
        Resident("hidden states", _hidden(step), f"{runner} execute_model"),
        Resident("logits that are sampled", step.rows * step.vocabulary * batch.dtype_bytes, f"{runner} compute_logits"),
        Resident("buffer of the top-k kernel", kernel_rows * step.vocabulary * 4, "v1/sample/ops/topk_topp_triton.py"),
        Resident("matrix workspaces", workspace, "cuBLAS; fused_moe's workspace_shapes"),
    ]
    if step.flashinfer:
        found.append(Resident("attention workspaces", FLASHINFER_WORKSPACE, "v1/attention/backends/flashinfer.py"))
    if _encodes(step):
        tokens = _encoder_tokens(step)
        width = step.shape.hidden_size * DEEPSTACK.get(step.shape.model_type, 1) * batch.dtype_bytes
        found.append(Resident("encoder cache", tokens * width, "v1/core/encoder_cache_manager.py compute_mm_encoder_budget"))
    if settings.v2_runner:
        held = held_tokens * _held_bytes(step)
        found.append(Resident(HELD, held, "v1/worker/gpu/sample/prompt_logprob.py in_progress_prompt_logprobs"))
    if settings.speculative_tokens and settings.speculative and settings.speculative.get("method") not in _WITHOUT_DRAFTER:
        drafted = settings.max_num_seqs * settings.speculative_tokens * step.vocabulary * 4
        found.append(Resident("drafted logits", drafted, "v1/worker/gpu/spec_decode/speculator.py"))
    return found


def held_tokens_of(step: Step) -> int:
    """Prompt tokens that wait at once: two prompts of full length, or all rows' where long prompts take turns."""
    prompts = step.settings.max_num_seqs if step.settings.long_prefill_token_threshold else 2
    return prompts * step.context


def phases_of(step: Step) -> list[Phase]:
    """The phases that requests can widen."""
    found = [_sampling(step), _logprobs(step), _prompt_logprobs(step)]
    if not step.settings.v2_runner:
        found.append(_penalties(step))
    if _encodes(step):
        found.append(_pictures(step))
    if step.settings.max_loras:
        found.append(_adapter(step))
    return found


def sampler_bytes(step: Step) -> int:
    """The sampler over every row, with whatever a request may ask of it but penalties and many log-probabilities."""
    per_entry = SAMPLER_SECOND if step.settings.v2_runner else SAMPLER_FIRST
    rows = max(step.rows * per_entry, min(step.rows, SORTED_ROWS) * SORTED_BYTES)
    return rows * step.vocabulary + step.rows * (ceil_div(step.vocabulary, 8) + TOKEN_IDS * BYTES_PER_CHOICE)


def unknown_terms(step: Step, model: ModelFacts) -> list[str]:
    """Terms that cannot be counted, each with its reason; one is enough to certify nothing."""
    settings, shape = step.settings, step.shape
    found = [f"{what} (nobody counted its memory)" for what in step.limits.not_modelled] + runner_in_doubt(
        settings, shape, step.limits
    )
    if settings.kv_connector is not None:
        found.append(f"the buffers of the KV connector {settings.kv_connector}")
    if settings.expert_parallel and settings.data_parallel > 1:
        found.append("the exchange buffers of data-parallel experts")
    if shape.is_encoder_decoder:
        found.append("an encoder-decoder model's step")
    if _encodes(step) and not _is_profiled(step) and shape.model_type not in STYLES:
        found.append(f"the encoder of {shape.model_type or 'this model'}: its code was not read")
    if _encodes(step) and len({tower.what for tower in shape.towers}) > 1:
        found.append("an encoder other than the one that vLLM profiles (it profiles the kind with the longest items alone)")
    drafting = settings.speculative or {}
    method = drafting.get("method")
    if drafting and model.drafter is None and not settings.drafts_with_own_head and method not in _WITHOUT_DRAFTER:
        found.append(f"the drafter {drafting.get('model', method)}: its shape could not be read")
    return found


def adapter_activation(step: Step) -> int:
    """What the adapters' shrink kernels take in the forward pass (lora/punica_wrapper): three 32-bit slices of the rank."""
    return 3 * 4 * step.batch.tokens * step.settings.max_lora_rank if step.settings.max_loras else 0


def runner_file(settings: Settings) -> str:
    """Where the model runner of this command lives in vLLM."""
    return "v1/worker/gpu/model_runner.py" if settings.v2_runner else "v1/worker/gpu_model_runner.py"


def _hidden(step: Step) -> int:
    layers = 4 if step.settings.speculative else 1  # a drafter may read those of three more layers
    rows = layers * step.batch.tokens + 2 * step.rows
    return rows * step.shape.hidden_size * step.batch.dtype_bytes


def _sampling(step: Step) -> Phase:
    settings = step.settings
    drafted = 1 + settings.speculative_tokens
    source = "v1/worker/gpu/sample/sampler.py sample" if settings.v2_runner else "v1/sample/sampler.py forward"
    why = "32-bit logits, probabilities, noise, masks and log-probabilities of every row"
    per = ceil_div(sampler_bytes(step), max(1, step.rows)) * drafted
    return Phase("sampling", "sequences", 0, per, settings.max_num_seqs, "step", source, why)


def _penalties(step: Step) -> Phase:
    drafted = 1 + step.settings.speculative_tokens
    per = (PENALTIES_FIRST * step.vocabulary + PENALTY_TOKEN_BYTES * step.context) * drafted
    why = "one request with penalties counts every token of every row, padded to the longest"
    source = "model_executor/layers/utils.py apply_penalties"
    return Phase("penalties", "sequences", 0, per, step.settings.max_num_seqs, "step", source, why)


def _logprobs(step: Step) -> Phase:
    v2 = step.settings.v2_runner
    source = "v1/worker/gpu/sample/logprob.py" if v2 else "v1/sample/sampler.py gather_logprobs"
    why = "the most that one request asks for is chosen in every row"
    per, most = step.rows * BYTES_PER_CHOICE, step.choices
    return Phase("logprobs", "log-probabilities", sampler_bytes(step), per, most, "step", source, why)


def _prompt_logprobs(step: Step) -> Phase:
    batch, chosen = step.batch, BYTES_PER_CHOICE * (1 + step.choices)
    if not step.settings.v2_runner:
        copies = batch.dtype_bytes + 4 + (4 if batch.dtype_bytes < 4 else 0)  # logits, their 32-bit copy, log_softmax
        copies += 0 if step.limits.expandable_segments else 2  # logits in an older prompt's larger piece leave it half used
        per = copies * step.vocabulary + chosen
        why = f"logits of the whole chunk at once, {copies} bytes for each entry of the vocabulary"
        source = "v1/worker/gpu_model_runner.py _get_prompt_logprobs_dict"
        return Phase("prompt_logprobs", "prompt tokens", 0, per, batch.tokens, "step", source, why)
    first = min(batch.tokens, PROMPT_CHUNK)
    last = min(batch.tokens, 2 * PROMPT_CHUNK) - first  # a chunk's logits live until the next one's are there
    copies = 3 if step.settings.tensor_parallel > 1 else 2 if step.shape.model_type.startswith(_CAPS_LOGITS) else 1
    # One chunk more: an older one's piece that is in use, or a copy without the vocabulary's padding.
    fixed = (first * copies + last + first) * batch.dtype_bytes * step.vocabulary + first * chosen
    fixed += 2 * batch.tokens * _choice_row(step)
    why = f"one such request makes logits of all rows of its step, {format(PROMPT_CHUNK, ',')} at a time, two chunks alive"
    source = "v1/worker/gpu/sample/prompt_logprob.py compute_prompt_logprobs_with_chunking"
    return Phase("prompt_logprobs", "prompt tokens", fixed, _held_bytes(step), step.context, "step", source, why)


def _choice_row(step: Step) -> int:
    """The result for one token: an id and a figure for each choice, and the rank."""
    return 12 * (1 + step.choices) + 8


def _held_bytes(step: Step) -> int:
    """What one token of a prompt that is read in several steps holds until the last: a view keeps all rows of its step."""
    settings = step.settings
    chunk = max(1, step.batch.tokens - step.rows)
    if settings.long_prefill_token_threshold:
        chunk = max(1, min(chunk, settings.long_prefill_token_threshold))
    return ceil(2 * _choice_row(step) * step.batch.tokens / chunk)


def _adapter(step: Step) -> Phase:
    shape = step.shape
    widest = max(shape.vocab_size, shape.hidden_size, shape.intermediate_size or 0, shape.attention_heads * shape.head_dim)
    per = widest * step.settings.max_lora_rank * step.batch.dtype_bytes
    why = "a copy of an adapter's widest matrix on its way into the slot"
    return Phase("adapter", "adapters", 0, per, 1, "process", "lora/layers set_lora, called by activate_adapter", why)


def _encodes(step: Step) -> bool:
    return bool(step.shape.towers) and not step.settings.language_model_only


def _is_profiled(step: Step) -> bool:
    """Whether vLLM's profile run held a full batch of the encoder, so that the budget has room for it."""
    settings = step.settings
    runs = not settings.v2_runner or era_of(settings.release).v2_profiles_encoder
    return runs and not settings.skips_mm_profiling and not settings.has_fixed_cache


def item_tokens(step: Step) -> int:
    """The most tokens that one picture or film can have: the processor's limit, else the whole prompt."""
    model_type = step.shape.model_type
    side = _PIXELS_PER_TOKEN.get(model_type)
    most = _MOST_PICTURE_TOKENS.get(model_type)
    if side is not None and step.limits.max_pixels is not None:
        most = ceil_div(step.limits.max_pixels, side * side)
    films = side is not None and step.limits.takes_video
    return step.context if most is None or films else min(step.context, most)


def _encoder_tokens(step: Step) -> int:
    return max(step.batch.tokens, item_tokens(step))


def _pictures(step: Step) -> Phase:
    tokens, shape, wide = _encoder_tokens(step), step.shape, step.batch.dtype_bytes
    per = shape.hidden_size * DEEPSTACK.get(shape.model_type, 1) * wide
    per += max((_tower_bytes(tower, shape, wide) for tower in shape.towers), default=0)
    source = "multimodal/encoder_budget.py; embed_multimodal in the runner's execute_mm_encoder"
    profiled = _is_profiled(step)
    why = "in vLLM's profile run" if profiled else "the encoder's widest layer over all items of a step, not in vLLM's profile"
    return Phase("pictures", "encoder tokens", 0, per, tokens, "step", source, why, covered=profiled)


def _tower_bytes(tower: Tower, shape: ModelShape, wide: int) -> int:
    """One token's patches in an encoder: pixels as they come and as they are used, attention, feed-forward with its gate."""
    style = STYLES.get(shape.model_type, Style())
    width = style.width or tower.hidden_size or shape.hidden_size
    inner = tower.intermediate_size if tower.intermediate_size and style.width is None else 4 * width
    pixels = 3 * style.frames * (tower.patch_size or 14) ** 2
    side = max(style.merge, 4 if shape.model_type == "gemma3" else 2)
    return side**2 * ((4 * inner + 8 * width) * wide + pixels * (4 + wide))


def free_at_start(ledger: Ledger, card: Card) -> int:
    """What vLLM's snapshot finds free at the least: the card's low end, less neighbours, less the largest context."""
    return card.low_bytes - card.used_bytes - ledger.context.high

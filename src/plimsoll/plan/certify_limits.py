"""What a command says of the requests it admits, and what of it makes a certificate impossible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.domain.model import ModelShape
from plimsoll.engine.flags import is_before
from plimsoll.plan.settings import Flags, Settings

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
    if is_before(settings.release, "0.29.0") and any(name.startswith(_EARLY_ON_SECOND) for name in shape.architectures):
        doubts.append(shape.architectures[0])
    return [f"which model runner vLLM takes beside {', '.join(doubts)} (VLLM_USE_V2_MODEL_RUNNER says)"] if doubts else []

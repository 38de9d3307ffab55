"""How far the weights from config.json alone are from what vLLM printed, on starts that other people published.

    python -m benchmarks.weights_accuracy

Reads ../shared/data beside the repository. Errors are averaged per architecture, then over architectures. Nothing in
`weights_from_shape` is fitted to these rows but the bands: each row's band here comes from the other architectures of
its class (leave one architecture out), never from its own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.models.shape import ModelShape, Quantization
from plimsoll.plan.settings import Settings
from plimsoll.plan.weights import ALLOCATOR_SLACK, ONE_GPU, weights_from_shape
from plimsoll.plan.weights_checkpoint import lora_bytes

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
CAMPAIGN = "llm-d-incubation/llm-d-planner#205"
GIB = 2**30

# What the shared table leaves out of models whose config.json is not stored: the family, and encoders (public configs).
_SIGLIP = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304, "patch_size": 14}
_GEMMA3 = {"model_type": "gemma3", "text_type": "gemma3_text", "vision_config": _SIGLIP, "max_position_embeddings": 131072,
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
_QWEN2_5_VL = {"model_type": "qwen2_5_vl", "max_position_embeddings": 128000, "vision_config": {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}}  # fmt: skip
_CLIP = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "patch_size": 14}
_PIXTRAL = _CLIP
FACTS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen1.5-MoE-A2.7B": {"shared_expert_intermediate_size": 5632},
    "Qwen/Qwen2-VL-7B-Instruct": {"model_type": "qwen2_vl", "max_position_embeddings": 32768, "vision_config": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14}},
    "Qwen/Qwen2.5-VL-3B-Instruct": _QWEN2_5_VL,
    "Qwen/Qwen2.5-VL-7B-Instruct": _QWEN2_5_VL,
    "Qwen/Qwen2.5-VL-72B-Instruct": _QWEN2_5_VL,
    "Qwen/Qwen3-14B": {"model_type": "qwen3", "max_position_embeddings": 40960},
    "Qwen/Qwen3-4B": {"model_type": "qwen3", "max_position_embeddings": 40960},
    "TinyLlama/TinyLlama-1.1B": {"model_type": "llama", "max_position_embeddings": 2048},
    "ai21labs/AI21-Jamba-1.5-Mini": {"model_type": "jamba", "max_position_embeddings": 262144, "num_experts_per_tok": 2},
    "bigcode/starcoder2-15b": {"model_type": "starcoder2", "max_position_embeddings": 16384},
    "facebook/opt-125m": {"model_type": "opt", "max_position_embeddings": 2048},
    "facebook/opt-2.7b": {"model_type": "opt", "max_position_embeddings": 2048},
    "facebook/opt-6.7b": {"model_type": "opt", "max_position_embeddings": 2048},
    "google/gemma-3-27b-it": _GEMMA3,
    "google/gemma-3-4b-it": _GEMMA3,
    "ibm-granite/granite-3.1-8b-instruct": {"model_type": "granite", "max_position_embeddings": 131072},
    "ibm-granite/granite-3.3-8b-instruct": {"model_type": "granite", "max_position_embeddings": 131072},
    "llava-hf/llava-v1.6-mistral-7b-hf": {"model_type": "llava_next", "text_type": "mistral", "vision_config": _CLIP,
                                          "max_position_embeddings": 32768},
    "meta-llama/Llama-3.2-11B-Vision": {"model_type": "mllama", "text_type": "mllama_text_model", "vision_config": {
        "hidden_size": 1280, "num_hidden_layers": 32, "attention_heads": 16, "intermediate_size": 5120, "patch_size": 14},
        "max_position_embeddings": 131072},
    "microsoft/phi-1_5": {"model_type": "phi", "max_position_embeddings": 2048},
    "microsoft/phi-2": {"model_type": "phi", "max_position_embeddings": 2048},
    "mistralai/Mistral-7B-Instruct-v0.2": {"model_type": "mistral", "max_position_embeddings": 32768},
    "mistralai/Mistral-Large-Instruct-2407": {"model_type": "mistral", "max_position_embeddings": 131072},
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": {"model_type": "mistral3", "text_type": "mistral",
                                                      "vision_config": _PIXTRAL, "max_position_embeddings": 131072},
    "moonshotai/Kimi-Dev-72B": {"model_type": "qwen2", "max_position_embeddings": 131072},
}  # fmt: skip

# How the checkpoints of quantised rows were made, where the flag alone does not say it: from their model cards and recipes
# as we remember them, not from the data. A user has the checkpoint's own config.json instead.
_W8 = Quantization("compressed-tensors", bits=8, ignored=("lm_head",))
_EXPERTS_ONLY = ("re:.*attn.*", "re:.*shared_expert.*")
_NVFP4 = Quantization("compressed-tensors", "nvfp4-pack-quantized", 4, 16, ignored=("lm_head", "re:.*mlp.gate$"))
_BLOCKS = Quantization("fp8", bits=8, block=(128, 128))
_NEXT = ("lm_head", "re:.*mlp.gate$", "re:.*linear_attn.*")  # llm-compressor's recipe for Qwen3-Next
CHECKPOINTS: dict[str, Quantization | None] = {
    "vllm36973": Quantization("gptq_marlin", bits=4, group_size=128, ignored=_EXPERTS_ONLY),
    "idx60069029149": None,  # its own config.json says it
    "idx33676930891": Quantization("compressed-tensors", "pack-quantized", 4, 128, ignored=_NEXT),
    "vllm33544": replace(_NVFP4, ignored=_NEXT),
    "vllm26788": _NVFP4,
    "idx34681159919": _BLOCKS,
    "vllm25928": _BLOCKS,
    "vllm38486": _BLOCKS,
    "vllm33333": Quantization("modelopt_fp4", bits=4, group_size=16),
    "vllm16152": Quantization("compressed-tensors", bits=8, ignored=_EXPERTS_ONLY),
    "vllm16199": Quantization("awq", bits=4, group_size=32),  # converted from q4_0, whose blocks are 32
}
NOT_SCORED = {
    "vllm17875-llama-4-maverick-17b-128e-instruct-fp8-tpx": "the placement is not readable in the log",
    "idx17822999525-deepseek-v2.5-tpx": "the placement is not stated",
    "vllm20264-not-tp1": "the model is not stated",
    "idx7926800416-opt-6.7b-tp1-2": "part of the weights is kept in host memory (--cpu-offload-gb)",
    "idx7926800416-opt-6.7b-tp1-3": "part of the weights is kept in host memory (--cpu-offload-gb)",
    "idx16992463537-qwen3-4b-tp1": "the quantisation is not stated",
    "idx53632500963-meralion-2-10b-asr-tp1": "Gemma 2 9B with a speech encoder whose config is not in the data",
    "idx53632500963-meralion-2-10b-asr-tp1-2": "Gemma 2 9B with a speech encoder whose config is not in the data",
    "idx53632500963-meralion-2-10b-asr-tp1-3": "Gemma 2 9B with a speech encoder whose config is not in the data",
    "vllm20069-whisper-large-v3-turbo-tp1": "an encoder-decoder model, which plan does not describe",
}
REASONS = {
    "idx33676930891-qwen3-next-80b-a3b-instruct-tp2": "the build's group size is not stated; 128 assumed",
    "vllm36372-qwen3.5-27b-tp2": "LoRA slots and rank are not stated; one of rank 16 assumed",
    "idx53790697037-qwen2.5-1.5b-tp1": "the model is a guess of the row's author (its text says 7B)",
    "vllm12991-qwen2.5-vl-72b-instruct-bnb-4bit-tp1": "vLLM 0.7 kept the scales doubly quantised",
    "vllm26788-qwen3-30b-a3b-nvfp4-tp1": "0.11.0 keeps w13 beside its reordered copy: 9.0 GiB",
    "vllm7992-ai21-jamba-1.5-mini-tp1": "0.5.5 built dense blocks as one expert and quantised them too, later versions do not",
    "vllm12258-deepseek-v3-tp16": "0.6.6 gave the odd layer to the last stage, later versions do not",
    "vllm33333-nvidia-nemotron-3-nano-30b-a3b-nvfp4-tp2": "mixed precision, described in a file that is not in the data",
    "llm-d-incubation-llm-d-p-gpt-oss-120b-tp1": "GPU and version are not stated; another kernel pads less",
    "vllm19964-e5-mistral-7b-instruct-tp1": "an embedding model: vLLM drops the head, 0.24 GiB",
    **dict.fromkeys(
        ("vllm4083-opt-125m-tp1", "vllm6408-opt-125m-tp1", "vllm15394-opt-125m-tp1", "vllm15394-opt-125m-tp1-2",
         "vllm16348-opt-125m-tp1", "vllm16348-opt-125m-tp1-2", "idx29633934917-opt-125m-tp1", "idx19719842090-opt-125m-tp1"),
        "5 MiB of ends that torch's allocator cannot split",
    ),
}  # fmt: skip


def config_of(reference: str, configs: Path, architectures: dict[str, Any]) -> dict[str, Any]:
    """The model's config.json, or one made from the shared table and the facts above."""
    stored = configs / f"{reference.replace('/', '__')}.json"
    if stored.is_file():
        config: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
        return config
    known = architectures[reference]
    plain = {key: value for key, value in known.items() if value is not None and key not in ("moe", "linear_or_mamba", "mla")}
    moe = known.get("moe") or {}
    if moe.get("num_experts"):
        plain |= {"num_experts": moe["num_experts"], "moe_intermediate_size": moe["moe_intermediate_size"]}
    for part in ("linear_or_mamba", "mla"):
        plain |= known.get(part) or {}
    plain |= FACTS.get(reference, {})
    plain.pop("vision_tower", None)
    if (text_type := plain.pop("text_type", None)) is None:
        return plain
    inner = {key: value for key, value in plain.items() if key not in ("vision_config", "model_type", "architectures")}
    return {"model_type": plain["model_type"], "vision_config": plain["vision_config"], "text_config": inner | {
        "model_type": text_type}}  # fmt: skip


def quantization_of(row: dict[str, Any]) -> Quantization | str | None:
    """How this row's weights were stored."""
    said = row.get("quantization")
    if said is None:
        return None
    for prefix, checkpoint in CHECKPOINTS.items():
        if row["id"].startswith(prefix):
            return checkpoint
    if said.startswith("compressed-tensors"):
        return _W8
    return str(said).split(" ")[0]


def lora_of(row: dict[str, Any]) -> tuple[int, int] | None:
    """Slots and rank, where LoRA was on; vLLM's defaults where the row does not state them."""
    flags = row.get("other_flags") or ""
    if "lora" not in flags.lower():
        return None
    return 1, 16


def placed(row: dict[str, Any], shape: ModelShape) -> tuple[ModelShape, Settings]:
    """The model as this row's start stored it, and over how many GPUs it was spread."""
    stored = quantization_of(row)
    if isinstance(stored, Quantization) and shape.quantization is None:
        shape = replace(shape, quantization=stored)
    slots, rank = lora_of(row) or (0, 16)
    return shape, replace(ONE_GPU,
        tensor_parallel=row["tensor_parallel"] or 1, pipeline_parallel=row.get("pipeline_parallel") or 1,
        data_parallel=row.get("data_parallel") or 1, dtype=row.get("dtype") or "auto", max_loras=slots, max_lora_rank=rank,
        quantization=stored if isinstance(stored, str) else None,
    )  # fmt: skip


class Score(NamedTuple):
    """One start: what was measured and what was said."""

    row: dict[str, Any]
    kind: str
    measured: float
    said: float
    covered: bool

    @property
    def error(self) -> float:
        """In parts of the measured value."""
        return self.said / self.measured - 1


def scores(rows: Iterable[dict[str, Any]], configs: Path, architectures: dict[str, Any]) -> list[Score]:
    """Every row whose model, placement and weights are known."""
    found = []
    for row in rows:
        if not row.get("weights_gib") or row["id"] in NOT_SCORED:
            continue
        shape = ModelShape.from_config(config_of(row["arch_ref"], configs, architectures))
        shape, settings = placed(row, shape)
        estimate = weights_from_shape(shape, settings)
        extra = lora_bytes(shape, settings).value if settings.max_loras else 0
        low, high = (estimate.low + extra) / GIB, (estimate.high + extra) / GIB
        measured = row["weights_gib"]
        rounding = 0.005  # most logs print two decimals
        found.append(
            Score(row, estimate.why, measured, (estimate.value + extra) / GIB, low - rounding <= measured <= high + rounding)
        )
    return found


def by_architecture(some: Iterable[Score]) -> dict[str, float]:
    """Mean of the absolute errors of each architecture."""
    errors = defaultdict(list)
    for score in some:
        errors[score.row["arch_ref"]].append(abs(score.error))
    return {name: sum(values) / len(values) for name, values in errors.items()}


def held_out_cover(found: list[Score]) -> tuple[int, int]:
    """How many rows lie within the largest error of the other architectures of their class (1 % at least, and 8 MiB)."""
    covered = judged = 0
    for score in found:
        same = [s for s in found if s.kind == score.kind and s.row["arch_ref"] != score.row["arch_ref"]]
        if same:
            judged += 1
            widest = max(0.01, *(abs(s.error) for s in same)) + ALLOCATOR_SLACK / GIB / score.measured
            covered += abs(score.error) <= widest
    return covered, judged


def _summary(title: str, some: list[Score]) -> None:
    means = by_architecture(some)
    if not means:
        return
    mean = sum(means.values()) / len(means)
    covered = sum(score.covered for score in some)
    print(f"{title:<46}{len(some):>5} rows{len(means):>4} models  mean |error| {mean:7.2%}  band holds {covered}/{len(some)}")


def main() -> None:
    """Print every row, then the means."""
    if not DATA.is_dir():
        print(f"nothing to score: {DATA.name} is not beside the repository (looked in ../shared/data)")
        return
    with (DATA / "startups" / "startups.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    architectures = json.loads((DATA / "startups" / "architectures.json").read_text(encoding="utf-8"))
    found = scores(rows, DATA / "model-configs", architectures)
    print(f"{'model':<52}{'tp':>3}{'measured':>10}{'said':>10}{'error':>9}  band  class, reason for a miss above 2 %")
    for score in sorted(found, key=lambda one: (one.row["source"] != CAMPAIGN, one.kind, one.row["model"])):
        row = score.row
        reason = REASONS.get(row["id"], "no reason known") if abs(score.error) > 0.02 else ""
        print(
            f"{row['model'][:50]:<52}{row['tensor_parallel']:>3}{score.measured:>10.3f}{score.said:>10.3f}{score.error:>9.2%}"
            f"  {'holds' if score.covered else 'MISS '} {score.kind.split(':')[0]} {reason}"
        )
    for identifier, reason in NOT_SCORED.items():
        print(f"not scored: {identifier}: {reason}")
    campaign = [score for score in found if score.row["source"] == CAMPAIGN]
    print()
    _summary("llm-d-planner#205, 16-bit dense (target 1 %)", [s for s in campaign if s.kind.startswith("16-bit dense")])
    _summary("llm-d-planner#205, the rest", [s for s in campaign if not s.kind.startswith("16-bit dense")])
    others = [score for score in found if score.row["source"] != CAMPAIGN]
    for kind in sorted({score.kind.split(":")[0] for score in others}):
        _summary(f"other rows, {kind}", [s for s in others if s.kind.split(":")[0] == kind])
    _summary("all rows", found)
    covered, judged = held_out_cover(found)
    print(f"judged by the other architectures of its class alone, the band would hold {covered} of {judged} rows")


if __name__ == "__main__":
    main()

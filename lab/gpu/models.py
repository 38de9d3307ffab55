"""Model folders for the runs on a GPU: a configuration, a tokenizer of its size, what pictures or an adapter need. No weights.

An entry of `models` is a config.json, with three keys of ours: `like` names the entry it is derived from, `pictures` adds what
Qwen2-VL's processor reads, and `adapter` ({"rank": 511, "layers": {NAME: [inputs, outputs]}}) writes a LoRA adapter of zeros.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.engine import tiny_model

Entry = dict[str, Any]
# Without it, transformers takes a tokenizer of more than 100,000 tokens for an old one of Mistral's and warns of it.
SAVED_BY = {"transformers_version": "5.0.0"}
OURS = ("like", "pictures", "adapter")
# What stands for a picture in a prompt of Qwen2-VL, and the keys of the configuration that say the ids.
VISION = {
    "<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id", "<|vision_pad|>": "vision_token_id",
    "<|image_pad|>": "image_token_id", "<|video_pad|>": "video_token_id",
}  # fmt: skip
PICTURE_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def config_of(models: dict[str, Entry], name: str) -> Entry:
    """A model's config.json, with what it inherits."""
    whole = _whole(models, name)
    return {key: value for key, value in whole.items() if key not in OURS}


def _whole(models: dict[str, Entry], name: str) -> Entry:
    own = dict(models[name])
    return (_whole(models, own["like"]) if "like" in own else {}) | own


def make_models(models: dict[str, Entry], folder: Path) -> None:
    """Write every model's folder."""
    for name in models:
        home = folder / name
        if (home / "config.json").is_file():
            continue
        home.mkdir(parents=True, exist_ok=True)
        whole, config = _whole(models, name), config_of(models, name)
        tiny_model.write(home)
        special = {token: config[key] for token, key in VISION.items()} if whole.get("pictures") else {}
        fill_vocabulary(home, config.get("text_config", config)["vocab_size"], special)
        if special:
            write_picture_files(home, config["vision_config"])
        if "adapter" in whole:
            write_adapter(home / "adapter", whole["adapter"]["rank"], whole["adapter"]["layers"])
        (home / "config.json").write_text(json.dumps(SAVED_BY | config, indent=1), encoding="utf-8")


def fill_vocabulary(home: Path, size: int, special: dict[str, int]) -> None:
    """Make every id below `size` a token with a text of its own, or one of the special ones, whose ids are given.

    Ids without a token decode to nothing, as hardly any of a real model do: a server that streams then decodes the whole prompt
    again for every token, and its users wait for that instead of the GPU.
    """
    path = home / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    names = {number: token for token, number in special.items()}
    vocabulary |= {names.get(number, f"Ġt{number}"): number for number in range(len(vocabulary), size)}
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": number, "content": names[number], **how} for number in sorted(names)]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def write_picture_files(home: Path, vision: Entry) -> None:
    """How Qwen2-VL's processor scales and cuts a picture, with its makers' figures, and how a chat becomes a prompt."""
    pixels = {"min_pixels": 3136, "max_pixels": 12845056}
    scaling = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", **pixels,
        "size": {"shortest_edge": pixels["min_pixels"], "longest_edge": pixels["max_pixels"]},
        "patch_size": vision["patch_size"], "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (home / "preprocessor_config.json").write_text(json.dumps(scaling, indent=1), encoding="utf-8")
    path = home / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer |= {"processor_class": "Qwen2VLProcessor", "chat_template": PICTURE_TEMPLATE}
    path.write_text(json.dumps(tokenizer, indent=1), encoding="utf-8")


def write_adapter(home: Path, rank: int, layers: dict[str, list[int]]) -> None:
    """A LoRA adapter as PEFT writes one, all zeros: a file with a hole in it, so its size costs no time."""
    home.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}), "base_model_name_or_path": "",
    }  # fmt: skip
    (home / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors: Entry = {}
    end = 0
    for name, (inputs, outputs) in layers.items():
        for part, shape in (("lora_A", [rank, inputs]), ("lora_B", [outputs, rank])):
            begin, end = end, end + 2 * shape[0] * shape[1]
            key = f"base_model.model.{name}.{part}.weight"
            tensors[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(tensors).encode()
    head += b" " * (-len(head) % 8)
    with (home / "adapter_model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)

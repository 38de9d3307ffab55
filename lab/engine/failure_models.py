"""Folders of models that vLLM cannot load, each made from the tiny model by one change.

broken_model("config-not-json", Path("/tmp/x"))  # a folder to name on the command line
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.engine.install import model_home


def copy_of_tiny(folder: Path) -> Path:
    """A copy of the tiny model that may be changed."""
    shutil.copytree(model_home(), folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Change the configuration; a value of None removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=1), encoding="utf-8")


def safetensors_file(tensors: dict[str, list[int]]) -> bytes:
    """A file of float32 zeros in the safetensors format: a length, a JSON header, the values."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def tiny_tensors(folder: Path) -> dict[str, list[int]]:
    """The weights that a checkpoint of the tiny Llama holds, with their shapes."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {at + "input_layernorm.weight": [hidden], at + "post_attention_layernorm.weight": [hidden]}
        tensors |= {at + "self_attn.q_proj.weight": [query, hidden], at + "self_attn.o_proj.weight": [hidden, query]}
        tensors |= {at + f"self_attn.{name}_proj.weight": [key, hidden] for name in "kv"}
        tensors |= {at + f"mlp.{name}_proj.weight": [wide, hidden] for name in ("gate", "up")}
        tensors |= {at + "mlp.down_proj.weight": [hidden, wide]}
    return tensors


def config_not_json(folder: Path) -> None:
    """config.json ends in the middle."""
    path = folder / "config.json"
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")


def unknown_architecture(folder: Path) -> None:
    """A model that this vLLM has never heard of."""
    change_config(folder, architectures=["KestrelForCausalLM"])


def unknown_model_type(folder: Path) -> None:
    """A model type that this transformers has never heard of."""
    change_config(folder, architectures=["KestrelForCausalLM"], model_type="kestrel4")


def remote_code(folder: Path) -> None:
    """A model that brings code of its own."""
    change_config(
        folder,
        architectures=["KestrelForCausalLM"],
        model_type="kestrel4",
        auto_map={"AutoConfig": "configuration_kestrel.KestrelConfig"},
    )
    (folder / "configuration_kestrel.py").write_text(
        "from transformers import PretrainedConfig\n\n\nclass KestrelConfig(PretrainedConfig):\n    model_type = 'kestrel4'\n",
        encoding="utf-8",
    )


def no_tokenizer(folder: Path) -> None:
    """A checkpoint saved without its tokenizer."""
    for path in folder.glob("tokenizer*"):
        path.unlink()


def no_weights(folder: Path) -> None:
    """Nothing changed: the tiny model has no weights, which only a dummy load forgives."""


def truncated_weights(folder: Path) -> None:
    """A download that stopped half way."""
    whole = safetensors_file(tiny_tensors(folder))
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def missing_tensor(folder: Path) -> None:
    """A checkpoint that lacks one layer's weights."""
    tensors = {name: shape for name, shape in tiny_tensors(folder).items() if "layers.1.mlp" not in name}
    (folder / "model.safetensors").write_bytes(safetensors_file(tensors))


def wrong_shape(folder: Path) -> None:
    """A checkpoint of another size than its configuration says."""
    tensors = {**tiny_tensors(folder), "model.embed_tokens.weight": [2048, 32]}
    (folder / "model.safetensors").write_bytes(safetensors_file(tensors))


def unreadable(folder: Path) -> None:
    """A folder that its owner closed to everybody."""
    folder.chmod(0)


def large(folder: Path) -> None:
    """About 4.5 GiB of float32 weights."""
    change_config(folder, hidden_size=3072, intermediate_size=12288, num_hidden_layers=8, num_attention_heads=24)


def long_context(folder: Path) -> None:
    """A model that could read eight million tokens."""
    change_config(folder, max_position_embeddings=1 << 23)


def vision(folder: Path) -> None:
    """A LLaVA whose text half is the tiny model and whose eye sees four patches."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    image_token = text["vocab_size"]
    eye: dict[str, Any] = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
    }
    eye |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32}
    config: dict[str, Any] = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {**text, "vocab_size": 2112},
    }
    config |= {"vision_config": eye, "image_token_index": image_token, "vision_feature_layer": -2, "dtype": "float32"}
    config |= {"vision_feature_select_strategy": "default", "projector_hidden_act": "gelu", "image_seq_length": 4}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    token = {**tokenizer["added_tokens"][0], "id": image_token, "content": "<image>"}
    tokenizer["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    size: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**size, "processor_class": "LlavaProcessor"}), encoding="utf-8"
    )
    settings = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    settings |= {"vision_feature_select_strategy": "default"}
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")


BROKEN: dict[str, Callable[[Path], None]] = {
    change.__name__.replace("_", "-"): change
    for change in (
        config_not_json,
        unknown_architecture,
        unknown_model_type,
        remote_code,
        no_tokenizer,
        no_weights,
        truncated_weights,
        missing_tensor,
        wrong_shape,
        unreadable,
        large,
        long_context,
        vision,
    )
}


def broken_model(name: str, parent: Path) -> Path:
    """The folder of the model of this name, made under `parent`; "tiny" is the sound one where it lies."""
    if name == "tiny":
        return model_home()
    folder = copy_of_tiny(parent / name)
    BROKEN[name](folder)
    return folder


def lora_adapter(parent: Path) -> Path:
    """A LoRA adapter of zeros for the tiny model."""
    folder = parent / "adapter"
    folder.mkdir()
    rank, shapes = 8, tiny_tensors(model_home())
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors: dict[str, list[int]] = {}
    for name in (name for name in shapes if "q_proj" in name or "v_proj" in name):
        rows, columns = shapes[name]
        at = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{at}.lora_A.weight": [rank, columns], f"{at}.lora_B.weight": [rows, rank]}
    (folder / "adapter_model.safetensors").write_bytes(safetensors_file(tensors))
    return folder

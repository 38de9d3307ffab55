"""Models for the proof of containment: their weights are random but not small, so that every token depends on all before it.

With vLLM's dummy weights a greedy answer repeats one token whatever the prompt is, and a wrong KV cache would not show.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lab.engine.failure_models import broken_model, change_config, copy_of_tiny, tiny_tensors
from lab.engine.install import model_home

SEED = 7
HEADER_BYTES = 8  # the length of the JSON header that follows


def lively_model(folder: Path) -> Path:
    """The tiny Llama with random weights and an output layer of its own, written into this folder."""
    copy_of_tiny(folder)
    change_config(folder, tie_word_embeddings=False)
    shapes = tiny_tensors(folder)
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    dice = np.random.default_rng(SEED)
    write_safetensors(folder / "model.safetensors", {name: _values(dice, name, shape) for name, shape in shapes.items()})
    return folder


def _values(dice: np.random.Generator, name: str, shape: list[int]) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    spread = 1.0 if "embed" in name else 3.0 / np.sqrt(shape[-1])
    return dice.normal(0.0, spread, shape).astype(np.float32)


def lively_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for the lively model that changes its answers, written into this folder."""
    folder.mkdir(parents=True)
    rank, names = 8, ("q_proj", "v_proj", "o_proj")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    dice = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, (rows, columns) in _projections(names):
        at = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{at}.lora_A.weight"] = dice.normal(0.0, 0.5, (rank, columns)).astype(np.float32)
        tensors[f"{at}.lora_B.weight"] = dice.normal(0.0, 0.5, (rows, rank)).astype(np.float32)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def _projections(names: tuple[str, ...]) -> list[tuple[str, tuple[int, int]]]:
    shapes = tiny_tensors(model_home())
    return [(name, (shape[0], shape[1])) for name, shape in shapes.items() if any(each in name for each in names)]


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 arrays in the safetensors format: a length, a JSON header, the values."""
    header, end = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(HEADER_BYTES, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def picture_model(folder: Path) -> Path:
    """The tiny LLaVA, without weights: started with `--load-format dummy` and PLIMSOLL_LAB_LIVELY=1 it gets lively ones."""
    return broken_model("vision", folder)

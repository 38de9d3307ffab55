"""Model folders for the GPU runs: what is inherited, what pictures need, and an adapter as PEFT writes one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from lab.gpu.load import picture
from lab.gpu.models import OURS, config_of, fill_vocabulary, write_adapter, write_picture_files

MODELS: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 8, "layers": 2},
    "small": {"like": "base", "layers": 1, "adapter": {"rank": 2}},
}


def test_our_own_keys_never_reach_the_engine() -> None:
    """A configuration has what it inherits and nothing of how it was made."""
    assert config_of(MODELS, "small") == {"hidden_size": 8, "layers": 1}
    assert not set(OURS) & set(config_of(MODELS, "small"))


def test_every_id_of_the_model_is_a_token_with_a_text(tmp_path: Path) -> None:
    """No id is missing and none is used twice; what the tokenizer knew before keeps its id, and special tokens stay special."""
    path = tmp_path / "tokenizer.json"
    special = [{"id": 0, "content": "<s>", "special": True}]
    known = {"<s>": 0, "a": 1, "Ġb": 2}
    path.write_text(json.dumps({"added_tokens": special, "model": {"type": "BPE", "vocab": known, "merges": []}}))
    fill_vocabulary(tmp_path, 6)
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    assert tokenizer["added_tokens"] == special
    assert tokenizer["model"] == {"type": "BPE", "vocab": known | {"Ġt3": 3, "Ġt4": 4, "Ġt5": 5}, "merges": []}
    fill_vocabulary(tmp_path, 6)
    assert json.loads(path.read_text(encoding="utf-8")) == tokenizer


def test_an_adapter_has_the_form_of_a_real_one(tmp_path: Path) -> None:
    """Two tensors for each layer, of the shapes that PEFT gives them, all zeros."""
    write_adapter(tmp_path, 3, {"lm_head": [4, 10], "model.layers.0.mlp.down_proj": [6, 4]})
    raw = (tmp_path / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert {name: row["shape"] for name, row in head.items()} == {
        "base_model.model.lm_head.lora_A.weight": [3, 4],
        "base_model.model.lm_head.lora_B.weight": [10, 3],
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": [3, 6],
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": [4, 3],
    }
    ends = [row["data_offsets"] for row in head.values()]
    assert ends[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    assert len(raw) == 8 + length + ends[-1][1]
    config = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["r"] == 3
    assert config["target_modules"] == ["down_proj", "lm_head"]


def test_pictures_are_cut_to_the_size_the_encoder_takes(tmp_path: Path) -> None:
    """And a chat with one becomes a prompt that has its place."""
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    write_picture_files(tmp_path, {"image_size": 336, "patch_size": 14})
    scaling = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert scaling["crop_size"] == {"height": 336, "width": 336}
    assert "<image>" in json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    assert picture(9).startswith("data:image/png;base64,iVBORw0KGgo")

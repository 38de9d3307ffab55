"""What is run on a GPU: its models, its stages and its block tables, without a GPU."""

from __future__ import annotations

import base64
import itertools
import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab.arrivals import Traffic
from lab.gpu.load import picture
from lab.gpu.measure_blocks import LAYOUTS, table
from lab.gpu.measure_service import all_servers
from lab.gpu.models import OURS, VISION, config_of, fill_vocabulary, write_adapter, write_picture_files
from lab.gpu.provoke_failures import HERE
from plimsoll.vllm.flags import flags_of

MODELS: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 8, "layers": 2},
    "small": {"like": "base", "layers": 1, "adapter": {"rank": 2}},
}


def test_our_own_keys_never_reach_the_engine() -> None:
    """A configuration has what it inherits and nothing of how it was made."""
    assert config_of(MODELS, "small") == {"hidden_size": 8, "layers": 1}
    assert not set(OURS) & set(config_of(MODELS, "small"))


def test_every_id_of_the_model_is_a_token(tmp_path: Path) -> None:
    """No id is missing and none is used twice; what was known keeps its id, and special tokens have the ids they are given."""
    path = tmp_path / "tokenizer.json"
    first = {"id": 0, "content": "<s>", "special": True}
    known = {"<s>": 0, "a": 1, "Ġb": 2}
    path.write_text(json.dumps({"added_tokens": [first], "model": {"type": "BPE", "vocab": known, "merges": []}}))
    fill_vocabulary(tmp_path, 6, {"<|image_pad|>": 4})
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    assert tokenizer["model"] == {"type": "BPE", "vocab": known | {"Ġt3": 3, "<|image_pad|>": 4, "Ġt5": 5}, "merges": []}
    assert tokenizer["added_tokens"][0] == first
    assert [(token["id"], token["content"], token["special"]) for token in tokenizer["added_tokens"][1:]] == [
        (4, "<|image_pad|>", True)
    ]


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


def test_pictures_are_cut_as_the_encoder_takes_them(tmp_path: Path) -> None:
    """And a chat with one becomes a prompt that has its place, with tokens that the configuration knows."""
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    write_picture_files(tmp_path, {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2})
    scaling = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert (scaling["patch_size"], scaling["temporal_patch_size"], scaling["merge_size"]) == (14, 2, 2)
    template = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    assert "<|image_pad|>" in template
    assert set(re.findall(r"<\|\w+\|>", template)) <= set(VISION)


@pytest.mark.parametrize("side", [9, 300])
def test_a_picture_is_a_png_of_its_size(side: int) -> None:
    """Every pixel of every row is there, also where the stripes repeat."""
    kind, data = picture(side).split(",")
    assert kind == "data:image/png;base64"
    raw = base64.b64decode(data)
    assert raw[16:24] == side.to_bytes(4, "big") * 2
    pixels = zlib.decompress(raw[raw.index(b"IDAT") + 4 :])
    assert pixels == b"".join(b"\0" + bytes((3 * x + y) % 256 for x in range(3 * side)) for y in range(side))


PLAN: dict[str, Any] = json.loads((HERE / "service_runs.json").read_text(encoding="utf-8"))
VERBS = {"load": 4, "start": 2, "stop": 2, "warm-up": 2, "say": 3}


def test_every_step_speaks_of_what_there_is() -> None:
    """Servers, traffic and models have known names, no two loads write one file, and every flag is one of the release there."""
    labels: Counter[str] = Counter()
    for stage in PLAN["stages"].values():
        assert set(all_servers(stage)) <= set(PLAN["servers"])
        for step in stage["steps"]:
            assert len(step) >= VERBS[step[0]], step
            if step[0] == "load":
                assert step[3] in PLAN["traffic"]
                labels[step[2]] += 1
                assert step[2].rsplit("-", 1)[1].isdigit(), "the number of its round, which makes its prompts its own"
    assert set(labels.values()) == {1}
    assert {spec["model"] for spec in PLAN["servers"].values()} <= set(PLAN["models"])
    for spec in PLAN["traffic"].values():
        Traffic(**{key: value for key, value in spec.items() if key != "promise"}).arrivals()

    known = flags_of("0.25.1")
    for spec in PLAN["servers"].values():
        assert [flag for flag in spec["flags"] if flag.startswith("--") and flag not in known] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_is_used_once(layout: str) -> None:
    """Whatever the layout, the same bytes are read."""
    rows = table(layout, 6, 32)
    assert [len(row) for row in rows] == [32] * 6
    assert sorted(itertools.chain(*rows)) == list(range(6 * 32))

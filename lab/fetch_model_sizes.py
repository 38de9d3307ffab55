"""Renews the models that llmfit lists: `python -m lab.fetch_model_sizes`, then `python -m lab.write_model_catalogue`.

llmfit, a tool on PyPI (MIT), holds a table of Hugging Face models in its program: family, layers, heads, widths, experts, words
and the number of parameters in the weights. A model is taken only where the shape made of those facts has that number of
parameters: as like a model of the catalogue with the same facts, or of the same family with the very same number, else, in
families without windows or states, as its own.
Quantised editions and what few people fetch are left out: the name's words derive the former.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.model_table import CLASSES
from lab.write_model_catalogue import DATA, FINETUNES, FOUND, facts_of
from plimsoll.errors import PlimsollError
from plimsoll.models.derive import derive
from plimsoll.models.files import bundled_model
from plimsoll.models.shape import FAMILY_TABLE, ModelShape
from plimsoll.plan.weights_checkpoint import parameters

WHEEL = "llmfit==1.1.17"
SOURCE = "llmfit"
NOT_SERVED = re.compile(
    r"dflash|supermulti|tiny-|stories|eagle|dspark|medusa|mlx|onnx|xenova|gguf|random|testing|test$|tokenizer|-0b-",
    re.IGNORECASE,
)
FETCHED_AT_LEAST = 20  # times in the month before the table was made
QUANTIZED = re.compile(rf"[-_.]{FAMILY_TABLE['quantised_names']['word']}(?=[-_.]|$)", re.IGNORECASE)
OFF_BY_AT_MOST = 0.006
OWN_AT_LEAST = 500
LIKE_BETWEEN = (0.95, 1.02)  # some leave out the encoder or the layers that draft
# Classes in vLLM of the families whose layers are all alike, so that the table's facts are the whole shape.
PLAIN = CLASSES | {
    "apertus": "ApertusForCausalLM", "arcee": "ArceeForCausalLM", "bert": "BertModel", "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM", "internlm2": "InternLM2ForCausalLM", "internlm3": "InternLM3ForCausalLM",
    "minicpm": "MiniCPMForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "roberta": "RobertaModel", "seed_oss": "SeedOssForCausalLM", "solar": "SolarForCausalLM", "stablelm": "StableLmForCausalLM",
    "xlm-roberta": "XLMRobertaModel",
}  # fmt: skip
NOT_PLAIN = (
    "gemma2",
    "gemma3_text",
    "phimoe",
    "glm4_moe",
    "deepseek_v2",
    "jamba",
    "falcon",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen2_moe",
)
Row = Mapping[str, Any]


def table_in(wheel: Path) -> Iterator[Row]:
    """The rows of the table that the program in a wheel holds as text, those of models that people fetch first."""
    with zipfile.ZipFile(wheel) as archive:
        program = max(archive.infolist(), key=lambda member: member.file_size)
        text = archive.read(program).decode("utf-8", "ignore")
    tables = (
        json.JSONDecoder().raw_decode(text, match.start())[0] for match in re.finditer(r'\[\s*\{\s*"name": "[^"]+/', text)
    )
    rows = max(tables, key=len)
    yield from sorted(rows, key=lambda row: -row["hf_downloads"])


def config_of(row: Row, *, tied: bool) -> dict[str, Any]:
    """The config.json that the facts of a row make, in a family whose layers are all alike."""
    config = {
        "architectures": [PLAIN[row["architecture"]]],
        "model_type": row["architecture"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": tied,
        "hidden_size": row["hidden_size"],
        "num_hidden_layers": row["num_hidden_layers"],
        "num_attention_heads": row["num_attention_heads"],
        "num_key_value_heads": row["num_key_value_heads"],
        "head_dim": row.get("head_dim"),
        "intermediate_size": row["moe_intermediate_size"],
        "vocab_size": row["vocab_size"],
        "max_position_embeddings": row["context_length"],
    }
    if row.get("num_experts"):
        config |= {"num_experts": row["num_experts"], "num_local_experts": row["num_experts"]}
        config |= {"num_experts_per_tok": row["active_experts"], "moe_intermediate_size": row["moe_intermediate_size"]}
    if row["architecture"] == "opt":
        config |= {"ffn_dim": config.pop("intermediate_size"), "word_embed_proj_dim": row["hidden_size"]}
    without = {key: value for key, value in config.items() if value is not None}
    return without | ({"sliding_window": None} if row["architecture"] in ("mistral", "mixtral") else {})


def key_of(shape: ModelShape) -> tuple[object, ...]:
    """What a row says of a shape, besides its words and its number of parameters."""
    width = shape.moe.intermediate_size if shape.moe else shape.intermediate_size
    experts = shape.moe.experts if shape.moe else None
    return shape.model_type, len(shape.layers), shape.attention_heads, shape.hidden_size, width, experts


def plain_config(row: Row) -> dict[str, Any] | None:
    """The config of a model in a plain family, where it has the row's number of parameters; else None."""
    is_plain = row["architecture"] in PLAIN and row["architecture"] not in NOT_PLAIN
    if not (is_plain and row.get("num_hidden_layers") and row.get("hidden_size") and row.get("vocab_size")):
        return None
    for tied in (False, True):
        try:
            config = config_of(row, tied=tied)
            counted = parameters(ModelShape.from_config(config))
        except PlimsollError:
            continue
        if abs(counted / row["parameters_raw"] - 1) <= OFF_BY_AT_MOST:
            return config
    return None


def is_near(shape: ModelShape, listed: int) -> bool:
    """True if a shape has about so many parameters; a file that holds a tied head as well counts it twice."""
    counted = parameters(shape)
    head = shape.vocab_size * shape.hidden_size
    return any(LIKE_BETWEEN[0] <= listed / number <= LIKE_BETWEEN[1] for number in (counted, counted + head, counted - head))


def models_of(rows: Sequence[Row], catalogue: Mapping[str, ModelShape]) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """The models of the table that the catalogue does not answer: each with the name it is like, or with its own config."""
    alike = defaultdict[tuple[object, ...], list[tuple[ModelShape, str]]](list)
    answered = {name.lower() for name in catalogue}
    plain = {name: bool(shape.quantization) for name, shape in catalogue.items()}
    for name, shape in catalogue.items():
        if shape.quantization is None:
            alike[key_of(shape)].append((shape, name))
    own_names = {name.lower(): name for name, shape in catalogue.items() if shape.quantization is None}
    same = {
        (row["architecture"], row["parameters_raw"]): own_names[row["name"].lower()]
        for row in rows
        if row["name"].lower() in own_names
    }
    for row in rows:
        name = row["name"]
        twin = same.get((row["architecture"], row["parameters_raw"]))
        if name.lower() in answered or not (twin or row["hf_downloads"] >= FETCHED_AT_LEAST):
            continue
        if QUANTIZED.search(name) or NOT_SERVED.search(name):
            continue
        facts = (
            "architecture",
            "num_hidden_layers",
            "num_attention_heads",
            "hidden_size",
            "moe_intermediate_size",
            "num_experts",
        )
        key = tuple(row.get(fact) for fact in facts)
        near = [
            (shape.vocab_size != row["vocab_size"], shape.max_context != row["context_length"], len(other), other)
            for shape, other in alike[key]
            if is_near(shape, row["parameters_raw"])
        ]
        answered.add(name.lower())
        if derive(name, plain) is not None:
            continue
        if near or twin:
            yield name, twin or min(near)[3]
        elif row["hf_downloads"] >= OWN_AT_LEAST and not alike[key] and (config := plain_config(row)):
            alike[key].append((ModelShape.from_config(config), name))
            yield name, facts_of(config)


def main() -> int:
    """Download, read, and write both files anew."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True)
        rows = list(table_in(next(Path(folder).glob("*.whl"))))
    lines = [line for line in FOUND.read_text(encoding="utf-8").splitlines() if json.loads(line)["source"] != SOURCE]
    catalogue = {}
    for name, entry in json.loads(DATA.read_bytes())["models"].items():
        if entry["source"] != SOURCE and (model := bundled_model(name)) is not None:
            catalogue[name] = ModelShape.from_config(model.config)
    finetunes = defaultdict[str, list[str]](list)
    for name, what in models_of(rows, catalogue):
        if isinstance(what, str):
            finetunes[what].append(name)
        else:
            lines.append(json.dumps({"model": name, "source": SOURCE, "config": what}))
    FOUND.write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = ",\n".join(f"{json.dumps(like)}:{json.dumps(sorted(names))}" for like, names in sorted(finetunes.items()))
    FINETUNES.write_text("{\n" + text + "\n}\n", encoding="utf-8")
    print(f"{len(lines)} own shapes in {FOUND.name}, {sum(map(len, finetunes.values()))} names like others in {DATA.parent}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

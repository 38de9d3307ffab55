"""Write models/data/models.json and docs/models.md: `python -m lab.write_model_catalogue [FOLDER_OF_CONFIG_JSONS]`.

Out of each config.json only the keys that ModelShape reads are kept, found by watching it read. Further models come
from lab/model_table.py, whose every row names where its facts are known from.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.model_table import ALIASES, CLASSES, COLUMNS, MOE, QUANTIZATION, QUANTIZED_AS, RENAMED, ROWS, SOURCES, SPECIAL, WORDS
from plimsoll.models.shape import ModelShape

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT.parent / "shared" / "data" / "model-configs"
DATA = ROOT / "src" / "plimsoll" / "models" / "data" / "models.json"
FINETUNES = DATA.with_name("finetunes.json")  # written by lab/fetch_model_sizes.py
PAGE = ROOT / "docs" / "models.md"
FOUND = Path(__file__).parent / "model_configs.jsonl"  # facts of public config.json files, one model a line, with its source
MARK = "<!-- The list below is printed by `python -m lab.write_model_catalogue`; change lab/model_table.py, not this. -->\n"


class _Watched(dict[str, Any]):
    """An object of a config.json that remembers which of its keys were looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: _watch(value) for key, value in values.items()})
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.seen.update(self)
        return super().items()


def _watch(value: Any) -> Any:
    if isinstance(value, dict):
        return _Watched(value)
    return [_watch(item) for item in value] if isinstance(value, list) else value


def _looked_at(value: Any, *, nulls: bool) -> Any:
    if isinstance(value, _Watched):
        kept = {key: dict.__getitem__(value, key) for key in value if key in value.seen}
        return {key: _looked_at(inner, nulls=nulls) for key, inner in kept.items() if nulls or inner is not None}
    return [_looked_at(item, nulls=nulls) for item in value] if isinstance(value, list) else value


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that decide its ModelShape, and no others."""
    shape = ModelShape.from_config(config)
    watched = _Watched(config)
    ModelShape.from_config(watched)
    for nulls in (False, True):  # a null key matters only where the family has a default for it
        facts: dict[str, Any] = _looked_at(watched, nulls=nulls)
        if ModelShape.from_config(facts) == shape:
            return facts
    raise AssertionError("ModelShape reads a key in a way that is not seen here")


def pack(value: Any) -> Any:
    """The same facts with long, repetitive lists written as a table of items and their order; `unpack` undoes it."""
    if isinstance(value, dict):
        return {key: pack(inner) for key, inner in value.items()}
    if not isinstance(value, list) or len(value) < 12:
        return value
    table: list[str] = []
    order = []
    for item in value:
        text, number = item, ""
        if isinstance(item, str) and "#" not in item and (found := re.search(r"\d+", item)):
            text, number = item[: found.start()] + "#" + item[found.end() :], ":" + found.group()
        key = json.dumps(text)
        if key not in table:
            table.append(key)
        order.append(f"{table.index(key)}{number}")
    packed = {"~of": [pack(json.loads(key)) for key in table], "~in": " ".join(order)}
    return packed if len(json.dumps(packed)) < len(json.dumps(value)) else value


def _row(line: str) -> tuple[str, str, dict[str, Any]]:
    name, source, family, *rest = line.split()
    sizes, words = rest[: len(COLUMNS)], rest[len(COLUMNS) :]
    facts: dict[str, Any] = {"architectures": [CLASSES[family]], "model_type": family, "torch_dtype": "bfloat16"}
    facts |= {key: int(size) for key, size in zip(COLUMNS, sizes, strict=True) if size != "-"}
    if family == "opt":
        facts |= {"ffn_dim": facts.pop("intermediate_size"), "word_embed_proj_dim": facts["hidden_size"]}
    for word in words:
        facts |= WORDS[word]
    return name, source, facts | MOE.get(name, {})


def original_of(path: Path) -> tuple[str, dict[str, Any]] | None:
    """A file of the collection as (id, config), or None where its name says quantised and nothing says how."""
    name = path.stem.replace("__", "/", 1)
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    name = RENAMED.get(name, name)
    if name in QUANTIZED_AS:  # the copy of its config.json leaves out what its maker says of both
        beside = json.loads((path.parent / f"{QUANTIZED_AS[name].replace('/', '__')}.json").read_text(encoding="utf-8"))
        config["quantization_config"] = beside.get("text_config", beside)["quantization_config"]
    if name in QUANTIZATION:
        config["quantization_config"] = {"producer": {"name": "modelopt"}, "quantization": QUANTIZATION[name]}
    if re.search(r"FP8|FP4|INT4|INT8|AWQ|GPTQ", name) and ModelShape.from_config(config).quantization is None:
        return None  # planned as it stands it would seem two to four times as large as it is
    return name, config


def _entries(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    same: dict[str, str] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name.lower()):
        if (found := original_of(path)) is None:
            continue
        name, config = found
        facts = facts_of(config)
        first = same.setdefault(json.dumps(facts, sort_keys=True), name)
        entry = {"config": pack(facts)} if first == name else {"like": first}
        yield name, {"source": "config.json"} | entry
    for line in ROWS.strip().splitlines():
        name, source, facts = _row(line)
        yield name, {"source": source, "config": pack(facts_of(facts))}
    for line in ALIASES.strip().splitlines():
        name, like, source, *words = line.split()
        differs = {key: value for word in words for key, value in WORDS[word].items()}
        yield name, {"source": source, "like": like} | ({"config": pack(differs)} if differs else {})
    for name, (source, base, facts) in SPECIAL.items():
        yield name, {"source": source} | ({"like": base} if base else {}) | {"config": pack(facts)}
    there = {original[0] for path in folder.glob("*.json") if (original := original_of(path)) is not None}
    for line in FOUND.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if (name := row.pop("model")) not in there:
            yield name, row | ({"config": pack(row["config"])} if "config" in row else {})


def catalogue(folder: Path) -> str:
    """The whole of models.json: one model a line, so that a change is a line of a diff."""
    models: dict[str, dict[str, Any]] = {}
    for name, entry in _entries(folder):
        assert name not in models or entry["source"] == "aisimulate", f"{name} is there twice"
        models[name] = entry  # the wheel's config.json comes last, and is a better witness than a table
    assert all(entry.get("like", name) in models for name, entry in models.items()), "a model is like one that is not there"
    sources = {key: {"says": says, "config": config} for key, (says, config) in SOURCES.items()}
    files = sorted({entry["source"] for entry in models.values()} - sources.keys())
    pages = [source for source in files if source.startswith("https://")]
    agrees = "taken from {like}, which agrees with what "
    sources |= {page: {"says": f"{agrees}{page} says of it; its config.json was not read", "config": False} for page in pages}
    files = [source for source in files if source not in pages]
    copies = [source for source in files if source.startswith(("huggingface.co/", "docs.nvidia.com/"))]
    counted = "the config.json at {}, which gives as many parameters as were published"
    sources |= {copy: {"says": counted.format(copy), "config": True} for copy in copies}
    files = [source for source in files if source not in copies]
    sources |= {file: {"says": f"the model's own config.json, as published in {file}", "config": True} for file in files}
    lines = [f"{json.dumps(name)}:{json.dumps(models[name], separators=(',', ':'))}" for name in sorted(models, key=str.lower)]
    head = f'{{"schema":"plimsoll.models/1",\n"sources":{json.dumps(sources, indent=1)},\n"models":{{\n'
    return head + ",\n".join(lines) + "\n}}\n"


def page(text: str) -> str:
    """docs/models.md with its list made anew from the catalogue."""
    from plimsoll.models.files import bundled_model, bundled_names

    head = text.partition(MARK)[0]
    rows = ["", f"{len(bundled_names())} models.", "", "| Model | Known from |", "|---|---|"]
    for name in bundled_names():
        model = bundled_model(name)
        assert model is not None
        rows.append(f"| {name} | {model.source} |")
    return head + MARK + "\n".join(rows) + "\n"


if __name__ == "__main__":
    DATA.write_text(catalogue(Path(sys.argv[1]) if len(sys.argv) > 1 else CONFIGS), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

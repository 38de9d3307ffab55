"""Reads a model's folder: config.json, how its weights are quantised, and how large they are, without opening any weights.

A safetensors file is read up to the end of its header. A pickle (.bin, .pt, .pth) is never opened: only its size is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import scandir
from pathlib import Path
from typing import NamedTuple

from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.safetensors_headers import SHARDS_MAX, TensorInfo, join_headers, open_plain, read_header

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
# In the order in which vLLM prefers them: Mistral's own file only where there is no other.
INDEXES = (INDEX, "consolidated.safetensors.index.json")
PICKLE_INDEX = "pytorch_model.bin.index.json"
CONFIG_MAX_BYTES = 16 << 20
INDEX_MAX_BYTES = 128 << 20

_ENTRIES_MAX = 20_000
_PICKLES = (".bin", ".pt", ".pth")
# What a trainer leaves behind and vLLM passes over.
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_DISAGREE = 0.01


class ModelFiles(NamedTuple):
    """What is known of a model before anything is launched."""

    name: str
    config: Mapping[str, object]
    tensors: tuple[TensorInfo, ...] | None
    total_bytes: int | None
    source: str
    notes: tuple[str, ...] = ()


class Index(NamedTuple):
    """The index of a checkpoint in several files."""

    shards: tuple[str, ...]
    total_bytes: int | None


class _Weights(NamedTuple):
    tensors: tuple[TensorInfo, ...] | None
    total_bytes: int | None
    note: str | None = None


def read_folder(folder: Path, name: str, source: str) -> ModelFiles:
    """The model in a local folder; BadInput where it has no config.json or something in it is broken."""
    config_path = folder / CONFIG
    names = _names_in(folder)
    if CONFIG not in names:
        raise BadInput(f"{folder}: no config.json in it{_instead(names)}")
    config = dict(read_json(config_path, CONFIG_MAX_BYTES))
    notes: list[str] = []
    if QUANTIZATION in names:
        config = with_quantization(config, lambda: read_json(folder / QUANTIZATION, INDEX_MAX_BYTES))
    weights = _weights(folder, names)
    if weights.note is not None:
        notes.append(weights.note)
    return ModelFiles(name, config, weights.tensors, weights.total_bytes, source, tuple(notes))


def with_quantization(config: dict[str, object], read: Callable[[], Mapping[str, object] | None]) -> dict[str, object]:
    """The config with ModelOpt's hf_quant_config.json in it, where it does not itself say how it is quantised."""
    inner = config.get("text_config")
    parts: list[Mapping[str, object]] = [config, inner] if isinstance(inner, Mapping) else [config]
    if any(part.get(key) for part in parts for key in ("quantization_config", "compression_config")):
        return config
    said = read()
    return config | {"quantization_config": said} if said else config


def read_json(path: Path, most_bytes: int) -> Mapping[str, object]:
    """A JSON object from a file."""
    try:
        with open_plain(path) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_json(content, most_bytes, str(path))


def parse_json(content: bytes, most_bytes: int, where: str) -> Mapping[str, object]:
    """A JSON object, however it was come by."""
    if len(content) > most_bytes:
        raise TooLarge(f"{where}: larger than {most_bytes >> 20} MiB, which no such file is")
    try:
        parsed = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BadInput(f"{where}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON: {error.msg} (line {error.lineno})") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: JSON with numbers too long or nested too deep") from None
    if not isinstance(parsed, dict):
        raise BadInput(f"{where}: the top level should be an object")
    return parsed


def parse_index(index: Mapping[str, object], where: str) -> Index:
    """The shards of an index and the size it states; a shard must be a plain name in the same folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadInput(f"{where}: weight_map is missing")
    shards: dict[str, None] = {}
    for shard in weight_map.values():
        if not isinstance(shard, str) or not shard or len(shard) > 255 or set(shard) & set("/\\\0\n\r") or shard in (".", ".."):
            raise BadInput(f"{where}: weight_map names {ascii(shard)[:80]}, which is not a file of the same folder")
        shards[shard] = None
    if len(shards) > SHARDS_MAX:
        raise TooLarge(f"{where}: {len(shards):,} shards, more than any model has")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return Index(tuple(sorted(shards)), total if type(total) is int and total > 0 else None)


def size_note(stated: int | None, found: int) -> str | None:
    """A sentence where an index and its shards disagree on the size; the shards are right."""
    if stated is None or abs(stated - found) <= _DISAGREE * found:
        return None
    return f"The index states {stated:,} bytes of weights, the headers of its shards {found:,}; the headers were taken."


def _names_in(folder: Path) -> frozenset[str]:
    try:
        with scandir(folder) as entries:
            names = [entry.name for _, entry in zip(range(_ENTRIES_MAX + 1), entries, strict=False)]
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {error.strerror or error}") from None
    if len(names) > _ENTRIES_MAX:
        raise TooLarge(f"{folder}: more than {_ENTRIES_MAX:,} files, so not a model's folder")
    return frozenset(names)


def _instead(names: frozenset[str]) -> str:
    """What a folder without config.json seems to be."""
    if any(name.endswith(".gguf") for name in names):
        return "; GGUF is not supported: give the folder of the original model"
    if "adapter_config.json" in names:
        return ": it holds a LoRA adapter; give the base model"
    if "params.json" in names:
        return ", only Mistral's params.json, which is not supported: give the folder of the Hugging Face format"
    if "snapshots" in names:
        return "; it is a Hugging Face cache entry: give the folder under snapshots/"
    return ""


def _weights(folder: Path, names: frozenset[str]) -> _Weights:
    """The first description of the weights that the folder has."""
    for index_name in INDEXES:
        if index_name in names:
            index = parse_index(read_json(folder / index_name, INDEX_MAX_BYTES), str(folder / index_name))
            return _from_index(folder, index, names)
    files = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_"))
    files = [name for name in files if not name.startswith("consolidated")] or files
    if files:
        return _from_headers(folder, files, None)
    if PICKLE_INDEX in names:
        total = parse_index(read_json(folder / PICKLE_INDEX, INDEX_MAX_BYTES), str(folder / PICKLE_INDEX)).total_bytes
        return _Weights(None, total, "The weights are pickles, which are never opened: their size is the one in their index.")
    pickles = [name for name in names if name.endswith(_PICKLES) and name not in _NOT_WEIGHTS]
    if pickles:
        note = f"The weights are pickles, which are never opened: the size is that of {len(pickles)} files on disk."
        return _Weights(None, sum(_size(folder / name) for name in pickles), note)
    if any(name.endswith(".gguf") for name in names):
        raise BadInput(f"{folder}: its weights are GGUF, which is not supported: give the folder of the original model")
    return _Weights(None, None, "The folder holds no weights, so their size is worked out from config.json.")


def _from_index(folder: Path, index: Index, names: frozenset[str]) -> _Weights:
    absent = [shard for shard in index.shards if shard not in names]
    if not absent and index.shards:
        return _from_headers(folder, index.shards, index.total_bytes)
    note = f"{len(absent)} of {len(index.shards)} shards are not in the folder, so the size is the one in the index."
    if index.total_bytes is None:
        note = f"{len(absent)} of {len(index.shards)} shards are not in the folder and the index states no size."
    return _Weights(None, index.total_bytes, note)


def _from_headers(folder: Path, files: Sequence[str], stated: int | None) -> _Weights:
    if len(files) > SHARDS_MAX:
        raise TooLarge(f"{folder}: {len(files):,} shards, more than any model has")
    header = join_headers((str(folder / name), read_header(folder / name)) for name in files)
    return _Weights(header.tensors, header.data_bytes, size_note(stated, header.data_bytes))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None

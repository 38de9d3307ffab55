"""Finds a model by the word after `vllm serve`, and reads its config.json and the size of its weights.

    folder, or path to config.json  ->  Hugging Face's cache  ->  our own cache  ->  bundled catalogue  ->  hub, if allowed
        ->  derived from the catalogue

Only the hub needs the network. The first source that knows the model answers, and `source` names it. No weights are
opened: a safetensors file is read up to the end of its header, and only the size of a pickle (.bin, .pt, .pth) is read.

The bundled data/models.json is written by `python -m lab.write_model_catalogue`: one model a line, only the keys that
ModelShape reads, each with its source. A model may be "like" another, with the keys in which it differs. finetunes.json
beside it has the names of further models that are like one of them, by `python -m lab.fetch_model_sizes`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec

from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.models.derive import derive
from plimsoll.models.safetensors import SHARDS_MAX, TensorInfo, join_headers, read_header, read_plain

if TYPE_CHECKING:
    from plimsoll.models.hub import Hub


CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
# In the order in which vLLM prefers them: Mistral's own file only where there is no other.
INDEXES = (INDEX, "consolidated.safetensors.index.json")
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLES_BY_INDEX = "The weights are pickles, which are never opened: their size is the one in their index."
CONFIG_MAX_BYTES = 16 << 20
INDEX_MAX_BYTES = 128 << 20

_CATALOGUE = Path(__file__).parent / "data" / "models.json"
_ENTRIES_MAX = 20_000
_PICKLES = (".bin", ".pt", ".pth")
# Files that a trainer leaves behind and vLLM ignores.
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_DISAGREE = 0.01
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Guesses at what a folder without config.json is, by a name in it.
_GGUF_FOLDER = "; GGUF is not supported: give the folder of the original model"
_INSTEAD_OF_CONFIG = {
    "adapter_config.json": ": it holds a LoRA adapter; give the base model",
    "params.json": ", only Mistral's params.json, which is not supported: give the folder of the Hugging Face format",
    "snapshots": "; it is a Hugging Face cache entry: give the folder under snapshots/",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's config.json, tensors and size of weights, read before anything is launched."""

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


class WeightFiles(NamedTuple):
    """Tensors and total size by a model's weight files, and a note where they are incomplete."""

    tensors: tuple[TensorInfo, ...] | None
    total_bytes: int | None
    note: str | None = None


def read_folder(folder: Path, name: str, source: str) -> ModelFiles:
    """The model in a local folder; BadInput where it has no config.json or something in it is broken."""
    try:
        with os.scandir(folder) as entries:
            names = frozenset(entry.name for entry in islice(entries, _ENTRIES_MAX + 1))
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {error.strerror or error}") from None
    if len(names) > _ENTRIES_MAX:
        raise TooLarge(f"{folder}: more than {_ENTRIES_MAX:,} files, so not a model's folder")
    if CONFIG not in names:
        holds_gguf = any(name.endswith(".gguf") for name in names)
        hint = next((hint for name, hint in _INSTEAD_OF_CONFIG.items() if name in names), "")
        raise BadInput(f"{folder}: no config.json in it{_GGUF_FOLDER if holds_gguf else hint}")
    config = dict(read_json(folder / CONFIG, CONFIG_MAX_BYTES))
    if QUANTIZATION in names:
        config = with_quantization(config, lambda: read_json(folder / QUANTIZATION, INDEX_MAX_BYTES))
    weights = _weights(folder, names)
    return ModelFiles(name, config, weights.tensors, weights.total_bytes, source, (weights.note,) if weights.note else ())


def with_quantization(config: dict[str, object], read: Callable[[], Mapping[str, object] | None]) -> dict[str, object]:
    """The config, with ModelOpt's hf_quant_config.json in it where the config names no quantisation."""
    said = None if _says_how_quantised(config) else read()
    return config | {"quantization_config": said} if said else config


def _says_how_quantised(config: Mapping[str, object]) -> bool:
    inner = config.get("text_config")
    parts: list[Mapping[str, object]] = [config, inner] if isinstance(inner, Mapping) else [config]
    return any(part.get(key) for part in parts for key in _QUANTIZATION_KEYS)


def read_json(path: Path, most_bytes: int) -> Mapping[str, object]:
    return parse_json(read_plain(path, most_bytes), most_bytes, str(path))


def parse_json(content: bytes, most_bytes: int, where: str) -> Mapping[str, object]:
    """Parses a JSON object from any source; `where` names it in errors."""
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
    """A note where an index and its shards disagree on the size (the shards are right), else None."""
    if stated is None or abs(stated - found) <= _DISAGREE * found:
        return None
    return f"The index states {stated:,} bytes of weights, the headers of its shards {found:,}; the headers were taken."


def _weights(folder: Path, names: frozenset[str]) -> WeightFiles:
    """The first description of the weights that the folder has."""
    for index_name in INDEXES:
        if index_name in names:
            index = parse_index(read_json(folder / index_name, INDEX_MAX_BYTES), str(folder / index_name))
            absent = [shard for shard in index.shards if shard not in names]
            if index.shards and not absent:
                return _from_headers(folder, index.shards, index.total_bytes)
            known = " and the index states no size" if index.total_bytes is None else ", so the size is the one in the index"
            note = f"{len(absent)} of {len(index.shards)} shards are not in the folder{known}."
            return WeightFiles(None, index.total_bytes, note)
    files = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_"))
    files = [name for name in files if not name.startswith("consolidated")] or files
    if files:
        return _from_headers(folder, files, None)
    if PICKLE_INDEX in names:
        total = parse_index(read_json(folder / PICKLE_INDEX, INDEX_MAX_BYTES), str(folder / PICKLE_INDEX)).total_bytes
        return WeightFiles(None, total, PICKLES_BY_INDEX)
    pickles = [name for name in names if name.endswith(_PICKLES) and name not in _NOT_WEIGHTS]
    if pickles:
        note = f"The weights are pickles, which are never opened: the size is that of {len(pickles)} files on disk."
        try:
            return WeightFiles(None, sum((folder / name).stat().st_size for name in pickles), note)
        except OSError as error:
            raise BadInput(f"{error.filename}: cannot be read: {error.strerror or error}") from None
    if any(name.endswith(".gguf") for name in names):
        raise BadInput(f"{folder}: its weights are GGUF, which is not supported: give the folder of the original model")
    return WeightFiles(None, None, "The folder holds no weights, so their size is worked out from config.json.")


def _from_headers(folder: Path, files: Sequence[str], stated: int | None) -> WeightFiles:
    if len(files) > SHARDS_MAX:
        raise TooLarge(f"{folder}: {len(files):,} shards, more than any model has")
    header = join_headers((str(folder / name), read_header(folder / name)) for name in files)
    return WeightFiles(header.tensors, header.data_bytes, size_note(stated, header.data_bytes))


_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}(?:/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/+]{0,199}")
# Names of models that read text and write none.
_POOLS = re.compile(r"embed|rerank|(?:^|[/-])(?:bge|e5|gte)-|minilm|cross-encoder|retriev|reward", re.IGNORECASE)


def read_model(
    name: str, *, hub: Callable[[], Hub] | None, revision: str | None = None, environment: Mapping[str, str] | None = None
) -> ModelFiles:
    """The model that vLLM would load under this name; BadInput or WorldFailed says in one line why there is none."""
    files = _find_model(name, hub, revision, os.environ if environment is None else environment)
    listed = files.config.get("architectures")
    classes = listed if isinstance(listed, (list, tuple)) else ()
    is_encoder = any(str(word).endswith(("Model", "ForSequenceClassification", "ForTokenClassification")) for word in classes)
    if is_encoder or _POOLS.search(name.rpartition("/")[2]) is not None:
        reads = "It embeds, ranks or classifies texts (vLLM: --runner pooling) and writes none"
        return replace(files, notes=(*files.notes, f"{reads}: a request ends when its text is read."))
    return files


def _find_model(name: str, hub: Callable[[], Hub] | None, revision: str | None, environment: Mapping[str, str]) -> ModelFiles:
    """The first of the sources that knows the model."""
    shown = " ".join(name.split())[:120]
    local = _local(name, shown)
    if local is not None:
        return local
    if _ID.fullmatch(name) is None or ".." in name:
        why = "neither an existing folder nor a Hugging Face id such as Qwen/Qwen3-8B"
        if scheme := re.match(r"([a-z][a-z0-9+]{1,9})://", name):
            why = f"models are not read from {scheme[0]}; give a local folder with its config.json, or a Hugging Face id"
        raise BadInput(f"{shown!a}: {why}")
    if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise BadInput(f"{shown}: {ascii(revision)[:80]} is not a revision: a branch, a tag or a commit")
    cache = own_cache(environment, _home(environment))
    known = _cached(name, revision, environment) or kept(cache, name, revision or "main")
    if known is not None:
        return known
    # The catalogue has models as they are on main: for any other revision the hub is the better source.
    bundled = None
    if (model := bundled_model(name)) is not None:
        notes = []
        if model.name != name:
            notes.append(f"Read as {model.name}: the catalogue does not tell upper from lower case.")
        if not model.is_from_config:
            entered = model.source.startswith(("entered ", "taken "))
            notes.append(f"Its shape {'was' if entered else 'is known from'} {model.source}; a local folder would settle it.")
        if revision not in (None, "main"):
            notes.append("The catalogue knows no revisions: this is the model as it stands on main.")
        bundled = ModelFiles(name, model.config, None, None, f"bundled catalogue ({model.source})", tuple(notes))
        if revision in (None, "main") or hub is None:
            return bundled
    derived = bundled or _derived(name)
    if hub is not None:
        try:
            return hub().read(name, revision)
        except WorldFailed:
            if derived is None:
                raise
            return derived
    if derived is not None:
        return derived
    why = "not a folder here, not in the local Hugging Face cache and not bundled, and the hub was not to be asked"
    raise WorldFailed(f"{shown}: {why}; {instead_of(name)}")


def _local(name: str, shown: str) -> ModelFiles | None:
    """The model in a local folder, or None where nothing of that name exists."""
    if not name.strip() or "\0" in name:
        raise BadInput("the model's name is empty" if not name.strip() else "the model's name holds a null byte")
    path = Path(name)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # a symlink that leads to itself, a name too long for the file system
        raise BadInput(f"{shown}: cannot be read: {error.strerror or error}") from None
    if is_folder:
        return read_folder(path, name, f"folder {path.resolve()}")
    if name.endswith(".gguf") or re.search(r"gguf:[\w.\-]+$", name, re.IGNORECASE):
        raise BadInput(f"{shown}: GGUF is not supported; give the original model's folder or id")
    if exists:
        if path.name == CONFIG:
            return read_folder(path.parent, name, f"folder {path.parent.resolve()}")
        raise BadInput(f"{shown}: a file, not a model; give its folder, or the path of its config.json")
    if name.startswith(("/", "./", "../", "~")) or path.name == CONFIG or path.is_symlink():
        raise BadInput(f"{shown}: no such folder")
    return None


class _Kept(msgspec.Struct):
    """The head of a kept answer."""

    schema: str
    name: str


KEPT_SCHEMA = "plimsoll.model-files/1"
KEPT_MAX_BYTES = 512 << 20


def own_cache(environment: Mapping[str, str], home: Path) -> Path:
    """Returns the folder in which plimsoll keeps the hub's answers."""
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".cache") / "plimsoll" / "models"


def cache_file(cache: Path, name: str, revision: str) -> Path:
    """Returns the file for the answer on a model and revision; neither name can lead out of the folder."""
    return cache / quote(name.replace("/", "--"), safe="") / f"{quote(revision, safe='')}.json"


def kept(cache: Path, name: str, revision: str) -> ModelFiles | None:
    """Returns the kept answer, or None where there is none or it cannot be read."""
    path = cache_file(cache, name, revision)
    try:
        with path.open("rb") as file:
            content = file.read(KEPT_MAX_BYTES + 1)
        about = msgspec.json.decode(content, type=_Kept) if len(content) <= KEPT_MAX_BYTES else None
        if about != _Kept(KEPT_SCHEMA, name):
            return None
        files = msgspec.json.decode(content, type=ModelFiles)
    except (OSError, ValueError, RecursionError):
        return None
    return replace(files, source=f"{files.source}, kept in {path}")


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 # Path.home() raises where there is none


def _cached(name: str, revision: str | None, environment: Mapping[str, str]) -> ModelFiles | None:
    """The model in Hugging Face's local cache, as huggingface_hub lays it out."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or _home(environment) / '.cache'}/huggingface"
    folder = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    repository = Path(folder) / ("models--" + name.replace("/", "--"))
    wanted = revision or "main"
    try:
        commit = (repository / "refs" / wanted).read_text(encoding="utf-8")[:128].strip()
    except (OSError, ValueError):
        commit = wanted  # a commit is its own name
    if _REVISION.fullmatch(commit) is None or ".." in commit:
        return None
    snapshot = repository / "snapshots" / commit
    try:
        if not (snapshot / CONFIG).is_file():
            return None
    except OSError:
        return None
    return read_folder(snapshot, name, f"local Hugging Face cache {snapshot}")


def _derived(name: str) -> ModelFiles | None:
    """The model as an edition, a copy or a quantisation of a bundled one."""
    derivation = derive(name, _quantized_names()) or derive(name, dict.fromkeys(_finetunes(), False))
    model = bundled_model(derivation.base) if derivation else None
    if derivation is None or model is None:
        return None
    config = dict(model.config)
    if derivation.is_requantized:
        inner = config.get("text_config")
        if isinstance(inner, Mapping):
            config["text_config"] = {key: value for key, value in inner.items() if key not in _QUANTIZATION_KEYS}
        config = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    if derivation.settings:
        config["quantization_config"] = dict(derivation.settings) | {"by_name": True}
    source = f"derived from {model.name} of the bundled catalogue ({model.source})"
    return ModelFiles(name, config, None, None, source, derivation.notes)


@functools.cache
def _quantized_names() -> Mapping[str, bool]:
    """The bundled ids, each with whether its config says how it is quantised."""
    return {name: _says_how_quantised(_bundled_config(entry)) for name, entry in _catalogue()["models"].items()}


class BundledModel(NamedTuple):
    """A model of the catalogue: the part of its config.json that decides its shape, and the source of that."""

    name: str
    config: Mapping[str, object]
    source: str
    is_from_config: bool
    """Whether the facts were read from a copy of the model's config.json, not from another public description."""


@functools.cache
def _catalogue() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(_CATALOGUE.read_bytes())
    return loaded


@functools.cache
def _finetunes() -> Mapping[str, dict[str, Any]]:
    """Further models, each as an entry that is like another."""
    listed: Mapping[str, list[str]] = json.loads(_CATALOGUE.with_name("finetunes.json").read_bytes())
    return {name: {"source": "llmfit-like", "like": like} for like, names in listed.items() for name in names}


def bundled_names() -> tuple[str, ...]:
    """The ids of the models with an entry of their own."""
    return tuple(_catalogue()["models"])


def bundled_model(name: str) -> BundledModel | None:
    """The bundled model of that id; case does not matter."""
    for entries in (_catalogue()["models"], _finetunes()):
        found = [name] if name in entries else [known for known in entries if known.lower() == name.lower()]
        if len(found) == 1:
            entry = entries[found[0]]
            source = _catalogue()["sources"][entry["source"]]
            says = source["says"].replace("{like}", entry.get("like", ""))
            return BundledModel(found[0], _bundled_config(entry), says, bool(source["config"]))
    return None


def _bundled_config(entry: Mapping[str, Any]) -> dict[str, object]:
    """The facts of one model, laid over those of the model it is like."""
    base = _bundled_config(_catalogue()["models"][entry["like"]]) if "like" in entry else {}
    return overlaid(base, unpack(entry.get("config", {})))


def instead_of(name: str) -> str:
    """What to give instead of a model that cannot be had."""
    nearest = ", ".join(nearest_names(name))
    return "give a local folder with its config.json" + (f", or a bundled model such as {nearest}" if nearest else "")


def nearest_names(name: str, most: int = 3) -> tuple[str, ...]:
    """The bundled ids that look most like `name`, the likeliest first."""
    from difflib import get_close_matches  # only for a name that is not known

    # People leave out the organisation, or get it wrong.
    known = {name.rpartition("/")[2].lower(): name for name in reversed(bundled_names())}
    wanted = name.strip("/").rpartition("/")[2].lower()[:200]
    return tuple(known[near] for near in get_close_matches(wanted, known, most, 0.5))


def overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, object]:
    """`changes` laid over `base`, object by object."""
    merged: dict[str, object] = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = overlaid(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def unpack(value: Any) -> Any:
    """Undo `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "~of" not in value:
        return {key: unpack(inner) for key, inner in value.items()}
    items = []
    for word in value["~in"].split():
        which, _, number = word.partition(":")
        item = unpack(value["~of"][int(which)])
        items.append(item.replace("#", number, 1) if number and isinstance(item, str) else item)
    return items

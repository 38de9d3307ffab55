"""Finds a model by the word that follows `vllm serve`: a folder, an id in a local cache, in our catalogue or on the hub.

    folder, or path to config.json  ->  Hugging Face's cache  ->  our own cache  ->  bundled catalogue  ->  hub, if allowed

Only the last step uses the network. The first source that knows the model answers, and says who it was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.sources.model_catalogue import bundled_model, bundled_names, nearest_names
from plimsoll.sources.model_folders import CONFIG, ModelFiles, read_folder
from plimsoll.sources.safetensors_headers import TensorInfo

if TYPE_CHECKING:
    from plimsoll.sources.hub import Hub

__all__ = ["ModelFiles", "TensorInfo", "bundled_names", "nearest_names", "read_model"]

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}(?:/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/+]{0,199}")


def read_model(
    name: str, *, hub: Hub | None, revision: str | None = None, environment: Mapping[str, str] | None = None
) -> ModelFiles:
    """The model that vLLM would load under this name; BadInput or WorldFailed says in one line why there is none."""
    env = os.environ if environment is None else environment
    shown = " ".join(name.split())[:120]
    local = _local(name, shown)
    if local is not None:
        return local
    if _ID.fullmatch(name) is None or ".." in name:
        raise BadInput(f"{shown!a}: {_not_an_id(name)}")
    if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise BadInput(f"{shown}: {ascii(revision)[:80]} is not a revision: a branch, a tag or a commit")
    known = _cached(name, revision, env) or _from_own_cache(name, revision, env)
    if known is not None:
        return known
    # The catalogue knows models as they stand on main: for a revision of its own, the hub is the better witness.
    bundled = _bundled(name, revision)
    if bundled is not None and (revision in (None, "main") or hub is None):
        return bundled
    if hub is not None:
        try:
            return hub.read(name, revision)
        except WorldFailed:
            if bundled is None:
                raise
            return bundled
    nearest = ", ".join(nearest_names(name))
    raise WorldFailed(
        f"{shown}: not a folder here, not in the local Hugging Face cache and not bundled, and the hub was not to be asked;"
        f" give a local folder with its config.json" + (f", or a bundled model such as {nearest}" if nearest else "")
    )


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


def _not_an_id(name: str) -> str:
    scheme = re.match(r"([a-z][a-z0-9+]{1,9})://", name)
    if scheme:
        return f"models are not read from {scheme.group(1)}://; give a local folder with its config.json, or a Hugging Face id"
    return "neither an existing folder nor a Hugging Face id such as Qwen/Qwen3-8B"


def hugging_face_cache(environment: Mapping[str, str]) -> Path:
    """Where Hugging Face's own tools keep what they download."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(variable):
            return Path(environment[variable])
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]) / "hub"
    base = environment.get("XDG_CACHE_HOME") or str(_home(environment) / ".cache")
    return Path(base) / "huggingface" / "hub"


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 # Path.home() raises where there is none


def _cached(name: str, revision: str | None, environment: Mapping[str, str]) -> ModelFiles | None:
    """The model in Hugging Face's local cache, as huggingface_hub lays it out."""
    repository = hugging_face_cache(environment) / ("models--" + name.replace("/", "--"))
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


def _from_own_cache(name: str, revision: str | None, environment: Mapping[str, str]) -> ModelFiles | None:
    from plimsoll.sources.hub_cache import kept, own_cache

    return kept(own_cache(environment, _home(environment)), name, revision or "main")


def _bundled(name: str, revision: str | None) -> ModelFiles | None:
    model = bundled_model(name)
    if model is None:
        return None
    notes = []
    if model.name != name:
        notes.append(f"Read as {model.name}: the catalogue does not tell upper from lower case.")
    if not model.is_from_config:
        known = f"was {model.source}" if model.source.startswith("entered ") else f"is known from {model.source}"
        notes.append(f"Its shape {known}; a local folder would settle it.")
    if revision not in (None, "main"):
        notes.append("The catalogue knows no revisions: this is the model as it stands on main.")
    return ModelFiles(name, model.config, None, None, f"bundled catalogue ({model.source})", tuple(notes))

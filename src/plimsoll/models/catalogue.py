"""The shapes of public models that come with plimsoll, so that planning them needs neither a download nor a network.

data/models.json is written by `python -m lab.write_model_catalogue`: one model a line, only the keys that ModelShape reads,
each with where it is known from. A model may be "like" another, with the keys in which it differs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_FILE = Path(__file__).parent / "data" / "models.json"
_LIKE_MAX = 4


class BundledModel(NamedTuple):
    """A model of the catalogue: as much of its config.json as decides its shape, and where that is known from."""

    name: str
    config: Mapping[str, object]
    source: str
    is_from_config: bool
    """Whether the facts were read from a copy of the model's config.json, not from another public description."""


@functools.cache
def _catalogue() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(_FILE.read_bytes())
    return loaded


def bundled_names() -> tuple[str, ...]:
    """The ids of all bundled models, in order."""
    return tuple(_catalogue()["models"])


def bundled_model(name: str) -> BundledModel | None:
    """The bundled model of that id; case does not matter."""
    models = _catalogue()["models"]
    if name not in models:
        found = [known for known in models if known.lower() == name.lower()]
        if len(found) != 1:
            return None
        name = found[0]
    source = _catalogue()["sources"][models[name]["source"]]
    return BundledModel(name, _config(name), source["says"], bool(source["config"]))


def nearest_names(name: str, most: int = 3) -> tuple[str, ...]:
    """The bundled ids that look most like `name`, the likeliest first."""
    from difflib import SequenceMatcher  # only for a name that is not known

    wanted = name.strip("/").lower()[:200]
    model = wanted.rsplit("/", 1)[-1]

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, wanted, known.lower()).ratio()
        # The organisation is what people leave out or get wrong.
        return max(whole, SequenceMatcher(None, model, known.lower().rsplit("/", 1)[-1]).ratio())

    ranked = sorted(((likeness(known), known) for known in bundled_names()), key=lambda pair: (-pair[0], pair[1]))
    return tuple(known for ratio, known in ranked[:most] if ratio >= 0.5)


def _config(name: str) -> dict[str, object]:
    """The facts of one model, laid over those of the models it is like."""
    layers: list[Mapping[str, Any]] = []
    at: str | None = name
    while at is not None:
        entry = _catalogue()["models"][at]
        layers.append(entry.get("config", {}))
        at = entry.get("like")
        assert len(layers) <= _LIKE_MAX, f"{name} is like too many models in turn"
    config: dict[str, object] = {}
    for layer in reversed(layers):
        config = _over(config, layer)
    return config


def _over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, object]:
    """`changes` laid over `base`, object by object; what is null in a config.json counts as absent there too."""
    merged: dict[str, object] = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, dict) and "~of" not in value and isinstance(old, dict):
            merged[key] = _over(old, value)
        else:
            merged[key] = unpack(value)
    return merged


def unpack(value: Any) -> object:
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

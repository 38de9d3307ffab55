"""Families by hand: each held against what its authors and vLLM's own sources say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plimsoll.models.shape import ModelShape
from tests.each import cases, each
from tests.models.model_configs import cached_elements, usual

# One letter for the kind of a layer, and one for what follows the mixing in it.
KINDS = {
    "full": "F", "sliding": "S", "chunked-local": "C", "mla": "L", "mla-sliding": "l", "mla-compressed": "c", "mamba1": "1",
    "mamba2": "M", "full-and-mamba2": "H", "gated-delta-net": "G", "kimi-delta": "K", "linear": "N", "short-conv": "V",
    "encoder": "E", "none": "-",
}  # fmt: skip
FEEDS = {"dense": "d", "experts": "e", "dense-and-experts": "b", "none": "-"}


def fact(model: ModelShape, name: str) -> object:
    """One fact of a shape: its kinds or feed-forwards as letters, a field, a field of a part, or a field of every layer."""
    if name == "kinds":
        return "".join(KINDS[kind] for kind in model.kinds)
    if name == "feeds":
        return "".join(FEEDS[layer.feed_forward] for layer in model.layers)
    if name == "sliding_window":
        return max((layer.window for layer in model.layers if layer.window is not None), default=None)
    if name == "cached":
        return [cached_elements(layer) for layer in model.layers]
    part, _, field = name.partition(".")
    if part == "layers":
        return [getattr(layer, field) for layer in model.layers]
    if part == "towers":
        return [getattr(tower, field) for tower in model.towers]
    return getattr(getattr(model, part), field) if field else getattr(model, name)


def check(config: dict[str, Any], facts: dict[str, object]) -> None:
    model = ModelShape.from_config(config)
    assert json.loads(json.dumps({name: fact(model, name) for name in facts}, default=asdict)) == facts


# One family a line: what is peculiar to it, a config.json, and the facts worked out by hand from what its authors say.
FAMILIES = [json.loads(line) for line in (Path(__file__).parent / "families.jsonl").read_text(encoding="utf-8").splitlines()]


@each("family", FAMILIES, ids=lambda family: str(family["name"]))
def test_a_family_has_the_shape_that_its_authors_give_it(family: dict[str, Any]) -> None:
    """Layers, heads, widths, states, experts and context are those worked out by hand; the name says what is peculiar."""
    check(family["config"], family["facts"])


def test_what_transformers_assumes_is_said() -> None:
    """A file that leaves something out carries a note: Gemma 3's vocabulary, the 2048 tokens of a file without a length."""
    configs = {
        family["name"].partition(" ")[0]: family["config"] for family in FAMILIES if "vocab_size" not in family["config"]
    }
    gemma = ModelShape.from_config(configs["Gemma"])
    assert any("vocab_size 262208" in note for note in gemma.notes)
    mamba = ModelShape.from_config(next(family["config"] for family in FAMILIES if family["config"]["model_type"] == "mamba"))
    assert any("2048" in note for note in mamba.notes)


@each(("keys", "feeds"), cases("models", "which_layers_have_experts"))
def test_which_layers_have_experts(keys: dict[str, Any], feeds: str) -> None:
    """Each family has its own rule for which layers have experts."""
    check(usual("qwen3_moe", num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, **keys), {"feeds": feeds})

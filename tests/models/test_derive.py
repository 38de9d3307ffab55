"""Models that are not in the catalogue, derived from those that are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.coverage import NAMES, NOWHERE, WANTED, answer, names_in
from plimsoll.errors import WorldFailed
from plimsoll.models.derive import derive
from plimsoll.models.files import bundled_model, bundled_names, read_model
from plimsoll.models.shape import ModelShape
from tests.each import cases, each


def shape_of(name: str) -> ModelShape:
    """The shape of a model, by its name alone."""
    return ModelShape.from_config(read_model(name, hub=None, environment=NOWHERE).config)


def without_edition(shape: ModelShape) -> ModelShape:
    """What all editions of one model share: not how it is quantised or stored, how long it may read, or drafts beside it."""
    bare = replace(shape, quantization=None, notes=(), dtype=None, max_context=0, default_context=0, rope=None, mtp_layers=0)
    spelled = replace(bare, architectures=(), model_type="", text_model_type="", towers=())  # published files differ in these
    tied = bool(shape.tie_word_embeddings)
    return replace(spelled, vocab_size=0, tie_word_embeddings=tied, moe=shape.moe and replace(shape.moe, expert_dtype=None))


def test_every_model_that_can_be_derived_has_the_shape_it_is_known_to_have() -> None:
    """Each bundled model is taken out and derived from the rest: what comes out is its own shape."""
    known = {name: bool(shape_of(name).quantization) for name in bundled_names()}
    tried, wrong = 0, []
    for name in bundled_names():
        derivation = derive(name, {other: how for other, how in known.items() if other != name})
        if derivation is not None:
            tried += 1
            if without_edition(shape_of(derivation.base)) != without_edition(shape_of(name)):
                wrong.append((name, derivation.base))
    assert tried > 150
    assert wrong == []


@each(("name", "base", "method"), cases("models", "a_derived_model_says_from_what"))
def test_a_derived_model_says_from_what(name: str, base: str, method: str | None) -> None:
    """The source names the model it is derived from, the notes say what was taken from the name, and how it is quantised."""
    files = read_model(name, hub=None, environment=NOWHERE)
    assert files.source.startswith(f"derived from {base} of the bundled catalogue")
    assert files.notes[0].startswith(f"Derived: the catalogue does not have {name}")
    quantization = ModelShape.from_config(files.config).quantization
    assert (quantization and quantization.method) == method


@each("name", cases("models", "what_cannot_be_derived_is_not"))
def test_what_cannot_be_derived_is_not(name: str) -> None:
    """A size, a family or an owner that the catalogue does not know is one line, never a guess."""
    with pytest.raises(WorldFailed, match=re.escape(name)):
        read_model(name, hub=None, environment=NOWHERE)


def test_the_lists_of_names_are_answered() -> None:
    """Of the names that the repository keeps, at least as many as promised are answered offline."""
    names = [name for path in NAMES.glob("*.txt") for name in names_in(path)]
    assert len(names) > 100
    assert len(names) == len(set(names))
    assert sum(answer(name) is not None for name in names) >= WANTED * len(names)


def test_every_source_is_told() -> None:
    """No bundled model is without what was read for it, or the words that nothing was; the model it was taken as is named."""
    for name in bundled_names():
        model = bundled_model(name)
        assert model is not None
        assert len(model.source) > 10, name
        assert "{like}" not in model.source, name
        assert "model card names" not in model.source, name
        assert model.is_from_config or not model.source.startswith("taken") or re.search("not (checked|read)", model.source), (
            name
        )


@each(("name", "says"), cases("models", "a_model_that_writes_no_text_says_so"))
def test_a_model_that_writes_no_text_says_so(name: str, says: str) -> None:
    """Embedding and reranking models are answered in their own terms, and no other model is taken for one."""
    notes = " ".join(read_model(name, hub=None, environment=NOWHERE).notes)
    assert says in notes if says else "embeds" not in notes


def test_whispers_encoder_and_cross_attention_are_told() -> None:
    """The encoder is a tower of its own; what the figures leave out has a size: 32 layers of 1,500 frames of 1,280, twice."""
    shape = shape_of("openai/whisper-large-v3")
    assert [(tower.what, tower.layers, tower.hidden_size) for tower in shape.towers] == [("audio", 32, 1280)]
    assert f"{2 * 1500 * 1280 * 32 * 2 / 2**20:.0f} MiB of cache a request for 1,500 frames, 30 s of speech" in shape.notes[0]

"""What the bundled catalogue promises: the same shapes as the original files, cheaply, and in step with the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.write_model_catalogue import CONFIGS, DATA, PAGE, catalogue, original_of, pack, page
from plimsoll.models.files import bundled_model, bundled_names, nearest_names, unpack
from plimsoll.models.shape import LayerKind, ModelShape
from plimsoll.plan import weights_checkpoint
from tests.each import each

ORIGINALS = sorted(CONFIGS.glob("*.json"))
# Parameters in billions: of shapes that were entered by hand, and, rounded, of models whose names say something else.
PUBLISHED, ROUNDED = (
    {name: float(size) for line in part.splitlines()[1:] for name, size in (line.split(),)}
    for part in (Path(__file__).parent / "published_sizes.txt").read_text(encoding="utf-8").split("# ")[1:]
)


def shape_of(name: str) -> ModelShape:
    """The shape of a bundled model."""
    model = bundled_model(name)
    assert model is not None, name
    return ModelShape.from_config(model.config)


@pytest.mark.skipif(not ORIGINALS, reason=f"needs the collection of config.json files in {CONFIGS}")
def test_every_bundled_file_gives_the_shape_of_the_original() -> None:
    """From the catalogue's facts comes the very ModelShape that the whole config.json gives, notes included."""
    compared = 0
    for path in ORIGINALS:
        if (found := original_of(path)) is not None:
            name, config = found
            assert shape_of(name) == ModelShape.from_config(config), name
            compared += 1
    assert compared >= 85


@pytest.mark.skipif(not ORIGINALS, reason=f"needs the collection of config.json files in {CONFIGS}")
def test_the_catalogue_is_in_step_with_its_sources() -> None:
    """Remade with `python -m lab.write_model_catalogue`."""
    assert catalogue(CONFIGS) == DATA.read_text(encoding="utf-8")


def test_the_page_lists_what_is_bundled() -> None:
    """Remade with `python -m lab.write_model_catalogue`."""
    assert PAGE.read_text(encoding="utf-8") == page(PAGE.read_text(encoding="utf-8"))


@each("name", bundled_names())
def test_every_bundled_model_has_a_shape_and_a_source(name: str) -> None:
    """No entry is broken, none is of a family unknown to us, and one whose name says quantised is."""
    model = bundled_model(name)
    assert model is not None
    assert model.source
    shape = ModelShape.from_config(model.config)
    assert not any("not known here" in note for note in shape.notes if "class" not in model.source and not model.is_from_config)
    if re.search(r"AWQ|GPTQ|FP8|NVFP4|w8a8", name):
        assert shape.quantization is not None


@each(("name", "billions"), PUBLISHED.items())
def test_hand_entered_shapes_add_up_to_the_published_size(name: str, billions: float) -> None:
    """A digit wrong in the table would show: parameters counted from the shape match the model's published number."""
    assert weights_checkpoint.parameters(shape_of(name)) / 1e9 == pytest.approx(billions, rel=0.012)


def test_a_model_may_be_like_another_with_what_differs() -> None:
    """gpt-oss-20b is the 120b with fewer layers and experts; an AWQ build has its quantisation and its base's layers."""
    small, large = shape_of("openai/gpt-oss-20b"), shape_of("openai/gpt-oss-120b")
    assert (len(small.layers), len(large.layers)) == (24, 36)
    assert small.moe is not None
    assert small.moe.experts == 32
    assert small.count(LayerKind.SLIDING) == 12
    awq = shape_of("Qwen/Qwen2.5-72B-Instruct-AWQ")
    assert awq.layers == shape_of("Qwen/Qwen2.5-72B").layers
    assert awq.quantization is not None
    assert (awq.quantization.method, awq.quantization.bits, awq.max_context) == ("awq", 4, 32768)


def test_names_are_found_in_any_case_and_near_ones_are_offered() -> None:
    """Case does not matter; a misspelt or bare name leads to the right one."""
    found = bundled_model("qwen/qwen3-8b")
    assert found is not None
    assert found.name == "Qwen/Qwen3-8B"
    assert bundled_model("Qwen/Qwen3-9B") is None
    assert nearest_names("qwen3-8b")[0] == "Qwen/Qwen3-8B"
    assert "meta-llama/Llama-3.1-8B-Instruct" in nearest_names("meta-lama/Llama-3.1-8B-Instruct")
    assert nearest_names("zzzz") == ()
    assert len(nearest_names("Qwen/Qwen3", most=5)) == 5


def test_packed_lists_come_back_as_they_were() -> None:
    """Long lists are written as a table and an order; numbers in names and odd characters survive."""
    names = ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(40)), "a#1", "model.layers.3.x.7"]
    for value in (names, [0, 1] * 20, [{"no_op": True}, {"n": None}] * 9, ["x"], {"inner": names}, list(range(100))):
        assert unpack(pack(value)) == value
    assert "~of" in pack(names)


def test_the_catalogue_is_small_and_read_only_when_asked() -> None:
    """One file under 400 kB, and importing the door does not open it."""
    assert DATA.stat().st_size < 400_000
    code = (
        "import sys, plimsoll.models.files as files;"
        "assert files._catalogue.cache_info().currsize == 0;"
        "assert not {'ssl', 'http.client', 'urllib.request', 'socket', 'tempfile'} & set(sys.modules), 'network imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z0-9])")


def test_every_bundled_shape_has_as_many_parameters_as_its_name_says() -> None:
    """Entries that were typed or taken by name are checked against the one fact that every name states."""
    wrong = []
    checked = 0
    for name in bundled_names():
        model, size = bundled_model(name), _SIZE.search(name.partition("/")[2])
        assert model is not None
        stated = ROUNDED.get(name) or (size and float(size[1]) / (1000 if size[2] in "mM" else 1))
        if stated and "llmfit" not in model.source:  # whose numbers of parameters were compared as they were taken
            checked += 1
            counted = weights_checkpoint.parameters(ModelShape.from_config(model.config)) / 1e9
            if not 0.85 <= counted / stated <= 1.2:
                wrong.append(f"{name}: {counted:.2f} for {stated:g} billion")
    assert not wrong
    assert checked >= 290

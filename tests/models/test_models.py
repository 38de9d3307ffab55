"""What `read_model` promises: who is asked, in which order, and what a folder gives."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.models.files import ModelFiles, read_model
from plimsoll.models.hub import keep
from plimsoll.models.safetensors import TensorInfo
from plimsoll.models.shape import ModelShape
from tests.each import cases, each
from tests.models.hub_server import shard
from tests.models.model_configs import usual

CONFIG = usual("llama", architectures=["LlamaForCausalLM"], hidden_size=64, num_attention_heads=4)
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def index(*shards: str, total: object = None) -> dict[str, Any]:
    """An index with one tensor in each shard."""
    return {"metadata": {"total_size": total}, "weight_map": {f"t{n}": name for n, name in enumerate(shards)}}


def folder_of(root: Path, **files: object) -> Path:
    """A model's folder; `__` stands for a dot, dicts become JSON."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config__json": CONFIG} | files).items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (root / name.replace("__", ".")).write_bytes(data)
    return root


def read(name: Path | str, **environment: str) -> ModelFiles:
    """The model, without a network and with no cache but the ones given."""
    return read_model(str(name), hub=None, environment={"HOME": "/nonexistent"} | environment)


def test_a_folder_gives_config_tensors_and_size(tmp_path: Path) -> None:
    """Shards of an index are read together; the sum of their data is the size."""
    files = {"model.safetensors.index.json": index("a.safetensors", "b.safetensors", total=7)}
    folder = folder_of(tmp_path, **files, **{"a.safetensors": shard(t0=3), "b.safetensors": shard(t1=4), "x.safetensors": b""})
    found = read(folder)
    assert found.config == CONFIG
    assert found.tensors == (TensorInfo("t0", "U8", (3,)), TensorInfo("t1", "U8", (4,)))
    assert (found.total_bytes, found.source, found.notes) == (7, f"folder {tmp_path}", ())
    assert ModelShape.from_config(found.config).hidden_size == 64
    assert replace(read(folder / "config.json"), name=found.name) == found


def test_the_headers_win_over_a_wrong_index(tmp_path: Path) -> None:
    """Quantised builds keep the original's total_size in their index: the headers are right; without them the index counts."""
    files = {"model.safetensors.index.json": index("a.safetensors", total=99)}
    found = read(folder_of(tmp_path / "a", **files, **{"a.safetensors": shard(t0=3)}))
    assert found.total_bytes == 3
    assert "99 bytes" in found.notes[0]
    files = {"model.safetensors.index.json": index("a.safetensors", "b.safetensors", total=7.0)}
    found = read(folder_of(tmp_path / "b", **files))
    assert (found.tensors, found.total_bytes) == (None, 7)
    assert "2 of 2 shards" in found.notes[0]


@pytest.mark.parametrize(
    ("files", "total"),
    [
        ({"model.safetensors": shard(a=5)}, 5),
        ({"consolidated.safetensors": shard(a=6)}, 6),
        ({"consolidated.safetensors": shard(a=6), "model.safetensors": shard(a=5)}, 5),
        ({"model-1.safetensors": shard(a=5), "model-2.safetensors": shard(b=5), "adapter_model.safetensors": shard(a=1)}, 10),
        ({"pytorch_model.bin.index.json": index("a.bin", total=8)}, 8),
        ({"pytorch_model.bin": b"123456789", "training_args.bin": b"1"}, 9),
        ({"consolidated.00.pth": b"12", "consolidated.01.pth": b"34"}, 4),
        ({}, None),
    ],
)
def test_each_way_of_keeping_weights_gives_its_size(tmp_path: Path, files: dict[str, object], total: int | None) -> None:
    """Single files, Mistral's own, pickles by their size alone, or nothing at all."""
    found = read(folder_of(tmp_path, **files))
    assert found.total_bytes == total
    assert (found.tensors is None) == (not any(name.endswith(".safetensors") for name in files))
    assert bool(found.notes) == (found.tensors is None)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    """A pickle without read permission, or that would run a program, gives its size like any other."""
    folder = folder_of(tmp_path, **{"pytorch_model.bin": b"cos\nsystem\n(S'touch pwned'\ntR."})
    (folder / "pytorch_model.bin").chmod(0)
    assert read(folder).total_bytes == 30
    assert not Path("pwned").exists()


def test_modelopts_file_is_taken_where_the_config_says_nothing(tmp_path: Path) -> None:
    """hf_quant_config.json becomes quantization_config, unless the config has its own."""
    found = read(folder_of(tmp_path / "a", hf_quant_config__json=MODELOPT))
    shape = ModelShape.from_config(found.config)
    assert shape.quantization is not None
    assert (shape.quantization.method, shape.quantization.bits, shape.quantization.kv_cache) == ("modelopt", 8, "fp8")
    own = CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    found = read(folder_of(tmp_path / "b", config__json=own, hf_quant_config__json=b"broken"))
    assert found.config == own


@pytest.mark.parametrize(
    ("files", "says"),
    [
        *cases("models", "a_broken_folder_is_one_line"),
        ({"model.safetensors.index.json": index(*(f"{n}.safetensors" for n in range(5000)))}, "5,000 shards"),
        ({"config__json": b"{"}, "config.json: not JSON"),
        ({"config__json": b"[1]"}, "the top level should be an object"),
        ({"config__json": b"\xff"}, "not UTF-8"),
        ({"config__json": b"[" * 200_000}, "nested too deep"),
        ({"config__json": b'{"a":' + b"9" * 5000 + b"}"}, "numbers too long"),
        ({"model.safetensors": b"12345678{}"}, "model.safetensors: not a safetensors file"),
        ({"model.gguf": b"GGUF"}, "GGUF, which is not supported"),
        ({"a.safetensors": shard(t=1), "b.safetensors": shard(t=1)}, "also in another shard"),
    ],
)
def test_a_broken_folder_is_one_line(tmp_path: Path, files: dict[str, object], says: str) -> None:
    """Whatever is in a folder, the message is one line that names the file."""
    with pytest.raises(BadInput) as caught:
        read(folder_of(tmp_path, **files))
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_says_what_it_seems_to_be(tmp_path: Path) -> None:
    """Someone who gave the wrong folder is told the right one."""
    seems = {"model.gguf": "GGUF", "adapter_config.json": "LoRA adapter", "params.json": "params.json",
             "snapshots": "under snapshots/", "readme": "no config.json"}  # fmt: skip
    for name, says in seems.items():
        (tmp_path / says).mkdir(parents=True)
        (tmp_path / says / name).write_bytes(b"")
        with pytest.raises(BadInput, match=says):
            read(tmp_path / says)


def test_links_that_lead_nowhere_and_pipes_are_refused(tmp_path: Path) -> None:
    """A symlink loop, a dangling shard and a pipe instead of a config end in one line, not in a hang."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(BadInput, match="no such folder"):
        read(tmp_path / "loop")
    folder = folder_of(tmp_path / "a")
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors: cannot be read"):
        read(folder)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "config.json")
    with pytest.raises(BadInput, match="not a regular file"):
        read(tmp_path / "b")


def test_a_folder_of_thousands_of_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing is bounded, whatever stands in the folder."""
    monkeypatch.setattr("plimsoll.models.files._ENTRIES_MAX", 3)
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(b"")
    with pytest.raises(TooLarge, match="more than 3 files"):
        read(tmp_path)


@each(("name", "says"), [*cases("models", "a_name_that_cannot_be_a_model_is_one_line"), ("x" * 5000, "too long")])
def test_a_name_that_cannot_be_a_model_is_one_line(name: str, says: str) -> None:
    """Paths that lead nowhere, addresses and nonsense are told apart."""
    with pytest.raises(BadInput) as caught:
        read(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """Giving the weights instead of their folder says what to give."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard(a=1))
    with pytest.raises(BadInput, match="give its folder"):
        read(path)


def snapshot(cache: Path, commit: str, *, ref: str | None = "main") -> None:
    """A model in Hugging Face's cache as its tools lay it out, with the files as links to blobs."""
    repository = cache / "models--org--name"
    blobs = folder_of(repository / "blobs", **{"model.safetensors": shard(a=5)})
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(blob)
    if ref is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / ref).write_text(commit + "\n")


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_hugging_faces_cache_is_found_where_its_tools_keep_it(tmp_path: Path, variable: str, below: str) -> None:
    """A model that was ever downloaded is read from there, without a network."""
    snapshot(tmp_path / below, "abc123")
    found = read("org/name", **{variable: str(tmp_path)})
    assert found.total_bytes == 5
    assert found.source.startswith("local Hugging Face cache")
    assert read_model("org/name", hub=None, revision="abc123", environment={variable: str(tmp_path)}).total_bytes == 5


def test_a_cache_without_the_revision_or_with_a_hostile_ref_is_passed_over(tmp_path: Path) -> None:
    """A ref that points out of the folder is not followed."""
    snapshot(tmp_path, "abc123", ref=None)
    with pytest.raises(WorldFailed):
        read("org/name", HF_HUB_CACHE=str(tmp_path))
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("../snapshots/abc123")
    with pytest.raises(WorldFailed):
        read("org/name", HF_HUB_CACHE=str(tmp_path))


def test_our_own_cache_comes_before_the_catalogue(tmp_path: Path) -> None:
    """What the hub once answered is richer than the catalogue, and used without a network."""
    kept = ModelFiles("Qwen/Qwen3-8B", CONFIG, (TensorInfo("a", "U8", (1,)),), 1, "hub snapshot abc", ("n",))
    keep(tmp_path / "plimsoll" / "models", kept, "main")
    found = read("Qwen/Qwen3-8B", XDG_CACHE_HOME=str(tmp_path))
    assert (found.config, found.tensors, found.total_bytes, found.notes) == (CONFIG, kept.tensors, 1, ("n",))
    assert found.source.startswith("hub snapshot abc, kept in")


def test_the_catalogue_answers_offline_and_says_how_sure_it_is() -> None:
    """A known id needs no network; facts that are not from its own config.json carry a note."""
    found = read("Qwen/Qwen3-8B")
    assert found.source.startswith("bundled catalogue (the model's own config.json")
    assert (found.tensors, found.total_bytes, found.notes) == (None, None, ())
    assert ModelShape.from_config(found.config).hidden_size == 4096
    assert "known from" in read("qwen/qwen3-14b").notes[1]
    assert "upper from lower" in read("qwen/qwen3-14b").notes[0]
    revised = read_model("Qwen/Qwen3-8B", hub=None, revision="v2", environment={"HOME": "/nonexistent"})
    assert "no revisions" in revised.notes[0]


def test_an_unknown_id_without_a_hub_says_what_would_help() -> None:
    """Exit 3: the world was not asked; a folder or a bundled name helps."""
    with pytest.raises(WorldFailed, match=r"local folder with its config\.json, or a bundled model such as Qwen/Qwen3-8B"):
        read("Qwen/Qwen3-8C")


def test_a_revision_must_look_like_one() -> None:
    """It becomes part of a path and an address."""
    for revision in ("../x", "a b", "", "\n"):
        with pytest.raises(BadInput, match="is not a revision"):
            read_model("org/name", hub=None, revision=revision, environment={"HOME": "/nonexistent"})

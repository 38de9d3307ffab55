"""The certificate's table: read within limits, refused in one sentence, and held against the engine that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.door import (
    HOMES,
    LARGEST_FILE,
    UNITS,
    BadTable,
    CertificateTable,
    RequestKind,
    read_certificate,
    why_foreign,
)

ROW: dict[str, Any] = {
    "kind": "prompt_logprobs", "unit": "prompt tokens", "fixed_bytes": 10, "bytes_per_unit": 2.5, "most_units": 100,
    "scope": "step", "smallest": 37, "closes": "--max-num-batched-tokens 1024", "source": "v1/worker/gpu_model_runner.py",
}  # fmt: skip
TABLE: dict[str, Any] = {
    "schema": "plimsoll.certificate/1", "vllm": "0.32.0", "model": "org/Model-8B", "gpu": "H200",
    "made": "2026-01-01T00:00:00Z", "certified": False, "spare_bytes": 100, "kinds": [ROW],
    "assumes": {"free_bytes_at_start": 1, "pieces_bytes": 2, "max_num_batched_tokens": 2048, "max_num_seqs": 64},
}  # fmt: skip


def written(folder: Path, table: Any) -> str:
    """The path of a file that holds it."""
    path = folder / "table.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


def config(**changed: Any) -> SimpleNamespace:
    """`VllmConfig` of the engine that the table was made for."""
    values = {"model": "org/Model-8B", "max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 4096, "v2": True}
    values |= changed
    scheduler = SimpleNamespace(**{name: values[name] for name in ("max_num_batched_tokens", "max_num_seqs")})
    model = SimpleNamespace(model=values["model"], max_model_len=values["max_model_len"])
    return SimpleNamespace(
        model_config=model, scheduler_config=scheduler, cache_config=SimpleNamespace(), use_v2_model_runner=values["v2"]
    )


def test_a_table_is_read_and_its_costs_follow_the_formula(tmp_path: Path) -> None:
    """Fixed bytes and bytes for each unit up to the most of a step; a smallest request of null is a closed kind."""
    table = read_certificate(written(tmp_path, TABLE))
    (kind,) = table.kinds
    assert (table.vllm, table.model, table.spare_bytes, kind.kind, kind.is_open) == (
        "0.32.0", "org/Model-8B", 100.0, "prompt_logprobs", True,
    )  # fmt: skip
    assert [kind.cost(units) for units in (0, 1, 100, 10_000)] == [0.0, 12.5, 260.0, 260.0]
    assert not read_certificate(written(tmp_path, TABLE | {"kinds": [ROW | {"smallest": None}]})).kinds[0].is_open


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"schema": "plimsoll.certificate/2"}, "schema"),
        ({"schema": None}, "schema"),
        ({"kinds": {}}, "kinds"),
        ({"kinds": [ROW] * 65}, "kinds"),
        ({"kinds": [ROW, ROW]}, "twice"),
        ({"kinds": ["x"]}, "not an object"),
        ({"kinds": [ROW | {"bytes_per_unit": -1}]}, "bytes_per_unit"),
        ({"kinds": [ROW | {"bytes_per_unit": "2"}]}, "bytes_per_unit"),
        ({"kinds": [ROW | {"most_units": True}]}, "most_units"),
        ({"kinds": [ROW | {"fixed_bytes": 1e300}]}, "fixed_bytes"),
        ({"kinds": [ROW | {"scope": "day"}]}, "scope"),
        ({"kinds": [ROW | {"kind": ""}]}, "kind"),
        ({"spare_bytes": None}, "spare_bytes"),
        ({"spare_bytes": float("nan")}, "spare_bytes"),
        ({"spare_bytes": float("inf")}, "spare_bytes"),
        ({"assumes": []}, "assumes"),
        ({"assumes": {"max_num_seqs": 64}}, "max_num_batched_tokens"),
        ({"vllm": 32}, "vllm"),
        ({"model": ["a"]}, "model"),
    ],
)
def test_what_is_no_table_says_why(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    """One sentence with the file and what is wrong in it."""
    path = written(tmp_path, TABLE | changed)
    with pytest.raises(BadTable, match=says) as told:
        read_certificate(path)
    assert str(told.value).startswith(path)


def test_files_that_cannot_be_tables_are_refused_without_reading_on(tmp_path: Path) -> None:
    """None at all, a folder, a pipe that nobody writes to, too much, not JSON, nested without end."""
    pipe, large, text, deep = (tmp_path / name for name in ("pipe", "large", "text", "deep"))
    os.mkfifo(pipe)
    large.write_bytes(b" " * (LARGEST_FILE + 1))
    text.write_bytes(b"\xff\xfe{")
    deep.write_text("[" * 200_000)
    for path in ("", str(tmp_path / "none"), str(tmp_path), *map(str, (pipe, large, text, deep))):
        with pytest.raises(BadTable):
            read_certificate(path)


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda part: st.lists(part, max_size=3))
)
def test_no_value_anywhere_makes_it_raise_anything_else(value: Any) -> None:
    """Whatever stands in a field, it is a table or a BadTable."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name in TABLE:
            _read(Path(folder), TABLE | {name: value})
        for name in ROW:
            _read(Path(folder), TABLE | {"kinds": [ROW | {name: value}]})


def _read(folder: Path, table: Any) -> None:
    try:
        path = written(folder, table)
    except UnicodeEncodeError:
        return
    try:
        found = read_certificate(path)
    except BadTable:
        return
    assert isinstance(found, CertificateTable)
    assert all(isinstance(kind, RequestKind) and kind.cost(1e9) >= 0 for kind in found.kinds)


def test_a_table_for_this_engine_is_no_foreigner(tmp_path: Path) -> None:
    """Builds of the same release, the model by its name, its folder or its place in the cache."""
    table = read_certificate(written(tmp_path, TABLE))
    for version in ("0.32.0", "0.32.0+cpu", "0.32.0+cu130"):
        assert why_foreign(table, version, config()) == ""
    for model in ("org/Model-8B/", "/models/Model-8B", "/cache/hub/models--org--Model-8B/snapshots/abc"):
        assert why_foreign(table, "0.32.0", config(model=model)) == ""
    fetched = config(model="/tmp/fetched-1234")
    fetched.model_config.model_weights = "org/Model-8B"
    assert why_foreign(table, "0.32.0", fetched) == ""


def test_a_table_for_another_engine_says_what_differs(tmp_path: Path) -> None:
    """Another release, another model, another batch or context, a config without them."""
    more = {"max_model_len": 4096, "v2_model_runner": True}
    table = read_certificate(written(tmp_path, TABLE | {"assumes": {**TABLE["assumes"], **more}}))
    assert why_foreign(table, "0.32.0", config()) == ""
    assert "v2_model_runner True, and here it is False" in why_foreign(table, "0.32.0", config(v2=False))
    assert "vLLM 0.32.0, and this is 0.31.0" in why_foreign(table, "0.31.0", config())
    assert "vLLM 0.32.0, and this is 0.32.1rc1" in why_foreign(table, "0.32.1rc1", config())
    assert "the model org/Model-8B, and this is org/Model-70B" in why_foreign(table, "0.32.0", config(model="org/Model-70B"))
    assert "max_num_batched_tokens 2048, and here it is 8192" in why_foreign(
        table, "0.32.0", config(max_num_batched_tokens=8192)
    )
    assert "max_num_seqs" in why_foreign(table, "0.32.0", config(max_num_seqs=128))
    assert "max_model_len" in why_foreign(table, "0.32.0", config(max_model_len=8192))
    assert why_foreign(table, "0.32.0", SimpleNamespace()) != ""


def test_the_door_reads_what_plan_writes(tmp_path: Path) -> None:
    """Every kind, unit and assumption of a real certificate is understood; its open kind is one that the door can judge."""
    path = tmp_path / "table.json"
    own = ["--certify", "--table", str(path), "--gpu", "H200", "--vllm", "0.25.1", "--"]
    command = [
        "env", "VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len",
        "8192",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "plan", *own, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    table = read_certificate(str(path))
    (open_kind,) = (kind for kind in table.kinds if kind.is_open)
    assert (open_kind.kind, UNITS[open_kind.kind]) == ("prompt_logprobs", open_kind.unit)
    smallest = next(row["smallest"] for row in json.loads(path.read_text())["kinds"] if row["kind"] == "prompt_logprobs")
    assert open_kind.cost(smallest - 1) <= table.spare_bytes < open_kind.cost(smallest)
    assert set(table.assumes) & set(HOMES) >= {"max_num_batched_tokens", "max_num_seqs", "max_model_len", "v2_model_runner"}
    assert {kind.unit for kind in table.kinds if kind.kind in UNITS} <= set(UNITS.values())

"""The reader of vLLM's wheels, on small wheels written for it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from lab.catalogue.__main__ import as_text, spans
from lab.catalogue.read_environment import read_environment
from lab.catalogue.read_flags import read_flags
from lab.catalogue.read_metrics import read_metrics
from lab.catalogue.source_tree import SourceTree


def _tree(root: Path, **files: str) -> SourceTree:
    for name, text in files.items():
        path = root / "vllm" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return SourceTree(root)


CLI = """
    from vllm.engine.arg_utils import AsyncEngineArgs
    def make_arg_parser(parser):
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--uds", type=str, default=None, deprecated=True)
        parser = AsyncEngineArgs.add_cli_args(parser)
        return parser
"""
ARGS = """
    from vllm.config import CacheConfig, get_field
    def get_kwargs(cls):
        human = {"kv_cache_memory_bytes"}
        if name in human:
            kwargs["type"] = human_readable_int
    class EngineArgs:
        utilization: float = CacheConfig.utilization
        @staticmethod
        def add_cli_args(parser):
            cache_kwargs = get_kwargs(CacheConfig)
            group = parser.add_argument_group(title="cache")
            group.add_argument("--gpu-memory-utilization", "-u", **cache_kwargs["utilization"])
            group.add_argument("--kv-cache-dtype", **cache_kwargs["dtype"])
            group.add_argument("--kv-cache-memory-bytes", **cache_kwargs["kv_cache_memory_bytes"])
            group.add_argument("--prefix", **{**cache_kwargs["prefix"], "default": None})
            group.add_argument("--sizes", **cache_kwargs["sizes"])
            parser.add_argument("--secretly", type=int, default=compute_it())
            return parser
    class AsyncEngineArgs(EngineArgs):
        @staticmethod
        def add_cli_args(parser, async_args_only=False):
            if not async_args_only:
                parser = EngineArgs.add_cli_args(parser)
            return parser
"""
CONFIG = """
    from dataclasses import field
    from typing import Literal, Optional
    DType = Literal["auto", "fp8"]
    class CacheConfig:
        utilization: float = 0.92
        dtype: DType = "auto"
        kv_cache_memory_bytes: Optional[int] = None
        prefix: bool = True
        sizes: list[int] = field(default_factory=list)
"""


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The flags of a release of three files."""
    tree = _tree(tmp_path, entrypoints__openai__cli_args=CLI, engine__arg_utils=ARGS, config=CONFIG)
    return {row["name"]: row for row in read_flags(tree)}


def test_flags_are_followed_through_functions_and_config_classes(rows: dict[str, dict[str, Any]]) -> None:
    """Literal arguments, inherited builders and dataclass fields all end in the same kind of row."""
    assert rows["--port"] == {"name": "--port", "kind": "int", "default": 8000}
    assert rows["--gpu-memory-utilization"] == {
        "name": "--gpu-memory-utilization", "aliases": ["-u"], "kind": "float", "default": 0.92,
    }  # fmt: skip
    assert rows["--kv-cache-dtype"]["choices"] == ["auto", "fp8"]
    assert rows["--kv-cache-memory-bytes"]["kind"] == "human-int"
    assert (rows["--prefix"]["kind"], rows["--prefix"]["default"]) == ("on-off", None)
    assert (rows["--sizes"]["nargs"], rows["--sizes"]["default"]) == ("+", [])
    assert rows["--uds"]["deprecated"] is True


def test_what_cannot_be_known_is_left_out(rows: dict[str, dict[str, Any]]) -> None:
    """A default that only running the code would tell is absent, never guessed."""
    assert "default" not in rows["--secretly"]


def test_reading_runs_nothing(tmp_path: Path) -> None:
    """A wheel that would do harm when imported does none when read."""
    trap = tmp_path / "trap"
    evil = f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n" + textwrap.dedent(CLI)
    tree = _tree(tmp_path, entrypoints__openai__cli_args=evil, engine__arg_utils=ARGS, config=CONFIG)
    assert read_flags(tree)
    assert not trap.exists()


def test_a_release_without_a_parser_is_an_error(tmp_path: Path) -> None:
    """A layout the reader does not know stops it; an empty table would look like a release without flags."""
    with pytest.raises(LookupError):
        read_flags(_tree(tmp_path, config=CONFIG))


def test_metrics_carry_type_labels_and_when_they_show(tmp_path: Path) -> None:
    """Counters are exposed with _total, hidden ones are marked, labels are worked out."""
    loggers = """
        class PrometheusStatLogger:
            def __init__(self):
                labelnames = ["model_name", "engine"]
                self._gauge_cls(name="vllm:kv_cache_usage_perc", labelnames=labelnames)
                self._counter_cls(name="vllm:num_preemptions", labelnames=labelnames + ["reason"])
                if self.show_hidden_metrics:
                    self._gauge_cls(name="vllm:gpu_cache_usage_perc", labelnames=labelnames)
    """
    rows = {row["name"]: row for row in read_metrics(_tree(tmp_path, v1__metrics__loggers=loggers))}
    assert rows["vllm:num_preemptions_total"] == {
        "name": "vllm:num_preemptions_total", "type": "counter", "shown": "always", "engine": "V1",
        "labels": ["model_name", "engine", "reason"],
    }  # fmt: skip
    assert rows["vllm:gpu_cache_usage_perc"]["shown"] == "hidden"


def test_a_variable_named_anywhere_counts_as_read(tmp_path: Path) -> None:
    """Only a variable that no file names is without effect."""
    envs = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            VLLM_PORT: int = 1
        environment_variables = {"VLLM_PORT": lambda: 1}
    """
    other = "import os\nx = os.environ.get('VLLM_SECRET_SAUCE')\n"
    rows = {row["name"]: row for row in read_environment(_tree(tmp_path, envs=envs, other=other))}
    assert rows["VLLM_PORT"] == {"name": "VLLM_PORT", "default": 1}
    assert rows["VLLM_SECRET_SAUCE"]["elsewhere"] is True


def test_stretches_break_where_a_fact_changes_or_a_release_lacks_it() -> None:
    """A row that changes, or goes and comes back, gets a stretch of its own."""
    one, two = {"name": "--a", "default": 1}, {"name": "--a", "default": 2}
    table = spans({"0.1": [one], "0.2": [one], "0.3": [two], "0.4": [], "0.5": [two]}, ("name",))
    assert table["--a"] == [
        {"from": "0.1", "to": "0.2", "default": 1},
        {"from": "0.3", "to": "0.3", "default": 2},
        {"from": "0.5", "to": "0.5", "default": 2},
    ]


def test_the_file_has_one_row_a_line() -> None:
    """A new release is a readable diff."""
    assert (
        as_text({"made_by": "x", "rows": {"a": [1], "b": [2]}}) == '{\n"made_by": "x",\n"rows": {\n"a": [1],\n"b": [2]\n}\n}\n'
    )

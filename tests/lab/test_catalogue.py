"""The reader of vLLM's wheels, on small wheels written for it, and what it found of every release."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from lab.catalogue.__main__ import as_text, spans
from lab.catalogue.endpoints import ENDPOINTS, Endpoint
from lab.catalogue.log_lines import LOG_LINES, log_line
from lab.catalogue.read_flags import read_flags
from lab.catalogue.read_inside import read_inside
from lab.catalogue.source_tree import SourceTree
from plimsoll.vllm import versions
from plimsoll.vllm.extension_points import NEEDS
from tests.each import each, sure
from tests.vllm.vllm_like import files_that_meet_all, write_vllm

# Files as vLLM has them, in short.
WHEEL: dict[str, str] = yaml.safe_load(Path(__file__).with_name("small_wheel.yaml").read_text(encoding="utf-8"))
FLAGS = {"engine__arg_utils": WHEEL["arg_utils"], "config": WHEEL["config"]}


def _tree(root: Path, **files: str) -> SourceTree:
    for name, text in files.items():
        path = root / "vllm" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return SourceTree(root)


def test_flags_are_followed_nothing_is_run_and_odd_layouts_are_errors(tmp_path: Path) -> None:
    """Arguments, builders and fields end in one kind of row, a default is never guessed; a harmful wheel does no harm."""
    rows = {row["name"]: row for row in read_flags(_tree(tmp_path, entrypoints__openai__cli_args=WHEEL["cli_args"], **FLAGS))}
    assert rows["--port"] == {"name": "--port", "kind": "int", "default": 8000}
    assert rows["--gpu-memory-utilization"] == {
        "name": "--gpu-memory-utilization", "aliases": ["-u"], "kind": "float", "default": 0.92,
    }  # fmt: skip
    assert rows["--kv-cache-dtype"]["choices"] == ["auto", "fp8"]
    assert rows["--kv-cache-memory-bytes"]["kind"] == "human-int"
    assert (rows["--prefix"]["kind"], rows["--prefix"]["default"]) == ("on-off", None)
    assert (rows["--sizes"]["nargs"], rows["--sizes"]["default"]) == ("+", [])
    assert rows["--uds"]["deprecated"] is True
    assert "default" not in rows["--secretly"]
    trap = tmp_path / "trap"
    evil = f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n" + WHEEL["cli_args"]
    assert read_flags(_tree(tmp_path, entrypoints__openai__cli_args=evil, **FLAGS))
    assert not trap.exists()
    with pytest.raises(LookupError):
        read_flags(_tree(tmp_path / "other", config=WHEEL["config"]))


def test_stretches_break_where_a_fact_changes_and_a_need_is_one_row_with_its_words(tmp_path: Path) -> None:
    """A row that goes and comes back gets a stretch of its own; a note stands only where the way matters."""
    one, two = {"name": "--a", "default": 1}, {"name": "--a", "default": 2}
    table = spans({"0.1": [one], "0.2": [one], "0.3": [two], "0.4": [], "0.5": [two]}, ("name",))
    assert table["--a"] == [
        {"from": "0.1", "to": "0.2", "default": 1},
        {"from": "0.3", "to": "0.3", "default": 2},
        {"from": "0.5", "to": "0.5", "default": 2},
    ]
    assert (
        as_text({"made_by": "x", "rows": {"a": [1], "b": [2]}}) == '{\n"made_by": "x",\n"rows": {\n"a": [1],\n"b": [2]\n}\n}\n'
    )
    files = files_that_meet_all()
    del files["plugins/__init__.py"]
    write_vllm(tmp_path, "0.32.0", files)
    rows = {row["name"]: row for row in read_inside(SourceTree(tmp_path))}
    assert list(rows) == [need.name for need in NEEDS]
    assert rows["middleware"] == {"name": "middleware", "state": "found"}
    assert rows["general plugins"] == {"name": "general plugins", "state": "absent", "note": "there is no such file"}


@each("endpoint", ENDPOINTS, ids=lambda e: e.path)
def test_every_endpoint_we_describe_is_in_the_newest_release(endpoint: Endpoint) -> None:
    """None is described from memory alone. /pause came with 0.12.0: a request to an older server would be a 404."""
    stretches = versions.rows("endpoints")[f"{endpoint.method} {endpoint.path}"]
    exists = [any(versions.is_within(one, release) for one in stretches) for release in ("0.11.2", "0.12.0", "0.32.0")]
    assert exists[2]
    assert endpoint.path != "/pause" or exists == [False, True, True]


CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200"


@each("name", [line.name for line in LOG_LINES])
def test_every_pattern_compiles_and_every_own_line_was_seen_in_a_wheel(name: str) -> None:
    """No pattern is a guess: vLLM's own lines stand in the source of at least one release."""
    line = log_line(name)
    re.compile(line.pattern)
    assert line.seen_in() if line.speaker == "vllm" else not line.fragment


@each(("name", "text", "groups"), yaml.safe_load(Path(__file__).with_name("log_lines.yaml").read_text(encoding="utf-8")))
def test_known_lines_give_their_figures(name: str, text: str, groups: dict[str, str | None]) -> None:
    """Each pattern finds its line and takes the figures out of it."""
    found = sure(re.search(log_line(name).pattern, text))
    assert {key: found.groupdict()[key] for key in groups} == groups


def test_recorded_starts_on_an_h200_are_read() -> None:
    """Whole logs of real 0.25.1 starts hold the lines we say they hold."""
    names = {"engine-version", "weights-loaded", "kv-available", "kv-size", "engine-ready"}
    for log, more in (("base.log", {"graphs-captured"}), ("eager90.log", set())):
        text = (CAPTURES / log).read_text(encoding="utf-8", errors="replace")
        assert names | more <= {line.name for line in LOG_LINES if re.search(line.pattern, text)}, log

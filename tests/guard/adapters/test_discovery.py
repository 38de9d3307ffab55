"""Where engines are found: Prometheus's lists from files and addresses."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from plimsoll.errors import BadInput, TooLarge
from plimsoll.guard.adapters.discovery import FileFinder, HttpFinder, groups_in
from plimsoll.guard.engine_config import EngineConfig, host_and_port
from tests.each import cases, each, trees
from tests.net.page_server import serving

GROUPS = [{"targets": ["10.0.0.1:8000", "10.0.0.2:8000"], "labels": {"job": "vllm"}}]


def test_a_list_of_targets_and_what_is_none() -> None:
    """Each is an engine; scheme, path and a name are heeded; what is no list, or one without end, is refused in one line."""
    groups = [
        *GROUPS,
        {"targets": ["h:1"], "labels": {"__scheme__": "https", "__metrics_path__": "/vllm/metrics", "instance": "big"}},
        {"targets": ["[::1]:8000"]},
    ]
    assert groups_in(groups, "x").targets == (
        EngineConfig("10.0.0.1:8000", "http://10.0.0.1:8000"), EngineConfig("10.0.0.2:8000", "http://10.0.0.2:8000"),
        EngineConfig("big", "https://h:1/vllm"), EngineConfig("[::1]:8000", "http://[::1]:8000"),
    )  # fmt: skip
    assert host_and_port("http://user:secret@h:1/a/?q=1") == "h:1/a"
    wrong: tuple[Any, ...] = (None, {}, "x", [1], [{}], [{"targets": "x"}])
    for tree in wrong:
        with pytest.raises(BadInput, match=r"^here: "):
            groups_in(tree, "here")
    with pytest.raises(TooLarge):
        groups_in([{"targets": [f"10.0.0.1:{port}" for port in range(1, 6_000)]}], "x")


@each(("target", "says"), cases("guard", "targets that are none"))
def test_one_target_that_is_none_does_not_hide_the_others(target: object, says: str) -> None:
    """It is said, without any password, and the rest of the list is watched."""
    found = groups_in([{"targets": ["h:7"]}, {"targets": ["h:8", target]}], "here")
    assert [one.url for one in found.targets] == ["http://h:7", "http://h:8"]
    (trouble,) = found.troubles
    assert trouble.startswith("here: group 2: ")
    assert says in trouble
    assert "s3cret" not in trouble


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    """JSON and YAML, as many files as the pattern finds; a file that goes takes its engines with it, the last one, too."""
    finder = FileFinder(str(tmp_path / "*.json"))
    assert (finder.find(), finder.trouble) == ((), f"{tmp_path}/*.json: no such file")
    (tmp_path / "a.json").write_text(json.dumps(GROUPS), encoding="utf-8")
    assert [target.name for target in finder.find()] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert finder.trouble == ""
    (tmp_path / "a.json").write_text(json.dumps([{"targets": ["h:1"]}]), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([{"targets": ["h:2"]}]), encoding="utf-8")
    assert [target.name for target in finder.find()] == ["h:1", "h:2"]
    (tmp_path / "a.json").unlink()
    assert [target.name for target in finder.find()] == ["h:2"]
    (tmp_path / "b.json").unlink()
    assert finder.find() == ()
    assert "no such file" in finder.trouble
    (tmp_path / "c.yml").write_text("- targets: ['h:3']\n  labels:\n    name: third\n", encoding="utf-8")
    assert FileFinder(str(tmp_path / "c.yml")).find() == (EngineConfig("third", "http://h:3"),)


def test_a_broken_file_hides_no_other_and_stays_as_it_was(tmp_path: Path) -> None:
    """What is wrong is said; once the file is whole it is read."""
    path = tmp_path / "a.json"
    (tmp_path / "b.json").write_text(json.dumps([{"targets": ["h:2"]}]), encoding="utf-8")
    path.write_bytes(b"[{")
    finder = FileFinder(str(tmp_path / "*.json"))
    assert [target.name for target in finder.find()] == ["h:2"]
    assert finder.trouble == f"{path}, line 1: not JSON"
    path.write_text(json.dumps(GROUPS), encoding="utf-8")
    assert len(finder.find()) == 3
    for content in (b"[{", b"\xff", b"{}", b"[" * 100_000):
        path.write_bytes(content)
        assert len(finder.find()) == 3
        assert finder.trouble.startswith(str(path))
        assert finder.trouble.endswith("; what it said before stays")
    path.write_text(json.dumps([{"targets": ["h:1", "m\u00fcnchen:1"]}]), encoding="utf-8")
    for _ in range(2):  # also while it is not read anew
        assert [target.name for target in finder.find()] == ["h:1", "h:2"]
        assert "not ASCII" in finder.trouble
    path.write_text("[]", encoding="utf-8")
    os.utime(path, ns=(1, 1))
    assert len(finder.find()) == 1
    assert finder.trouble == ""


@each(
    ("act", "says"),
    [
        (lambda ask: ask.answer(b"nope"), "not JSON"),
        (lambda ask: ask.answer(b"{}"), "not a list"),
        (lambda ask: ask.answer(b"[]", 500), "answers 500"),
        (lambda ask: ask.answer(b"", 302, Location="http://192.0.2.1/sd"), "redirects to another host"),
        (lambda ask: ask.answer(b" " * (17 << 20)), "more than 16 MiB"),
        (lambda _: time.sleep(2), "did not answer"),
    ],
)
def test_an_address_that_answers_with_a_list_and_then_does_not(act: Any, says: str) -> None:
    """http_sd, with the login in its header; whatever it does instead is one line, and the engines are those from before."""
    with serving(lambda ask: ask.answer(json.dumps(GROUPS).encode()) if len(server.seen) == 1 else act(ask)) as server:
        finder = HttpFinder(f"http://user:secret@{server.host}/sd?x=1", timeout_s=1.0)
        before = finder.find()
        assert (len(before), finder.trouble) == (2, "")
        assert finder.find() == before
        assert server.seen[0][0] == "/sd?x=1"
        assert (server.seen[0][1] or "").startswith("Basic ")
    assert says in finder.trouble
    assert finder.trouble.endswith("; the last list stays in use")


@given(trees(["targets", "labels", "__scheme__", "instance"], 15))
def test_no_list_is_more_than_a_refusal(tree: Any) -> None:
    """Whatever it holds, the answer is engines or one line."""
    try:
        found = groups_in(tree, "here").targets
    except BadInput:
        found = ()
    assert all(isinstance(target, EngineConfig) for target in found)

"""Where engines are found: Prometheus's lists from files and addresses, and pods of a cluster's API over real sockets.

The cluster's API is a small program that answers as the documentation of Kubernetes says; no real cluster was asked.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.discovery import FileFinder, HttpFinder, PodFinder, PodsConfig, groups_in, read_pod
from plimsoll.guard.engine_config import EngineConfig, host_and_port
from tests.net.page_server import Handler, serving

GROUPS = [{"targets": ["10.0.0.1:8000", "10.0.0.2:8000"], "labels": {"job": "vllm"}}]


def pod(name: str, **changes: Any) -> dict[str, Any]:
    """A pod as the API shows it, in short."""
    ports = [{"name": "http", "containerPort": 8000}, {"containerPort": 9000}]
    found: dict[str, Any] = {
        "metadata": {"name": name, "namespace": "models"},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"phase": "Running", "podIP": "10.1.2.3"},
    }
    for key, value in changes.items():
        found[key] = {**found[key], **value}
    return found


def test_a_list_of_targets() -> None:
    """Each target is an engine; scheme and path are heeded, and a name where it can be meant for one only."""
    groups = [
        *GROUPS,
        {"targets": ["h:1"], "labels": {"__scheme__": "https", "__metrics_path__": "/vllm/metrics", "instance": "big"}},
        {"targets": ["[::1]:8000"]},
    ]
    assert groups_in(groups, "x").targets == (
        EngineConfig("10.0.0.1:8000", "http://10.0.0.1:8000"),
        EngineConfig("10.0.0.2:8000", "http://10.0.0.2:8000"),
        EngineConfig("big", "https://h:1/vllm"),
        EngineConfig("[::1]:8000", "http://[::1]:8000"),
    )
    assert host_and_port("http://user:secret@h:1/a/?q=1") == "h:1/a"


@pytest.mark.parametrize("tree", [None, {}, "x", [1], [{}], [{"targets": "x"}]])
def test_what_is_no_list_is_refused_in_one_line(tree: object) -> None:
    """With the name of where it came from."""
    with pytest.raises(BadInput, match=r"^here: "):
        groups_in(tree, "here")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (1, "a target is a text"), ("", "a target is a text"), ("a b", "'a b': the address must be"),
        ("m\u00fcnchen:8000", "characters that are not ASCII"), ("h:1/\u00e9", "characters that are not ASCII"),
        ("user:s3cret@h:1", "'h:1': a list may hold no user and password"), ("http://a:s3cret@b@h:1", "'h:1'"),
    ],
)  # fmt: skip
def test_one_target_that_is_none_does_not_hide_the_others(target: object, says: str) -> None:
    """It is said, without any password, and the rest of the list is watched."""
    found = groups_in([{"targets": ["h:7"]}, {"targets": ["h:8", target]}], "here")
    assert [one.url for one in found.targets] == ["http://h:7", "http://h:8"]
    (trouble,) = found.troubles
    assert trouble.startswith("here: group 2: ")
    assert says in trouble
    assert "s3cret" not in trouble


def test_too_many_targets_are_too_many() -> None:
    """A list without end is no list of engines."""
    with pytest.raises(TooLarge):
        groups_in([{"targets": [f"10.0.0.1:{port}" for port in range(1, 6_000)]}], "x")


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


def test_an_address_that_answers_with_a_list() -> None:
    """http_sd: JSON, nothing else, and in time."""
    with serving(lambda ask: ask.answer(json.dumps(GROUPS).encode())) as server:
        assert len(HttpFinder(f"http://user:secret@{server.host}/sd?x=1").find()) == 2
        assert server.seen[0][0] == "/sd?x=1"
        assert (server.seen[0][1] or "").startswith("Basic ")


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda ask: ask.answer(b"nope"), "not JSON"),
        (lambda ask: ask.answer(b"{}"), "not a list"),
        (lambda ask: ask.answer(b"[]", 500), "answers 500"),
        (lambda ask: ask.answer(b"", 302, Location="http://192.0.2.1/sd"), "redirects to another host"),
        (lambda ask: ask.answer(b" " * (17 << 20)), "more than 16 MiB"),
        (lambda _: time.sleep(3), "did not answer"),
    ],
    ids=["words", "object", "status", "elsewhere", "huge", "slow"],
)
def test_an_address_that_does_not(act: Any, says: str) -> None:
    """Whatever it does instead is one line, and the engines are those it named before."""
    with serving(lambda ask: ask.answer(json.dumps(GROUPS).encode()) if len(server.seen) == 1 else act(ask)) as server:
        finder = HttpFinder(f"http://{server.host}/sd", timeout_s=1.0)
        before = finder.find()
        assert (len(before), finder.trouble) == (2, "")
        assert finder.find() == before
    assert says in finder.trouble
    assert finder.trouble.endswith("; the last list stays in use")


def account(folder: Path) -> str:
    """What Kubernetes mounts into a pod."""
    (folder / "token").write_text("pod-token\n", encoding="utf-8")
    (folder / "namespace").write_text("models", encoding="utf-8")
    return str(folder)


def test_pods_are_asked_page_by_page(tmp_path: Path) -> None:
    """The selector and the pod's own token go along; only running pods with an address come back, named by namespace."""
    pods = [
        pod("a"), pod("b", status={"podIP": "fd00::1"}), pod("starting", status={"phase": "Pending"}),
        pod("no-address", status={"podIP": ""}), pod("going", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        pod("one-port", spec={"containers": [{"ports": [{"containerPort": 7000}]}]}), pod("bare", spec={"containers": [{}]}),
    ]  # fmt: skip

    def act(ask: Handler) -> None:
        asked = parse_qs(urlsplit(ask.path).query)
        assert asked["labelSelector"] == ["app=vllm,tier in (a)"]
        second = asked.get("continue") == ["more&more"]
        body = {"items": pods[4:] if second else pods[:4], "metadata": {} if second else {"continue": "more&more"}}
        ask.answer(json.dumps(body).encode())

    with serving(act) as server:
        cluster = ClusterClient(f"http://{server.host}", account(tmp_path))
        found = PodFinder(PodsConfig("app=vllm,tier in (a)"), cluster).find()
        assert [urlsplit(path).path for path, _ in server.seen] == ["/api/v1/namespaces/models/pods"] * 2
        assert {login for _, login in server.seen} == {"Bearer pod-token"}
        (tmp_path / "token").write_text("another", encoding="utf-8")
        by_port = PodFinder(PodsConfig("app=vllm,tier in (a)", "models", 5000), cluster).find()
        assert server.seen[-1][1] == "Bearer another"
    assert [(target.name, target.url) for target in found] == [
        ("models/a", "http://10.1.2.3:8000"), ("models/b", "http://[fd00::1]:8000"),
        ("models/one-port", "http://10.1.2.3:7000"), ("models/bare", "http://10.1.2.3:8000"),
    ]  # fmt: skip
    assert {target.url.rpartition(":")[2] for target in by_port} == {"5000"}


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda ask: ask.answer(b"{}", 403), "may not list pods"),
        (lambda ask: ask.answer(b"{}", 500), "answers 500"),
        (lambda ask: ask.answer(b"no"), "no list of pods"),
        (lambda ask: ask.answer(b"{}"), "no list of pods"),
        (lambda ask: ask.answer(b'{"items": [], "metadata": {"continue": "x"}}'), "does not end"),
        (lambda _: time.sleep(3), "did not answer"),
    ],
    ids=["forbidden", "broken", "words", "nothing", "endless", "slow"],
)
def test_a_cluster_that_does_not_answer(act: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each; the token is in none of them."""
    with serving(act) as server:
        finder = PodFinder(PodsConfig("a=b"), ClusterClient(f"http://{server.host}", account(tmp_path)))
        monkeypatch.setattr("plimsoll.guard.adapters.discovery.TIMEOUT_S", 1.0)
        assert finder.find() == ()
    assert says in finder.trouble
    assert "pod-token" not in finder.trouble


def test_restarts_and_ends_of_pods(tmp_path: Path) -> None:
    """Counted by the cluster, for the container that serves; an end is told only where nobody starts it again."""
    bare = {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}, {"name": "side"}], "restartPolicy": "Never"}
    counts = [{"name": "vllm", "restartCount": 3}, {"name": "side", "restartCount": 9}]
    killed = [{"name": "vllm", "restartCount": 3, "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
    owned = {"ownerReferences": [{"kind": "Job", "controller": True}]}
    running = [
        pod("a", spec=bare, status={"containerStatuses": counts}), pod("b", status={"containerStatuses": counts}),
        pod("c"), pod("d", spec=bare), pod("e", spec=bare, metadata=owned), pod("f"), pod("g", spec=bare),
    ]  # fmt: skip
    failed = {"phase": "Failed", "containerStatuses": killed}
    over = [
        pod("a", spec=bare, status=failed), pod("b", status=failed), pod("e", spec=bare, metadata=owned, status=failed),
        pod("never-seen", spec=bare, status=failed), pod("d", spec=bare, status={"phase": "Failed", "reason": "Evicted"}),
        pod("f", status={"containerStatuses": [{"name": "x", "restartCount": 4, "state": {"waiting": {}}}]}),
        pod("g", spec=bare, status=failed, metadata={"deletionTimestamp": "now"}),
    ]  # fmt: skip
    with serving(lambda ask: ask.answer(json.dumps({"items": running if len(server.seen) == 1 else over}).encode())) as server:
        finder = PodFinder(PodsConfig("a=b"), ClusterClient(f"http://{server.host}", account(tmp_path)))
        before = {target.name: target for target in finder.find()}
        assert (finder.restarts, finder.ended) == ({"models/a": 3, "models/b": 9}, {})
        after = {target.name: target for target in finder.find()}
    assert set(before) == {f"models/{letter}" for letter in "abcdefg"}
    assert after == {name: before[name] for name in ("models/a", "models/d", "models/f")}
    assert finder.restarts == {"models/a": 3, "models/f": 4}
    assert finder.ended == {
        "models/a": "its container ended with exit code 137 (OOMKilled) and is not started again: restartPolicy is Never",
        "models/d": "its pod is over (Evicted), and restartPolicy is Never",
    }


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=10) | st.booleans(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["metadata", "spec", "status", "containers", "ports", "containerPort", "containerStatuses", "restartCount",
                     "state", "terminated", "exitCode", "phase", "restartPolicy", "ownerReferences", "podIP", "name"]
                ),
                inner | st.sampled_from(["Failed", "Running", "Never"]), max_size=5,
            )
        ),
        max_leaves=25,
    )
)  # fmt: skip
def test_any_pod_is_read(item: Any) -> None:
    """Whatever the cluster shows, reading it raises nothing."""
    found = read_pod(item)
    assert 0 < found.port < 65_536
    assert found.restarts is None or found.restarts >= 0


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=20) | st.booleans(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["targets", "labels", "__scheme__", "instance"]), inner, max_size=4)
        ),
        max_leaves=15,
    )
)
def test_no_list_is_more_than_a_refusal(tree: Any) -> None:
    """Whatever it holds, the answer is engines or one line."""
    try:
        found = groups_in(tree, "here").targets
    except BadInput:
        found = ()
    assert all(isinstance(target, EngineConfig) for target in found)

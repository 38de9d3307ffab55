"""Where engines are found: Prometheus's lists from files and addresses, and pods of a cluster's API over real sockets.

The cluster's API is a small program that answers as the documentation of Kubernetes says; no real cluster was asked.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import BadInput, PlimsollError, TimedOut, TooLarge, WorldFailed
from plimsoll.sources.discovery import FileSd, HttpSd, Kubernetes, Pods, Target, groups_in, named
from plimsoll.sources.kubernetes_api import Cluster, in_cluster
from tests.sources.page_server import Handler, serving

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
    assert groups_in(groups, "x") == (
        Target("10.0.0.1:8000", "http://10.0.0.1:8000"),
        Target("10.0.0.2:8000", "http://10.0.0.2:8000"),
        Target("big", "https://h:1/vllm"),
        Target("[::1]:8000", "http://[::1]:8000"),
    )
    assert named("http://user:secret@h:1/a/?q=1") == "h:1/a"


@pytest.mark.parametrize(
    "tree", [None, {}, "x", [1], [{}], [{"targets": "x"}], [{"targets": [1]}], [{"targets": ["a b"]}], [{"targets": [""]}]]
)
def test_what_is_no_list_is_refused_in_one_line(tree: object) -> None:
    """With the name of where it came from."""
    with pytest.raises(BadInput, match=r"^here: "):
        groups_in(tree, "here")


def test_too_many_targets_are_too_many() -> None:
    """A list without end is no list of engines."""
    with pytest.raises(TooLarge):
        groups_in([{"targets": [f"10.0.0.1:{port}" for port in range(1, 6_000)]}], "x")


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    """JSON and YAML, as many files as the pattern finds; a file that goes takes its engines with it."""
    finder = FileSd(str(tmp_path / "*.json"))
    with pytest.raises(WorldFailed, match="no such file"):
        finder.find()
    (tmp_path / "a.json").write_text(json.dumps(GROUPS), encoding="utf-8")
    assert [target.name for target in finder.find()] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    (tmp_path / "a.json").write_text(json.dumps([{"targets": ["h:1"]}]), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([{"targets": ["h:2"]}]), encoding="utf-8")
    assert [target.name for target in finder.find()] == ["h:1", "h:2"]
    (tmp_path / "a.json").unlink()
    assert [target.name for target in finder.find()] == ["h:2"]
    (tmp_path / "c.yml").write_text("- targets: ['h:3']\n  labels:\n    name: third\n", encoding="utf-8")
    assert FileSd(str(tmp_path / "c.yml")).find() == (Target("third", "http://h:3"),)


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    """It is an error each time, so that what was known stays; once it is whole it is read."""
    path = tmp_path / "a.json"
    finder = FileSd(str(path))
    for content in (b"[{", b"\xff", b"{}", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(PlimsollError):
            finder.find()
    path.write_text(json.dumps(GROUPS), encoding="utf-8")
    os.utime(path, ns=(1, 1))
    assert len(finder.find()) == 2


def test_an_address_that_answers_with_a_list() -> None:
    """http_sd: JSON, nothing else, and in time."""
    with serving(lambda ask: ask.answer(json.dumps(GROUPS).encode())) as server:
        assert len(HttpSd(f"http://user:secret@{server.host}/sd?x=1").find()) == 2
        assert server.seen[0][0] == "/sd?x=1"
        assert (server.seen[0][1] or "").startswith("Basic ")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda ask: ask.answer(b"nope"), WorldFailed),
        (lambda ask: ask.answer(b"{}"), BadInput),
        (lambda ask: ask.answer(b"[]", 500), WorldFailed),
        (lambda ask: ask.answer(b"", 302, Location="http://192.0.2.1/sd"), WorldFailed),
        (lambda ask: ask.answer(b" " * (17 << 20)), TooLarge),
        (lambda _: time.sleep(3), TimedOut),
    ],
    ids=["words", "object", "status", "elsewhere", "huge", "slow"],
)
def test_an_address_that_does_not(act: Any, error: type[Exception]) -> None:
    """Whatever it does instead is one line and no list."""
    with serving(act) as server, pytest.raises(error):
        HttpSd(f"http://{server.host}/sd", timeout_s=1.0).find()


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
        cluster = Cluster(f"http://{server.host}", account(tmp_path))
        found = Pods(Kubernetes("app=vllm,tier in (a)"), cluster).find()
        assert [urlsplit(path).path for path, _ in server.seen] == ["/api/v1/namespaces/models/pods"] * 2
        assert {login for _, login in server.seen} == {"Bearer pod-token"}
        (tmp_path / "token").write_text("another", encoding="utf-8")
        by_port = Pods(Kubernetes("app=vllm,tier in (a)", "models", 5000), cluster).find()
        assert server.seen[-1][1] == "Bearer another"
    assert [(target.name, target.url) for target in found] == [
        ("models/a", "http://10.1.2.3:8000"), ("models/b", "http://[fd00::1]:8000"),
        ("models/one-port", "http://10.1.2.3:7000"), ("models/bare", "http://10.1.2.3:8000"),
    ]  # fmt: skip
    assert {target.url.rpartition(":")[2] for target in by_port} == {"5000"}


def test_the_clusters_certificate_is_checked(tmp_path: Path) -> None:
    """Over TLS only a server that the mounted CA vouches for is told the token."""
    key, crt = tmp_path / "key.pem", tmp_path / "ca.crt"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", crt, "-days", "1", "-subj",
         "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("no openssl here to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    with serving(lambda ask: ask.answer(json.dumps({"items": [pod("a")]}).encode())) as server:
        secure = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        secure.seen, secure.act = server.seen, server.act  # type: ignore[attr-defined]
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        threading.Thread(target=secure.serve_forever, daemon=True).start()
        where = f"https://127.0.0.1:{secure.server_address[1]}"
        assert len(Pods(Kubernetes("a=b"), Cluster(where, account(tmp_path))).find()) == 1
        stranger = tmp_path / "other"
        stranger.mkdir()
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", stranger / "k", "-out", stranger / "ca.crt",
             "-days", "1", "-subj", "/CN=127.0.0.1"],
            capture_output=True, check=True,
        )  # fmt: skip
        with pytest.raises(WorldFailed, match="cannot be asked"):
            Pods(Kubernetes("a=b"), Cluster(where, account(stranger))).find()
        secure.shutdown()
        secure.server_close()
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda ask: ask.answer(b"{}", 403), "may not list pods"),
        (lambda ask: ask.answer(b"{}", 500), "answers 500"),
        (lambda ask: ask.answer(b"no"), "not JSON"),
        (lambda ask: ask.answer(b"{}"), "no list of pods"),
        (lambda ask: ask.answer(b'{"items": [], "metadata": {"continue": "x"}}'), "does not end"),
        (lambda _: time.sleep(3), "did not answer"),
    ],
    ids=["forbidden", "broken", "words", "nothing", "endless", "slow"],
)
def test_a_cluster_that_does_not_answer(act: Any, says: str, tmp_path: Path) -> None:
    """One line each; the token is in none of them."""
    with serving(act) as server:
        finder = Pods(Kubernetes("a=b"), Cluster(f"http://{server.host}", account(tmp_path), timeout_s=1.0))
        with pytest.raises(PlimsollError, match=says) as caught:
            finder.find()
    assert "pod-token" not in str(caught.value)


def test_outside_a_cluster_it_is_said() -> None:
    """Where Kubernetes has left no address there is no cluster; where it has, that is the address."""
    with pytest.raises(BadInput, match="no pod of a cluster"):
        in_cluster({})
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}) == "https://10.0.0.1:6443"
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"


@settings(max_examples=200, deadline=None)
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
        found = groups_in(tree, "here")
    except BadInput:
        found = ()
    assert all(isinstance(target, Target) for target in found)

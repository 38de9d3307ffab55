"""The way to the cluster's API for those who write to it: whom it trusts, and what it shows to whom."""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.cluster import KUBECONFIG, ClusterClient, kubeconfig_access
from plimsoll.net.client import Lost, Reply
from tests.certificates import certificate
from tests.each import in_loop
from tests.net.raw_answers import Answers, answer, on_a_port


@in_loop
async def test_only_a_server_that_the_ca_vouches_for_is_told_the_token_which_is_read_each_time(tmp_path: Path) -> None:
    """Another server gets nothing, not even the request; Kubernetes changes the token every hour."""
    context = certificate(tmp_path / "own")
    certificate(tmp_path / "other")
    answers = Answers(lambda _: answer(200, {"a": 1}))
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    told = await ClusterClient(url, str(tmp_path / "own"), {}).ask("GET", "/x")
    assert isinstance(told, Reply)
    assert told.table() == {"a": 1}
    assert b"Authorization: Bearer a-token\r\n" in answers.got[0]
    lost = await ClusterClient(url, str(tmp_path / "other"), {}).ask("GET", "/x")
    assert isinstance(lost, Lost)
    assert not lost.was_sent
    assert len(answers.got) == 1
    server.close()
    (tmp_path / "token").write_text("first\n")
    async with on_a_port(lambda _: answer(200, {})) as (answers, url):
        cluster = ClusterClient(url, str(tmp_path), {})
        await cluster.ask("GET", "/x")
        (tmp_path / "token").write_text("second")
        await cluster.ask("POST", "/y", {"b": 2})
        assert [one.partition(b"Bearer ")[2].split(b"\r\n")[0] for one in answers.got] == [b"first", b"second"]
        assert answers.got[1].endswith(b'\r\n\r\n{"b": 2}')


def test_where_the_cluster_is(tmp_path: Path) -> None:
    """As Kubernetes tells every pod; a namespace that is not told is none."""
    certificate(tmp_path / "own")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert ClusterClient("", str(tmp_path / "own"), environ).namespace() == ""
    with pytest.raises(BadInput, match="no pod of a cluster"):
        ClusterClient("", str(tmp_path / "own"), {})
    with pytest.raises(BadInput, match="service account"):
        ClusterClient("", str(tmp_path), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def kubeconfig(folder: Path, server: str, user: dict[str, Any], ca: Path | None = None) -> Path:
    """A kubeconfig with one context; paths in it are relative to its folder, as kubectl reads them."""
    cluster = {"server": server} | ({"certificate-authority": os.path.relpath(ca, folder)} if ca else {})
    tree = {
        "current-context": "here", "users": [{"name": "u", "user": user}], "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
    }  # fmt: skip
    (folder / "config").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config"


def client_by(path: Path) -> ClusterClient:
    """Made as guard makes it for --kubeconfig."""
    before = KUBECONFIG.set(kubeconfig_access(str(path), None))
    cluster = ClusterClient()
    KUBECONFIG.reset(before)
    assert cluster.namespace() == "llm"
    return cluster


@in_loop
async def test_a_client_certificate_of_a_kubeconfig(tmp_path: Path) -> None:
    """Shown to a server that asks for one, from files and from data in the file itself; without it nothing is answered."""
    context = certificate(tmp_path / "server")
    certificate(tmp_path / "client")
    context.load_verify_locations(tmp_path / "client" / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    answers = Answers(lambda _: answer(200, {"a": 1}))
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0, ssl=context)
    url, ca = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", tmp_path / "server" / "ca.crt"
    files = {"client-certificate": "client/ca.crt", "client-key": "client/key.pem"}
    data = {f"{name}-data": base64.b64encode((tmp_path / file).read_bytes()).decode() for name, file in files.items()}
    for user in (files, data):
        told = await client_by(kubeconfig(tmp_path, url, user, ca)).ask("GET", "/x")
        assert isinstance(told, Reply), told
        assert told.table() == {"a": 1}
    assert all(b"Authorization" not in one for one in answers.got)
    assert isinstance(await client_by(kubeconfig(tmp_path, url, {}, ca)).ask("GET", "/x"), Lost)
    assert len(answers.got) == 2
    for wrong in ({"client-key-data": "%"}, {**files, "client-key": "client/none"}, {**files, "client-key": "client/ca.crt"}):
        with pytest.raises(BadInput, match=r"cannot be (read|used)"):
            kubeconfig_access(str(kubeconfig(tmp_path, url, {**files, **wrong}, ca)), None)
    server.close()


@in_loop
async def test_the_token_of_an_exec_plugin(tmp_path: Path) -> None:
    """The command is told what kubectl would tell it, and asked again once its token is over; what it prints is checked."""
    script = tmp_path / "login"
    says = """echo '{"status": {"token": "'$1-$WHO'", "expirationTimestamp": '$2'}}'"""
    told = 'case $KUBERNETES_EXEC_INFO in *ExecCredential*) ;; *) exit 1 ;; esac; echo asked >> "$(dirname "$0")/asked"'
    script.write_text(f"#!/bin/sh\n{told}\n{says}\n", encoding="utf-8")
    script.chmod(0o700)

    async def tokens(*words: str, times: int = 2) -> list[bytes]:
        (tmp_path / "asked").unlink(missing_ok=True)
        command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login", "args": list(words)}
        user = {"exec": {**command, "env": [{"name": "WHO", "value": "sre"}]}}
        async with on_a_port(lambda _: answer(200, {})) as (answers, url):
            cluster = client_by(kubeconfig(tmp_path, url, user))
            for _ in range(times):
                await cluster.ask("GET", "/x")
            return [one.partition(b"Bearer ")[2].split(b"\r\n")[0] for one in answers.got]

    for until, often in (("null", 1), ('"2999-01-01T00:00:00Z"', 1), ('"2001-01-01T00:00:00Z"', 2)):
        assert await tokens("tok", until) == [b"tok-sre"] * 2
        assert (tmp_path / "asked").read_text().split() == ["asked"] * often, until
    assert await tokens("tok", "no JSON", times=1) == []
    lost = await client_by(kubeconfig(tmp_path, "http://127.0.0.1:9", {"exec": {"command": "./none"}})).ask("GET", "/x")
    assert isinstance(lost, Lost)
    assert "no token" in lost.why

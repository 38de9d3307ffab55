"""The way to the cluster's API for those who write to it: whom it trusts, and what it shows to whom."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.net.client import Lost, Reply
from tests.certificates import certificate
from tests.each import in_loop
from tests.net.raw_answers import Answers, answer, on_a_port


@in_loop
async def test_only_a_server_that_the_ca_vouches_for_is_told_the_token(tmp_path: Path) -> None:
    """Another server gets nothing, not even the request."""
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


@in_loop
async def test_the_token_is_read_each_time(tmp_path: Path) -> None:
    """Kubernetes changes it every hour."""
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

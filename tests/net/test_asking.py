"""Tokens in headers, and the address of a pod's cluster."""

from __future__ import annotations

import pytest

from plimsoll.errors import BadInput
from plimsoll.net.cluster import bearer, in_cluster


def test_a_token_that_would_end_its_line_is_refused() -> None:
    """Nothing gets into a header but a token."""
    assert bearer("a-b.c") == {"Authorization": "Bearer a-b.c"}
    for token in ("", "a b", "a\r\nX: y", "ä"):
        with pytest.raises(BadInput):
            bearer(token)


def test_outside_a_cluster_it_is_said() -> None:
    """Where Kubernetes has left no address there is no cluster; where it has, that is the address."""
    for environ in ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "https"}):
        with pytest.raises(BadInput, match="no pod of a cluster"):
            in_cluster(environ)
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}) == "https://10.0.0.1:6443"
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"

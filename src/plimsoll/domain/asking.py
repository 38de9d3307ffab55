"""What whoever asks another server has to know: how a token is shown, and where a pod finds its cluster."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.errors import BadInput

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The folder in which Kubernetes gives every pod its token, its namespace and the cluster's CA."""


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token; BadInput if it is none that a header can hold."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput("the token holds letters that a token cannot have")
    return {"Authorization": f"Bearer {token}"}


def in_cluster(environ: Mapping[str, str]) -> str:
    """The address of the API server, as Kubernetes tells every pod; BadInput where this is none."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise BadInput("kubernetes: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

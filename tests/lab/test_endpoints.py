"""Endpoints, release by release."""

from __future__ import annotations

from lab.catalogue.endpoints import ENDPOINTS, Endpoint
from plimsoll.vllm import versions
from tests.each import each


def _exists(endpoint: Endpoint, release: str) -> bool:
    return any(
        versions.is_within(stretch, release) for stretch in versions.rows("endpoints")[f"{endpoint.method} {endpoint.path}"]
    )


@each("endpoint", ENDPOINTS, ids=lambda e: e.path)
def test_every_endpoint_we_describe_is_in_the_newest_release(endpoint: Endpoint) -> None:
    """No endpoint is described from memory alone."""
    assert _exists(endpoint, "0.32.0")


def test_endpoints_come_and_go_with_releases() -> None:
    """/pause came with 0.12.0; a request to an older server would be a 404."""
    pause = next(e for e in ENDPOINTS if e.path == "/pause")
    assert (_exists(pause, "0.11.2"), _exists(pause, "0.12.0")) == (False, True)

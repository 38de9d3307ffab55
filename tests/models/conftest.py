"""What several tests of the sources start with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.hub_server import Server, running


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as hub:
        yield hub


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is never asked for through a proxy of this machine."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")

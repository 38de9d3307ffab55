"""What Kubernetes mounts into a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_api import TOKEN


@pytest.fixture
def account(tmp_path: Path) -> str:
    """The folder of a service account in the namespace `llm`."""
    (tmp_path / "token").write_text(TOKEN + "\n", encoding="ascii")
    (tmp_path / "namespace").write_text("llm", encoding="ascii")
    return str(tmp_path)

"""The paths that clients may reach through a proxy. Everything else stays inside: figures, drains, adapters, admin endpoints.

A list of what is let through, by whole paths: what is merely kept out can be spelled another way (`/v1/load%5flora_adapter`).
"""

from __future__ import annotations

from plimsoll.engine import tables
from plimsoll.engine.flags import holds_in

PATHS = (
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v2/embed",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime",
)  # fmt: skip
RESPONSES = "/v1/responses"
"""Its answers are asked for and cancelled by id, below this path."""


def client_paths(release: str) -> tuple[str, ...]:
    """The paths of PATHS that the release has."""
    there = {
        name.partition(" ")[2]
        for name, stretches in tables.rows("endpoints").items()
        if any(holds_in(stretch, release) for stretch in stretches)
    }
    return tuple(path for path in PATHS if path in there)

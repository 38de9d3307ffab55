"""Secrets and prompts that tests plant, to look for them wherever something leaves plimsoll."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tests.test_redaction import CONTEXTS, SHAPES, URLS, survives

SECRET = "x7Kd0pWm3TzRv9LqB2nYc5Hj"
PROMPT = "qwertzuiopasdfghjklyxcvbnm"
KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----"
BODY = "a1B2c3D4e5F6g7H8i9J0" * 3


def every_secret() -> list[str]:
    """Each kind of secret that redaction knows, in the place it is known by."""
    shaped = []
    for shape in SHAPES:
        for length in (20, 30, 34, 35, 36, 40):
            shape = shape.replace(f"{{{length}}}", BODY[:length])  # noqa: PLW2901
        shaped.append(f"said {shape} twice")
    return [*(context.replace("§", SECRET) for context in (*CONTEXTS, *URLS)), *shaped, KEY]


def leaks(text: str) -> bool:
    """Whether any part of what was planted can be read."""
    return survives(SECRET, text) or BODY[:8] in text or PROMPT[:6] in text


def members(path: Path) -> dict[str, str]:
    """Every member's text of an archive by its name, in order."""
    with tarfile.open(path) as archive:
        return {entry.name: (archive.extractfile(entry) or io.BytesIO()).read().decode() for entry in archive}

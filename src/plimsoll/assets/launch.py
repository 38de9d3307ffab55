"""All files to launch one planned server with, by the way it is launched."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.assets import compose, kubernetes, systemd
from plimsoll.assets.settings import Settings

WAYS = ("systemd", "compose", "kubernetes")
_FILES = {"systemd": systemd.files, "compose": compose.files, "kubernetes": kubernetes.files}


def launch_files(settings: Settings, ways: Sequence[str]) -> dict[str, str]:
    """Names and texts of the files for these ways; the wheel and plan.json lie beside them."""
    return {path: text for way in ways for path, text in _FILES[way](settings).items()}

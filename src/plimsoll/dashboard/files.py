"""The page itself: a few files that say nothing of any engine, read once from the package."""

from __future__ import annotations

from importlib.resources import files

KINDS = {
    "html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}  # fmt: skip


def page_files() -> dict[str, tuple[bytes, str]]:
    """Each file with its kind, by the path it is served under."""
    found = {}
    for one in (files("plimsoll.dashboard") / "static").iterdir():
        kind = KINDS.get(one.name.rpartition(".")[2])
        if kind is not None:
            found["/" if one.name == "index.html" else f"/page/{one.name}"] = (one.read_bytes(), kind)
    return found

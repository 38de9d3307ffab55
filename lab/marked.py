"""A part of a page that is made by a program, between two marks: everything around it is somebody's own words."""

from __future__ import annotations

from pathlib import Path


def placed(text: str, begin: str, end: str, made: str, page: Path) -> str:
    """The page's text with what was made between its marks; a page that has lost one of them is left alone."""
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{page.name} has no place for what is made: {begin}")
    return f"{head}{begin}{made}{end}{tail}"

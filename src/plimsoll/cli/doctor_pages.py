"""`plimsoll doctor --explain CODE`: the page on a finding, from the installed package or from the repository."""

from __future__ import annotations

import difflib
from pathlib import Path

import plimsoll
from plimsoll.domain.finding import Code
from plimsoll.errors import BadInput

_INSTALLED = Path(plimsoll.__file__).parent / "findings"
_REPOSITORY = Path(plimsoll.__file__).parents[2] / "docs" / "findings"


def page(code: str) -> str:
    """The page, or the list of all where no code is given; BadInput with what was probably meant where there is none such."""
    known = [str(one) for one in Code]
    code = code.strip().lower() or "README"
    if code not in (*known, "README"):
        near = [one for one in known if one.startswith(f"{code.rstrip('.')}.")] or difflib.get_close_matches(code, known, n=3)
        near = near or [one for one in known if code.replace(" ", "-") in one]
        meant = f"did you mean {', '.join(near)}?" if near else "plimsoll doctor --explain lists them all"
        raise BadInput(f"there is no finding {code!r}; {meant}")
    for folder in (_INSTALLED, _REPOSITORY):
        file = folder / f"{code}.md"
        if file.is_file():
            return file.read_text(encoding="utf-8").rstrip()
    raise BadInput(f"the page of {code} is not in this installation; it is docs/findings/{code}.md of the repository")

"""docs/inside.md says what the code does: its tables are made from it."""

from __future__ import annotations

import re
from pathlib import Path

from lab.write_inside_page import PAGE, page
from plimsoll.inside.endpoints import ENDPOINTS

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_code() -> None:
    """No setting is promised that nothing reads, and only ready is open."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "plimsoll" / "inside").glob("*.py"))
    read = set(re.findall(r"PLIMSOLL_[A-Z_]+", code))
    assert set(re.findall(r"PLIMSOLL_[A-Z_]+", PAGE.read_text(encoding="utf-8"))) <= read
    assert [endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_token] == ["/plimsoll/ready"]

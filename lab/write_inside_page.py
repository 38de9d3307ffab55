"""Writes the tables of docs/inside.md from the code: `python -m lab.write_inside_page`."""

from __future__ import annotations

from pathlib import Path

from lab.marked import placed
from plimsoll.inside.endpoints import ENDPOINTS
from plimsoll.inside.meters import METERS
from plimsoll.inside.settings import SETTINGS, data_table

PAGE = Path(__file__).parents[1] / "docs" / "inside.md"


def endpoints() -> str:
    """What each endpoint takes and answers."""
    rows = ["| endpoint | takes | says |", "|---|---|---|"]
    words = data_table("endpoints")
    for endpoint in ENDPOINTS:
        key, said = "" if endpoint.needs_token else " (no token)", words[f"{endpoint.method} {endpoint.path}"]
        rows.append(f"| {endpoint.method} `{endpoint.path}`{key} | {said['takes'] or '-'} | {said['says']} |")
    return "\n".join(rows)


def settings() -> str:
    """Every environment variable with its default."""
    rows = ["| variable | default | |", "|---|---|---|"]
    rows += [f"| `{setting.name}` | {setting.default or '-'} | {setting.says} |" for setting in SETTINGS]
    return "\n".join(rows)


def metrics() -> str:
    """Every metric as it stands on the page."""
    rows = ["| metric | labels | |", "|---|---|---|"]
    for meter in METERS:
        name = meter.name + ("_total" if meter.kind == "counter" else "")
        rows.append(f"| `{name}` | {', '.join(meter.labels) or '-'} | {meter.says} |")
    return "\n".join(rows)


TABLES = {"endpoints": endpoints, "settings": settings, "metrics": metrics}


def page(text: str) -> str:
    """The page with its tables made anew; the rest is as it was."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: made by `python -m lab.write_inside_page` -->", f"<!-- end of {name} -->"
        text = placed(text, begin, end, f"\n{table()}\n", PAGE)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")

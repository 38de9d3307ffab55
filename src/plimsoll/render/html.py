"""Reports as pages for a browser: one file each that loads nothing from anywhere, light and dark, fit to print."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from plimsoll.redaction import one_line
from plimsoll.units import format_count, format_gib

TEMPLATES = Path(__file__).parent / "templates"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(template: str, title: str, *, has_charts: bool = False, **facts: object) -> str:
    """The page; every text in it is cleaned and escaped, and only our own script may run where there are charts."""
    script = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("plot.js", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"{POLICY}; img-src data:; script-src 'sha256-{digest}'" if has_charts else POLICY
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # Markup has been cleaned already
    )  # fmt: skip
    return environment.get_template(f"{template}.html.j2").render(
        title=title, policy=policy, has_charts=has_charts, script=script, count=format_count, gib=format_gib, **facts
    )

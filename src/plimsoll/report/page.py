"""What all HTML pages have in common: a document that loads nothing from anywhere, tables, tiles, lists, and text made safe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from plimsoll.report.flags import clean

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may do with a page without a script: nothing but show it."""


def text(words: str) -> str:
    """Text of anybody's: no secret, no control character, no markup."""
    return escape(clean(words), quote=True)


def document(title: str, style: str, parts: Iterable[str], *, footer: str = "", policy: str = POLICY, script: str = "") -> str:
    """The whole page."""
    end = f'</main>\n<footer class="dim"><p>{footer}</p></footer>' if footer else "</main>"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>{style}</style>\n</head>\n<body>\n<main>",
            *parts,
            end,
            *([f"<script>{script}</script>"] if script else []),
            "</body>\n</html>\n",
        ]
    )


def tiles(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Figures side by side: a name, the figure, and what else is to be said of it."""
    return [
        '<dl class="tiles">',
        *(
            f'<div><dt>{name}</dt><dd class="big">{text(value)}</dd><dd class="more">{text(more)}</dd></div>'
            for name, value, more in rows
        ),
        "</dl>",
    ]


def row(name: str, cells: Iterable[str], kind: str = "") -> str:
    """One line of a table."""
    values = "".join(f"<td>{text(cell)}</td>" for cell in cells)
    return f'<tr{f" class={kind}" if kind else ""}><th scope="row">{text(name)}</th>{values}</tr>'


def table(caption: str, head: Sequence[str], body: Iterable[str], *, ends_in_text: bool = False) -> list[str]:
    """A table that scrolls by itself on a narrow screen, also by keyboard; without a head where no column has a name.

    One whose last column is text begins its rows with a size, which stays in one line.
    """
    sizes = " sizes" if ends_in_text else ""
    kinds = [*([""] * (len(head) - 1)), ' class="text"' if ends_in_text else ""]
    columns = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    return [
        f'<div class="scroll{sizes}" tabindex="0" role="region" aria-label="{text(caption)}"><table>',
        f"<caption>{text(caption)}</caption>",
        f"<thead><tr>{columns}</tr></thead>" if any(head) else "",
        "<tbody>",
        *body,
        "</tbody></table></div>",
    ]


def bullets(items: Iterable[str], title: str = "") -> list[str]:
    """A list of markup, with its heading where it has one; nothing where there is no item."""
    lines = [f"<li>{item}</li>" for item in items]
    return [*([f"<h2>{title}</h2>"] if title else []), "<ul>", *lines, "</ul>"] if lines else []

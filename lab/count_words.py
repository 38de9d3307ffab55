"""Counts the words that people wrote in README.md and docs/, page by page.

python -m lab.count_words [--pages]

What commands print (fenced blocks) and what the lab's scripts write (from `<!-- ... made by ... -->` to its end) is left out:
nobody reads that from top to bottom, and nobody has to keep it short.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60_000
_FENCED = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(
    r"<!--[^>]*?\b(?:made|printed) (?:from \S+ )?by `?python -m.*?-->(?:.*?<!-- end[^>]*-->|.*\Z)", re.DOTALL | re.IGNORECASE
)
_UNSEEN = re.compile(r"<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)
_WORD = re.compile(r"[^\W\d_][\w'.-]*")


def words_of(page: str) -> int:
    """Words of prose and tables, without fenced blocks, generated parts, comments and addresses; `code` counts as one word."""
    text = _UNSEEN.sub(" ", _GENERATED.sub(" ", _FENCED.sub(" ", page)))
    return len(_WORD.findall(re.sub(r"`[^`\n]*`", "code", text)))


def main(arguments: list[str]) -> int:
    """Print words by section, with `--pages` by page; exit code 1 when there are more than the limit."""
    pages = {
        path: words_of(path.read_text(encoding="utf-8"))
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    }
    total = sum(pages.values())
    if "--pages" in arguments:
        for path, words in sorted(pages.items(), key=lambda row: -row[1]):
            print(f"{words:>7,}  {path.relative_to(ROOT)}")
    findings = sum(words for path, words in pages.items() if path.parent.name == "findings")
    print(f"{total:,} words in {len(pages)} pages, {findings:,} of them in docs/findings (limit {LIMIT:,})")
    return int(total > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

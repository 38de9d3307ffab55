"""Counts the words that people wrote in README.md and docs/, page by page.

python -m lab.count_words [--pages]

What commands print (fenced blocks) and what scripts write (from a mark such as `<!-- keys: made by python -m ... -->` to its
end) is left out: nobody reads that from top to bottom.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60_000
_FENCED = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
_GENERATED = (
    re.compile(r"<!--[^>]*?\bpython -m.*?-->(?:.*?<!-- end[^>]*-->|.*\Z)", re.DOTALL),
    re.compile(r"<!-- (?!end)[a-z ]+ -->(?:.*?<!-- end[^>]*-->|.*\Z)", re.DOTALL),
)
_WHOLE_PAGES = ("catalogue.md",)  # written from the first line to the last by python -m lab.write_catalogue_docs
_UNSEEN = re.compile(r"<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)
_WORD = re.compile(r"[^\W\d_][\w'.-]*")


def words_of(page: str) -> int:
    """Words of prose and tables, without fenced blocks, generated parts, comments and addresses; `code` counts as one word."""
    text = _FENCED.sub(" ", page)
    for mark in (*_GENERATED, _UNSEEN):
        text = mark.sub(" ", text)
    return len(_WORD.findall(re.sub(r"`[^`\n]*`", "code", text)))


def main(arguments: list[str]) -> int:
    """Print words by section, with `--pages` by page; exit code 1 when there are more than the limit."""
    pages = {
        path: words_of(path.read_text(encoding="utf-8"))
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        if path.name not in _WHOLE_PAGES
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

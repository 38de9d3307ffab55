"""Writes the comparison on docs/article.md from the run that is kept under lab/results/article/.

python -m lab.write_article_page            write it
python -m lab.write_article_page --check    exit 1 if the page is not what the run says
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lab import marked
from lab.article.compare import COLUMNS, RESULTS, read, rows
from lab.article.fleet import WATCHERS
from lab.article.incidents import INCIDENTS

PAGE = Path(__file__).parents[1] / "docs" / "article.md"
BEGIN, END = "<!-- comparison: made by `python -m lab.write_article_page` -->", "<!-- end of comparison -->"


def section(result: dict[str, Any]) -> str:
    """What stands between the two marks of the page."""
    return "\n\n".join([_incidents(), _made(result), _table(result), _sums(result), _said(result)])


def _incidents() -> str:
    lines = ["| incident | what happens | what would be right |", "|---|---|---|"]
    return "\n".join(lines + [f"| {one.title} | {one.says} | {one.right} |" for one in INCIDENTS])


def _made(result: dict[str, Any]) -> str:
    machine, engines, scale = result["machine"], result["engines"], result["scale"]
    balancer = {"haproxy": "HAProxy", "own": "the demo's own balancer"}[result["balancer"]]
    pace = "at the pace of a real machine" if scale == 1 else f"{scale:g} times as fast as on a real machine"
    loads = [scene["load"] for scene in result["scenes"]]
    return (
        f"Run of {result['made']}, {pace}, {max(scene['at_once'] for scene in result['scenes'])} scenes at a time on "
        f"{machine['cores']} cores that had other work as well (load {min(loads):.0f} to {max(loads):.0f}), Python "
        f"{machine['python']}, seed {result['seed']}; {balancer} before {engines['count']} stand-ins of `vllm serve "
        f"{' '.join(engines['serve'])}` on a pretended {engines['gpu']}, which take {engines['start_s']:.0f} s to start."
    )


def _table(result: dict[str, Any]) -> str:
    titles = ["incident", "watcher", *(title for title, _ in COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
    last = ""
    for title, *cells in rows(result):
        lines.append(f"| {' | '.join(['' if title == last else title, *cells])} |")
        last = title
    return "\n".join(lines)


def _sums(result: dict[str, Any]) -> str:
    """All six together, one line a watcher."""
    lines = []
    for watcher in WATCHERS:
        scenes = [scene for scene in result["scenes"] if scene["watcher"] == watcher]
        restarts = sum(sum(scene["restarts"].values()) for scene in scenes)
        out_s = sum(sum(scene["out_of_service_s"].values()) for scene in scenes)
        lost, asked = (sum(scene[name] for scene in scenes) for name in ("lost", "asked"))
        lines.append(
            f"- **{watcher}**, all {len(scenes)} together: {restarts} restarts, {lost:,} of {asked:,} requests lost, "
            f"{out_s:,.0f} s of one engine out of service"
        )
    return "\n".join(lines)


def _said(result: dict[str, Any]) -> str:
    """What guard said and did, by incident."""
    lines = ["What guard said and did, with the second of it:", ""]
    for incident in INCIDENTS:
        found = [one for one in result["scenes"] if (one["incident"], one["watcher"]) == (incident.name, "guard")]
        told: dict[str, float] = {}
        for word in (word for scene in found for word in scene["words"] if word["at_s"] >= 0):
            name = f"`{word['says']}`" if word["what"] == "notice" else f"**{word['says']}**"
            told.setdefault(name, word["at_s"])
        says = ", ".join(f"{name} ({at_s:.0f} s)" for name, at_s in told.items()) or "nothing"
        lines.append(f"- {incident.title}: {says}")
    return "\n".join(lines)


def placed(page: str, made: str) -> str:
    """The page with this section between its marks."""
    return marked.placed(page, BEGIN, END, f"\n\n{made}\n\n", PAGE)


def main(words: list[str]) -> int:
    """Write the page, or say whether it is as it should be."""
    page = PAGE.read_text(encoding="utf-8")
    made = placed(page, section(read(RESULTS)))
    if "--check" in words:
        if made != page:
            print(f"{PAGE.name} is not what the run says: python -m lab.write_article_page")
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Writes docs/catalogue.md from the engine tables: `python -m lab.write_catalogue_docs`."""

from __future__ import annotations

from pathlib import Path

from lab.catalogue.endpoints import ENDPOINTS, GUARDED_PREFIXES
from lab.catalogue.log_lines import LOG_LINES
from plimsoll.vllm import versions
from plimsoll.vllm.flags import flags_of
from plimsoll.vllm.metrics import FIGURES, metrics_of, resolve
from plimsoll.vllm.versions import Behaviour, Coverage, engine_named, newest

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"
ERAS = ("0.6.0", "0.7.3", "0.9.2", "0.11.0", "0.12.0", "0.20.0", "0.24.0", "0.32.0")


def _range(stretches: list[dict[str, str]]) -> str:
    first, last = stretches[0]["from"], stretches[-1]["to"]
    return f"{first} on" if last == newest() else f"{first} to {last}"


def _figures() -> list[str]:
    lines = ["| our name | unit | what it is | called | mind |", "|---|---|---|---|---|"]
    for figure in FIGURES:
        names = []
        for name in figure.names:
            keys = [k for k in versions.rows("metrics") if k.rsplit(" ", 1)[0] in (name, name.removesuffix("_total"))]
            stretches = sorted((s for k in keys for s in versions.rows("metrics")[k]), key=_place)
            names.append(f"`{name}` ({stretches[0]['from']} to {max(stretches, key=_end)['to']})" if stretches else f"`{name}`")
        lines.append(f"| `{figure.name}` | {figure.unit} | {figure.meaning} | {', '.join(names)} | {'; '.join(figure.traps)} |")
    return lines


def _place(stretch: dict[str, str]) -> int:
    return list(versions.wheels()).index(stretch["from"])


def _end(stretch: dict[str, str]) -> int:
    return list(versions.wheels()).index(stretch["to"])


def _eras() -> list[str]:
    wanted = ("kv_cache_usage", "prefix_hits", "prefix_queries", "running", "waiting", "preemptions", "success")
    lines = ["| | " + " | ".join(ERAS) + " |", "|---" * (len(ERAS) + 1) + "|"]
    for name in wanted:
        cells = []
        for era in ERAS:
            found = resolve(name, engine_named(era))
            text = found.exposition.removeprefix("vllm:") if found else "nothing"
            cells.append(f"`{text}`" + ("" if found is None or found.is_exact else " (a relative)"))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def _behaviours() -> list[str]:
    lines = ["| from | what changed | evidence | name |", "|---|---|---|---|"]
    for row in Behaviour:
        since = f"**{row.since}**" if row.is_announced else row.since
        until = f" (only until {row.last})" if row.last else ""
        lines.append(f"| {since} | {row.change}{until} | `{row.evidence}` | `{row.name}` |")
    return lines


def _memory() -> list[str]:
    lines = ["| from | what changed | what it does to memory; what to set |", "|---|---|---|"]
    return lines + [f"| {row.since} | {row.change} | {row.memory} |" for row in Behaviour if row.memory is not None]


def _flags() -> list[str]:
    """New, changed and gone flags of each release from 0.20.0 on, by the table of the wheels."""
    wheels, rows = list(versions.wheels()), versions.rows("flags")
    lines = ["| release | new | changed | gone |", "|---|---|---|---|"]
    for place, release in enumerate(wheels):
        if versions.is_before(release, "0.20.0"):
            continue
        begun = {name: spans for name, spans in rows.items() if any(span["from"] == release for span in spans)}
        new = [name for name, spans in begun.items() if wheels[place - 1] not in {span["to"] for span in spans}]
        gone = [
            name for name, spans in rows.items() if name not in begun and any(span["to"] == wheels[place - 1] for span in spans)
        ]
        cells = (new, [name for name in begun if name not in new], gone)
        if any(cells):
            lines.append(
                f"| {release} | " + " | ".join(", ".join(f"`{name}`" for name in cell) or "-" for cell in cells) + " |"
            )
    return lines


def _endpoints() -> list[str]:
    lines = ["| endpoint | does | needs | mind | in |", "|---|---|---|---|---|"]
    for endpoint in ENDPOINTS:
        stretches = versions.rows("endpoints").get(f"{endpoint.method} {endpoint.path}", [])
        seen = _range(stretches) if stretches else "not seen in a wheel"
        cells = (f"{endpoint.method} `{endpoint.path}`", endpoint.does, endpoint.needs or "", endpoint.trap or "", seen)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _log_lines() -> list[str]:
    lines = ["| name | says | in |", "|---|---|---|"]
    for line in LOG_LINES:
        spans = line.seen_in()
        seen = f"{spans[0].first} to {spans[-1].last}" if spans else f"said by {line.speaker}"
        lines.append(f"| `{line.name}` | {line.says} | {seen} |")
    return lines


def page() -> str:
    """The whole page."""
    releases = list(versions.wheels())
    flags = {row.name for row in flags_of(newest()).values()}
    return "\n".join(
        [
            "# What each vLLM version does",
            "",
            "Made by `python -m lab.write_catalogue_docs` from `src/plimsoll/vllm/`; do not edit.",
            "",
            f"{len(releases)} releases were read, from {releases[0]} to {releases[-1]}, each from the wheel named in",
            "`src/plimsoll/vllm/data/releases.json`, as syntax trees: nothing of vLLM is imported to learn what it does.",
            f"{newest()} has {len(flags)} flags and {len(metrics_of(newest()))} metrics; over all releases there were",
            f"{len(versions.rows('flags'))} flags and {len(versions.rows('environment'))} environment variables.",
            "",
            "## What changed for memory",
            "",
            "Find the release you left and the one you run: the rows between them are the difference. For your own command",
            "`plimsoll plan --from OLD --vllm NEW --gpu NAME -- vllm serve ...` puts them into GiB of KV cache.",
            "",
            *_memory(),
            "",
            "## Figures and their names",
            "",
            "A version newer than the catalogue, a fork or a development build is met by what its page shows.",
            "",
            *_eras(),
            "",
            "A relative says something similar in another unit; no sums are done with it.",
            "",
            *_figures(),
            "",
            "## What changed, release by release",
            "",
            "All that plimsoll decides by the release is a row here (`Behaviour` in `src/plimsoll/vllm/versions.py`).",
            "Evidence is a file of vLLM's package, or a page of ours. `flags --from` announces the rows in bold on an upgrade.",
            "",
            *_behaviours(),
            "",
            "## Flags, release by release",
            "",
            "From 0.20.0; `plimsoll flags --from OLD --vllm NEW -- COMMAND` says what it means for a command. Behind it stands",
            "`src/plimsoll/vllm/data/flags.json`, made by `python -m lab.catalogue` from the wheels, never by hand.",
            "",
            *_flags(),
            "",
            "## What was read up to which release",
            "",
            "To revisit when a release is added; tables in `src/plimsoll/vllm/data/` are read anew from its wheel.",
            "",
            "| | from | to | evidence |",
            "|---|---|---|---|",
            *(f"| {c.subject} | {c.first} | {c.last} | `{c.evidence}` |" for c in Coverage),
            "",
            "## Endpoints",
            "",
            *_endpoints(),
            "",
            f"`--api-key` guards paths that begin with {', '.join(GUARDED_PREFIXES)}; everything else is open.",
            "",
            "## Log lines we recognise",
            "",
            *_log_lines(),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")

"""A /metrics page as a recording keeps it: what families it has, and the numbers that can be counted."""

from __future__ import annotations

import re
from typing import Any

LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created")
# Labels whose values are facts of the requests and the flags; of the others only the names are kept.
KEPT_VALUES = frozenset({
    "le", "engine", "model_name", "finished_reason", "source", "reason", "sleep_state", "handler", "method", "status",
    "operation", "position", "mode",
})  # fmt: skip

# Counters and sums that follow from the requests alone, not from how fast a machine is.
COUNTED = re.compile(
    r"vllm:(prompt_tokens|generation_tokens|request_success|prefix_cache_|num_preemptions|prompt_tokens_|external_prefix|mm_cache|"
    r"request_prompt_tokens|request_generation_tokens|request_max_num_gen|request_params_|request_prefill_kv|iteration_tokens|"
    r"request_num_preemptions|corrupted|num_requests_rejected)"
)


def samples(page: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every line that is no comment."""
    matches = (LINE.match(line) for line in page.splitlines())
    return [(match[1], dict(LABEL.findall(match[2] or "")), float(match[3])) for match in matches if match]


def families(page: str) -> dict[str, Any]:
    """Every family: type, help, and for each of its series the label names with the values that are facts."""
    found: dict[str, Any] = {}
    for line in page.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            _, what, name, *rest = line.split(" ", 3)
            found.setdefault(name, {})[what.lower()] = rest[0] if rest else ""
    for name, labels, _ in samples(page):
        family = (
            name
            if name in found
            else next((name[: -len(s)] for s in SUFFIXES if name.endswith(s) and name[: -len(s)] in found), name)
        )
        series = found.setdefault(family, {}).setdefault("series", {}).setdefault(name, {})
        for label, value in labels.items():
            values = series.setdefault(label, [])
            if label in KEPT_VALUES and value not in values:
                values.append(value)
    for series in (own for one in found.values() for own in one.get("series", {}).values()):
        for label in series.keys() - {"le"}:  # the edges of a histogram have an order
            series[label].sort()
    return found


def numbers(page: str) -> dict[str, float]:
    """The counters and sums that follow from the requests alone, keyed by name and the labels that matter."""
    found: dict[str, float] = {}
    for name, labels, value in samples(page):
        if COUNTED.match(name) and not name.endswith("_created"):
            own = ",".join(f"{key}={word}" for key, word in sorted(labels.items()) if key not in ("engine", "model_name"))
            found[f"{name}{{{own}}}" if own else name] = value
    return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What moved, and by how much; buckets that did not move are left out."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}

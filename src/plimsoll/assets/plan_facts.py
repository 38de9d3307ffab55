"""What `plimsoll plan --json` printed, read back: the figures that files are made from, and the command that was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.assets.settings import PlanFacts
from plimsoll.errors import BadInput

SCHEMA = "plimsoll.plan/1"


def facts_of(plan: Mapping[str, Any], name: str) -> PlanFacts:
    """The figures of a plan; BadInput, with the file's name, for anything else."""
    if plan.get("schema") != SCHEMA:
        raise BadInput(f"{name}: not a plan; plimsoll plan --json ... writes one")
    if "compare" in plan:
        raise BadInput(f"{name}: several plans side by side; files are made from the plan of one command, without --compare")
    reader = _Reader(plan, name)
    connector = reader.there("settings", "kv_connector")
    return PlanFacts(
        model=reader.text("model"),
        fits=reader.there("fits") is True,
        gpu=reader.text("gpu", "name"),
        gpus=reader.whole("gpu", "count"),
        requested_bytes=reader.whole("ledger", "requested", "value"),
        weights_bytes=reader.whole("ledger", "weights", "value"),
        kv_bytes=reader.whole("ledger", "kv", "value"),
        slack_bytes=reader.whole("ledger", "slack", "value"),
        kv_tokens=reader.whole("kv", "tokens"),
        tensor_parallel=reader.whole("settings", "tensor_parallel_size"),
        pipeline_parallel=reader.whole("settings", "pipeline_parallel_size"),
        kv_connector=connector if isinstance(connector, str) else None,
    )


def release_of(plan: Mapping[str, Any], name: str) -> str:
    """The vLLM release that was planned for."""
    return _Reader(plan, name).text("vllm")


def planned_line(plan: Mapping[str, Any], name: str) -> str:
    """The planned command as one line of shell, its secrets hidden."""
    line = _Reader(plan, name).text("flags", "rewritten")
    if "\n" in line:
        raise BadInput(f"{name}: it plans several commands; files are made from one")
    return line


def why_it_does_not_fit(plan: Mapping[str, Any]) -> str:
    """The first finding's title, of a plan that does not fit."""
    findings = plan.get("findings")
    first = findings[0] if isinstance(findings, list) and findings else None
    title = first.get("title") if isinstance(first, dict) else None
    return title if isinstance(title, str) else "too little memory"


class _Reader:
    """Values at a path, each checked for what it is."""

    def __init__(self, plan: Mapping[str, Any], name: str) -> None:
        self._plan, self._name = plan, name

    def there(self, *path: str) -> object:
        found: object = self._plan
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def text(self, *path: str) -> str:
        found = self.there(*path)
        if not isinstance(found, str) or not found or not found.replace("\n", " ").isprintable():
            raise BadInput(f"{self._name}: the plan has no {'.'.join(path)}")
        return found

    def whole(self, *path: str) -> int:
        found = self.there(*path)
        if not isinstance(found, int) or isinstance(found, bool) or abs(found) > 2**60:
            raise BadInput(f"{self._name}: the plan has no {'.'.join(path)}")
        return found

"""Reads one pod as the cluster's API shows it: where it is, how often it was started again, and whether it is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

USUAL_PORT = 8000
RUNNING, OVER = "Running", ("Failed", "Succeeded")
WORDS_MAX = 100


class Pod(NamedTuple):
    """What matters of it."""

    name: str  # namespace/name
    address: str
    port: int
    phase: str
    is_going: bool  # it is being deleted
    restarts: int | None  # of the container that serves the port, or else of the one that was started most often
    ended: str  # why it has ended for good, in words; empty if it has not, or if somebody may start it again


def read_pod(item: Any, port: int | None = None) -> Pod:
    """A pod of a list; `port` where the user has named it."""
    about, spec, status = (_dict(_dict(item).get(key)) for key in ("metadata", "spec", "status"))
    address, phase = status.get("podIP"), str(status.get("phase", ""))
    port = port or port_of(spec)
    states = _statuses(spec, status, port)
    counts = [count for state in states if isinstance(count := state.get("restartCount"), int) and not isinstance(count, bool)]
    return Pod(
        f"{about.get('namespace', '')}/{about.get('name', '')}",
        address if isinstance(address, str) else "",
        port,
        phase,
        bool(about.get("deletionTimestamp")),
        max((count for count in counts if count >= 0), default=None),
        _ended(about, spec, status, states) if phase in OVER else "",
    )


def port_of(spec: Mapping[str, Any]) -> int:
    """The port called http, else the only one there is, else vLLM's own."""
    ports = [
        (str(port.get("name", "")), number)
        for container in _dicts(spec.get("containers"))
        for port in _dicts(container.get("ports"))
        if isinstance(number := port.get("containerPort"), int) and 0 < number < 65_536
    ]
    by_name = [number for name, number in ports if name == "http"]
    return by_name[0] if by_name else ports[0][1] if len(ports) == 1 else USUAL_PORT


def _statuses(spec: Mapping[str, Any], status: Mapping[str, Any], port: int) -> list[dict[str, Any]]:
    """Those of the container that has the port; of all where none says so."""
    states = _dicts(status.get("containerStatuses"))
    serving = {
        container.get("name") for container in _dicts(spec.get("containers"))
        if any(one.get("containerPort") == port for one in _dicts(container.get("ports")))
    }  # fmt: skip
    return [state for state in states if state.get("name") in serving] or states


def _ended(about: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any], states: list[dict[str, Any]]) -> str:
    """Only where nobody starts it again: the node may not, and there is no controller that would put another in its place."""
    if spec.get("restartPolicy") != "Never" or any(one.get("controller") for one in _dicts(about.get("ownerReferences"))):
        return ""
    for state in states:
        over = _dict(_dict(state.get("state")).get("terminated"))
        if isinstance(code := over.get("exitCode"), int):
            reason = str(over.get("reason") or "")[:WORDS_MAX]
            words = f" ({reason})" if reason and reason.isprintable() and reason not in ("Error", "Completed") else ""
            return f"its container ended with exit code {code}{words} and is not started again: restartPolicy is Never"
    said = str(status.get("reason") or status.get("phase"))[:WORDS_MAX]
    return f"its pod is over ({said if said.isprintable() else 'no reason given'}), and restartPolicy is Never"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    found: Iterable[Any] = value if isinstance(value, list) else ()
    return [one for one in found if isinstance(one, dict)]

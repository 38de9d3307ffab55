"""What a gate said of its engine (`/plimsoll/state`, or `state.json` in guard's evidence): it alone has proof of a wedge."""

from __future__ import annotations

import json
from collections.abc import Mapping

from plimsoll.doctor.diagnose import Judged
from plimsoll.doctor.metrics_remedies import wedge_remedies
from plimsoll.domain.finding import Code, Evidence, Finding, Severity
from plimsoll.domain.log import Log

SCHEMA = "plimsoll.state/1"
_FIRST_LINES = 3


def is_gate_state(log: Log) -> bool:
    """Whether this text is such an answer."""
    first = "".join(line.text for line in log.lines[:_FIRST_LINES]).replace(" ", "")
    return first.startswith("{") and f'"schema":"{SCHEMA}"' in first


def judge_gate_state(log: Log) -> Judged:
    """The finding in it, if there is one; a text that is cut off says nothing."""
    try:
        found = json.loads("\n".join(line.text for line in log.lines))
    except (ValueError, RecursionError):
        found = {}
    engine = found.get("engine") if isinstance(found, dict) else None
    facts = {"is": "gate state", "ready": found.get("ready") if isinstance(found, dict) else None}
    return Judged(log.source, _findings(log, engine) if isinstance(engine, dict) else (), facts)


def _findings(log: Log, engine: Mapping[str, object]) -> tuple[Finding, ...]:
    if engine.get("is_wedged") is not True:
        return ()
    age, longest = engine.get("last_step_age_s"), engine.get("longest_step_s")
    since = f"no step for {age:.0f} s" if isinstance(age, int | float) else "no step"
    before = f"; the longest before took {longest:.2f} s" if isinstance(longest, int | float) else ""
    place = next((n for n, line in enumerate(log.lines) if '"is_wedged"' in line.text), 0)
    evidence = Evidence(log.source, log.lines[place].text.strip(), log.lines[place].number)
    return (
        Finding(
            Code.ENGINE_WEDGED, Severity.CRITICAL, 0.95, "the engine has work and makes no step",
            f"{since} with requests there{before}; and the gate's own request of one token got no answer",
            (evidence,), wedge_remedies(), ("a larger KV cache or other memory flags: nothing here speaks of memory",),
        ),
    )  # fmt: skip

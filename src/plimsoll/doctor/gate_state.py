"""What a gate said of its engine (`/plimsoll/state`, or `state.json` in guard's evidence): it alone has proof of a wedge.

It also counts the steps that ran out of memory and were contained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from plimsoll.doctor.contained_state import finding_of_state
from plimsoll.doctor.diagnose import Judged
from plimsoll.doctor.metrics_remedies import wedge_remedies
from plimsoll.domain.finding import Code, Evidence, Finding, Severity
from plimsoll.domain.log import Log
from plimsoll.domain.survive import read_survival

SCHEMA = "plimsoll.state/1"
LONGEST = 320  # letters of a line that are shown
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
    found = found if isinstance(found, dict) else {}
    engine = found.get("engine")
    findings = _findings(log, engine) if isinstance(engine, dict) else ()
    return Judged(log.source, (*findings, *_contained(log, found)), {"is": "gate state", "ready": found.get("ready")})


def _contained(log: Log, found: Mapping[str, object]) -> Iterator[Finding]:
    survival = read_survival(found.get("survive"))
    if survival is not None:
        finding = finding_of_state(survival, (_line(log, '"contained"'),))
        yield from () if finding is None else (finding,)


def _line(log: Log, name: str) -> Evidence:
    place = next((n for n, line in enumerate(log.lines) if name in line.text), 0)
    text = log.lines[place].text.strip()
    at = max(0, text.find(name) - 40) if len(text) > LONGEST else 0  # a state on one line is long
    return Evidence(log.source, text[at : at + LONGEST], log.lines[place].number)


def _findings(log: Log, engine: Mapping[str, object]) -> tuple[Finding, ...]:
    if engine.get("is_wedged") is not True:
        return ()
    age, longest = engine.get("last_step_age_s"), engine.get("longest_step_s")
    since = f"no step for {age:.0f} s" if isinstance(age, int | float) else "no step"
    before = f"; the longest before took {longest:.2f} s" if isinstance(longest, int | float) else ""
    evidence = _line(log, '"is_wedged"')
    return (
        Finding(
            Code.ENGINE_WEDGED, Severity.CRITICAL, 0.95, "the engine has work and makes no step",
            f"{since} with requests there{before}; and the gate's own request of one token got no answer",
            (evidence,), wedge_remedies(), ("a larger KV cache or other memory flags: nothing here speaks of memory",),
        ),
    )  # fmt: skip

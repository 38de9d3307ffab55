"""The report of `plimsoll doctor`: the cause first, its evidence, the remedies, and what does not help."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from plimsoll.doctor.rules.diagnose import Diagnosis
from plimsoll.findings import Finding, Severity
from plimsoll.redaction import clean, plain
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, NAME, SEVERITY, WARN, Line, Report
from plimsoll.units import format_gib

SCHEMA = "plimsoll.doctor/1"
MOST_TEXT_FINDINGS = 5
LONGEST_VALUE = 100
_UNKNOWN = "memory failure: unknown"
# The headline claims no more than the first finding: sure, likely, or only possible.
_HEADS = (
    (0.85, {True: "memory failure: yes", False: "memory failure: no", None: _UNKNOWN}),
    (0.5, {True: "memory failure: probably", False: "memory failure: probably not", None: _UNKNOWN}),
    (0.0, {True: "memory failure: perhaps", False: "memory failure: perhaps not", None: _UNKNOWN}),
)
_TERMS = (("weights", "weights_bytes"), ("non-torch", "non_torch_bytes"), ("activation", "activation_bytes"),
          ("graphs", "graphs_actual_bytes"), ("KV cache", "kv_bytes"))  # fmt: skip


def as_json(diagnosis: Diagnosis) -> str:
    """One object of the schema plimsoll.doctor/1; its JSON schema is shipped beside this module."""
    return json.dumps(body(diagnosis), indent=2, ensure_ascii=False)


def body(diagnosis: Diagnosis) -> dict[str, object]:
    """The same as plain data."""
    return {
        "schema": SCHEMA,
        "memory_failure": diagnosis.memory_failure,
        "findings": plain(diagnosis.findings),
        "facts": plain(diagnosis.facts),
        "collect_next": plain(diagnosis.collect_next),
        "look_next": clean(diagnosis.look_next) or None,
    }


def finding_json(finding: Finding) -> dict[str, object]:
    """One finding as the contract has it."""
    return {name: plain(value) for name, value in finding._asdict().items()}


def as_text(diagnosis: Diagnosis) -> Report:
    """For a terminal."""
    style = {True: BAD, False: GOOD, None: WARN}[diagnosis.memory_failure]
    sure = diagnosis.findings[0].confidence if diagnosis.findings else 1.0
    head = next(heads for least, heads in _HEADS if sure >= least)[diagnosis.memory_failure]
    report = Report([Line(head + _about(diagnosis.facts), 2, style, len(head)), ""])
    inputs = _rows(diagnosis.facts.get("inputs"))
    if not diagnosis.findings:
        report += ["Nothing wrong was found." if diagnosis.memory_failure is False else "No failure was recognised.", ""]
    for number, finding in enumerate(diagnosis.findings[:MOST_TEXT_FINDINGS], 1):
        report += [*_finding(number, finding, is_whole=number == 1, with_path=len(inputs) > 1), ""]
    if len(diagnosis.findings) > MOST_TEXT_FINDINGS:
        report += [f"and {len(diagnosis.findings) - MOST_TEXT_FINDINGS} more: --json has them all", ""]
    report += [*_facts(diagnosis.facts), *_figures(diagnosis.facts)]
    report += [
        Line(f"Read {clean(str(row.get('source')))} ({row.get('is')}): {clean(str(row.get('says')))}")
        for row in (inputs[:12] if len(inputs) > 1 else ())
    ]
    for kind, word in (("remarks", "Remark"), ("notes", "Note")):
        notes = diagnosis.facts.get(kind)
        report += [Line(f"{word}: {clean(str(note))}") for note in notes[:6]] if isinstance(notes, list) else []
    report.append("")
    if diagnosis.collect_next:
        report += [
            Line("To settle it, collect:", 2, BOLD),
            *(Line(f"  - {clean(ask)}", 4) for ask in diagnosis.collect_next),
            "",
        ]
    if diagnosis.look_next:
        report += [Line(f"look next: {clean(diagnosis.look_next)}", 11, BOLD, 10), ""]
    return report


def _about(facts: Mapping[str, object]) -> str:
    said = [f"vLLM {facts['vllm']}"] if facts.get("vllm") else []
    said += [clean(str(facts["model"]))] if facts.get("model") else []
    gpu = facts.get("gpu")
    if isinstance(gpu, Mapping):
        total = gpu.get("total_bytes")
        named = [str(gpu["name"])] if gpu.get("name") else []
        named += [format_gib(total)] if isinstance(total, int) else []
        said += [" ".join(named)] if named else []
    return f"   ({', '.join(said)})" if said else ""


def _finding(number: int, finding: Finding, *, is_whole: bool, with_path: bool) -> Iterator[Line]:
    head = f"{number}. {finding.code}"
    said = f"{head} ({finding.severity}, {finding.confidence:.0%} sure): {clean(finding.title)}"
    yield Line(said, 3, SEVERITY[finding.severity], len(head))
    parts = [("why", [clean(finding.because)], "")]
    remedies = []
    for remedy in finding.remedy[: 6 if is_whole else 2]:
        do, value = clean(remedy.do), f" {clean(remedy.value)}" if remedy.value else ""
        flag = "" if remedy.flag is None or remedy.flag in do else f" ({remedy.flag}{value})"
        remedies.append(f"{do}{flag}: {clean(remedy.why)}")
    parts.append(("do", remedies, GOOD))
    parts.append(("no use", [clean(useless) for useless in finding.not_a_remedy] if is_whole else [], FAINT))
    for label, texts, style in parts:
        for place, text in enumerate(texts):
            yield Line(f"   {label if place == 0 else '':10}{text}", 13, style, 13)
    for place, one in enumerate(finding.evidence[: 4 if is_whole else 1]):
        where = (clean(one.source) if with_path else clean(one.source.rpartition("/")[2])) or clean(one.source)
        line = f", line {one.line}" if one.line is not None else ""
        yield Line(f"   {'evidence' if place == 0 else '':10}{where}{line}", 13, NAME)
        yield Line(f"{'':13}{clean(one.text)}", 15)
    if finding.severity is not Severity.INFO:
        yield Line(f"   {'read on':10}plimsoll doctor --explain {finding.code}", 13, FAINT)


def _facts(facts: Mapping[str, object]) -> Iterator[Line]:
    memory = facts.get("memory")
    if isinstance(memory, Mapping):
        terms = [f"{name} {format_gib(memory[field])}" for name, field in _TERMS if isinstance(memory.get(field), int)]
        if terms:
            yield Line(f"The start's own figures: {', '.join(terms)}")
    plan = facts.get("plan")
    if isinstance(plan, Mapping):
        pairs = (("weights", "weights_bytes"), ("KV cache", "kv_bytes"), ("slack", "slack_bytes"))
        terms = [f"{name} {format_gib(plan[field])}" for name, field in pairs if isinstance(plan.get(field), int)]
        yield Line(f"plan computes for this command: {', '.join(terms)}")
    yield from _story(facts)
    flags = facts.get("flags")
    if isinstance(flags, Mapping) and flags:
        # Long values are cut: a whole compilation_config is for --json.
        texts = {name: str(value) for name, value in list(flags.items())[:16] if name != "model_tag"}
        short = {name: text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..." for name, text in texts.items()}
        yield Line(f"Started with: {clean(', '.join(f'{name}={text}' for name, text in short.items()))}")
    harmless = facts.get("harmless")
    if isinstance(harmless, Sequence) and harmless and not isinstance(harmless, str):
        yield Line(f"Harmless, whatever it says: {clean(str(harmless[0]))[:160]}")


def _story(facts: Mapping[str, object]) -> Iterator[Line]:
    """Yields the process that failed first, the outcome of each run in the file, and the releases it can be."""
    if isinstance(first := facts.get("failed_first"), Mapping):
        after = first.get("after_it")
        others = [clean(str(name)) for name in after[:6]] if isinstance(after, list) else []
        then = f"; after it {', '.join(others)}" if others else ""
        yield Line(f"Failed first: {first.get('is')}, {clean(str(first.get('process')))}, line {first.get('line')}{then}")
    for row in _rows(facts.get("runs")):
        memory = {True: "memory", False: "not memory", None: "memory unknown"}[row.get("memory_failure")]  # type: ignore[index]
        sure = f", {row['confidence']:.0%} sure" if isinstance(row.get("confidence"), float) else ""
        what = f"{row['code']} ({memory}{sure})" if row.get("code") else "no failure in it"
        yield Line(f"Run {row.get('run')}, lines {row.get('first_line')} to {row.get('last_line')}: {what}")
    releases = facts.get("releases")
    if isinstance(releases, list) and len(releases) == 2:
        span = releases[0] if releases[0] == releases[1] else f"{releases[0]} to {releases[1]}"
        yield Line(f"No version is printed; the records stand where vLLM {span} has them")


def _rows(value: object) -> list[Mapping[str, object]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []


def _figures(facts: Mapping[str, object]) -> Iterator[Line]:
    """Figures of metrics pages and snapshots, also where there is no failure."""
    for row in _rows(facts.get("metrics")):
        for engine in _rows(row.get("engines"))[:4]:
            figures = engine.get("figures")
            if isinstance(figures, Mapping):
                names = [name for name in ("running", "waiting", "preemptions") if _is_number(figures.get(name))]
                shown = [f"{name} {figures[name]:.0f}" for name in names]
                usage = figures.get("kv_cache_usage")
                shown += [f"KV cache {usage:.0%} full"] if isinstance(usage, float) else []
                yield Line(f"The page shows: {', '.join(shown)}")
    for row in _rows(facts.get("range")):
        if _is_number(row.get("seconds")):
            minutes = f"{float(str(row['seconds'])) / 60:,.0f} min"
            yield Line(f"Looked at: {row.get('series')} series of at most {row.get('points')} points over {minutes}")
    for row in _rows(facts.get("snapshot")):
        for device in _rows(row.get("devices"))[:4]:
            sizes = [f"{name} {format_gib(size)}" for name in ("reserved", "allocated", "pinned", "releasable")
                     if isinstance(size := device.get(name), int)]  # fmt: skip
            yield Line(f"The snapshot's device {device.get('device')}: {', '.join(sizes)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value

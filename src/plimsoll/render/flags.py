"""The report of `plimsoll flags`, in words and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from plimsoll.launch.check_flags import FlagReport, FlagStatus, Item
from plimsoll.launch.command_line import UnresolvedWords
from plimsoll.redaction import REDACTED, one_line, redact_value, redact_words
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, NAME, WARN, Line, Report, Whole
from plimsoll.vllm.flags import bears_on

_NAMES = 17  # the width of the first column
# Bad news first; flags that are fine go into one line at the end.
_ORDER = (
    FlagStatus.REMOVED, FlagStatus.NEVER_EXISTED, FlagStatus.REFUSED, FlagStatus.NO_EFFECT, FlagStatus.DEPRECATED,
    FlagStatus.REDUNDANT, FlagStatus.UNKNOWN, FlagStatus.DEFAULT_CHANGED,
)  # fmt: skip


def as_json(results: Sequence[FlagReport]) -> str:
    """One object; `items` and `rewritten` cover every command, `commands` has them apart."""
    body = flags_json(results) | {"vllm_because": one_line(results[0].engine.because) or "asked for"}
    return json.dumps(body, indent=2, ensure_ascii=False)


def flags_json(results: Sequence[FlagReport]) -> dict[str, object]:
    """The same as plain data, for a plan to carry."""
    first = results[0]
    commands = [
        {
            "source": one_line(result.launch.source),
            "entry": result.launch.entry.value,
            "model": one_line(result.model) if result.model is not None else None,
            "starts": result.starts,
            "items": [_item_json(item) for item in result.items],
            "rewritten": rewritten_line(result),
            "notes": [one_line(note) for note in result.notes],
        }
        for result in results
    ]
    body: dict[str, object] = {
        "schema": "plimsoll.flags/1",
        "vllm": first.engine.release,
        "vllm_asked": first.engine.asked,
        "starts": all(result.starts for result in results),
        "items": [_item_json(item) for result in results for item in result.items],
        "rewritten": "\n".join(rewritten_line(result) for result in results),
        "notes": list(dict.fromkeys(one_line(note) for result in results for note in result.notes)),
        "commands": commands,
    }
    if first.came_from is not None:
        body["from"] = first.came_from.release
        body["changes"] = [{"since": change.since, "what": change.change} for change in first.changes]
    return body


def _item_json(item: Item) -> dict[str, object]:
    return {
        "name": one_line(item.name),
        "status": item.status.value,
        "since": item.since,
        "instead": item.instead,
        "note": one_line(item.note) if item.note else None,
        "value": " ".join(_shown_values(item)) or None,
    }


def as_text(results: Sequence[FlagReport]) -> Report:
    """One section a command; services that run the same command share one."""
    report = Report()
    sections: dict[object, list[FlagReport]] = {}
    for result in results:
        facts = (result.engine, result.items, result.rewritten, result.rewritten_environment, result.notes)
        sections.setdefault(facts, []).append(result)
    for first, *others in sections.values():
        sources = "; ".join(one_line(result.launch.source) for result in (first, *others))
        report += ["", *_section(first, sources)] if report else _section(first, sources)
    return report


def _section(result: FlagReport, sources: str) -> Report:
    style = BAD if not result.starts else WARN if any(item.status.is_problem for item in result.items) else GOOD
    because = f" ({one_line(result.engine.because)})" if result.engine.because else ""
    headline = Line(f"vLLM {result.engine.release}{because}: {_verdict(result)}", 2, style)
    report = Report([headline, f"  {sources}", ""])
    report += [line for status in _ORDER for item in result.items if item.status is status for line in _item_lines(item)]
    fine = [one_line(item.name) for item in result.items if item.status is FlagStatus.OK]
    report += [_labelled("ok", ", ".join(fine), GOOD)] if fine else []
    report += [_labelled("note", one_line(note), FAINT) for note in result.notes]
    if hidden := [name for name, _ in result.rewritten_environment if not bears_on(name)]:
        report.append(_labelled("note", f"not shown, as they do not bear on vLLM: {', '.join(map(one_line, hidden))}", FAINT))
    if result.came_from is not None and result.changes:
        report += ["", f"From {result.came_from.release} to {result.engine.release} vLLM also changed:", ""]
        report += [_labelled(change.since, change.change, NAME) for change in result.changes]
    command = _command_lines(result)
    report += ["", Line(f"Rewritten for {result.engine.release}:", 2, BOLD), "", *map(Whole, command)]
    return Report([*report, *put_back(" ".join(command))])


def _labelled(label: str, text: str, style: str = "") -> Line:
    return Line(f"  {label:<{_NAMES}}{text}", _NAMES + 2, style, _NAMES + 2)


def put_back(command: str) -> list[str]:
    """Returns a note on the secrets that a shown command hides; empty where it hides none."""
    if REDACTED not in command:
        return []
    return ["", f"Secrets are not shown: where it says {REDACTED}, put yours back before you run it."]


def _verdict(result: FlagReport) -> str:
    refused = sum(item.status.is_refused for item in result.items)
    idle = sum(item.status is FlagStatus.NO_EFFECT for item in result.items)
    parts = []
    if refused:
        parts.append(f"refuses to start with this command, for {refused} {'reason' if refused == 1 else 'reasons'}")
    elif result.engine.is_exact:
        parts.append("takes this command")
    else:
        parts.append("would take this command")
    if idle:
        parts.append(f"{idle} {'setting has' if idle == 1 else 'settings have'} no effect")
    return "; ".join(parts)


def _item_lines(item: Item) -> list[Line]:
    values = " ".join(_shown_values(item))
    named = f"{item.name}={values}" if _is_variable(item) else f"{one_line(item.name)} {values}".rstrip()
    since = f"since {item.since}" if item.since else ""
    why = ": ".join(part for part in (since, one_line(item.note) if item.note else "") if part)
    if item.status is FlagStatus.DEFAULT_CHANGED:
        why = f"{item.note} ({since})" if since else f"{item.note}"
    more = [why, f"instead: {item.instead}" if item.instead else ""]
    style = BAD if item.status.is_refused else WARN if item.status is not FlagStatus.DEFAULT_CHANGED else NAME
    return [_labelled(item.status.value, named, style), *(_labelled("", text) for text in more if text)]


def _is_variable(item: Item) -> bool:
    return bool(item.values) and not item.name.startswith("-")


def _shown_values(item: Item) -> list[str]:
    if _is_variable(item):
        return [one_line(redact_value(item.name, value)) for value in item.values]
    # An unknown flag may be a mistyped one that takes a secret.
    meant = item.instead.split(",")[0] if item.instead and item.instead.endswith("if that was meant") else item.name
    shown = [one_line(word) for word in redact_words([meant, *item.values])[1:]]
    return [word if len(word) <= 80 else word[:77] + "..." for word in shown]


def rewritten_line(result: FlagReport) -> str:
    """The rewritten command on one line, secrets hidden, ready for a shell."""
    return " ".join([*_assignments(result), *(_quoted(word, result.unseen) for word in redact_words(list(result.rewritten)))])


def _assignments(result: FlagReport) -> list[str]:
    pairs = result.rewritten_environment
    return [f"{name}={_quoted(redact_value(name, value), result.unseen, is_value=True)}" for name, value in pairs]


def _command_lines(result: FlagReport) -> list[str]:
    """The rewritten command with one flag a line."""
    groups: list[list[str]] = [[]]
    for word in redact_words(list(result.rewritten)):
        if re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(_quoted(word, result.unseen))
    head = [line for line in _assignments(result) if bears_on(line.partition("=")[0])]
    lines = [*head, *(" ".join(group) for group in groups if group)]
    return [
        ("  " if number <= len(head) else "    ") + line + (" \\" if number < len(lines) - 1 else "")
        for number, line in enumerate(lines)
    ]


def _quoted(word: str, unseen: UnresolvedWords, *, is_value: bool = False) -> str:
    """One shell word; a variable that we could not resolve stays one, and so does a home folder."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\-]+|~(/[A-Za-z0-9_@%+=:,./\-]*)?", word):
        return word
    if word in unseen:
        if unseen.is_whole(word) and not is_value:
            return word  # unquoted, as it was: it may hold several words, or none
        return '"' + re.sub(r'(["\\`])', r"\\\1", word) + '"'
    if not word.isprintable():
        escapes = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
        letters = (escapes.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in word)
        return "$'" + "".join(letters) + "'"
    return "'" + word.replace("'", "'\"'\"'") + "'"

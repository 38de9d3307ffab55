"""What `plimsoll flags` found, in words and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence

from plimsoll.domain.redaction import redact, redact_value, redact_words
from plimsoll.engine.check import Checked, Item, Status

WIDTH = 110
_NAMES = 17  # the width of the first column
_INDENT = " " * (_NAMES + 2)
# Bad news first; what is fine goes into one line at the end.
_ORDER = (
    Status.REMOVED, Status.NEVER_EXISTED, Status.BAD_VALUE, Status.NO_EFFECT, Status.DEPRECATED, Status.REDUNDANT,
    Status.UNKNOWN, Status.DEFAULT_CHANGED,
)  # fmt: skip


def as_json(results: Sequence[Checked]) -> str:
    """One object; `items` and `rewritten` cover every command, `commands` has them apart."""
    import json

    first = results[0]
    commands = [
        {
            "source": result.launch.source,
            "entry": result.launch.entry.value,
            "model": result.model,
            "starts": result.starts,
            "items": [_item_json(item) for item in result.items],
            "rewritten": rewritten_line(result),
            "notes": [redact(note) for note in result.notes],
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
        "notes": list(dict.fromkeys(redact(note) for result in results for note in result.notes)),
        "commands": commands,
    }
    if first.came_from is not None:
        body["from"] = first.came_from.release
        body["changes"] = [{"since": change.since, "what": change.what} for change in first.changes]
    return json.dumps(body, indent=2, ensure_ascii=False)


def _item_json(item: Item) -> dict[str, object]:
    return {
        "name": item.name,
        "status": item.status.value,
        "since": item.since,
        "instead": item.instead,
        "note": redact(item.note) if item.note else None,
        "value": " ".join(_shown_values(item)) or None,
    }


def as_text(results: Sequence[Checked]) -> str:
    """One section a command."""
    return "\n\n".join(_section(result) for result in results)


def _section(result: Checked) -> str:
    lines = [f"vLLM {result.engine.release}: {_verdict(result)}", f"  {result.launch.source}", ""]
    for status in _ORDER:
        for item in result.items:
            if item.status is status:
                lines += _item_lines(item)
    fine = [item.name for item in result.items if item.status is Status.OK]
    if fine:
        lines += _wrapped(f"  {'ok':<{_NAMES}}{', '.join(fine)}", _INDENT)
    for note in result.notes:
        lines += _wrapped(f"  {'note':<{_NAMES}}{redact(note)}", _INDENT)
    lines += _changes(result)
    lines += ["", f"Rewritten for {result.engine.release}:", "", *_command_lines(result)]
    return "\n".join(lines)


def _verdict(result: Checked) -> str:
    refused = sum(item.status.is_refused for item in result.items)
    idle = sum(item.status is Status.NO_EFFECT for item in result.items)
    parts = []
    if refused:
        parts.append(f"refuses to start with this command ({refused} {'flag' if refused == 1 else 'flags'} it does not take)")
    elif result.engine.is_exact:
        parts.append("takes this command")
    else:
        parts.append("would take this command")
    if idle:
        parts.append(f"{idle} {'setting has' if idle == 1 else 'settings have'} no effect")
    return "; ".join(parts)


def _item_lines(item: Item) -> list[str]:
    named = " ".join([item.name, *_shown_values(item)]) if not item.name.isupper() else _assignment(item)
    lines = _wrapped(f"  {item.status.value:<{_NAMES}}{named}", _INDENT)
    since = f"since {item.since}" if item.since else ""
    why = ": ".join(part for part in (since, redact(item.note) if item.note else "") if part)
    if item.status is Status.DEFAULT_CHANGED:
        why = f"{item.note} ({since})" if since else f"{item.note}"
    if why:
        lines += _wrapped(f"{_INDENT}{why}", _INDENT)
    if item.instead:
        lines += _wrapped(f"{_INDENT}instead: {item.instead}", _INDENT)
    return lines


def _assignment(item: Item) -> str:
    return f"{item.name}={' '.join(_shown_values(item))}"


def _shown_values(item: Item) -> list[str]:
    if item.name.startswith("-"):
        return [word if len(word) <= 80 else word[:77] + "..." for word in redact_words([item.name, *item.values])[1:]]
    return [redact_value(item.name, value) for value in item.values]


def _changes(result: Checked) -> list[str]:
    if result.came_from is None or not result.changes:
        return []
    lines = ["", f"From {result.came_from.release} to {result.engine.release} vLLM also changed:", ""]
    for change in result.changes:
        lines += _wrapped(f"  {change.since:<{_NAMES}}{change.what}", _INDENT)
    return lines


def rewritten_line(result: Checked) -> str:
    """The rewritten command on one line, secrets hidden, ready for a shell."""
    pairs = [f"{name}={_quoted(redact_value(name, value))}" for name, value in result.rewritten_environment]
    return " ".join([*pairs, *map(_quoted, redact_words(list(result.rewritten)))])


def _command_lines(result: Checked) -> list[str]:
    """The rewritten command with one flag a line."""
    words = redact_words(list(result.rewritten))
    groups: list[list[str]] = [[]]
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(_quoted(word))
    head = [f"{name}={_quoted(redact_value(name, value))}" for name, value in result.rewritten_environment]
    lines = [*head, *(" ".join(group) for group in groups if group)]
    return [
        ("  " if number <= len(head) else "    ") + line + (" \\" if number < len(lines) - 1 else "")
        for number, line in enumerate(lines)
    ]


def _quoted(word: str) -> str:
    """One shell word; a variable we could not see stays a variable."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\-\[\]]+", word) and not word.startswith("["):
        return word
    if "$" in word:
        escaped = re.sub(r'(["\\`])', r"\\\1", word)
        return f'"{escaped}"'
    return "'" + word.replace("'", "'\"'\"'") + "'"


def _wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most WIDTH, broken at blanks; a word longer than that keeps its line."""
    lines: list[str] = []
    current = ""
    for blank, word in re.findall(r"(\s*)(\S+)", text):
        if current.strip() and len(current) + len(blank) + len(word) > WIDTH:
            lines.append(current)
            current = indent + word
        else:
            current += blank + word
    return [*lines, current]

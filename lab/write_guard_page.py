"""Writes the tables of docs/guard.md, docs/guard-acts.md and docs/guard-config.md from what guard itself goes by.

python -m lab.write_guard_page            write them
python -m lab.write_guard_page --check    exit 1 if they are not what guard reads by now
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from lab.marked import placed
from plimsoll.guard.act.steps import STEP_TEXTS, TRIES
from plimsoll.guard.config import GuardConfig
from plimsoll.guard.config_fields import Key, declared
from plimsoll.guard.judge.policy import GRADES, THRESHOLDS, Threshold
from plimsoll.guard.judge.tracker import Grade
from plimsoll.units import GIB, MIB

DOCS = Path(__file__).parents[1] / "docs"
PAGE, ACTS_PAGE, CONFIG_PAGE = DOCS / "guard.md", DOCS / "guard-acts.md", DOCS / "guard-config.md"
BEGIN, END = "<!-- numbers: made by `python -m lab.write_guard_page` -->", "<!-- end of numbers -->"
STEPS_BEGIN, STEPS_END = "<!-- steps: made by `python -m lab.write_guard_page` -->", "<!-- end of steps -->"
KEYS_BEGIN, KEYS_END = "<!-- keys: made by `python -m lab.write_guard_page` -->", "<!-- end of keys -->"
TAKES = {
    "time": "a time", "count": "a whole number", "share": "a share", "switch": "true or false", "text": "a text",
    "texts": "a text, or a list", "words": "a command as a list", "path": "a path", "url": "an address", "table": "a table",
    "one of": "a word", "canary": "a time", "files": "a text, or a list", "gate": "an address", "labels": "a table",
    "plan": "a path", "secret": "a path", "socket": "a path", "timezone": "a text", "urls": "a text, or a list",
}  # fmt: skip


def all_keys(table: type, path: str = "") -> list[Key]:
    """Returns every key of a table and of the tables in it, in the order of the documentation."""
    fields = declared(table)
    keys = {(path, key.name): replace(key, table=path) for _, key in fields} if path else {}
    for _, key in fields:
        for inner in key.classes:
            for each in all_keys(inner, f"{path}.{key.name}" if path else key.name):
                keys.setdefault((each.table, each.name), each)
    return list(keys.values())


KEYS = all_keys(GuardConfig)


def numbers() -> str:
    """Every number that a policy can set."""
    rows = ["| condition | number | default | may be | |", "|---|---|---|---|---|"]
    for knob in THRESHOLDS:
        grade = GRADES.get(knob.kind, Grade.ADVICE)
        name = f"`{knob.kind}` ({grade})" if knob.name == "for" else ""
        bounds = f"{_shown(knob, knob.low)} to {_shown(knob, knob.high)}"
        rows.append(f"| {name} | `{knob.name}` | {_shown(knob, knob.default)} | {bounds} | {knob.says} |")
    return "\n".join(rows)


def steps() -> str:
    """Every step of an action, what is checked around it, and how often it is tried."""
    rows = ["| step | does | before | after | undo | tried |", "|---|---|---|---|---|---|"]
    for step, text in STEP_TEXTS.items():
        rows.append(f"| `{step}` | {text.does} | {text.before} | {text.after} | {text.undo} | {TRIES.get(step, 1)} |")
    return "\n".join(rows)


def keys() -> str:
    """Every key of the configuration."""
    rows, last = ["| table | key | takes | default | may be | |", "|---|---|---|---|---|---|"], ""
    for key in KEYS:
        # A table inside an [[engine]] is written the same way: [engine.balancer], or on one line.
        name = f"`[[{key.table}]]`" if key.table == "engine" else f"`[{key.table}]`"
        shown, last = ("" if key.table == last else name), key.table
        bounds = f"{_set(key, key.low)} to {_set(key, key.high)}" if key.high else ", ".join(key.choices)
        default = _set(key, key.shown_default or key.default)
        rows.append(f"| {shown} | `{key.name}` | {TAKES[key.kind]} | {default} | {bounds} | {key.text} |")
    return "\n".join(rows)


def _set(key: Key, value: object) -> str:
    if value in (None, "", (), {}):
        return ""
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        if key.kind in ("time", "canary"):
            return _time(value)
        return f"{100 * value:g}%" if key.kind == "share" else f"{value:,.0f}"
    return f"`{value}`" if key.kind in ("text", "path", "socket", "timezone") else str(value)


def _time(value: float) -> str:
    for size, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "m")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}s"


def _shown(knob: Threshold, value: float) -> str:
    if knob.unit == "s":
        return _time(value)
    if knob.unit == "bytes":
        return f"{value / GIB:g}GiB" if value >= GIB and value % GIB == 0 else f"{value / MIB:.0f}MiB"
    return f"{100 * value:g}%" if knob.unit == "share" else f"{value:,.0f}"


def page(text: str) -> str:
    """The page with its table made anew; the rest is as it was."""
    return placed(text, BEGIN, END, f"\n{numbers()}\n", PAGE)


def acts_page(text: str) -> str:
    """The same of the page on actions."""
    return placed(text, STEPS_BEGIN, STEPS_END, f"\n{steps()}\n", ACTS_PAGE)


def config_page(text: str) -> str:
    """The same of the page on the configuration."""
    return placed(text, KEYS_BEGIN, KEYS_END, f"\n{keys()}\n", CONFIG_PAGE)


def main(words: list[str]) -> int:
    """Write the pages, or say whether they are as they should be."""
    code = 0
    for path, made in ((PAGE, page), (ACTS_PAGE, acts_page), (CONFIG_PAGE, config_page)):
        text = path.read_text(encoding="utf-8")
        is_same = made(text) == text
        if "--check" not in words:
            path.write_text(made(text), encoding="utf-8")
            print(f"wrote {path.name}")
        elif not is_same:
            print(f"{path.name} is not what guard goes by: python -m lab.write_guard_page")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

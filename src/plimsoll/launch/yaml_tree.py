"""Reads YAML into dicts, lists and strings, every scalar as it was written.

Not `safe_load`, because it would read `--max-model-len 1_000` as 1000 and `0.90` as 0.9, and because here an alias is a
second reference to the same object: a "billion laughs" file costs no more than its text.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from plimsoll.errors import BadInput, TooLarge

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | bool | None"

_DEPTH_MAX = 100
_NODES_MAX = 200_000
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})
_FALSE = frozenset({"no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})


def documents_in(text: str, name: str, *, booleans: bool = False) -> list[Tree]:
    """Every document of a YAML (or JSON) stream; BadInput with the line where it is not YAML.

    With `booleans`, a plain yes or no is read as one; otherwise it stays text like every other scalar.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(name, booleans=booleans)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise BadInput(f"{name}{where}: not valid YAML: {problem}{_hint(text)}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    return builder.documents


def _hint(text: str) -> str:
    return "; it looks like a template: render it first" if "{{" in text or "{%" in text else ""


class _Builder:
    """Puts the parser's events together, without recursion."""

    def __init__(self, name: str, *, booleans: bool) -> None:
        self._booleans = booleans
        self.documents: list[Tree] = []
        self._name = name
        self._nodes = 0
        self._anchors: dict[str, Tree] = {}
        # What is open: the collection, the key that waits for its value, its anchor.
        self._open: list[tuple[dict[str, Tree] | list[Tree], list[str], str | None]] = []

    def take(self, event: Any) -> None:
        kind = type(event).__name__
        line = event.start_mark.line + 1 if event.start_mark else 0
        if kind == "ScalarEvent":
            self._place(self._scalar(event), event.anchor, line)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            if len(self._open) >= _DEPTH_MAX:
                raise BadInput(f"{self._name}, line {line}: nested deeper than {_DEPTH_MAX} levels")
            self._open.append(({} if kind == "MappingStartEvent" else [], [], event.anchor))
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            collection, _, anchor = self._open.pop()
            self._place(collection, anchor, line)
        elif kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise BadInput(f"{self._name}, line {line}: *{event.anchor} is not defined above it")
            self._place(self._anchors[event.anchor], None, line)
        elif kind == "DocumentStartEvent":
            self._anchors = {}

    def _scalar(self, event: Any) -> Tree:
        text: str = event.value
        if not event.implicit[0]:  # quoted, or with a tag
            return text
        if text in _NULLS:
            return None
        # A key is text whatever it looks like.
        is_key = bool(self._open) and isinstance(self._open[-1][0], dict) and not self._open[-1][1]
        if self._booleans and not is_key and text in _TRUE | _FALSE:
            return text in _TRUE
        return text

    def _place(self, value: Tree, anchor: str | None, line: int) -> None:
        self._spend(1, line)
        if anchor is not None:
            self._anchors[anchor] = value
        if not self._open:
            self.documents.append(value)
            return
        collection, key, _ = self._open[-1]
        if isinstance(collection, list):
            collection.append(value)
        elif key:
            self._pair(collection, key.pop(), value, line)
        elif isinstance(value, str) or value is None:
            key.append(value or "null")
        else:
            hint = "; it looks like a template: render it first" if isinstance(value, dict) else ""
            raise BadInput(f"{self._name}, line {line}: a key must be plain text{hint}")

    def _pair(self, mapping: dict[str, Tree], key: str, value: Tree, line: int) -> None:
        if key != "<<":
            mapping[key] = value
            return
        for merged in value if isinstance(value, list) else [value]:
            if not isinstance(merged, dict):
                raise BadInput(f"{self._name}, line {line}: << merges mappings only")
            self._spend(len(merged), line)
            for name, inherited in merged.items():
                mapping.setdefault(name, inherited)

    def _spend(self, nodes: int, line: int) -> None:
        self._nodes += nodes
        if self._nodes > _NODES_MAX:
            raise TooLarge(f"{self._name}, line {line}: more than {_NODES_MAX:,} values")

"""Renders `templates/` and the texts of alerts.yaml and dashboards.yaml, and quotes a text for each kind of file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from plimsoll.assets.names import span

_YAML_WORDS = frozenset("y n yes no on off true false null".split())


def render(template: str, **context: object) -> str:
    """Renders a template, which is named without its `.j2`."""
    return _environment().get_template(f"{template}.j2").render(context)


@cache
def _environment() -> Environment:
    environment = Environment(  # noqa: S701  no HTML: each text is quoted by the filter of its kind of file
        loader=PackageLoader("plimsoll.assets"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "shell": in_shell, "yaml": in_yaml, "quoted": quoted, "flag_lines": flag_lines, "span": span,
        # In a unit of systemd a percent sign begins a specifier and a backslash an escape.
        "unit": lambda text: text.replace("\\", "/").replace("%", "%%"),
        "compose": lambda text: text.replace("$", "$$"),  # in Compose `$$` is a plain dollar sign
        # In a pod's command or environment `$(NAME)` would be replaced, and `$$` is one dollar sign.
        "pod": lambda text: text.replace("$", "$$") if "$(" in text or "$$" in text else text,
    }  # fmt: skip
    return environment


@cache
def read_data(name: str) -> Any:
    """Reads alerts.yaml or dashboards.yaml, every scalar as text."""
    text = files("plimsoll.assets").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # noqa: S506  it makes nothing but texts


def fill(value: Any, context: Mapping[str, object]) -> Any:
    """Returns the same data with its texts rendered; drops list items whose `when` is false."""
    if isinstance(value, str):
        return _text(value).render(context) if "<<" in value or "<%" in value else value
    if isinstance(value, dict):
        return {key: fill(inner, context) for key, inner in value.items() if key != "when"}
    return [fill(inner, context) for inner in value if "when" not in inner or _condition(inner["when"])(**context)]


@cache
def _texts() -> Environment:
    """`<< >>` and `<% %>` are ours, `{{ }}` is Prometheus's and Grafana's; floats are written short."""
    return Environment(  # noqa: S701  no HTML
        undefined=StrictUndefined, variable_start_string="<<", variable_end_string=">>", block_start_string="<%",
        block_end_string="%>", trim_blocks=True, finalize=lambda value: f"{value:g}" if isinstance(value, float) else value,
    )  # fmt: skip


@cache
def _text(text: str) -> Template:
    return _texts().from_string(text)


@cache
def _condition(text: str) -> Any:
    return _texts().compile_expression(text, undefined_to_none=False)


def headed(path: str, text: str, lines: Sequence[str]) -> str:
    """Returns the text with comment lines on top, below a `#!`; JSON has no comments."""
    if path.endswith((".json", ".whl")) or not lines:
        return text
    mark = "//" if path.endswith(".rules") else "#"
    top = "".join(f"{mark} {line}".rstrip() + "\n" for line in lines)
    if text.startswith("#!"):
        first, _, rest = text.partition("\n")
        return f"{first}\n{top}{rest}"
    return f"{top}\n{text}"


def in_shell(word: str) -> str:
    """Returns one word of a POSIX shell; escapes a dollar sign in double quotes, so that it is clearly meant literally."""
    if "$" in word or "`" in word:
        return '"' + re.sub(r'([$`"\\])', r"\\\1", word) + '"'
    return shlex.quote(word)


def quoted(text: str) -> str:
    """Returns a string in double quotes that YAML and TOML both read: unprintable letters are escaped by their numbers."""
    numbers = {letter: f"\\u{ord(letter):04x}" if ord(letter) <= 0xFFFF else f"\\U{ord(letter):08x}" for letter in text}
    escapes = {letter: number for letter, number in numbers.items() if not letter.isprintable()} | {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'


def in_yaml(text: str) -> str:
    """Returns a YAML scalar: quoted, so that nothing is read as a number, a date or a comment; plain where that is safe."""
    is_plain = re.fullmatch(r"[A-Za-z/]([A-Za-z0-9_./-]*[A-Za-z0-9_/-])?", text) and text.lower() not in _YAML_WORDS
    return text if is_plain else quoted(text)


def flag_lines(words: Sequence[str]) -> list[list[str]]:
    """Groups the words of a command: each flag with its values."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups

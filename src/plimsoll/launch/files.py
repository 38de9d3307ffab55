"""Reads the files that hold a vLLM start or its flags: a script, Compose, Kubernetes, a systemd unit, a `--config` file."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Mapping, Sequence
from configparser import Error as ConfigParserError
from configparser import RawConfigParser
from dataclasses import replace
from os.path import basename
from pathlib import Path
from typing import BinaryIO

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.command_line import RANGE, Container, Launch, find_in_container, find_launch
from plimsoll.launch.manifests import (
    ManifestStart,
    TextBudget,
    documents_in,
    launches_in_manifest,
    plain_words,
    starts_in_manifest,
)
from plimsoll.launch.shell_script import commands_in
from plimsoll.launch.shell_words import Reader, joined_words
from plimsoll.net.inputs import Budget, Descriptor, opened

BYTES_MAX = 1024 * 1024
PIPE_PATIENCE_S = 10
_SOURCED_MAX = 8  # names of files that a note lists

# Patterns stay text until they are used: compiling them all costs more than reading most files.
_UNIT = r"(?m)^[ \t]*(?:\[(?:Unit|Service|Container|Install)\][ \t]*$|ExecStart[ \t]*=)"
_YAML = r"---|%YAML|- |\{\{|[\w.\"'/-]+[ \t]*:(?:[ \t]|$)"
_JSON = r"\s*[{\[]\s*[\"{\[]"
_LOG = r"(?m)^(?:\([A-Za-z_]\w* pid=\d+\) )?(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d "
_A_LOG = "{0}: a log of vLLM, not a start command; `plimsoll doctor {0}` reads logs"
_YAML_NAMES = (".yaml", ".yml", ".json")
# `vllm==0.11.0`, `vllm[audio]===0.11.0`, `vllm@0.11.0` and `VLLM_VERSION=0.11.0`, not behind a `#` that begins the line.
_PIN = (
    r"(?im)^(?![ \t]*#).*?\bvllm(?:\[[\w, -]*\]|-cpu)?"
    r"(?:[ \t]*===?[ \t]*|@|_VERSION[\"']?[ \t]*[=:][ \t]*[\"']?)v?(\d+\.\d+[\w.+]*)(?![\w.+*])"
)
_RANGE = rf"(?im)^(?![ \t]*#).*?\b{RANGE}"


class NoStart(BadInput):
    """A readable file that starts no vLLM."""


def read_launches(path: str, stdin: BinaryIO | None = None) -> list[Launch]:
    """Returns every vLLM start in a file (or in `stdin`, for `-`), in order; BadInput, with the reason, if there is none."""
    where = "standard input" if path == "-" else path
    return _starts_in(read_text(path, stdin), basename(where) or where, where)


def read_objects(path: str, stdin: BinaryIO | None = None) -> list[ManifestStart]:
    """Returns every vLLM start in a Kubernetes manifest, with its object; BadInput for any other file."""
    where = "standard input" if path == "-" else path
    text, name = read_text(path, stdin), basename(where)
    launches = _starts_in(text, name, where)
    starts = starts_in_manifest(text, name) if kind_of(text, name) == "manifest" else []
    if not starts or any(start.kind in ("compose", "task") for start in starts):
        raise BadInput(f"{where}: no object of Kubernetes; `kubectl get deploy NAME -o yaml` prints one")
    return [replace(start, launch=launch) for start, launch in zip(starts, launches, strict=True)]


def read_list(path: str) -> tuple[list[Launch], list[str]]:
    """Returns every vLLM start in a file, and a note for each other command: a mistyped line of a list."""
    name, text = basename(path) or path, read_text(path)
    launches = _starts_in(text, name, path)
    if text.startswith("#!") or _in_script(text, name) != launches:
        return launches, []  # other commands belong into a script, and a manifest has no lines
    starts = {launch.source for launch in launches}
    others = [command for command in commands_in(text) if f"{name}:{command.line}" not in starts]
    return launches, [
        f"{name}:{command.line}: `{command.words[0][:60]}` begins no vLLM start; the line was left out" for command in others
    ]


def _starts_in(text: str, name: str, where: str) -> list[Launch]:
    try:
        launches = _READERS[kind_of(text, name)](text, name)
    except BadInput as error:
        if re.search(_LOG, text):
            raise BadInput(_A_LOG.format(where)) from None
        raise type(error)(str(error) if str(error).startswith(name) else f"{where}: {error}") from None
    if not launches:
        if re.search(_LOG, text):
            raise BadInput(_A_LOG.format(where))
        raise NoStart(
            f"{where}: no vLLM start command in it (looked for `vllm serve`,"
            " `python -m vllm.entrypoints.openai.api_server` and containers of a vLLM image)"
        )
    if any("{{" in launch.arguments for launch in launches):
        raise BadInput(f"{where}: it looks like a template: render it first")
    pinned = pinned_version(text)
    return [replace(launch, vllm=launch.vllm or (pinned, f"pinned in {name}")) if pinned else launch for launch in launches]


def pinned_version(text: str) -> str | None:
    """Returns the version, or range of versions, that a text asks for, as `pip install vllm==0.11.0` does; None if several."""
    pins = {re.sub(r"\s", "", found) for found in re.findall(_RANGE, text)}
    pins = {pin for pin in pins if pin[:2] != "==" or "*" in pin or "," in pin} | set(re.findall(_PIN, text))
    return pins.pop() if len(pins) == 1 else None


def read_text(path: str, stdin: BinaryIO | None = None) -> str:
    """Reads the text of a file (or of `stdin`, for `-`) that may hold a vLLM start; BadInput if it is unreadable or no text."""
    where = "standard input" if path == "-" else path
    if path == "-" and stdin is None:
        raise BadInput("-: there is no standard input to read")
    try:
        content = stdin.read(BYTES_MAX + 1) if path == "-" and stdin is not None else _file_bytes(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > BYTES_MAX:
        raise TooLarge(f"{where}: larger than 1 MiB; a start script or manifest is not")
    if b"\0" in content:
        raise BadInput(f"{where}: a binary file, not a script or manifest")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise BadInput(f"{where}: is empty")
    return text


def _file_bytes(path: str) -> bytes:
    """Reads the beginning of a file, or of a pipe such as `<(...)`; gives up on a pipe without a writer."""
    descriptor, _ = opened(path)
    budget = Budget(time.monotonic() + PIPE_PATIENCE_S)
    try:
        content = io.BufferedReader(Descriptor(descriptor, budget)).read(BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if budget.was_short:
        raise BadInput(f"{path}: a pipe in which nothing arrived for {PIPE_PATIENCE_S} s")
    return content


def kind_of(text: str, name: str) -> str:
    """Returns the kind of a file by its text: script, unit, supervisor or manifest; the name decides if the text does not."""
    lines = (line.strip() for line in text.split("\n"))
    first = next((line for line in lines if line and not line.startswith(("#", "//"))), "")
    if text.startswith("#!"):
        return "script"
    if re.match(_UNIT, first) or (re.search(_UNIT, text) and first.startswith(("[", ";"))):
        return "unit"
    if re.search(r"(?m)^\[program:", text) and first.startswith(("[", ";")):
        return "supervisor"
    is_yaml = re.match(_YAML, first) or re.match(_JSON, text) or name.lower().endswith(_YAML_NAMES)
    return "manifest" if is_yaml else "script"


def _in_script(text: str, name: str) -> list[Launch]:
    written, left_out = _in_here_documents(text, name) if "<<" in text else ([], [])
    launches = _starts_of_script(text, name) + written
    if left_out and not launches:
        raise BadInput(f"{name}: {'; '.join(left_out)}")
    return [replace(launch, notes=(*launch.notes, *left_out)) for launch in launches]


def _starts_of_script(text: str, name: str) -> list[Launch]:
    launches: list[Launch] = []
    sourced: dict[str, None] = {}
    behind_launch = False
    for command in commands_in(text):
        if command.words[0] in ("source", ".") and len(command.words) > 1:
            sourced[command.words[1]] = None
        if behind_launch and command.words[0].startswith("--"):
            # A comment, or a blank after the backslash, ended the command above: vLLM never sees these flags.
            lost = f"line {command.line} does not belong to it: {command.words[0]} would be run as a command of its own"
            launches[-1] = replace(launches[-1], notes=(*launches[-1].notes, lost))
        launch = find_launch(command.words, command.environment, f"{name}:{command.line}", command.unresolved)
        behind_launch = launch is not None
        if launch is not None:
            others = [find_launch(c.words, c.environment, launch.source, c.unresolved) for c in command.otherwise]
            taken = "depends on a branch of the script: its first value was taken, with all that is added to it"
            notes = [*launch.notes, *(f"{variable} {taken}" for variable in command.guessed)]
            if launch.unresolved and sourced:
                followed = ", ".join(list(sourced)[:_SOURCED_MAX])
                notes.append(f"not followed: {followed}; missing variables may be set there")
            otherwise = tuple(other for other in others if other is not None)
            launches.append(replace(launch, otherwise=otherwise, notes=tuple(notes)))
    if "\r\n" in text:
        note = "the file has Windows line ends (CRLF); a shell on Linux would not run it as it is"
        launches = [replace(launch, notes=(*launch.notes, note)) for launch in launches]
    return launches


_MOST_HERE_DOCUMENTS = 100  # that name vLLM, of one script
# What the shell computes while it writes an unquoted here-document.
_COMPUTED = re.compile(r"(?<!\\)(?:\$\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\)|`[^`\n]*`)")


def _in_here_documents(text: str, name: str) -> tuple[list[Launch], list[str]]:
    """Returns the starts in the units, manifests and scripts that a script writes, and a note for each that was left out."""
    text, launches, left_out, count = text.replace("\r\n", "\n"), list[Launch](), list[str](), 0
    reader = Reader(text)
    for _ in reader.tokens():
        pass
    lines, readers = text.split("\n"), {**_READERS, "script": _starts_of_script}
    for line, body, expands in reader.here_documents:
        kind = kind_of(body, "")
        is_file = kind == "unit" or body.startswith("#!") or re.search(r"(?m)^(?:services|kind):", body)
        if not is_file or "vllm" not in body.lower() or lines[line - 2].lstrip().startswith(":"):  # a block comment
            continue
        count += 1
        if count > _MOST_HERE_DOCUMENTS:
            left_out.append(f"the here-documents from line {line} on were not read: the script has more than {count - 1}")
            break
        computed = list(dict.fromkeys(_COMPUTED.findall(body))) if expands else []
        for number, word in enumerate(computed):
            body = body.replace(word, f"${{COMPUTED_{number}}}")  # noqa: PLW2901
        try:
            found = readers[kind]("\n" * (line - 1) + (body.replace("\\$", "$") if expands else body), name)
        except BadInput as error:
            left_out.append(f"the here-document at line {line} was not read: {error}")
            continue
        launches += [_with_words(launch, computed) for launch in found]
    return launches, left_out


def _with_words(launch: Launch, computed: Sequence[str]) -> Launch:
    """The launch with the words that a shell would compute as they are written, and unknown."""

    def written(text: str) -> str:
        return re.sub(r"\$\{?COMPUTED_(\d+)\}?", lambda found: computed[int(found[1])], text)

    environment = tuple((variable, written(value)) for variable, value in launch.environment)
    unresolved = tuple(written(f"${variable}") if "COMPUTED_" in variable else variable for variable in launch.unresolved)
    return replace(launch, arguments=tuple(map(written, launch.arguments)), environment=environment, unresolved=unresolved)


def _in_supervisor(text: str, name: str) -> list[Launch]:
    """Returns the starts in the programs of supervisord."""
    parser = RawConfigParser(strict=False, inline_comment_prefixes=(";",))
    try:
        parser.read_string(text)
    except ConfigParserError as error:
        raise BadInput(f"{name}: {' '.join(str(error).split())}") from None
    launches: list[Launch | None] = []
    for section in parser.sections():
        command, place = parser[section].get("command", ""), f"{name}, {section}"
        given = re.findall(r"(\w+)[ \t]*=[ \t]*(\"[^\"]*\"|'[^']*'|[^,\n]*)", parser[section].get("environment", ""))
        environment = [(variable, value.strip("\"' ")) for variable, value in given]
        launches.append(find_launch(plain_words(command, place), environment, place, re.findall(r"%\(\w+\)s", command)))
    return [launch for launch in launches if launch is not None]


# Finds vLLM starts in systemd unit files.

_SETTING = re.compile(r"([A-Za-z]+)[ \t]*=[ \t]*(.*)", re.DOTALL)
_PREFIX = re.compile(r"[-@:+!|]*")
_WORD_PART = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|((?:[^\s'\"\\]|\\.)+)", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "s": " ", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_BRACED = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_BARE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_SPECIFIER = re.compile(r"%[A-Za-z]")


def unit_settings(text: str) -> list[tuple[int, str, str]]:
    """Returns every setting of a unit file with its first line, in order; an empty value resets earlier ones."""
    settings: list[tuple[int, str, str]] = []
    first, parts = 0, list[str]()
    for number, line in enumerate([*text.replace("\r\n", "\n").split("\n"), ""], 1):
        if line.lstrip().startswith(("#", ";")):
            continue  # also between the lines of one setting
        first = first if parts else number
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            if found := _SETTING.fullmatch(" ".join(parts).strip()):
                settings.append((first, found[1], found[2]))
            parts = []
    return settings


def launches_in_unit(text: str, name: str) -> list[Launch]:
    """Returns every vLLM start in `ExecStart=`, or in a quadlet's `Exec=`, with the variables of any `Environment=`."""
    environment: dict[str, str] = {}
    quadlet: dict[str, str] = {}
    starts: list[tuple[int, str]] = []
    notes: list[str] = []
    for line, key, value in unit_settings(text):
        if key == "Environment":
            if not value:
                environment = {}  # an empty assignment resets the list
            for word in _words(value, f"{name}:{line}"):
                variable, _, content = word.partition("=")
                environment[variable] = content
        elif key == "EnvironmentFile" and value:
            notes.append(f"the variables in {value.lstrip('-')} were not read")
        elif key in ("ExecStart", "Exec"):
            starts = [*starts, (line, value)] if value else []
        elif key in ("Image", "Entrypoint", "ShmSize"):
            quadlet[key] = value
    if "Image" in quadlet and not starts:
        starts = [(1, "")]
    launches: list[Launch] = []
    growth = TextBudget()
    for line, value in starts:
        image, place = quadlet.get("Image"), f"{name}:{line}"
        value = value if image else _PREFIX.sub("", value, count=1)  # noqa: PLW2901
        words, missing = _unit_command(_words(value, place), environment, growth)
        if image:
            entry = (quadlet["Entrypoint"],) if "Entrypoint" in quadlet else None
            given = tuple(environment.items()), tuple(missing)
            launch = find_in_container(Container(image, entry, tuple(words), *given, shm=quadlet.get("ShmSize")), place)
        else:
            launch = find_launch(words, environment.items(), place, missing)
        if launch is not None:
            launches.append(replace(launch, notes=(*launch.notes, *notes)))
    return launches


def _words(text: str, where: str) -> list[str]:
    """Splits words as systemd does: quotes group, backslashes escape, no shell."""

    def unescape(found: re.Match[str]) -> str:
        letter = found.group(1)
        return chr(int(letter[1:], 16)) if len(letter) == 3 else _LETTERS.get(letter, letter)

    def read(found: re.Match[str]) -> str:
        return _ESCAPE.sub(unescape, next(group for group in found.groups() if group is not None))

    return joined_words(text, _WORD_PART, read, f"{where}: a quote that opens here is never closed")


def _unit_command(words: list[str], environment: dict[str, str], growth: TextBudget) -> tuple[list[str], list[str]]:
    """Fills in variables: `${A}` in place, `$A` only if it is a whole word, and then split; also returns the missing ones."""
    done: list[str] = []
    missing: list[str] = []

    def fill(found: re.Match[str]) -> str:
        escaped, variable = found.groups()
        if escaped:
            return "$"
        if variable not in environment:
            missing.append(variable)
            return f"${variable}"
        return growth.add(environment[variable])

    for word in words:
        missing += _SPECIFIER.findall(word.replace("%%", ""))
        bare = _BARE.fullmatch(word)
        if bare and bare.group(1) in environment:
            done += growth.add(environment[bare.group(1)]).split()
            continue
        missing += [bare.group(1)] if bare else []
        done.append(_BRACED.sub(fill, word.replace("%%", "%")))
    return done, missing


_READERS = {
    "script": _in_script, "unit": launches_in_unit, "supervisor": _in_supervisor, "manifest": launches_in_manifest,
}  # fmt: skip


def with_requirement(launch: Launch, folder: str) -> Launch:
    """Returns the launch with the vLLM pinned in the requirements.txt beside its file, if nothing nearer names one."""
    path = Path(folder) / "requirements.txt"
    try:
        text = "" if launch.vllm or launch.image or not path.is_file() else path.read_text("utf-8", "replace")[:BYTES_MAX]
    except OSError:
        return launch
    pinned = pinned_version(text)
    return replace(launch, vllm=(pinned, "pinned in requirements.txt")) if pinned else launch


def read_vllm_config(path: str) -> Mapping[str, object]:
    """Returns the entries of the file, by flag name; BadInput if it is not a flat mapping that vLLM could read."""
    if not path.endswith((".yaml", ".yml")):
        raise BadInput(f"{path}: vLLM reads --config only from a .yaml or .yml file")
    documents = documents_in(read_text(path), path, booleans=True)
    found = next(iter(documents), None)
    if not isinstance(found, dict):
        raise BadInput(f"{path}: not a mapping of flag names to values")
    return {str(key): value for key, value in found.items()}

"""Reads the ways a vLLM start is written down: a script, a command line, Compose, Kubernetes, systemd, a Dockerfile."""

from __future__ import annotations

import os
import re
import stat
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from os.path import basename
from typing import TYPE_CHECKING, NamedTuple

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.containers import Container, Environment, Growth, container_of_run, interpolate, launch_in, plain_words
from plimsoll.launch.launches import EntryPoint, Launch

if TYPE_CHECKING:
    from typing import BinaryIO


# Recognises a vLLM start in a list of words, whatever wrappers stand in front of it.

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
_TAKE_A_LINE = frozenset({"eval", "ssh", "tmux", "screen", "su", "script"})  # they hand one argument to a shell
_ENGINES = frozenset({"docker", "podman", "nerdctl"})
# Programs that mention vLLM and do not start it.
_MENTION = frozenset(
    "[ [[ alias apt apt-get awk brew cat cd chmod chown cp curl diff echo egrep emacs export fgrep file find git grep head"
    " help journalctl kill killall less ln ls lsof man mkdir more mv nano pgrep pip pip3 pipx pkill printf ps read rg rm"
    " rsync scp sed systemctl tail tee test touch trap type vi vim wait watch wc wget whereis which".split()
)
_WRAPPER = frozenset("builtin command env exec ionice nice nohup setsid stdbuf sudo time timeout".split())
_WRAPPER_MAX = 200  # words in front of the start command
_SERVER_MODULES = {
    "vllm.entrypoints.openai.api_server": (),
    "vllm.entrypoints.api_server": ("vllm.entrypoints.api_server is the demonstration server, not the OpenAI one",),
}
_CLI_MODULES = frozenset({"vllm", "vllm.scripts", "vllm.entrypoints.cli.main"})
_SERVER_FILE = "/vllm/entrypoints/openai/api_server.py"
_CLI_FILE = "/vllm/entrypoints/cli/main.py"
_ASSIGNMENT = r"(?s:([A-Za-z_][A-Za-z0-9_]*)=(.*))"
_REFERENCE = r"\$[{(]?[#!]?([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])"
_COMPUTED_MAX = 100  # each is looked for in every argument
_OUR_WHEEL = re.compile(r"\$.*/plimsoll_inside-[\w.-]+\.whl")  # where the script that adds it finds it
_NESTED_MAX = 4  # bash -c "bash -c '...'"


def find_launch(
    words: Sequence[str],
    environment: Iterable[tuple[str, str]],
    source: str,
    unresolved: Iterable[str] = (),
) -> Launch | None:
    """The vLLM start in these words, or None; what stands in front of it is taken as a wrapper."""
    found = _settled(_find(tuple(words), tuple(environment), source, _NESTED_MAX), unresolved)
    return found if found is None else found._replace(in_front=_options_in_front(tuple(words)))


def _options_in_front(words: tuple[str, ...]) -> tuple[str, ...]:
    """What stands before the start, where that begins with an option: no wrapper's, for none has been named yet."""
    if not words or not words[0].startswith("-") or _start_at(words, 0):
        return ()
    return words[: next((at for at in range(len(words)) if _start_at(words, at)), 1)]


def find_in_container(container: Container, source: str) -> Launch | None:
    """The vLLM start in a container, or None."""
    return _settled(_find_in_container(container, source, _NESTED_MAX), ())


def _settled(launch: Launch | None, unresolved: Iterable[str]) -> Launch | None:
    """The launch with the missing variables that matter to it: a `-v $HOME/cache:/cache` in front of it does not."""
    if launch is None:
        return None
    launch = launch._replace(
        environment=tuple(pair for pair in map(_without_our_wheel, launch.environment) if pair != ("PYTHONPATH", ""))
    )
    texts = [*launch.arguments, *(value for _, value in launch.environment)]
    seen = {name for text in texts if "$" in text for name in re.findall(_REFERENCE, text)}
    names = dict.fromkeys((*unresolved, *launch.unresolved))
    computed = [name for name in names if not re.fullmatch(_REFERENCE, f"${name}")][:_COMPUTED_MAX]
    seen.update(name for name in computed if any(name in text for text in texts))
    notes = launch.notes
    if any(word != word.lstrip() and word.lstrip()[:1] in ("", "-") and word for word in launch.arguments):
        notes += ("an argument starts with a blank: a backslash that is not the last character of its line does that",)
    return launch._replace(unresolved=tuple(name for name in names if name in seen), notes=notes)


def _without_our_wheel(pair: tuple[str, str]) -> tuple[str, str]:
    """The wheel that a generated script finds beside itself is no part of the command: made again, it would be there twice."""
    name, value = pair
    if name != "PYTHONPATH" or "plimsoll_inside-" not in value:
        return pair
    return name, ":".join(part for part in value.split(":") if not _OUR_WHEEL.fullmatch(part))


def _find(words: tuple[str, ...], environment: Environment, source: str, nested: int) -> Launch | None:
    if not any("vllm" in word.lower() for word in words):
        return None
    own: list[tuple[str, str]] = list(environment)
    leading = True  # nothing but wrappers so far: a program that only mentions vLLM would be the one that runs
    for at, word in enumerate(words[:_WRAPPER_MAX]):
        name = word.rpartition("/")[2]
        is_value = at > 0 and words[at - 1].startswith("-")
        if start := _start_at(words, at):
            entry, first, notes = start
            return Launch(source, entry, words[first:], tuple(own), notes=notes)
        if leading and not is_value and name in _MENTION:
            return None
        if name in _SHELLS and (script := _script_given(words[at + 1 :])) is not None:
            return _find_in_script(script, tuple(own), source, nested)
        if name in _TAKE_A_LINE and (line := _line_given(name, words[at + 1 :])) is not None:
            return _find_in_script(line, tuple(own), source, nested)
        if name in _ENGINES and (run := _run_words(words[at + 1 :])) is not None:
            container = container_of_run(run, own)
            return None if container is None else _find_in_container(container, source, nested)
        if name == "env":
            own = _after_env(words[at + 1 :], own)
        if assignment := re.fullmatch(_ASSIGNMENT, word) if "=" in word else None:
            own.append((assignment.group(1), assignment.group(2)))
        leading = leading and bool(
            is_value or assignment or word.startswith("-") or name in _WRAPPER or name.rstrip("smhd").isdigit()
        )
    return None


def _start_at(words: tuple[str, ...], at: int) -> tuple[EntryPoint, int, tuple[str, ...]] | None:
    """The entry point that starts at this word, where its arguments begin, and notes on it."""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    name = word.rpartition("/")[2]
    if following == "serve" and (name == "vllm" or f"/{word}".endswith(_CLI_FILE)):
        return EntryPoint.SERVE, at + 2, ()
    if word == "-m" or (word.startswith("-m") and word[2:] in (_CLI_MODULES | _SERVER_MODULES.keys())):
        module, after = (following, at + 2) if word == "-m" else (word[2:], at + 1)
        if module in _SERVER_MODULES:
            return EntryPoint.API_SERVER, after, _SERVER_MODULES[module]
        if module in _CLI_MODULES and words[after : after + 1] == ("serve",):
            return EntryPoint.SERVE, after + 1, ()
    before = words[at - 1] if at else "python"
    runs_file = re.fullmatch(r"python[0-9.]*", before.rpartition("/")[2]) or before.startswith("-")
    if f"/{word}".endswith(_SERVER_FILE) and runs_file:
        return EntryPoint.API_SERVER, at + 1, ()
    return None


def _script_given(words: tuple[str, ...]) -> str | None:
    """What `sh -c`, `bash -lc` or `bash -euo pipefail -c` is given to run; None where it runs a file."""
    for at, word in enumerate(words):
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word):
            return words[at + 1] if at + 1 < len(words) else None
        if not word.startswith(("-", "+")) and not (at and re.fullmatch(r"[-+][a-zA-Z]*[oO]", words[at - 1])):
            return None
    return None


def _line_given(name: str, words: tuple[str, ...]) -> str | None:
    """The argument that is a command line in itself, as in `tmux new -d 'vllm serve ...'`."""
    if name == "eval":
        return " ".join(words)
    return next((word for word in words if "vllm" in word and " " in word), None)


def _run_words(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """What follows `run` or `create` in `docker [options] [container] run ...`; None for any other subcommand."""
    for at, word in enumerate(words[:8]):
        if word in ("run", "create"):
            return words[at + 1 :]
        if word in ("exec", "compose", "build", "pull", "start", "stop", "logs", "stack", "kill"):
            return None
    return None


def _after_env(words: tuple[str, ...], environment: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The environment that `env -i` or `env -u NAME` leaves."""
    for at, word in enumerate(words):
        if word in ("-i", "-", "--ignore-environment"):
            environment = []
        elif word in ("-u", "--unset"):
            environment = [pair for pair in environment if pair[0] not in words[at + 1 : at + 2]]
        elif word.startswith("--unset="):
            environment = [pair for pair in environment if pair[0] != word.removeprefix("--unset=")]
        elif word.startswith("-") or (at and words[at - 1] in ("-u", "--unset")):
            continue
        else:
            break
    return environment


def _find_in_script(text: str, environment: Environment, source: str, nested: int) -> Launch | None:
    """The first vLLM start in a script that a shell is given as an argument."""
    if nested <= 0:
        return None
    from plimsoll.launch.shell_script import commands_in  # here, because most commands need no shell to be read

    for command in commands_in(text, environment):
        launch = _find(command.words, command.environment, source, nested - 1)
        if launch is not None:
            return launch._replace(unresolved=tuple(dict.fromkeys((*command.unresolved, *launch.unresolved))))
    return None


def _find_in_container(container: Container, source: str, nested: int) -> Launch | None:
    return launch_in(container, source, lambda words, environment: _find(tuple(words), environment, source, nested))


# Finds the vLLM start in a Dockerfile.

_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+(.*)", re.DOTALL)
_DOCKER_FROM = re.compile(r"(?:--\S+\s+)*(\S+)(?:\s+[aA][sS]\s+(\S+))?")

_STAGES_MAX = 100


class _Stage(NamedTuple):
    """One build stage: what it starts and the variables it sets."""

    image: str
    environment: dict[str, str]
    entry: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    line: int = 0


def launches_in_dockerfile(text: str, name: str) -> list[Launch]:
    """The vLLM start of the last stage, which is what the built image runs; empty where it starts something else."""
    stages: dict[str, _Stage] = {}
    stage: _Stage | None = None
    arguments: dict[str, str] = {}
    alias: str | None = None
    growth = Growth()
    for line, keyword, rest in _instructions(text):
        known = ChainMap(stage.environment if stage else {}, arguments)
        if keyword == "FROM" and (found := _DOCKER_FROM.match(rest)):
            image = interpolate(found.group(1), known, growth)[0]
            if stage is not None and alias:
                stages[alias] = stage
            if len(stages) > _STAGES_MAX:
                raise TooLarge(f"{name}:{line}: more than {_STAGES_MAX} stages")
            alias = found.group(2)
            stage = stages.get(image, _Stage(image, {}))
            stage = stage._replace(environment=dict(stage.environment))
        elif keyword == "ARG":
            arguments.update(_pairs(rest, known, f"{name}:{line}", growth))
        elif stage is None:
            continue
        elif keyword == "ENV":
            stage.environment.update(_pairs(rest, known, f"{name}:{line}", growth))
        elif keyword == "ENTRYPOINT":
            stage = stage._replace(entry=_command(rest), command=(), line=line)  # a new entry point resets CMD
        elif keyword == "CMD":
            stage = stage._replace(command=_command(rest), line=line)
    if stage is None or (stage.entry is None and not stage.command):
        return []
    container = Container(stage.image, stage.entry, stage.command, tuple(stage.environment.items()))
    launch = find_in_container(container, f"{name}:{stage.line}")
    return [launch] if launch else []


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Each instruction with its line and its text, continuations joined, comments left out."""
    instructions: list[tuple[int, str, str]] = []
    first, parts = 0, list[str]()
    for number, line in enumerate([*text.replace("\r\n", "\n").split("\n"), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        first = first if parts else number
        stripped = line.rstrip(" \t")
        if stripped.endswith("\\"):
            parts.append(stripped[:-1])
            continue
        found = _INSTRUCTION.fullmatch(" ".join([*parts, line]).strip())
        parts = []
        if found:
            instructions.append((first, found.group(1).upper(), found.group(2)))
    return instructions


def _command(rest: str) -> tuple[str, ...]:
    """JSON form as it stands; anything else is given to a shell, as Docker does."""
    if rest.startswith("["):
        import json

        try:
            words = json.loads(rest)
        except (ValueError, RecursionError):
            words = None
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return tuple(words)
    return ("/bin/sh", "-c", rest)


def _pairs(rest: str, known: Mapping[str, str], where: str, growth: Growth) -> dict[str, str]:
    """`A=1 B="two words"`, or the old `A two words`."""
    first = rest.split(None, 1)[0]
    if "=" not in first:
        value = rest.partition(" ")[2].strip()
        return {first: interpolate(value, known, growth)[0]} if value else {}
    pairs = (word.partition("=") for word in plain_words(rest, where))
    return {name: interpolate(value, known, growth)[0] for name, given, value in pairs if given}


__all__ = ["find_launch", "read_launches", "read_list"]

BYTES_MAX = 1024 * 1024
PIPE_PATIENCE_S = 10
_SOURCED_MAX = 8  # names of files that a note lists

# Patterns stay text until they are used: compiling them all costs more than reading most files.
_UNIT = r"(?m)^[ \t]*(?:\[(?:Unit|Service|Install)\][ \t]*$|ExecStart[ \t]*=)"
_DOCKERFILE = r"(?i)(?:FROM|ARG)[ \t]+\S"
_FROM = r"(?im)^[ \t]*FROM[ \t]+\S"
_YAML = r"---|%YAML|- |\{\{|[\w.\"'/-]+[ \t]*:(?:[ \t]|$)"
_JSON = r"\s*[{\[]\s*[\"{\[]"
_LOG = r"(?m)^(?:\([A-Za-z_]\w* pid=\d+\) )?(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d "
_A_LOG = "{0}: a log of vLLM, not a start command; `plimsoll doctor {0}` reads logs"
_YAML_NAMES = (".yaml", ".yml", ".json")


def read_launches(path: str, stdin: BinaryIO | None = None) -> list[Launch]:
    """Every vLLM start in a file (or in `stdin`, for `-`), in order and never none: BadInput says why."""
    name = "standard input" if path == "-" else basename(path) or path
    where = "standard input" if path == "-" else path
    return _starts_in(_text(_bytes(path, stdin), where), name, where)


def read_list(path: str) -> tuple[list[Launch], list[str]]:
    """Every vLLM start in a file, and a note for each command in it that is none: one line of a list that was mistyped."""
    name, text = basename(path) or path, _text(_bytes(path, None), path)
    launches = _starts_in(text, name, path)
    if text.startswith("#!") or _in_script(text, name) != launches:
        return launches, []  # other commands belong into a script, and a manifest has no lines
    from plimsoll.launch.shell_script import commands_in

    starts = {launch.source for launch in launches}
    others = [command for command in commands_in(text) if f"{name}:{command.line}" not in starts]
    told = [
        f"{name}:{command.line}: `{command.words[0][:60]}` begins no vLLM start; the line was left out" for command in others
    ]
    return launches, told


def _starts_in(text: str, name: str, where: str) -> list[Launch]:
    try:
        launches = _launches_in(text, name)
    except BadInput as error:
        if re.search(_LOG, text):
            raise BadInput(_A_LOG.format(where)) from None
        sentence = str(error)
        located = sentence if sentence.startswith(name) else f"{where}: {sentence}"
        raise type(error)(located) from None
    if not launches:
        if re.search(_LOG, text):
            raise BadInput(_A_LOG.format(where))
        raise BadInput(
            f"{where}: no vLLM start command in it (looked for `vllm serve`,"
            " `python -m vllm.entrypoints.openai.api_server` and containers of a vLLM image)"
        )
    return launches


def _bytes(path: str, stdin: BinaryIO | None) -> bytes:
    if path == "-":
        if stdin is None:
            raise BadInput("-: there is no standard input to read")
        return stdin.read(BYTES_MAX + 1)
    try:
        return _file_bytes(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: is a directory; name the file in it") from None
    except PermissionError:
        raise BadInput(f"{path}: permission denied") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"{path!r}: cannot be read: {reason}") from None


def _file_bytes(path: str) -> bytes:
    """The beginning of a file, or of a pipe such as `<(...)`; a pipe that nobody writes to is given up on."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        with open(path, "rb") as file:
            return file.read(BYTES_MAX + 1)
    import select

    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = b""
        while len(found) <= BYTES_MAX:
            ready, _, _ = select.select([descriptor], [], [], PIPE_PATIENCE_S)
            chunk = os.read(descriptor, BYTES_MAX + 1) if ready else None
            if chunk is None:
                raise BadInput(f"{path}: a pipe in which nothing arrived for {PIPE_PATIENCE_S} s")
            if not chunk:
                break
            found += chunk
        return found
    finally:
        os.close(descriptor)


def _text(content: bytes, where: str) -> str:
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


def _launches_in(text: str, name: str) -> list[Launch]:
    """Tells what kind of file it is by what stands in it; the name only settles what the text leaves open."""
    lines = (line.strip() for line in text.split("\n"))
    first = next((line for line in lines if line and not line.startswith(("#", "//"))), "")
    if text.startswith("#!"):
        return _in_script(text, name)
    if re.match(_UNIT, first) or (re.search(_UNIT, text) and first.startswith(("[", ";"))):
        return launches_in_unit(text, name)
    if re.match(_DOCKERFILE, first) and re.search(_FROM, text):
        return launches_in_dockerfile(text, name)
    if re.match(_YAML, first) or re.match(_JSON, text) or name.lower().endswith(_YAML_NAMES):
        from plimsoll.launch.manifests import launches_in_manifest

        return launches_in_manifest(text, name)
    return _in_script(text, name)


def _in_script(text: str, name: str) -> list[Launch]:
    from plimsoll.launch.shell_script import commands_in

    launches: list[Launch] = []
    sourced: dict[str, None] = {}
    behind_launch = False
    for command in commands_in(text):
        if command.words[0] in ("source", ".") and len(command.words) > 1:
            sourced[command.words[1]] = None
        if behind_launch and command.words[0].startswith("--"):
            # A comment, or a blank behind the backslash, ended the command above: vLLM never sees these flags.
            lost = f"line {command.line} does not belong to it: {command.words[0]} would be run as a command of its own"
            launches[-1] = launches[-1]._replace(notes=(*launches[-1].notes, lost))
        launch = find_launch(command.words, command.environment, f"{name}:{command.line}", command.unresolved)
        behind_launch = launch is not None
        if launch is not None:
            others = [find_launch(c.words, c.environment, launch.source, c.unresolved) for c in command.otherwise]
            launch = launch._replace(otherwise=tuple(other for other in others if other is not None))
            launches.append(_noted(launch, command.guessed, list(sourced)[:_SOURCED_MAX]))
    if "\r\n" in text:
        note = "the file has Windows line ends (CRLF); a shell on Linux would not run it as it is"
        launches = [launch._replace(notes=(*launch.notes, note)) for launch in launches]
    return launches


def _noted(launch: Launch, guessed: tuple[str, ...], sourced: list[str]) -> Launch:
    taken = "depends on a branch of the script: its first value was taken, with all that is added to it"
    notes = [f"{name} {taken}" for name in guessed]
    if launch.unresolved and sourced:
        notes.append(f"not followed: {', '.join(sourced)}; missing variables may be set there")
    return launch._replace(notes=(*launch.notes, *notes))


# Finds vLLM starts in systemd unit files.

_SETTING = re.compile(r"([A-Za-z]+)[ \t]*=[ \t]*(.*)", re.DOTALL)
_PREFIX = re.compile(r"[-@:+!|]*")
_WORD_PART = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|((?:[^\s'\"\\]|\\.)+)", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "s": " ", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_BRACED = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_BARE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_SPECIFIER = re.compile(r"%[A-Za-z]")


def launches_in_unit(text: str, name: str) -> list[Launch]:
    """Every vLLM start under `ExecStart=`, with what `Environment=` sets above or below it."""
    environment: dict[str, str] = {}
    starts: list[tuple[int, str]] = []
    notes: list[str] = []
    for line, logical in _logical_lines(text):
        setting = _SETTING.fullmatch(logical)
        if setting is None:
            continue
        key, value = setting.groups()
        if key == "Environment":
            if not value:
                environment = {}  # an empty assignment resets the list
            for word in _words(value, f"{name}:{line}"):
                variable, _, content = word.partition("=")
                environment[variable] = content
        elif key == "EnvironmentFile" and value:
            notes.append(f"the variables in {value.lstrip('-')} were not read")
        elif key == "ExecStart":
            if not value:
                starts = []
            else:
                starts.append((line, value))
    launches: list[Launch] = []
    growth = Growth()
    for line, value in starts:
        words, missing = _unit_command(_words(_PREFIX.sub("", value, count=1), f"{name}:{line}"), environment, growth)
        if launch := find_launch(words, environment.items(), f"{name}:{line}", missing):
            launches.append(launch._replace(notes=(*launch.notes, *notes)))
    return launches


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines with their continuations joined and the number of the first; comments are left out, also in between."""
    lines: list[tuple[int, str]] = []
    first, parts = 0, list[str]()
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line.lstrip().startswith(("#", ";")):
            continue
        first = first if parts else number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        lines.append((first, " ".join([*parts, line]).strip()))
        parts = []
    if parts:
        lines.append((first, " ".join(parts).strip()))
    return lines


def _words(text: str, where: str) -> list[str]:
    """Words as systemd cuts them: quotes group, backslashes escape, no shell."""
    words: list[list[str]] = []
    at, ended = 0, True
    while at < len(text):
        if text[at].isspace():
            at, ended = at + 1, True
            continue
        found = _WORD_PART.match(text, at)
        if found is None:
            raise BadInput(f"{where}: a quote that opens here is never closed")
        piece = _ESCAPE.sub(_unescaped, next(group for group in found.groups() if group is not None))
        if ended:
            words.append([])
        words[-1].append(piece)
        at, ended = found.end(), False
    return ["".join(pieces) for pieces in words]


def _unescaped(found: re.Match[str]) -> str:
    letter = found.group(1)
    if len(letter) == 3:
        return chr(int(letter[1:], 16))
    return _LETTERS.get(letter, letter)


def _unit_command(words: list[str], environment: dict[str, str], growth: Growth) -> tuple[list[str], list[str]]:
    """The words with variables filled in: `${A}` in place, `$A` only where it is a whole word, and then split."""
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

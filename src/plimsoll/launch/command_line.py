"""Finds the vLLM start in the words typed, in a script line or a container, and reads its arguments as vLLM would.

vLLM's parser is Python's argparse with additions, and users lean on all of it: `--foo_bar`, unique prefixes
(`--gpu-memory-util`), `--no-` forms, `=`, short names (`-tp 4`), dotted JSON (`--compilation-config.mode 3`), `-O3`,
several values after one flag, and a YAML file of flags (`--config`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from os.path import dirname, exists, isfile, join
from typing import NamedTuple

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.options import Words, meant
from plimsoll.launch.shell_script import commands_in
from plimsoll.vllm.flags import FlagRow, flags_of, history_of
from plimsoll.vllm.versions import Behaviour, Engine, allows, engine_named, releases, table

Environment = tuple[tuple[str, str], ...]

_PROGRAMS = table("programs", "launch")
_WRAPPER_MAX = 200  # words in front of the start command
DEMO_SERVER = "vllm.entrypoints.api_server is the demonstration server, not the OpenAI one"
_SERVER_MODULES = {"vllm.entrypoints.openai.api_server": (), "vllm.entrypoints.api_server": (DEMO_SERVER,)}
_CLI_MODULES = frozenset({"vllm", "vllm.scripts", "vllm.entrypoints.cli.main"})
_SERVER_FILE = "/vllm/entrypoints/openai/api_server.py"
_CLI_FILE = "/vllm/entrypoints/cli/main.py"
_NAMED_SO = r"(?i)\$\{?\w*vllm\w*\}?"  # "$VLLM_BIN" serve
# `vllm==0.11.0`, `vllm[audio]===0.11.0`, `vllm@0.11.0`
PIN = r"(?:--[\w-]+=)?vllm(?:\[[\w, -]*\]|-cpu)?(?:[ \t]*===?[ \t]*|@)v?(\d+\.\d+[\w.+]*)"
# `vllm>=0.6,<0.7`, `vllm~=0.11.1`, `vllm==0.6.*`
_CLAUSE = r"(?:[~<>!=]=|[<>])[ \t]*v?\d+(?:\.\d+)*(?:\.\*|\.?(?:rc|post|dev)\d+)?"
RANGE = rf"vllm(?:\[[\w, -]*\]|-cpu)?[ \t]*\(?({_CLAUSE}(?:[ \t]*,[ \t]*{_CLAUSE})*)(?![\w.+*])"
_ASSIGNMENT = r"(?s:([A-Za-z_][A-Za-z0-9_]*)=(.*))"
_REFERENCE = r"\$[{(]?[#!]?([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])"
_COMPUTED_MAX = 100  # every argument is searched for each
_OUR_WHEEL = re.compile(r"\$.*/plimsoll_inside-[\w.-]+\.whl")  # its path in the script that adds it
_FILES = (".sh", ".bash", ".yaml", ".yml", ".json", ".txt", ".service", ".env", ".log", ".gz")
_NESTED_MAX = 4  # bash -c "bash -c '...'"

_SHORT_SWITCHES = frozenset("ditPq")  # of `docker run`, podman and nerdctl: they take no value
TWICE = "vllm-openai starts the server by itself: the start command given to it is read as arguments"
RUNTIME_ADDS = "the serving runtime may add arguments of its own"
TEMPLATE_ADDS = "KServe's own template adds arguments of its own"
# A first argument that is a program of its own: the image's entry point runs it, or would fail on it.
_PROGRAM = r"(?:.*/)?(?:(?:ba|da|a|z|k)?sh|vllm|python[0-9.]*|env|sleep|tail|nvidia-smi|ray|torchrun|pip|ls|cat|echo|tini)"


class EntryPoint(StrEnum):
    """The ways people start the OpenAI-compatible server."""

    SERVE = "vllm serve"
    API_SERVER = "python -m vllm.entrypoints.openai.api_server"
    IMAGE = "container image"  # the image's own entry point: the arguments are those of one of the two above


@dataclass(frozen=True, slots=True)
class Launch:
    """One vLLM start: its arguments and environment, as far as they are known without running anything.

    A variable that nobody assigned stays in the text as `$NAME` and is listed in `unresolved`.
    """

    source: str  # for people: "start.sh:14", "compose.yaml, service llm", "pid 4242", "command line"
    entry: EntryPoint
    arguments: tuple[str, ...]  # those after the entry point, as in vLLM's own argv[1:] (without "serve")
    environment: tuple[tuple[str, str], ...] = ()  # variables that this launch sets or exports, in order, last one wins
    image: str | None = None  # the container image, where there is one
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    in_front: tuple[str, ...] = ()  # options before the start itself; no shell runs a command that begins so
    otherwise: tuple[Launch, ...] = ()  # the same start with the values of other branches of its script
    vllm: tuple[str, str] | None = None  # the version, or range of them, that its surroundings name, and the place that does
    shm: str | None = None  # of a `docker run` container: the size of its /dev/shm, or its owner


@dataclass(frozen=True, slots=True)
class Container:
    """One container to be started; `entry` is None where the image's own entry point runs."""

    image: str | None
    entry: tuple[str, ...] | None
    arguments: tuple[str, ...]
    environment: Environment = ()
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shm: str | None = None


def serves_vllm(image: str) -> bool:
    """True if the image's name, without tag and digest, says that it is a vLLM server."""
    name = image.split("@", 1)[0]
    path, slash, last = name.rpartition("/")
    name = (path + slash + last.split(":", 1)[0]).lower()
    return "vllm" in name and not any(word in name for word in _PROGRAMS["images beside vLLM"])


def container_of_run(words: Sequence[str], environment: Iterable[tuple[str, str]]) -> Container | None:
    """Returns the container that the words after `docker run` start; None where they name no image."""
    host, at = dict(environment), 0
    container = Container(None, None, ())
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        option, given, value = words[at].partition("=")
        at += 1
        if option == "--":
            break
        if not option.startswith("--"):
            option, value, given = _short(words[at - 1])
        if not given and option not in _PROGRAMS["switches of run"]:
            value = words[at] if at < len(words) else ""
            at += 1
        if option in ("-e", "--env"):
            name, is_set, text = value.partition("=")
            if not is_set and name not in host:
                container = replace(container, unresolved=(*container.unresolved, name))
            pair = (name, text if is_set else host.get(name, f"${name}"))  # `-e NAME` passes on the caller's value
            container = replace(container, environment=(*container.environment, pair))
        elif option == "--entrypoint":
            container = replace(container, entry=(value,) if value else ())
        elif option == "--env-file":
            container = replace(container, notes=(*container.notes, f"the variables in {value} were not read"))
        elif option == "--ipc" or (option == "--shm-size" and container.shm is None):
            container = replace(container, shm=value)
    return replace(container, image=words[at], arguments=tuple(words[at + 1 :])) if at < len(words) else None


def version_in_image(image: str) -> str | None:
    """Returns the vLLM version in the tag of a vLLM image; None for another image or a tag such as latest."""
    tag = image.split("@", 1)[0].rpartition("/")[2].partition(":")[2]
    before = r"(?:.*vllm[_-])" if "lmcache/" in image else r"(?:.*vllm[_-])?"  # LMCache's own release comes first
    form = rf"{before}v?(0\.\d+(?:\.\d+){{0,2}}(?:\.?(?:post|rc)\d+)?)(?![\d.]).*"
    match = re.fullmatch(form, tag) if serves_vllm(image) else None
    return (match.group(1) if match.group(1).count(".") > 1 else f"{match.group(1)}.0") if match else None


def _short(word: str) -> tuple[str, str, str]:
    """Returns the option in `-it`, `-eA=B`, `-p` or `-itp`, its attached value, and "" if its value is the next word."""
    for at, letter in enumerate(word[1:], 1):
        if letter not in _SHORT_SWITCHES:
            value = word[at + 1 :].removeprefix("=")
            return f"-{letter}", value, value
    return word, "", "all switches"


def find_launch(
    words: Sequence[str], environment: Iterable[tuple[str, str]], source: str, unresolved: Iterable[str] = ()
) -> Launch | None:
    """Finds the vLLM start in these words, or None; words in front of it count as a wrapper."""
    words = tuple(words)
    found = _settled(_find(words, tuple(environment), source, _NESTED_MAX), unresolved)
    if found is None or not words[0].startswith("-") or _start_at(words, 0):
        return found
    # The first word is an option without a wrapper before it.
    return replace(found, in_front=words[: next((at for at in range(len(words)) if _start_at(words, at)), 1)])


def find_in_container(container: Container, source: str) -> Launch | None:
    return _settled(_find_in_container(container, source, _NESTED_MAX), ())


def _settled(launch: Launch | None, unresolved: Iterable[str]) -> Launch | None:
    """Returns the launch with the missing variables that it uses; a `-v $HOME/cache:/cache` in front of it is not used."""
    if launch is None:
        return None
    environment: list[tuple[str, str]] = []
    for name, value in launch.environment:
        if name == "PYTHONPATH" and "plimsoll_inside-" in value:
            # The wheel that a generated script adds is no part of the command: it would be added twice.
            value = ":".join(part for part in value.split(":") if not _OUR_WHEEL.fullmatch(part))  # noqa: PLW2901
        environment += [(name, value)] if (name, value) != ("PYTHONPATH", "") else []
    texts = [*launch.arguments, *(value for _, value in environment)]
    seen = {name for text in texts if "$" in text for name in re.findall(_REFERENCE, text)}
    # Jinja or the like fills in `{{ name }}` later.
    templated = [found for text in texts for found in re.findall(r"(?:^|=)(\{\{.*\}\})$", text)]
    names = dict.fromkeys((*unresolved, *launch.unresolved, *templated))
    computed = [name for name in names if not re.fullmatch(_REFERENCE, f"${name}")][:_COMPUTED_MAX]
    seen.update(name for name in computed if any(name in text for text in texts))
    notes = launch.notes
    if any(word != word.lstrip() and word.lstrip()[:1] in ("", "-") and word for word in launch.arguments):
        notes += ("an argument starts with a blank: a backslash that is not the last character of its line does that",)
    unseen = tuple(name for name in names if name in seen)
    return replace(launch, environment=tuple(environment), unresolved=unseen, notes=notes)


def _find(words: tuple[str, ...], environment: Environment, source: str, nested: int) -> Launch | None:
    if not any("vllm" in word.lower() for word in words):
        return None
    own: list[tuple[str, str]] = list(environment)
    pin: tuple[str, str] | None = None  # uv run --with vllm==0.24.0 vllm serve ...
    leading = True  # only wrappers so far: a program that only mentions vLLM would be the one that runs
    for at, word in enumerate(words[:_WRAPPER_MAX]):
        name = word.rpartition("/")[2]
        is_value = at > 0 and words[at - 1].startswith("-")
        if start := _start_at(words, at):
            entry, first, notes = start
            return Launch(source, entry, words[first:], tuple(own), notes=notes, vllm=pin)
        if leading and not is_value and name in _PROGRAMS["mention vLLM"]:
            return None
        rest = words[at + 1 :]
        if name in _PROGRAMS["shells"] and (script := _script_given(rest)) is not None:
            return _find_in_script(script, tuple(own), source, nested)
        if (
            name in _PROGRAMS["pass a line to a shell"]
        ):  # one of its arguments is a command line in itself: tmux new -d 'vllm serve ...'
            line = " ".join(rest) if name == "eval" else next((word for word in rest if "vllm" in word and " " in word), None)
            if line is not None:
                return _find_in_script(line, tuple(own), source, nested)
        if name in _PROGRAMS["engines"]:  # docker [options] [container] run ...
            others = _PROGRAMS["other subcommands of engines"]
            run = next((place for place, word in enumerate(rest[:8]) if word in ("run", "create", *others)), None)
            if run is not None and rest[run] not in others:
                container = container_of_run(rest[run + 1 :], own)
                return None if container is None else _find_in_container(container, source, nested)
        if name == "env":
            own = _after_env(rest, own)
        assignment = re.fullmatch(_ASSIGNMENT, word) if "=" in word else None
        if pinned := re.fullmatch(PIN, word) or re.fullmatch(rf"(?:--[\w-]+=)?{RANGE}", word):
            pin = (pinned.group(1), "pinned in the command")
        elif assignment:
            own.append((assignment.group(1), assignment.group(2)))
        leading = leading and bool(
            is_value or assignment or word.startswith("-") or name in _PROGRAMS["wrappers"] or name.rstrip("smhd").isdigit()
        )
    return None


def _start_at(words: tuple[str, ...], at: int) -> tuple[EntryPoint, int, tuple[str, ...]] | None:
    """Returns the entry point that starts at this word, where its arguments begin, and notes on it; else None."""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    name = word.rpartition("/")[2]
    if following == "serve" and (name == "vllm" or re.fullmatch(_NAMED_SO, word) or f"/{word}".endswith(_CLI_FILE)):
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
    """Returns the script behind `sh -c`, `bash -lc` or `bash -euo pipefail -c`; None where the shell runs a file."""
    for at, word in enumerate(words):
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word):
            return next((script for script in words[at + 1 :] if not script.startswith("-")), None)  # `bash -lc -- SCRIPT`
        if not word.startswith(("-", "+")) and not (at and re.fullmatch(r"[-+][a-zA-Z]*[oO]", words[at - 1])):
            return None
    return None


def _after_env(words: tuple[str, ...], environment: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the environment that `env -i` or `env -u NAME` leaves."""
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
    """Finds the first vLLM start in a script that is an argument of a shell."""
    if nested <= 0:
        return None
    for command in commands_in(text, environment):
        launch = _find(command.words, command.environment, source, nested - 1)
        if launch is not None:
            return replace(launch, unresolved=tuple(dict.fromkeys((*command.unresolved, *launch.unresolved))))
    return None


def _find_in_container(container: Container, source: str, nested: int) -> Launch | None:
    """Finds the start in the container's own command, or through the image's entry point."""
    image = container.image
    words = (*(container.entry or ()), *container.arguments)
    if container.entry is None and words[:1] == ("serve",) and image is not None and serves_vllm(image):
        words = ("vllm", *words)
    launch = _find(words, container.environment, source, nested)
    if launch is not None:
        notes = container.notes
        if container.entry is None and image is not None and re.search(r"(?:^|/)vllm-openai(?:[:@]|$)", image):
            notes += (TWICE,)
        unresolved = tuple(dict.fromkeys((*launch.unresolved, *container.unresolved)))
        return replace(launch, source=source, image=image, unresolved=unresolved, notes=notes + launch.notes, shm=container.shm)
    if image is None or container.entry is not None or not serves_vllm(image):
        return None
    if container.arguments and re.fullmatch(_PROGRAM, container.arguments[0]):
        return None
    return Launch(
        source, EntryPoint.IMAGE, container.arguments, container.environment, image, container.unresolved, container.notes,
        shm=container.shm,
    )  # fmt: skip


def launches_named(options: Words, command_name: str) -> list[tuple[Launch, str]]:
    """Returns the starts that the user means, each with the folder to which its relative paths most likely refer."""
    pid: int | None = getattr(options, "pid", None)  # of commands that have --pid
    if pid is not None:
        if options.rest or options.verbatim:
            raise BadInput("--pid names a running server; give no command or file beside it")
        from plimsoll.launch.installed_vllm import launch_of_process  # the table of extension points, for --pid alone

        return [(launch_of_process(pid), "")]
    if options.verbatim is not None and options.rest:
        raise BadInput(f"{options.rest[0]!r} stands in front of --; give a file or a command, not both")
    command = options.verbatim if options.verbatim is not None else options.rest
    if not command:
        raise BadInput(f"nothing to look at; give a command, a file, --pid N or - (plimsoll {command_name} --help)")
    if options.verbatim is None and len(command) == 1 and not any(blank in command[0] for blank in " \t\n"):
        word = command[0]
        stdin = sys.stdin.buffer if word == "-" and sys.stdin is not None else None
        folder = "" if word == "-" else dirname(word)
        # A model alone: a folder with a config.json, or no file and a name like the hub's.
        is_folder = isfile(join(word, "config.json"))
        owner, _, name = word.partition("/")
        is_id = all(part[:1].isalnum() and part.isascii() and "/" not in part for part in (owner, name))
        if is_folder or (is_id and not exists(word) and not word.endswith(_FILES)):
            what = "the folder of a model" if is_folder else "no such file"
            raise BadInput(f"{word}: {what}; a model goes behind `vllm serve`: vllm serve {word}")
        from plimsoll.launch.files import read_launches, with_requirement  # which finds its starts with this module

        return [(with_requirement(launch, folder), folder) for launch in read_launches(word, stdin)]
    if len(command) == 1:
        return [(launch, "") for launch in launches_in(command[0])]
    launch = find_launch(command, (), "command line")
    if launch is None or launch.in_front:
        raise BadInput(_not_a_command(command, options, command_name, has_start=launch is not None))
    return [(launch, "")]


def engine_meant(launch: Launch, asked: str | None, installed: str | None = None) -> Engine:
    """Returns a launch's vLLM: the requested one, else by its image or surroundings, else the installed, else the newest."""
    if asked is not None:
        return engine_named(asked)
    named = [launch.vllm] if launch.vllm else []
    if launch.image and (version := version_in_image(launch.image)):
        named.insert(0, (version, f"the tag of the image {launch.image}"))
    elif launch.image and serves_vllm(launch.image) and "nightly" in launch.image.rpartition(":")[2]:
        named.insert(0, ("nightly", f"the tag of the image {launch.image}"))
    if installed is not None and not launch.image:  # an image brings its own
        named.append((installed, "installed here"))
    for version, because in named:
        try:
            if version[:1] in "<>=!~":
                if installed is not None and not launch.image and allows(version, installed):
                    continue
                release = next(release for release in reversed(releases()) if allows(version, release))
                return replace(engine_named(release), because=f"the newest release in vllm{version}, {because}")
            return replace(engine_named(version, f"{launch.source}:"), because=because)
        except (BadInput, ValueError, StopIteration):
            continue  # a number that is no version of vLLM, or a range without a release, decides nothing
    return engine_named(None)


def _not_a_command(words: tuple[str, ...], options: Words, command_name: str, *, has_start: bool) -> str:
    """Returns why words start no vLLM: an unknown option, more than one file, or no vLLM among them."""
    option = words[0] if has_start else next((word for word in words if word.startswith("-") and word != "-"), None)
    if option is not None and (has_start or words[0] == option or isfile(words[0])):
        behind = "; vLLM's own flags go behind `vllm serve MODEL`" if has_start else ""
        return f"{option} is no option of plimsoll {command_name}{meant(option, options)} (--help lists them){behind}"
    if isfile(words[0]):
        return f"{words[0]} is a file, and {words[1]!r} stands beside it: one file at a time"
    shown = " ".join(words[:3]) + (" ..." if len(words) > 3 else "")
    return f"no vLLM start in `{shown}`; it begins with `vllm serve`, `python -m vllm...` or `docker run`"


def launches_in(text: str) -> list[Launch]:
    """Returns the starts in a whole command in one pair of quotes."""
    found = [
        launch
        for command in commands_in(text)
        if (launch := find_launch(command.words, command.environment, "command line", command.unresolved)) is not None
    ]
    if not found:
        raise BadInput("no vLLM start command in the quoted text")
    return found


class ConfigFile(NamedTuple):
    """The file named by `--config`, and its entries; None if it cannot be read here."""

    name: str
    entries: Mapping[str, object] | None


def config_of(launch: Launch, folder: str) -> ConfigFile | None:
    """Reads the file that `--config FILE` or `--config=FILE` names; None if the launch names none, or one with a variable."""
    words = launch.arguments
    place = next(
        (at for at, word in enumerate(words) if word.startswith("--config=") or (word == "--config" and words[at + 1 :])), None
    )
    if place is None:
        return None
    name = words[place].partition("=")[2] if "=" in words[place] else words[place + 1]
    if "$" in name:
        return None
    for path in (name, join(folder, name)):
        if isfile(path):
            from plimsoll.launch.files import read_vllm_config

            return ConfigFile(path, read_vllm_config(path))
    return ConfigFile(name, None)


_NEGATIVE_NUMBER = r"^-\d+$|^-\d*\.\d+$"  # argparse's own
_TRUE_FALSE = ("true", "false")
_JSON_CHARACTERS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Argument:
    typed: str  # the name as typed, with its dashes and without its value
    spelling: str  # the option string it stands for: underscores made dashes, prefix completed
    values: tuple[str, ...] = ()
    row: FlagRow | None = None  # None: this release has no such flag
    is_negated: bool = False  # --no-...
    path: str = ""  # the dotted key, for JSON arguments
    candidates: tuple[str, ...] = ()  # several flags begin like this: argparse refuses
    lacks_value: bool = False
    has_equals: bool = False  # --name=value
    source: str = ""  # the file it came from, if not the command line
    is_opaque: bool = False  # not a flag: a variable nobody assigned, which may hold any number of flags


@dataclass(frozen=True, slots=True)
class CommandLine:
    model: str | None
    arguments: tuple[Argument, ...]
    leftovers: tuple[str, ...] = ()  # words that belong to no flag; vLLM refuses them

    @property
    def given(self) -> frozenset[str]:
        """The flags that the command sets, by their full names; a switch counts only if it ends up on."""
        is_on: dict[str, bool] = {}
        for argument in self.arguments:
            if argument.row is not None:  # a switch may be off in words that vLLM refuses: `--enable-lora=false`
                says_false = not argument.row.takes_value and "".join(argument.values[:1]).lower() == "false"
                is_on[argument.row.name] = not argument.is_negated and not says_false
        return frozenset(name for name, on in is_on.items() if on)


class UnresolvedWords:
    """Recognises words whose text depends on an unseen value."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        # The text has a name as `$NAME`, and a command substitution or a unit's specifier as written.
        self.markers = tuple(name if name[:1] in ("$", "%", "`", "<", "{") else f"${name}" for name in names if name)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and any(m in word or m.replace("$", "${", 1) in word for m in self.markers)

    def fills(self, word: str) -> bool:
        """True if a pod's command fills in a part of the word, written `$(NAME)`, which in a shell would run a command."""
        return any(f"{m.replace('$', '$(', 1)})" in word for m in self.markers)

    def is_whole(self, word: str) -> bool:
        """True if the word is nothing but such a variable."""
        return any(word in (marker, f"${{{marker[1:]}}}") for marker in self.markers)


def read_command_line(
    words: Sequence[str], release: str, *, takes_model: bool = True, unseen: UnresolvedWords | None = None
) -> CommandLine:
    """Sorts the words into flags, their values and the model, by the rules of that release's parser."""
    return _ArgumentParser(words, release, takes_model=takes_model, unseen=unseen or UnresolvedWords()).run()


def arguments_from_config(config: Mapping[str, object], release: str, name: str) -> CommandLine:
    """Reads a `--config` file's entries as vLLM does; `false` becomes a negated argument, which vLLM drops."""
    words: list[str] = []
    off: list[str] = []
    for key, value in config.items():
        flag = f"--{key}"
        if isinstance(value, bool):
            (words if value else off).append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif isinstance(value, dict):
            words += [flag, _json(value, name)]
        else:
            words += [flag, str(value)]
    line = read_command_line(words, release)
    arguments = [replace(argument, source=name) for argument in line.arguments]
    for flag in off:
        row = flags_of(release).get(_normal(flag))
        arguments.append(Argument(flag, _normal(flag), row=row, is_negated=True, source=name))
    return replace(line, arguments=tuple(arguments))


def _json(value: object, name: str) -> str:
    """Returns a nested entry as JSON; refuses a file whose aliases multiply before it grows."""
    text = ""
    for chunk in json.JSONEncoder().iterencode(value):
        text += chunk
        if len(text) > _JSON_CHARACTERS_MAX:
            raise TooLarge(f"{name}: an entry grows beyond {_JSON_CHARACTERS_MAX // 1024} KiB")
    return text


def _optimization(words: Sequence[str], known: Mapping[str, FlagRow], release: str) -> list[str]:
    """Rewrites `-O3`, `-O=3` and `-O 3`, the optimisation level; until 0.11.2 short for the compilation configuration."""
    if "-O" in known:
        return [f"-O={w[2:].removeprefix('=')}" if w.startswith("-O") and w[2:3] not in ("", ".") else w for w in words]
    done = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "-O" and following in ("0", "1", "2", "3"):
            done.append("--optimization-level")
        elif word.startswith("-O.") and Behaviour.DOTTED_O.is_in(release):
            done.append(word.replace("-O", "-cc", 1))
        elif word.startswith("-O") and word != "-O":
            done.append(f"--optimization-level={word[3:] if word[2] == '=' else word[2:]}")
        else:
            done.append(word)
    return done


class _ArgumentParser:
    """One pass over the words, left to right."""

    def __init__(self, words: Sequence[str], release: str, *, takes_model: bool, unseen: UnresolvedWords) -> None:
        self.known = flags_of(release)
        self.given = words
        self.words = _optimization(words, self.known, release)
        self.takes_model = takes_model
        self.unseen = unseen
        self.position = 0
        self.model: str | None = None
        self.model_by_flag: str | None = None
        self.doubtful: int | None = None  # the argument whose value may be the model
        self.arguments: list[Argument] = []
        self.leftovers: list[str] = []

    def run(self) -> CommandLine:
        options_over = False
        while self.position < len(self.words):
            word = self.words[self.position]
            self.position += 1
            if not options_over and self._is_option(word):
                if word == "--":
                    options_over = True
                else:
                    self._option(word)
            elif self.takes_model and self.model is None:
                self.model = word
                last = self.arguments[-1] if self.arguments else None
                if last is not None and last.row is None and not last.values and not last.has_equals and not last.is_opaque:
                    self.doubtful = len(self.arguments) - 1
            elif self.unseen.is_whole(word):
                self.arguments.append(Argument(word, word, is_opaque=True))
            else:
                self.leftovers.append(word)
        if self.doubtful is not None and self.leftovers and self.model is not None:
            # Another word can be the model, so the first one was the value of an unknown flag.
            self.arguments[self.doubtful] = replace(self.arguments[self.doubtful], values=(self.model,))
            self.model = self.leftovers.pop(0)
        if self.model_by_flag is not None:
            # vLLM makes `--model X` the positional argument; a second one is then left over.
            if self.takes_model and self.model is not None:
                self.leftovers.insert(0, self.model)
            self.model = self.model_by_flag
        return CommandLine(self.model, tuple(self.arguments), tuple(self.leftovers))

    def _is_option(self, word: str) -> bool:
        """Argparse's own test of whether a word is a flag."""
        if not word.startswith("-") or len(word) == 1:
            return False
        row, _, candidates = self._resolve(_normal(word.split("=", 1)[0]).split(".", 1)[0])
        if row is not None or candidates:
            return True
        return not re.match(_NEGATIVE_NUMBER, word) and " " not in word

    def _resolve(self, name: str) -> tuple[FlagRow | None, bool, tuple[str, ...]]:
        """Returns the row of a name, True for its `--no-` form, and the candidates if it is ambiguous."""
        if name in self.known:
            return self.known[name], False, ()
        negated = self.known.get("--" + name.removeprefix("--no-")) if name.startswith("--no-") else None
        if negated is not None and negated.kind == "on-off":
            return negated, True, ()
        begun: dict[str, tuple[FlagRow, bool]] = {}
        for spelling, row in self.known.items():
            if spelling.startswith(name):
                begun[spelling] = (row, False)
            negation = f"--no-{spelling.removeprefix('--')}"  # short names have none
            if row.kind == "on-off" and spelling.startswith("--") and negation.startswith(name):
                begun[negation] = (row, True)
        if len(begun) == 1:
            row, is_negated = next(iter(begun.values()))
            return row, is_negated, ()
        return None, False, tuple(sorted(begun))

    def _option(self, word: str) -> None:
        meant, equals, inline = word.partition("=")
        typed = self.given[self.position - 1].partition("=")[0]
        name, dot, path = _normal(meant).partition(".")
        row, is_negated, candidates = self._resolve(name)
        spelling = row.name if row is not None else name
        argument = Argument(typed, spelling, row=row, is_negated=is_negated, path=path, candidates=candidates)
        if equals:
            # With `=` argparse takes exactly this one value, even if more could follow.
            argument = replace(argument, values=(inline,), has_equals=True)
        elif dot:
            # vLLM joins a dotted key with the next word, also one that begins with a dash.
            argument = replace(argument, values=tuple(self.words[self.position : self.position + 1]))
            argument = replace(argument, lacks_value=not argument.values)
            self.position += 1
        elif not is_negated:
            argument = self._with_values(argument, self._arity(argument))
        if row is not None and row.name == "--model" and not dot and argument.values:
            self.model_by_flag = argument.values[0]
        self.arguments.append(argument)

    def _arity(self, argument: Argument) -> int | str:
        row = argument.row
        if row is None and argument.candidates:
            row = self.known.get(argument.candidates[0])
        elif row is None:
            past = history_of(argument.spelling)
            if not past:
                # An unknown flag. A word after it is most likely its value, unless no other word is left for the model.
                return 0 if self.takes_model and self.model is None else "?"
            row = past[-1]
        if row is None:
            return 0
        if row.takes_value:
            return 1 if row.nargs is None else row.nargs
        # The word after a switch means on or off if the switch once took it, or if it can be nothing else.
        word = self.words[self.position].lower() if self.position < len(self.words) else ""
        took_it = any(past.kind in ("true-false", "bool") for past in history_of(row.name))
        is_free = argument.row is not None and not (self.takes_model and self.model is None)
        return 1 if word in _TRUE_FALSE and (took_it or is_free) else 0

    def _with_values(self, argument: Argument, arity: int | str) -> Argument:
        limit = {"?": 1, "+": len(self.words), "*": len(self.words)}.get(str(arity), arity)
        taken: list[str] = []
        while len(taken) < int(limit) and self.position < len(self.words):
            word = self.words[self.position]
            if self._is_option(word):
                break
            taken.append(word)
            self.position += 1
        short = (isinstance(arity, int) and len(taken) < arity) or (arity == "+" and not taken)
        return replace(argument, values=tuple(taken), lacks_value=short)


def _normal(name: str) -> str:
    """Replaces underscores by dashes, up to the first dot, as vLLM does."""
    head, dot, path = name.partition(".")
    return head.replace("_", "-") + dot + path if name.startswith("--") else name

"""Recognises a vLLM start in a list of words or in a container, whatever wrappers stand in front of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from plimsoll.launch.shell_script import commands_in

Environment = tuple[tuple[str, str], ...]

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

# Options of `docker run`, podman and nerdctl that take no value; every other one does.
_SWITCHES = frozenset(
    "--detach --interactive --tty --rm --privileged --init --publish-all --read-only --no-healthcheck --oom-kill-disable"
    " --sig-proxy --disable-content-trust --quiet --replace --rmi --no-hosts --env-host --tls-verify --help".split()
)
_SHORT_SWITCHES = frozenset("ditPq")
# Images that belong to vLLM's surroundings and do not serve a model.
_BESIDE = ("router", "exporter", "proxy", "operator", "controller", "dashboard", "bench")
# A first argument that is a program of its own: the image's entry point hands over to it, or would choke on it.
_PROGRAM = r"(?:.*/)?(?:(?:ba|da|a|z|k)?sh|vllm|python[0-9.]*|env|sleep|tail|nvidia-smi|ray|torchrun|pip|ls|cat|echo|tini)"


class EntryPoint(StrEnum):
    """The ways people start the OpenAI-compatible server."""

    SERVE = "vllm serve"
    API_SERVER = "python -m vllm.entrypoints.openai.api_server"
    IMAGE = "container image"  # the image's own entry point: the arguments are those of one of the two above


class Launch(NamedTuple):
    """One vLLM start: its arguments and environment, as far as they can be known without running anything.

    A variable that nobody assigned stays in the text as `$NAME` and is listed in `unresolved`.
    """

    source: str  # for people: "start.sh:14", "compose.yaml, service llm", "pid 4242", "command line"
    entry: EntryPoint
    arguments: tuple[str, ...]  # what follows the entry point, as vLLM's own argv[1:] would be (without "serve")
    environment: tuple[tuple[str, str], ...] = ()  # what this launch sets or exports, in order, last one wins
    image: str | None = None  # the container image, where there is one
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    in_front: tuple[str, ...] = ()  # options that stand before the start itself; no shell runs a command that begins so
    otherwise: tuple[Launch, ...] = ()  # the same start with the values that other branches of its script would give


class Container(NamedTuple):
    """One container to be started; `entry` is None where the image's own entry point runs."""

    image: str | None
    entry: tuple[str, ...] | None
    arguments: tuple[str, ...]
    environment: Environment = ()
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def serves_vllm(image: str) -> bool:
    """True if the image's name, without tag and digest, says that it is a vLLM server."""
    name = image.split("@", 1)[0]
    path, slash, last = name.rpartition("/")
    name = (path + slash + last.split(":", 1)[0]).lower()
    return "vllm" in name and not any(word in name for word in _BESIDE)


class _Options:
    """The options of `docker run` in front of the image."""

    def __init__(self) -> None:
        self.entry: tuple[str, ...] | None = None
        self.environment: list[tuple[str, str]] = []
        self.unresolved: list[str] = []
        self.notes: list[str] = []

    def take(self, option: str, value: str, host: dict[str, str]) -> None:
        if option in ("-e", "--env"):
            name, given, text = value.partition("=")
            if not given:  # `-e NAME` hands on what the caller has
                text = host.get(name, f"${name}")
                self.unresolved += [] if name in host else [name]
            self.environment.append((name, text))
        elif option == "--entrypoint":
            self.entry = (value,) if value else ()
        elif option == "--env-file":
            self.notes.append(f"the variables in {value} were not read")


def container_of_run(words: Sequence[str], environment: Iterable[tuple[str, str]]) -> Container | None:
    """The container that the words behind `docker run` start; None where they name no image."""
    host, options, at = dict(environment), _Options(), 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        option, given, value = words[at].partition("=")
        at += 1
        if option == "--":
            break
        if not option.startswith("--"):
            option, value, given = _short(words[at - 1])
        if not given and option not in _SWITCHES:
            value = words[at] if at < len(words) else ""
            at += 1
        options.take(option, value, host)
    if at >= len(words):
        return None
    return Container(
        image=words[at],
        entry=options.entry,
        arguments=tuple(words[at + 1 :]),
        environment=tuple(options.environment),
        unresolved=tuple(options.unresolved),
        notes=tuple(options.notes),
    )


def _short(word: str) -> tuple[str, str, str]:
    """The option, its attached value and whether nothing follows, for `-it`, `-eA=B`, `-p` or `-itp`."""
    for at, letter in enumerate(word[1:], 1):
        if letter not in _SHORT_SWITCHES:
            value = word[at + 1 :].removeprefix("=")
            return f"-{letter}", value, value
    return word, "", "all switches"


def find_launch(
    words: Sequence[str], environment: Iterable[tuple[str, str]], source: str, unresolved: Iterable[str] = ()
) -> Launch | None:
    """The vLLM start in these words, or None; what stands in front of it is taken as a wrapper."""
    found = _settled(_find(tuple(words), tuple(environment), source, _NESTED_MAX), unresolved)
    return found if found is None else found._replace(in_front=_options_in_front(tuple(words)))


def _options_in_front(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the words before the start if the first is an option: no wrapper's, for none has been named yet."""
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
    """Returns the script behind `sh -c`, `bash -lc` or `bash -euo pipefail -c`; None where the shell runs a file."""
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
    """Returns the words behind `run` or `create` in `docker [options] [container] run ...`; None for any other subcommand."""
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
    for command in commands_in(text, environment):
        launch = _find(command.words, command.environment, source, nested - 1)
        if launch is not None:
            return launch._replace(unresolved=tuple(dict.fromkeys((*command.unresolved, *launch.unresolved))))
    return None


def _find_in_container(container: Container, source: str, nested: int) -> Launch | None:
    """The start in the container's own command, or through the image's entry point."""
    image = container.image
    launch = _find((*(container.entry or ()), *container.arguments), container.environment, source, nested)
    if launch is not None:
        notes = container.notes
        if container.entry is None and image is not None and re.search(r"(?:^|/)vllm-openai(?:[:@]|$)", image):
            notes += ("vllm-openai starts the server by itself: the start command given to it is read as arguments",)
        unresolved = tuple(dict.fromkeys((*launch.unresolved, *container.unresolved)))
        return launch._replace(source=source, image=image, unresolved=unresolved, notes=notes + launch.notes)
    if image is None or container.entry is not None or not serves_vllm(image):
        return None
    if container.arguments and re.fullmatch(_PROGRAM, container.arguments[0]):
        return None
    return Launch(
        source, EntryPoint.IMAGE, container.arguments, container.environment, image, container.unresolved, container.notes
    )

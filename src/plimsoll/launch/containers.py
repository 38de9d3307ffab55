"""What runs in a container: `docker run` command lines, and an image with its entry point and command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.launches import EntryPoint, Launch

Environment = tuple[tuple[str, str], ...]
Recognise = Callable[[Sequence[str], Environment], Launch | None]

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


class Container(NamedTuple):
    """One container to be started; `entry` is None where the image's own entry point runs."""

    image: str | None
    entry: tuple[str, ...] | None
    arguments: tuple[str, ...]
    environment: Environment = ()
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def serves_vllm(image: str) -> bool:
    """Whether the image's name, without tag and digest, says that it is a vLLM server."""
    name = image.split("@", 1)[0]
    path, slash, last = name.rpartition("/")
    name = (path + slash + last.split(":", 1)[0]).lower()
    return "vllm" in name and not any(word in name for word in _BESIDE)


def launch_in(container: Container, source: str, recognise: Recognise) -> Launch | None:
    """The vLLM start in a container: in its own command, or through the image's entry point."""
    words = (*(container.entry or ()), *container.arguments)
    launch = recognise(words, container.environment)
    notes = container.notes
    image = container.image
    if launch is not None:
        if container.entry is None and image is not None and re.search(r"(?:^|/)vllm-openai(?:[:@]|$)", image):
            notes += ("vllm-openai starts the server by itself: the start command given to it is read as arguments",)
        return Launch(
            source=source,
            entry=launch.entry,
            arguments=launch.arguments,
            environment=launch.environment,
            image=image,
            unresolved=tuple(dict.fromkeys((*launch.unresolved, *container.unresolved))),
            notes=notes + launch.notes,
        )
    if image is None or container.entry is not None or not serves_vllm(image):
        return None
    if container.arguments and re.fullmatch(_PROGRAM, container.arguments[0]):
        return None
    return Launch(
        source=source,
        entry=EntryPoint.IMAGE,
        arguments=container.arguments,
        environment=container.environment,
        image=image,
        unresolved=container.unresolved,
        notes=notes,
    )


class _Options:
    """What the options in front of the image say."""

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


# Fills `$NAME` and `${NAME:-default}` into a text, as Compose files and Dockerfiles have them.

_MARK = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(:?[-+?])?)")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]")
_BRACE = re.compile(r"[{}]")
_DEPTH_MAX = 4
_BRACES_MAX = 16


class Growth:
    """How much text variables may still add: a few lines of `ENV A=$A$A` would otherwise fill the memory."""

    def __init__(self, characters_max: int = 4 * 1024 * 1024) -> None:
        self._left = characters_max

    def add(self, value: str) -> str:
        """The value itself, once it is counted."""
        self._left -= len(value) + 1
        if self._left < 0:
            raise TooLarge("the variables multiply beyond what is read")
        return value


def interpolate(text: str, variables: Mapping[str, str], growth: Growth, depth: int = 0) -> tuple[str, list[str]]:
    """The text with what is known filled in, and the names that are not; `$$` stands for one `$`."""
    done: list[str] = []
    missing: list[str] = []
    at = 0
    while found := _MARK.search(text, at):
        done.append(text[at : found.start()])
        at = found.end()
        escaped, plain, name, operator = found.groups()
        argument = ""
        if name is not None:
            end = _closing(text, at)
            if end < 0 or (operator is None and end != at):
                done.append(found.group())
                continue
            argument, at = text[at:end], end + 1
        if escaped:
            done.append("$")
            continue
        value = variables.get(plain or name)
        absent = value is None or (bool(operator) and operator.startswith(":") and not value)
        if operator and operator[-1] != "?" and absent == (operator[-1] == "-"):
            if depth < _DEPTH_MAX:
                argument, inner = interpolate(argument, variables, growth, depth + 1)
                missing += inner
            done.append(argument)
        elif operator and operator[-1] == "+":
            continue
        elif value is None:
            missing.append(plain or name)
            done.append(f"${{{name}}}" if name and _IDENTIFIER.match(text, at) else f"${plain or name}")
        else:
            done.append(growth.add(value))
    done.append(text[at:])
    return "".join(done), missing


def _closing(text: str, at: int) -> int:
    """Where the brace that is open at `at` closes, or -1; looks no further than a sane default is long and deep."""
    depth = 1
    for found in _BRACE.finditer(text, at, at + 2000):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
        if depth > _BRACES_MAX:
            break
    return -1


# Cuts a line into words where no shell does it: in Compose files and Dockerfiles.

_PART = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^ \t\r\n'\"\\]+)|([ \t\r\n]+)", re.DOTALL)
_ESCAPED = re.compile(r"\\([\"\\])")


def plain_words(text: str, where: str) -> list[str]:
    """The same words as `shlex.split` gives, whose time grows with the square of a word's length."""
    words: list[list[str]] = []
    at, ended = 0, True
    while at < len(text):
        found = _PART.match(text, at)
        if found is None:
            raise BadInput(f"{where}: a quote or backslash in the command is never finished")
        single, double, escaped, plain, blanks = found.groups()
        at = found.end()
        if blanks is None:
            if ended:
                words.append([])
            words[-1].append(_ESCAPED.sub(r"\1", double) if double is not None else single or escaped or plain or "")
        ended = blanks is not None
    return ["".join(parts) for parts in words]

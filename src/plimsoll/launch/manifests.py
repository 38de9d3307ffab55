"""Finds vLLM starts in Compose files and Kubernetes manifests, and reads their YAML: every scalar as it was written.

Not `safe_load`, because it would read `--max-model-len 1_000` as 1000 and `0.90` as 0.9, and because here an alias is a
second reference to the same object: a "billion laughs" file costs no more than its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.command_line import RUNTIME_ADDS, TEMPLATE_ADDS, Container, Launch, find_in_container, find_launch
from plimsoll.launch.shell_script import commands_in
from plimsoll.launch.shell_words import joined_words

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | bool | None"


class LinedMapping(dict[str, Tree]):
    """A mapping that knows the line of each of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


def mapping_at(tree: Tree, key: str) -> LinedMapping:
    found = tree.get(key) if isinstance(tree, dict) else None
    return found if isinstance(found, LinedMapping) else LinedMapping()


def text_at(tree: Tree, key: str) -> str | None:
    return _text(tree.get(key)) if isinstance(tree, dict) else None


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
        hint = "; it looks like a template: render it first" if "{{" in text or "{%" in text else ""
        raise BadInput(f"{name}{where}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    return builder.documents


class _Builder:
    """Puts the parser's events together, without recursion."""

    def __init__(self, name: str, *, booleans: bool) -> None:
        self._booleans = booleans
        self.documents: list[Tree] = []
        self._name = name
        self._nodes = 0
        self._anchors: dict[str, Tree] = {}
        # Open collections: the collection, the key that waits for its value, the anchor.
        self._open: list[tuple[LinedMapping | list[Tree], list[str], str | None]] = []

    def take(self, event: Any) -> None:
        kind = type(event).__name__
        line = event.start_mark.line + 1 if event.start_mark else 0
        if kind == "ScalarEvent":
            value: Tree = event.value
            if event.implicit[0] and value in _NULLS:  # neither quoted nor tagged
                value = None
            # A key is text, whatever it looks like.
            is_key = bool(self._open) and isinstance(self._open[-1][0], dict) and not self._open[-1][1]
            if self._booleans and event.implicit[0] and not is_key and value in _TRUE | _FALSE:
                value = value in _TRUE
            self._place(value, event.anchor, line)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            if len(self._open) >= _DEPTH_MAX:
                raise BadInput(f"{self._name}, line {line}: nested deeper than {_DEPTH_MAX} levels")
            self._open.append((LinedMapping() if kind == "MappingStartEvent" else [], [], event.anchor))
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            collection, _, anchor = self._open.pop()
            self._place(collection, anchor, line)
        elif kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise BadInput(f"{self._name}, line {line}: *{event.anchor} is not defined above it")
            self._place(self._anchors[event.anchor], None, line)
        elif kind == "DocumentStartEvent":
            self._anchors = {}

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
        elif key and key[0] != "<<":
            collection[key.pop()] = value
        elif key:
            key.clear()
            for merged in value if isinstance(value, list) else [value]:
                if not isinstance(merged, dict):
                    raise BadInput(f"{self._name}, line {line}: << merges mappings only")
                self._spend(len(merged), line)
                for name, inherited in merged.items():
                    collection.setdefault(name, inherited)
                    collection.lines.setdefault(name, line)
        elif isinstance(value, str) or value is None:
            key.append(value or "null")
            collection.lines[value or "null"] = line
        else:
            hint = "; it looks like a template: render it first" if isinstance(value, dict) else ""
            raise BadInput(f"{self._name}, line {line}: a key must be plain text{hint}")

    def _spend(self, nodes: int, line: int) -> None:
        self._nodes += nodes
        if self._nodes > _NODES_MAX:
            raise TooLarge(f"{self._name}, line {line}: more than {_NODES_MAX:,} values")


_HELM = re.compile(
    r"\{\{-?\s*(?:/\*|\$|\.(?:Values|Release|Chart|Capabilities|Files|Template)\b"
    r"|(?:include|toYaml|template|define|tpl|if|range|with|end|else)\b)"
)
LLM_SERVICE = "LLMInferenceService"
LLM_SERVICE_ARGUMENTS = "VLLM_ADDITIONAL_ARGS"  # the variable by which KServe's template takes further flags
_KUBERNETES_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_TO_BE_FILLED = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")  # by `envsubst`: Kubernetes itself leaves it as it is


@dataclass(frozen=True, slots=True)
class ManifestStart:
    """A vLLM start in a Compose file or Kubernetes manifest, with its surroundings."""

    launch: Launch
    body: dict[str, Tree]  # the service, or the container
    pod: dict[str, Tree]  # the whole Compose file, or the pod's specification
    kind: str  # "compose", or the nearest object's kind
    owner: dict[str, Tree] = field(default_factory=dict)  # the nearest object that has a kind and a name
    path: tuple[str, ...] = ()  # from that object to the container, list items by their number
    card: str = ""  # that a SkyPilot task asks for


def launches_in_manifest(text: str, name: str) -> list[Launch]:
    """Returns every vLLM start in a Compose file or Kubernetes manifest, in order; `name` is the file's, for people."""
    return [start.launch for start in starts_in_manifest(text, name)]


def starts_in_manifest(text: str, name: str) -> list[ManifestStart]:
    """Returns the same starts, each with its surroundings."""
    # Prometheus uses the same braces in its alerts.
    if (helm := _HELM.search(text)) and not re.search(r"^kind: *PrometheusRule *$", text, re.MULTILINE):
        line = text.count("\n", 0, helm.start()) + 1
        raise BadInput(f"{name}, line {line}: this is a Helm template; render it first with `helm template`")
    starts: list[ManifestStart] = []
    documents = documents_in(text, name)
    runtimes = dict(pair for document in documents for pair in _runtime_images(document))
    for document in documents:
        if isinstance(document, dict) and isinstance(document.get("services"), dict):
            starts += _in_compose(document, name)
        elif isinstance(document, dict) and isinstance(document.get("run"), str):
            starts += _in_task(document, name)
        else:
            starts += _in_kubernetes(document, name, runtimes)
    return starts


# Compose


def _in_compose(document: dict[str, Tree], name: str) -> Iterator[ManifestStart]:
    services = document["services"]
    assert isinstance(services, dict), "the caller looked"
    for service, body in services.items():
        if not isinstance(body, dict):
            continue
        source, missing = f"{name}, service {service}", list[str]()
        image, entry, command, listed = (
            _interpolated(body.get(key), missing) for key in ("image", "entrypoint", "command", "environment")
        )
        given = [each.partition("=") for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
        pairs: dict[str, Tree] = (
            listed if isinstance(listed, dict) else {n: text if is_set else None for n, is_set, text in given}
        )
        handed_on = [name for name, value in pairs.items() if not isinstance(value, str)]  # by whoever calls Compose
        container = Container(
            image=_text(image),
            entry=_compose_words(entry, source),
            arguments=_compose_words(command, source) or (),
            environment=tuple((name, value if isinstance(value, str) else f"${name}") for name, value in pairs.items()),
            unresolved=(*missing, *handed_on),
            notes=("the variables in env_file were not read",) if body.get("env_file") else (),
        )
        if launch := find_in_container(container, source):
            yield ManifestStart(launch, body, document, "compose")


def _interpolated(value: Tree, missing: list[str]) -> Tree:
    """Returns the value with Compose's own variables filled in; adds the names of those without a value to `missing`."""
    if isinstance(value, str):
        filled, names = interpolate(value)
        missing += names
        return filled
    if isinstance(value, list):
        return [_interpolated(each, missing) for each in value if isinstance(each, str)]
    if isinstance(value, dict):
        return {name: _interpolated(each, missing) if isinstance(each, str) else None for name, each in value.items()}
    return value


def _compose_words(value: Tree, source: str) -> tuple[str, ...] | None:
    """Returns a command: a list as it is, a string split as by Compose, which runs no shell."""
    if isinstance(value, list):
        return tuple(each for each in value if isinstance(each, str))
    return tuple(plain_words(value, source)) if isinstance(value, str) else None


# SkyPilot


def _accelerators(task: dict[str, Tree]) -> tuple[str, str]:
    """Returns the card of `accelerators:` (`H100:8`, `{H100: 8}`) and how many; empty words where it names no single one."""
    listed = mapping_at(task, "resources").get("accelerators")
    if isinstance(listed, dict) and len(listed) == 1:
        card, count = next(iter(listed.items()))
        return card, _text(count) or "1"
    card, _, count = (_text(listed) or "").partition(":")
    return card.strip(), count.strip() or ("1" if card else "")


def _in_task(document: dict[str, Tree], name: str) -> Iterator[ManifestStart]:
    """Yields the starts in the script of a SkyPilot task."""
    card, count = _accelerators(document)
    environment = [("SKYPILOT_NUM_GPUS_PER_NODE", count)] if count else []
    environment += [(n, value) for n, value in mapping_at(document, "envs").items() if isinstance(value, str)]
    above = document.lines["run"] if isinstance(document, LinedMapping) else 0
    for command in commands_in(_text(document["run"]) or "", environment):
        place = f"{name}:{above + command.line}"
        if launch := find_launch(command.words, command.environment, place, command.unresolved):
            yield ManifestStart(launch, document, document, "task", card=card)


# Kubernetes


def _in_kubernetes(document: Tree, name: str, runtimes: Mapping[str, str]) -> Iterator[ManifestStart]:
    """Walks the whole tree: whatever the kind, what matters hangs under `containers`, or under KServe's `model`."""
    waiting: list[tuple[Tree, dict[str, Tree], tuple[str, ...]]] = [(document, {}, ())]  # with the nearest object, and the way
    seen: set[int] = set()
    growth = TextBudget()
    while waiting:
        tree, owner, path = waiting.pop()
        if not isinstance(tree, (dict, list)) or id(tree) in seen:
            continue
        seen.add(id(tree))
        if isinstance(tree, dict):
            if isinstance(tree.get("kind"), str) and isinstance(tree.get("metadata"), dict):
                owner, path = tree, ()
            kind, names = text_at(owner, "kind") or "", mapping_at(owner, "metadata")
            place = f"{kind} {text_at(names, 'name') or text_at(names, 'generateName') or ''}".strip()
            where = f"{name}, {place}" if place else name
            found: list[tuple[Container, dict[str, Tree], str, tuple[str, ...]]] = []
            for key in ("initContainers", "containers"):
                containers = tree.get(key)
                for at, body in enumerate(containers if isinstance(containers, list) else ()):
                    if isinstance(body, dict):
                        own = body.get("name")
                        source = f"{where}, container {own}" if isinstance(own, str) else where
                        container = container_of(body, growth)
                        if kind == LLM_SERVICE and own == "main" and container.entry is None:
                            container = _llm_service(container, owner, source)
                        found.append((container, body, source, (key, str(at))))
            model = tree.get("model")
            if isinstance(model, dict) and isinstance(form := model.get("modelFormat"), dict):
                hints = (form.get("name"), model.get("runtime"), model.get("image"))
                if any(isinstance(hint, str) and "vllm" in hint.lower() for hint in hints):
                    container = container_of(model, growth)
                    notes = (*container.notes, RUNTIME_ADDS)
                    container = replace(container, image=container.image or "vllm", notes=notes)
                    found.append((container, model, f"{where}, model", ("model",)))
            for container, body, source, way in found:
                if launch := find_in_container(container, source):
                    # Each `$(NAME)` or `${NAME}` that is left in its arguments is missing.
                    left = [match.group(2) for word in launch.arguments for match in _KUBERNETES_REFERENCE.finditer(word)]
                    left += [name for word in launch.arguments for name in _TO_BE_FILLED.findall(word)]
                    launch = replace(launch, unresolved=tuple(dict.fromkeys((*launch.unresolved, *left))))
                    if way == ("model",):
                        launch = _in_runtime(launch, body, runtimes)
                    elif image := text_at(body, "image"):
                        launch = replace(launch, image=image)
                    yield ManifestStart(launch, body, tree, kind, owner, (*path, *way))
        children = list(tree.items()) if isinstance(tree, dict) else [(str(at), child) for at, child in enumerate(tree)]
        waiting += [(child, owner, (*path, key)) for key, child in reversed(children)]


def _llm_service(container: Container, owner: dict[str, Tree], source: str) -> Container:
    """Returns the container of KServe's LLMInferenceService: its template adds the model and the words of one variable."""
    model = mapping_at(owner.get("spec"), "model")
    named = text_at(model, "uri") or text_at(model, "name")
    more = plain_words(dict(container.environment).get(LLM_SERVICE_ARGUMENTS, ""), source)
    return replace(
        container,
        environment=tuple(pair for pair in container.environment if pair[0] != LLM_SERVICE_ARGUMENTS),
        image=container.image or "vllm",
        entry=("vllm", "serve"),
        arguments=((named or "/mnt/models").removeprefix("hf://"), *container.arguments, *more),
        notes=(*container.notes, TEMPLATE_ADDS),
    )


def _runtime_images(document: Tree) -> Iterator[tuple[str, str]]:
    """Yields the name and the image of a KServe serving runtime."""
    if not isinstance(document, dict) or document.get("kind") not in ("ServingRuntime", "ClusterServingRuntime"):
        return
    named, containers = text_at(document.get("metadata"), "name"), mapping_at(document, "spec").get("containers")
    for each in containers if isinstance(containers, list) else ():
        if named and isinstance(each, dict) and (image := text_at(each, "image")):
            yield named, image


def _in_runtime(launch: Launch, model: dict[str, Tree], runtimes: Mapping[str, str]) -> Launch:
    """Returns KServe's `predictor.model` with its runtime's vLLM: by the version, or by the image in the file."""
    if version := text_at(model, "runtimeVersion"):  # the tag that the runtime's image gets
        return replace(launch, image=None, vllm=(version.removeprefix("v"), f"KServe's runtimeVersion {version}"))
    return replace(launch, image=text_at(model, "image") or runtimes.get(text_at(model, "runtime") or ""))


def container_of(body: dict[str, Tree], growth: TextBudget | None = None) -> Container:
    """Reads a container of a Kubernetes manifest as the kubelet would start it."""
    growth = growth or TextBudget()
    environment: dict[str, str] = {}
    missing: list[str] = []
    listed = body.get("env")
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict) or not isinstance(name := each.get("name"), str):
            continue
        if "valueFrom" in each:
            environment[name] = f"${name}"
            missing.append(name)
        else:
            environment[name] = _filled(text_at(each, "value") or "", environment, growth)
    command = body.get("command")
    return Container(
        image=text_at(body, "image"),
        entry=_words(command, environment, growth) if command else None,
        arguments=_words(body.get("args"), environment, growth),
        environment=tuple(environment.items()),
        unresolved=tuple(missing),
        notes=("the variables in envFrom were not read",) if body.get("envFrom") else (),
    )


def _text(value: Tree) -> str | None:
    return value if isinstance(value, str) else None


def _words(value: Tree, environment: dict[str, str], growth: TextBudget) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(_filled(text, environment, growth) for each in listed if (text := _text(each)) is not None)


def _filled(text: str, environment: dict[str, str], growth: TextBudget) -> str:
    """Fills in `$(NAME)` if the container has the variable, else leaves it as it is, as the kubelet does."""

    def fill(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        return f"$({name})" if escaped else growth.add(environment.get(name, found.group()))

    return _KUBERNETES_REFERENCE.sub(fill, text)


# Variables in the texts of Compose files, and their commands cut into words without a shell.

_MARK = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(:?[-+?])?)")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]")
_BRACE = re.compile(r"[{}]")
_NESTED_MAX = 4
_BRACES_MAX = 16


class TextBudget:
    """Limits the text that variables add: a few lines of `ENV A=$A$A` would otherwise fill the memory."""

    def __init__(self, characters_max: int = 4 * 1024 * 1024) -> None:
        self._left = characters_max

    def add(self, value: str) -> str:
        """Counts the value and returns it; TooLarge beyond the limit."""
        self._left -= len(value) + 1
        if self._left < 0:
            raise TooLarge("the variables multiply beyond what is read")
        return value


def interpolate(text: str, depth: int = 0) -> tuple[str, list[str]]:
    """Returns the text with each variable's default in its place, and the names without one; `$$` means one `$`."""
    done: list[str] = []
    missing: list[str] = []
    at = 0
    while mark := _MARK.search(text, at):
        done.append(text[at : mark.start()])
        at = mark.end()
        escaped, plain, name, operator = mark.groups()
        argument = ""
        if name is not None:
            end = _closing(text, at)
            if end < 0 or (operator is None and end != at):
                done.append(mark.group())
                continue
            argument, at = text[at:end], end + 1
        if escaped:
            done.append("$")
        elif operator and operator[-1] == "-":
            if depth < _NESTED_MAX:
                argument, inner = interpolate(argument, depth + 1)
                missing += inner
            done.append(argument)
        elif not operator or operator[-1] == "?":
            missing.append(plain or name)
            done.append(f"${{{name}}}" if name and _IDENTIFIER.match(text, at) else f"${plain or name}")
    done.append(text[at:])
    return "".join(done), missing


def _closing(text: str, at: int) -> int:
    """Returns where the brace that is open at `at` closes, or -1; stops beyond any sane default's length and depth."""
    depth = 1
    for found in _BRACE.finditer(text, at, at + 2000):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
        if depth > _BRACES_MAX:
            break
    return -1


_PART = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^ \t\r\n'\"\\]+)", re.DOTALL)
_ESCAPED = re.compile(r"\\([\"\\])")


def plain_words(text: str, where: str) -> list[str]:
    """Returns the same words as `shlex.split`, whose time grows with the square of a word's length."""

    def read(found: re.Match[str]) -> str:
        single, double, escaped, plain = found.groups()
        return _ESCAPED.sub(r"\1", double) if double is not None else single or escaped or plain or ""

    return joined_words(text, _PART, read, f"{where}: a quote or backslash in the command is never finished")

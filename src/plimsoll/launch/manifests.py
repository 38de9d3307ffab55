"""Finds vLLM starts in Compose files and Kubernetes manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.launch.containers import Container, Growth, interpolate, plain_words
from plimsoll.launch.files import find_in_container
from plimsoll.launch.launches import Launch
from plimsoll.launch.yaml_tree import Tree, documents_in

_HELM = re.compile(
    r"\{\{-?\s*(?:/\*|\$|\.(?:Values|Release|Chart|Capabilities|Files|Template)\b"
    r"|(?:include|toYaml|template|define|tpl|if|range|with|end|else)\b)"
)
_KUBERNETES_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


def launches_in_manifest(text: str, name: str) -> list[Launch]:
    """Every vLLM start in a Compose file or Kubernetes manifest, in order; `name` is the file's, for people."""
    if helm := _HELM.search(text):
        line = text.count("\n", 0, helm.start()) + 1
        raise BadInput(f"{name}, line {line}: this is a Helm template; render it first with `helm template`")
    launches: list[Launch] = []
    for document in documents_in(text, name):
        if isinstance(document, dict) and isinstance(document.get("services"), dict):
            launches += _in_compose(document, name)
        else:
            launches += _in_kubernetes(document, name)
    return launches


# Compose


def _in_compose(document: dict[str, Tree], name: str) -> Iterator[Launch]:
    services = document["services"]
    assert isinstance(services, dict), "the caller looked"
    for service, body in services.items():
        if not isinstance(body, dict):
            continue
        source = f"{name}, service {service}"
        reader = _Compose(source)
        container = Container(
            image=reader.text(body.get("image")),
            entry=reader.words(body.get("entrypoint")),
            arguments=reader.words(body.get("command")) or (),
            environment=reader.environment(body.get("environment")),
            unresolved=tuple(reader.missing),
            notes=("the variables in env_file were not read",) if body.get("env_file") else (),
        )
        if launch := find_in_container(container, source):
            yield launch


class _Compose:
    """One service's texts, with Compose's own variables filled in."""

    def __init__(self, source: str) -> None:
        self.missing: list[str] = []
        self._source = source

    def text(self, value: Tree) -> str | None:
        if not isinstance(value, str):
            return None
        filled, missing = interpolate(value, {}, Growth())
        self.missing += missing
        return filled

    def words(self, value: Tree) -> tuple[str, ...] | None:
        """A command: a list as it stands, a string cut as Compose cuts it, which runs no shell."""
        if value is None or isinstance(value, dict):
            return None
        if isinstance(value, list):
            return tuple(text for each in value if (text := self.text(each)) is not None)
        return tuple(plain_words(self.text(value) or "", self._source))

    def environment(self, value: Tree) -> tuple[tuple[str, str], ...]:
        pairs: list[tuple[str, str]] = []
        listed: list[tuple[str, str | None]] = []
        if isinstance(value, dict):
            listed = [(name, self.text(each)) for name, each in value.items()]
        elif isinstance(value, list):
            for each in value:
                name, given, text = (self.text(each) or "").partition("=")
                listed.append((name, text if given else None))
        for name, each in listed:
            if each is None:  # handed on from whoever calls Compose
                self.missing.append(name)
            pairs.append((name, f"${name}" if each is None else each))
        return tuple(pairs)


# Kubernetes


class _Place(NamedTuple):
    """The nearest object with a kind and a name."""

    kind: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


def _in_kubernetes(document: Tree, name: str) -> Iterator[Launch]:
    """Walks the whole tree: whatever the kind, what matters hangs under `containers`."""
    waiting: list[tuple[Tree, _Place]] = [(document, _Place())]
    seen: set[int] = set()
    growth = Growth()
    while waiting:
        tree, place = waiting.pop()
        if not isinstance(tree, (dict, list)) or id(tree) in seen:
            continue
        seen.add(id(tree))
        children = tree
        if isinstance(tree, dict):
            place = _place_of(tree, place)
            for key in ("initContainers", "containers"):
                yield from _in_containers(tree.get(key), name, place, growth)
            if launch := _in_kserve_model(tree.get("model"), name, place, growth):
                yield launch
            children = list(tree.values())
        waiting += [(child, place) for child in reversed(children)]


def _place_of(tree: dict[str, Tree], outer: _Place) -> _Place:
    kind, metadata = tree.get("kind"), tree.get("metadata")
    if not isinstance(kind, str) or not isinstance(metadata, dict):
        return outer
    name = metadata.get("name") or metadata.get("generateName")
    return _Place(kind, name if isinstance(name, str) else "")


def _in_containers(containers: Tree, name: str, place: _Place, growth: Growth) -> Iterator[Launch]:
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, dict):
            own = container.get("name")
            labels = (name, str(place), f"container {own}" if isinstance(own, str) else "")
            launch = find_in_container(_container(container, growth), ", ".join(label for label in labels if label))
            if launch is not None:
                yield _with_references(launch)


def _in_kserve_model(model: Tree, name: str, place: _Place, growth: Growth) -> Launch | None:
    """KServe's `predictor.model`: its arguments go to a serving runtime that is defined elsewhere."""
    if not isinstance(model, dict) or not isinstance(model.get("modelFormat"), dict):
        return None
    form = model["modelFormat"]
    assert isinstance(form, dict), "asked above"
    hints = (form.get("name"), model.get("runtime"), model.get("image"))
    if not any(isinstance(hint, str) and "vllm" in hint.lower() for hint in hints):
        return None
    container = _container(model, growth)
    container = container._replace(
        image=container.image or "vllm",
        notes=(*container.notes, "the serving runtime may add arguments of its own"),
    )
    launch = find_in_container(container, ", ".join(filter(None, (name, str(place), "model"))))
    return launch and _with_references(launch._replace(image=_text(model.get("image"))))


def _container(body: dict[str, Tree], growth: Growth) -> Container:
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
            environment[name] = _filled(_text(each.get("value")) or "", environment, growth)
    command = body.get("command")
    return Container(
        image=_text(body.get("image")),
        entry=_words(command, environment, growth) if command else None,
        arguments=_words(body.get("args"), environment, growth),
        environment=tuple(environment.items()),
        unresolved=tuple(missing),
        notes=("the variables in envFrom were not read",) if body.get("envFrom") else (),
    )


def _text(value: Tree) -> str | None:
    return value if isinstance(value, str) else None


def _words(value: Tree, environment: dict[str, str], growth: Growth) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(_filled(text, environment, growth) for each in listed if (text := _text(each)) is not None)


def _filled(text: str, environment: dict[str, str], growth: Growth) -> str:
    """`$(NAME)` filled in where the container has the variable, and left as it is where not, as the kubelet does."""

    def fill(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        return f"$({name})" if escaped else growth.add(environment.get(name, found.group()))

    return _KUBERNETES_REFERENCE.sub(fill, text)


def _with_references(launch: Launch) -> Launch:
    """The launch with each `$(NAME)` that is still in its arguments listed as missing."""
    left = [found.group(2) for word in launch.arguments for found in _KUBERNETES_REFERENCE.finditer(word)]
    return launch._replace(unresolved=tuple(dict.fromkeys((*launch.unresolved, *left))))

"""Guard's objects in Kubernetes as a kustomize base and components, with Roles made from the calls that guard makes.

`--for guard` writes them for servers that exist, `--for kubernetes` beside a server that it launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import plimsoll
from plimsoll.assets.names import GUARD_JOB
from plimsoll.assets.rendering import render
from plimsoll.assets.settings import AssetSettings, Cluster, Toleration
from plimsoll.errors import BadInput
from plimsoll.guard.adapters.cluster import API_CALLS, LEASE_NAME, OBJECT_NAME

SECRET = "plimsoll"  # noqa: S105 - the name of the Secret
"""The one Secret, in every namespace that needs a token; its keys are file names."""
INSIDE_WHEEL = "/plimsoll/inside.whl"  # where the init container puts the wheel, whatever its version
PLUGIN = "kubectl-plimsoll"
_LABEL = r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_IMAGE = r"[a-z0-9][\w.:/-]{0,254}(?:@sha256:[0-9a-f]{64})?"
QUANTITY = r"\d{1,12}(?:\.\d{1,3})?(?:m|k|Ki|M|Mi|G|Gi|T|Ti)?"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# The purpose of each component; the operator's and Grafana's objects have components of their own, too.
_PARTS = {
    "act": "lets guard act: restarts by eviction, and what else [act] allows",
    "nodes": "lets guard see that a node is drained or about to be taken back; a ClusterRole, since nodes have no namespace",
    "quarantine": "lets guard take one pod out of its Service by a label, where [discover.kubernetes] asks for it",
    "identities": "lets guard ask the cluster who a caller is and what they may do: users of its API by their own tokens",
}


def default_image() -> str:
    """Returns the image that `make image` builds, by its version."""
    return f"plimsoll:{plimsoll.__version__}"


def words_of(given: Iterable[str], name: str, pattern: str, example: str) -> tuple[str, ...]:
    """Returns every word of an option that may be repeated or have commas; BadInput for one that does not match."""
    words = tuple(dict.fromkeys(word.strip() for text in given for word in text.split(",")))
    for word in words:
        if not re.fullmatch(pattern, word):
            raise BadInput(f"{name} {word[:60]!r}: it is {example}")
    return words


def pairs_of(given: Iterable[str], name: str, value: str, example: str) -> tuple[tuple[str, str], ...]:
    """Reads NAME=VALUE pairs; BadInput for a name given twice."""
    pairs = [word.partition("=") for word in words_of(given, name, f"{_LABEL}={value}", example)]
    if len({label for label, _, _ in pairs}) < len(pairs):
        raise BadInput(f"{name} gives one of its names twice")
    return tuple((label, value) for label, _, value in pairs)


def tolerations_of(given: Iterable[str]) -> tuple[Toleration, ...]:
    """Reads tolerations: KEY or KEY=VALUE, each with or without an effect behind a colon."""
    pattern = f"{_LABEL}(?:={LABEL_VALUE})?(?::(?:{'|'.join(_EFFECTS)}))?"
    words = words_of(given, "--toleration", pattern, "nvidia.com/gpu:NoSchedule or dedicated=llm:NoSchedule")
    taints = [(*word.partition(":")[0].partition("="), word.partition(":")[2]) for word in words]
    return tuple(Toleration(key, value, effect) for key, _, value, effect in taints)


def one_name(text: str | None, name: str, default: str, pattern: str = OBJECT_NAME) -> str:
    """Returns the name of an object, or the default if none was given; BadInput for a name that Kubernetes refuses."""
    if text is not None and not re.fullmatch(pattern, text):
        raise BadInput(f"{name} {text[:60]!r} is no name that Kubernetes takes")
    return text or default


def one_image(text: str | None, name: str, default: str = "") -> str:
    if text is not None and not re.fullmatch(_IMAGE, text):
        raise BadInput(f"{name} {text[:80]!r} is no image, such as registry.example.com/plimsoll:0.1.0")
    return text or default


# Roles


@dataclass(frozen=True, slots=True)
class BoundRole:
    """A Role, or a ClusterRole where it has no namespace, bound to guard's account."""

    name: str
    namespace: str
    rules: tuple[Mapping[str, Any], ...]  # group, resource, verbs, and the names if it covers single objects


def roles_of(cluster: Cluster, part: str, pods: tuple[str, ...] = ()) -> list[BoundRole]:
    """Returns the smallest Roles for the calls of one part: in the engines' namespaces, in guard's own, and cluster-wide.

    `pods` are the only ones that guard may evict, if their names are known and stable.
    """
    name = cluster.guard if part == "observe" else f"{cluster.guard}-{part}"
    scopes = [(name, space, ("fleet", "own") if space == cluster.namespace else ("fleet",)) for space in cluster.namespaces]
    roles = []
    # A ClusterRole has no namespace: guard's own in its name keeps those of two guards apart.
    for title, space, within in [*scopes, (f"{name}-{cluster.namespace}", "", ("cluster",))]:
        verbs: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for call in API_CALLS:
            if call.needed_for == part and call.scope in within:
                names = pods if call.resource == "pods/eviction" else (cluster.guard,) if call.name == LEASE_NAME else ()
                verbs.setdefault((call.group, call.resource, names), []).append(call.verb)
        rules = tuple(
            {"group": group, "resource": resource, "verbs": list(dict.fromkeys(found)), "names": names}
            for (group, resource, names), found in verbs.items()
        )
        roles += [BoundRole(title, space, rules)] if rules else []
    return roles


# Files


def guard_files(
    settings: AssetSettings, way: str, monitoring: Mapping[str, str], engines: Sequence[tuple[str, str]], **extra: object
) -> dict[str, str]:
    """Returns the base's and the components' files in the folder of a way; `extra` is a launch's context for the templates."""
    cluster, pods = settings.cluster, tuple(name for name, _ in engines)
    context: dict[str, object] = {
        "way": way,
        "cluster": cluster,
        "namespace": cluster.namespace,
        "secret": SECRET,
        "guard_port": settings.guard_port,
        "guard_job": GUARD_JOB,
        "job": settings.job,
        "labels": dict(word.strip().split("=") for word in (cluster.selector or f"app={settings.name}").split(",")),
        "roles": roles_of(cluster, "observe"),
        "timers": settings.timers,
        "secret_files": ["gate.token", "guard.token", "guard-read.token"],
        "parts": [*(part for part in _PARTS if roles_of(cluster, part)), "prometheus-operator", "grafana", "volume"],
        "engines": engines,
        **extra,
    }
    made = {
        "guard.yaml": render("kubernetes-guard.yaml", **context),
        "kustomization.yaml": render("kustomization.yaml", **context),
        "plimsoll.toml": render("plimsoll.toml", **context),
        PLUGIN: files("plimsoll.assets").joinpath(f"templates/{PLUGIN}").read_text(encoding="utf-8"),
    }
    made |= {f"components/{path}": text for path, text in _components(context, cluster, monitoring, pods).items()}
    return {f"{way}/{path}": text for path, text in made.items()}


def _components(
    context: Mapping[str, object], cluster: Cluster, monitoring: Mapping[str, str], pods: tuple[str, ...]
) -> dict[str, str]:
    def component(name: str, about: str, **more: object) -> str:
        return render("component.yaml", part=name, about=about, **{**context, "resources": [], "patches": False, **more})

    made: dict[str, str] = {}
    for part, about in _PARTS.items():
        if roles := roles_of(cluster, part, pods):
            made[f"{part}/roles.yaml"] = render("roles.yaml", **{**context, "roles": roles})
            made[f"{part}/kustomization.yaml"] = component(part, about, resources=["roles.yaml"], patches=part == "act")
    dashboards = {path.rpartition("/")[2]: text for path, text in monitoring.items() if "/dashboards/" in path}
    made |= {f"grafana/{name}": text for name, text in dashboards.items()}
    about = "dashboards as ConfigMaps with the label that Grafana's sidecar looks for"
    made["grafana/kustomization.yaml"] = component("grafana", about, dashboards=sorted(dashboards))
    rules = monitoring["monitoring/rules.yml"]
    rules = "".join(f"  {line}".rstrip() + "\n" for line in rules[rules.index("groups:") :].splitlines())
    made["prometheus-operator/monitors.yaml"] = render("monitors.yaml", **context)
    made["prometheus-operator/rules.yaml"] = render("operator-rules.yaml", rules=rules, **context)
    about = "for the Prometheus operator: whom to scrape, and the alerts"
    resources = ["monitors.yaml", "rules.yaml"]
    made["prometheus-operator/kustomization.yaml"] = component("prometheus-operator", about, resources=resources)
    made["volume/claim.yaml"] = render("claim.yaml", **context)
    about = "a volume for guard's journal and evidence; without it they end with the pod"
    made["volume/kustomization.yaml"] = component("volume", about, resources=["claim.yaml"], patches=True)
    return made

"""The rights that generated Roles give, compared with the requests that an API server was sent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from plimsoll.assets.kubernetes import roles_of
from plimsoll.assets.rendering import render
from plimsoll.assets.settings import Cluster

PARTS = ("observe", "act", "nodes", "quarantine", "identities")
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


@dataclass(frozen=True)
class Right:
    """One verb on one kind of object; `name` is empty where it is for all of them, `namespace` where it has none."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str = ""


def rights_of(objects: Iterable[dict[str, Any]]) -> set[Right]:
    """Every right in the Roles and ClusterRoles among these objects."""
    return {
        Right(verb, group, resource, role["metadata"].get("namespace", ""), name)
        for role in objects
        if role["kind"] in ("Role", "ClusterRole")
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


def role_objects(cluster: Cluster, parts: Iterable[str] = PARTS) -> list[dict[str, Any]]:
    """Roles and bindings as `--for guard` writes them with these components."""
    roles = [role for part in parts for role in roles_of(cluster, part)]
    return list(yaml.safe_load_all(render("roles.yaml", roles=roles, cluster=cluster, namespace=cluster.namespace)))


def asked(method: str, target: str) -> Right:
    """What RBAC would look for, of one request; the health of the API server itself is no object."""
    url = urlsplit(target)
    found = _PATH.fullmatch(url.path)
    assert found is not None, f"no object of the API: {target}"
    name, sub = found["name"] or "", found["sub"]
    is_watch = parse_qs(url.query).get("watch", ["0"])[0] in ("1", "true")
    verb = {
        "GET": "watch" if is_watch else "get" if name else "list",
        "POST": "create",
        "PUT": "update",
        "PATCH": "patch",
        "DELETE": "delete",
    }[method]
    resource = found["resource"] + (f"/{sub}" if sub else "")
    return Right(verb, found["group"] or "", resource, found["namespace"] or "", name)


def differences(
    requests: Iterable[tuple[str, str]], cluster: Cluster, parts: Iterable[str] = PARTS
) -> tuple[set[Right], set[Right]]:
    """Requests that no Role allows, and rights that no request used; `requests` are (method, path with query).

    A right holds in every namespace of the engines: it counts as used if it was used in one of them.
    """
    rights = rights_of(role_objects(cluster, parts))
    used: set[Right] = set()
    refused: set[Right] = set()
    for request in {asked(method, target) for method, target in requests}:
        at = (request.verb, request.group, request.resource, request.namespace)
        fitting = {r for r in rights if (r.verb, r.group, r.resource, r.namespace) == at and r.name in ("", request.name)}
        used |= fitting
        refused |= set() if fitting else {request}
    kinds = {(right.verb, right.group, right.resource, right.name) for right in used}
    return refused, {right for right in rights if (right.verb, right.group, right.resource, right.name) not in kinds}

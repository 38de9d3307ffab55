"""The rights that generated Roles give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from plimsoll.assets.kubernetes import roles_of
from plimsoll.assets.rendering import render
from plimsoll.assets.settings import Cluster

PARTS = ("observe", "act", "nodes", "quarantine", "identities")


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

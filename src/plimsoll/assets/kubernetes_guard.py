"""guard as a Deployment of its own, with no more rights than its deeds need."""

from __future__ import annotations

from typing import Any

from plimsoll.assets.guard_config import secret_files
from plimsoll.assets.launched import GUARD_IMAGE, launched
from plimsoll.assets.settings import Settings

GUARD = "plimsoll-guard"
SECRET = "plimsoll"  # noqa: S105  the name of the object
SECRETS = "/etc/plimsoll-secrets"
PROMETHEUS = {"kubernetes.io/metadata.name": "monitoring"}
USER = 10001


def labels(name: str) -> dict[str, str]:
    """By which the pods of one part are known."""
    return {"app": name}


def meta(name: str, settings: Settings) -> dict[str, Any]:
    """An object's name and place."""
    return {"metadata": {"name": name, "namespace": settings.namespace}}


def objects(settings: Settings) -> list[dict[str, Any]]:
    """Guard's account and rights, its disk, its pod, and who may ask it."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": GUARD}
    account = {"kind": "ServiceAccount", "name": GUARD, "namespace": settings.namespace}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}}
    ports = [{"name": "http", "port": settings.guard_port, "targetPort": "http"}]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **meta(GUARD, settings), "automountServiceAccountToken": False},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", **meta(GUARD, settings), "rules": _rules(settings)},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            **meta(GUARD, settings),
            "roleRef": role,
            "subjects": [account],
        },
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **meta(GUARD, settings), "spec": claim},
        {"apiVersion": "v1", "kind": "Service", **meta(GUARD, settings), "spec": {"selector": labels(GUARD), "ports": ports}},
        _deployment(settings),
        _network(settings),
    ]


def _rules(settings: Settings) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {
            "# One name for each pod that guard may evict.": None,
            "apiGroups": [""],
            "resources": ["pods/eviction"],
            "resourceNames": [f"{settings.name}-0"],
            "verbs": ["create"],
        },
        {
            "# To make an object its name cannot be asked for; needed once.": None,
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["create"],
        },
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [GUARD],
            "verbs": ["get", "update"],
        },
    ]


def _deployment(settings: Settings) -> dict[str, Any]:
    pod = {
        "serviceAccountName": GUARD,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "# To put back what is drained.": None,
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "# Evidence is kept only in a folder that no group may write to.": None,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(settings)],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": GUARD}},
            {"name": "config", "configMap": {"name": GUARD}},
            {"name": "secrets", "secret": {"secretName": SECRET, "defaultMode": 0o440, "items": _items(settings)}},
        ],
    }
    spec = {
        "replicas": 1,
        "# The journal has one writer.": None,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(GUARD)},
        "template": {"metadata": {"labels": labels(GUARD)}, "spec": pod},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", **meta(GUARD, settings), "spec": spec}


def _items(settings: Settings) -> list[dict[str, str]]:
    keys = {"api.key": "VLLM_API_KEY"}
    return [{"key": keys.get(name, name), "path": name} for name in secret_files(launched(settings))]


def _container(settings: Settings) -> dict[str, Any]:
    return {
        "name": "guard",
        "image": GUARD_IMAGE,
        "# It observes and says what it would do. With --act at the end it does it (docs/guard-acts.md).": None,
        "command": ["plimsoll", "guard", "--config", "/etc/plimsoll/plimsoll.toml"],
        "env": [{"name": "STATE_DIRECTORY", "value": "/var/lib/plimsoll/guard"}],
        "ports": [{"name": "http", "containerPort": settings.guard_port}],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 30},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "state", "mountPath": "/var/lib/plimsoll"},
            {"name": "config", "mountPath": "/etc/plimsoll"},
            {"name": "secrets", "mountPath": SECRETS},
        ],
    }


def _network(settings: Settings) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": labels(GUARD)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"namespaceSelector": {"matchLabels": PROMETHEUS}}], "ports": [{"port": "http"}]}],
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **meta(GUARD, settings), "spec": spec}

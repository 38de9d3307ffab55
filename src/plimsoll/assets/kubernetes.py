"""The server as a StatefulSet, what keeps it up and what keeps others out; clients reach what is theirs by an Ingress."""

from __future__ import annotations

import math
from typing import Any

from plimsoll.assets.launch_command import (
    GUARD_IMAGE,
    RESPONSES,
    client_paths,
    container_environment,
    container_words,
    is_amd,
    leaving_s,
    model_folder,
    ready_path,
    server_image,
)
from plimsoll.assets.settings import Settings
from plimsoll.assets.sidecars import kubernetes_guard_config, secret_files
from plimsoll.assets.texts import for_pod, yaml_of
from plimsoll.units import GIB

# guard as a Deployment of its own, with no more rights than its deeds need.

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
        _guard_network(settings),
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
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [GUARD], "verbs": ["get", "update"]},
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
        "containers": [_guard_container(settings)],
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
    return [{"key": keys.get(name, name), "path": name} for name in secret_files(settings.planned)]


def _guard_container(settings: Settings) -> dict[str, Any]:
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


def _guard_network(settings: Settings) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": labels(GUARD)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"namespaceSelector": {"matchLabels": PROMETHEUS}}], "ports": [{"port": "http"}]}],
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **meta(GUARD, settings), "spec": spec}


TOKENS = "/run/plimsoll"
PROXIES = {"kubernetes.io/metadata.name": "ingress-nginx"}
PROBE_EVERY_S = 10
CACHE_BASE_GIB = 20  # compiled graphs, tokenizers, and room to load a second revision


def files(settings: Settings) -> dict[str, str]:
    """Names and texts."""
    made = {
        f"{settings.name}.yaml": documents(server_objects(settings)),
        "guard.yaml": documents(objects(settings)),
        "plimsoll.toml": kubernetes_guard_config(settings, SECRETS),
        "kustomization.yaml": yaml_of(_kustomization(settings)),
    }
    return {f"kubernetes/{path}": text for path, text in made.items()}


def documents(objects: list[dict[str, Any]]) -> str:
    """Several objects in one file."""
    return "---\n".join(yaml_of(one) for one in objects)


def server_objects(settings: Settings) -> list[dict[str, Any]]:
    """Everything but guard."""
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **meta(settings.name, settings), "automountServiceAccountToken": False},
        _names(settings),
        _clients(settings),
        _stateful_set(settings),
        _budget(settings),
        _network(settings),
        _ingress(settings),
    ]


def _names(settings: Settings) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "# Each pod keeps its name also while it is not ready: guard and Prometheus look at it then, too.": None,
        "publishNotReadyAddresses": True,
        "selector": labels(settings.name),
        "ports": [{"name": "http", "port": settings.planned.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", **meta(settings.name, settings), "spec": spec}


def _clients(settings: Settings) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    spec = {"selector": labels(settings.name), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", **meta(f"{settings.name}-api", settings), "spec": spec}


def _stateful_set(settings: Settings) -> dict[str, Any]:
    spec = {
        "serviceName": settings.name,
        "# Each replica is a [[engine]] in plimsoll.toml.": None,
        "replicas": 1,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels(settings.name)},
        "template": {"metadata": {"labels": labels(settings.name)}, "spec": _pod(settings)},
        "volumeClaimTemplates": [
            {
                "metadata": {"name": "cache"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{_cache_gib(settings)}Gi"}}},
            }
        ],
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", **meta(settings.name, settings), "spec": spec}


def _cache_gib(settings: Settings) -> int:
    """Room for the weights and what is compiled for them."""
    plan = settings.plan
    weights = plan.weights_bytes * plan.tensor_parallel * plan.pipeline_parallel if plan is not None else 0
    return CACHE_BASE_GIB + math.ceil(1.2 * weights / GIB)


def _pod(settings: Settings) -> dict[str, Any]:
    command, timers = settings.planned, settings.timers
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    if command.has_gate:
        item = {"key": "gate.token", "path": "gate.token"}
        volumes += [
            {"name": "inside", "configMap": {"name": "plimsoll-inside"}},
            {"name": "gate", "secret": {"secretName": SECRET, "items": [item]}},
        ]
    if (folder := model_folder(command)) is not None:
        volumes.append({"name": "model", "hostPath": {"path": folder, "type": "Directory"}})
    return {
        "serviceAccountName": settings.name,
        "automountServiceAccountToken": False,
        "# Or a service called vllm becomes VLLM_PORT=tcp://..., which vLLM reads as its own setting and refuses.": None,
        "enableServiceLinks": False,
        f"# Longer than preStop ({leaving_s(settings)} s), requests ({timers.shutdown_s} s) and vLLM's teardown.": None,
        "terminationGracePeriodSeconds": timers.grace_s,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(settings)],
        "volumes": volumes,
    }


def _container(settings: Settings) -> dict[str, Any]:
    command = settings.planned
    mounts: list[dict[str, Any]] = [{"name": "cache", "mountPath": "/root/.cache"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    environment: list[dict[str, Any]] = [
        {"name": name, "value": for_pod(value)} for name, value in container_environment(command, settings.wheel)
    ]
    environment += [{"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}} for name in command.secrets]
    stop = ["sleep", str(settings.timers.drain_s)]
    if command.has_gate:
        environment.append({"name": "PLIMSOLL_TOKEN_FILE", "value": f"{TOKENS}/gate.token"})
        mounts += [
            {"name": "inside", "mountPath": "/plimsoll", "readOnly": True},
            {"name": "gate", "mountPath": TOKENS, "readOnly": True},
        ]
        stop = ["python3", "-m", "plimsoll.inside.leave", str(leaving_s(settings)), str(command.port)]
    if (folder := model_folder(command)) is not None:
        mounts.append({"name": "model", "mountPath": folder, "readOnly": True})
    gpus = settings.plan.gpus if settings.plan is not None else 1
    return {
        "name": "vllm",
        "image": server_image(settings),
        "# The server is the container's first process: SIGTERM reaches it and nobody else.": None,
        "command": [for_pod(word) for word in container_words(command)],
        "env": environment,
        "ports": [{"name": "http", "containerPort": command.port}],
        "resources": {"limits": {"amd.com/gpu" if is_amd(settings) else "nvidia.com/gpu": str(gpus)}},
        **_probes(settings),
        "# Out of the balancer before SIGTERM.": None,
        "lifecycle": {"preStop": {"exec": {"command": stop}}},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": mounts,
    }


def _probes(settings: Settings) -> dict[str, Any]:
    command, start_s = settings.planned, settings.timers.start_s
    health = {"httpGet": {"path": "/health", "port": "http"}}
    return {
        f"# {start_s} s to load the weights, to compile and to capture graphs.": None,
        "startupProbe": {
            **health,
            "periodSeconds": PROBE_EVERY_S,
            "timeoutSeconds": 5,
            "failureThreshold": math.ceil(start_s / PROBE_EVERY_S),
        },
        "readinessProbe": {
            "httpGet": {"path": ready_path(command), "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "# Five minutes without an answer. Never readiness: a drain would kill it. A hang is guard's to prove.": None,
        "livenessProbe": {**health, "periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 10},
    }


def _budget(settings: Settings) -> dict[str, Any]:
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": labels(settings.name)},
        "# A pod that is not ready protects nobody: it may always be evicted.": None,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **meta(settings.name, settings), "spec": spec}


def _network(settings: Settings) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": labels(settings.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "# Whoever reaches the port reaches all of it: the proxy, guard and Prometheus, and nobody else.": None,
                "from": [
                    {"podSelector": {"matchLabels": labels("plimsoll-guard")}},
                    {"namespaceSelector": {"matchLabels": PROXIES}},
                    {"namespaceSelector": {"matchLabels": PROMETHEUS}},
                ],
                "ports": [{"port": "http"}],
            }
        ],
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **meta(settings.name, settings), "spec": spec}


def _ingress(settings: Settings) -> dict[str, Any]:
    backend = {"service": {"name": f"{settings.name}-api", "port": {"name": "http"}}}
    paths = [
        {"path": path, "pathType": "Prefix" if path == RESPONSES else "Exact", "backend": backend}
        for path in client_paths(settings.vllm)
    ]
    metadata = {
        "name": settings.name,
        "namespace": settings.namespace,
        "annotations": {
            "nginx.ingress.kubernetes.io/proxy-read-timeout": "600",
            "nginx.ingress.kubernetes.io/proxy-buffering": "off",
        },
    }
    rules = [
        {
            "# Your name. What clients may ask for, by whole paths; /plimsoll/, adapters and admin endpoints stay in.": None,
            "host": "llm.example.com",
            "http": {"paths": paths},
        }
    ]
    spec = {"ingressClassName": "nginx", "rules": rules}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": metadata, "spec": spec}


def _kustomization(settings: Settings) -> dict[str, Any]:
    command = settings.planned
    made: list[dict[str, Any]] = [
        {"name": "plimsoll-guard", "namespace": settings.namespace, "files": ["plimsoll.toml", "plan.json"]}
    ]
    if command.has_gate:
        made.append({"name": "plimsoll-inside", "namespace": settings.namespace, "files": [settings.wheel]})
    tokens = " ".join(f"--from-file={name}" for name in ("gate.token", "guard.token", "guard-read.token"))
    others = "".join(f" --from-literal={name}=..." for name in command.secrets)
    return {
        "# Once, with tokens of at least 16 characters in three files:": None,
        f"#   kubectl create namespace {settings.namespace}": None,
        f"#   kubectl -n {settings.namespace} create secret generic {SECRET} {tokens}{others}": None,
        "# Then, and after every change (--server-side, for the wheel's size):": None,
        "#   kubectl apply --server-side -k .": None,
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{settings.name}.yaml", "guard.yaml"],
        "configMapGenerator": made,
    }

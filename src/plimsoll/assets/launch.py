"""Files that launch one planned server, from `templates/`: systemd units, a compose project, Kubernetes manifests.

Each way has guard beside the server, and a proxy in front of it that admits only clients' paths. docs/launch.md says which
values matter and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plimsoll.assets.kubernetes import INSIDE_WHEEL, SECRET, guard_files
from plimsoll.assets.launch_command import vendor_of
from plimsoll.assets.monitoring import monitoring_files
from plimsoll.assets.rendering import flag_lines, render
from plimsoll.assets.settings import AssetSettings
from plimsoll.hardware.cards import Vendor
from plimsoll.units import GIB
from plimsoll.vllm import versions

# The paths that clients may reach through a proxy. Everything else stays inside: figures, drains, adapters, admin
# endpoints. It lists the allowed paths as whole paths: a list of forbidden ones could be evaded by another spelling
# (`/v1/load%5flora_adapter`). Answers of /v1/responses are fetched and cancelled by id, below that path.
PATHS = (
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v2/embed",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime",
)  # fmt: skip
PROXY_PORT = 8080
CACHE_BASE_GIB = 20  # compiled graphs, tokenizers, and room to load a second revision

# Templates by the file they become; the wheel and plan.json are beside them.
FILES = {
    "systemd": {
        "{name}-start.sh": "start.sh", "{name}.service": "server.service", "plimsoll-guard.service": "guard.service",
        "plimsoll.toml": "plimsoll.toml", "50-plimsoll.rules": "polkit.rules", "haproxy.cfg": "haproxy.cfg",
        "{name}.env.example": "env.example",
    },
    "compose": {"compose.yaml": "compose.yaml", "haproxy.cfg": "haproxy.cfg", "plimsoll.toml": "plimsoll.toml"},
    "kubernetes": {"{name}.yaml": "kubernetes-server.yaml"},  # and guard's files: kubernetes.py
}  # fmt: skip
WAYS = tuple(FILES)


def launch_files(settings: AssetSettings, ways: Sequence[str]) -> dict[str, str]:
    """Returns paths and texts of the files for these ways."""
    made: dict[str, str] = {}
    for way in ways:
        context = _context(settings, way)
        for path, template in FILES[way].items():
            made[f"{way}/{path.format(name=settings.name)}"] = render(template, way=way, **context)
        if way == "kubernetes":
            made |= guard_files(settings, way, monitoring_files(settings), **context)
    return made


def _context(settings: AssetSettings, way: str) -> dict[str, Any]:
    command, plan = settings.planned, settings.plan
    assert plan is not None, "a command comes from a plan"
    is_amd = vendor_of(plan.gpu) is Vendor.AMD
    model = command.words[2] if len(command.words) > 2 else ""
    weights = plan.weights_bytes * plan.tensor_parallel * plan.pipeline_parallel
    environment = dict(command.environment)
    if command.has_gate:  # the mounted wheel comes first in Python's search path
        own = environment.get("PYTHONPATH")
        wheel = INSIDE_WHEEL if way == "kubernetes" else f"/plimsoll/{settings.wheel}"
        environment["PYTHONPATH"] = wheel + (f":{own}" if own else "")
    cluster = settings.cluster
    has_api_key = "VLLM_API_KEY" in command.secrets
    return {
        "name": settings.name,
        "cluster": cluster,
        "namespace": cluster.namespace,
        "guard_replicas": 1,
        "secret": SECRET,
        "secret_variables": command.secrets,
        "inside_wheel": INSIDE_WHEEL,
        "server_file": f"{settings.name}.yaml",
        "proxy_namespace": cluster.gateway.partition("/")[0] or "ingress-nginx",
        "engines": _engines(settings, way),
        "has_plan": True,
        "model": plan.model,
        "command": command,
        # Without --host: in a container the server must be reached from outside it.
        "words": [word for group in flag_lines(command.words) for word in _without_host(group)],
        "environment": environment.items(),
        "has_environment": bool(environment or command.secrets or command.has_gate),
        "timers": settings.timers,
        "leaving_s": leaving_s(settings),
        "ready_path": "/plimsoll/ready" if command.has_gate else "/health",  # tells a balancer whether to send work
        "client_paths": client_paths(settings.vllm),
        "proxy_port": PROXY_PORT if command.port != PROXY_PORT else PROXY_PORT + 1,
        "guard_port": settings.guard_port,
        "image": cluster.server_image or f"vllm/vllm-openai{'-rocm' if is_amd else ''}:v{settings.vllm}",
        "wheel": settings.wheel,
        "is_amd": is_amd,
        "gpus": plan.gpus,
        "model_folder": model if model.startswith("/") else "",  # a folder of the machine is mounted
        "cache_gib": CACHE_BASE_GIB + math.ceil(1.2 * weights / GIB),
        "has_api_key": has_api_key,
        # They are never generated.
        "secret_files": [
            *(["gate.token"] if command.has_gate else []),
            "guard.token",
            "guard-read.token",
            *(["api.key"] if has_api_key else []),
        ],
    }


def _engines(settings: AssetSettings, way: str) -> list[tuple[str, str]]:
    """Returns name and address of each engine; none if the pods' names change, where guard discovers them."""
    name, port, cluster = settings.name, settings.planned.port, settings.cluster
    if way != "kubernetes":
        return [(name, f"http://{name if way == 'compose' else '127.0.0.1'}:{port}")]
    count = cluster.replicas if cluster.workload == "StatefulSet" else 0
    return [(f"{name}-{number}", f"http://{name}-{number}.{name}:{port}") for number in range(count)]


def client_paths(release: str) -> tuple[str, ...]:
    there = {
        name.partition(" ")[2]
        for name, stretches in versions.rows("endpoints").items()
        if any(versions.is_within(stretch, release) for stretch in stretches)
    }
    return tuple(path for path in PATHS if path in there)


def leaving_s(settings: AssetSettings) -> int:
    """Returns the gate's time before SIGTERM: until the balancer stops, and longer if vLLM cannot drain by itself."""
    return settings.timers.drain_s if "--shutdown-timeout" in settings.planned.words else settings.timers.shutdown_s


def _without_host(group: list[str]) -> list[str]:
    name, joined, _ = group[0].partition("=")
    return group if name != "--host" else group[1:] if joined else group[2:]

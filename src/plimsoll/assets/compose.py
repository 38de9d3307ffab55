"""The server, a proxy and guard as a compose project. Only the proxy has a port that others reach."""

from __future__ import annotations

from typing import Any

from plimsoll.assets import guard_config, haproxy
from plimsoll.assets.launched import (
    container_environment,
    container_words,
    is_amd,
    launched,
    model_folder,
    ready_path,
    server_image,
)
from plimsoll.assets.settings import Settings
from plimsoll.assets.texts import for_compose, yaml_of

SECRETS = "/run/secrets"
DOCKERS_NAMES = "127.0.0.11:53"  # where Docker answers for the names of services


def files(settings: Settings) -> dict[str, str]:
    """Names and texts."""
    made = {
        "compose.yaml": compose(settings),
        "haproxy.cfg": haproxy.config(
            settings, f"{settings.name}:{launched(settings).port}", socket=None, resolvers=DOCKERS_NAMES
        ),
        "plimsoll.toml": guard_config.for_compose(settings, SECRETS),
    }
    return {f"compose/{path}": text for path, text in made.items()}


def compose(settings: Settings) -> str:
    """The project. What stands in it and why: docs/launch.md."""
    has_key = "VLLM_API_KEY" in launched(settings).secrets
    project: dict[str, Any] = {
        "# Before the first start, in this folder, with an image of yours that has plimsoll in it:": None,
        "#   for f in gate guard guard-read; do head -c 24 /dev/urandom | base64 > $f.token; done; chmod 600 ./*.token": None,
        **({'#   printf %s "$VLLM_API_KEY" > api.key; chmod 600 api.key': None} if has_key else {}),
        "#   docker compose up -d": None,
        "name": settings.name,
        "services": {settings.name: _server(settings), "proxy": _proxy(settings), "plimsoll-guard": _guard(settings)},
        "secrets": {name: {"file": f"./{name}"} for name in guard_config.secret_files(launched(settings))},
        "volumes": {"cache": {}, "guard-state": {}},
    }
    return yaml_of(project)


def _server(settings: Settings) -> dict[str, Any]:
    command, timers = launched(settings), settings.timers
    environment = {name: for_compose(value) for name, value in container_environment(command, settings.wheel)}
    environment |= {name: f"${{{name}:?has to be set}}" for name in command.secrets}
    volumes = ["cache:/root/.cache"]
    if command.has_gate:
        environment["PLIMSOLL_TOKEN_FILE"] = f"{SECRETS}/gate.token"
        volumes.append(f"./{settings.wheel}:/plimsoll/{settings.wheel}:ro")
    if (folder := model_folder(command)) is not None:
        volumes.append(for_compose(f"{folder}:{folder}:ro"))
    asks = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{command.port}{ready_path(command)}', timeout=4)"
    return {
        "image": server_image(settings),
        "entrypoint": [for_compose(word) for word in container_words(command)],
        "environment": environment,
        **({"secrets": ["gate.token"]} if command.has_gate else {}),
        "volumes": volumes,
        **_devices(settings),
        "# What workers share, and what plimsoll.inside does.": None,
        "shm_size": "16gb",
        "# vLLM ends with exit code 0 when its engine dies: on-failure would leave it dead.": None,
        "restart": "unless-stopped",
        f"# Longer than the requests in flight ({timers.shutdown_s} s) and vLLM's teardown.": None,
        "stop_grace_period": f"{timers.grace_s}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", asks],
            "interval": "5s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{timers.start_s}s",
        },
    }


def _devices(settings: Settings) -> dict[str, Any]:
    if is_amd(settings):
        return {"devices": ["/dev/kfd", "/dev/dri"], "security_opt": ["seccomp=unconfined"], "group_add": ["video"]}
    count = settings.plan.gpus if settings.plan is not None else 1
    device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _proxy(settings: Settings) -> dict[str, Any]:
    port = haproxy.proxy_port(settings)
    return {
        "image": "haproxy:lts",
        "ports": [f"{port}:{port}"],
        "volumes": ["./haproxy.cfg:/usr/local/etc/haproxy/haproxy.cfg:ro"],
        "restart": "unless-stopped",
    }


def _guard(settings: Settings) -> dict[str, Any]:
    port = settings.guard_port
    return {
        "image": "${PLIMSOLL_IMAGE:?an image of yours with plimsoll in it}",
        "# It observes. To restart a container it would need Docker's socket, which is root on this machine.": None,
        "command": ["plimsoll", "guard", "--config", "/etc/plimsoll/plimsoll.toml"],
        "environment": {"STATE_DIRECTORY": "/var/lib/plimsoll"},
        "secrets": list(guard_config.secret_files(launched(settings))),
        "volumes": [
            "./plimsoll.toml:/etc/plimsoll/plimsoll.toml:ro",
            "./plan.json:/etc/plimsoll/plan.json:ro",
            "guard-state:/var/lib/plimsoll",
        ],
        "ports": [f"127.0.0.1:{port}:{port}"],
        "restart": "unless-stopped",
        "stop_grace_period": "60s",
    }

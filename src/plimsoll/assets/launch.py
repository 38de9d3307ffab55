"""Files that launch one planned server: systemd units or a compose project here, Kubernetes manifests in their own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll.assets import kubernetes
from plimsoll.assets.launch_command import (
    container_environment,
    container_words,
    is_amd,
    leaving_s,
    model_folder,
    ready_path,
    server_image,
)
from plimsoll.assets.settings import Settings
from plimsoll.assets.sidecars import compose_guard_config, haproxy_config, proxy_port, secret_files, systemd_guard_config
from plimsoll.assets.texts import flag_lines, for_compose, in_shell, yaml_of

ETC = "/etc/plimsoll"
ADMIN_SOCKET = "/run/haproxy/admin.sock"


def systemd_files(settings: Settings) -> dict[str, str]:
    """Names and texts; `vllm` in them is the settings' name."""
    command = settings.planned
    name = settings.name
    made = {
        f"{name}-start.sh": start_script(settings),
        f"{name}.service": unit(settings),
        "plimsoll-guard.service": guard_unit(settings),
        "plimsoll.toml": systemd_guard_config(settings, _credential("plimsoll-guard"), ADMIN_SOCKET),
        "50-plimsoll.rules": polkit_rule(settings),
        "haproxy.cfg": haproxy_config(settings, f"127.0.0.1:{command.port}", socket=ADMIN_SOCKET),
        f"{name}.env.example": environment_example(settings),
    }
    return {f"systemd/{path}": text for path, text in made.items()}


def start_script(settings: Settings) -> str:
    """Sets the environment and becomes the server: `exec`, so that signals reach vLLM and nobody else."""
    command = settings.planned
    exports = "".join(f"export {name}={in_shell(value)}\n" for name, value in command.environment)
    inside = (
        "# plimsoll.inside, from the wheel beside this script; installed with pip it needs no such line.\n"
        'here=$(cd "$(dirname "$0")" && pwd)\n'
        f'export PYTHONPATH="$here/{settings.wheel}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
        if command.has_gate
        else ""
    )
    lines = [" ".join(in_shell(word) for word in group) for group in flag_lines(command.words)]
    return f"#!/bin/sh\nset -eu\n\n{exports}{inside}\nexec " + " \\\n    ".join(lines) + "\n"


def unit(settings: Settings) -> str:
    """The server's unit. Which values matter and why: docs/launch.md."""
    command, timers, name = settings.planned, settings.timers, settings.name
    gate = (
        f"""\
LoadCredential=gate.token:{ETC}/gate.token
Environment=PLIMSOLL_TOKEN_FILE={_credential(name)}/gate.token
# Out of the balancer first. It may fail; the stop goes on.
ExecStop=-/usr/bin/env PYTHONPATH={ETC}/{settings.wheel} python3 -m plimsoll.inside.leave {leaving_s(settings)} {command.port}
"""
        if command.has_gate
        else ""
    )
    optional = "" if command.secrets else "-"
    return f"""\
[Unit]
Description=vLLM, {_described(settings)}
After=network-online.target
Wants=network-online.target
# Five starts in an hour, guard's among them; then it has failed, and somebody should look.
StartLimitIntervalSec=1h
StartLimitBurst=5

[Service]
Type=exec
User=vllm
# Where vLLM lives: change it if it is not in a virtual environment of that name.
Environment=PATH=/opt/vllm/bin:/usr/local/bin:/usr/bin:/bin
EnvironmentFile={optional}{ETC}/{name}.env
ExecStart={ETC}/{name}-start.sh
{gate}# SIGTERM to the server alone: sent to every process, it fails each request in flight.
KillMode=mixed
# Longer than the drain ({timers.drain_s} s), the requests in flight ({timers.shutdown_s} s) and vLLM's teardown.
TimeoutStopSec={timers.grace_s}
# vLLM ends with exit code 0 when its engine dies: on-failure would leave it dead.
Restart=always
RestartSec=30
StateDirectory={name}
Environment=HOME=/var/lib/{name}
NoNewPrivileges=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def guard_unit(settings: Settings) -> str:
    """Guard's unit. It observes: `--act` at the end of ExecStart lets it act."""
    credentials = "".join(f"LoadCredential={file}:{ETC}/{file}\n" for file in secret_files(settings.planned))
    return f"""\
[Unit]
Description=plimsoll guard
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
User=plimsoll
SupplementaryGroups=haproxy
# It observes and says what it would do. With --act at the end it does it (docs/guard-acts.md).
ExecStart=/usr/bin/plimsoll guard --config {ETC}/plimsoll.toml
WatchdogSec=60
Restart=always
RestartSec=5
# To put back what is drained.
TimeoutStopSec=60
StateDirectory=plimsoll
StateDirectoryMode=0700
RuntimeDirectory=plimsoll
Environment=XDG_RUNTIME_DIR=/run/plimsoll
{credentials}NoNewPrivileges=yes
ProtectSystem=strict

[Install]
WantedBy=multi-user.target
"""


def polkit_rule(settings: Settings) -> str:
    """Lets guard's user stop and start the server's unit, and no other."""
    return f"""\
polkit.addRule(function (action, subject) {{
    if (action.id == "org.freedesktop.systemd1.manage-units" && subject.user == "plimsoll" &&
        action.lookup("unit") == "{settings.name}.service") {{ return polkit.Result.YES; }}
}});
"""


def environment_example(settings: Settings) -> str:
    """The variables to fill in by hand: secrets are never generated."""
    command = settings.planned
    lines = [f"{name}=\n" for name in command.secrets] or ["# The planned command has no secret; HF_TOKEN= could stand here.\n"]
    top = f"# Fill it in as {ETC}/{settings.name}.env, readable by root alone (chmod 600).\n"
    key = f"# guard's canary requests need the same key, in {ETC}/api.key.\n" if "VLLM_API_KEY" in command.secrets else ""
    return "".join([top, key, *lines])


def _described(settings: Settings) -> str:
    """The model's name, as a unit may say it: a percent sign begins a specifier there."""
    model = settings.plan.model if settings.plan is not None else settings.name
    return model.replace("\\", "/").replace("%", "%%")


def _credential(unit_name: str) -> str:
    return f"/run/credentials/{unit_name}.service"


SECRETS = "/run/secrets"
DOCKERS_NAMES = "127.0.0.11:53"  # where Docker answers for the names of services


def compose_files(settings: Settings) -> dict[str, str]:
    """Names and texts."""
    made = {
        "compose.yaml": compose(settings),
        "haproxy.cfg": haproxy_config(
            settings, f"{settings.name}:{settings.planned.port}", socket=None, resolvers=DOCKERS_NAMES
        ),
        "plimsoll.toml": compose_guard_config(settings, SECRETS),
    }
    return {f"compose/{path}": text for path, text in made.items()}


def compose(settings: Settings) -> str:
    """The project. What stands in it and why: docs/launch.md."""
    has_key = "VLLM_API_KEY" in settings.planned.secrets
    project: dict[str, Any] = {
        "# Before the first start, in this folder, with an image of yours that has plimsoll in it:": None,
        "#   for f in gate guard guard-read; do head -c 24 /dev/urandom | base64 > $f.token; done; chmod 600 ./*.token": None,
        **({'#   printf %s "$VLLM_API_KEY" > api.key; chmod 600 api.key': None} if has_key else {}),
        "#   docker compose up -d": None,
        "name": settings.name,
        "services": {
            settings.name: _compose_server(settings),
            "proxy": _compose_proxy(settings),
            "plimsoll-guard": _compose_guard(settings),
        },
        "secrets": {name: {"file": f"./{name}"} for name in secret_files(settings.planned)},
        "volumes": {"cache": {}, "guard-state": {}},
    }
    return yaml_of(project)


def _compose_server(settings: Settings) -> dict[str, Any]:
    command, timers = settings.planned, settings.timers
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
        **_compose_devices(settings),
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


def _compose_devices(settings: Settings) -> dict[str, Any]:
    if is_amd(settings):
        return {"devices": ["/dev/kfd", "/dev/dri"], "security_opt": ["seccomp=unconfined"], "group_add": ["video"]}
    count = settings.plan.gpus if settings.plan is not None else 1
    device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _compose_proxy(settings: Settings) -> dict[str, Any]:
    port = proxy_port(settings)
    return {
        "image": "haproxy:lts",
        "ports": [f"{port}:{port}"],
        "volumes": ["./haproxy.cfg:/usr/local/etc/haproxy/haproxy.cfg:ro"],
        "restart": "unless-stopped",
    }


def _compose_guard(settings: Settings) -> dict[str, Any]:
    port = settings.guard_port
    return {
        "image": "${PLIMSOLL_IMAGE:?an image of yours with plimsoll in it}",
        "# It observes. To restart a container it would need Docker's socket, which is root on this machine.": None,
        "command": ["plimsoll", "guard", "--config", "/etc/plimsoll/plimsoll.toml"],
        "environment": {"STATE_DIRECTORY": "/var/lib/plimsoll"},
        "secrets": list(secret_files(settings.planned)),
        "volumes": [
            "./plimsoll.toml:/etc/plimsoll/plimsoll.toml:ro",
            "./plan.json:/etc/plimsoll/plan.json:ro",
            "guard-state:/var/lib/plimsoll",
        ],
        "ports": [f"127.0.0.1:{port}:{port}"],
        "restart": "unless-stopped",
        "stop_grace_period": "60s",
    }


WAYS = ("systemd", "compose", "kubernetes")
_FILES = {"systemd": systemd_files, "compose": compose_files, "kubernetes": kubernetes.files}


def launch_files(settings: Settings, ways: Sequence[str]) -> dict[str, str]:
    """Names and texts of the files for these ways; the wheel and plan.json lie beside them."""
    return {path: text for way in ways for path, text in _FILES[way](settings).items()}

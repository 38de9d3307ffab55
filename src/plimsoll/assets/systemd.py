"""The server and guard as systemd units, with what they need beside them in /etc/plimsoll."""

from __future__ import annotations

from plimsoll.assets import guard_config, haproxy
from plimsoll.assets.launched import launched, leaving_s
from plimsoll.assets.settings import Settings
from plimsoll.assets.texts import flag_lines, in_shell

ETC = "/etc/plimsoll"
ADMIN_SOCKET = "/run/haproxy/admin.sock"


def files(settings: Settings) -> dict[str, str]:
    """Names and texts; `vllm` in them is the settings' name."""
    command = launched(settings)
    name = settings.name
    made = {
        f"{name}-start.sh": start_script(settings),
        f"{name}.service": unit(settings),
        "plimsoll-guard.service": guard_unit(settings),
        "plimsoll.toml": guard_config.for_systemd(settings, _credential("plimsoll-guard"), ADMIN_SOCKET),
        "50-plimsoll.rules": polkit_rule(settings),
        "haproxy.cfg": haproxy.config(settings, f"127.0.0.1:{command.port}", socket=ADMIN_SOCKET),
        f"{name}.env.example": environment_example(settings),
    }
    return {f"systemd/{path}": text for path, text in made.items()}


def start_script(settings: Settings) -> str:
    """Sets the environment and becomes the server: `exec`, so that signals reach vLLM and nobody else."""
    command = launched(settings)
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
    command, timers, name = launched(settings), settings.timers, settings.name
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
    credentials = "".join(f"LoadCredential={file}:{ETC}/{file}\n" for file in guard_config.secret_files(launched(settings)))
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
    """What has to be filled in by hand, for one user's eyes: secrets are never generated."""
    command = launched(settings)
    lines = [f"{name}=\n" for name in command.secrets] or ["# The planned command has no secret; HF_TOKEN= could stand here.\n"]
    top = f"# Fill it in as {ETC}/{settings.name}.env, readable by root alone (chmod 600).\n"
    key = f"# guard's test requests need the same key, in {ETC}/api.key.\n" if "VLLM_API_KEY" in command.secrets else ""
    return "".join([top, key, *lines])


def _described(settings: Settings) -> str:
    """The model's name, as a unit may say it: a percent sign begins a specifier there."""
    model = settings.plan.model if settings.plan is not None else settings.name
    return model.replace("\\", "/").replace("%", "%%")


def _credential(unit_name: str) -> str:
    return f"/run/credentials/{unit_name}.service"

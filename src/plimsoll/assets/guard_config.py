"""guard's configuration for the server that is launched: plimsoll.toml, one for each way to launch."""

from __future__ import annotations

from plimsoll.assets.launched import launched
from plimsoll.assets.settings import Command, Settings
from plimsoll.assets.texts import quoted


def for_systemd(settings: Settings, credentials: str, socket: str) -> str:
    """The server as a unit, behind an HAProxy on the same machine."""
    balancer = f'{{haproxy = {quoted(socket)}, backend = "{settings.name}", server = "{settings.name}-0"}}'
    restart = f'{{systemd = "{settings.name}.service"}}'
    address = f"http://127.0.0.1:{launched(settings).port}"
    listen = f'listen = "127.0.0.1:{settings.guard_port}"\n{_tokens(credentials)}'
    return _text(settings, settings.name, address, credentials, balancer, restart, settings.timers.stop_s, listen)


def for_compose(settings: Settings, secrets: str) -> str:
    """The server as a container: guard sees it and does not have Docker's socket, so it cannot restart it."""
    address = f"http://{settings.name}:{launched(settings).port}"
    listen = f'listen = "0.0.0.0:{settings.guard_port}"\n{_tokens(secrets)}hosts = ["plimsoll-guard"]\n'
    return _text(settings, settings.name, address, secrets, '"readiness"', "", settings.timers.stop_s, listen)


def for_kubernetes(settings: Settings, secrets: str) -> str:
    """The server as the first pod of a StatefulSet, which guard may evict."""
    pod = f"{settings.name}-0"
    address = f"http://{pod}.{settings.name}:{launched(settings).port}"
    restart = f'{{kubernetes = "{pod}", selector = "app={settings.name}"}}'
    place = f"plimsoll-guard.{settings.namespace}"
    hosts = ", ".join(quoted(name) for name in ("plimsoll-guard", place, f"{place}.svc", f"{place}.svc.cluster.local"))
    listen = f'listen = "0.0.0.0:{settings.guard_port}"\n{_tokens(secrets)}hosts = [{hosts}]\n'
    lock = '\n[lock]\nlease = "plimsoll-guard"\n'
    return _text(settings, pod, address, secrets, '"readiness"', restart, settings.timers.evict_s, listen) + lock


def _tokens(folder: str) -> str:
    """One for people and one for Prometheus, which can only read."""
    return f'token_file = "{folder}/guard.token"\nread_token_file = "{folder}/guard-read.token"\n'


def _text(
    settings: Settings, name: str, address: str, folder: str, balancer: str, restart: str, stop_s: int, listen: str
) -> str:
    command = launched(settings)
    lines = [f"name = {quoted(name)}", f"url = {quoted(address)}"]
    if command.has_gate:
        lines.append(f'token_file = "{folder}/gate.token"')
    if "VLLM_API_KEY" in command.secrets:
        lines.append(f'api_key_file = "{folder}/api.key"')
    lines += ['canary = "30s"', 'plan = "plan.json"']
    if command.has_connector:
        lines.append("kv_connector = true                 # it is only observed")
    elif command.has_gate:
        lines.append(f"balancer = {balancer}")
        if restart:
            lines.append(f"restart = {restart}")
    engine = "\n".join(lines)
    return f"""\
# One [[engine]] for each server; every key: docs/guard-config.md
[[engine]]
{engine}

[act]                               # heeded with --act; without it guard says what it would do
stop_within = "{stop_s}s"
start_within = "{2 * settings.timers.start_s}s"
# may_be_last = true                # with a single server: it may be restarted while nobody stands in for it

[api]
{listen}"""


def secret_files(command: Command) -> tuple[str, ...]:
    """What has to lie beside the configuration, and is never generated."""
    api_key = ("api.key",) if "VLLM_API_KEY" in command.secrets else ()
    return (*(("gate.token",) if command.has_gate else ()), "guard.token", "guard-read.token", *api_key)

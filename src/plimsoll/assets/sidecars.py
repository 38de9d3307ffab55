"""What stands beside the server: the configuration of guard, and of an HAProxy that asks /plimsoll/ready."""

from __future__ import annotations

from plimsoll.assets.launch_command import RESPONSES, client_paths, ready_path
from plimsoll.assets.settings import Command, Settings
from plimsoll.assets.texts import quoted


def systemd_guard_config(settings: Settings, credentials: str, socket: str) -> str:
    """The server as a unit, behind an HAProxy on the same machine."""
    balancer = f'{{haproxy = {quoted(socket)}, backend = "{settings.name}", server = "{settings.name}-0"}}'
    restart = f'{{systemd = "{settings.name}.service"}}'
    address = f"http://127.0.0.1:{settings.planned.port}"
    listen = f'listen = "127.0.0.1:{settings.guard_port}"\n{_tokens(credentials)}'
    return _guard_config(settings, settings.name, address, credentials, balancer, restart, settings.timers.stop_s, listen)


def compose_guard_config(settings: Settings, secrets: str) -> str:
    """The server as a container: guard sees it and does not have Docker's socket, so it cannot restart it."""
    address = f"http://{settings.name}:{settings.planned.port}"
    listen = f'listen = "0.0.0.0:{settings.guard_port}"\n{_tokens(secrets)}hosts = ["plimsoll-guard"]\n'
    return _guard_config(settings, settings.name, address, secrets, '"readiness"', "", settings.timers.stop_s, listen)


def kubernetes_guard_config(settings: Settings, secrets: str) -> str:
    """The server as the first pod of a StatefulSet, which guard may evict."""
    pod = f"{settings.name}-0"
    address = f"http://{pod}.{settings.name}:{settings.planned.port}"
    restart = f'{{kubernetes = "{pod}", selector = "app={settings.name}"}}'
    place = f"plimsoll-guard.{settings.namespace}"
    hosts = ", ".join(quoted(name) for name in ("plimsoll-guard", place, f"{place}.svc", f"{place}.svc.cluster.local"))
    listen = f'listen = "0.0.0.0:{settings.guard_port}"\n{_tokens(secrets)}hosts = [{hosts}]\n'
    lock = '\n[lock]\nlease = "plimsoll-guard"\n'
    return _guard_config(settings, pod, address, secrets, '"readiness"', restart, settings.timers.evict_s, listen) + lock


def _tokens(folder: str) -> str:
    """One for people and one for Prometheus, which can only read."""
    return f'token_file = "{folder}/guard.token"\nread_token_file = "{folder}/guard-read.token"\n'


def _guard_config(
    settings: Settings, name: str, address: str, folder: str, balancer: str, restart: str, stop_s: int, listen: str
) -> str:
    command = settings.planned
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
    """Secrets that must lie beside the configuration; they are never generated."""
    api_key = ("api.key",) if "VLLM_API_KEY" in command.secrets else ()
    return (*(("gate.token",) if command.has_gate else ()), "guard.token", "guard-read.token", *api_key)


PORT = 8080
CHECK_EVERY_S = 1
FAILURES = 2


def haproxy_config(settings: Settings, address: str, *, socket: str | None, resolvers: str = "") -> str:
    """A whole configuration with one server; more engines are more `server` lines. Names are asked of the resolvers."""
    timers, name = settings.timers, settings.name
    ready = ready_path(settings.planned)
    paths, port = client_paths(settings.vllm), proxy_port(settings)
    allowed = "".join(f"    acl for_clients path {path}\n" for path in paths)
    if RESPONSES in paths:
        allowed += f"    acl for_clients path_reg ^{RESPONSES}/[A-Za-z0-9_-]+(/cancel)?$\n"
    admin = (
        f"    # `level admin`, or guard's changes are refused.\n    stats socket {socket} mode 660 level admin\n"
        if socket
        else ""
    )
    later = " resolvers names init-addr none" if resolvers else ""
    names = f"\nresolvers names\n    nameserver first {resolvers}\n" if resolvers else ""
    return f"""\
global
{admin}    # So long may a request run on in a process that a reload has replaced.
    hard-stop-after {timers.shutdown_s}s
{names}
defaults
    mode http
    timeout connect 5s
    timeout client 10m
    timeout server 10m
    timeout queue 60s
    timeout http-request 30s

frontend {name}
    bind :{port}
    # What clients may ask for, by whole paths. The rest stays in: /plimsoll/, /metrics, /health, adapters, admin endpoints.
{allowed}    http-request deny deny_status 404 unless for_clients
    http-request del-header X-Plimsoll-Priority
    default_backend {name}

backend {name}
    balance leastconn
    option httpchk GET {ready}
    http-check expect status 200
    # A connection that could not be made is tried elsewhere; a request that was sent is not sent twice.
    retries 2
    retry-on conn-failure
    option redispatch 1
    # Not ready is noticed within {CHECK_EVERY_S * (FAILURES + 1)} s.
    # No `on-marked-down shutdown-sessions`: it would cut off what still runs.
    default-server check inter {CHECK_EVERY_S}s fall {FAILURES} rise 1
    server {name}-0 {address}{later}
"""


def proxy_port(settings: Settings) -> int:
    """The port of clients: another one than the server's own."""
    return PORT if settings.planned.port != PORT else PORT + 1

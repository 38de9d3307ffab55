"""An HAProxy in front of the server: asks /plimsoll/ready, and lets clients reach what is theirs alone."""

from __future__ import annotations

from plimsoll.assets.launched import RESPONSES, client_paths, launched, ready_path
from plimsoll.assets.settings import Settings

PORT = 8080
CHECK_EVERY_S = 1
FAILURES = 2


def config(settings: Settings, address: str, *, socket: str | None, resolvers: str = "") -> str:
    """A whole configuration with one server; more engines are more `server` lines. Names are asked of the resolvers."""
    timers, name = settings.timers, settings.name
    ready = ready_path(launched(settings))
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
    """Where clients come in: another port than the server's own."""
    return PORT if launched(settings).port != PORT else PORT + 1

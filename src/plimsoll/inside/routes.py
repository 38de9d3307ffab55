"""Which requests are work, which only look, and which steer the server: a drain refuses work alone."""

from __future__ import annotations

from typing import NamedTuple

OWN = "/plimsoll/"

# POST, but no work for the engine: they steer it, and an operator needs them most while it drains.
STEERING = frozenset("""
    /ping /pause /resume /sleep /wake_up /abort_requests /collective_rpc /release_kv_cache_memory
    /reset_prefix_cache /reset_mm_cache /reset_encoder_cache
    /start_profile /stop_profile /server_info
    /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply
    /v1/load_lora_adapter /v1/unload_lora_adapter
    /init_weight_transfer_engine /shutdown_weight_transfer_engine /weight_checker
    /start_weight_update /start_draft_weight_update /update_weights /finish_weight_update /update_weight_version
    /inference/v1/abort_requests
""".split())  # fmt: skip
LOOKING = frozenset(("GET", "HEAD", "OPTIONS"))
RESPONSES = "/v1/responses/"


class Route(NamedTuple):
    """What a request is to the gate."""

    is_counted: bool  # it is in flight until it ends
    is_refusable: bool  # a drain in phase two, or shedding, may refuse it


WORK = Route(is_counted=True, is_refusable=True)
FOLLOW_UP = Route(is_counted=True, is_refusable=False)  # reads or cancels what was begun before
ASIDE = Route(is_counted=False, is_refusable=False)


def route_of(kind: str, method: str, path: str) -> Route:
    """The route of one request; what is not known is work, so that a drain never lets it pass unseen."""
    if kind == "websocket":
        return WORK
    if path.startswith(RESPONSES) and (method in (*LOOKING, "DELETE") or path.endswith("/cancel")):
        return FOLLOW_UP
    if method in LOOKING or path.rstrip("/") in STEERING:
        return ASIDE
    return WORK


def path_of(scope_path: str, root_path: str) -> str:
    """The path without the prefix that `--root-path` puts before it."""
    prefix = root_path.rstrip("/")
    if prefix and (scope_path == prefix or scope_path.startswith(f"{prefix}/")):
        return scope_path[len(prefix) :] or "/"
    return scope_path

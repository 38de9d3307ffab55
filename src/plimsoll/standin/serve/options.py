"""What an API server was told by its flags and its environment, beside what its engine is."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """Of one server; the names are those of the flags."""

    host: str = ""
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    shutdown_timeout_s: float = 0.0
    middleware: tuple[str, ...] = ()
    root_path: str = ""
    is_dev_mode: bool = False
    """VLLM_SERVER_DEV_MODE."""
    has_load_tracking: bool = False
    has_prompt_tokens_details: bool = False
    forces_usage: bool = False
    has_tools: bool = False
    """--enable-auto-tool-choice with a parser: calls are allowed, and this model never makes one."""
    has_sleep_mode: bool = True
    """--enable-sleep-mode: without it an engine that sleeps keeps its memory."""
    token: str = ""
    """PLIMSOLL_TOKEN: opens /standin/."""

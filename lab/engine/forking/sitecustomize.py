"""Has vLLM's processes fork, where the lab says so: a start then imports torch and vLLM once, not three times.

vLLM's build for CPUs takes "spawn", whatever VLLM_WORKER_MULTIPROC_METHOD says. What a child must not have from its parent is
the socket that the API server listens on: the port would stay open for as long as the child lives.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.context import BaseContext

_get_context = multiprocessing.get_context


def forked(method: str | None = None) -> BaseContext:
    """The context of this method, and "fork" in place of "spawn"."""
    return _get_context("fork" if method == "spawn" else method)


def let_go_of_listeners() -> None:
    """In a child: whatever listens for TCP becomes /dev/null, so that its number is not given to another."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with own:
            is_listening = own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
        if is_listening:
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


if os.environ.get("PLIMSOLL_LAB_FORKS") == "1":
    multiprocessing.get_context = forked  # type: ignore[assignment]
    os.register_at_fork(after_in_child=let_go_of_listeners)

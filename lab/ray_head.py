"""A Ray cluster of this machine alone, with two workers and a door for clients: python -m lab.ray_head

Says "ready PORT" once it can be reached at ray://127.0.0.1:PORT, and ends when its standard input does. Who may come in is
decided by RAY_AUTH_MODE and RAY_AUTH_TOKEN, as for any cluster.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from typing import Any

import ray
from ray.util.client.server.server import serve

TRIES = 20


def door() -> tuple[Any, int]:
    """A free port, asked for when the cluster has taken its own; one that somebody takes in between is not the last."""
    for _ in range(TRIES):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        with contextlib.suppress(RuntimeError):
            return serve("127.0.0.1", port), port
    raise SystemExit("no port was free")


def main() -> None:
    """Start, wait, stop. An address of "local" never joins a cluster that happens to run here."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    server, port = door()
    print("ready", port, flush=True)
    sys.stdin.read()
    server.stop(0)
    ray.shutdown()


if __name__ == "__main__":
    main()

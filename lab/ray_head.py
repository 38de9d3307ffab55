"""A Ray cluster of this machine alone, with two workers and a door for clients: python -m lab.ray_head

Says "ready PORT" once it can be reached at ray://127.0.0.1:PORT, and ends when its standard input does. Who may come in is
decided by RAY_AUTH_MODE and RAY_AUTH_TOKEN, as for any cluster.
"""

from __future__ import annotations

import logging
import sys

import ray
from ray.util.client.server.server import serve

from lab.engine.server import free_port


def main() -> None:
    """Start, wait, stop. An address of "local" never joins a cluster that happens to run here."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    port = free_port()  # asked for when the cluster has taken its own
    door = serve("127.0.0.1", port)
    print("ready", port, flush=True)
    sys.stdin.read()
    door.stop(0)
    ray.shutdown()


if __name__ == "__main__":
    main()

"""How long everything may take when a server starts and stops, so that each wait ends before the one around it.

    drain < shutdown < stop < grace < evict

drain     the balancer is given this long to notice that the server is no longer ready
shutdown  requests in flight are given this long to end: vLLM's own --shutdown-timeout where the release has it
stop      all of it, with vLLM's teardown: what guard waits for a unit or a container before it sends SIGKILL
grace     what systemd, compose and Kubernetes wait before they do
evict     what guard waits for a pod, which Kubernetes stops by itself
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SHUTDOWN_S = 60
SHORTEST_SHUTDOWN_S = 10
LONGEST_SHUTDOWN_S = 1500  # guard waits half an hour at most for a stop
DRAIN_S = 30  # the gate's own bound for the first phase of a drain
TEARDOWN_S = 30  # six seconds were seen with one process on an idle machine; workers of several GPUs take longer
SPARE_S = 30

START_BASE_S = 600  # as long as vLLM itself waits for its engine (VLLM_ENGINE_READY_TIMEOUT_S): profile, compile, graphs
SLOWEST_READ_BYTES_PER_S = 100_000_000  # weights over a network, or from one spinning disk
LONGEST_START_S = 7200  # what guard gives a start


@dataclass(frozen=True)
class Timers:
    """Seconds, each shorter than the one around it; `start_s` stands alone."""

    drain_s: int
    shutdown_s: int
    stop_s: int
    grace_s: int
    evict_s: int
    start_s: int


def timers_of(shutdown_s: int | None = None, weights_bytes: int = 0) -> Timers:
    """The timers around a --shutdown-timeout, if one is wished for, and a start that reads so many bytes of weights."""
    wished = DEFAULT_SHUTDOWN_S if shutdown_s is None else shutdown_s
    shutdown = min(max(wished, SHORTEST_SHUTDOWN_S), LONGEST_SHUTDOWN_S)
    drain = min(DRAIN_S, shutdown // 2)
    stop = drain + shutdown + TEARDOWN_S
    reading = max(0, weights_bytes) // SLOWEST_READ_BYTES_PER_S
    start = min(-(-(START_BASE_S + reading) // 60) * 60, LONGEST_START_S)
    return Timers(drain, shutdown, stop, stop + SPARE_S, stop + 2 * SPARE_S, start)

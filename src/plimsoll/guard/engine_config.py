"""Configuration of one engine: from its [[engine]], or from discovery."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, replace
from typing import Self, get_args
from urllib.parse import urlsplit

from plimsoll.guard import config_fields as key
from plimsoll.guard.adapters.command import CommandRestarterConfig
from plimsoll.guard.adapters.docker import DockerConfig
from plimsoll.guard.adapters.haproxy import HaproxyConfig
from plimsoll.guard.adapters.hooks import CommandBalancerConfig, ReadinessConfig, WebhookBalancerConfig
from plimsoll.guard.adapters.kubernetes import PodConfig
from plimsoll.guard.adapters.systemd import SystemdConfig
from plimsoll.net.address import address

LONGEST_NAME = 200
BalancerConfig = HaproxyConfig | CommandBalancerConfig | WebhookBalancerConfig | ReadinessConfig
RestarterConfig = SystemdConfig | CommandRestarterConfig | DockerConfig | PodConfig


@dataclass(frozen=True, slots=True)
class EngineConfig(key.ConfigTable):
    """[[engine]]: one engine that guard watches, and the actions that guard may take on it."""

    name: str = key.word(MISSING, "what it is called; default: host and port", convert=str.strip)
    url: str = key.url("what stands before /metrics; needed", example='"http://HOST:PORT"')
    token: str | None = key.secret("of its gate; without it guard does nothing at the gate")
    canary_s: float | None = key.canary("how often a request of one token is sent; true is 30s")
    plan: tuple[float, float, float] | None = key.other(
        "plan", "what `plimsoll plan --json` printed: a start that differs is said"
    )
    gate_url: str | None = key.other("gate", "where the gate has a port of its own; or a socket: unix:/PATH", key="gate")
    api_key: str | None = key.secret("vLLM's own --api-key, for canary requests and for warming up", shortest=1)
    group: str = key.word(
        "", "engines of one group carry each other's load; those without one are a group, too", convert=str.strip
    )
    balancer: BalancerConfig | None = key.table(
        'what sends requests to it (below); or "readiness": it asks /plimsoll/ready', *get_args(BalancerConfig)
    )
    restart: RestarterConfig | None = key.table("how it is stopped and started (below)", *get_args(RestarterConfig))
    log: str | None = key.path("its log: for evidence, and to see that a start goes on")
    recording: str | None = key.path("its PLIMSOLL_RECORD folder, on this machine: replayed for advice, with [promise]")
    kv_connector: bool = key.switch("it shares its KV cache with others: it is only observed")
    nodes: int = key.count(1, 1, 1_000, "machines that it runs on: with more than one it is only observed")

    @property
    def only_observed(self) -> str:
        """The reason why guard never acts on it; empty where it may."""
        if self.kv_connector:
            return "it has a KV connector: guard only observes it"
        return f"it runs on {self.nodes} machines: guard only observes it" if self.nodes > 1 else ""

    def checked(self, given: Collection[str]) -> Self:
        """Returns itself, with the default name if none is given; raises WrongKey for an empty name."""
        if "name" in given and not self.name:
            raise key.WrongKey("name", "an empty name is none; leave it out for host and port")
        return self if self.name else replace(self, name=host_and_port(self.url))


def host_and_port(url: str) -> str:
    """Returns the default name of an engine: the host, port and path of its address."""
    parts = urlsplit(address(url).shown)
    return f"{parts.netloc}{parts.path.rstrip('/')}"[:LONGEST_NAME]

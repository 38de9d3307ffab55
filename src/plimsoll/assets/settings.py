"""Input of every generated file: one plan, one vLLM version, and names and ports that agree between the files."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_SHUTDOWN_S = 60
SHORTEST_SHUTDOWN_S = 10
LONGEST_SHUTDOWN_S = 1500  # guard waits half an hour at most for a stop
DRAIN_S = 30  # the gate's own bound for the first phase of a drain
TEARDOWN_S = 30  # six seconds were seen with one process on an idle machine; workers of several GPUs take longer
SPARE_S = 30

START_BASE_S = 600  # as long as vLLM itself waits for its engine (VLLM_ENGINE_READY_TIMEOUT_S): profile, compile, graphs
SLOWEST_READ_BYTES_PER_S = 100_000_000  # weights over a network, or from one spinning disk
LONGEST_START_S = 7200  # guard's limit for a start


@dataclass(frozen=True)
class Timers:
    """Time limits of a server's start and stop: each wait is shorter than the next, so it ends first."""

    drain_s: int  # the balancer notices that the server is no longer ready
    shutdown_s: int  # requests in flight end: vLLM's own --shutdown-timeout where the release has it
    stop_s: int  # all of it, with vLLM's teardown: guard's wait for a unit or a container before SIGKILL
    grace_s: int  # the wait of systemd, compose and Kubernetes before SIGKILL
    evict_s: int  # guard's wait for a pod, which Kubernetes stops by itself
    start_s: int  # independent of the others


def timers_of(shutdown_s: int | None = None, weights_bytes: int = 0) -> Timers:
    """Returns the timers for a --shutdown-timeout (None: the default) and a start that reads so many bytes of weights."""
    wished = DEFAULT_SHUTDOWN_S if shutdown_s is None else shutdown_s
    shutdown = min(max(wished, SHORTEST_SHUTDOWN_S), LONGEST_SHUTDOWN_S)
    drain = min(DRAIN_S, shutdown // 2)
    stop = drain + shutdown + TEARDOWN_S
    reading = max(0, weights_bytes) // SLOWEST_READ_BYTES_PER_S
    start = min(-(-(START_BASE_S + reading) // 60) * 60, LONGEST_START_S)
    return Timers(drain, shutdown, stop, stop + SPARE_S, stop + 2 * SPARE_S, start)


DOCS_URL = "https://github.com/plimsoll-line/plimsoll/tree/main/docs"
"""Where alerts and comments point to; findings are under `findings/<code>.md`."""


@dataclass(frozen=True)
class PlanFacts:
    """Figures of `plimsoll plan --json`. Bytes are of one GPU, that of the decisive rank; tokens of one engine (DP rank)."""

    model: str
    fits: bool
    gpu: str
    gpus: int
    requested_bytes: int
    weights_bytes: int
    kv_bytes: int
    slack_bytes: int
    kv_tokens: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_connector: str | None = None


@dataclass(frozen=True)
class Command:
    """The start command in the files: accepted by the version, with plimsoll.inside and the timers in it."""

    words: tuple[str, ...]  # From `vllm` on; none of them holds a secret or a variable
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()  # Variables whose values the plan hid: they come from a file that is not generated
    port: int = 8000
    has_gate: bool = True  # With plimsoll.inside; without it readiness is /health, and guard only observes
    has_connector: bool = False  # It shares its KV cache with something else: guard then only observes, too


@dataclass(frozen=True, slots=True)
class Toleration:
    key: str
    value: str = ""  # empty: any value
    effect: str = ""  # empty: every effect


@dataclass(frozen=True, slots=True)
class Cluster:
    """The user's settings for the Kubernetes objects: namespaces, names, images, resources."""

    namespaces: tuple[str, ...] = ("models",)  # those of the engines; guard runs in the first
    guard: str = "plimsoll-guard"  # the name of guard's objects, its Lease among them
    selector: str = ""  # labels of the engines' pods; empty: app=NAME
    image: str = ""  # plimsoll's own, for guard and for the init container
    server_image: str = ""  # empty: vLLM's own image of the plan's release
    replicas: int = 1
    port: int = 8000  # of the engines
    workload: str = "StatefulSet"
    host: str = "llm.example.com"
    gateway: str = ""  # NAMESPACE/NAME of a Gateway; empty: an Ingress
    requests: tuple[tuple[str, str], ...] = ()
    limits: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()

    @property
    def namespace(self) -> str:
        return self.namespaces[0]


@dataclass(frozen=True)
class AssetSettings:
    """A plan, a version, and the names by which the files refer to each other."""

    vllm: str  # A release such as 0.32.0
    plan: PlanFacts | None = None  # None without --plan: thresholds are then general ones, and nothing can be launched
    command: Command | None = None  # None without --plan
    ttft_s: float = 2.0  # the promise to users, `--slo ttft=2s`; no alert asks for tpot yet
    timers: Timers = field(default_factory=timers_of)
    name: str = "vllm"
    """Of the unit, the service, the StatefulSet, the label `app` and, unless told otherwise, Prometheus's job."""
    own_job: str = ""  # The scrape job of the engines in the user's Prometheus, if it is not the name
    cluster: Cluster = Cluster()
    targets: tuple[str, ...] = ("127.0.0.1:8000",)  # Host and port of every engine, for Prometheus
    guard_port: int = 9790
    guard_target: str = "127.0.0.1:9790"
    wheel: str = ""  # The file name of plimsoll.inside's wheel, beside the files that mount it
    made_by: tuple[str, ...] = ()
    """Lines that say which plan, version and command made a file; no secret in them. The command puts them on top of every
    file that takes comments; a dashboard has them in its description."""

    @property
    def planned(self) -> Command:
        """The planned command; only for settings with a plan, from which alone launch files are made."""
        assert self.command is not None
        return self.command

    @property
    def job(self) -> str:
        return self.own_job or self.name

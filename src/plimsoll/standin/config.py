"""From a planned `vllm serve` command to an engine, its server and its log.

plan ──> Ledger ──┬──> scheduler settings, step time, memory sizes ──> StandinConfig
flags ────────────┼──> ServerFlags: port, keys, limits
                  └──> StartLog: the lines that the start prints, or why it fails
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import Argument, CommandLine
from plimsoll.launch.options import decimal
from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.settings import Flags
from plimsoll.simulate.settings import EngineLimits, StepTime, planned_settings
from plimsoll.simulate.silicon import sheet_clock
from plimsoll.simulate.start import check_start
from plimsoll.standin.engine import StandinConfig
from plimsoll.standin.launch_log import StartFailure, StartLog, failure_of
from plimsoll.standin.memory import MemorySizes
from plimsoll.standin.request import HISTOGRAMS
from plimsoll.units import parse_vllm_integer
from plimsoll.vllm.flags import FlagRow
from plimsoll.vllm.metrics import cache_config_labels
from plimsoll.vllm.versions import Coverage, yaml_table


def cache_labels(ledger: Ledger) -> dict[str, str]:
    """Returns the labels of vllm:cache_config_info for the planned server, in the page's order; the page adds `engine`."""
    settings, kv = ledger.settings, ledger.kv_plan
    planned = {
        "block_size": str(kv.block_size),
        "cache_dtype": settings.kv_cache_dtype,
        "cpu_offload_gb": f"{settings.cpu_offload_gib:g}",
        "effective_attention_block_size": str(kv.block_size),
        "enable_prefix_caching": str(settings.prefix_caching),
        "gpu_memory_utilization": str(settings.utilization),
        "kv_cache_max_concurrency": str(kv.max_concurrency),
        "kv_cache_memory_bytes": str(settings.kv_cache_memory_bytes),
        "kv_cache_size_tokens": str(kv.tokens),
        "num_gpu_blocks": str(kv.num_blocks),
        "num_gpu_blocks_override": str(settings.num_gpu_blocks_override),
        "user_specified_block_size": str(settings.block_size is not None),
    }
    return {name: planned.get(name, value) for name, value in cache_config_labels(settings.release).items()}


_EDGES = {name: tuple(map(float, text.split())) for name, text in yaml_table("metrics_page")["edges"].items()}


def edges_of(max_model_len: int) -> dict[str, tuple[float, ...]]:
    """Returns the upper bounds of each histogram, without the infinite one; lengths go up to the context."""
    powers = range(len(str(max_model_len)))
    lengths = tuple(float(digit * 10**n) for n in powers for digit in (1, 2, 5) if digit * 10**n <= max_model_len)
    return {name: _EDGES.get(name, lengths) for name in HISTOGRAMS}


HOST = "127.0.0.1"  # the default of --host; vLLM itself would listen everywhere
PROBE = ("plimsoll.inside.Probe", "plimsoll.inside.probe.Probe")
_QUEUE_LIMITS = ("--max-num-queued-reqs", "--max-num-queued-tokens")
_SECRET = frozenset(("--api-key", "--hf-token"))
# Flags that would need more than one process, or another kind of listener.
_ONE_PROCESS = "; the stand-in is one process with one engine"
_REFUSED: Mapping[str, str] = {
    "--headless": "a node without an API server has nothing to answer with",
    "--grpc": "the stand-in speaks HTTP",
    "--uds": "the stand-in listens on a port; give --host and --port",
    "--ssl-keyfile": "the stand-in speaks plain HTTP; put a proxy with TLS in front of it",
    "--ssl-certfile": "the stand-in speaks plain HTTP; put a proxy with TLS in front of it",
}
_MOST_TOKENS = 1 << 22  # a table keeps a step time for each number of tokens


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """The settings of an API server: its flags, under their own names, and its environment."""

    host: str = ""
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    shutdown_timeout_s: float = 0.0
    middleware: tuple[str, ...] = ()
    root_path: str = ""
    is_dev_mode: bool = False  # VLLM_SERVER_DEV_MODE
    has_prompt_tokens_details: bool = False
    has_sleep_mode: bool = True  # --enable-sleep-mode: without it an engine that sleeps keeps its memory
    has_probe: bool = True  # --worker-extension-cls plimsoll.inside.Probe: the workers report their memory
    has_stats: bool = True  # False: --disable-log-stats, which also takes the vllm: metrics away
    stats_interval_s: float = 10.0  # between two lines of throughput
    shows_requests: bool = True  # one line of the log for each answer
    stays_when_dead: bool = False  # VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1
    token: str = ""  # PLIMSOLL_TOKEN: opens /standin/

    @property
    def address(self) -> str:
        """The URL it listens at, as its log prints it."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Launchable:
    """A server that can be started; with a `failure` the start ends with exit code 1 instead."""

    config: StandinConfig
    options: ServerFlags
    log: StartLog
    failure: StartFailure | None = None


def launch_of(
    plan: MemoryPlan, line: CommandLine, environment: Mapping[str, str], times: Mapping[str, int], start_s: float
) -> Launchable:
    """Returns the server of a planned command; `times` replace fields of StepTime. BadInput for one it cannot imitate."""
    ledger = plan.ledger
    release = ledger.settings.release
    if Coverage.CACHE_LABELS.begins_after(release):
        raise BadInput(f"the stand-in knows vLLM from {Coverage.CACHE_LABELS.first} on, not {release}")
    flags = Flags(line, release)
    if ledger.settings.data_parallel > 1:
        ranks = ledger.settings.data_parallel
        raise BadInput(f"--data-parallel-size {ranks}{_ONE_PROCESS}: start one for each rank, with --fleet")
    servers = flags.integer("--api-server-count")
    if servers is not None and servers != 1:
        raise BadInput(f"--api-server-count {servers}{_ONE_PROCESS} and one API server")
    for name, why in _REFUSED.items():
        if name in flags.given and not flags.given[name].is_negated:
            raise BadInput(f"{name}: {why}")
    options = _options(line, environment, flags)
    typed = {
        a.row.name.lstrip("-").replace("-", "_"): _typed_value(a, a.row)
        for a in line.arguments
        if a.row is not None and a.row.name != "--model"
    }
    words = repr({"model_tag": plan.model, **typed})
    log = StartLog(ledger, plan.shape, plan.model, words, options.address, options.is_dev_mode, start_s)
    sizes = memory_sizes(ledger, plan.shape)
    failure = failure_of(log, sizes, environment)
    settings, step_time = planned_settings(ledger.settings, ledger.kv_plan), StepTime()
    if failure is None:
        if not ledger.kv_plan.groups:
            raise BadInput(f"{plan.model} keeps no KV cache; the stand-in is for models that write text")
        if settings.num_blocks < 2:
            raise BadInput("one KV block leaves nothing to serve with: it is the null block; vLLM starts and answers nothing")
        if settings.max_num_batched_tokens > _MOST_TOKENS:
            raise BadInput(f"--max-num-batched-tokens {settings.max_num_batched_tokens}: {_MOST_TOKENS} at most")
        check_start(settings)
        step_time = step_time_of(ledger, plan.shape, settings, times)
    named = flags.given.get("--served-model-name")
    length = ledger.kv_plan.max_model_len
    config = StandinConfig(
        release=release,
        model=plan.model,
        served_names=named.values if named is not None and named.values else (plan.model,),
        max_model_len=length,
        settings=settings,
        step_time=step_time,
        sizes=sizes,
        edges=edges_of(length),
        cache_labels=cache_labels(ledger),
        workers=ledger.settings.tensor_parallel * ledger.settings.pipeline_parallel,
        seed=flags.integer("--seed") or 0,
    )
    return Launchable(config, options, log, failure)


def step_time_of(ledger: Ledger, shape: ModelShape, settings: EngineLimits, times: Mapping[str, int]) -> StepTime:
    """Returns the given step times, else those of the card's data sheet, else the defaults."""
    if times:
        return StepTime(**{**StepTime()._asdict(), **times})
    clock = sheet_clock(ledger, shape, settings)
    return StepTime() if clock is None else clock.step_time


def memory_sizes(ledger: Ledger, shape: ModelShape) -> MemorySizes:
    """Returns the ledger's central figures for one worker."""
    settings, kv = ledger.settings, ledger.kv_plan
    return MemorySizes(
        total=ledger.card.total_bytes,
        context=ledger.context.value,
        neighbours=ledger.card.used_bytes,
        requested=ledger.requested.value,
        weights=ledger.weights.value,
        non_torch=ledger.non_torch.value,
        activation_peak=ledger.activation.value,
        graphs=ledger.graphs_actual.value,
        kv_cache=kv.num_blocks * kv.bytes_per_block,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        vocab=shape.vocab_size,
        is_profiled=settings.kv_cache_memory_bytes is None,
    )


def _options(line: CommandLine, environment: Mapping[str, str], flags: Flags) -> ServerFlags:
    port, requests, tokens = (flags.integer(name) for name in ("--port", *_QUEUE_LIMITS))
    timeout = flags.number("--shutdown-timeout")
    given = dict(zip(("--port", "--shutdown-timeout", *_QUEUE_LIMITS), (port, timeout, requests, tokens), strict=True))
    for name, number in given.items():
        if number is not None and not 0 <= number <= (65535 if name == "--port" else 2**31):
            raise BadInput(f"{name} must lie between 0 and {65535 if name == '--port' else 2**31}, not {number:g}")
    interval = decimal(environment.get("VLLM_LOG_STATS_INTERVAL", "10"), "VLLM_LOG_STATS_INTERVAL")
    keys = flags.given.get("--api-key")
    from_environment = (environment["VLLM_API_KEY"],) if environment.get("VLLM_API_KEY") else ()
    middleware = [a.values[-1] for a in line.arguments if a.row and a.row.name == "--middleware" and a.values]
    return ServerFlags(
        host=flags.text("--host") or HOST,
        port=8000 if port is None else port,
        api_keys=keys.values if keys is not None and keys.values else from_environment,
        max_num_queued_reqs=requests,
        max_num_queued_tokens=tokens,
        shutdown_timeout_s=timeout or 0.0,
        middleware=tuple(middleware),
        root_path=flags.text("--root-path") or "",
        is_dev_mode=environment.get("VLLM_SERVER_DEV_MODE") == "1",
        has_prompt_tokens_details=bool(flags.switch("--enable-prompt-tokens-details")),
        has_sleep_mode=bool(flags.switch("--enable-sleep-mode")),
        has_probe=flags.text("--worker-extension-cls") in PROBE,
        has_stats=not flags.switch("--disable-log-stats"),
        stats_interval_s=interval if interval > 0 else 10.0,
        shows_requests=not flags.switch("--disable-uvicorn-access-log"),
        stays_when_dead=environment.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1",
        token=environment.get("PLIMSOLL_TOKEN", ""),
    )


def _typed_value(argument: Argument, row: FlagRow) -> object:
    if row.name in _SECRET:
        return "***"
    if not row.takes_value:
        return not argument.is_negated
    if row.nargs in ("+", "*") or row.repeats:
        return list(argument.values)
    text = argument.values[-1] if argument.values else ""
    try:
        if row.kind.startswith("human-int"):
            return parse_vllm_integer(text)
        return int(text) if row.kind == "int" else float(text) if row.kind == "float" else text
    except (ValueError, BadInput):
        return text  # `auto`, or a variable that nobody assigned

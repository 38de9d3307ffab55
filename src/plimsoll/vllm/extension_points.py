"""The needs of plimsoll.inside in vLLM (`NEEDS`), looked up in the signatures of its sources.

Nothing of vLLM is run: `judge` reads its files, `answers_in` the table of the releases, `verdicts` sums up either.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from plimsoll.vllm import versions
from plimsoll.vllm.versions import Behaviour, Coverage

ANY = "*"  # among the arguments of a function: it takes any others too


class ClassShape(NamedTuple):
    """One class: its methods with their arguments, and what it assigns to `self` or declares as a field."""

    methods: dict[str, tuple[str, ...]]
    attributes: frozenset[str]


class FileShape(NamedTuple):
    """One file."""

    classes: dict[str, ClassShape]
    functions: dict[str, tuple[str, ...]]
    words: frozenset[str]  # every name, attribute and text constant that the code uses; what comments mention is not there
    assigned: frozenset[str]  # attributes of whatever object that get a value


class Sources(NamedTuple):
    """The files of one vLLM: how to read one by its path in the package, and which lie under a folder."""

    read: Callable[[str], str | None]  # None: there is no such file
    listed: Callable[[str], Sequence[str]]


@functools.lru_cache(maxsize=64)
def shape_of(text: str) -> FileShape | None:
    """Returns the definitions in a file; None where this Python cannot parse it."""
    try:
        tree = ast.parse(text)
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        shapes = {node.name: ClassShape(_functions(node.body), frozenset(_attributes(node))) for node in classes}
        return FileShape(shapes, _functions(tree.body), *_words(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _functions(body: list[ast.stmt]) -> dict[str, tuple[str, ...]]:
    return {node.name: _arguments(node.args) for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _arguments(given: ast.arguments) -> tuple[str, ...]:
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (*names, ANY) if given.kwarg is not None else tuple(names)


def _attributes(node: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for statement in node.body:
        names |= {target.id for target in _targets(statement) if isinstance(target, ast.Name)}
    for inner in ast.walk(node):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                names.add(target.attr)
    return names


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _words(tree: ast.Module) -> tuple[frozenset[str], frozenset[str]]:
    words: set[str] = set()
    assigned: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
            if isinstance(node.ctx, ast.Store):
                assigned.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
        elif isinstance(node, ast.alias):
            words.add(node.name)
    return frozenset(words), frozenset(assigned)


class InsidePart(StrEnum):
    """A part of plimsoll.inside that an operator gets."""

    PROBE = "probe"
    GATE = "gate"
    DRAIN = "drain"
    SHED = "shed"
    RECORDER = "recorder"


class NeedState(StrEnum):
    """The outcome of looking for one need."""

    FOUND = "found"
    DIFFERENT = "different"  # something of that name is there, but not as we need it
    ABSENT = "absent"
    NOT_NEEDED = "not needed"

    @property
    def is_met(self) -> bool:
        """True if nothing is lost."""
        return self in (NeedState.FOUND, NeedState.NOT_NEEDED)


class Weight(StrEnum):
    """The loss of a part by an unmet need: itself, a piece that people count on, or a detail."""

    MUST = "must"
    HELPS = "helps"
    DETAIL = "detail"


class Symbols(NamedTuple):
    """A file and the names it must define, all of them."""

    files: tuple[str, ...]  # where releases keep it, any one of them; paths inside the package
    owner: str = ""  # the class that has the methods and attributes
    methods: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name, and the arguments we give it
    begins: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name, and the arguments it must begin with: it is stood in for
    attributes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # names or text constants that the file's code uses
    assigned: tuple[str, ...] = ()  # attributes that the file's code sets on some object


class Way(NamedTuple):
    """One of the shapes in which releases have what is needed."""

    says: str  # how it is then used; may be empty
    looks: tuple[Symbols, ...]


class Need(NamedTuple):
    """One thing that plimsoll.inside relies on."""

    name: str
    purpose: str
    lost: str  # what is missing without it
    ways: tuple[Way, ...]  # the best first
    weights: Mapping[InsidePart, Weight]
    unneeded_without: Symbols | None = None  # a release without this has no use for it
    unneeded_because: str = ""
    none_in: tuple[str, ...] = ()  # folders whose classes must not define what `forbidden` names
    forbidden: str = ""  # a name, or the beginning of one if it ends in _


class NeedAnswer(NamedTuple):
    """The answer of the sources to one need."""

    name: str
    state: NeedState
    where: str = ""  # the file that shows it
    note: str = ""


class PartVerdict(NamedTuple):
    """The verdict on one part."""

    part: InsidePart
    works: str  # yes, partly, no
    because: tuple[str, ...] = ()  # what is lost, the worst first
    details: tuple[str, ...] = ()  # what is lost and hardly missed


def judge(sources: Sources, needs: Sequence[Need]) -> tuple[NeedAnswer, ...]:
    """One answer for each need."""
    return tuple(_forbidden(need, sources) if need.forbidden else _answer(need, sources) for need in needs)


def _answer(need: Need, sources: Sources) -> NeedAnswer:
    nearest: NeedAnswer | None = None
    for way in need.ways:
        found = [_look(look, sources) for look in way.looks]
        wrong = next((inner for inner in found if not inner.state.is_met), None)
        if wrong is None:
            return NeedAnswer(need.name, NeedState.FOUND, found[0].where, way.says)
        if nearest is None or (wrong.state is NeedState.DIFFERENT and nearest.state is NeedState.ABSENT):
            nearest = wrong
    if need.unneeded_without is not None and not _look(need.unneeded_without, sources).state.is_met:
        return NeedAnswer(need.name, NeedState.NOT_NEEDED, note=need.unneeded_because)
    assert nearest is not None, f"{need.name} has no ways"
    return nearest._replace(name=need.name)


def _look(look: Symbols, sources: Sources) -> NeedAnswer:
    """FOUND where one of the files shows everything; else the answer of the file that shows most."""
    nearest = NeedAnswer("", NeedState.ABSENT, look.files[0], "there is no such file")
    for path in look.files:
        text = sources.read(path)
        if text is None:
            continue
        missing, has_owner = _missing(look, text)
        if not missing:
            return NeedAnswer("", NeedState.FOUND, path)
        state = NeedState.DIFFERENT if has_owner else NeedState.ABSENT
        if nearest.state is NeedState.ABSENT:
            nearest = NeedAnswer("", state, path, missing)
    return nearest


def _missing(look: Symbols, text: str) -> tuple[str, bool]:
    """Returns the first thing that is missing, and True if at least what should hold it is there."""
    shape = shape_of(text)
    if shape is None:
        return "the file cannot be parsed", True
    owner = shape.classes.get(look.owner) if look.owner else None
    if look.owner and owner is None:
        return f"there is no class {look.owner}", False
    methods = owner.methods if owner is not None else shape.functions
    for name, arguments in look.methods:
        shown = f"{look.owner}.{name}" if look.owner else name
        if name not in methods:
            return f"there is no {shown}", owner is not None
        lacking = [argument for argument in arguments if argument not in methods[name]]
        if lacking and ANY not in methods[name]:
            return f"{shown} does not take {', '.join(lacking)}", True
    for name, arguments in look.begins:
        if methods.get(name, ())[: len(arguments)] != arguments:
            return f"{look.owner}.{name} does not begin with {', '.join(arguments[1:])}", True
    attributes = owner.attributes | set(owner.methods) if owner is not None else shape.assigned
    gone = [name for name in look.attributes if name not in attributes]
    if gone:
        return f"{look.owner or 'the file'} has no {', '.join(gone)}", owner is not None
    gone = [word for word in look.words if word not in shape.words] + [n for n in look.assigned if n not in shape.assigned]
    return (f"its code does not name {', '.join(gone)}", False) if gone else ("", True)


def _forbidden(need: Need, sources: Sources) -> NeedAnswer:
    """A need that something is not there."""
    is_beginning = need.forbidden.endswith("_") and not need.forbidden.startswith("__")
    for folder in need.none_in:
        for path in sources.listed(folder):
            text = sources.read(path)
            shape = shape_of(text) if text is not None and need.forbidden in text else None
            for name, inner in (shape.classes if shape is not None else {}).items():
                names = {*inner.methods, *inner.attributes}
                taken = [n for n in sorted(names) if n == need.forbidden or (is_beginning and n.startswith(need.forbidden))]
                if taken:
                    return NeedAnswer(need.name, NeedState.DIFFERENT, path, f"{name} defines {taken[0]}")
    return NeedAnswer(need.name, NeedState.FOUND, need.none_in[0])


def verdicts(answers: Sequence[NeedAnswer], needs: Sequence[Need]) -> tuple[PartVerdict, ...]:
    """Sums the answers up, part by part."""
    states = {answer.name: answer.state for answer in answers}
    made = []
    for part in InsidePart:
        lost: dict[Weight, list[str]] = {weight: [] for weight in Weight}
        for need in needs:
            weight = need.weights.get(part)
            if weight is not None and not states.get(need.name, NeedState.ABSENT).is_met:
                lost[weight].append(need.lost)
        works = "no" if lost[Weight.MUST] else "partly" if lost[Weight.HELPS] else "yes"
        because = (*lost[Weight.MUST], *lost[Weight.HELPS])
        made.append(PartVerdict(part, works, tuple(dict.fromkeys(because)), tuple(dict.fromkeys(lost[Weight.DETAIL]))))
    return tuple(made)


_PROBE, _GATE, _DRAIN, _SHED, _RECORDER = InsidePart
_MUST, _HELPS, _DETAIL = Weight.MUST, Weight.HELPS, Weight.DETAIL

_WORKER_BASE = ("v1/worker/worker_base.py", "worker/worker_base.py")  # the second holds the wrapper up to 0.11.0
_WORKERS = ("v1/worker", "worker")
_SERVER = (
    "entrypoints/launchers/api_server/app_state.py",  # 0.29.0 on
    "entrypoints/serve/middleware/register.py",  # 0.29.0 on
    "entrypoints/openai/api_server.py",
)
_CLIENT = ("v1/engine/async_llm.py",)
_OUTPUT = ("v1/engine/output_processor.py",)
_LOGGERS = ("v1/metrics/loggers.py",)
_STATS = ("v1/metrics/stats.py",)
_RESPONSES = ("entrypoints/openai/responses/serving.py", "entrypoints/openai/serving_responses.py")

_GPU_WORKER = Symbols(("v1/worker/gpu_worker.py",), "Worker")
_BUDGET = ("init_snapshot", "requested_memory", "peak_activation_memory")
_PLUGIN_FACTORIES = "load_stat_logger_plugin_factories"
_BY_THE_GATE = "by the gate, into the engine client's own loggers"
_RECORD = Symbols(_LOGGERS, "StatLoggerBase", methods=(("record", ("scheduler_stats", "iteration_stats")),))
_QUEUES = Symbols(_STATS, "SchedulerStats", attributes=("num_running_reqs", "num_waiting_reqs"))


def _as(*looks: Symbols, says: str = "") -> Way:
    return Way(says, looks)


NEEDS: tuple[Need, ...] = (
    Need("worker extension", "adds the probe to vLLM's worker class (--worker-extension-cls)",
         "no figures of the allocator, no compaction, no snapshot",
         (_as(Symbols(_WORKER_BASE, words=("worker_extension_cls", "__bases__"))),), {_PROBE: _MUST}),
    Need("free names", "vLLM refuses an extension whose names its worker has already",
         "vLLM refuses to start with the probe: a name is taken", (), {_PROBE: _MUST}, none_in=_WORKERS, forbidden="plimsoll_"),
    Need("first call of a worker", "starts the sampling thread together with the worker",
         "figures start with the first call into the workers instead of with the worker", (), {_PROBE: _DETAIL},
         none_in=_WORKERS, forbidden="__new__"),
    Need("general plugins", "adds the probe where another worker extension is in use (PLIMSOLL_PROBE=plugin)",
         "no probe beside another worker extension",
         (_as(Symbols(_WORKER_BASE, words=("load_general_plugins",)),
              Symbols(("plugins/__init__.py",), words=("vllm.general_plugins",)),
              Symbols(("v1/worker/worker_base.py",), "WorkerBase")),), {_PROBE: _DETAIL}),
    Need("end of a worker's start", "tells a worker that starts from one that serves",
         "a worker counts as serving a minute after its KV cache is there",
         (_as(_GPU_WORKER._replace(methods=(("compile_or_warm_up_model", ()), ("load_model", ())))),), {_PROBE: _DETAIL}),
    Need("start-up budget", "what the worker measured and asked for when it started",
         "part of the start-up budget is not shown",
         (_as(_GPU_WORKER._replace(attributes=(*_BUDGET, "total_consumed"))),
          _as(_GPU_WORKER._replace(attributes=(*_BUDGET, "non_torch_memory")))), {_PROBE: _DETAIL}),
    Need("sleeping memory", "keeps compaction away from memory that sleeps (--enable-sleep-mode)",
         "with --enable-sleep-mode compaction is refused",
         (_as(Symbols(("device_allocator/cumem.py",), words=("is_asleep",))),), {_PROBE: _DETAIL}),
    Need("middleware", "puts the gate in front of the server (--middleware)", "no endpoints, no readiness, no drain",
         (_as(Symbols(_SERVER, words=("middleware", "add_middleware", "isclass"))),),
         {_GATE: _MUST, _DRAIN: _MUST, _SHED: _MUST}),
    Need("engine client", "reaches the engine from the gate (app.state.engine_client)",
         "the gate cannot see the engine: it knows neither when it starts nor when it dies",
         (_as(Symbols(_SERVER, assigned=("engine_client",))),), {_GATE: _MUST, _SHED: _MUST}),
    Need("dead engine", "what vLLM knows of its engine's death", "readiness does not tell a dead engine",
         (_as(Symbols(_CLIENT, "AsyncLLM", methods=(("errored", ()),))),), {_GATE: _HELPS}),
    Need("calls into workers", "compaction and snapshots, without a timeout and one at a time",
         "no /plimsoll/compact and no /plimsoll/snapshot",
         (_as(Symbols(_CLIENT, "AsyncLLM", methods=(("collective_rpc", ("method", "timeout", "args", "kwargs")),))),),
         {_GATE: _HELPS}),
    Need("test request", "one token, to prove that a stuck engine is wedged",
         "a wedged engine is suspected but not proven, so it stays ready",
         (_as(Symbols(_CLIENT, "AsyncLLM", methods=(("generate", ("prompt", "sampling_params", "request_id")),))),),
         {_GATE: _HELPS}),
    Need("requests with the engine", "counts what the engine still holds, and the tokens that wait",
         "requests that live on in the engine are not counted, nor the tokens that wait",
         (_as(Symbols(_CLIENT, "AsyncLLM", attributes=("output_processor",)),
              Symbols(_OUTPUT, "OutputProcessor", attributes=("request_states",)),
              Symbols(_OUTPUT, "RequestState", attributes=("prompt_len", "is_prefilling"))),),
         {_SHED: _MUST, _DRAIN: _HELPS}),
    Need("background responses", "counts answers of /v1/responses that run on after their request",
         "responses in the background are not in the count in flight",
         (_as(Symbols(_RESPONSES, attributes=("background_tasks",))),), {_GATE: _HELPS, _DRAIN: _HELPS},
         unneeded_without=Symbols(_RESPONSES, words=("background",)), unneeded_because="this vLLM has none"),
    Need("stat loggers", "tells of every step and every finished request",
         "no step is seen: nothing is recorded, no rate is known, and no wedge",
         (_as(Symbols(_LOGGERS, methods=((_PLUGIN_FACTORIES, ()),)), Symbols(_CLIENT, words=(_PLUGIN_FACTORIES,)),
              says="by the entry point vllm.stat_logger_plugins"),
          _as(Symbols(_LOGGERS, "StatLoggerManager", attributes=("stat_loggers",)), says=_BY_THE_GATE),
          _as(Symbols(_LOGGERS, "StatLoggerManager", attributes=("per_engine_logger_dict",)), says=_BY_THE_GATE),
          _as(Symbols(_CLIENT, "AsyncLLM", attributes=("stat_loggers",)), says=_BY_THE_GATE)),
         {_RECORDER: _MUST, _SHED: _MUST, _GATE: _HELPS, _DRAIN: _HELPS}),
    Need("figures of a step", "running and waiting requests, and how full the KV cache is",
         "running and waiting requests are not known",
         (_as(_RECORD, _QUEUES, Symbols(_STATS, "SchedulerStats", attributes=("kv_cache_usage",))),
          _as(_RECORD, _QUEUES, Symbols(_STATS, "SchedulerStats", attributes=("gpu_cache_usage",)),
              says="the cache's share under its old name")),
         {_RECORDER: _MUST, _SHED: _MUST, _GATE: _HELPS, _DRAIN: _HELPS}),
    Need("sleep", "is told when the engine is put to sleep",
         "readiness learns of sleep only from calls that pass through the gate",
         (_as(Symbols(_LOGGERS, "AggregateStatLoggerBase"),
              Symbols(_LOGGERS, "StatLoggerBase", methods=(("record_sleep_state", ("level",)),))),), {_GATE: _DETAIL}),
    Need("finished requests", "lengths and times of each finished request", "nothing is recorded of a finished request",
         (_as(Symbols(_STATS, "IterationStats", attributes=("finished_requests", "iteration_timestamp")),
              Symbols(_STATS, "FinishedRequestStats",
                   attributes=("finish_reason", "e2e_latency", "num_prompt_tokens", "num_generation_tokens", "max_tokens_param",
                               "queued_time", "prefill_time", "inference_time", "decode_time"))),),
         {_RECORDER: _MUST, _SHED: _HELPS}),
    Need("cached tokens of a request", "how much of a prompt came out of the prefix cache",
         "cached tokens of a request are not recorded",
         (_as(Symbols(_STATS, "FinishedRequestStats", attributes=("num_cached_tokens",))),), {_RECORDER: _DETAIL}),
    Need("preemptions of a request", "how often a request had to start again", "preemptions of a request are not recorded",
         (_as(Symbols(_STATS, "FinishedRequestStats", attributes=("num_preemptions",))),), {_RECORDER: _DETAIL}),
    Need("requests as they come and go",
         "sees priorities, the blocks of a prompt (PLIMSOLL_RECORD_PREFIXES=1) and requests that a client gives up",
         "recorded without priorities, without hashes of prompts and without requests that clients gave up",
         (_as(Symbols(_OUTPUT, "OutputProcessor", begins=(
             ("add_request", ("self", "request", "prompt")),
             ("_update_stats_from_finished", ("self", "req_state", "finish_reason", "iteration_stats")),
             ("abort_requests", ("self", "request_ids")))),
              Symbols(_OUTPUT, "RequestState", attributes=("prompt_token_ids", "stats"))),),
         {_RECORDER: _HELPS}),
    Need("limits of the scheduler", "how many requests run at once", "how many requests run at once is not known",
         (_as(Symbols(_CLIENT, "AsyncLLM", attributes=("vllm_config",))),), {_SHED: _DETAIL}),
    Need("metrics page", "shows our gauges and counters on /metrics, also with several API servers",
         "our metrics are not on /metrics",
         (_as(Symbols(("v1/metrics/prometheus.py", "entrypoints/openai/api_server.py"),
                   words=("PROMETHEUS_MULTIPROC_DIR", "MultiProcessCollector"))),), {_GATE: _HELPS}),
)  # fmt: skip

# Variables that keep parts of it from working where a release reads them.
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
FIRST_ENGINE = "VLLM_USE_V1"
PLUGIN_LIST = "VLLM_PLUGINS"

# What was run and not only read.
TESTED = {Coverage.INSIDE_ON_CPU.last: "tested on CPU", Coverage.INSIDE_ON_GPU.last: "tested on an H200"}
BY_SIGNATURE = "by signature, read from the wheel"


class Stretch(NamedTuple):
    """Releases next to each other with the same verdicts and the same evidence."""

    first: str
    last: str
    verdicts: tuple[PartVerdict, ...]
    evidence: str


def answers_in(release: str) -> tuple[NeedAnswer, ...]:
    """Returns the answers that were read in a release's wheel."""
    found = [(need.name, span) for need in NEEDS for span in versions.spans_of("inside", need.name)]
    return tuple(
        NeedAnswer(name, NeedState(span.facts["state"]), note=span.facts.get("note", ""))
        for name, span in found
        if span.covers(release)
    )


def stretches() -> list[Stretch]:
    """From the oldest release that is spoken of to the newest."""
    made: list[Stretch] = []
    for release in versions.wheels():
        if not Behaviour.WORKER_EXTENSIONS.is_in(release):  # nothing is claimed for older ones
            continue
        found = verdicts(answers_in(release), NEEDS)
        evidence = TESTED.get(release, BY_SIGNATURE)
        if made and (made[-1].verdicts, made[-1].evidence) == (found, evidence):
            made[-1] = made[-1]._replace(last=release)
        else:
            made.append(Stretch(release, release, found, evidence))
    return made

"""vLLM's log lines with the plan's figures: a start, why it fails, rates while it serves, an end (`templates/log.j2`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from plimsoll.findings import Code
from plimsoll.models.shape import ModelShape
from plimsoll.plan.kv import WhyRefused
from plimsoll.plan.ledger import Ledger
from plimsoll.standin.memory import MemorySizes, oom_text
from plimsoll.units import GIB
from plimsoll.vllm.versions import Behaviour

API_SERVER = "APIServer"
ENGINE_CORE = "EngineCore"
# The routes of vLLM's log that the stand-in serves, too.
ROUTES = (
    ("/health", "GET"), ("/metrics", "GET"), ("/version", "GET"), ("/ping", "GET"), ("/ping", "POST"), ("/v1/models", "GET"),
    ("/v1/chat/completions", "POST"), ("/v1/completions", "POST"),
)  # fmt: skip
_RECORD = re.compile(r"@(\S+) (\S+) (INFO|WARNING|ERROR|uvicorn|stderr) (\S+) (.*)")


@dataclass(frozen=True, slots=True)
class StartLogLine:
    """One message, without the time and the process number of its print."""

    process: str
    level: str  # "": printed without the logger, like tracebacks and uvicorn's lines
    place: str
    text: str
    share: float = 0.0  # of the start's time that has passed by then
    is_error: bool = False  # goes to stderr


def uvicorn(text: str) -> StartLogLine:
    """Returns a line of the web server's own logger, which writes to stderr."""
    return StartLogLine(API_SERVER, "", "", f"INFO:     {text}", is_error=True)


def written(line: StartLogLine, stamp: str, pid: int, release: str) -> str:
    """Returns the line as the log has it, without its end; `stamp` is like 11-15 12:00:00. A text of several lines stays so."""
    who = f"({line.process} pid={pid}) "
    if line.level:
        who += f"{line.level} {stamp} [{line.place}] "
    elif Behaviour.LOGGER_NAMES_PROCESS.is_in(release):
        who = ""
    return "\n".join(who + part for part in line.text.split("\n"))


@dataclass(frozen=True, slots=True)
class StartLog:
    ledger: Ledger
    shape: ModelShape
    model: str
    arguments: str  # "non-default args", as vLLM prints them
    address: str = "http://127.0.0.1:8000"
    is_dev_mode: bool = False
    seconds: float = 0.0  # the time that the start takes

    @property
    def release(self) -> str:
        return self.ledger.settings.release

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers: a single one is in the engine's own process."""
        settings = self.ledger.settings
        if settings.tensor_parallel * settings.pipeline_parallel == 1:
            return (ENGINE_CORE,)
        stages = [f"PP{stage}_" for stage in range(settings.pipeline_parallel)] if settings.pipeline_parallel > 1 else [""]
        return tuple(f"Worker_{stage}TP{rank}" for stage in stages for rank in range(settings.tensor_parallel))

    @property
    def free_bytes(self) -> int:
        card = self.ledger.card
        return max(0, card.total_bytes - card.used_bytes - self.ledger.context.value)

    @property
    def available_bytes(self) -> int:
        """The rest of the memory budget in bytes, also where the number of blocks was set by hand."""
        spent = (self.ledger.weights, self.ledger.non_torch, self.ledger.activation, self.ledger.graphs)
        return self.ledger.requested.value - sum(term.value for term in spent)

    @property
    def concurrency(self) -> float:
        kv = self.ledger.kv_plan
        return kv.max_concurrency or kv.num_blocks / max(1, kv.blocks_per_request) * bool(kv.groups)


@cache
def _template() -> Template:
    environment = Environment(  # noqa: S701  no HTML
        loader=PackageLoader("plimsoll.standin"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # A size as vLLM prints it: rounded to two digits, without the last zero.
    environment.filters |= {"gib": lambda size: str(round(size / GIB, 2)), "repr": repr}
    return environment.get_template("log.j2")


def _text(log: StartLog, part: str, *facts: object) -> str:
    module = _template().make_module({"log": log, "Behaviour": Behaviour})
    text: str = getattr(module, part)(*facts)
    return text


def log_lines(log: StartLog, part: str, *facts: object) -> list[StartLogLine]:
    """Returns the lines of one of the template's macros: stats, death, after_death, stop, stopped or a part of a start."""
    lines: list[StartLogLine] = []
    for row in _text(log, part, *facts).split("\n")[:-1]:
        record = _RECORD.fullmatch(row)
        if record is None:
            lines[-1] = replace(lines[-1], text=f"{lines[-1].text}\n{row}")
            continue
        share, process, level, place, text = record.groups()
        line = uvicorn(text) if level == "uvicorn" else StartLogLine(process, level, place, text)
        if level == "stderr":
            line = StartLogLine(process, "", "", text, is_error=True)
        lines.append(replace(line, share=float(share)))
    return lines


def start_lines(log: StartLog, pid: int) -> list[StartLogLine]:
    """Returns every line up to the last one, "Application startup complete."; `pid` is the API server's."""
    before = [line for part in ("opening", "loading", "measuring", "sizes", "graphs") for line in log_lines(log, part)]
    return before + log_lines(log, "ready", pid, ROUTES)


class StartFailure(NamedTuple):
    """A start that ends with exit code 1."""

    code: Code  # doctor's finding for this log
    message: str  # the exception
    place: str  # where it is raised: its traceback in the template
    steps: int  # how far it came: 0 the API server, 1 the engine's process, 2 the weights, 3 the measured memory
    is_workers: bool = True  # False: the engine core itself raised it


def failure_of(log: StartLog, sizes: MemorySizes, environment: Mapping[str, str]) -> StartFailure | None:
    """Returns the failure of the first of vLLM's checks that the plan's central figures do not pass; None if it starts."""
    ledger = log.ledger
    if ledger.settings.max_model_len > log.shape.max_context and environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        return StartFailure(Code.OTHER_BAD_CONFIG, _text(log, "too_long"), "config", 0, is_workers=False)
    if log.free_bytes < ledger.requested.value:
        return _too_little_free(log, log.free_bytes)
    if ledger.weights.value > log.free_bytes:
        return _out_of_memory(log, sizes, "weights")
    if ledger.weights.value + ledger.non_torch.value + ledger.activation.value > log.free_bytes:
        return _out_of_memory(log, sizes, "profile")
    refusal = ledger.kv_plan.refusal
    if ledger.kv.value <= 0 or refusal is not None:
        code = Code.STARTUP_NO_CACHE_BLOCKS
        if refusal is None or ledger.kv.value <= 0 or refusal.why is WhyRefused.NO_MEMORY:
            message = _text(log, "no_blocks")
        elif refusal.why is WhyRefused.NOTHING_FITS:
            message = _text(log, "nothing_fits")
        else:
            code, message = Code.STARTUP_CONTEXT_TOO_LONG, _text(log, "request_too_long", refusal)
        return StartFailure(code, message, "cache-check", 3, is_workers=False)
    # A cache with a size set by hand is allocated whether there is room or not; graphs come after it.
    room = log.free_bytes - sizes.weights - sizes.non_torch
    if sizes.kv_cache > room:
        return _out_of_memory(log, sizes, "kv-allocation")
    return _out_of_memory(log, sizes, "graph-capture") if sizes.graphs and sizes.kv_cache + sizes.graphs > room else None


def want_of_memory(log: StartLog) -> StartFailure:
    """Returns a failure for a server that would start: another process holds the memory that it requests."""
    return _too_little_free(log, min(log.free_bytes, max(0, log.ledger.requested.value - GIB)))


def _too_little_free(log: StartLog, free: int) -> StartFailure:
    return StartFailure(Code.STARTUP_FREE_MEMORY_CHECK, _text(log, "too_little_free", free), "free-memory-check", 1)


def _out_of_memory(log: StartLog, sizes: MemorySizes, place: str) -> StartFailure:
    """Returns a failure with torch's message for the piece that found no room after the earlier ones filled the device."""
    layers = max(1, len(log.shape.layers))
    code, steps, before, whole, pieces = {
        "weights": (Code.STARTUP_WEIGHTS_DO_NOT_FIT, 2, 0, sizes.weights, 4 * layers),
        "profile": (Code.STARTUP_PROFILE_RUN, 2, sizes.weights, sizes.activation_peak, 4),
        "kv-allocation": (Code.STARTUP_KV_ALLOCATION, 3, sizes.weights, sizes.kv_cache, layers),
        "graph-capture": (Code.STARTUP_GRAPH_CAPTURE, 3, sizes.weights + sizes.kv_cache, sizes.graphs, 8),
    }[place]
    outside = sizes.non_torch if place != "weights" else 0
    room = max(0, log.free_bytes - before - outside)
    piece = max(1, whole // pieces)
    free = room % piece
    live = before + room - free
    text = oom_text(
        total=sizes.total, graphs=0, tried=piece, free=free, own=sizes.context + outside + live, live=live, left=0,
        neighbours=sizes.neighbours,
    )  # fmt: skip
    return StartFailure(code, f"torch.OutOfMemoryError: {text}", place, steps)


def failed_lines(log: StartLog, failure: StartFailure) -> list[StartLogLine]:
    lines = log_lines(log, "opening")
    if failure.steps == 0:  # the API server itself fails, before there is an engine
        own = [line for line in lines if line.process == API_SERVER and "max model len" not in line.text]
        return own + log_lines(log, "refused", failure)
    for step, part in ((2, "loading"), (3, "measuring")):
        lines += log_lines(log, part) if failure.steps >= step else []
    return lines + log_lines(log, "failed", failure, lines[-1].share)

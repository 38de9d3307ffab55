"""How vLLM writes a line of its log: who speaks, how grave it is, when, where in its source, and what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from plimsoll.domain.units import GIB
from plimsoll.engine.flags import is_before

# Until 0.30.0 every line that a process printed got its name in front; since 0.31.0 only what went through the logger.
LOGGER_ALONE_SINCE = "0.31.0"
API_SERVER = "APIServer"
ENGINE_CORE = "EngineCore"


class Line(NamedTuple):
    """One message, before it is known when and by which process it will be printed."""

    process: str
    level: str  # "": printed past the logger, as tracebacks and uvicorn's lines are
    place: str
    text: str
    share: float = 0.0  # of the start's time that has passed by then
    is_error: bool = False  # goes to stderr


class Pids(NamedTuple):
    """Process ids of one server."""

    api: int
    core: int
    workers: tuple[int, ...] = ()

    def of(self, process: str) -> int:
        """The id of the process that this name stands for."""
        if process == API_SERVER:
            return self.api
        rank = process.rpartition("TP")[2].partition("_")[0]
        if process == ENGINE_CORE or not rank.isdigit() or int(rank) >= len(self.workers):
            return self.core
        return self.workers[int(rank)]


class Frame(NamedTuple):
    """One call of a traceback."""

    file: str
    line: int
    function: str


def info(process: str, place: str, text: str, share: float = 0.0) -> Line:
    """A line of the logger."""
    return Line(process, "INFO", place, text, share)


def warning(process: str, place: str, text: str, share: float = 0.0) -> Line:
    """A line of the logger that somebody should read."""
    return Line(process, "WARNING", place, text, share)


def error(process: str, place: str, text: str, share: float = 0.0) -> Line:
    """A line of the logger that says what failed."""
    return Line(process, "ERROR", place, text, share)


def uvicorn(text: str, share: float = 0.0) -> Line:
    """A line of the web server's own logger, which writes to stderr."""
    return Line(API_SERVER, "", "", f"INFO:     {text}", share, is_error=True)


def traceback(frames: Sequence[Frame], failure: str) -> str:
    """As Python prints it where the source is not at hand."""
    calls = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames]
    return "\n".join(("Traceback (most recent call last):", *calls, failure))


def worker_failed(message: str) -> str:
    """What the engine's core raises when a worker in another process did."""
    return f"RuntimeError: Worker failed with error '{message}', please check the stack trace above for the root cause"


def written(line: Line, stamp: str, pids: Pids, release: str) -> str:
    """The line as it stands in the log, without its end; `stamp` is like 11-15 12:00:00. A text of several lines stays so."""
    return "\n".join(_written(line, stamp, pids, release))


def _written(line: Line, stamp: str, pids: Pids, release: str) -> Iterator[str]:
    who = f"({line.process} pid={pids.of(line.process)}) "
    if line.level:
        who += f"{line.level} {stamp} [{line.place}] "
    elif not is_before(release, LOGGER_ALONE_SINCE):
        who = ""
    for part in line.text.split("\n"):
        yield who + part


def gib(size: int) -> str:
    """As vLLM prints sizes: rounded to two digits, the last zero left away."""
    return str(round(size / GIB, 2))

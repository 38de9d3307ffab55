"""Real engines for the tests in this folder, each started when first asked for and shared as long as possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.engine.install import installed
from lab.engine.parser import ParserProcess
from lab.engine.planner import PlannerProcess
from lab.engine.server import EngineServer
from tests.real.groups import in_order
from tests.real.page_browser import browsing
from tests.real.small_farm import missing

HERE = Path(__file__).resolve().parent
SOURCE = str(HERE.parents[1] / "src")
TIMEOUT_S = 600
# What a server with the gate is started with, and what the gate is asked with.
TOKEN = "an-honest-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
GATED_ENV = {"PYTHONPATH": SOURCE, "PLIMSOLL_TOKEN": TOKEN}
GATED = ("--worker-extension-cls", "plimsoll.inside.Probe", "--middleware", "plimsoll.inside.Gate")

StartEngine = Callable[..., EngineServer]


@pytest.hookimpl(tryfirst=True)  # before pytest itself picks by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder is `real`, is timed without the start of the engines it shares, and has its place."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker("real")
        # A soak test keeps the time that `make soak` gives on its command line.
        if item.get_closest_marker("timeout") is None and item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S, func_only=True))
    items.sort(key=lambda item: in_order(item.nodeid))


def need_vllm() -> None:
    """Skip the test if no engine is installed; in CI, where one must be, fail it."""
    if not installed():
        missing("the real vLLM is not installed: make real installs it")


def declare(folder: Path, entry_point: str, group: str = "vllm.general_plugins") -> str:
    """A folder that declares an entry point as an installed package does, and the path with which vLLM finds it."""
    about = folder / "plimsoll_lab-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plimsoll-lab\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{entry_point}\n")
    return f"{SOURCE}{os.pathsep}{folder}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    with browsing() as found:
        yield found


@contextmanager
def ready(flags: Sequence[str] = (), env: Mapping[str, str] | None = None, **options: Any) -> Iterator[EngineServer]:
    """A server that is up, for as long as it is wanted."""
    need_vllm()
    with EngineServer(flags, env, **options) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineServer]:
    """One server with default flags, shared by all tests: leave it as you found it."""
    with ready(forks=True) as server:
        yield server


@pytest.fixture(scope="session")
def small_engine() -> Iterator[EngineServer]:
    """One server with 18 KV blocks of 128 tokens, shared by all tests: six long answers do not fit together."""
    with ready(["--num-gpu-blocks-override", "18", "--max-num-seqs", "8"], forks=True) as server:
        yield server


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts a server of the test's own, stopped when the test ends; with wait=False it may still be starting."""
    need_vllm()
    with ExitStack() as running:

        def start(*flags: str, env: Mapping[str, str] | None = None, wait: bool = True, **options: Any) -> EngineServer:
            log = tmp_path / f"vllm-{len(list(tmp_path.glob('vllm-*.log')))}.log"
            server = running.enter_context(EngineServer(flags, env, log_path=log, **options))
            if wait:
                server.wait_ready()
            return server

        yield start


@pytest.fixture(scope="session")
def parser() -> Iterator[ParserProcess]:
    """The real command-line parser, imported once."""
    need_vllm()
    with ParserProcess() as process:
        yield process


@pytest.fixture(scope="session")
def planner() -> Iterator[PlannerProcess]:
    """The real planner, imported once."""
    need_vllm()
    with PlannerProcess() as process:
        yield process

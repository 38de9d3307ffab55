"""For every test: how many wild inputs are tried; what was measured is printed."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SECOND_TRIES = 3  # where more fail, it is not the machine

# `make test` tries a few inputs, always the same; `make soak` many, and new ones. Neither has a deadline: machines are busy.
_PATIENT: dict[str, Any] = {
    "deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}  # fmt: skip
settings.register_profile("fast", max_examples=30, derandomize=True, **_PATIENT)
settings.register_profile("soak", max_examples=500, **_PATIENT)
settings.load_profile("soak" if os.environ.get("PLIMSOLL_SOAK") else "fast")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests measured (`record_property("figures", ...)`): it is wanted of those that pass, too."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind)]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "figures" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--again`, with `--lf`: a second try, alone, for what failed while others held the machine."""
    parser.addoption("--again", action="store_true", help=f"a second try for at most {SECOND_TRIES} tests, none of them `once`")


def pytest_collection_finish(session: pytest.Session) -> None:
    """No second try where a failure says more than that the machine was busy."""
    if not session.config.getoption("again"):
        return
    if len(session.items) > SECOND_TRIES:
        raise pytest.UsageError(f"{len(session.items)} tests failed: no second try for more than {SECOND_TRIES}")
    promises = [item.nodeid for item in session.items if item.get_closest_marker("once")]
    if promises:
        raise pytest.UsageError(f"no second try for a promise that nothing is lost: {', '.join(promises)}")


def pytest_collection(session: pytest.Session) -> None:
    """Each worker begins with other files: what one has compiled with pytest's assertions, the others find compiled."""
    config = session.config
    if not hasattr(config, "workerinput"):
        return
    left_out = [config.rootpath / path for path in config.getoption("ignore") or ()]
    found = [file for folder in config.args for file in sorted(Path(folder).absolute().rglob("test_*.py"))]
    files = [file for file in found if not any(file.is_relative_to(path) for path in left_out)]
    begin = len(files) * int(config.workerinput["workerid"][2:]) // config.workerinput["workercount"]
    for file in files[begin:] + files[:begin]:
        importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))
    if "numba" in sys.modules:
        _compile_one_after_another()


def _compile_one_after_another() -> None:
    """On a machine that has compiled nothing yet, one worker compiles the simulator and the others load what it kept."""
    from numba.core.dispatcher import Dispatcher

    from plimsoll.simulate.compiled import cache_folder

    compile_now, is_inside = Dispatcher.compile, False

    def compile_alone(self: Any, signature: Any) -> Any:
        nonlocal is_inside
        if is_inside:  # a part of what is being compiled
            return compile_now(self, signature)
        with (cache_folder() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_inside = True
            try:
                return compile_now(self, signature)
            finally:
                is_inside = False

    Dispatcher.compile = compile_alone  # type: ignore[method-assign, assignment]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one more than there are cores, since guard's tests often wait for an answer or a deadline."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup`: the groups of tests/real/groups.py."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.real.groups import scheduler

    return scheduler(config, log)

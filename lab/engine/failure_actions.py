"""What is done to a running server so that it fails, or so that it does not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.engine.server import EngineDiedError, EngineServer

START_LIMIT_S = 400.0  # a start on busy cores, with a compilation
END_LIMIT_S = 200.0
WORDS = "the ship may be loaded down to this line and not one inch further "

Action = Callable[["Run"], None]


class Run:
    """One server under test, the file that makes its fault due, and a way to keep a page."""

    def __init__(self, server: EngineServer, flag: Path, keep: Callable[[str, str], None]) -> None:
        self.server = server
        self.flag = flag
        self.keep = keep

    def child(self, kind: str) -> int:
        """The first process of the server whose title begins so."""
        return next(child.pid for child in self.server.children() if child.name.startswith(f"VLLM::{kind}"))

    def ask(self, count: int, max_tokens: int, prompt: str = WORDS, **more: Any) -> list[threading.Thread]:
        """Send so many requests at once, each from a thread of its own, and do not wait for them."""

        def one() -> None:
            with contextlib.suppress(OSError):
                self.server.complete(prompt, max_tokens=max_tokens, **more)

        threads = [threading.Thread(target=one, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def ready(self) -> None:
        """Wait until the server serves, and let it answer once."""
        self.server.wait_ready(START_LIMIT_S)
        self.server.complete(WORDS, max_tokens=4)

    def busy(self) -> None:
        """Wait until the server serves, and leave it with three long answers to write."""
        self.ready()
        self.ask(3, 1900, ignore_eos=True)
        time.sleep(2)

    def ended_or_killed(self, limit_s: float = 40) -> None:
        """Wait until the server ends; whoever sent the first signal loses patience after this time and sends SIGKILL to all."""
        self.ended(limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.ended(10)

    def ended(self, limit_s: float = END_LIMIT_S) -> None:
        """Wait until the server ends, and no longer than this."""
        with contextlib.suppress(EngineDiedError):
            self.server.wait_exit(limit_s)


def fail_to_start(run: Run) -> None:
    """It ends on its own; should it start after all, it is left as it is."""
    deadline = time.monotonic() + START_LIMIT_S
    while run.server.exit_code() is None and time.monotonic() < deadline:
        if "Application startup complete" in run.server.log_text():
            return
        time.sleep(0.5)


def serve(run: Run) -> None:
    """Answer a few requests, then be stopped."""
    run.ready()
    for thread in run.ask(3, 40):
        thread.join()
    time.sleep(11)  # one periodic line


def only_bad_requests(run: Run) -> None:
    """Refuse what clients should not have asked for."""
    run.ready()
    run.server.complete("a " * 5000, max_tokens=5)
    run.server.complete(WORDS, max_tokens=100_000)
    run.server.complete(WORDS, max_tokens=5, temperature=-3)
    run.server.complete(WORDS, max_tokens=5, logprobs=500)
    run.server.post("/v1/completions", {"model": "another", "prompt": "x"})
    run.server.post("/v1/chat/completions", {"model": "tiny", "messages": "none"})
    run.server.get("/v1/nothing-here")


def _meet_the_fault(run: Run, **request: Any) -> None:
    run.ready()
    threads = run.ask(2, 200)
    time.sleep(1)
    run.flag.touch()
    threads += run.ask(2, 60, **request)
    run.ended()


def fault_under_load(run: Run) -> None:
    """The fault comes due while requests are running."""
    _meet_the_fault(run)


def fault_with_logprobs(run: Run) -> None:
    """The fault comes due when a client asks for the likely tokens."""
    _meet_the_fault(run, logprobs=5)


def fault_with_prompt_logprobs(run: Run) -> None:
    """The fault comes due when a client asks for the likely tokens of a long prompt."""
    _meet_the_fault(run, prompt=WORDS * 40, prompt_logprobs=5)


def fault_with_adapter(run: Run) -> None:
    """The fault comes due when a client asks for the LoRA adapter that another has pushed out of its slot."""
    run.ready()
    run.server.complete(WORDS, max_tokens=4, model="other")
    run.flag.touch()
    run.ask(1, 20, model="adapter")
    run.ended()


def _signal(run: Run, pid: int, number: signal.Signals) -> None:
    run.busy()
    os.kill(pid if pid else run.server.pid, number)
    run.ended_or_killed()


def kill_engine_core(run: Run) -> None:
    """SIGKILL to the engine core under load."""
    run.busy()
    run.server.kill_engine_core()
    run.ended()


def kill_worker(run: Run) -> None:
    """SIGKILL to a worker under load."""
    run.busy()
    os.kill(run.child("Worker"), signal.SIGKILL)
    run.ended()


def kill_idle_worker(run: Run) -> None:
    """SIGKILL to a worker that has nothing to do."""
    run.ready()
    time.sleep(2)
    os.kill(run.child("Worker"), signal.SIGKILL)
    run.ended()


def kill_api_server(run: Run) -> None:
    """SIGKILL to the API server under load: the log just stops."""
    _signal(run, 0, signal.SIGKILL)


def terminate(run: Run) -> None:
    """SIGTERM to the API server under load, as `docker stop` sends it."""
    _signal(run, 0, signal.SIGTERM)


def interrupt(run: Run) -> None:
    """SIGINT to the API server under load, as Ctrl-C sends it."""
    _signal(run, 0, signal.SIGINT)


def terminate_group(run: Run) -> None:
    """SIGTERM to every process of the server under load, as systemd sends it."""
    run.busy()
    os.killpg(run.server.pid, signal.SIGTERM)
    run.ended_or_killed()


def _terminate_at(run: Run, line: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while line not in run.server.log_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    os.kill(run.server.pid, signal.SIGTERM)
    run.ended(100)


def terminate_at_first(run: Run) -> None:
    """SIGTERM to the API server while it reads its configuration."""
    _terminate_at(run, "non-default args")


def terminate_while_starting(run: Run) -> None:
    """SIGTERM to the API server while the engine core starts; what still runs after 100 seconds gets another."""
    _terminate_at(run, "Initializing a V1 LLM engine")


@contextlib.contextmanager
def _load(run: Run, clients: int, max_tokens: int, prompt: str) -> Iterator[None]:
    """So many clients who each send a request after the other."""
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                run.server.complete(f"{number} {prompt}", max_tokens=max_tokens, ignore_eos=True)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()


def _pages(run: Run, clients: int, max_tokens: int, seconds: float, prompt: str = WORDS * 4) -> None:
    run.ready()
    run.keep("before", run.server.metrics())
    with _load(run, clients, max_tokens, prompt):
        time.sleep(seconds * 0.4)
        run.keep("during", run.server.metrics())
        time.sleep(seconds * 0.6)
        run.keep("after", run.server.metrics())


def preemption_storm(run: Run) -> None:
    """Twelve clients whose long answers do not fit together."""
    _pages(run, 12, 900, 60)


def queue(run: Run) -> None:
    """Twenty clients for a server that takes two at a time: they wait, and the cache is never full."""
    _pages(run, 20, 1500, 90)


def terminate_with_queue(run: Run) -> None:
    """SIGTERM to the API server while many wait; should it still be there after 40 seconds, it is killed."""
    run.ready()
    with _load(run, 20, 1500, WORDS):
        time.sleep(8)
        os.kill(run.server.pid, signal.SIGTERM)
        run.ended_or_killed()


def full_cache(run: Run) -> None:
    """Twenty clients whose requests fit four at a time: the cache stays full, they wait, none is put back."""
    _pages(run, 20, 55, 75, WORDS * 32)


def large_prompts(run: Run) -> None:
    """Twenty clients whose long prompts fit two at a time: a third of the cache is too small for one more."""
    _pages(run, 20, 60, 75, WORDS * 60)


def hang_worker(run: Run) -> None:
    """A worker stands still for eighty seconds with requests under way, then the server is stopped."""
    run.busy()
    worker = run.child("Worker")
    os.kill(worker, signal.SIGSTOP)
    run.ended(80)
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.server.pid, signal.SIGTERM)
    run.ended(30)

"""The record of the requests that an engine core has begun, which outlives the engine: PLIMSOLL_FAILOVER.

When an engine dies, a request that was never scheduled cannot have killed it and may be tried elsewhere; one that had begun
must not be tried on other servers. The API server cannot tell them apart: a request in its first prefill has sent nothing, like
a waiting one. So the engine core writes each request down when it first schedules it, before the step runs, in shared memory:

    | active | busy | count | hash of a request's id | hash | ... |

`busy` is 1 inside the scheduler: an engine that dies there may have died of a request that is not written yet. Where the ring
has no answer (overwritten, busy, no ring, another scheduler, a KV connector), a request counts as begun.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import ancestors, is_same_process, may_hold_core, run_folder, start_ticks
from plimsoll.inside.settings import InsideSettings

ENTRIES = 1 << 15
ACTIVE, BUSY, COUNT, HEADER = 0, 1, 2, 8  # places of 8 bytes; the rest of the header is reserved
BYTES = 8 * (HEADER + ENTRIES)
CORE, SCHEDULER = "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"
WHERE = "following the scheduler"
OWN_SCHEDULERS = (SCHEDULER, "vllm.v1.core.sched.async_scheduler")  # another one may bypass the wrapped methods


def hash_of(request_id: str) -> int:
    """Returns the number that stands for a request in the ring, never 0."""
    digest = hashlib.blake2b(request_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1


class ScheduleRing:
    """The ring of one engine core: the core writes it, API servers read it, also after the core's death."""

    def __init__(self, path: str, *, makes: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if makes else 0)
        file = os.open(path, flags, 0o600)
        try:
            if makes:
                os.ftruncate(file, BYTES)
            elif os.fstat(file).st_size != BYTES:
                raise ValueError("not a ring of this release")
            self._numbers = memoryview(mmap.mmap(file, BYTES)).cast("q")
        finally:
            os.close(file)
        self.path = path
        self._lock = threading.Lock()
        self._hashes: tuple[int, int, frozenset[int]] = (-1, -1, frozenset())

    # The engine core

    def set_busy(self, *, is_busy: bool) -> None:
        """Marks the beginning or end of a scheduler step; from the first end on every scheduled request is written down."""
        self._numbers[BUSY] = int(is_busy)
        if not is_busy:
            self._numbers[ACTIVE] = 1

    def note(self, request_id: str) -> None:
        """Writes a request down; the entry is there before it counts."""
        with self._lock:  # the core's input thread and its loop
            count = self._numbers[COUNT]
            self._numbers[HEADER + count % ENTRIES] = hash_of(request_id)
            self._numbers[COUNT] = count + 1

    # API servers

    @property
    def count(self) -> int:
        """The number of entries ever written; -1 before the end of the first step."""
        return self._numbers[COUNT] if self._numbers[ACTIVE] else -1

    def may_have_begun(self, request_id: str, since: int) -> bool:
        """False if a request that came when `count` was `since` was surely never scheduled here."""
        count = self.count
        if since < 0 or count < 0 or self._numbers[BUSY] or count - since > ENTRIES:
            return True
        first, until, _ = self._hashes
        if until != count or since < first:  # at an engine's death every request asks: read the entries once
            numbers = (self._numbers[HEADER + place % ENTRIES] for place in range(since, count))
            self._hashes = since, count, frozenset(numbers)
        return hash_of(request_id) in self._hashes[2]


# In the engine core


def install() -> None:
    """Makes each scheduler of this process write down the requests it begins; vLLM calls this in each of its processes.

    vLLM does not call it again in a forked engine core, so the API server prepares it; a process without a core is left alone.
    """
    with FAULTS.noting(WHERE):
        if may_hold_core() and InsideSettings().failover:
            install_into(importlib.import_module(CORE).EngineCore, importlib.import_module(SCHEDULER).Scheduler)


def install_into(core: Any, scheduler: Any, ring: ScheduleRing | None = None) -> None:
    """Wraps the two methods, once; the ring is made at the first request or step, in the engine core's own process."""
    if getattr(scheduler.schedule, "is_plimsoll", False):
        return
    own_schedule, own_preprocess = scheduler.schedule, core.preprocess_add_request
    rings: list[ScheduleRing | None] = [] if ring is None else [ring]

    def ring_here() -> ScheduleRing | None:
        """Returns the ring of this process; None if vLLM did not start this process, or without a folder to share."""
        if not rings:
            folder = run_folder(InsideSettings().folder) if multiprocessing.parent_process() is not None else None
            made = None
            if folder is not None:
                path = f"{folder}/ring-{os.getpid()}-{start_ticks(os.getpid())}"
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108
                made = ScheduleRing(path, makes=True)
            rings.append(made)
        return rings[0]

    @functools.wraps(own_schedule)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = None
        with FAULTS.noting(WHERE):
            log = ring_here() if type(self).__module__ in OWN_SCHEDULERS and self.connector is None else None
            if log is not None:
                log.set_busy(is_busy=True)
        plan = own_schedule(self, *args, **kwargs)  # if it raises, the ring stays busy: the cause is not known
        with FAULTS.noting(WHERE):  # after a fault the ring stays busy: every request counts as begun
            if log is not None:
                for request in plan.scheduled_new_reqs:
                    log.note(request.req_id)
                log.set_busy(is_busy=False)
        return plan

    @functools.wraps(own_preprocess)
    def preprocess_add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        with FAULTS.noting(WHERE):
            # Before a request is scheduled its grammar is compiled and its pictures unpacked: either may end the process.
            params = getattr(request, "sampling_params", None)
            has_grammar = any(getattr(params, name, None) is not None for name in ("structured_outputs", "guided_decoding"))
            if (has_grammar or getattr(request, "mm_features", None)) and (log := ring_here()) is not None:
                log.note(request.request_id)
        return own_preprocess(self, request, *args, **kwargs)

    schedule.is_plimsoll = True  # type: ignore[attr-defined]
    scheduler.schedule, core.preprocess_add_request = schedule, preprocess_add_request


# In the API server


class ScheduleRings:
    """The rings of the engine cores that descend from one process."""

    def __init__(self, folder: str | None, key: int) -> None:
        self._folder = folder
        self._key = key
        self._rings: dict[str, ScheduleRing] = {}

    def look(self) -> None:
        """Opens new rings in the folder; a ring stays open when its engine core has died."""
        if self._folder is None:
            return
        names: set[str] = set()
        with FAULTS.noting("opening an engine core's ring"):
            names = {name for name in os.listdir(self._folder) if name.startswith("ring-")}  # noqa: PTH208
        for name in names - self._rings.keys():
            with FAULTS.noting("opening an engine core's ring"):
                _, pid, started = name.split("-")
                if is_same_process(int(pid), int(started)) and self._key in ancestors(int(pid)):
                    self._rings[name] = ScheduleRing(f"{self._folder}/{name}", makes=False)

    @property
    def is_active(self) -> bool:
        """True if there is a ring, and every ring is written to."""
        return bool(self._rings) and all(ring.count >= 0 for ring in self._rings.values())

    def counts(self) -> dict[str, int]:
        """Returns each ring's present count, which `never_scheduled` takes later as `since`."""
        return {name: ring.count for name, ring in self._rings.items()}

    def never_scheduled(self, request_ids: Sequence[str], since: Mapping[str, int], engines: int) -> bool:
        """True if surely no engine core has begun any of these requests. `engines` is the number of cores."""
        return len(since) == engines == len(self._rings) and not any(
            self._rings[name].may_have_begun(request_id, count) for name, count in since.items() for request_id in request_ids
        )


IS_FOLLOWED = "plimsoll_failover"


def shape_of(request: Any) -> str:
    """Returns an engine request's lengths and kinds, never its text; empty where its length cannot be read."""
    prompt, params = getattr(request, "prompt_token_ids", None), getattr(request, "sampling_params", None)
    if not isinstance(prompt, list | tuple):
        return ""
    words = [f"prompt {len(prompt)}"]
    for name in ("max_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(params, name, None)
        words += [f"{name} {value}"] if isinstance(value, int) and not isinstance(value, bool) else []
    items = getattr(request, "mm_features", None)
    words += [f"items {len(items)}"] if isinstance(items, list) and items else []
    words += ["lora"] if getattr(request, "lora_request", None) is not None else []
    words += ["structured"] if getattr(params, "structured_outputs", None) is not None else []
    return ", ".join(words)


def follow_requests(client: Any, note: Callable[[str | None, str], None]) -> bool:
    """Calls `note` with the id and the shape of every request that this engine client is about to give to its engine.

    Returns False where this client has no such method. An id that cannot be read is None.
    """
    processor = getattr(client, "output_processor", None)
    own = getattr(processor, "add_request", None)
    if own is None:
        return False
    if hasattr(own, IS_FOLLOWED):
        return True

    @functools.wraps(own)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        note(getattr(request, "request_id", None), shape_of(request))
        return own(request, *args, **kwargs)

    setattr(add_request, IS_FOLLOWED, True)
    processor.add_request = add_request  # type: ignore[union-attr]
    return True

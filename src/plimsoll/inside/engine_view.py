"""The engine as an API server's own memory shows it, without a call into the engine, which would hang with a stuck one.

vLLM promises none of these names. Each is read by `getattr` and is None where a release lacks it; `plimsoll inside check`
reads from the installed sources which of them exist.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from plimsoll.inside.faults import FAULTS

CANARY = "plimsoll-canary-"


class EngineClientView:
    """The engine client of one API server, read from its `app.state`."""

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def client(self) -> Any:
        """vLLM's engine client; None until there is one."""
        return getattr(self._state, "engine_client", None)

    def is_dead(self) -> bool:
        """True if vLLM itself knows that its engine is dead."""
        return bool(getattr(self.client, "errored", False))

    def requests(self) -> dict[str, Any] | None:
        """Returns the engine's requests of this API server, oldest first; None where vLLM keeps them elsewhere."""
        states = getattr(getattr(self.client, "output_processor", None), "request_states", None)
        return states if isinstance(states, dict) else None

    def request_count(self) -> int:
        """Returns the number of this API server's requests that the engine has, without our own; 0 where it cannot be seen."""
        states = self.requests()
        return 0 if states is None else sum(1 for name in states if not str(name).startswith(CANARY))

    def background_count(self) -> int:
        """Returns the number of background responses that still run."""
        holders = getattr(self._state, "_state", None)  # starlette keeps what is set on a state in this dict
        if not isinstance(holders, dict):
            return 0
        tables = (getattr(holder, "background_tasks", None) for name, holder in holders.items() if "responses" in str(name))
        tasks = [task for table in tables if isinstance(table, dict) for task in list(table.values())]
        return sum(1 for task in tasks if not (hasattr(task, "done") and task.done()))

    def queued(self, waiting: int | None, output_each: float) -> tuple[int, float]:
        """Returns how many of the newest `waiting` requests have no output yet, and their tokens with the expected output."""
        states = self.requests()
        if not states or not waiting:
            return 0, 0.0
        tokens = 0.0
        left = waiting
        with FAULTS.noting("counting what is queued"):
            for state in reversed(states.values()):
                if left == 0:
                    break
                if getattr(state, "is_prefilling", False):
                    tokens += (getattr(state, "prompt_len", None) or 0) + output_each
                    left -= 1
        return waiting - left, tokens

    def places(self) -> int | None:
        """Returns how many requests all engine cores together run at once; None where it is unknown."""
        scheduler = getattr(getattr(self.client, "vllm_config", None), "scheduler_config", None)
        # 0.31 can admit fewer than its buffers are made for.
        each = getattr(scheduler, "max_num_active_seqs", None) or getattr(scheduler, "max_num_seqs", None)
        return each * self.cores() if isinstance(each, int) else None

    def cores(self) -> int:
        """Returns the number of engine cores on all machines."""
        parallel = getattr(getattr(self.client, "vllm_config", None), "parallel_config", None)
        count = getattr(parallel, "data_parallel_size", 1)
        return count if isinstance(count, int) and count > 0 else 1

    def own_valve(self) -> str:
        """Returns the state of vLLM's own admission control: `set`, `unset`, or empty in releases that have none."""
        names = ("max_num_queued_reqs", "max_num_queued_tokens")
        args = getattr(self._state, "args", None)
        homes = (args, getattr(getattr(self.client, "vllm_config", None), "scheduler_config", None))
        values = [getattr(home, name) for home in homes for name in names if hasattr(home, name)]
        if not values:
            return ""
        return "set" if any(value is not None for value in values) else "unset"


SOME_TOKEN = 1


async def canary_fails(client: Any, limit_s: float, params: Any = None) -> bool:
    """True if no token came within the limit; False if one did, or if the canary request itself could not be made."""

    async def one_token() -> None:
        prompt, request_id = {"prompt_token_ids": [SOME_TOKEN]}, f"{CANARY}{time.monotonic_ns()}"
        async for _ in client.generate(prompt, params, request_id):
            return  # vLLM aborts the request itself when its output is left early

    with FAULTS.noting("the test request"):
        if params is None:
            params = importlib.import_module("vllm").SamplingParams(max_tokens=1, temperature=0.0)
        task = asyncio.get_running_loop().create_task(one_token())
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        finally:
            task.cancel()  # not waited for: with a stuck engine the abort may take for ever, too
        if done and not task.cancelled():
            task.result()
        return not done
    return False

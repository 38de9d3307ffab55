"""What an API server's own memory tells of its engine, without a call into it: such a call would hang with a stuck engine.

vLLM promises none of these names. Each is asked for by `getattr` and is None where a release has it not; `plimsoll inside
check` reads from the installed sources which are there.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from plimsoll.inside.faults import FAULTS

CANARY = "plimsoll-canary-"


class EngineClientView:
    """Looks at `app.state` of one API server."""

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def client(self) -> Any:
        """vLLM's engine client, None until there is one."""
        return getattr(self._state, "engine_client", None)

    def is_dead(self) -> bool:
        """Whether vLLM itself knows that its engine is dead."""
        return bool(getattr(self.client, "errored", False))

    def requests(self) -> dict[str, Any] | None:
        """The engine's requests of this API server, oldest first; None where vLLM keeps them elsewhere."""
        states = getattr(getattr(self.client, "output_processor", None), "request_states", None)
        return states if isinstance(states, dict) else None

    def request_count(self) -> int:
        """How many requests of this API server are with the engine, ours not counted; 0 where that cannot be seen."""
        states = self.requests()
        return 0 if states is None else sum(1 for name in states if not str(name).startswith(CANARY))

    def background_count(self) -> int:
        """Responses that were asked for in the background and still run."""
        holders = getattr(self._state, "_state", None)  # starlette keeps what is set on a state in this dict
        if not isinstance(holders, dict):
            return 0
        tables = (getattr(holder, "background_tasks", None) for name, holder in holders.items() if "responses" in str(name))
        tasks = [task for table in tables if isinstance(table, dict) for task in list(table.values())]
        return sum(1 for task in tasks if not (hasattr(task, "done") and task.done()))

    def queued(self, waiting: int | None, output_each: float) -> tuple[int, float]:
        """How many of the newest `waiting` requests have answered nothing yet, and their tokens with the output expected."""
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
        """How many requests one engine runs at once, times the engines."""
        scheduler = getattr(getattr(self.client, "vllm_config", None), "scheduler_config", None)
        # 0.31 can admit fewer than its buffers are made for.
        each = getattr(scheduler, "max_num_active_seqs", None) or getattr(scheduler, "max_num_seqs", None)
        return each * self.cores() if isinstance(each, int) else None

    def cores(self) -> int:
        """How many engine cores there are, on all machines."""
        parallel = getattr(getattr(self.client, "vllm_config", None), "parallel_config", None)
        count = getattr(parallel, "data_parallel_size", 1)
        return count if isinstance(count, int) and count > 0 else 1

    def own_valve(self) -> str:
        """vLLM's own admission control: `set`, `unset`, or empty in releases that have none."""
        names = ("max_num_queued_reqs", "max_num_queued_tokens")
        args = getattr(self._state, "args", None)
        homes = (args, getattr(getattr(self.client, "vllm_config", None), "scheduler_config", None))
        values = [getattr(home, name) for home in homes for name in names if hasattr(home, name)]
        if not values:
            return ""
        return "set" if any(value is not None for value in values) else "unset"


SOME_TOKEN = 1


async def canary_fails(client: Any, limit_s: float, params: Any = None) -> bool:
    """True when no token came within the limit; False when one did, or when the test itself could not be made."""

    async def one_token() -> None:
        prompt, request_id = {"prompt_token_ids": [SOME_TOKEN]}, f"{CANARY}{time.monotonic_ns()}"
        async for _ in client.generate(prompt, params, request_id):
            return  # left early, vLLM takes the request back itself

    with FAULTS.noting("the test request"):
        if params is None:
            params = importlib.import_module("vllm").SamplingParams(max_tokens=1, temperature=0.0)
        task = asyncio.get_running_loop().create_task(one_token())
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        finally:
            task.cancel()  # not waited for: with a stuck engine taking the request back may take for ever, too
        if done and not task.cancelled():
            task.result()
        return not done
    return False

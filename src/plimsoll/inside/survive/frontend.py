"""In the API server: a request that containment aborted is answered with the reason.

vLLM's own words for it are "Internal server error". Its streams before 0.32 say nothing at all: an error that comes before the
first token is skipped like an empty piece of a prefill, and the client reads a whole answer of no tokens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import AsyncIterator
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import run_folder, server_key
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.survive import report

ENGINE = "vllm.v1.engine.async_llm"
SERVING = "vllm.entrypoints.generate.base.serving"  # 0.25 to 0.32; imports the error that every endpoint answers with its text


def install() -> None:
    """Have the engine's client raise our reason in every endpoint; the second time does nothing. Never raises."""
    with FAULTS.noting("naming the reason of aborted requests"):
        client, failure = importlib.import_module(ENGINE).AsyncLLM, importlib.import_module(SERVING).GenerationError
        if not getattr(client.generate, "is_plimsoll", False):
            client.generate = _with_reason(client.generate, failure)


def _with_reason(own: Any, failure: type[Exception]) -> Any:
    folder = run_folder(InsideSettings().folder)

    @functools.wraps(own)
    async def generate(self: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(own(self, *arguments, **named)) as outputs:
            async for output in outputs:
                if any(answer.finish_reason == "error" for answer in output.outputs):
                    why = None
                    with FAULTS.noting("naming the reason of an aborted request"):
                        why = report.why_aborted(folder, server_key(), output.request_id)
                    if why is not None:
                        raise failure(f"this request was aborted: {why}. Other requests go on; send it smaller")
                yield output

    generate.is_plimsoll = True  # type: ignore[attr-defined]
    return generate

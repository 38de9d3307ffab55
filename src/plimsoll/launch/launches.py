"""One command that starts vLLM, wherever it was written down."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EntryPoint(StrEnum):
    """The ways people start the OpenAI-compatible server."""

    SERVE = "vllm serve"
    API_SERVER = "python -m vllm.entrypoints.openai.api_server"
    IMAGE = "container image"  # the image's own entry point: the arguments are those of one of the two above


class Launch(NamedTuple):
    """What vLLM would be given: its arguments and its environment, as far as they can be known without running anything.

    A variable that nobody assigned stays in the text as `$NAME` and is listed in `unresolved`.
    """

    source: str  # for people: "start.sh:14", "compose.yaml, service llm", "pid 4242", "command line"
    entry: EntryPoint
    arguments: tuple[str, ...]  # what follows the entry point, as vLLM's own argv[1:] would be (without "serve")
    environment: tuple[tuple[str, str], ...] = ()  # what this launch sets or exports, in order, last one wins
    image: str | None = None  # the container image, where there is one
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    in_front: tuple[str, ...] = ()  # options that stand before the start itself; no shell runs a command that begins so
    otherwise: tuple[Launch, ...] = ()  # the same start with the values that other branches of its script would give

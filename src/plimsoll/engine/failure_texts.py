"""The words by which a failure is known, and what each of them means: vLLM's own, torch's, NCCL's, the kernel's and others'.

`needle` is looked for first (it is cheap), `pattern` decides where the needle alone does not. `fragment` is a piece of vLLM's
source, recorded per release in `data/failure_texts.json`: a text of vLLM's without releases would be memory, not evidence.
"""

from __future__ import annotations

from plimsoll.engine.failure_texts_life import LIFE
from plimsoll.engine.failure_texts_memory import MEMORY
from plimsoll.engine.failure_texts_other import OTHER
from plimsoll.engine.failure_words import Role, Text

__all__ = ["CONSEQUENCES", "CONSEQUENCE_WORDS", "LIFE", "MEMORY", "OTHER", "TEXTS", "Role", "Text"]

TEXTS = (*MEMORY, *OTHER, *LIFE)

# Exceptions that only pass on that something else failed.
CONSEQUENCES = frozenset({
    "EngineDeadError", "AsyncEngineDeadError", "MQEngineDeadError", "BrokenPipeError", "ConnectionResetError", "EOFError",
    "CancelledError", "ChildFailedError", "SystemExit", "GeneratorExit", "StopAsyncIteration", "ZMQError", "ActorDiedError",
    "RayActorError", "WorkerCrashedError", "ConnectionRefusedError", "ProcessRaisedException", "ProcessExitedException",
    "ExceptionGroup", "BaseExceptionGroup", "IncompleteReadError", "ClientDisconnect", "WebSocketDisconnect",
})  # fmt: skip
CONSEQUENCE_WORDS = (
    "Engine core initialization failed", "WorkerProc initialization failed", "Worker failed with error",
    "Engine process failed to start", "Background loop", "Engine loop is not running", "EngineCore encountered an issue",
    "died unexpectedly", "Task finished unexpectedly", "cannot schedule new futures", "Executor failed", "cancelled",
    "Engine process (pid", "Event loop is closed", "please check the stack trace above", "Server exited unexpectedly",
    "Server failed to start", "Engine core process failed",
)  # fmt: skip

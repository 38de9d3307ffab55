"""The words of being asked to stop, of the end (which is never the reason), and of what is harmless."""

from __future__ import annotations

from plimsoll.domain.finding import Code
from plimsoll.engine.failure_words import Role, Text

_STOP, _DEATH, _NOISE = Role.STOP, Role.DEATH, Role.NOISE

LIFE: tuple[Text, ...] = (
    # Asked to stop.
    Text("shutdown-triggered", "API server: shutdown triggered", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, any_level=True),
    Text("keyboard-interrupt", "KeyboardInterrupt", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "python", any_level=True),
    Text("sigterm", "SIGTERM", _STOP, Code.OTHER_STOPPED_BY_OPERATOR,
         r"(?i)(?:received|got|caught|handling|by|sent|signal).{0,30}SIGTERM|SIGTERM.{0,20}(?:received|caught)", "python",
         any_level=True),
    Text("sigint", "SIGINT", _STOP, Code.OTHER_STOPPED_BY_OPERATOR,
         r"(?i)(?:received|got|caught).{0,30}SIGINT|SIGINT.{0,20}(?:received|caught)", "python", any_level=True),
    Text("signal-15", "ignal 15", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "python", any_level=True),
    Text("signal-received", "Signal Received: 15", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "python", any_level=True),
    Text("uvicorn-stopped", "Application shutdown complete", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "uvicorn",
         any_level=True),
    Text("http-server-stops", "Shutting down FastAPI HTTP server", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, any_level=True),
    Text("graceful-stop", "Gracefully stopping http server", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, any_level=True),
    Text("ctrl-c", "^C", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, r"^\^C", "terminal", any_level=True),
    Text("script-stops", "topping", _STOP, Code.OTHER_STOPPED_BY_OPERATOR,
         r"(?i)^\W{0,12}stopping (?:the )?(?:old |existing |running |current |previous )?"
         r"(?:vllm|server|container|engine|service)",
         "script", any_level=True),
    Text("systemd-stops", "Stopping vLLM", _STOP, Code.OTHER_STOPPED_BY_OPERATOR, None, "systemd", any_level=True),
    # The end.
    Text("initialization-failed", "Engine core initialization failed", _DEATH),
    Text("engine-failed-to-start", "EngineCore failed to start", _DEATH, any_level=True),
    Text("worker-failed-to-start", "WorkerProc failed to start", _DEATH, any_level=True),
    Text("worker-init-failed", "WorkerProc initialization failed", _DEATH),
    Text("engine-fatal", "EngineCore encountered a fatal error", _DEATH),
    Text("engine-hit", "EngineCore hit an exception", _DEATH),
    Text("worker-exception", "WorkerProc hit an exception", _DEATH),
    Text("engine-dead", "EngineDeadError", _DEATH),
    Text("mq-engine-dead", "MQLLMEngine is already dead", _DEATH),
    Text("background-loop", "Background loop has errored already", _DEATH),
    Text("background-loop-not-running", "Background loop is not running", _DEATH),
    Text("engine-process-failed", "Engine process failed to start", _DEATH),
    Text("engine-loop-dead", "Engine loop is not running", _DEATH),
    Text("fatal-signal", "Got fatal signal from worker processes", _DEATH),
    Text("worker-died", "died unexpectedly", _DEATH),
    Text("worker-died-v0", "died, exit code:", _DEATH, fragment=" died, exit code: "),
    Text("worker-failed", "Worker failed with error", _DEATH),
    Text("output-handler", "output_handler failed", _DEATH),
    Text("engine-died", "Engine process (pid", _DEATH, None, r"\) died"),
    Text("task-unexpected", "Task finished unexpectedly", _DEATH),
    Text("terminate-called", "terminate called", _DEATH, speaker="libc"),
    Text("core-dumped", "(core dumped)", _DEATH, speaker="shell"),
    Text("shell-killed", "Killed", _DEATH, None, r"^(?:.{0,160}: line \d{1,6}:\s{1,8}\d{0,10} ?)?\s{0,8}Killed\b", "shell"),
    Text("sigkill", "SIGKILL", _DEATH, None,
         r"(?i)Signals\.SIGKILL|(?:received|killed by|died .{0,40}|terminated by) (?:signal )?SIGKILL", "python"),
    # Harmless, whatever it says.
    Text("destroy-event", "CUDA warning: ", _NOISE, speaker="torch"),
    Text("destroy-group", "destroy_process_group() was not called", _NOISE, speaker="torch"),
    Text("resource-tracker", "resource_tracker: There appear to be", _NOISE, speaker="python"),
)  # fmt: skip

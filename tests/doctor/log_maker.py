"""Logs as vLLM writes them, made of few words: who says a line, and what."""

from __future__ import annotations

from plimsoll.doctor.rules.log_text import Log
from tests.log_bytes import log_of_bytes

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
    "1.20 GiB is free. Including non-PyTorch memory, this process has 77.85 GiB memory in use. Of the allocated memory "
    "76.00 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated."
)
VERSION = "(APIServer pid=1) INFO 11-15 09:00:00 [api_server.py:1] vLLM API server version 0.25.1"
ARGS = "(APIServer pid=1) INFO 11-15 09:00:00 [utils.py:2] non-default args: {'model': 'm', 'max_model_len': 8192}"
LOADING = "(EngineCore pid=2) INFO 11-15 09:00:01 [gpu_model_runner.py:1] Starting to load model m..."
LOADED = "(EngineCore pid=2) INFO 11-15 09:00:02 [gpu_model_runner.py:1] Model loading took 14.25 GiB memory and 5.1 seconds"
MEASURED = "(EngineCore pid=2) INFO 11-15 09:00:03 [gpu_worker.py:1] Available KV cache memory: 50.13 GiB"
CAPTURING = "(EngineCore pid=2) INFO 11-15 09:00:04 [gpu_model_runner.py:1] Capturing CUDA graph shapes: 10%"
CAPTURED = "(EngineCore pid=2) INFO 11-15 09:00:05 [gpu_model_runner.py:1] Graph capturing finished in 3 secs, took 0.50 GiB"
SERVING = "(APIServer pid=1) INFO:     Application startup complete."
REQUEST = '(APIServer pid=1) INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'
STARTED = [VERSION, ARGS, LOADING, LOADED, MEASURED, CAPTURED, SERVING, REQUEST]
ENGINE_DEAD = "(APIServer pid=1) ERROR 11-15 09:10:00 [async_llm.py:1] EngineDeadError: EngineCore encountered an issue."
NOT_STARTED = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
STEP = "v1/worker/gpu_model_runner.py:execute_model"
FATAL = "(EngineCore pid=2) ERROR 11-15 09:10:00 [core.py:1] EngineCore encountered a fatal error."
STOP = "(APIServer pid=1) INFO 11-15 09:10:00 [launcher.py:1] [shutdown] API server: shutdown triggered"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
KILLER = "[ 8123.4] Out of memory: Killed process 2 (VLLM::EngineCor) total-vm:900kB, anon-rss:800kB, file-rss:0kB"
BUS = "[ 8123.4] NVRM: Xid (PCI:0000:3b:00): 79, pid=2, name=python, GPU has fallen off the bus."
MOON = "RuntimeError: the moon is in the wrong place"


def traceback(*frames: str, error: str = OOM, who: str = "(EngineCore pid=2) ") -> list[str]:
    """A traceback through these places (`file:function` below /opt/vllm), every line with its speaker."""
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        file, _, function = frame.rpartition(":")
        lines += [f'  File "/opt/vllm/{file or "v1/worker/gpu_worker.py"}", line 7, in {function}', "    call()"]
    return [who + line for line in (*lines, error)]


FAILED_START: list[str] = [VERSION, ARGS, LOADING, *traceback("v1/worker/gpu_worker.py:load_model"), NOT_STARTED]


def log(*parts: str | list[str], source: str = "server.log") -> Log:
    """These lines as the reader hands them over."""
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
    return log_of_bytes(source, ("\n".join(lines) + "\n").encode())

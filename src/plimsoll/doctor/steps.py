"""Which step of a server's life failed: from the traceback's functions where there are any, else from how far it had come."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from plimsoll.doctor.tracebacks import Frame
from plimsoll.domain.finding import Code
from plimsoll.engine.frames import COLLECTIVE_FILES, GRAPH_FILES, LOGITS_FILES, MODEL_FILES, MULTIMODAL_FILES, STEP_FRAMES


class Progress(IntEnum):
    """How far a server had come."""

    UNKNOWN = 0
    BEGUN = 1  # its version or its arguments were printed
    LOADING = 2
    LOADED = 3
    MEASURED = 4  # memory was profiled: the cache's size is known
    CAPTURING = 5
    CAPTURED = 6
    SERVING = 7


class Step(NamedTuple):
    """A step, and how sure its naming is."""

    name: str
    code: Code
    confidence: float


CODES = {
    "weights": Code.STARTUP_WEIGHTS_DO_NOT_FIT,
    "profile": Code.STARTUP_PROFILE_RUN,
    "kv-allocation": Code.STARTUP_KV_ALLOCATION,
    "graph-capture": Code.STARTUP_GRAPH_CAPTURE,
    "sampler-warmup": Code.STARTUP_SAMPLER_WARMUP,
    "warm-up": Code.STARTUP_GRAPH_CAPTURE,
    "device": Code.STARTUP_FREE_MEMORY_CHECK,
    "wake-up": Code.RUNTIME_WAKE_UP,
    "lora": Code.RUNTIME_LORA,
    "multimodal": Code.RUNTIME_MULTIMODAL,
    "logits": Code.RUNTIME_LOGITS,
    "collectives": Code.RUNTIME_COLLECTIVES,
    "forward": Code.RUNTIME_FORWARD,
}
_SERVING = frozenset({"execute_model", "_execute_model", "engine_step", "sample_tokens"})
RUNTIME = frozenset({"wake-up", "lora", "multimodal", "logits", "collectives", "forward"})


def step_of_frames(frames: Sequence[Frame]) -> Step | None:
    """The step the traceback passed through; None where it names none."""
    functions = {frame.function for frame in frames if not _is_torchs(frame)}
    for name, members in STEP_FRAMES:
        if name == "forward":
            break
        if name in ("multimodal", "logits"):
            continue  # several may apply: the innermost decides, below
        if functions & set(members):
            if name == "weights" and _serves(functions):
                continue  # a `load_weights` below `execute_model` is no start
            return _refined(name, frames)
    if any(piece in frame.file for frame in frames for piece in GRAPH_FILES):
        return Step("graph-capture", CODES["graph-capture"], 0.85)
    if _is_built(frames) and not _serves(functions):
        return Step("weights", CODES["weights"], 0.8)
    return _while_serving(frames, functions)


def _is_torchs(frame: Frame) -> bool:
    """A function of torch's own that merely bears the name of one of vLLM's."""
    return frame.file.startswith("torch/") or "site-packages/torch" in frame.file


def _is_built(frames: Sequence[Frame]) -> bool:
    return any(frame.function == "__init__" and piece in frame.file for frame in frames for piece in MODEL_FILES)


def _serves(functions: set[str]) -> bool:
    return "load_model" not in functions and not functions.isdisjoint(_SERVING)


def _refined(name: str, frames: Sequence[Frame]) -> Step:
    if name == "warm-up" and any(piece in frame.file for frame in frames for piece in GRAPH_FILES):
        name = "graph-capture"
    if name == "lora" and any(frame.function == "load_model" for frame in frames):
        name = "weights"  # the slots of adapters are made with the model
    if name == "device" and _is_collective(frames):
        return Step("collectives", Code.RUNTIME_COLLECTIVES, 0.8)
    return Step(name, CODES[name], 0.6 if name == "warm-up" else 0.95)


def _is_collective(frames: Sequence[Frame]) -> bool:
    return any(piece in frame.file for frame in frames[-6:] for piece in COLLECTIVE_FILES)


def _while_serving(frames: Sequence[Frame], functions: set[str]) -> Step | None:
    members = dict(STEP_FRAMES)
    logits, multimodal, forward = (set(members[name]) for name in ("logits", "multimodal", "forward"))
    if not functions & (logits | multimodal | forward) and not any("vllm" in frame.file for frame in frames):
        return None
    for frame in reversed(frames):  # the innermost call that says what ran
        if any(piece in frame.file for piece in COLLECTIVE_FILES):
            return Step("collectives", CODES["collectives"], 0.8)
        if any(piece in frame.file for piece in LOGITS_FILES) or (frame.function in logits and "vllm" in frame.file):
            return Step("logits", CODES["logits"], 0.9)
        if frame.function in multimodal or any(piece in frame.file for piece in MULTIMODAL_FILES):
            return Step("multimodal", CODES["multimodal"], 0.9)
    if functions & forward:
        return Step("forward", CODES["forward"], 0.9)
    return None


def hinted_by_torch(frames: Sequence[Frame]) -> Step | None:
    """Parameters are made under a device context, and little else is: a traceback cut down to torch's own frames."""
    if any(frame.function == "__torch_function__" and frame.file.endswith("_device.py") for frame in frames):
        return Step("weights", CODES["weights"], 0.6)
    return None


def step_of_progress(progress: Progress, *, frames_seen: bool) -> Step | None:
    """The step that follows what was last reached; a guess, and marked as one."""
    name = {
        Progress.LOADING: "weights",
        Progress.LOADED: "profile",
        Progress.MEASURED: "kv-allocation",
        Progress.CAPTURING: "graph-capture",
        Progress.CAPTURED: "sampler-warmup",
        Progress.SERVING: "forward",
    }.get(progress)
    if name is None:
        return None
    return Step(name, CODES[name], 0.5 if frames_seen else 0.6)

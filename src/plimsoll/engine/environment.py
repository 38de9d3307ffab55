"""The environment variables vLLM reads, release by release."""

from __future__ import annotations

from typing import Any, NamedTuple

from plimsoll.engine import tables
from plimsoll.engine.flags import holds_in, release_after

# Not vLLM's own, but read by torch, CUDA, NCCL or the model hub in the same process.
_NEIGHBOURS = ("CUDA_", "PYTORCH_", "TORCH", "NCCL_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TRITON_", "ROCR_", "HIP_",
               "OMP_", "RAY_", "GLOO_", "UCX_", "PROMETHEUS_MULTIPROC_DIR", "NVIDIA_", "LD_PRELOAD", "TOKENIZERS_")  # fmt: skip


class VariableHistory(NamedTuple):
    """When releases named a variable."""

    first: str
    last: str

    def gone_in(self) -> str | None:
        """The release that no longer names it; None if the newest still does."""
        return release_after(self.last)


def matters(name: str) -> bool:
    """Whether a variable can change what vLLM does."""
    return name.startswith(("VLLM_", *_NEIGHBOURS))


def variable_history(name: str) -> VariableHistory | None:
    """The releases whose source names the variable; None if none does."""
    stretches = _stretches(name)
    return VariableHistory(stretches[0]["from"], stretches[-1]["to"]) if stretches else None


def default_in(name: str, release: str) -> object:
    """The default that release declares; None if it declares none."""
    return next((plain.get("default") for plain in _stretches(name) if holds_in(plain, release)), None)


def is_read_in(name: str, release: str) -> bool:
    """Whether that release's source names the variable."""
    return any(holds_in(plain, release) for plain in _stretches(name))


def _stretches(name: str) -> list[dict[str, Any]]:
    return tables.rows("environment").get(name, [])

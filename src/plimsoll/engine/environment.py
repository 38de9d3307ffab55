"""The environment variables vLLM reads, release by release."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.engine import tables
from plimsoll.engine.flags import is_before, release_after

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
    stretches = tables.rows("environment").get(name)
    if not stretches:
        return None
    return VariableHistory(stretches[0]["from"], stretches[-1]["to"])


def default_in(name: str, release: str) -> object:
    """The default that release declares; None if it declares none."""
    for plain in tables.rows("environment").get(name, ()):
        if not is_before(release, plain["from"]) and not is_before(plain["to"], release):
            default: object = plain.get("default")
            return default
    return None


def is_read_in(name: str, release: str) -> bool:
    """Whether that release's source names the variable."""
    return any(
        not is_before(release, plain["from"]) and not is_before(plain["to"], release)
        for plain in tables.rows("environment").get(name, ())
    )

"""What one recorded failure is made of, and the words in which torch and NCCL say that memory is short."""

from __future__ import annotations

from typing import NamedTuple

from lab.engine import failure_actions as acts
from lab.engine.failure_actions import Action

HINT = (
    " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
FULL = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.11 GiB of which 61.19 MiB is free. "
    "Including non-PyTorch memory, this process has 79.04 GiB memory in use. Of the allocated memory 77.31 GiB is allocated "
    "by PyTorch, with 211.00 MiB allocated in private pools (e.g., CUDA Graphs), and 388.27 MiB is reserved by PyTorch but "
    "unallocated." + HINT
)
# Before the graphs are captured there are none to name.
FULL_AT_START = FULL.replace(", with 211.00 MiB allocated in private pools (e.g., CUDA Graphs)", "")
# The KV cache is asked for in one piece, while much is still free: the flag named more than there is.
FULL_FOR_KV = (
    "CUDA out of memory. Tried to allocate 70.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 62.88 GiB is free. "
    "Including non-PyTorch memory, this process has 16.02 GiB memory in use. Of the allocated memory 15.08 GiB is allocated "
    "by PyTorch, and 94.11 MiB is reserved by PyTorch but unallocated." + HINT
)
NEIGHBOUR = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 175.50 MiB is free. "
    "Process 41873 has 8.31 GiB memory in use. Process 42210 has 70.62 GiB memory in use. Of the allocated memory 69.10 GiB "
    "is allocated by PyTorch, and 301.14 MiB is reserved by PyTorch but unallocated." + HINT
)
SPLIT = (
    "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 79.11 GiB of which 402.12 MiB is free. "
    "Including non-PyTorch memory, this process has 78.71 GiB memory in use. Of the allocated memory 70.44 GiB is allocated "
    "by PyTorch, and 7.02 GiB is reserved by PyTorch but unallocated." + HINT
)
BARE = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel errors might "
    "be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider "
    "passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
NVML = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1090, please report a bug to '
    "PyTorch. "
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.27.7\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 "
    "'out of memory'"
)
ILLEGAL = BARE.replace("out of memory", "an illegal memory access was encountered").replace(
    "cudaErrorMemoryAllocation", "cudaErrorIllegalAddress"
)


MEMORY, NOT_MEMORY, CANNOT_SAY = True, False, None  # whether it is a memory failure


class Fault(NamedTuple):
    """The function that fails, the function it must be called under, and the error it raises."""

    at: str
    within: str
    text: str = FULL.format(tried="2.50 GiB")
    kind: str = "oom"
    rank: int | None = None


class Case(NamedTuple):
    """One server; `expect` are the codes that are right as the first finding, none where there is none to give."""

    name: str
    expect: tuple[str, ...]
    memory: bool | None
    act: Action = acts.fail_to_start
    flags: str = ""
    env: dict[str, str] = {}  # noqa: RUF012 - never changed
    model: str = "tiny"
    fault: Fault | None = None
    under: str = ""  # what the server runs under: see record_failures.wrapped
    why: str = ""


NO_KV = {"VLLM_CPU_KVCACHE_SPACE": ""}  # an empty value takes the variable away
COMPILED = "--no-enforce-eager"
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # two workers on two cores
UNI = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # one GPU's way: the worker lives in the engine core
LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply"

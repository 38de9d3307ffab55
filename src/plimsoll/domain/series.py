"""One figure over time, with the labels that say whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.domain.units import MIB


class Series(NamedTuple):
    """The values of one metric of one target; times in seconds, rising; a value may be NaN where the target said so."""

    name: str  # as the page, the server or the log names it
    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]  # in the figure's own unit: bytes, ratios from 0 to 1, totals of counters
    figure: str = ""  # our name: one of engine/metrics.py, of OUTSIDE, or of a log's periodic lines; "" where it has none


class Outside(NamedTuple):
    """A metric that vLLM does not export itself: our name for it, and what one of its units is in ours."""

    figure: str
    factor: float = 1.0


# By the names that the exporters use: DCGM's, two of nvidia-smi's, cAdvisor's, and plimsoll's own inside vLLM.
OUTSIDE: Mapping[str, Outside] = {
    "DCGM_FI_DEV_FB_USED": Outside("gpu_used", MIB),
    "DCGM_FI_DEV_FB_FREE": Outside("gpu_free", MIB),
    "DCGM_FI_DEV_FB_TOTAL": Outside("gpu_total", MIB),
    "nvidia_gpu_memory_used_bytes": Outside("gpu_used"),
    "nvidia_gpu_memory_total_bytes": Outside("gpu_total"),
    "nvidia_smi_memory_used_bytes": Outside("gpu_used"),
    "nvidia_smi_memory_total_bytes": Outside("gpu_total"),
    "process_resident_memory_bytes": Outside("host_resident"),
    "process_start_time_seconds": Outside("started_at"),
    "container_memory_rss": Outside("container_resident"),
    "container_memory_working_set_bytes": Outside("container_working_set"),
    "container_spec_memory_limit_bytes": Outside("container_limit"),
    "plimsoll_torch_allocated_bytes": Outside("torch_allocated"),
    "plimsoll_torch_reserved_bytes": Outside("torch_reserved"),
    "plimsoll_torch_inactive_split_bytes": Outside("torch_inactive_split"),
    "plimsoll_torch_num_alloc_retries_total": Outside("torch_alloc_retries"),
    "plimsoll_torch_num_ooms_total": Outside("torch_ooms"),
}

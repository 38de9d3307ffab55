"""The bucket edges of vLLM's histograms, release by release."""

from __future__ import annotations

from plimsoll.engine.flags import is_before
from plimsoll.standin.figures import HISTOGRAMS

_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_STEP = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
# The sizes of which graphs were captured unless told otherwise: what steps were sorted by at first.
_CAPTURE_SIZES = (1.0, 2.0, 4.0, *(float(size) for size in range(8, 513, 8)))

_NEWEST: dict[str, tuple[float, ...]] = {
    "ttft": _FIRST_TOKEN,
    **dict.fromkeys(("inter_token", "tpot"), _BETWEEN_TOKENS),
    **dict.fromkeys(("e2e", "queue", "inference", "prefill", "decode"), _LATENCY),
    "params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "request_preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    "step_tokens": _STEP,
}
# What it was before a release, the oldest first.
_BEFORE: tuple[tuple[str, dict[str, tuple[float, ...]]], ...] = (
    (
        "0.8.4",
        {
            "ttft": _FIRST_TOKEN[:16],
            **dict.fromkeys(("inter_token", "tpot"), _BETWEEN_TOKENS[:13]),
            **dict.fromkeys(("e2e", "queue", "inference", "prefill", "decode"), _LATENCY[:15]),
        },
    ),
    ("0.8.5", {"step_tokens": _CAPTURE_SIZES}),
)


def edges_of(release: str, max_model_len: int) -> dict[str, tuple[float, ...]]:
    """The upper bounds, without the infinite one, of each histogram as a release sets them; lengths go up to the context."""
    edges = dict(_NEWEST)
    for end, older in _BEFORE:
        if is_before(release, end):
            edges |= older
    lengths = _one_two_five(max_model_len)
    return {name: edges.get(name, lengths) for name in HISTOGRAMS}


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on, as far as `most` goes."""
    found: list[float] = []
    power = 1
    while power <= most:
        found += [float(digit * power) for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return tuple(found)

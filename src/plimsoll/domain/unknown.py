"""A figure that could not be had, and why: neither true nor false, and never a number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """A figure that could not be had."""

    reason: str

    def __bool__(self) -> bool:
        raise TypeError(f"unknown ({self.reason}) is neither true nor false; test with isinstance")


Reading = float | Unknown

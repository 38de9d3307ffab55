"""Counts faults of our own code, so that none fails a user's request; logs the first one of each place."""

from __future__ import annotations

import logging

# vLLM sets up the logger named "vllm" alone; a child of it is printed in vLLM's own format.
LOG = logging.getLogger("vllm.plimsoll")


class _Noting:
    """A `with` block whose exceptions are noted and not raised. No generator, because it is in vLLM's step loop."""

    __slots__ = ("_faults", "_where")

    def __init__(self, faults: FaultCounts, where: str) -> None:
        self._faults, self._where = faults, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._faults.note(self._where, error)
        return True


class FaultCounts:
    """The number of our own faults, by place."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def noting(self, where: str) -> _Noting:
        """Returns a `with` block that notes its exception and lets the code after it go on."""
        return _Noting(self, where)

    def note(self, where: str, error: BaseException) -> None:
        """Counts an exception; logs the first of each place by its kind, without its message, which may hold a user's text."""
        trace, at = error.__traceback__, ""
        while trace is not None:
            at = f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
            trace = trace.tb_next
        self.say(where, f"{where} failed ({type(error).__name__}{at}); this part is skipped and the server goes on")

    def say(self, where: str, message: str) -> None:
        """Counts a fault that is no exception; logs the first of each place."""
        seen = self.counts.get(where, 0)
        self.counts[where] = seen + 1
        if seen == 0:
            LOG.warning("plimsoll: %s", message)


FAULTS = FaultCounts()  # one for each process

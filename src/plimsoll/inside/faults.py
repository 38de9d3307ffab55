"""A fault of ours never fails a user's request: it is counted, and logged the first time it happens in a place."""

from __future__ import annotations

import logging

# vLLM sets up the logger named "vllm" alone; a child of it is printed in vLLM's own format.
LOG = logging.getLogger("vllm.plimsoll")


class Faults:
    """How often something of ours went wrong, by the place where it did."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Count one; the first of each place is logged with its kind. The message stays short: it may hold a user's text."""
        seen = self.counts.get(where, 0)
        self.counts[where] = seen + 1
        if seen == 0:
            at = _last_own_line(error)
            LOG.warning("plimsoll: %s failed (%s%s); it stands aside and the server goes on", where, type(error).__name__, at)

    def say(self, where: str, message: str) -> None:
        """Count one that is no exception; the first of each place is logged."""
        seen = self.counts.get(where, 0)
        self.counts[where] = seen + 1
        if seen == 0:
            LOG.warning("plimsoll: %s", message)


def _last_own_line(error: BaseException) -> str:
    """Where it happened, as ` at gate.py:12`."""
    trace = error.__traceback__
    at = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        at = f" at {name.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return at


FAULTS = Faults()  # one a process

"""Notices that vLLM was told to end, so that it is not called ready while it finishes what it has.

On SIGTERM with `--shutdown-timeout` vLLM answers /health with 200 and every new request with 500 until its engine is done.
The first thing it does is to call its engine client's `shutdown`; that call, of this one object, is listened to.
"""

from __future__ import annotations

import functools
from typing import Any

from plimsoll.inside.core import Core

MARK = "plimsoll_notices"


def notice_shutdown(client: Any, core: Core) -> None:
    """Stand before the client's `shutdown`, once; what it does and returns stays vLLM's own."""
    own = getattr(client, "shutdown", None)
    if own is None or hasattr(own, MARK):
        return

    @functools.wraps(own)
    def shutdown(*args: Any, **kwargs: Any) -> Any:
        core.is_stopping = True
        return own(*args, **kwargs)

    setattr(shutdown, MARK, True)
    client.shutdown = shutdown

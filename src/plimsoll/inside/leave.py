"""usage: python3 -m plimsoll.inside.leave SECONDS [PORT]

Takes the server on this machine out of service before it is stopped, as Kubernetes' preStop or systemd's ExecStop: its gate
says that it is not ready, goes on admitting until the balancer has stopped sending, and then refuses. Returns when nothing is
in flight, or after SECONDS. The token is the server's own, from PLIMSOLL_TOKEN or PLIMSOLL_TOKEN_FILE.

Exit code 0: it left, and is idle or out of time; 1: its gate could not be asked. The stop should go on either way.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from plimsoll.inside.admission import BOUND_S
from plimsoll.inside.settings import InsideSettings

LOOK_EVERY_S = 0.5
ANSWER_WITHIN_S = 5.0
LEASE_S = 1800.0  # longer than any stop; if nobody stops the server after all, it serves again


def main(words: list[str], environ: Mapping[str, str]) -> int:
    try:
        within_s, port = float(words[0]), int(words[1]) if len(words) > 1 else 8000
    except (IndexError, ValueError):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(leave(f"http://127.0.0.1:{port}/plimsoll", InsideSettings(environ).token, within_s))
    except (OSError, ValueError) as error:  # refused, silent, a status of 400 and above, no JSON
        print(f"the gate could not be asked: {error}", file=sys.stderr)
        return 1
    return 0


def leave(url: str, token: str, within_s: float) -> str:
    """Begins the drain and waits until the server is idle or the time is over; returns a sentence that says which."""
    end = time.monotonic() + within_s
    _ask(f"{url}/drain", token, {"lease_s": LEASE_S, "bound_s": min(BOUND_S, within_s / 2)})
    while True:
        drain = _ask(f"{url}/state", token, None).get("drain")
        state = drain if isinstance(drain, dict) else {}
        if state.get("phase") == "refusing" and state.get("idle") is True:
            return "it refuses new work and is idle"
        left_s = end - time.monotonic()
        if left_s <= 0:
            return f"it is {state.get('phase')} with {state.get('in_flight')} in flight; the time is over"
        time.sleep(min(LOOK_EVERY_S, left_s))


def _ask(url: str, token: str, wish: Mapping[str, float] | None) -> dict[str, Any]:
    body = None if wish is None else json.dumps(wish).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310  always http://127.0.0.1
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through the environment's proxy
    with opener.open(request, timeout=ANSWER_WITHIN_S) as answer:
        content = json.loads(answer.read())
    return content if isinstance(content, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))

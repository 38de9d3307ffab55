"""Holds GPU memory beside a server, as told on its input: `hold MIB`, `leave MIB` (take all but this), `free`; answers in JSON.

Touches the device only at the first command, so that one which waits costs nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

MIB = 1 << 20


def main() -> None:
    """Obey until the input ends."""
    torch = importlib.import_module("torch")
    held: list[Any] = []
    for line in sys.stdin:
        verb, _, amount = line.strip().partition(" ")
        wrong = None
        try:
            free = torch.cuda.mem_get_info()[0]
            if verb == "free":
                held.clear()
                torch.cuda.empty_cache()
            elif (size := int(amount) * MIB if verb == "hold" else free - int(amount) * MIB) > 0:
                held.append(torch.empty(size, dtype=torch.int8, device="cuda"))
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            wrong = str(error)[:300]
        free, total = torch.cuda.mem_get_info()
        answer = {"did": line.strip(), "pid": os.getpid(), "held_mib": sum(t.numel() for t in held) // MIB}
        print(json.dumps(answer | {"free_mib": free // MIB, "total_mib": total // MIB, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()

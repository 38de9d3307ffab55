"""The lab's server makes way where the kernel allows it."""

from __future__ import annotations

import os
import subprocess
import sys

from lab.engine.server import NICE, let_others_run


def test_a_process_makes_way_and_one_that_is_gone_is_no_error() -> None:
    """The kernel refuses a weight to the first session, and a process may have ended: neither stops a start."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    let_others_run(child.pid)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == NICE
    child.communicate()
    let_others_run(child.pid)

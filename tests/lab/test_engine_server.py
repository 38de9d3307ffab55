"""The lab's server makes way where the kernel allows it, and knows which of its processes live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab.engine.server import NICE, Child, let_others_run, living


def test_a_process_makes_way_and_one_that_is_gone_is_no_error() -> None:
    """The kernel refuses a weight to the first session, and a process may have ended: neither stops a start."""
    # In a session of its own: the weight is the session's, and would stay with all that is tested after this.
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    let_others_run(child.pid)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == NICE
    child.communicate()
    let_others_run(child.pid)


def test_only_what_lives_in_the_session_counts(tmp_path: Path) -> None:
    """A zombie, one whose memory is gone already, one of another session and one that is gone altogether are none of ours."""
    stat = "{pid} (a (b) c) {state} 1 7 {session} 0 -1"
    cases = {
        11: ("S", 7, b"VLLM::EngineCore\0\0"),
        12: ("Z", 7, b"vllm\0"),
        13: ("X", 7, b"vllm\0"),
        14: ("D", 7, b""),
        15: ("S", 8, b"vllm\0serve\0"),
        16: ("R", 7, b"vllm\0serve\0"),
    }
    for pid, (state, session, title) in cases.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat.format(pid=pid, state=state, session=session))
        (tmp_path / str(pid) / "cmdline").write_bytes(title)
    found = [living(tmp_path / str(pid), 7) for pid in (*cases, 17)]
    assert [one for one in found if one] == [Child(11, "VLLM::EngineCore"), Child(16, "vllm serve")]
